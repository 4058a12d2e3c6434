"""Train steps and scoring: W2 (SFT), W2lora, W4 (log-probabilities) and W6 (DPO)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf.tuning.device import choose
from rlhf.tuning.losses.preference import dpo
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.lora import LoraConfig, over, tune, tuned_graph
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.speed import ADAPTER, FULL, forward_flops
from rlhf.tuning.training.step import make_step
from tests.bench import inputs
from tests.bench.measure import emit, gemm_flops, peak_memory_mb, timed


def config_of(model: str) -> DecoderConfig:
    s = inputs.SHAPES[model]
    return DecoderConfig(
        vocab_size=s["vocabulary"], hidden_size=s["hidden"], intermediate_size=s["inner"], num_layers=s["layers"],
        num_heads=s["heads"], num_kv_heads=s["kv_heads"], head_dim=s["head_dim"], rope_theta=s["theta"],
        norm_eps=1e-5, tie_embeddings=True, max_positions=8192,
    )  # fmt: skip


def optimizer() -> Any:
    return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)), 3)


def batches_of(groups: list[Group], row_tokens: int = 0, adapter: bool = False) -> list[dict[str, Any]]:
    budget, undivided = choose().micro_batch(row_tokens, adapter=adapter)
    layout = choose_rows([groups], budget, undivided=undivided)
    width = max(len(c) for g in groups for c in g.completions)
    sizes = {
        "n_tokens": np.float32(sum(len(c) for g in groups for c in g.completions)),
        "n_groups": np.float32(len(groups)),
    }
    return [p.arrays() | sizes for p in micro_batches(groups, layout=layout, completion_tokens=width)]


def sft_groups(config: DecoderConfig) -> list[Group]:
    """8 rows of 256 tokens; all but the first token of each are trained on."""
    ids = inputs.tokens(8, 256, config.vocab_size)
    return [Group(row[:1].tolist(), [row[1:].tolist()], [i]) for i, row in enumerate(ids)]


def pair_groups(config: DecoderConfig) -> list[Group]:
    """4 pairs that share a prompt of 128 tokens, with two answers of 128."""
    ids = inputs.tokens(4, 384, config.vocab_size)
    return [
        Group(r[:128].tolist(), [r[128:256].tolist(), r[256:].tolist()], [2 * i, 2 * i + 1]) for i, r in enumerate(ids)
    ]


@dataclasses.dataclass
class Measured:
    """One call of a piece of work, and what it is made of."""

    function: Callable[[], Any]
    config: DecoderConfig
    groups: list[Group]
    passes: int
    """Forward passes that its FLOPs are equal to."""

    @property
    def flops(self) -> float:
        return self.passes * forward_flops(self.config, self.groups)


def prepared(work: str, model: str, dtype: str = "auto") -> Measured:
    """A piece of work, ready to be called. dtype: of activations; `auto`: the device's."""
    config = config_of(model)
    compute = choose(dtype).compute
    graph = decoder_graph(config)
    params = random_params(config, 0)
    times = FULL
    if work in ("W2", "W2lora"):
        groups = sft_groups(config)
        batches = batches_of(groups, adapter=work == "W2lora")

        def sft_loss(params: Any, batch: Any, frozen: Any) -> Any:
            logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
            return -jnp.sum(logps) / batch["n_tokens"], {}

        if work == "W2lora":
            # The frozen base needs no weight gradients: its forward pass, and the backward pass through it.
            lora = LoraConfig(rank=16, alpha=32.0)
            trainable, frozen = tune(config, "decoder", params, lora, seed=0, dtype=compute.dtype)
            sft_loss = over(tuned_graph(config, "decoder", lora), sft_loss)
            function, times = stepper(sft_loss, trainable, batches, (frozen, None)), ADAPTER
        else:
            function = stepper(sft_loss, params, batches)
    elif work == "W4":
        ids = inputs.tokens(16, 128, config.vocab_size)
        groups = [Group(r[:1].tolist(), [r[1:].tolist()], [i]) for i, r in enumerate(ids)]
        times = 1
        batches = batches_of(groups, 2048)
        program = jax.jit(lambda p, b: logps_and_entropy(graph, p, b, 1.0, compute)[0])
        function = lambda: [program(params, b) for b in batches]  # noqa: E731
    elif work == "W6":
        groups = pair_groups(config)
        times = FULL + 1
        batches = batches_of(groups)
        program = jax.jit(lambda p, b: logps_and_entropy(graph, p, b, 1.0, compute)[0].sum(-1))

        def dpo_loss(params: Any, batch: Any, frozen: Any) -> Any:
            chosen, rejected = logps_and_entropy(graph, params, batch, 1.0, compute)[0].sum(-1).reshape(-1, 2).T
            losses = dpo(chosen, rejected, *batch["reference_C"].reshape(-1, 2).T, beta=0.1).loss_B
            return jnp.sum(losses) / batch["n_groups"], {}

        reference = jax.tree.map(jnp.copy, params)
        step = stepper(dpo_loss, params, None)
        function = lambda: step([b | {"reference_C": program(reference, b)} for b in batches])  # noqa: E731
    else:
        raise SystemExit(f"no work {work!r}")
    return Measured(function, config, groups, times)


def run(work: str, model: str, repeats: int, dtype: str = "auto") -> None:
    measured = prepared(work, model, dtype)
    found = timed(measured.function, repeats)
    peak = peak_memory_mb()
    tokens = sum(g.size for g in measured.groups)
    flops = measured.flops
    gemm = gemm_flops(measured.config.hidden_size, measured.config.intermediate_size, dtype)
    emit(
        work,
        model,
        **found,
        dtype=dtype,
        tokens=tokens,
        tokens_per_s=round(tokens / found["median_s"], 1),
        peak_memory_mb=round(peak),
        gflop=round(flops / 1e9),
        gemm_gflops=round(gemm / 1e9),
        share_of_gemm=round(flops / found["median_s"] / gemm, 3),
    )


def stepper(loss: Any, params: Any, batches: Any, frozen: Any = None) -> Any:
    opt = optimizer()
    state = {"params": params, "opt": jax.jit(opt.init)(params)}
    step = make_step(loss, opt, 3)

    def once(given: Any = batches) -> Any:
        state["params"], state["opt"], sums = step(state["params"], state["opt"], given, frozen)
        return sums

    return once
