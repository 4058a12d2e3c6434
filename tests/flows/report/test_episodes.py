"""Episodes in the report and on the console: what is shown, what is coloured, and what the levels say."""

import io
import json
import re

import pytest
from rich.console import Console

from rlhf.flows.report.console import closing_table
from rlhf.flows.report.episodes import episodes, examples, side_by_side
from rlhf.flows.report.measures import round_series
from rlhf.flows.report.page import write_report
from rlhf.flows.report.reference_levels import level_notes
from rlhf.flows.report.run_view import RunView
from tests.browser import measure
from tests.episodes import REASON, SAID, TOKENIZER, made_run
from tests.flows.report.support import Page

ROUNDS, LABELS = [0, 1], ["base", "sft", "rl"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(store, record, text of the page) of a run in an environment."""
    store, record = made_run(tmp_path_factory.mktemp("episodes"))
    path = write_report(store, record["name"])
    with open(path, encoding="utf-8") as file:
        return store, record, file.read()


@pytest.fixture(scope="module")
def shown(whole):
    return episodes(RunView(*whole[:2]), ROUNDS, LABELS)


@pytest.mark.slow
def test_each_round_shows_its_best_median_worst_and_failed_episode(shown):
    titles = [group["title"] for group in shown["groups"]]
    assert titles[:2] == ["Round 0", "Round 1"] and all(t.startswith("Held-out task heldout-") for t in titles[2:])
    first = {e["why"]: e for e in shown["groups"][0]["episodes"]}
    assert list(first) == ["best", "median", "worst", "failed"]
    assert (first["best"]["row"]["reward"], first["worst"]["row"]["reward"]) == (1.0, 0.0)
    assert first["failed"]["row"]["reason"] == REASON and first["failed"]["fate"] == "failed"
    assert shown["shown"] == sum(len(group["episodes"]) for group in shown["groups"])


def test_tokens_are_coloured_by_the_advantage_of_their_episode(shown):
    first = {e["why"]: e for e in shown["groups"][0]["episodes"]}
    levels = {why: {p.level for turn in e["turns"] for p in turn["pieces"]} for why, e in first.items()}
    # The advantages of the round are half and minus a half; the failed episode has none.
    assert levels == {"best": {"p3"}, "median": {"n3"}, "worst": {"n3"}, "failed": {"s"}}
    turn = first["worst"]["turns"][0]
    assert "".join(piece.text for piece in turn["pieces"]) == f"{SAID}{turn['action']}<|im_end|>"
    assert turn["pieces"][0].title == f"-0.250 (token {TOKENIZER.encode('<', add_special_tokens=False)[0]})"
    # A character of two bytes, each of them a token.
    assert [p.title.count("token") for p in turn["pieces"] if p.text == "Ω"] == [2]


def test_the_same_task_stands_side_by_side_under_the_first_and_the_last_policy(shown):
    for group in shown["groups"][2:]:
        before, after = group["episodes"]
        assert (before["why"], after["why"]) == ("base", "rl")
        assert all(before["row"][name] == after["row"][name] for name in ("seed", "prompt_id"))
    assert shown["groups"][2]["note"].endswith("gained")
    assert [e["row"]["reward"] for e in shown["groups"][2]["episodes"]] == [0.0, 1.0]


def test_the_page_escapes_episodes_and_refers_to_nothing(whole):
    text = whole[2]
    page = Page(text)
    assert SAID.strip() in "".join(page.words) and REASON in page.text
    assert not {"script", "b", "img"} & set(page.tags)
    assert [r for r in page.references if not r.startswith(("#", "data:,"))] == []
    assert len(page.ids) == len(set(page.ids)) and "episodes" in page.ids and page.unnamed == []
    assert "RL is above a policy that does not look (1.000 [0.900, 1.000] against 0.429)" in page.text
    for title in ("random moves", "best without looking", "Episodes by their end", "Success", "Turns"):
        assert title in page.text
    assert len(text) < 400_000


def test_a_browser_shows_the_tokens(whole):
    script = """[doc.documentElement.scrollWidth <= view.innerWidth, doc.querySelectorAll("#episodes .t.p3").length,
        view.getComputedStyle(doc.querySelector("#episodes .t.p3")).backgroundColor !=
        view.getComputedStyle(doc.querySelector("#episodes .t.n3")).backgroundColor].join("|")"""
    fits, found, differ = measure(whole[2], script, 400).split("|")
    assert (fits, differ) == ("true", "true") and int(found) > 10


def test_an_episode_says_how_many_turns_are_left_out(whole, monkeypatch):
    monkeypatch.setattr("rlhf.flows.report.episodes.MOST_TURNS", 1)
    found = episodes(RunView(*whole[:2]), ROUNDS, LABELS)["groups"][0]["episodes"]
    assert {e["left_out"] == e["row"]["turns"] - len(e["turns"]) for e in found} == {True}
    assert max(e["left_out"] for e in found) > 0


def test_without_the_tokenizer_turns_are_text(whole, monkeypatch):
    """The base's artifact may have left the store: its section is shown all the same."""
    run = RunView(*whole[:2])
    run._artifacts["base"] = None
    turn = episodes(run, ROUNDS, LABELS)["groups"][0]["episodes"][0]["turns"][0]
    assert turn["pieces"] == [] and turn["text"].startswith(SAID)


def test_examples_are_different_episodes():
    names = [(0, i) for i in range(4)]
    assert examples(dict.fromkeys(names), []) == {}
    assert examples({names[0]: 1.0}, [names[1]]) == {"best": names[0], "failed": names[1]}
    rewards = dict(zip(names, (0.5, 0.1, None, 0.9), strict=True))
    assert examples(rewards, []) == {"best": names[3], "median": names[0], "worst": names[1]}


def test_tasks_side_by_side_are_gained_lost_and_the_same():
    def table(*scores):
        return {(i, 0): score for i, score in enumerate(scores)}

    found = side_by_side(table(0.0, 1.0, 1.0, None), table(1.0, 0.0, 1.0, 1.0))
    assert found == {"gained": (0, 0), "lost": (1, 0), "the same score": (2, 0)}
    assert side_by_side(table(0.0), table(1.0)) == {"gained": (0, 0)}


def test_the_closing_table_has_the_levels_behind_the_untrained_policy(whole):
    nodes = whole[1]["nodes"]
    evaluations = {label: nodes[f"evaluate.{label}"]["metrics"] for label in LABELS}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(closing_table(evaluations))
    rows = re.findall(r"│ (base|SFT|RL|random moves|best without looking|at best) +│ (\d\.\d+)", console.export_text())
    assert [title for title, _ in rows] == ["base", "random moves", "best without looking", "at best", "SFT", "RL"]
    assert dict(rows)["best without looking"] == "0.429" and dict(rows)["random moves"] == "0.370"


@pytest.mark.parametrize(
    ("low", "high", "blind", "says"),
    [
        (0.5, 0.7, 0.43, "is above"),
        (0.1, 0.3, 0.43, "is below"),
        (0.3, 0.5, 0.43, "may be a policy"),
        (1.0, 1.0, 1.0, "solves all of these tasks"),
    ],
)
def test_whether_a_policy_looks_follows_from_its_interval(low, high, blind, says):
    metrics = {"score": (low + high) / 2, "score_low": low, "score_high": high, "levels": {"blind": blind}}
    assert says in level_notes({"rl": metrics})[0]
    assert "lower bound" in level_notes({"rl": metrics | {"levels": {"blind": blind, "exact": False}}})[0]
    assert level_notes({"rl": {"score": 0.5}}) == level_notes({}) == []


def test_a_guessed_success_is_named(whole):
    metrics = whole[1]["nodes"]["evaluate.rl"]["metrics"] | {"success_guessed": True}
    assert 'the environment does not set `info["success"]`' in level_notes({"base": metrics, "rl": {}})[0]


def test_rounds_have_series_of_their_episodes(whole):
    series = round_series(whole[1])
    assert series["episodes_ended"] == [27.0, 27.0] and series["episodes_without a result"] == [1.0, 1.0]
    assert series["episodes_cut"] == [0.0, 0.0]
    assert series["success"][0] < series["success"][1] == 1.0 and series["turns"][0] > 1
    # The environment's rewards may be any numbers: no pass rate is made of them.
    assert series["pass_rate"] == [None, None]
    assert json.dumps(series)
