"""One round's update in float64 against the same formulas in torch: packing, loss, gradient and optimizer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.models import huggingface as hf
from rlhf.tuning.models.config import tiny
from rlhf.tuning.settings import ComputeSettings, OptimizerSettings
from rlhf.tuning.training.step import copy
from tests.tuning.models.named import tensors_from_params

torch = pytest.importorskip("torch", reason="parity needs torch")

VOCAB, PROMPTS, SAMPLES = 31, 4, 3
MODEL = tiny(VOCAB)
OPTIMIZER = OptimizerSettings(learning_rate=3e-3, beta2=0.9, weight_decay=0.1, clip_norm=0.5)
SETTINGS = RoundSettings.of(
    "grpo",
    aggregation="token-mean",
    kl_coef=0.05,
    entropy_coef=0.01,
    temperature=0.7,
    prompts_per_step=2,
    max_mismatch_kl=10.0,
    optimizer=OPTIMIZER,
    compute=ComputeSettings(dtype="float64"),
)


def made_up() -> RoundData:
    rng = np.random.default_rng(2)
    # Both steps have the same lengths, and so share their programs.
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (4, 8) * (PROMPTS // 2)]
    completions = [rng.integers(0, VOCAB, n).tolist() for n in (2, 5, 7, 3, 4, 6) * (PROMPTS // 2)]
    mu = [(-math.log(VOCAB) + 0.2 * rng.normal(size=len(c))).tolist() for c in completions]
    groups, totals = np.repeat(np.arange(PROMPTS), SAMPLES), rng.normal(size=len(completions))
    everywhere = np.ones(len(completions), bool)
    return RoundData([prompts[g] for g in groups], completions, mu, groups, totals, everywhere, ~everywhere)


def tensors(params):
    pure = nnx.to_pure_dict(params)
    return {n: torch.tensor(x, requires_grad=True) for n, x in tensors_from_params(pure, np.float64).items()}


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MODEL.norm_eps) * weight


def logits(w, ids):
    """A plain Llama in torch, [L, V]: transformers keeps norms and rotary tables in float32."""
    heads, groups, size = MODEL.num_heads, MODEL.num_heads // MODEL.num_kv_heads, MODEL.head_dim
    rates = MODEL.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(len(ids), dtype=torch.float64)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()

    def rotated(x):
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    hidden = torch.triu(torch.ones(len(ids), len(ids), dtype=torch.bool), 1)
    for layer in range(MODEL.num_layers):
        p = {n.removeprefix(f"model.layers.{layer}."): v for n, v in w.items()}
        y = norm(x, p["input_layernorm.weight"])
        q, k, v = ((y @ p[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, size)) for n in "qkv")
        q, k, v = rotated(q), rotated(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        z = torch.einsum("qnh,knh->nqk", q, k) * size**-0.5
        out = torch.einsum("nqk,knh->qnh", z.masked_fill(hidden, -math.inf).softmax(-1), v)
        x = x + out.reshape(-1, heads * size) @ p["self_attn.o_proj.weight"].T
        y = norm(x, p["post_attention_layernorm.weight"])
        gate, up = y @ p["mlp.gate_proj.weight"].T, y @ p["mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ p["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def token_logps(w, data, i):
    """(log-probabilities of the completion's tokens, entropies), [T] each."""
    prompt, completion = data.prompts[i], data.completions[i]
    z = logits(w, torch.tensor([*prompt, *completion]))[len(prompt) - 1 : -1] / SETTINGS.temperature
    logps = z.log_softmax(-1)
    return logps[torch.arange(len(completion)), torch.tensor(completion)], -(logps.exp() * logps).sum(-1)


def loss(w, data, members, old, reference, advantages):
    total, tokens = 0.0, sum(len(data.completions[i]) for i in members)
    for i in members:
        logps, entropy = token_logps(w, data, i)
        ratio, advantage = (logps - old[i]).exp(), advantages[i]
        clipped = ratio.clip(1 - SETTINGS.clip_low, 1 + SETTINGS.clip_high)
        rho = (old[i] - torch.tensor(data.mu[i], dtype=torch.float32).double()).exp().clip(max=SETTINGS.importance_max)
        d = reference[i] - logps
        each = -rho * torch.minimum(ratio * advantage, clipped * advantage) + SETTINGS.kl_coef * (d.exp() - d - 1)
        total = total + (each - SETTINGS.entropy_coef * entropy).sum()
    return total / tokens


def adamw(w, moments, gradients, step):
    """One step, in place."""
    o = OPTIMIZER
    length = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    for name, g in gradients.items():
        g = g * min(1.0, o.clip_norm / length)
        m, v = moments.get(name, (0.0, 0.0))
        m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g.square()
        moments[name] = m, v
        direction = m / (1 - o.beta1**step) / ((v / (1 - o.beta2**step)).sqrt() + o.epsilon)
        decay = 0.0 if "norm" in name else o.weight_decay
        with torch.no_grad():
            w[name] -= o.learning_rate * (direction + decay * w[name])


def test_a_round_in_float64_is_that_of_torch():
    data, params, rng = made_up(), hf.random_params(MODEL, 1), np.random.default_rng(3)
    reference = jax.tree.map(lambda x: jnp.asarray(x + 0.01 * rng.normal(size=x.shape)), params)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float64")}
    result = run_round(data, SETTINGS, MODEL, Learner.start(copy(params), OPTIMIZER), reference=reference)
    w, of_reference, moments = tensors(params), tensors(reference), {}
    with torch.no_grad():
        old = [token_logps(w, data, i)[0] for i in range(len(data.completions))]
        kept = [token_logps(of_reference, data, i)[0] for i in range(len(data.completions))]
    totals = data.totals_N.reshape(PROMPTS, SAMPLES)
    advantages = (totals - totals.mean(1, keepdims=True)) / (totals.std(1, ddof=1, keepdims=True) + 1e-4)
    losses = []
    for step in range(PROMPTS // 2):
        members = range(2 * step * SAMPLES, 2 * (step + 1) * SAMPLES)
        value = loss(w, data, members, old, kept, advantages.reshape(-1))
        gradients = dict(zip(w, torch.autograd.grad(value, list(w.values())), strict=True))
        adamw(w, moments, gradients, step + 1)
        losses.append(value.item())
    assert result.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    found = tensors(result.policy.params)
    start = tensors(params)
    for name, wanted in w.items():
        assert not torch.equal(wanted, start[name])
        np.testing.assert_allclose(found[name].detach(), wanted.detach(), rtol=0, atol=1e-12, err_msg=name)
