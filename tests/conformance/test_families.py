"""Every model family against transformers (torch, float64, eager attention), with every odd feature switched on."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.device import Compute
from rlhf.tuning.models import huggingface as hf
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.families import FAMILIES as FAMILY_TABLE
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.tuning.models.named import tensors_from_params

torch = pytest.importorskip("torch", reason="parity needs torch")

VOCAB, LENGTH, WINDOW = 61, 23, 5
EXACT = 1e-9
"""Of values around 1 in float64; what is found is 1e-13."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
SLIDING, FULL = "sliding_attention", "full_attention"
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
# A size that no default gives; heads of 10 are not hidden / heads, and 6 query heads share 2 key-value heads.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_theta": 5e3, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama_biased": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True, "attention_bias": True}),
    "smollm3_windows": ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "rope_theta": 1e3}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [FULL, SLIDING] * 2}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_yarn": ("Qwen3", {"rope_scaling": YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "olmo2": ("Olmo2", {"tie_word_embeddings": True, "rope_scaling": YARN | {"attention_factor": 0.8}}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "attention_bias": True}
        | {"rope_theta": 2e3, "rope_scaling": YARN},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 1.7}
        | {"mlp_bias": True},
    ),
    "gemma": ("Gemma", {"attention_bias": True, "hidden_act": "gelu"}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 13, "hidden_activation": "gelu_pytorch_tanh"}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 13, "attention_bias": True}
        | {"rope_theta": 2e3, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        | {"layer_types": [SLIDING, SLIDING, FULL, SLIDING], "final_logit_softcapping": 5.0},
    ),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 11, "attention_bias": True}
        | {"tie_word_embeddings": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": 4}),
    "qwen3_moe_normalised": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True},
    ),
    "phi3": (
        "Phi3",
        {"hidden_size": 48, "head_dim": 8, "partial_rotary_factor": 0.75, "sliding_window": WINDOW}
        | {"original_max_position_embeddings": 32}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.1, 1.7, 3.0], "long_factor": [2.0, 3.0, 4.0]}},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 14, "head_dim": 4},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 11, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.8, "use_qk_norm": True}
        | {"attention_bias": True, "head_dim": 12, "partial_rotary_factor": 0.5},
    ),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
        | {"rope_parameters": YARN | {"truncate": False, "rope_theta": 2e3}},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def float64():
    """In place of the room's fixture of this name: the models of a module outlive its tests.

    transformers asks for float32 by name in norms, rotary tables and softmax, whatever the type of the weights. Here
    that name means float64: otherwise its rounding, amplified by random weights of this size, is all that is compared.
    """
    quick = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(before)
    jax.config.update("jax_disable_most_optimizations", quick)


def torch_model(name: str) -> Any:
    """A tiny model in which every parameter is random: what starts at zero or one would hide a mistake."""
    import transformers

    prefix, changes = FAMILIES[name]
    torch.set_num_threads(1)
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{prefix}Config")(**SIZES | json.loads(json.dumps(changes)))
    classes = {"Gemma3Text": "Gemma3ForCausalLM"}
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, classes.get(prefix, f"{prefix}ForCausalLM"))(config).eval()
    choices = ((name, x) for name, x in model.named_buffers() if name.endswith("e_score_correction_bias"))
    for parameter_name, p in (*model.named_parameters(), *choices):
        spread = 0.5 if any(word in parameter_name for word in ("norm", "bias", "sinks")) else 0.35
        # A larger one would leave experts without a token.
        spread = 0.1 if "e_score_correction" in parameter_name else spread
        torch.nn.init.normal_(p, 1.0 if "norm" in parameter_name and "emma" not in prefix else 0.0, spread)
    return model


@functools.cache
def case(name: str, folder: Path) -> SimpleNamespace:
    """The torch model of a family, and what this project loads from the folder that it saves."""
    model = torch_model(name)
    model.save_pretrained(folder)
    config, params = hf.load_decoder(folder)
    return SimpleNamespace(model=model, config=config, params=params, graph=decoder_graph(config), folder=folder)


# What they switch on is on in the others too, or is small.
RARE = (
    "llama_biased",
    "smollm3",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_yarn",
    "olmo2",
    "gemma",
    "qwen3_moe_normalised",
    "qwen2_moe",
)


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow) if n in RARE else n for n in FAMILIES], scope="module")
def family(request, tmp_path_factory):
    return case(request.param, tmp_path_factory.getbasetemp() / f"family-{request.param}")


