"""A round of RL on both sides, from the same tables."""

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.update import stage as update
from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.rows import CompletionRow, ScoreRow
from tests.oracle.agreement import assert_same
from tests.oracle.episodes import Played, episodes_of
from tests.oracle.plain import model, rl, tables
from tests.oracle.product import DTYPE, Product
from tests.oracle.tables import Drawn, round_of

Config = dict[str, Any]

COMMON: dict[str, Any] = {
    "compute": {"dtype": DTYPE}, "optimizer": {"learning_rate": 0.01}, "prompts_per_step": 2, "temperature": 0.8,
    "max_mismatch_kl": 1e9, "off_policy": True, "store_state": True,
}  # fmt: skip


def check_round(
    label: str, product: Product, config: dict[str, Any], drawn: Sequence[Drawn], seed: int = 0
) -> rl.Round:
    """One round from the base, of the stage and of the oracle; the oracle's."""
    return checked(label, *update_once(product, config, drawn, seed))


def check_episodes(label: str, product: Product, config: Config, played: Sequence[Played], seed: int = 0) -> rl.Round:
    """As `check_round`, of trajectories of several turns."""
    return checked(label, *update_tables(product, config, *episodes_of(played, product.base.digest, seed)))


def checked(label: str, made: Artifact, now: rl.Round) -> rl.Round:
    """The oracle's round, run, once the stage has been found to arrive where it does."""
    start = now.policy.model.dense
    now.run()
    found = model.weights_of(made.local("state/model/"))
    assert_same(label, start, now.policy.model.dense, found)
    assert_fates(made, now.completions)
    return now


def assert_fates(made: Artifact, completions: Sequence[rl.Completion]) -> None:
    """That the update tells of each completion once, and what became of it."""
    rows = tables.read(made.local("fates/"))
    found = {tables.name(row): row for row in rows}
    assert len(found) == len(rows)
    assert {n: row["fate"] for n, row in found.items()} == {(c.group, c.number): c.fate for c in completions}
    for c in completions:
        advantage = found[c.group, c.number]["advantage"]
        if advantage is not None and len(c.advantages):
            assert (c.advantages == c.advantages[0]).all()
            assert advantage == pytest.approx(float(c.advantages[0]), rel=1e-5, abs=1e-6)


def update_once(
    product: Product, config: Config, drawn: Sequence[Drawn], seed: int, policy: Artifact | None = None
) -> tuple[Artifact, rl.Round]:
    """The stage's round over `policy`, the base unless given, and the oracle's before it has run."""
    policy = policy or product.base
    greedy: list[ScoreRow] = []
    if update.Config.model_validate(COMMON | config).needs_greedy:
        best = [Drawn(p, p, 0, 3, 0.1 * p) for p in sorted({d.place for d in drawn})]
        greedy = round_of(best, "", seed)[1]
    return update_tables(product, config, *round_of(drawn, policy.digest, seed), (), policy, greedy)


def update_tables(
    product: Product,
    config: Config,
    rollouts: Sequence[CompletionRow],
    scores: Sequence[ScoreRow],
    turns: Sequence[TurnRow],
    policy: Artifact | None = None,
    greedy: Sequence[ScoreRow] = (),
) -> tuple[Artifact, rl.Round]:
    """The stage's round from tables, and the oracle's before it has run."""
    policy = policy or product.base
    inputs = {"rollouts": product.rollouts(rollouts, turns), "scores": product.scores(scores)}
    full = update.Config.model_validate(COMMON | config)
    shared = {"policy": policy, "reference": product.other, "tokenizer": product.base}
    if full.needs_critic:
        shared["reward"] = product.reward
    if full.needs_greedy:
        shared["greedy_scores"] = product.scores(greedy)
    made, _, settings = product.run(update, COMMON | config, inputs | shared)
    read = {n: tables.read(inputs[n].local(f"{n}/")) for n in ("rollouts", "scores")}
    of_turns = tables.read(inputs["rollouts"].local("turns/")) if turns else []
    rows = tables.episodes(read["rollouts"], read["scores"], of_turns)
    now = rl.Round(
        settings,
        [rl.Completion.of(row) for row in rows],
        rl.Learner.of(model.load(product.base.local("model/")), settings["optimizer"]),
        reference=model.load(product.other.local("model/")) if full.needs_reference else None,
    )
    now.coefficients.entropy = settings["entropy_coef"]
    now.coefficients.bonus = settings["entropy_target"] is None
    if full.needs_critic:
        critic = model.load(product.reward.local("model/"))
        now.critic = rl.Learner.of(critic, settings["critic"]["optimizer"])
    if full.needs_greedy:
        now.greedy = {r["place"]: r["total"] for r in tables.read(shared["greedy_scores"].local("scores/"))}
    return made, now
