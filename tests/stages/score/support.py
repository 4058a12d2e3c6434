"""What tests of scores share: a context to score in, and the table that came of it."""

from rlhf.stages.score.settings import Config, Reward
from rlhf.tuning.rows import ScoreRow, read_table
from tests.stages import support

TEXTS = ["4", "5", "4 ", "boom", "4", "44"]
"""Of the completions, three a prompt."""


def context(folder, rollouts, **settings):
    rewards = {
        "exact": Reward(function="exact_match", weight=1.0),
        "shares": Reward(function="tests.stages.score.functions:shares", weight=0.3),
    }
    config = Config(**{"rewards": rewards, "shard_completions": 3, "workers": 1, **settings})
    log = []
    given = {"inputs": {"rollouts": rollouts}, "log": log.append}
    return support.context(config, folder / "out", folder / "work", **given), log


def table(ctx):
    (path,) = (ctx.out / "scores").iterdir()
    return path, read_table([path], ScoreRow)