TOKENS = np.random.default_rng(3).integers(3, VOCAB, (2, LENGTH))


def run(graph, params, tokens, positions=None, group=None, branch=None, remat="products"):
    """Logits [B, L, V] of rows; unpacked where no groups are given."""
    decoder = nnx.merge(graph, params)
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    group = jnp.ones_like(tokens) if group is None else group
    branch = jnp.zeros_like(tokens) if branch is None else branch
    hidden, _ = decoder(tokens, jnp.asarray(positions), packed_attention(group, branch), dtype=jnp.float64, remat=remat)
    return decoder.logits(hidden)


def as_stored(config, named):
    """Values of parameters by the names of files: transformers joins the experts of a layer, and gate and up."""
    if not config.num_experts or config.paired_experts:
        yield from named.items()
        return
    modules = FAMILY_TABLE[config.family].tensors
    for name, value in named.items():
        layer, _, rest = name.partition(".mlp.")
        match rest:
            case "experts.gate_up_proj":
                parts = {
                    key: value.reshape(len(value), 2, -1, value.shape[2])[:, i] for i, key in enumerate(("gate", "up"))
                }
            case "experts.down_proj":
                parts = {"down": value}
            case "gate.weight":
                yield f"{layer}.{modules['router']}", value
                continue
            case _:
                yield name, value
                continue
        for key, experts in parts.items():
            yield from ((f"{layer}.{modules[key].format(e)}.weight", x) for e, x in enumerate(experts))


def test_logits_and_gradients_equal_transformers(family):
    ids = torch.tensor(TOKENS)
    family.model.zero_grad()
    out = family.model(ids, labels=ids, use_cache=False)
    out.loss.backward()

    def loss(params):
        logits = run(family.graph, params, TOKENS, remat="full")
        logps = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logps, jnp.asarray(TOKENS)[:, 1:, None], -1).mean(), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(family.params)
    theirs = out.logits.detach().numpy()
    assert theirs.std() > 0.5
    np.testing.assert_allclose(logits, theirs, atol=EXACT)
    np.testing.assert_allclose(value, out.loss.item(), rtol=EXACT)
    expected = dict(as_stored(family.config, {n: p.grad.numpy() for n, p in family.model.named_parameters()}))
    ours = tensors_from_params(family.config, nnx.to_pure_dict(grads), np.float64)
    # Experts are chosen with it, and nothing else: a choice has no gradient.
    choices = [ours.pop(name) for name in list(ours) if name.endswith("e_score_correction_bias")]
    assert len(choices) == family.config.score_bias * family.config.num_layers and not np.any(choices)
    assert ours.keys() == expected.keys()
    for name in expected:
        assert np.abs(expected[name]).max() > 0, f"{name} has no gradient to compare"
        np.testing.assert_allclose(ours[name], expected[name], atol=EXACT, err_msg=name)


@pytest.mark.slow
def test_packed_rows_equal_rows_of_their_own(family):
    draw = np.random.default_rng(4).integers
    # Prompts and completions longer than the window, so that a window by column would be seen.
    groups = [
        Group(draw(3, VOCAB, 9).tolist(), [draw(3, VOCAB, n).tolist() for n in (8, 3, 11)], [0, 1, 2]),
        Group(draw(3, VOCAB, 4).tolist(), [draw(3, VOCAB, n).tolist() for n in (12, 7)], [3, 4]),
    ]
    (batch,) = micro_batches(groups, layout=Layout(64, 1), completion_tokens=16)
    rows = [[*g.prompt, *c] for g in groups for c in g.completions]
    forward = jax.jit(lambda *arrays: run(family.graph, family.params, *arrays))
    packed = forward(batch.tokens_BL, batch.positions_BL, batch.group_BL, batch.branch_BL).reshape(-1, VOCAB)
    alone = np.asarray(forward(np.asarray([row + [3] * (32 - len(row)) for row in rows])))
    prompts = [len(g.prompt) for g in groups for _ in g.completions]
    for slot, (caller, mask) in enumerate(zip(batch.ids_C, batch.mask_CT, strict=True)):
        count = int(mask.sum())
        if caller >= 0:
            own = alone[caller, prompts[caller] - 1 : prompts[caller] - 1 + count]
            np.testing.assert_allclose(packed[batch.at_CT[slot, :count]], own, atol=EXACT)
    assert (batch.ids_C >= 0).sum() == len(rows)


