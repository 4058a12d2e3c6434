"""The groups of a round with refills."""

from collections.abc import Sequence

from tests.oracle.plain import advantages
from tests.oracle.plain.rl import Completion


def choose(completions: Sequence[Completion], wanted: int, truncated: str = "keep") -> dict[str, int]:
    """Of a round with refills the first `wanted` groups that carry a signal; counts of all prompts by fate.

    Refills are sampled before any KL in the reward is known: totals alone decide. With `truncated` mask those of
    completions that were cut off are in no statistic, so a group that differs by them alone has no signal (R24).
    """
    members: dict[int, list[Completion]] = {}
    for c in completions:
        members.setdefault(c.group, []).append(c)
    masked = truncated == "mask"
    totals = {
        g: [c.total for c in own if c.total is not None and not (masked and c.truncated)] for g, own in members.items()
    }
    good = [g for g, own in totals.items() if not advantages.tied(own)]
    for c in completions:
        if c.group not in good[:wanted]:
            c.fate, c.counts = ("failed" if c.total is None else "spare"), False
    return {
        "prompts_sampled": len(members),
        "prompts_without_signal": len(members) - len(good),
        "prompts_to_spare": len(good) - len(good[:wanted]),
    }
