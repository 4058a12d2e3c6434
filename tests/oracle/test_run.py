"""A whole run from its recipe: the oracle walks through the store and arrives at every policy of it."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.stages.store.artifacts import Artifact, Store
from tests.oracle.agreement import assert_same
from tests.oracle.plain import fit, model, order, refills, rl, tables
from tests.oracle.plain.model import Model
from tests.oracle.rounds import assert_fates

pytestmark = pytest.mark.slow

RECIPE = """
base: {source: "random:tiny"}
data:
  sources: [{source: addition, weight: 0.15}]
  system_prompt: null
  heldout_fraction: 0.1
  sft_fraction: 0.8
sft: {examples_per_step: 32, optimizer: {learning_rate: 0.003}, compute: {dtype: float64}}
reward: {examples_per_step: 64, optimizer: {learning_rate: 0.001}, compute: {dtype: float64}}
rl:
  rounds: 3
  staleness: 1
  checkpoint_every: 1
  refills: 1
  rollout: {prompts: 12, completions: 3, max_tokens: 5, temperature: 1.2}
  score:
    rewards:
      digits: {function: matches, weight: 0.5, arguments: {pattern: "[0-9]+"}}
      model: {function: reward_model, weight: 0.2, squash: sigmoid}
  update:
    algorithm: rloo
    kl_coef: 0.02
    prompts_per_step: 5
    epochs: 2
    short_of_groups: train
    max_mismatch_kl: 100.0
    optimizer: {learning_rate: 0.001, weight_decay: 0.01, schedule: linear, decay_steps: 40}
    compute: {dtype: float64}
evaluate: null
export: null
"""


class Run:
    """A finished run's artifacts by the names of their nodes."""

    def __init__(self, store: Path, record: dict[str, Any]):
        self._store, self._nodes = Store(str(store)), record["nodes"]

    def __getitem__(self, node: str) -> Artifact:
        entry = self._nodes[node]
        found = self._store.get(entry["stage"], entry["key"])
        assert found is not None
        return found

    def named(self, start: str, end: str) -> Iterator[Artifact]:
        """The artifacts of all rounds whose nodes are called so."""
        return (self[name] for name in sorted(self._nodes) if name.startswith(start) and name.endswith(end))

    def table(self, node: str, part: str) -> list[tables.Row]:
        """A table of an artifact."""
        return tables.read(self[node].local(f"{part}/"))


@pytest.fixture(scope="module")
def run(rlhf: Any, record: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text(RECIPE)
    rlhf("run", folder / "recipe.yaml", "--no-prefect", "--name", "whole", "--set", f"store={folder / 'store'}")
    return Run(folder / "store", record(folder / "store", "whole"))


def test_supervised(run: Run) -> None:
    made = run["sft"]
    policy = model.load(run["base"].local("model/"))
    start = policy.dense
    fit.sft(made.manifest["config"], policy, run.table("prepare", "sft"), made.manifest["seed"])
    assert_same("sft of the run", start, policy.dense, model.weights_of(made.local("model/")))


def test_reward_model(run: Run) -> None:
    made = run["reward"]
    scorer = model.load(run["base"].local("model/"), fresh_head=True)
    start, held = scorer.dense, {row["id"] for row in run.table("reward", "heldout")}
    rows = [row for row in run.table("prepare", "preference") if row["id"] not in held]
    fit.reward(made.manifest["config"], scorer, rows, made.manifest["seed"])
    assert_same("reward model of the run", start, scorer.dense, model.weights_of(made.local("model/")))


def test_passes_over_the_prompts(run: Run) -> None:
    prompts = [row["id"] for row in run.table("prepare", "prompts")]
    drawn: list[str] = []
    for number, made in enumerate(run.named("round-", ".rollout")):
        rows, config = tables.read(made.local("rollouts/")), made.manifest["config"]
        places = order.prompts_of_round(number, config["prompts"], len(prompts), config["order_seed"])
        names = {row["place"]: row["prompt_id"] for row in rows}
        assert names == dict(enumerate(prompts[i] for i in places))
        counts = Counter(row["place"] for row in rows)
        assert set(counts.values()) == {config["completions"]}
        drawn += names.values()
    # Each pass has every prompt once (R22).
    counts = Counter(drawn)
    assert max(counts.values()) - min(counts.get(p, 0) for p in prompts) <= 1
    held = {tuple(row["prompt_ids"]) for row in run.table("prepare", "heldout")}
    assert not held & {tuple(row["prompt_ids"]) for row in run.table("prepare", "prompts")}


def test_rounds(run: Run) -> None:
    """Refills, stale rollouts and moments go into every one of them."""
    policy: Model = model.load(run["sft"].local("model/"))
    reference = model.load(run["sft"].local("model/"))
    learner = None
    for number in range(3):
        at = f"round-{number:03d}"
        made, start = run[f"{at}.update"], policy.dense
        settings = made.manifest["config"]
        rows = tables.joined(run.table(f"{at}.rollout", "rollouts"), run.table(f"{at}.score", "scores"))
        wanted = len({row["place"] for row in rows})
        rows += tables.joined(run.table(f"{at}.refill-1", "rollouts"), run.table(f"{at}.refill-1-score", "scores"))
        completions = [rl.Completion.of(row) for row in rows]
        counts = refills.choose(completions, wanted, settings["truncated"])
        metrics = made.manifest["metrics"]
        assert {name: metrics[name] for name in counts} == counts
        # Moments go on; the first round's are new.
        learner = learner or rl.Learner.of(policy, settings["optimizer"])
        rl.Round(settings, completions, learner, reference).run()
        assert_same(f"{at} of the run", start, policy.dense, model.weights_of(made.local("state/model/")))
        assert_fates(made, completions)
        assert json.loads(made.local("policy.json").read_text())["round"] == number
