"""Built-in rewards score what their names say, as a careful human marker would; unknown names are answered."""

import inspect
import itertools
import json
import re
import time
from pathlib import Path

import pytest

from rlhf.tuning.data.tasks import reasoning_gym
from rlhf.tuning.rewards import functions as f
from rlhf.tuning.rewards import mathematics
from rlhf.tuning.rewards.answers import CHECKS, unreadable
from rlhf.tuning.rewards.functions import BUILT_IN


def test_without_an_answer_a_reward_does_not_apply():
    assert f.exact_match(["p"], ["x"], answer=[None]) == [None]


def test_token_share_counts_tokens():
    assert f.token_share(["p"], ["x"], completion_ids=[[5, 5, 1, 2]], token=5) == [0.5]


def test_length_penalty_starts_at_the_limit():
    assert f.length_at_most(["p"] * 2, ["", ""], completion_ids=[[1] * 4, [1] * 6], tokens=4) == [0.0, -0.5]


def test_the_soft_punishment_of_length_grows_through_the_buffer():
    ids = [[1] * n for n in (6, 8, 10, 12)]
    assert f.overlong(["p"] * 4, [""] * 4, completion_ids=ids, tokens=10, buffer=4) == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("task", ["chain_sum", "number_sorting", "rearc"])
def test_reasoning_gym_scores_problems_as_the_data_source_writes_them(task):
    record = next(iter(reasoning_gym(task, size=1, seed=3)))
    given = {"answer": [record["answer"]] * 2, "metadata": [record["metadata"]] * 2}
    right, wrong = f.reasoning_gym_score([record["prompt"]] * 2, [record["answer"], "wrong"], **given)
    assert right == 1.0 and wrong < 1.0


@pytest.mark.parametrize("form", ["-4", "<think>\nIs it 5?\n</think>\n\n-4", "Thus:\n<answer>-4</answer>"])
def test_reasoning_gym_reads_the_answer_as_the_other_rewards_do(form):
    given = {"answer": ["-4"] * 2, "metadata": [{}, {"opened_tag": "think"}], "task": "chain_sum"}
    texts = [form, f"Is it 5?\n</think>\n\n{form}"]
    assert f.reasoning_gym_score(["1 - 5"] * 2, texts, **given) == [1.0, 1.0]


EVALUATED = sorted({*f._EVALUATED, *f._PARSED, *f._OF_DATA})


@pytest.mark.parametrize("task", EVALUATED)
def test_no_text_runs_as_a_program_in_the_verifier_of_a_task(task, tmp_path):
    path = tmp_path / "made"
    record = next(iter(reasoning_gym(task, size=1, seed=3)))
    gold, details = record.get("answer") or "1", record["metadata"]["entry"]
    attacks = [
        f"__import__('pathlib').Path({str(path)!r}).touch()",
        f"open({str(path)!r}, 'w')",
        f"[open({str(path)!r}, 'w')]",
        f'"open({str(path)!r}, chr(119))"',
        f"f'{{open({str(path)!r}, chr(119))}}'",
        f"(lambda: open({str(path)!r}, 'w'))()",
        f"sqrt(open({str(path)!r}, 'w'))",
        *(
            "oracle_answer",
            "[oracle_answer]",
            "[[oracle_answer]]",
            "[valid_solutions]",
            "9**9**9**9",
            "(9**999)**999",
            "factorial(9**999)",
        ),
    ]
    given = {"answer": [gold], "metadata": [record["metadata"]]}
    (right,) = f.reasoning_gym_score([record["prompt"]], [gold], **given)
    wrong = [f.reasoning_gym_score([record["prompt"]], [attack], **given)[0] for attack in attacks]
    assert not path.exists() and max(wrong) < 0.1 and (right == 1.0 or "answer" not in record)
    assert isinstance(details, dict)
    for answer, more in [(attacks[0], {}), *[(gold, {name: attacks[0]}) for name in ("integrand", "problem")]]:
        metadata = [{**record["metadata"], "entry": {**details, **more}}]
        f.reasoning_gym_score([record["prompt"]], [gold], answer=[answer], metadata=metadata)
    assert not path.exists()


