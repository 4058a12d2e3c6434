"""Commands in errors, alerts and pages can be typed: `rlhf` and `prefect` have them, with these options."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import cyclopts
import pytest
import typer
import yaml
from prefect.cli._app import _app as prefect_app

from rlhf.flows.cli.app import app
from tests.pages import PACKAGES, PAGES, ROOT, blocks_of, commands_of, text_of

QUOTED = re.compile(r"`((?:rlhf|prefect) [^`\n]+)`")
FORM = re.compile(r"[|\[\]{}]|\.\.\.|…")
"""In a form of a command, such as `rlhf run|plan RECIPE [--set ...]`: it is not typed."""
RLHF = typer.main.get_command(app)
USAGE = typer.BadParameter.__mro__[1]


def fault(command: str | list[str]) -> str | None:
    """Why a command cannot be typed, None if it can. Nothing runs."""
    name, *words = shlex.split(command) if isinstance(command, str) else command
    words = [word for word in words if word != "--help"]
    if not words or words[0] == "COMMAND":
        return None
    try:
        if name == "prefect":
            prefect_app.parse_args(words, exit_on_error=False, print_error=False)
        else:
            RLHF.commands[words[0]].make_context(words[0], words[1:])  # type: ignore[attr-defined]
    except KeyError:
        return f"no command {words[0]}"
    except (typer.Exit, typer.BadParameter, cyclopts.CoercionError):
        # The options are there. A value in capitals stands for a number, a file or an id, and there is no store here.
        return None
    except (USAGE, cyclopts.CycloptsError) as error:
        return str(error)
    return None


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines; values of f-strings are an X."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
            yield node.lineno, "".join(map(str, parts))


def test_what_errors_say_to_type_can_be_typed():
    wrong = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for line, text in strings(path) if QUOTED.search(path.read_text()) else ():
                for command in QUOTED.findall(text):
                    if not FORM.search(command) and (why := fault(command)):
                        wrong.add(f"{path.relative_to(ROOT)}:{line}: `{command}`: {why}")
    assert "\n".join(sorted(wrong)) == ""


def test_what_pages_say_to_type_can_be_typed():
    wrong = []
    # The changelog names commands of earlier versions too.
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        quoted = [c for c in QUOTED.findall(text_of(page)) if not FORM.search(c)]
        shown = [c for b in blocks_of(page) if b.language == "sh" for c in commands_of(b)]
        typed = [c for words in shown for c in simple(words) if Path(c[0]).name in ("rlhf", "prefect")]
        for command in [*quoted, *(shlex.join([Path(c[0]).name, *c[1:]]) for c in typed)]:
            if not FORM.search(command) and (why := fault(command)):
                wrong.append(f"{page}: `{command}`: {why}")
    assert "\n".join(wrong) == ""


def simple(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line of shell, without variables before them and redirections behind them."""
    command: list[str] = []
    for word in [*words, ";"]:
        if word in ("&&", "||", ";", "|", "&", ">", "<", ">>") or (word in ("do", "done") and not command):
            if command:
                yield command
            command = []
        elif command or not re.match(r"\w+=", word):
            command.append(word.rstrip(";"))


@pytest.mark.parametrize("automation", yaml.safe_load((ROOT / "infra" / "alerts.yaml").read_text())["automations"])
def test_what_alerts_say_to_type_can_be_typed(automation):
    [action] = automation["actions"]
    _, _, advice = action.get("body", "").partition("Type: ")
    assert [why for command in filter(None, advice.split("; ")) if (why := fault(command))] == []
