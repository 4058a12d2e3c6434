"""After an outage each completion has its own reward; where it has that of another place, the audit says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.tuning.rewards.failures import OUTAGES
from tests.oracle.support import JOURNAL, mutated

pytestmark = pytest.mark.slow

PROMPTS, PLACES, COMPLETIONS = 12, 16, 2
# The second round has eight places of the first pass and eight of the second; half of its calls come before the outage.
GONE = PLACES * COMPLETIONS * 3 // 2
RECIPE = f"""
base: {{source: "random:tiny"}}
data: {{source: sums.jsonl, heldout_fraction: 0, sft_fraction: 0}}
sft: null
rl:
  rounds: 2
  rollout: {{prompts: {PLACES}, completions: {COMPLETIONS}, max_tokens: 8}}
  score: {{rewards: {{own: {{function: "service:weighed"}}}}, workers: 1}}
  update: {{prompts_per_step: {PLACES}}}
evaluate: null
export: null
"""
SERVICE = f"""
from pathlib import Path

HERE = Path(__file__).parent


def weighed(prompts, completions, **_):
    calls = HERE / "calls"
    with calls.open("a") as f:
        f.write("." * len(completions))
    if (HERE / "down").exists() and calls.stat().st_size > {GONE}:
        raise ConnectionRefusedError("the service is gone")
    # A number of its own for each text.
    return [sum((i + 1) * ord(c) for i, c in enumerate(text)) % 97 / 97 for text in completions]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are started; they share a store."""
    made = tmp_path_factory.mktemp("journal")
    records = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(PROMPTS)]
    (made / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (made / "recipe.yaml").write_text(RECIPE)
    (made / "service.py").write_text(SERVICE)
    return made


def interrupted(rlhf: Any, folder: Path, name: str, **options: Any) -> None:
    """A run whose reward is gone in the middle of its second round, and the same command when it is back."""
    command = ["run", "recipe.yaml", "--no-prefect", "--name", name, "--set", f"store={folder / 'store'}"]
    (folder / "calls").unlink(missing_ok=True)
    (folder / "down").touch()
    assert "the service is gone" in rlhf(*command, cwd=folder, code=1, **options).stderr
    (folder / "down").unlink()
    again = rlhf(*command, cwd=folder, **options).stdout
    assert f"reward own: {GONE - PLACES * COMPLETIONS} finished scores are there" in again


def audited(rlhf: Any, folder: Path, name: str, **options: Any) -> str:
    """What `rlhf audit` prints of the run."""
    return str(rlhf("audit", name, "--store", folder / "store", cwd=folder, **options).stdout)


def test_each_completion_has_its_own_reward_after_an_outage(rlhf: Any, folder: Path) -> None:
    interrupted(rlhf, folder, "right")
    # No call is made twice but those that met the outage.
    assert (folder / "calls").stat().st_size == 2 * PLACES * COMPLETIONS + OUTAGES
    told = audited(rlhf, folder, "right")
    assert "BROKEN" not in told and "holds    rewards" in told


def test_rewards_of_another_place_are_found_with_their_round(rlhf: Any, folder: Path, tmp_path: Path) -> None:
    env = mutated(tmp_path, JOURNAL)
    interrupted(rlhf, folder, "wrong", env=env)
    told = audited(rlhf, folder, "wrong", code=1)
    assert "laws are broken: rewards" in told
    cases = [line for line in told.splitlines() if "in the table and" in line]
    assert cases and all(line.strip().startswith("round-001.rollout, place ") for line in cases)