def test_a_saved_folder_loads_back_bitwise_and_in_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    hf.save_decoder(tmp_path, family.config, family.params, {"pad_token_id": 0, "eos_token_id": 2}, shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    config, params = hf.load_decoder(tmp_path)
    assert config == family.config
    assert fingerprint(params) == fingerprint(family.params)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **EAGER)
    with torch.no_grad():
        again, first = (m(torch.tensor(TOKENS)).logits.numpy() for m in (model, family.model))
    np.testing.assert_allclose(again, first, atol=EXACT)


@pytest.mark.slow
def test_greedy_rollouts_equal_transformers_generate(family):
    draw = np.random.default_rng(5).integers
    prompts = [draw(3, VOCAB, n).tolist() for n in (3, 9, 14)]
    found = Engine(family.config).generate(
        family.params, prompts, samples=2, max_tokens=12, sampling=Sampling(0.0), eos_ids=(2,), seed=0,
        counters=(0, 1, 2),
    )  # fmt: skip
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
    for prompt, completions in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = family.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected = whole[0, len(prompt) :].tolist()
        assert [c.tokens for c in completions] == [expected] * 2


@pytest.mark.slow
def test_sampler_trainer_and_transformers_agree_on_logprobs(family):
    temperature = 0.7
    draw = np.random.default_rng(6).integers
    prompts = [draw(3, VOCAB, n).tolist() for n in (4, 11)]
    found = Engine(family.config).generate(
        family.params, prompts, samples=2, max_tokens=9, sampling=Sampling(temperature), eos_ids=(2,), seed=1,
        counters=(0, 1),
    )  # fmt: skip
    groups = [Group(prompts[i], [c.tokens for c in found[i]], [2 * i, 2 * i + 1]) for i in range(2)]
    (batch,) = micro_batches(groups, layout=Layout(64, 1), completion_tokens=9)
    arrays = jax.tree.map(jnp.asarray, batch.arrays())
    forward = jax.jit(
        lambda params, batch: logps_and_entropy(family.graph, params, batch, temperature, Compute("float64"))[0]
    )
    trainer = forward(family.params, arrays)
    for slot, caller in enumerate(batch.ids_C):
        if caller < 0:
            continue
        prompt, completion = prompts[caller // 2], found[caller // 2][caller % 2]
        count = len(completion.tokens)
        with torch.no_grad():
            logits = family.model(torch.tensor([prompt + completion.tokens]), use_cache=False).logits[0]
        logps = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
        theirs = logps[torch.arange(count), torch.tensor(completion.tokens)].numpy()
        np.testing.assert_allclose(trainer[slot, :count], theirs, atol=EXACT)
        # The engine samples in float32.
        np.testing.assert_allclose(completion.logps, theirs, atol=1e-4)


def test_a_score_head_is_a_sequence_classifier(family, tmp_path):
    from transformers import AutoModelForSequenceClassification

    params = hf.scalar_head_params(
        family.config, family.params, jax.random.normal(jax.random.key(0), (family.config.hidden_size,))
    )
    hf.save_decoder(tmp_path, family.config, params, {"pad_token_id": 0})
    config, again = hf.load_scalar_head(tmp_path)
    assert fingerprint(again) == fingerprint(params)
    with torch.no_grad():
        if family.config.family in ("granite", "olmoe", "glm4_moe"):
            # transformers has no classifier of them.
            hidden = family.model.model(torch.tensor(TOKENS)).last_hidden_state
            theirs = hidden[:, -1].numpy() @ np.asarray(params["score"][...])
        else:
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64, **EAGER)
            theirs = model(torch.tensor(TOKENS)).logits[:, 0].numpy()
    head = nnx.merge(scalar_graph(config), params)
    ones = jnp.ones_like(jnp.asarray(TOKENS))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)

    def hidden(head, tokens):
        return head.decoder(tokens, positions, packed_attention(ones, 0 * ones), dtype=jnp.float64)[0]

    score = jax.jit(lambda t: head.scores(hidden(head, t)[:, -1]))
    np.testing.assert_allclose(score(jnp.asarray(TOKENS)), theirs, atol=EXACT)
