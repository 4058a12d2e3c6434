"""Rollouts that are episodes: trajectories of many turns, and their tables.

    journal   in the work folder: a line is written when its episode ends, and survives a kill
    tables    trajectories/, turns/ and rollouts/ (`rlhf.tuning.agents.rows`), when all episodes have ended

A stage loads this module by name (`rlhf.stages.sampling.settings.loads`), so keys of rollouts of one turn do not depend
on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.journal import read_lines, write_line
from rlhf.stages.common.models import load_policy, load_tokenizer, stop_ids
from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.environment import PROGRAMS, Environment
from rlhf.stages.sampling.episode_tables import Name, task_of
from rlhf.stages.sampling.native import open_engine
from rlhf.tuning import multihost
from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.agents.trajectory import (
    Ended,
    Episode,
    Rules,
    completion_rows,
    from_values,
    to_line,
    trajectory_row,
    turn_rows,
)
from rlhf.tuning.rows import CompletionRow, PromptRow, Row, write_table

if TYPE_CHECKING:
    from rlhf.stages.sampling.rows import Draw

SAVE_EVERY = 64
"""Finished episodes between copies of the journal to a remote store."""


Played = Generator[Ended, None, None]
"""Episodes as they end."""


class EnvironmentFailed(RuntimeError):
    """The environment failed in more episodes than the settings allow."""


def play_rows(ctx: Context, prompts: Sequence[tuple[int, PromptRow]], draw: Draw) -> list[CompletionRow]:
    """Play `draw.samples` episodes of each (place, task) and write their tables; return each trajectory's last row.

    Raises EnvironmentFailed and `rlhf.tuning.chat.renderer.TemplateRefused`.
    """
    played = _Episodes(ctx, prompts, draw).all()
    if not ctx.is_primary:
        return []
    policy = ctx.inputs["policy"].digest
    by_place = dict(prompts)
    trajectories = [completion_rows(e, by_place[e.episode.place], policy, ctx.seed, draw.temperature) for e in played]
    tables: dict[str, tuple[type[Row], list[Any]]] = {
        "rollouts": (CompletionRow, [row for parts in trajectories for row in parts]),
        "trajectories": (TrajectoryRow, [trajectory_row(e) for e in played]),
        "turns": (TurnRow, [row for e in played for row in turn_rows(e, policy)]),
    }
    for name, (kind, rows) in tables.items():
        write_table(ctx.out / name / "part-00000.parquet", rows, kind.schema())
    return [parts[-1] for parts in trajectories]


class _Episodes:
    """The episodes of one stage."""

    def __init__(self, ctx: Context, prompts: Sequence[tuple[int, PromptRow]], draw: Draw):
        self.ctx, self.draw, self.prompts = ctx, draw, prompts
        self.settings: Environment = ctx.config.environment
        self.tokenizer = load_tokenizer(ctx, ctx.inputs["tokenizer"])
        self.stop_ids = stop_ids(ctx, ctx.inputs["tokenizer"])
        self.tokens = min(self.settings.max_tokens, load_policy(ctx, ctx.inputs["policy"])[0].max_positions)
        self.journal = ctx.work / "episodes.jsonl"
        self.episodes = {
            (place, sample): Episode(place, sample, prompt.id, task_of(prompt), self._messages(prompt))
            for place, prompt in prompts
            for sample in range(draw.samples)
        }

    def all(self) -> list[Ended]:
        """Return every episode by place and sample; read those that an earlier try finished.

        Each process of a group plays an equal share, and process 0 returns all of them.
        """
        ctx = self.ctx
        found = self._finished() if ctx.is_primary else {}
        finished = {(place, sample) for place, sample in multihost.from_primary(lambda: list(found))}
        missing = [episode for name, episode in self.episodes.items() if name not in finished]
        if missing:
            played = self._played(missing[multihost.process_index() :: multihost.process_count()])
            with self.journal.open("ab") as journal, contextlib.closing(played):
                for ended in multihost.to_primary(
                    played, lambda ended: to_line(ended).encode(), lambda line: self._ended(json.loads(line))
                ):
                    found[ended.episode.place, ended.episode.sample] = ended
                    write_line(journal, to_line(ended))
                    ctx.progress(len(found), len(self.episodes), "episodes")
                    if len(found) % SAVE_EVERY == 0:
                        ctx.saved()
        if not ctx.is_primary:
            return []
        every = [found[name] for name in self.episodes]
        self._check(every)
        return every

    def _played(self, episodes: Sequence[Episode]) -> Played:
        plays = self._by_program if self.settings.agent else self._in_environments
        with contextlib.ExitStack() as stack:
            for ended in stack.enter_context(contextlib.closing(plays(episodes, stack))):
                self.ctx.metrics_line(
                    place=ended.episode.place,
                    sample=ended.episode.sample,
                    turns=len(ended.turns),
                    environment_seconds=round(ended.seconds, 4),
                )
                yield ended

    def _by_program(self, episodes: Sequence[Episode], stack: contextlib.ExitStack) -> Played:
        """Play episodes of a program that speaks to an OpenAI URL."""
        # By name: only episodes of programs have its code in their keys.
        played: Played = importlib.import_module(PROGRAMS).play_episodes(
            self.settings,
            self._engine(stack),
            self.tokenizer,
            self.stop_ids,
            self.ctx.inputs["policy"].digest,
            self.tokens,
            self.draw.max_tokens,
            self.draw.temperature,
            self.ctx.seed,
            episodes,
        )
        return played

    def _in_environments(self, episodes: Sequence[Episode], stack: contextlib.ExitStack) -> Played:
        from rlhf.tuning.agents.play import Player
        from rlhf.tuning.agents.processes import Environments
        from rlhf.tuning.chat.calls import resolve
        from rlhf.tuning.chat.renderer import Renderer

        s, draw = self.settings, self.draw
        form = resolve(s.tool_format, str(self.tokenizer.chat_template or ""))
        names = {field.name for field in dataclasses.fields(Spec)} & type(s).model_fields.keys()
        spec = Spec(**{name: getattr(s, name) for name in names} | {"tool_format": form})
        environments = stack.enter_context(Environments(spec))
        words = Renderer(self.tokenizer, environments.schemas(), s.system_prompt, form)
        engine = self._engine(stack)
        rules = Rules(
            turns=s.turns,
            turn_tokens=draw.max_tokens,
            tokens=self.tokens,
            observation_tokens=s.observation_tokens,
            live=min(s.processes, engine.slots_for(self.tokens)),
            tries=s.tries,
            lockstep=s.lockstep,
            rewarded=s.has_reward,
        )
        player = Player(engine, environments, words, rules, self.stop_ids, draw.sampling, self.ctx.seed)
        return player.play(episodes)

    def _engine(self, stack: contextlib.ExitStack) -> Any:
        """Open the engine of the settings; the prompts are probes for servers, whose requests end with the stack."""
        from rlhf.tuning.rollout.requests import Request

        draw = self.draw
        probes = [Request(p.prompt_ids, draw.max_tokens, draw.sampling, name=p.id) for _, p in self.prompts]
        engine: Any = open_engine(self.ctx, draw.engine, draw.quantize, self.tokens, probes)
        if draw.engine.in_worker:
            return engine
        from rlhf.tuning.rollout.servers.streaming import Turns

        return stack.enter_context(contextlib.closing(Turns(engine, self.settings.processes)))

    def _messages(self, prompt: PromptRow) -> list[dict[str, Any]]:
        """Return the messages of a prompt's conversation, or its text as a user's message.

        Raises ValueError for a prompt with its own values for the template: all episodes of environments render alike.
        """
        metadata = json.loads(prompt.metadata or "{}")
        if metadata.get("chat_template_kwargs") and not self.settings.agent:
            raise ValueError(
                f"prompt {prompt.id} has chat_template_kwargs, and all episodes are rendered alike: set "
                "base.chat_template_kwargs, and leave the field out of the data"
            )
        messages = metadata.get("prompt_messages")
        return messages or [{"role": "user", "content": prompt.prompt}]

    def _finished(self) -> dict[Name, Ended]:
        """Read the episodes that an earlier try finished, but for failed ones, which an outage may have caused."""
        lines = (line for line in read_lines(self.journal) if tuple(line[:2]) in self.episodes)
        read = [self._ended(line) for line in lines if line[2]["status"] != "failed"]
        if read:
            self.ctx.log(f"resumed: {len(read)} of {len(self.episodes)} episodes had been played")
        return {(ended.episode.place, ended.episode.sample): ended for ended in read}

    def _ended(self, line: Any) -> Ended:
        place, sample, values = line
        return from_values(values, self.episodes[place, sample])

    def _check(self, ended: Sequence[Ended]) -> None:
        """Raise EnvironmentFailed if more episodes failed than the settings allow."""
        failed = [e for e in ended if e.status == "failed"]
        allowed = math.ceil(self.settings.max_failed_fraction * len(ended))
        for e in failed[:3]:
            self.ctx.log(f"episode {e.episode.name}, sample {e.episode.sample} failed: {e.reason}")
        if len(failed) > allowed:
            raise EnvironmentFailed(
                f"{len(failed)} of {len(ended)} episodes have no result, {allowed} may "
                f"(environment.max_failed_fraction); the first: {failed[0].episode.name}: {failed[0].reason}. "
                "Finished episodes are kept: fix the environment and run the same command again"
            )
