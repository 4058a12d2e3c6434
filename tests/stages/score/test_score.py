"""Scores of rollouts: one table, whatever an earlier try or a damaged line has left; no outage is in it (R25)."""

import dataclasses
import json
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from rlhf.stages import scorer
from rlhf.stages.common.journal import Journal
from rlhf.stages.common.sandboxed_code import suspect_code
from rlhf.stages.prepare import stage as prepare
from rlhf.stages.prepare.settings import Config as DataConfig
from rlhf.stages.sampling.episode_tables import conversation_of
from rlhf.stages.sampling.groups import read_scored, read_turns
from rlhf.stages.score import stage as score
from rlhf.stages.score.settings import MODEL, Config, Reward
from rlhf.stages.score.stage import outcomes_of
from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.chat.template import Template
from rlhf.tuning.columns import Numbers
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rewards.failures import Outage, TooManyFailures
from rlhf.tuning.rewards.learned import rendered
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rewards.sandbox import gaps
from rlhf.tuning.rewards.totals import RewardFailed
from rlhf.tuning.rows import CompletionRow, PromptRow, read_table, write_table
from tests.judge_server import judge_server
from tests.stages.score.support import TEXTS, context, table
from tests.stages.training.support import Folder, perform


def test_a_reward_that_no_statistic_can_take_is_a_failure(tmp_path, rollouts):
    rewards = {"a": Reward(function="tests.stages.score.functions:exploding")}
    with pytest.raises(TooManyFailures, match=r"failed on 1 of 6 completions.*1e\+20 with weight 1 is beyond 1e\+15"):
        score.run(context(tmp_path / "a", rollouts, rewards=rewards, max_failed_fraction=0.0)[0])
    ctx, _ = context(tmp_path / "b", rollouts, rewards=rewards, max_failed_fraction=0.5)
    assert score.run(ctx)["failed"] == pytest.approx(1 / 6)
    assert [row.total for row in table(ctx)[1]] == [1.0] * 5 + [None]


