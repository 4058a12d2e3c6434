"""A ready reward model gives the scores that transformers gives, of texts under its own template and tokens."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from rlhf.stages import scorer
from rlhf.stages.prepare import stage as prepare
from rlhf.stages.prepare.settings import Config as DataConfig
from rlhf.stages.sampling.episode_tables import conversation_of
from rlhf.stages.score.settings import MODEL, Reward
from rlhf.stages.score.stage import outcomes_of
from rlhf.tuning.chat.template import Template
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rewards.learned import rendered
from rlhf.tuning.rows import CompletionRow, PromptRow, read_table
from tests.stages.score.support import context
from tests.stages.training.support import Folder, perform

torch = pytest.importorskip("torch", reason="parity needs torch")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if messages[0]['content'] == 'refused' %}{{ raise_exception('no such text') }}{% endif %}"
)
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
TEXTS = ["4", "44, I think", "4", ""]


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
            [("What is 2 + 2?", {}), ("", {"prompt_messages": SYSTEM}), ("refused", {}), ("9" * 90, {})], TEXTS
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
