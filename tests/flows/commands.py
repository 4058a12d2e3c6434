"""Commands of `rlhf` in this process."""

from typing import Any

from typer.testing import CliRunner, Result

from rlhf.flows.cli.app import app


def typed(*words: Any, code: int = 0, **options: Any) -> Result:
    """What `rlhf WORDS` says; `code` is the exit status that it must have."""
    command = list(map(str, words))
    done = CliRunner().invoke(app, command, **options)
    assert done.exit_code == code, f"{command} ended with {done.exit_code}:\n{done.output}\n{done.exception!r}"
    return done
