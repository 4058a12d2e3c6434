"""Checks of a recipe that need files, code and the store, before a run of it is recorded.

Without them a run would fail at the stage concerned, after minutes or hours of work.

They also refuse code and keys that a recipe names and RLHF_ALLOW_CODE does not allow (`rlhf.tuning.allowed`).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf.flows.graph.build import Node, nodes_of
from rlhf.flows.graph.reuse import Records, taken_artifact
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.running.crew import check_workers
from rlhf.stages.base import positions
from rlhf.stages.contract import signatures
from rlhf.stages.contract.registry import stage
from rlhf.stages.contract.sources import built_in_parameters, check_imports, is_own_source
from rlhf.stages.score.settings import COMPUTED
from rlhf.stages.scorer import Config as ScorerConfig
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.tools.environments import check as check_environment
from rlhf.tuning import allowed

FUNCTION = re.compile(r"(?P<gym>gymnasium:)?(?P<module>[A-Za-z_][\w.]*):[A-Za-z_][\w.]*(?(gym)[\w./-]*)")
"""A function, or MODULE:ID of gymnasium, which imports the module."""
NAMING = (
    *("source", "sources", "function", "judge", "algorithm", "name", "tools", "rules", "renderer", "parser", "actions"),
)
"""Settings of any section whose texts may be `module:function`."""
OTHERS = ("random", "hub", "gem", "gymnasium", "openenv", "textarena", "mcp")
"""Words before a colon that are not modules."""


def check_allowed(recipe: Recipe) -> None:
    """Raises RecipeError, with the place, for a module, program or key that is not allowed here."""
    if allowed.places() is None:
        return
    try:
        for place, name, value in _values(recipe.model_dump(mode="json"), "", ""):
            try:
                if isinstance(value, str):
                    _check_text(name, value)
                else:
                    place += ".key_variable"
                    variable, urls = value.get("key_variable"), value.get("url")
                    for url in urls if isinstance(urls, list) else [urls]:
                        if isinstance(variable, str) and isinstance(url, str):
                            allowed.check_key(variable, url)
            except allowed.NotAllowed as error:
                raise RecipeError(f"{place}: {error}") from error
        if recipe.environment is not None and recipe.environment.agent:
            allowed.check_program(recipe.environment.agent)
        if recipe.rl is not None and recipe.rl.rollout.engine.words:
            allowed.check_program(recipe.rl.rollout.engine.words)
    except allowed.NotAllowed as error:
        raise RecipeError(str(error)) from error
    cluster = None if recipe.workers is None else recipe.workers.cluster
    if cluster not in (None, "auto", os.environ.get("RAY_ADDRESS")):
        raise RecipeError(
            f"workers.cluster: {cluster} is not allowed here: {allowed.VARIABLE} is set, and RAY_ADDRESS of the worker "
            "is another address"
        )
    if recipe.data.runner.options:
        raise RecipeError(f"data.runner.options can name programs, which {allowed.VARIABLE} does not allow here")


def _check_text(name: str, text: str) -> None:
    """Raises NotAllowed for the text of a setting with this name."""
    function = FUNCTION.fullmatch(text)
    if name == "isolation":
        allowed.check_isolation(text)
    if name in NAMING and function and function["module"] not in OTHERS:
        allowed.check_module(function["module"])
    if name == "tools" and text.startswith("mcp:") and "://" not in text:
        allowed.check_program(shlex.split(text.removeprefix("mcp:")))


def _values(value: Any, place: str, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, the nearest setting's name, value) of all texts and mappings of a recipe."""
    if isinstance(value, str | Mapping):
        yield place, name, value
    parts = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
    for key, part in parts.items():
        yield from _values(part, f"{place}.{key}" if place else str(key), key if isinstance(key, str) else name)


REWARD_COLUMNS = ("prompts", "completions", "completion_ids", "answer", "metadata")
"""Arguments of every reward function, in addition to the entries of the record's metadata."""
TRY_SECONDS = 120
"""Time limit of a trial call of a custom algorithm; most of it is the import of JAX."""


