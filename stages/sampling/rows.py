"""Sampling of prompts into the rollout table, for every stage that samples."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.stages.common.models import load_policy, load_tokenizer, stop_ids
from rlhf.stages.common.tables import Shards, as_they_end, by_shard, publish
from rlhf.stages.contract.definition import Context, StageConfig
from rlhf.stages.sampling.environment import EPISODES
from rlhf.stages.sampling.native import in_one_go, open_engine, replicas_here, with_local_policy
from rlhf.stages.sampling.settings import EngineSettings
from rlhf.tuning import multihost
from rlhf.tuning.columns import Numbers
from rlhf.tuning.models.tokenizer import control_ids
from rlhf.tuning.rows import CompletionRow, PromptRow, RefusedRow, write_table

if TYPE_CHECKING:
    from rlhf.tuning.rollout.requests import Completion, Request, Sampling

FOLDER = "rollouts"
"""The folder of an artifact that holds its rollout table."""
SHORTEST_CONTEXT = 64


@dataclasses.dataclass(frozen=True)
class Draw:
    """The completions to sample for each prompt."""

    samples: int
    max_tokens: int
    temperature: float
    """0 is greedy."""
    shard_prompts: int
    quantize: str = "none"
    engine: EngineSettings = EngineSettings()
    stop: Sequence[str] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    routing: bool = False
    """Whether the experts of a mixture are recorded, for training."""

    @property
    def sampling(self) -> Sampling:
        from rlhf.tuning.rollout.requests import Sampling

        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)

    @classmethod
    def of(cls, config: StageConfig, samples: int, temperature: float, routing: bool = False) -> Draw:
        """Take all else from the settings of a stage."""
        names = {field.name for field in dataclasses.fields(cls)} & type(config).model_fields.keys()
        values = {name: getattr(config, name) for name in names}
        return cls(**values | {"samples": samples, "temperature": temperature, "routing": routing})


def refuse_long(ctx: Context, prompts: Sequence[PromptRow], max_tokens: int) -> set[int]:
    """Return the places of prompts whose longest completion would leave the policy's positions.

    Lists them in the artifact (R16) and in the log. Raises ValueError if all are too long.
    """
    room = room_of(ctx, max_tokens)
    refused = []
    for place, prompt in enumerate(prompts):
        if (length := len(prompt.prompt_ids)) > room:
            reason = f"{length} tokens and {max_tokens} new ones exceed the model's {room + max_tokens} positions"
            refused.append(RefusedRow(place=place, prompt_id=prompt.id, reason=reason))
    if ctx.is_primary:
        # A prompt may be there twice.
        for prompt_id, reason in {row.prompt_id: row.reason for row in refused}.items():
            ctx.log(f"prompt {prompt_id} is refused: {reason}; shorten it, or rl.rollout.max_tokens")
        write_table(ctx.out / "refused" / "part-00000.parquet", refused, RefusedRow.schema())
    if len(refused) == len(prompts):
        raise ValueError(f"every prompt of the round is too long, as {refused[0].prompt_id}: {refused[0].reason}")
    return {row.place for row in refused}


def context_of(prompt: int, completion: int) -> int:
    """Return the length of an engine's sequences, from those of its longest prompt and completion."""
    from rlhf.tuning.shapes import bucket

    return bucket(prompt + completion, SHORTEST_CONTEXT)


def room_of(ctx: Context, max_tokens: int) -> float:
    """Return the tokens that a prompt may have; infinite in an environment, whose first observation is not known."""
    if ctx.config.environment is not None:
        return math.inf
    return int(load_policy(ctx, ctx.inputs["policy"])[0].max_positions) - max_tokens


def sample_rows(ctx: Context, prompts: Sequence[tuple[int, PromptRow]], draw: Draw) -> list[CompletionRow]:
    """Sample completions of (place, prompt) and write the artifact's rollout table.

    Prompts are sampled in shards; a kill costs the unfinished ones. In an environment prompts are tasks, and
    completions are their trajectories. Process 0 of a group returns the rows, and asks HTTP servers alone.
    """
    if not draw.engine.in_worker and multihost.process_count() > 1:
        local = with_local_policy(ctx)
        if not ctx.is_primary:
            return []
        with multihost.alone(), contextlib.closing(local):
            return _sampled(local, prompts, draw)
    return _sampled(ctx, prompts, draw)


