"""Judges of a user's own, in a module that a process imports fast."""


def flaky(prompts, completions, *, answer, failing="", **_):
    """Right where the answer is even; fails on some answers, and does not apply to others."""
    if answer[0] in failing.split(","):
        raise KeyError(answer[0])
    return [None if answer[0] == "0" else float(int(answer[0]) % 2 == 0)]
