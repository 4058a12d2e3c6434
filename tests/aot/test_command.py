"""The command records unattended: what fails or takes too long is said and costs the other programs nothing."""

import os
import subprocess
import sys

import pytest

from tests.aot.__main__ import reason
from tests.aot.cases import CASES, named


def command(*arguments):
    # Without the compilers' libraries, which this environment need not have.
    return subprocess.run(
        [sys.executable, "-m", "tests.aot", *arguments], capture_output=True, text=True, env=os.environ.copy()
    )


def test_names_of_cases_are_three_words_and_tell_them_apart():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and all(len(name.split()) == 3 for name in names)
    assert all(named(case.name) == case for case in CASES)
    with pytest.raises(ValueError, match="no case is named 'sft nothing v5e:2x4'; there are sft/4x512 small v5e:2x2, "):
        named("sft nothing v5e:2x4")


def test_a_case_that_takes_too_long_is_ended_and_named():
    done = command("--only", "small v5e", "--limit", "0.1")
    assert done.returncode == 1
    name = "sft/4x512 small v5e:2x2"
    assert done.stdout == f"{name} (1 of 1)\n"
    assert done.stderr == f"{name}: not compiled within 0 s\n"


def test_a_word_that_no_case_has_is_refused_with_the_names():
    done = command("--only", "sgd")
    assert done.returncode == 2 and "no case has 'sgd' in its name; there are sft/4x512 small v5e:2x2, " in done.stderr


def test_the_reason_of_a_failure_is_its_exception_with_the_lines_that_follow():
    errors = (
        "W warning\nTraceback (most recent call last):\n  File x\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED:\n"
    )
    said = reason(errors + "Used 16.08G of 15.75G hbm.\n")
    assert said == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Used 16.08G of 15.75G hbm."
    assert reason("") == "it ended without a word"
