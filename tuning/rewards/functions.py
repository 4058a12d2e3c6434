"""Reward functions by name. A user's own is `module:function` with the same signature.

The signature is `f(prompts, completions, **columns) -> list[float | None]`, and TRL's `f(completions, **columns)` is
accepted: parameters called prompts and completions are given by name. Columns are lists, as long as the prompts:
`completion_ids`, `answer`, `metadata` (parsed), and for a function of one's own the entries of the metadata by their
names. Keyword arguments of the recipe are single values. None means that the function does not apply to a sample.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.tuning.names import function_of, nearest
from rlhf.tuning.python_syntax import parse
from rlhf.tuning.rewards import answers, mathematics, numbers, sandbox
from rlhf.tuning.rewards import judge as judges
from rlhf.tuning.rewards.judge import judge
from rlhf.tuning.rewards.sandbox import code_passes
from rlhf.tuning.rewards.texts import begun, extracted, final, spoken

RewardFn = Callable[..., Sequence[float | None]]
Texts = Sequence[str]
Answers = Sequence[str | None]
Metadata = Sequence[Mapping[str, Any]] | None


def _judged(
    verdict: Callable[[str, str], bool],
    completions: Texts,
    answer: Answers,
    metadata: Metadata,
    extract: str | None,
    readable: Callable[[str], Any] = lambda answer: True,
) -> list[float | None]:
    """1 where `verdict` holds for a completion and one of its accepted answers; None without a readable answer."""

    def one(text: str, accepted: list[str]) -> float | None:
        return float(any(verdict(text, each) for each in accepted)) if accepted else None

    metadata = metadata or [{}] * len(completions)
    accepted = [list(filter(readable, answers.accepted(a, m))) for a, m in zip(answer, metadata, strict=True)]
    # With `extract` the completion is searched as it is.
    texts = completions if extract is not None else map(begun, completions, metadata)
    return [one(text, each) for text, each in zip(texts, accepted, strict=True)]


def exact_match(
    prompts: Texts,
    completions: Texts,
    *,
    answer: Answers,
    metadata: Metadata = None,
    extract: str | None = None,
    **_: Any,
) -> list[float | None]:
    """1 where the completion after its thoughts, without surrounding space, is the answer to the letter; else 0.

    `extract`: a regular expression whose last match (its first group, if it has one) in the whole completion is
    compared. Forms of one letter in Unicode are equal.
    """

    def verdict(text: str, answer: str) -> bool:
        said = spoken(text) if extract is None else extracted(text, extract)
        return unicodedata.normalize("NFC", said).strip() == unicodedata.normalize("NFC", answer).strip()

    return _judged(verdict, completions, answer, metadata, extract)


def number_match(
    prompts: Texts,
    completions: Texts,
    *,
    answer: Answers,
    metadata: Metadata = None,
    extract: str | None = None,
    tolerance: float = 0.0,
    **_: Any,
) -> list[float | None]:
    """1 where the completion's number is the answer's, exactly; else 0.

    `rlhf.tuning.rewards.numbers` reads numbers. The completion's is the last one of the marked final answer (a LaTeX
    box, <answer>, a #### line), else of the text after the thoughts; with `extract` of the last match in the whole
    completion. A percentage equals its face and its hundredth. A minus after a digit is a dash or a difference: the
    last number of 12-5 is 5. `tolerance` is relative to the answer.
    """

    def verdict(text: str, answer: str) -> bool:
        expected = answers.number(answer)
        number = last_number(text, extract)
        return number is not None and number.equals(expected, tolerance)

    return _judged(verdict, completions, answer, metadata, extract)


def last_number(text: str, extract: str | None, seconds: float | None = None) -> numbers.Written | None:
    """The number of a completion, as `number_match` reads it; None without one."""
    return numbers.last(final(spoken(text)) if extract is None else extracted(text, extract, seconds), seconds)


def math_equal(
    prompts: Texts, completions: Texts, *, answer: Answers, metadata: Metadata = None, **_: Any
) -> list[float | None]:
    """1 where the completion's mathematical answer equals the reference; else 0 (package math-verify).

    LaTeX and plain expressions are compared by value: fractions, sets, intervals, equations; units are ignored. Without
    a mathematical answer the reward does not apply (None). A completion that takes longer than the package's limits is
    wrong.
    """
    return _judged(
        lambda text, gold: mathematics.equal(gold, text), completions, answer, metadata, None, mathematics.expressions
    )


def matches(prompts: Texts, completions: Texts, *, pattern: str, **_: Any) -> list[float]:
    """1 where the whole completion matches the regular expression `pattern`; else 0."""
    return [float(re.fullmatch(pattern, c, re.DOTALL) is not None) for c in completions]


def tagged(
    prompts: Texts, completions: Texts, *, metadata: Metadata = None, tags: str = "think,answer", **_: Any
) -> list[float]:
    """1 where the completion is nothing but <tag>...</tag> for each of `tags` in order, each tag once; else 0.

    If the chat template has opened a tag at the end of the prompt (`metadata.opened_tag`), the completion continues it.
    """
    names = [t.strip() for t in tags.split(",")]
    pattern = r"\s*".join(rf"<{re.escape(n)}>.*?</{re.escape(n)}>" for n in names)

    def one(text: str) -> float:
        # `.*?` alone would accept further tags inside a pair.
        once = all(text.count(f"<{n}>") == text.count(f"</{n}>") == 1 for n in names)
        return float(once and re.fullmatch(rf"\s*{pattern}\s*", text, re.DOTALL) is not None)

    return [one(begun(text, m)) for text, m in zip(completions, metadata or [{}] * len(completions), strict=True)]


def contains(prompts: Texts, completions: Texts, *, text: str, **_: Any) -> list[float]:
    """1 where the completion contains `text`; else 0."""
    return [float(text in c) for c in completions]


def token_share(
    prompts: Texts, completions: Texts, *, completion_ids: Sequence[Sequence[int]], token: int, **_: Any
) -> list[float]:
    """Share of the completion's tokens that are `token`."""
    return [sum(t == token for t in ids) / max(1, len(ids)) for ids in completion_ids]