@pytest.mark.slow
def test_right_answers_of_integrals_are_paid_in_all_forms():
    records = list(reasoning_gym("intermediate_integration", size=25, seed=3))
    given = {"answer": [r["answer"] for r in records], "metadata": [r["metadata"] for r in records]}
    assert set(f.reasoning_gym_score(["?"] * 25, given["answer"], **given)) == {1.0}


def test_each_place_where_the_package_runs_a_text_is_known():
    """A new version of reasoning-gym that runs another text fails here."""
    import reasoning_gym

    folder = Path(reasoning_gym.__file__).parent
    calls = re.compile(r"(?<![\w.])(?:sp\.|sympy\.)?(?:eval|exec|parse_expr|sympify)\(")
    runs = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if calls.search(p.read_text())}
    tasks = {f"{name}.py" for name in EVALUATED}
    others = {
        # Code of the package's own data, and a parser of its own.
        *("code/codeio.py", "logic/propositional_logic.py", "arithmetic/basic_arithmetic.py"),
        *("arithmetic/gsm_symbolic/generators_00_49.py", "arithmetic/gsm_symbolic/generators_50_99.py"),
    }
    assert {p for p in runs if p.rpartition("/")[2] not in tasks} == others


def test_the_last_match_is_compared():
    texts = ["so <answer>3</answer>, no: <answer> 4 </answer>", "4"]
    pattern = "<answer>(.*?)</answer>"
    assert f.exact_match(["p"] * 2, texts, answer=["4", "4"], extract=pattern) == [1.0, 0.0]
    assert f.number_match(["p"] * 2, texts, answer=["4.04", "4"], extract=pattern, tolerance=0.01) == [1.0, 0.0]


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="no reward function 'exact_mach'; did you mean exact_match"):
        f.find("exact_mach")
    with pytest.raises(ValueError, match="no_such_module"):
        f.find("no_such_module:f")


def test_a_group_of_extract_that_took_no_part_in_the_match_is_no_answer():
    pattern = r"answer is (\d+)|I do not know"
    for reward in (f.exact_match, f.number_match):
        found = reward(["q"] * 2, ["I do not know", "The answer is 7"], answer=["7", "7"], extract=pattern)
        assert found == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("1e9999999999999999999", 0.0),
        ("it is 4e-9999999999999999999", 0.0),
        ("9" * 4400 + r"\frac{1}{2}", 0.0),
        ("9" * 4400 + " 1/2", 0.0),
        ("1/" + "9" * 30_000, 0.0),
        ("4 and 1e9999999999999999999, or 4", 1.0),
        (r"\boxed{" * 50_000, 0.0),
        (r"\boxed{" * 50_000 + "4}", 1.0),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_number_of_any_size_has_a_verdict_at_once(text, score):
    start = time.process_time()
    assert f.number_match(["p"], [text], answer=["4"]) == [score]
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("opening", "closing"), [("{", "}"), ("(", ")"), (r"\frac{1}{", "}"), (r"\sqrt{", "}"), ("x^{", "}"), ("(", "")]
)
def test_an_expression_nested_too_deep_is_wrong_at_once(opening, closing):
    f.math_equal(["p"], ["4"], answer=["4"])
    start = time.process_time()
    text = r"\boxed{" + opening * 200 + "4" + closing * 200 + "}"
    assert f.math_equal(["p"], [text], answer=["5"]) == [0.0]
    assert time.process_time() - start < 1


def test_a_completion_is_read_once_for_all_accepted_answers(monkeypatch):
    monkeypatch.setattr(mathematics, "SECONDS", 0.2)
    f.math_equal(["p"], ["4"], answer=["4"])
    start = time.process_time()
    text = r"\boxed{" + "{" * 20 + "4" + "}" * 20 + "}"
    accepted = {"answers": [str(number) for number in range(5, 25)]}
    assert f.math_equal(["p"], [text], answer=[json.dumps(accepted["answers"])], metadata=[accepted]) == [0.0]
    assert time.process_time() - start < 1.5


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


