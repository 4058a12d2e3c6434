"""The pages of docs/reference: generated ones are up to date, and the others name everything that there is."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.generate import COMMAND, REFERENCE, pages
from rlhf.flows.cli.settings import every_setting
from rlhf.flows.recipe.field_paths import hint
from tests.flows.commands import typed
from tests.pages import PACKAGES, ROOT


def named_on(*pages: Path) -> set[str]:
    """Words in backticks."""
    return {word for page in pages for word in re.findall(r"`([^`\n]+)`", page.read_text())}


def rows_below(page: Path, title: str) -> str:
    found = re.search(rf"^## {title}$(.+?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no section {title}"
    return found[1]


def test_generated_pages_are_up_to_date():
    for file, text in pages().items():
        assert file.read_text() == text, f"{file.name} is out of date: run `{COMMAND}`"


def test_every_variable_of_the_code_is_on_the_page_and_no_other():
    variables = re.compile(r"\bRLHF_[A-Z_]+\b")
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    in_code = {name for file in files for name in variables.findall(file.read_text())}
    assert set(variables.findall((REFERENCE / "environment-variables.md").read_text())) == in_code


def test_every_file_of_a_run_is_on_the_page(smoke_store):
    page = REFERENCE / "files.md"
    tree = re.search(r"^```text\n(.+?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert tree is not None
    assert {place.name for place in smoke_store.iterdir()} <= set(re.findall(r"^  (\w+)", tree[1], re.MULTILINE))
    text = page.read_text()
    for artifact in (smoke_store / "artifacts").glob("*/*"):
        for name in sorted(place.name for place in artifact.iterdir()):
            # Of an export: `tokenizer files`; of held-out parts: `heldout_*/`.
            known = {name, f"{name}/", *(["heldout_*/"] if name.startswith("heldout_") else [])}
            known |= {"tokenizer files"} if name in ("tokenizer.json", "tokenizer_config.json") else set()
            assert any(word in text for word in known), f"docs/reference/files.md does not name {name} of {artifact}"


PATTERNS = {"reward_NAME": r"reward_\w+", "seconds_PHASE": r"seconds_\w+", "pass_at_k": r"pass_at_\d+"}
PATTERNS |= {"maj_at_n": r"maj_at_\d+"}


def test_every_metric_of_a_run_is_on_a_page(smoke_store):
    names = named_on(REFERENCE / "metrics.md", ROOT / "docs" / "guides" / "evaluation.md")
    patterns = [pattern for name, pattern in PATTERNS.items() if name in names]
    # Settings of the evaluation, and what its page describes in words.
    names |= {"problems", "samples", "mean_length"}
    for manifest in (smoke_store / "artifacts").glob("*/*/manifest.json"):
        for metric in json.loads(manifest.read_text())["metrics"]:
            known = metric in names or any(re.fullmatch(pattern, metric) for pattern in patterns)
            assert known, f"no page names the metric {metric} of {manifest.parent.parent.name}"


def keys_in(document: Any, place: str = "") -> Iterator[str]:
    """Keys of a document and of what its lists and fixed objects hold."""
    if isinstance(document, list):
        yield from keys_in(document[0], f"{place}[]") if document else ()
        return
    for key, value in document.items() if isinstance(document, dict) else ():
        yield f"{place}.{key}".lstrip(".")
        if isinstance(value, list) or key in ("counts", "data"):
            yield from keys_in(value, f"{place}.{key}")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["runs", "show first", "plan smoke", "gc", "audit first", "verify", "history"])
def test_every_key_of_a_document_is_on_the_page(smoke_store, command):
    done = typed(*command.split(), "--json", "--store", smoke_store)
    words = set(re.findall(r"\w+", rows_below(REFERENCE / "json.md", command.partition(" ")[0])))
    found = list(keys_in(json.loads(done.stdout)))
    assert found and [key for key in found if re.split(r"\W+", key)[-1] not in words] == []


VALUES = {"loss_type", "ipo", "orpo", "simpo", "kto", "dapo", "qlora", "KTOConfig"}
SECTIONS = (
    "base|data|sft|preference|reward|distill|rl|evaluate|environment|export|SECTION|optimizer|lora|compute|engine"
)


@pytest.mark.parametrize(("page", "count"), [("from-trl.md", 40), ("from-axolotl.md", 20)])
def test_a_name_of_another_library_is_an_error_that_names_the_setting_of_its_row(page, count):
    rows = re.findall(r"^\| (.*?) \| (.*?) \|(.*)$", (ROOT / "docs" / "guides" / page).read_text(), re.MULTILINE)
    names = {n: f"{here} {more}" for theirs, here, more in rows for n in re.findall(r"`(\w+)(?:: [\w, ]+)?`", theirs)}
    places = {setting.place.rpartition(".")[2] for setting in every_setting()}
    # Our own names, and values of axolotl's `rl` and `adapter`.
    names = {n: row for n, row in names.items() if n not in places and n not in VALUES}
    assert len(names) > count
    for name, row in names.items():
        said = hint(["rl", name] if "rl." in row else [name])
        assert not said.startswith("there "), (name, said)
        if "did you mean" in said:
            assert said.removeprefix("did you mean ").rstrip("?").rpartition(".")[2] in row, (name, said, row)


@pytest.mark.parametrize("page", ["from-trl.md", "from-axolotl.md"])
def test_settings_that_stand_for_those_of_another_library_exist(page):
    places = [f".{setting.place}" for setting in every_setting()]
    # The middle column of each table.
    rows = re.findall(r"^\| .*? \| (.*?) \|", (ROOT / "docs" / "guides" / page).read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(rf"`((?:{SECTIONS})\.[\w.]+)", row)}
    assert len(named) > 20
    for name in named:
        end = name.removeprefix("SECTION").replace(".NAME", ".*")
        end = end if end.startswith(".") else f".{end}"
        assert any(place.endswith(end) for place in places), f"docs/{page} names {name}, which is not a setting"