def length_at_most(
    prompts: Texts, completions: Texts, *, completion_ids: Sequence[Sequence[int]], tokens: int, **_: Any
) -> list[float]:
    """0 up to `tokens` tokens, then falling by 1 for each further `tokens`."""
    return [-max(0.0, len(ids) / tokens - 1.0) for ids in completion_ids]


def overlong(
    prompts: Texts,
    completions: Texts,
    *,
    completion_ids: Sequence[Sequence[int]],
    tokens: int,
    buffer: int,
    **_: Any,
) -> list[float]:
    """DAPO's soft punishment (arXiv:2503.14476): 0 up to `tokens - buffer` tokens, falling to -1 at `tokens`."""
    return [-min(1.0, max(0, len(ids) - (tokens - buffer)) / buffer) for ids in completion_ids]


_EVALUATED = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
"""Tasks of reasoning-gym whose verifiers run an answer that is not equal to the reference with `eval`."""
_PARSED = {"polynomial_multiplication", "simple_integration", "intermediate_integration", "puzzle24", "countdown"}
"""Those that give it to SymPy's parser, which runs it as Python."""
_OF_DATA = {
    **{"number_sorting": "answer", "polynomial_multiplication": "answer", "bitwise_arithmetic": "problem"},
    **dict.fromkeys(("simple_integration", "intermediate_integration"), "integrand"),
}
"""The text of a record that a verifier runs in the same ways."""
_COMPUTES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load)
_LARGEST_POWER = 1000