# Facts from public test sets and reports (`source`) and from audits of this project; `differs` says why a verdict is
# not the published one.
ROWS = [json.loads(line) for line in Path(__file__).with_name("verdicts.jsonl").read_text().splitlines()]
KINDS = {key: list(rows) for key, rows in itertools.groupby(ROWS, key=lambda row: (row["reward"], row["kind"]))}


def judged(reward, answer, completion):
    metadata = {"opened_tag": answer} if reward == "tagged" else {}
    if isinstance(answer, list):
        answer, metadata = json.dumps(answer), {"answers": answer}
    # What is judged is also accepted when data is prepared.
    assert unreadable(reward, answer, metadata) is None
    return BUILT_IN[reward](["?"], [completion], answer=[answer], metadata=[metadata])[0]


@pytest.mark.parametrize("key", KINDS, ids=": ".join)
def test_a_verifier_judges_as_a_careful_human_marker(key):
    rows = [(row["answer"], row["completion"], row["verdict"]) for row in KINDS[key]]
    assert [row for row in rows if judged(key[0], *row[:2]) != row[2]] == []


def test_the_table_is_large_and_has_both_verdicts_of_each_reward():
    verdicts = {reward: {row["verdict"] for row in ROWS if row["reward"] == reward} for reward, _ in KINDS}
    assert len(ROWS) >= 300 and all(both == {0, 1} for both in verdicts.values())


@pytest.mark.parametrize("name", ["number_match", "math_equal", "exact_match"])
def test_a_thought_that_the_template_opened_and_nothing_closed_has_no_answer(name):
    texts = ["7", "\\boxed{7}, or is it", "hm</think>7"]
    found = BUILT_IN[name](["?"] * 3, texts, answer=["7"] * 3, metadata=[{"opened_tag": "think"}] * 3)
    assert found == [0, 0, 1]


@pytest.mark.parametrize(
    ("answer", "metadata"),
    [
        ('["assert f(2) == 4"]', {"answers": ["assert f(2) == 4"]}),
        ("assert f(2) == 4", {}),
        (None, {"tests": [{"input": "1", "output": "2"}, "f(3)"]}),
    ],
)
def test_tests_are_readable(answer, metadata):
    assert unreadable("code_passes", answer, metadata) is None


@pytest.mark.parametrize(
    ("name", "answer", "metadata", "reason"),
    [
        ("number_match", "√2", {}, "one number, got '√2'"),
        ("number_match", '["four"]', {"answers": ["four"]}, """one number, got '["four"]'"""),
        ("exact_match", " ", {}, "a text that is not empty, got ' '"),
        (
            "exact_match",
            '{"a": 1}',
            {"answers": {"a": 1}},
            "a text or number as answer, or a list of them, got {'a': 1}",
        ),
        ("code_passes", '["assert f(2) == 4"]', {}, "tests in Python that can fail, such as assert f(2) == 4, got "),
        ("code_passes", "4", {}, "tests in Python that can fail"),
        ("code_passes", "def near(a): assert a", {}, "tests in Python that can fail"),
        ("number_match", "nan", {}, "one number, got 'nan'"),
        (
            "number_match",
            "It is\n#### 72",
            {},
            "one number, got 'It is\\n#### 72'; `fields: {answer: {from: answer, pattern: '#### (.*)'}}` in data takes "
            "the text after ####",
        ),
        ("number_match", "Natalia sold 48/2 = 24 clips.", {}, "one number, got 'Natalia"),
        ("math_equal", "$", {}, "a mathematical expression, got '$'"),
        ("code_passes", "assert f(2) == ", {}, "tests in Python that can fail"),
        ("code_passes", None, {"tests": [{"input": "1"}]}, "tests as programs or as {input, output}"),
        ("code_passes", None, {"tests": "f(1)"}, "a list of tests in metadata.tests"),
    ],
)
def test_unreadable(name, answer, metadata, reason):
    assert str(unreadable(name, answer, metadata)).startswith(reason)


@pytest.mark.parametrize("name", CHECKS)
def test_without_an_answer_no_reward_applies_and_nothing_is_wrong(name):
    assert unreadable(name, None, {}) is None
