"""Whatever is in a recipe's file or an option, it ends soon, in a recipe or in a RecipeError that names the place."""

import os
import time

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
LINE = r"mine\.yaml:\d+"
FILES = {
    "billion laughs": (LAUGHS, LINE),
    "laughs by merging": (MERGES, LINE),
    "an alias of itself": ("rl: &a {rounds: *a}\n", LINE),
    "an alias of nothing": ("rl: *nothing\n", "line 1"),
    "a list as deep as a well": ("name: " + "[" * 20_000 + "]" * 20_000, LINE),
    "a mapping as deep as a well": ("\n".join(" " * i + "a:" for i in range(500)), LINE),
    "an open list as deep as a well": ("name: " + "[" * 20_000, LINE),
    "a list as key": ("? [a, b]\n: 1\n", f"{LINE}.*is not a text"),
    "a number as key": ("rl: {1: 2}\n", f"{LINE}.*the key 1 is not a text"),
    "yes as key": ("yes: 2\n", f"{LINE}.*the key yes is not a text"),
    "a key of NUL": ('"a\\0b": 2\n', f"{LINE}.*control character"),
    "a key that is written backwards": ('"seed\\u202E": 2\n', f"{LINE}.*control character"),
    "a key twice": ("seed: 1\nseed: 2\n", "line 2.*|appears twice"),
    "NUL in a text": ('data: {source: "a\\0b"}\n', f"{LINE}.*control character"),
    "half of a surrogate": ('description: "\\ud800"\n', f"{LINE}.*control character"),
    "bytes": ("name: !!binary aGVsbG8=\n", f"{LINE}.*binary"),
    "a date": ("name: 2026-01-01\n", f"{LINE}.*timestamp"),
    "a set": ("data: !!set {a, b}\n", f"{LINE}.*set"),
    "an object of Python": ("name: !!python/object/apply:os.system [id]\n", f"{LINE}.*python"),
    "a tag of one's own": ("name: !mine x\n", f"{LINE}.*mine"),
    "infinity": ("sft: {learning_rate: .inf}\n", LINE),
    "no number": ("sft: {learning_rate: .nan}\n", LINE),
    "a number of 5,000 digits": (f"seed: {'9' * 5000}\n", LINE),
    "a number beyond 64 bits": ("rl: {rounds: 99999999999999999999999}\n", LINE),
    "numbers of base 60": (f"seed: {':'.join(['59'] * 3000)}\n", LINE),
    "two documents": ("seed: 1\n---\nseed: 2\n", "single document"),
    "a list": ("- 1\n", "mapping of sections"),
    "a text": ("hello\n", "mapping of sections"),
    "a directive": ("%YAML 9.9\n---\nseed: 1\n", "."),
    "tabs": ("rl:\n\trounds: 1\n", "line 2"),
    "control bytes": ("name: a\x07b\n", "mine.yaml"),
    "a name that is a path": ("name: ../../etc/cron.d/x\n", LINE),
    "a name of 10,000 letters": (f"name: {'a' * 10_000}\n", LINE),
    "a file that is too large": ("# " + "a" * 2_000_000, "larger than"),
}


def soon(call):
    began = time.process_time()
    try:
        return call()
    finally:
        assert time.process_time() - began < 20


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_is_refused_with_its_line(recipe, case):
    text, message = FILES[case]
    with pytest.raises(RecipeError, match=f"(?s){message}") as e:
        soon(lambda: load_recipe(recipe(text)))
    # What is told is for a terminal.
    assert len(str(e.value)) < 4000
    assert not any(ord(c) < 32 and c not in "\n\t" for c in str(e.value))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    for content in (b"name: \xff\xfe\n", b"\x00\x01\x02", bytes(range(128, 256)), "name: ü\n".encode("utf-16-be")):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match="mine.yaml"):
            load_recipe(str(path))


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "folder.yaml", "none.yaml"):
        with pytest.raises(RecipeError, match="does not exist"):
            soon(lambda name=name: load_recipe(str(tmp_path / name)))
    with pytest.raises(RecipeError):
        load_recipe("/dev/zero")
    with pytest.raises(RecipeError):
        load_recipe("a\0b")
    with pytest.raises(RecipeError):
        load_recipe("a" * 100_000)


SETS = [
    "",
    "=1",
    "seed.=1",
    "rl..rounds=1",
    "seed=[",
    "seed=*a",
    "seed=2026-01-01",
    f"seed={'9' * 5000}",
    "sft.learning_rate=1e999",
    "rl={1: 2}",
    "seed=" + "[" * 20_000,
    "a" + ".a" * 20_000 + "=1",
    "rl.score.rewards.0=1",
    f"data.mixture.{'9' * 5000}=1",
    "__class__.x=1",
    "rl.__dict__={}",
    "se\0ed=1",
    'data.source="a\\0b"',
    "\u202eseed=1",
    "seed\n=1",
    "name=../x",
]


@pytest.mark.parametrize("item", SETS, ids=lambda item: item[:20])
def test_a_hostile_option_is_refused(item):
    with pytest.raises(RecipeError) as e:
        soon(lambda: load_recipe("smoke", sets=[item]))
    assert len(str(e.value)) < 4000


def test_what_yaml_is_good_for_stays(recipe):
    text = "anchors: &a {learning_rate: 1e-4}\n"
    with pytest.raises(RecipeError, match="unknown key"):
        load_recipe(recipe(text))
    once = load_recipe(recipe("sft: &a {learning_rate: 1e-4}\nreward: {<<: *a}\nrl: null\n"))
    assert once.sft.optimizer.learning_rate == once.reward.optimizer.learning_rate == 1e-4
    spoken = load_recipe(recipe('description: "tab\\tand line\\nשלום \\u200f"\n'))
    assert "שלום" in spoken.description
