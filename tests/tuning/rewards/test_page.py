"""docs/guides/rewards.md lists each built-in reward function with all that a recipe may give it."""

import inspect
import re
from pathlib import Path

from rlhf.tuning.rewards.functions import BUILT_IN

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "rewards.md"
DATA = {"answer", "metadata", "completion_ids"}
"""Columns that the pipeline gives."""
ELSEWHERE = {"judge"}
"""Its arguments have a table of their own."""


def test_the_page_lists_the_built_in_functions_with_their_arguments():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|([^|]*)\|$", PAGE.read_text(), re.M)
    listed = {name: set(re.findall(r"`(\w+)`", arguments)) for name, _, arguments in rows if name in BUILT_IN}
    for name, function in BUILT_IN.items():
        parameters = inspect.signature(function).parameters.values()
        takes = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - DATA
        if name not in ELSEWHERE:
            assert takes - listed[name] == set(), name
    assert listed.keys() == BUILT_IN.keys()