def test_what_is_scored_apart_is_on_the_scale_of_its_round(tmp_path, rollouts):
    rewards = {
        "shares": Reward(function="tests.stages.score.functions:shares", normalise="batch", clip=[0.0, 0.15], weight=3),
        "exact": Reward(function="exact_match"),
    }
    more = {"rewards": rewards, "max_failed_fraction": 0.5}
    first, _ = context(tmp_path / "a", rollouts, **more)
    score.run(first)
    # The same completions as greedy ones, one a place: their statistics would be others.
    rows = [row for row in read_table(sorted(rollouts.local("rollouts/").glob("*")), CompletionRow) if row.sample == 2]
    write_table(tmp_path / "greedy" / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
    greedy = Folder(tmp_path / "greedy", "greedy")
    apart, _ = context(tmp_path / "b", greedy, round_scale=True, **more)
    score.run(dataclasses.replace(apart, inputs={"rollouts": greedy, "scale": Folder(first.out, "first")}))
    totals = {(row.place, row.sample): row.total for row in table(first)[1]}
    assert [row.total for row in table(apart)[1]] == [totals[0, 2], totals[1, 2]]
    # 0.1, 0.1, 0.15, 0.1, 0.15 with one failed: over the round, not over the two.
    mean, deviation = json.loads((first.out / "scale.json").read_text())["shares"]
    assert (mean, deviation) == pytest.approx((0.12, 0.0273861), rel=1e-5)
    assert totals[0, 2] == pytest.approx(1 + 3 * 0.03 / (deviation + 1e-4), rel=1e-6)


def test_a_trajectory_in_several_rows_has_one_score(tmp_path, rollouts):
    """The last row says what was answered in the end; an update finds all of them, and the turns, behind one score."""
    rows = read_table(sorted(rollouts.local("rollouts/").glob("*")), CompletionRow)
    earlier = [dataclasses.replace(rows[0], text="5", token_ids=[7, 8], logprobs=[-1.0, -1.0])]
    turns = [
        TurnRow(place=0, sample=0, turn=part, part=part, start=0, token_ids=row.token_ids, logprobs=row.logprobs,
                text=row.text, stop="eos")
        for part, row in enumerate([earlier[0], rows[0]])
    ]  # fmt: skip
    made = tmp_path / "parts"
    every = [*earlier, dataclasses.replace(rows[0], part=1), *rows[1:]]
    write_table(made / "rollouts" / "part-00000.parquet", every, CompletionRow.schema())
    write_table(made / "turns" / "part-00000.parquet", turns, TurnRow.schema())
    whole, _ = context(tmp_path / "a", rollouts, max_failed_fraction=0.5)
    parts, _ = context(tmp_path / "b", Folder(made, "parts"), max_failed_fraction=0.5)
    score.run(whole)
    score.run(parts)
    assert table(parts)[1] == table(whole)[1]
    inputs = {"rollouts": Folder(made, "parts"), "scores": Folder(parts.out, "scores")}
    found = read_scored(inputs)
    assert found.rows == every and len(found.rollouts) == len(found.scores) == len(rows)
    assert read_turns(inputs) == turns
    assert found.only([1]).rows == rows[3:]


def test_a_failure_has_one_cause_and_leaves_the_sums(tmp_path, rollouts):
    ctx, _ = context(tmp_path / "a", rollouts, truncated="zero")
    metrics = score.run(ctx)
    _, rows = table(ctx)
    assert [(r.place, r.sample, r.prompt_id) for r in rows] == [(i // 3, i % 3, f"p{i // 3}") for i in range(6)]
    assert [r.rewards["exact"] for r in rows] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    boom = "shares: KeyError: 'boom' (functions.py, line 9)"
    assert [r.failure for r in rows] == [None] * 3 + [boom] + [None] * 2
    # The last one was cut off at max_tokens.
    assert [r.total for r in rows] == pytest.approx([1.03, 0.03, 1.06, None, 1.03, 0.0])
    assert metrics["failed"] == 1 / 6 and metrics["failures"] == {boom: 1}
    assert metrics["reward_exact"] == 0.5
    assert metrics["zero_variance"] == 0.0


def again(ctx):
    """The context of the same command, given again."""
    shutil.rmtree(ctx.out)
    ctx.out.mkdir()
    return ctx


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, TooManyFailures),
        ({"on_failure": "zero"}, TooManyFailures),
        ({"on_failure": "stop"}, RewardFailed),
        ({"arguments": {"text": "5", "outage": "44"}}, Outage),
    ],
    ids=["drop", "zero", "stop", "outage"],
)
def test_a_stage_that_failures_have_ended_goes_on_when_their_cause_is_gone(tmp_path, rollouts, given, error):
    (tmp_path / "broken").touch()
    arguments = {"broken": str(tmp_path / "broken"), "outage": "none", **given.get("arguments", {})}
    reward = Reward(function="tests.stages.score.functions:flaky", **(given | {"arguments": arguments}))
    ctx, log = context(tmp_path / "a", rollouts, rewards={"mine": reward})
    with pytest.raises(error, match="mine.*(boom|gone)"):
        score.run(ctx)
    assert not list(ctx.out.iterdir())
    (tmp_path / "broken").unlink()
    metrics = score.run(again(ctx))
    assert metrics["failed"] == 0 and metrics["reward"] == 1.0
    # Scores that the first try has finished are read.
    finished = any("finished scores are there" in line for line in log)
    assert finished == (error is Outage)