def _is_literal(text: str) -> bool:
    """Whether `eval` of a text makes nothing but a literal, or refuses the text."""
    try:
        ast.literal_eval(text)
    except SyntaxError:
        return True
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _only_computes(text: str) -> bool:
    """Whether SymPy's parser, given this text, only computes: bounded powers, and SymPy's elementary functions."""
    import sympy

    try:
        nodes = list(ast.walk(parse(text, mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    called = [getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call) and not node.keywords]
    return (
        all(isinstance(node, (*_COMPUTES, ast.Call)) for node in nodes)
        and sum(isinstance(node, ast.Call) for node in nodes) == len(called)
        and all(
            getattr(getattr(sympy, name, None), "__module__", "").startswith("sympy.functions.elementary")
            or name in ("sqrt", "abs", "Integral", "Rational")
            for name in called
        )
        and not any(isinstance(getattr(node, "value", None), str | bytes) for node in nodes)
        and not any(isinstance(node, ast.LShift) for node in nodes)
        and all(_is_small(node) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
    )


def _is_small(power: ast.BinOp) -> bool:
    """Whether a power of numbers has a small exponent and is the only one; of others SymPy computes no digits."""
    parts = list(ast.walk(power))
    if any(isinstance(part, ast.Name | ast.Call) for part in parts):
        return not any(isinstance(part, ast.Pow) for part in ast.walk(power.right))
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    size = getattr(exponent, "value", _LARGEST_POWER + 1)
    return sum(isinstance(part, ast.Pow) for part in parts) == 1 and size <= _LARGEST_POWER


def _runs_nothing(text: Any, parsed: bool) -> bool:
    return not isinstance(text, str) or (_only_computes(text) if parsed else _is_literal(text))


def reasoning_gym_score(
    prompts: Texts,
    completions: Texts,
    *,
    answer: Answers,
    metadata: Sequence[dict[str, Any]],
    task: str | None = None,
    **_: Any,
) -> list[float]:
    """The score of a reasoning-gym task's own verifier for the text after the thoughts, or that in `<answer>`.

    `metadata` holds `task` and, as `entry`, the problem's own metadata; the data source reasoning_gym writes both. For
    problems of another source the argument `task` names the task, and `metadata` itself is the entry's.
    """
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    scores = []
    for prompt, text, gold, meta in zip(prompts, completions, answer, metadata, strict=True):
        details = meta.get("entry", meta)
        details = ast.literal_eval(details) if isinstance(details, str) else details
        said = spoken(begun(text, meta))
        said = (extract_answer(said, strip=False) or said).strip()
        name = task or meta["task"]
        source = _OF_DATA.get(name, "")
        if name == "bitwise_arithmetic":
            safe = re.fullmatch(r"[\s\dxa-fA-F()&|^~<>*/%+-]*", str(details.get("problem"))) is not None
        else:
            # The record may come from anywhere.
            safe = _runs_nothing(gold if source == "answer" else details.get(source), parsed=name in _PARSED)
        if not safe:
            scores.append(0.0)
            continue
        if name in _EVALUATED and not _is_literal(said):
            # Equal to the reference it is right before it would be run.
            said = said if said in {str(gold).strip(), *details.get("valid_answers", ())} else ""
        elif name in _PARSED and not _only_computes(said):
            said = ""
        entry = {"question": prompt, "answer": gold, "metadata": details}
        scores.append(float(reasoning_gym.get_score_answer_fn(name)(said, entry)))
    return scores


BUILT_IN: dict[str, RewardFn] = {
    f.__name__: f
    for f in (
        exact_match, number_match, math_equal, matches, tagged, contains, token_share, length_at_most, overlong,
        reasoning_gym_score, code_passes, judge,
    )
}  # fmt: skip

PACKAGES = {
    "exact_match": ("regex",),
    "number_match": ("regex",),
    "code_passes": ("regex",),
    "reasoning_gym_score": ("reasoning-gym", "sympy"),
    "math_equal": ("math-verify", "sympy", "latex2sympy2-extended", "regex"),
}
"""Packages that influence the result of a built-in; their versions are part of the stage's key."""

LOADS = {"reasoning_gym_score": ("reasoning_gym",), "math_equal": ("math_verify",)}
"""Modules that a built-in imports when it is called, so that a process can import them before its time begins."""


def least_seconds(name: str, arguments: Mapping[str, Any]) -> float:
    """Seconds that a built-in may take for one sample by limits of its own: those around it must not come first."""
    limits = {
        "code_passes": sandbox.longest_seconds,
        "judge": judges.longest_seconds,
        "math_equal": mathematics.longest_seconds,
    }
    return limits[name](**arguments) if name in limits else 0.0


def near(name: str) -> str:
    """Return the hint for an unknown name: `module:function` for one with a dot, else the nearest built-in."""
    module, dot, function = name.rpartition(".")
    return f"did you mean {module}:{function}?" if dot else nearest(name, BUILT_IN, "module:function")


def find(name: str) -> RewardFn:
    """The built-in called `name`, or the function of `module:function`. Raises ValueError that names the known ones."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(f"no reward function {name!r}; {near(name)}")
    try:
        return function_of(name)
    except ValueError as error:
        raise ValueError(f"reward function {error}") from error
