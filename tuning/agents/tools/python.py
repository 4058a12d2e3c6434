"""The tool `python`: runs a program of the policy in the sandbox (`rlhf.tuning.rewards.sandbox`), without a network.

Each call is a new program: names do not persist between calls.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf.tuning.rewards.sandbox import Isolation, code_of, refuse_gaps, run_python

# The policy reads the printed text, the value of a last expression as in an interactive session, and for an error the
# traceback within its own code.
_RUNNER = """
import ast, sys, traceback
sys.stderr = sys.stdout
def main(source):
    scope = {{"__name__": "__main__"}}
    try:
        tree = ast.parse(source, "main.py")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "main.py", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "main.py", "eval"), scope)
            if value is not None:
                print(repr(value))
    except Exception as error:
        trace = error.__traceback__.tb_next if not isinstance(error, SyntaxError) else None
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)
main({source!r})
"""


class ToolError(Exception):
    """A call that has failed; its text is for the policy."""


def make(seconds: float = 5.0, megabytes: int = 512, isolation: Isolation = "required") -> Callable[[str], str]:
    """The tool.

    Args:
        seconds, megabytes: limits of one program.
        isolation: `required` runs no program on a machine on which it can reach network, files or processes.
    """

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program. The value of a last expression is printed too.
        """
        refuse_gaps(isolation)
        status, out = run_python(_RUNNER.format(source=code_of(code)), seconds=seconds, megabytes=megabytes)
        if status == 0:
            return out.rstrip("\n")
        if status > 128:
            raise ToolError(f"the program was ended after {seconds:g} s, or beyond {megabytes} MB\n{out}".rstrip())
        raise ToolError(out.rstrip("\n") or f"the program ended with status {status}")

    return python