@pytest.mark.slow
def test_scoring_makes_no_object_for_each_token(tmp_path, rollouts):
    """A list of a completion's ids takes 36 bytes of a token."""
    reward = {"short": Reward(function="length_at_most", arguments={"tokens": 4096})}
    # Once before: what a first round imports is not the round's.
    score.run(context(tmp_path / "a", rollouts, rewards=reward)[0])
    count, tokens = 32, 16384
    ids = Numbers(np.arange(1000, 1000 + tokens, dtype=np.int32))
    logps = Numbers(np.zeros(tokens, np.float32))
    rows = [
        CompletionRow(place=i // 4, sample=i % 4, prompt_id=f"p{i}", prompt_ids=[1], token_ids=ids, logprobs=logps)
        for i in range(count)
    ]
    write_table(tmp_path / "long" / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
    ctx, _ = context(tmp_path / "b", Folder(tmp_path / "long", "long"), rewards=reward, shard_completions=count)
    tracemalloc.start()
    try:
        metrics = score.run(ctx)
        peak = tracemalloc.get_traced_memory()[1] / count / tokens
    finally:
        tracemalloc.stop()
    # Four bytes on the way to the function, whose process alone makes lists of them.
    assert metrics["reward"] == -3.0 and peak < 12


def test_a_judge_that_is_down_and_then_up_leaves_no_trace(tmp_path, rollouts):
    up, spoken = [True], []

    def reply(body):
        spoken.append(body["messages"][0]["content"])
        return f"{len(spoken)}" if up and len(spoken) <= 4 else 503

    with judge_server(reply) as (url, asked):
        arguments = {"url": url, "model": "m", "retries": 0, "template": "{completion}"}
        reward = Reward(function="judge", arguments=arguments)
        # One request after the other, as the replies are counted.
        ctx, _ = context(tmp_path / "a", rollouts, rewards={"j": reward}, max_concurrency=1)
        with pytest.raises(Outage, match=r"reward j: no verdict on 2 of 3 completions: .*answered 503"):
            score.run(ctx)
        assert not list(ctx.out.iterdir()) and "503" not in "".join(p.read_text() for p in ctx.work.glob("*.jsonl"))
        first = len(asked)
        spoken.clear()
        metrics = score.run(again(ctx))
    # Four verdicts were kept: the rest alone is asked for.
    assert (first, len(asked) - first) == (6, 2)
    assert metrics["failed"] == 0 and metrics["reward_j"] == pytest.approx((1 + 2 + 3 + 4 + 1 + 2) / 6 / 10)


@pytest.mark.parametrize(("batch", "size"), [("sample", 1), ("group", 3), ("round", 6)])
def test_a_function_sees_a_completion_a_group_or_the_round(tmp_path, rollouts, batch, size):
    reward = Reward(function="tests.stages.score.functions:relative", batch=batch)
    ctx, _ = context(tmp_path / "a", rollouts, rewards={"r": reward})
    score.run(ctx)
    longest = {"sample": [len(t) for t in TEXTS], "group": [2, 2, 2, 4, 4, 4], "round": [4] * 6}[batch]
    expected = [10 * size + len(text) / most for text, most in zip(TEXTS, longest, strict=True)]
    path, rows = table(ctx)
    assert [r.total for r in rows] == pytest.approx(expected)
    content = path.read_bytes()
    # From the journal.
    score.run(again(ctx))
    assert path.read_bytes() == content


@pytest.mark.slow
def test_the_reward_model_reads_the_end_of_the_turn(tmp_path):
    """R23: one that stopped at another id of the generation config has the score of its text."""
    from rlhf.tuning.models.huggingface import scalar_head_params
    from rlhf.tuning.models.tokenizer import turn_end
    from tests.tuning.tiny import CONFIG, PARAMS

    params = scalar_head_params(CONFIG, PARAMS, np.linspace(-1, 1, CONFIG.hidden_size, dtype=np.float32))
    tokenizer = byte_tokenizer()
    # Of the tiny model's vocabulary of 97.
    tokenizer.chat_template = None
    tokenizer.eos_token = "Z"
    end = turn_end(tokenizer)
    assert end is not None and end < 97
    ended = [([5, 6, last], stop) for last, stop in ((end, "eos"), (3, "eos"), (3, "length"), (end, "length"))]
    ended += [([5, 6], "string")]
    rows = [
        CompletionRow(
            place=0, sample=i, prompt_id="p", prompt_ids=[1], token_ids=ids, logprobs=[0.0] * 3, stop=stop, answer="4"
        )
        for i, (ids, stop) in enumerate(ended)
    ]  # fmt: skip
    write_table(tmp_path / "made" / "rollouts" / "a.parquet", rows, CompletionRow.schema())
    ctx, _ = context(tmp_path / "a", Folder(tmp_path / "made", "made"), rewards={"m": Reward(function="reward_model")})
    ctx = dataclasses.replace(ctx, inputs=ctx.inputs | {n: Folder(tmp_path, n) for n in ("reward", "tokenizer")})
    ctx.memory |= {"scorer:reward": (CONFIG, params), "tokenizer:tokenizer": tokenizer}
    score.run(ctx)
    first, other, cut, same, text = totals = [row.total for row in table(ctx)[1]]
    assert first == other == same == text and cut != first
    # A second try reads the finished scores: it does not compute them with these parameters.
    ctx.memory["scorer:reward"] = CONFIG, scalar_head_params(CONFIG, PARAMS)
    score.run(again(ctx))
    assert [row.total for row in table(ctx)[1]] == totals


@pytest.mark.slow
def test_a_score_of_the_reward_model_that_is_not_finite_is_a_failure(tmp_path, rollouts):
    # Here: the module would cost each test of this file a second.
    from rlhf.tuning.models.huggingface import scalar_head_params
    from tests.tuning.tiny import CONFIG, PARAMS

    params = scalar_head_params(CONFIG, PARAMS, np.full(CONFIG.hidden_size, np.nan, np.float32))
    ctx, _ = context(tmp_path / "a", rollouts, rewards={"model": Reward(function="reward_model")})
    ctx = dataclasses.replace(ctx, inputs={**ctx.inputs, "reward": rollouts, "tokenizer": Folder(tmp_path, "own")})
    ctx.memory["tokenizer:own"] = byte_tokenizer()
    ctx.memory[f"scorer:{rollouts.digest}"] = (CONFIG, params)
    with pytest.raises(TooManyFailures, match="reward model .* failed on 6 of 6 .*not finite: nan"):
        score.run(ctx)


def test_where_code_is_run_the_metrics_say_what_it_can_reach(tmp_path, rollouts):
    ctx, log = context(tmp_path / "a", rollouts, rewards={"c": Reward(function="code_passes")})
    metrics = score.run(ctx)
    assert metrics["code_can_reach"] == list(gaps()) and metrics["suspect_code"] == 0
    assert any("WARNING: code_passes" in line for line in log) == bool(gaps())


def test_rewarded_code_that_may_deceive_is_counted_once_a_completion():
    texts = ["import gc"] * 4 + ["x = 1"]
    values = [[1.0, 0.0, None, 0.5, 1.0], [1.0] * 5, [1.0, 0.0, 0.0, 0.0, 1.0]]
    assert suspect_code(["code_passes", "exact_match", "code_passes"], values, texts) == 2


@pytest.mark.parametrize(("setting", "other"), [("truncated", "keep"), ("unscored", "drop")])
def test_a_total_of_zero_is_refused_where_it_is_not_low(setting, other):
    exact = {"function": "exact_match"}
    for reward, message in [
        ({"normalise": "group"}, "normalise: group 0 is the mean"),
        ({"normalise": "batch"}, "normalise: batch 0 is the mean"),
        ({"function": "reward_model"}, "squash: none scores may be below 0"),
        ({"function": "reward_model", "clip": [-1, 1]}, "squash: none scores may be below 0"),
        ({"weight": -0.5}, "weight: -0.5 totals may be below 0"),
    ]:
        values = {setting: "zero", "rewards": {"odd": exact | reward, "plain": exact}}
        with pytest.raises(ValidationError, match=rf"{setting}: zero .*rewards\.odd\.{message}.*{setting}: {other}"):
            Config.model_validate(values)
        Config.model_validate(values | {setting: other})
    model = {"function": "reward_model"}
    for reward in ({"normalise": "none"}, model | {"squash": "sigmoid"}, model | {"clip": [0, 5]}, {"weight": 0.0}):
        Config.model_validate({setting: "zero", "rewards": {"odd": exact | reward, "plain": exact}})


def test_a_line_that_a_kill_has_cut_costs_one_score(tmp_path, rollouts):
    ctx, log = context(tmp_path / "a", rollouts, rewards={"exact": Reward(function="exact_match")})
    score.run(ctx)
    (file,) = ctx.work.glob("*.jsonl")
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    row = CompletionRow(place=7, prompt_id="p", prompt_ids=[1], token_ids=[1], logprobs=[0.0])
    Journal(ctx, "reward exact", "journal-exact").add([row], [Outcome(0.5)])
    found = Journal(ctx, "reward exact", "journal-exact")
    assert found.get([row]) == [Outcome(0.5)]
    assert any(line.startswith("reward exact: 4 finished scores are there") for line in log)


def test_a_line_that_a_disk_has_changed_costs_one_score_and_is_never_taken(tmp_path):
    ctx, _ = context(tmp_path / "a", Folder(tmp_path, "none"), rewards={"exact": Reward(function="exact_match")})
    rows = [CompletionRow(place=n, prompt_id="p", prompt_ids=[1], token_ids=[1], logprobs=[0.0]) for n in range(3)]
    journal_ = Journal(ctx, "reward exact", "journal-exact")
    for row in rows:
        journal_.add([row], [Outcome(row.place / 4)])
    (file,) = ctx.work.glob("*.jsonl")
    whole = file.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            read = Journal(ctx, "reward exact", "journal-exact")
            kept = [read.get([row]) for row in rows]
            assert all(k in (None, [Outcome(row.place / 4)]) for k, row in zip(kept, rows, strict=True))
            assert kept.count(None) <= 2


torch = pytest.importorskip("torch", reason="parity needs torch")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if messages[0]['content'] == 'refused' %}{{ raise_exception('no such text') }}{% endif %}"
)
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
ANSWERS = ["4", "44, I think", "4", ""]


