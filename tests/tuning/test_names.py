"""Mistaken names get the nearest known one; `module:function` is found, or the error says what is missing."""

import math

import pytest

from rlhf.tuning.names import cache_folder, function_of, nearest


@pytest.mark.parametrize(
    ("name", "known", "also", "said"),
    [
        ("stf", ["sft", "reward"], "", "did you mean sft?"),
        ("xyz", ["sft", "reward"], "", "there are sft, reward"),
        ("xyz", ["sft"], "module:function", "there are sft, module:function"),
        ("xyz", [], "", "there are none"),
    ],
)
def test_the_nearest_name_or_all(name, known, also, said):
    assert nearest(name, known, also) == said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sqrt", "expected module:function"),
        ("no_such_module:f", "No module named"),
        ("math:no_such", "no_such"),
        ("math:pi", "is a float: expected a function"),
    ],
)
def test_a_function_that_is_not_there(name, message):
    assert function_of("math:sqrt") is math.sqrt
    with pytest.raises(ValueError, match=message):
        function_of(name)


def test_a_user_without_a_home_names_a_folder(monkeypatch, tmp_path):
    """As a container's user without an entry in /etc/passwd."""

    def missing():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", missing)
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path))
    assert cache_folder("RLHF_SCRATCH", "scratch") == tmp_path
    monkeypatch.delenv("RLHF_SCRATCH")
    with pytest.raises(OSError, match="no home folder: set RLHF_SCRATCH to a folder"):
        cache_folder("RLHF_SCRATCH", "scratch")