def check(recipe: Recipe) -> None:
    """Raises RecipeError for a missing model, data, rollouts, reward, judge, algorithm, environment or tool.

    Functions and classes are looked up in their modules' text, with their arguments; nothing of the user's is executed.
    """
    check_allowed(recipe)
    # Nodes of one stage in several rounds have the same sources; each base model has others.
    nodes: dict[str, Node] = {}
    store, known = Store(recipe.store), Records()
    every = nodes_of(recipe)
    check_workers(recipe, every)
    for node in every:
        nodes.setdefault(node.stage if node.inputs else node.name, node)
        try:
            taken_artifact(store, node, known)
        except ArtifactError as e:
            raise RecipeError(str(e)) from e
    for node in nodes.values():
        if node.held is not None:
            # Another run has made it.
            continue
        try:
            stage(node.stage).sources(node.config)
        except (ValueError, OSError) as e:
            message = str(e)
            if node.name == "teacher":
                message = message.replace("base.source", "distill.teacher", 1)
            elif isinstance(node.config, ScorerConfig):
                message = message.replace("base.source", "rl.score.rewards: source", 1)
            elif node.stage == "prepare" and not message.startswith("data."):
                message = f"data.source: {message}"
            raise RecipeError(message) from e
    _check_lengths(recipe)
    try:
        for called in _rewards(recipe):
            _check_reward(called)
        _check_algorithm(recipe)
        if recipe.environment is not None:
            check_environment(recipe.environment)
        for where, function, arguments in _sources(recipe):
            parameters = signatures.of_name(function, where)
            if parameters is not None:
                # The pipeline gives the seed to a function that takes one.
                signatures.check_arguments(parameters, arguments, f"{where}_args", function)
                signatures.check_required(parameters, arguments, f"{where}_args", function, ["seed"])
    except ValueError as e:
        raise RecipeError(str(e)) from e


def _check_lengths(recipe: Recipe) -> None:
    """Raises RecipeError for completions that fill all positions of the model, which leaves no room for prompts."""
    most = positions(recipe.base.source)
    for section in ("rl.rollout", "distill", "evaluate"):
        settings = recipe.settings(section)
        if most is not None and settings is not None and settings.max_tokens >= most:
            raise RecipeError(
                f"{section}.max_tokens {settings.max_tokens} leaves no room for a prompt: {recipe.base.source} has "
                f"{most} positions; lower it"
            )


class Called(NamedTuple):
    """A reward function that a recipe names, with the names of its arguments."""

    function: str
    arguments: Collection[str]
    at: str
    """Place of the function in the recipe."""
    arguments_at: str


def _rewards(recipe: Recipe) -> Iterator[Called]:
    """Yield every reward and every judge that is a function."""
    rewards = recipe.rl.score.rewards if recipe.rl is not None else {}
    named: dict[str, Any] = {f"rl.score.rewards.{name}": reward for name, reward in rewards.items()}
    found = []
    if (evaluate := recipe.evaluate) is not None:
        found.append(Called(evaluate.judge, evaluate.judge_arguments, "evaluate.judge", "evaluate.judge_arguments"))
        named |= {f"evaluate.judges.{name}": judge for name, judge in evaluate.judges.items()}
    found += [Called(one.function, one.arguments, f"{at}.function", f"{at}.arguments") for at, one in named.items()]
    yield from (called for called in found if called.function not in COMPUTED)


def check_columns(recipe: Recipe, metrics: Mapping[str, Any], stages: Collection[str]) -> None:
    """Raises RecipeError for a custom reward or judge with a parameter that neither the recipe nor the data gives, and
    for prompts without the answers that rewards compare with.

    metrics: of the artifact of `prepare`. stages: those still to make; others are not checked.
    """
    columns = metrics.get("columns", {})
    for message, is_error in unanswered(recipe, metrics, stages):
        if is_error:
            raise RecipeError(message)
    for called, split, parameters in _calls(recipe, stages):
        there = columns.get(split)
        if there is None or built_in_parameters(called.function) is not None:
            continue
        given = (*parameters.texts, *REWARD_COLUMNS[2:], *called.arguments, *there)
        if missing := [name for name in parameters.required if name not in given]:
            raise RecipeError(
                f"{called.at}: {called.function} takes {', '.join(missing)}, and {split} has no such column: its "
                f"columns are {', '.join([*there, *REWARD_COLUMNS[2:]])}. Name a field of the records in data.fields "
                f"(or data.extra_fields: metadata), give the parameter a default, or a value in {called.arguments_at}"
            )


def _calls(recipe: Recipe, stages: Collection[str]) -> Iterator[tuple[Called, str, signatures.Parameters]]:
    """Yield the rewards and judges that these stages call, the split whose rows each gets, and its parameters."""
    # Reused rollouts have other metadata; an environment adds to it.
    taken = recipe.rl is not None and recipe.rl.rollouts_from is not None
    for called in _rewards(recipe) if recipe.environment is None else ():
        split, calls = ("prompts", "score") if called.at.startswith("rl.") else ("heldout", "evaluate")
        if calls not in stages or (taken and split == "prompts"):
            continue
        try:
            parameters = built_in_parameters(called.function) or signatures.of_name(called.function, called.at)
        except ValueError as e:
            # The file was edited since the run began.
            raise RecipeError(str(e)) from e
        if parameters is not None:
            yield called, split, parameters