@pytest.fixture(params=["Qwen2", "Llama"])
def folder(request, tmp_path):
    """A random classifier whose pad is the token that ends its texts, or another one."""
    import transformers

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    pad = tokenizer.eos_token_id if request.param == "Llama" else tokenizer.pad_token_id
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 96, "vocab_size": len(tokenizer), "num_labels": 1}
    config = getattr(transformers, f"{request.param}Config")(**sizes, pad_token_id=pad, initializer_range=0.5)
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForSequenceClassification")(config).double()
    model.save_pretrained(tmp_path / "ready")
    tokenizer.save_pretrained(tmp_path / "ready")
    return tmp_path / "ready"


def rows_of(prompts, texts):
    return [
        CompletionRow(
            place=place, sample=i, prompt_id=f"p{place}", prompt=prompt, metadata=json.dumps(metadata),
            prompt_ids=[1], token_ids=[2], logprobs=[0.0], text=text,
        )
        for place, (prompt, metadata) in enumerate(prompts) for i, text in enumerate(texts)
    ]  # fmt: skip


@pytest.mark.slow
def test_its_scores_are_those_of_transformers(folder, tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    # transformers asks for it by name in norms and softmax, whatever the type of the weights.
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    with jax.enable_x64(True):
        metrics, made = perform(scorer, scorer.Config(source=str(folder)), tmp_path / "made", {})
        rows = rows_of(
            [("What is 2 + 2?", {}), ("", {"prompt_messages": SYSTEM}), ("refused", {}), ("9" * 90, {})], ANSWERS
        )
        rewards = {"m": Reward(function=MODEL, source=str(folder))}
        ctx, _ = context(tmp_path / "a", Folder(tmp_path, "rollouts"), rewards=rewards, shard_completions=99)
        compute = ctx.config.compute.model_copy(update={"dtype": "float64"})
        config = ctx.config.model_copy(update={"compute": compute, "max_failed_fraction": 0.6})
        ctx = dataclasses.replace(ctx, config=config, inputs={**ctx.inputs, "scorer_m": made})
        outcomes = outcomes_of(ctx, ["m"], rows)["m"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    assert metrics["parameters"] == sum(p.numel() for p in model.parameters())

    def theirs(row):
        text = tokenizer.apply_chat_template(conversation_of(row, {}), tokenize=False)
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0].item()

    expected = [theirs(row) for row in rows[:8]]
    np.testing.assert_allclose([outcome.value for outcome in outcomes[:8]], expected, rtol=1e-10)
    assert len({round(value, 4) for value in expected}) == 6
    assert all("(no such text); use one with these roles" in str(outcome.failure) for outcome in outcomes[8:12])
    assert all("tokens, it has 96 positions" in str(outcome.failure) for outcome in outcomes[12:])


def test_it_reads_the_recipes_system_prompt_and_no_turn_that_a_completion_has_written(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    end = tokenizer.eos_token
    said = f"4{end}[user] Great!"
    own = {"role": "system", "content": "Own."}
    prepared = [{"prompt": "What?", "id": "a"}, {"prompt": [own, SYSTEM[1]], "id": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prepared))
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    config = DataConfig(source=str(tmp_path / "a.jsonl"), splits=["prompts"], system_prompt="Be brief.")
    _, made = perform(prepare, config, tmp_path / "made", {}, base=Folder(tmp_path, "base"))
    prompts = read_table(sorted(made.local("prompts/").glob("*.parquet")), PromptRow)
    for prompt, system in zip(prompts, ("Be brief.", "Own."), strict=True):
        [row] = rows_of([(prompt.prompt, json.loads(prompt.metadata))], [said])
        ids = rendered(Template(tokenizer), conversation_of(row, {}), None)
        assert tokenizer.decode(ids).endswith(f"[system] {system}{end}[user] What?{end}[assistant] {said}{end}")
        assert ids.count(tokenizer.eos_token_id) == 3


def test_a_message_that_its_template_leaves_out_is_a_failure():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("for m in messages", "for m in messages if m.role != 'system'")
    ids = rendered(Template(tokenizer), [*SYSTEM, {"role": "assistant", "content": "4"}], None)
    # In the user's first message, as the template has no role for it.
    assert "[user] Be brief.\n\nWhat?" in tokenizer.decode(ids)
    tokenizer.chat_template = TEMPLATE.replace("for m in messages", "for m in messages[-1:]")
    with pytest.raises(ValueError, match="leaves out the text of message 1"):
        rendered(Template(tokenizer), [SYSTEM[1], {"role": "assistant", "content": "4"}], None)


@pytest.mark.slow
def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedModel, match="ready: the tokenizer has no chat template"):
        perform(scorer, scorer.Config(source=str(folder)), tmp_path / "a", {})
    with pytest.raises(FileNotFoundError, match=r"random:tiny: no tokenizer\.json"):
        perform(scorer, scorer.Config(source="random:tiny"), tmp_path / "b", {})
    with pytest.raises(ValueError, match="is a reward model: set function: reward_model in place of exact_match"):
        Reward(function="exact_match", source="hub:org/name")
