"""Reward functions of tests, in a module that their processes import at once."""

from pathlib import Path


def shares(prompts, completions, **_):
    """A value that has no exact form in 32 bits; fails on one text."""
    if completions[0] == "boom":
        raise KeyError("boom")
    return [len(c) / 10 for c in completions]


def exploding(prompts, completions, **_):
    """A number that no statistic can take, for one text."""
    return [1e20 if c == "44" else 1.0 for c in completions]


def weighed(prompts, completions, **_):
    """A number of its own for each text."""
    return [sum((i + 1) * ord(c) for i, c in enumerate(text)) / 1000 for text in completions]


def flaky(prompts, completions, *, broken, text="", outage="", **_):
    """Fails on every text, or on `text` alone, while the file `broken` exists; on `outage` the service is gone."""
    if Path(broken).exists() and outage in completions:
        raise ConnectionRefusedError("the service is gone")
    if Path(broken).exists() and (not text or text in completions):
        raise RuntimeError("boom")
    return [1.0 for _ in completions]


def relative(prompts, completions, **_):
    """Lengths against the longest of the call, behind its size."""
    return [10 * len(completions) + len(c) / max(map(len, completions)) for c in completions]


def counted(prompts, completions, *, calls, fails=False, fails_on="", down="", **_):
    """Lengths; the file `calls` gets a line a call. On `down` the service is gone."""
    with Path(calls).open("a") as f:
        f.write(" ".join(completions) + "\n")
    if fails or fails_on in completions:
        raise ValueError(completions[0])
    if down in completions:
        raise ConnectionRefusedError("the service is gone")
    return [float(len(c)) for c in completions]