def unanswered(
    recipe: Recipe, metrics: Mapping[str, Any], stages: Collection[str] = ("score", "evaluate")
) -> Iterator[tuple[str, bool]]:
    """Yield (message, whether it ends a run) for each reward and judge that compares with answers which rows lack.

    Some prompts may lack it if another reward judges them, and some held-out problems, which are left out then.
    """
    readers = [(called, split) for called, split, p in _calls(recipe, stages) if "answer" in p.required]
    alone = recipe.rl is not None and [s for _, s in readers].count("prompts") == len(recipe.rl.score.rewards)
    for called, split in readers:
        missing, rows = metrics.get("unanswered", {}).get(split, 0), metrics.get("rows", {}).get(split, 0)
        if missing:
            remedies = ["name its field in data.fields"]
            if split == "heldout":
                remedies.append("name a judge that reads no answer, or leave evaluation out (evaluate: null)")
            if recipe.rl is not None:
                remedies.append(
                    "state in data.sources what each is for, such as `for: [prompts]` of those with answers and "
                    "`for: [sft]` of others"
                )
            message = (
                f"{called.at}: {called.function} compares with `answer`, which {missing} of {rows} rows of {split} do "
                f"not have: {'; or '.join(remedies)}"
            )
            yield message, missing == rows or (split == "prompts" and alone)


def _check_reward(called: Called) -> None:
    parameters = built_in_parameters(called.function)
    if parameters is not None:
        # A parameter of a custom function may be a column of the data.
        signatures.check_required(parameters, called.arguments, called.arguments_at, called.function, REWARD_COLUMNS)
    else:
        parameters = signatures.of_name(called.function, called.at)
        if parameters is not None:
            _check_call(parameters, called)
        # Else the stage would fail, after all stages before it.
        check_imports(called.function.partition(":")[0], called.at)
    if parameters is not None:
        signatures.check_arguments(parameters, called.arguments, called.arguments_at, called.function, REWARD_COLUMNS)


def _check_call(parameters: signatures.Parameters, called: Called) -> None:
    """Raises ValueError if prompts and completions cannot be the first two arguments of a custom function."""
    how = "it is called with prompts and completions, and by name with columns of the data"
    if parameters.is_async:
        raise ValueError(f"{called.at}: {called.function} is `async def`: it is called, and not awaited; write `def`")
    if len(parameters.texts) < 2 and not parameters.takes_any:
        count = len(parameters.positional)
        raise ValueError(f"{called.at}: {called.function} takes {count} of its arguments by position; {how}")
    if columns := [name for name in parameters.texts if name in REWARD_COLUMNS[2:]]:
        raise ValueError(f"{called.at}: {called.function} takes {columns[0]} among its first two arguments; {how}")


def _check_algorithm(recipe: Recipe) -> None:
    """Raises ValueError for wrong parameters of the factory of a custom algorithm."""
    if recipe.rl is None or recipe.rl.update.entry is not None:
        return
    update = recipe.rl.update
    parameters = signatures.of_name(update.algorithm, "rl.update.algorithm")
    if parameters is None:
        return
    where = "rl.update.algorithm_arguments"
    if not parameters.positional:
        raise ValueError(f"rl.update.algorithm: {update.algorithm} takes no objective: its first parameter is that")
    objective = parameters.positional[:1]
    signatures.check_arguments(parameters, update.algorithm_arguments, where, update.algorithm, objective)
    signatures.check_required(parameters, update.algorithm_arguments, where, update.algorithm, objective)


def _sources(recipe: Recipe) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield (place in the recipe, function, names of its arguments) of every data source that is a custom function."""
    for source in recipe.data.all_sources():
        if is_own_source(source.source):
            yield "data.source", source.source, source.source_args


def try_algorithm(recipe: Recipe) -> None:
    """Call a custom algorithm once, in another process. Raises RecipeError with the line of its error."""
    if recipe.rl is None or recipe.rl.update.entry is not None:
        return
    settings = recipe.rl.update.model_dump_json()
    command = [sys.executable, "-m", "rlhf.stages.tools.try_algorithm", settings, str(recipe.rl.rollout.completions)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise RecipeError(
            f"rl.update.algorithm: a call of {recipe.rl.update.algorithm} took over {TRY_SECONDS} s"
        ) from e
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise RecipeError(f"rl.update.algorithm: {lines[-1]}")