def _sampled(ctx: Context, prompts: Sequence[tuple[int, PromptRow]], draw: Draw) -> list[CompletionRow]:
    if ctx.config.environment is not None:
        # By name, not by import: the code of episodes must not be in the keys of rollouts without them.
        rows: list[CompletionRow] = importlib.import_module(EPISODES).play_rows(ctx, prompts, draw)
        return rows
    recorded = draw.routing and load_policy(ctx, ctx.inputs["policy"])[0].num_experts > 0
    if recorded and not draw.engine.in_worker:
        ctx.log("servers record no experts: the update needs rl.update.routing: free")
        recorded = False
    sampler = _Sampler(ctx, dataclasses.replace(draw, routing=recorded), [prompt for _, prompt in prompts])
    shards = Shards(FOLDER, CompletionRow, CompletionRow.schema(recorded), draw.shard_prompts, "prompts")
    if in_one_go(draw.engine):
        rows, files = as_they_end(ctx, shards, prompts, sampler.stream, dealt=replicas_here(ctx))
    else:
        rows, files = by_shard(ctx, shards, prompts, sampler.shard)
    publish(files, ctx.out / FOLDER)
    return rows


class _Sampler:
    """Samples shards with one engine, which is opened for the first missing one."""

    def __init__(self, ctx: Context, draw: Draw, prompts: Sequence[PromptRow]):
        from rlhf.tuning.compile_target import few_shapes

        self.ctx, self.draw = ctx, draw
        self.tokenizer = load_tokenizer(ctx, ctx.inputs["tokenizer"])
        self.eos = stop_ids(ctx, ctx.inputs["tokenizer"])
        self.control = {*control_ids(self.tokenizer), *self.eos}
        # The engine has the size that all prompts need, not those of a shard: its size decides how a shard is
        # computed, so a shard has the same bits whichever shards an earlier try has left.
        longest = max((len(prompt.prompt_ids) for prompt in prompts), default=0)
        if few_shapes():
            # Of all rounds, so that their engines have one size.
            tokens = ctx.inputs["data"].metrics.get("tokens", {}) if "data" in ctx.inputs else {}
            longest = int(max(longest, tokens.get("prompts", {}).get("prompt_ids", {}).get("max", 0)))
        self.context = context_of(longest, draw.max_tokens)
        self.engine: Any = None

    def shard(self, prompts: Sequence[tuple[int, PromptRow]]) -> list[CompletionRow]:
        """Return the rows of some prompts."""
        [(_, rows)] = self.stream({0: prompts})
        return rows

    def stream(self, missing: dict[int, Sequence[tuple[int, PromptRow]]]) -> Iterator[tuple[int, list[CompletionRow]]]:
        """Yield (number, rows) of shards, given by number, when the last completion of each ends."""
        prompts = [(number, *prompt) for number, shard in missing.items() for prompt in shard]
        requests = [self._request(place, prompt) for _, place, prompt in prompts]
        if self.engine is None:
            self.engine = open_engine(self.ctx, self.draw.engine, self.draw.quantize, self.context, requests)
        found: dict[int, dict[int, list[CompletionRow]]] = {number: {} for number in missing}
        for i, completions in self.engine.run(requests):
            number, place, prompt = prompts[i]
            found[number][i] = [self._row(place, prompt, sample, each) for sample, each in enumerate(completions)]
            if len(found[number]) == len(missing[number]):
                rows = found.pop(number)
                yield number, [row for i in sorted(rows) for row in rows[i]]

    def _request(self, number: int, prompt: PromptRow) -> Request:
        from rlhf.tuning.rollout.requests import Request, stop_strings

        return Request(
            list(prompt.prompt_ids),
            self.draw.max_tokens,
            self.draw.sampling,
            self.eos,
            self.ctx.seed,
            number,
            self.draw.samples,
            stop_strings(self._text, self.draw.stop) if self.draw.stop else None,
            name=prompt.id,
            routing=self.draw.routing,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text without EOS and other control tokens, as rewards see it."""
        return str(self.tokenizer.decode([t for t in tokens if t not in self.control]))

    def _row(self, number: int, prompt: PromptRow, sample: int, completion: Completion) -> CompletionRow:
        text = self._text(completion.tokens)
        return CompletionRow(
            place=number,
            sample=sample,
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            answer=prompt.answer,
            metadata=prompt.metadata,
            prompt_ids=prompt.prompt_ids,
            # Flat arrays: a list has an object for each token of the round.
            token_ids=Numbers(np.asarray(completion.tokens, np.int32)),
            logprobs=Numbers(np.asarray(completion.logps, np.float32)),
            text=min((text.partition(s)[0] for s in self.draw.stop), key=len, default=text),
            stop=completion.stop,
            policy=self.ctx.inputs["policy"].digest,
            seed=self.ctx.seed,
            temperature=self.draw.temperature,
            routing=completion.routing,
        )
