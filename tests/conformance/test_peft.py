"""Adapters against PEFT itself: either side's folder gives the other side's logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.models import huggingface as hf
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import PROJECTIONS, LoraConfig, assemble, join, merge, tune, tuned_graph
from rlhf.tuning.models.peft import save_adapter
from tests.tuning.models.adapters import load_adapter

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="parity needs torch")


@pytest.fixture(scope="module")
def peft():
    """Loaded by the tests that need it: it takes seconds."""
    return pytest.importorskip("peft", reason="parity needs peft")


TOKENS = np.random.default_rng(0).integers(0, 101, (2, 17))
SIZES = dict(
    vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
)  # fmt: skip


def families():
    """Without biases, with them, and with norms and scales of another kind."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

    gemma = {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    return {
        "llama": LlamaConfig(**SIZES),
        "qwen2": Qwen2Config(**SIZES, pad_token_id=100),
        "gemma3": Gemma3TextConfig(**SIZES | gemma, attn_implementation="eager"),
    }


# Names alone: every process of the tests imports this, and transformers' models take it seconds.
@pytest.fixture(params=["llama", "qwen2", "gemma3"])
def base(request, tmp_path):
    """A tiny transformers model and its folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(families()[request.param]).eval()
    model.save_pretrained(tmp_path / "base")
    return model, tmp_path / "base"


def ours(config, lora, trainable, frozen):
    decoder = assemble(None, join(tuned_graph(config, "decoder", lora), trainable, frozen))
    tokens = jnp.asarray(TOKENS)
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder(tokens, positions, packed_attention(ones, 0 * ones))
    return np.asarray(decoder.logits(hidden))


def theirs(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize(
    "lora",
    [LoraConfig(rank=4, alpha=6.0), LoraConfig(rank=3, alpha=9.0, targets=("q", "v", "down"), use_rslora=True)],
    ids=["all", "rslora"],
)
def test_peft_loads_our_adapter(base, peft, lora, tmp_path):
    model, folder = base
    config, params = hf.load_decoder(folder)
    trainable, frozen = tune(config, "decoder", params, lora, seed=1)
    trainable = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), trainable)
    save_adapter(tmp_path / "adapter", trainable, lora, str(folder))
    plain = theirs(model)
    tuned = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(ours(config, lora, trainable, frozen), theirs(tuned), atol=1e-4)
    assert np.abs(theirs(tuned) - plain).max() > 0.1
    # The merged folder is what PEFT merges.
    merged = merge(config, "decoder", params, trainable, lora)
    hf.save_decoder(tmp_path / "merged", config, merged, {})
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    np.testing.assert_allclose(theirs(again), theirs(tuned.merge_and_unload()), atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_computes_the_same_here(base, peft, rslora, tmp_path):
    model, folder = base
    modules = ["q_proj", "o_proj", "up_proj"]
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=5, lora_alpha=7, target_modules=modules, use_rslora=rslora, init_lora_weights=False
    )
    tuned = peft.get_peft_model(model, settings).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    config, params = hf.load_decoder(folder)
    lora, trainable = load_adapter(tmp_path / "adapter", config)
    assert lora == LoraConfig(rank=5, alpha=7.0, targets=("q", "o", "up"), use_rslora=rslora)
    frozen = tune(config, "decoder", params, lora, seed=0)[1]
    np.testing.assert_allclose(ours(config, lora, trainable, frozen), theirs(tuned), atol=1e-4)


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_a_reward_model_and_its_adapter(base, peft, tmp_path):
    from transformers import AutoModelForSequenceClassification

    folder = base[1]
    config, decoder = hf.load_decoder(folder)
    params = hf.scalar_head_params(config, decoder, jnp.full(48, 0.5, jnp.float32))
    lora = LoraConfig(rank=4)
    trainable, frozen = tune(config, "scalar", params, lora, seed=1)
    trainable = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), trainable)
    save_adapter(tmp_path / "adapter", trainable, lora, str(folder))
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=100, dtype="float32")
    tuned = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    head = assemble(None, join(tuned_graph(config, "scalar", lora), trainable, frozen))
    tokens = jnp.asarray(np.where(TOKENS == 100, 5, TOKENS))
    ones = jnp.ones_like(tokens)
    hidden, _ = head.decoder(tokens, jnp.broadcast_to(jnp.arange(17), tokens.shape), packed_attention(ones, 0 * ones))
    with torch.no_grad():
        wanted = tuned(torch.tensor(np.asarray(tokens))).logits[:, 0].numpy()
    np.testing.assert_allclose(head.scores(hidden[:, -1]), wanted, atol=1e-4)
    found, again = load_adapter(tmp_path / "adapter", config)
    assert found == lora and fingerprint(again) == fingerprint(trainable)
    assert set(lora.targets) == set(PROJECTIONS)
