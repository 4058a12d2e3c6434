"""Rollouts that are episodes: trajectories of many turns, their tables, and what a kill leaves of them.

    journal   in the work folder: one line a finished episode, written at once; with `replay` also one a turn
    tables    trajectories/, turns/ and rollouts/ (`rlhf.tuning.agents.rows`), when all episodes have ended

A stage loads this module by name (`rlhf.stages.sampling.settings.loads`): rollouts of one turn have none of it in
their keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from rlhf.stages.common.checked_lines import read_lines, write_line
from rlhf.stages.common.models import load_policy, load_tokenizer, stop_ids
from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.environment import PROGRAMS, Environment
from rlhf.stages.sampling.episode_tables import task_of
from rlhf.stages.sampling.native import open_engine
from rlhf.tuning import multihost
from rlhf.tuning.agents.contract import WITHOUT_REWARD, Spec
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.agents.trajectory import (
    Ended,
    Episode,
    Rules,
    Turn,
    completion_rows,
    from_line,
    to_line,
    trajectory_row,
    turn_rows,
)
from rlhf.tuning.rows import CompletionRow, PromptRow, by_trajectory, write_table

if TYPE_CHECKING:
    from rlhf.stages.sampling.rows import Draw
    from rlhf.tuning.agents.processes import Environments
    from rlhf.tuning.chat.renderer import Renderer

SAVE_EVERY = 64
"""Finished episodes between copies of the journal to a remote store."""
PART = "part-00000.parquet"


class EnvironmentFailed(RuntimeError):
    """More episodes than the settings bear ended by a fault of their environment."""


def play_rows(ctx: Context, prompts: Sequence[tuple[int, PromptRow]], draw: Draw) -> list[CompletionRow]:
    """Plays `draw.samples` episodes of each (place, task) and leaves their tables; the last row of each trajectory.

    Raises EnvironmentFailed, `rlhf.tuning.chat.renderer.TemplateRefused`, and ValueError where first contexts have more
    tokens than a trajectory may.
    """
    played = _Episodes(ctx, draw).all(prompts)
    if not ctx.is_primary:
        return []
    policy = ctx.inputs["policy"].digest
    by_place = dict(prompts)
    rows = [
        row for e in played for row in completion_rows(e, by_place[e.episode.place], policy, ctx.seed, draw.temperature)
    ]
    turns = [row for ended in played for row in turn_rows(ended, policy)]
    write_table(ctx.out / "rollouts" / PART, rows, CompletionRow.schema())
    write_table(ctx.out / "trajectories" / PART, [trajectory_row(e) for e in played], TrajectoryRow.schema())
    write_table(ctx.out / "turns" / PART, turns, TurnRow.schema())
    return [parts[-1] for parts in by_trajectory(rows)]


class _Episodes:
    """The episodes of one stage."""

    def __init__(self, ctx: Context, draw: Draw):
        self.ctx, self.draw = ctx, draw
        self.settings: Environment = ctx.config.environment
        self.tokenizer = load_tokenizer(ctx, ctx.inputs["tokenizer"])
        self.journal = ctx.work / "episodes.jsonl"
        self.turns = ctx.work / "turns.jsonl"
        self.count = 0

    def all(self, prompts: Sequence[tuple[int, PromptRow]]) -> list[Ended]:
        """Every episode, by place and sample; those that an earlier try has finished are read.

        Each process of a group plays an equal share, and process 0 has all of them.
        """
        episodes = [
            Episode(place, sample, prompt.id, task_of(prompt), self._messages(prompt))
            for place, prompt in prompts
            for sample in range(self.draw.samples)
        ]
        self.count = len(episodes)
        by_name = {(e.place, e.sample): e for e in episodes}
        found = self._finished(by_name) if self.ctx.is_primary else {}
        there = {(place, sample) for place, sample in multihost.from_primary(lambda: list(found))}
        recorded = self._recorded() if self.settings.replay else {}
        left = [
            dataclasses.replace(e, **recorded.get((e.place, e.sample), {}))
            for turn, e in enumerate(e for e in episodes if (e.place, e.sample) not in there)
            if turn % multihost.process_count() == multihost.process_index()
        ]
        if len(there) < len(episodes):
            played = self._played(left, [prompt for _, prompt in prompts])
            with self._lines(self.journal) as journal, contextlib.closing(played):
                for ended in multihost.to_primary(
                    played, lambda ended: to_line(ended).encode(), lambda line: _ended(line, by_name)
                ):
                    found[ended.episode.place, ended.episode.sample] = ended
                    write_line(journal, to_line(ended))
                    self.ctx.progress(len(found), len(episodes), "episodes")
                    if len(found) % SAVE_EVERY == 0:
                        self.ctx.saved()
        if not self.ctx.is_primary:
            return []
        every = [found[e.place, e.sample] for e in episodes]
        self._check(every)
        return every

    def _played(self, episodes: Sequence[Episode], prompts: Sequence[PromptRow]) -> Generator[Ended, None, None]:
        positions = load_policy(self.ctx, self.ctx.inputs["policy"])[0].max_positions
        tokens = min(self.settings.max_tokens, positions)
        plays = self._by_program if self.settings.agent else self._in_environments
        with contextlib.closing(plays(episodes, tokens, prompts)) as played:
            for ended in played:
                self.ctx.metrics_line(
                    place=ended.episode.place,
                    sample=ended.episode.sample,
                    turns=len(ended.turns),
                    environment_seconds=round(ended.seconds, 4),
                )
                yield ended

    def _by_program(
        self, episodes: Sequence[Episode], tokens: int, prompts: Sequence[PromptRow]
    ) -> Generator[Ended, None, None]:
        """Episodes of a program that speaks to an OpenAI URL."""
        draw, ctx = self.draw, self.ctx
        with contextlib.ExitStack() as stack:
            # By name: only episodes of programs have its code in their keys.
            played: Generator[Ended, None, None] = importlib.import_module(PROGRAMS).play_episodes(
                self.settings,
                self._engine(stack, tokens, prompts),
                self.tokenizer,
                stop_ids(ctx, ctx.inputs["tokenizer"]),
                ctx.inputs["policy"].digest,
                tokens,
                draw.max_tokens,
                draw.temperature,
                ctx.seed,
                episodes,
            )
            yield from stack.enter_context(contextlib.closing(played))

    def _in_environments(
        self, episodes: Sequence[Episode], tokens: int, prompts: Sequence[PromptRow]
    ) -> Generator[Ended, None, None]:
        from rlhf.tuning.agents.play import Player
        from rlhf.tuning.agents.processes import EnvironmentLimits, Environments

        settings, draw = self.settings, self.draw
        limits = EnvironmentLimits(settings.reset_seconds, settings.step_seconds, settings.megabytes)
        with contextlib.ExitStack() as stack:
            environments = stack.enter_context(Environments(self._spec(), limits, settings.processes))
            words = self._words(environments)
            engine = self._engine(stack, tokens, prompts)
            rules = Rules(
                turns=settings.turns,
                turn_tokens=draw.max_tokens,
                tokens=tokens,
                observation_tokens=settings.observation_tokens,
                live=min(settings.processes, engine.slots_for(tokens)),
                tries=settings.tries,
                episode_seconds=settings.episode_seconds,
                lockstep=settings.lockstep,
                rewarded=settings.has_reward,
            )
            said = self._recorder(stack)
            eos = stop_ids(self.ctx, self.ctx.inputs["tokenizer"])
            player = Player(engine, environments, words, rules, eos, draw.sampling, self.ctx.seed, said=said)
            too_long: list[Ended] = []
            for ended in player.play(episodes):
                if not ended.turns and len(ended.context) >= tokens:
                    too_long.append(ended)
                    self._check_contexts(too_long, tokens)
                yield ended

    def _check_contexts(self, too_long: Sequence[Ended], tokens: int) -> None:
        """Raises ValueError for more episodes without room for a turn than may fail; nothing has been sampled where
        all begin so."""
        if len(too_long) <= math.ceil(self.settings.max_failed_fraction * self.count):
            return
        longest = max(too_long, key=lambda ended: len(ended.context))
        given, needed = f"environment.max_tokens is {self.settings.max_tokens}", len(longest.context)
        room = f"{needed + self.draw.max_tokens} or more, with room for the turns and observations after the first"
        remedy = f"set environment.max_tokens to {room}"
        if tokens < self.settings.max_tokens:
            given = f"the model has {tokens} positions"
            remedy = f"use a model with {room}"
        raise ValueError(
            f"{given}, and the first context of {longest.episode.name} has {needed} tokens, before a turn is sampled: "
            f"{remedy}, or shorten the prompts and the descriptions of tools"
        )

    def _engine(self, stack: contextlib.ExitStack, tokens: int, prompts: Sequence[PromptRow]) -> Any:
        """The engine of the settings, for contexts of so many tokens; the first prompts are probes for servers. What
        it asks of servers ends with the stack."""
        from rlhf.tuning.rollout.requests import Request

        draw = self.draw
        probes = [Request(prompt.prompt_ids, draw.max_tokens, draw.sampling, name=prompt.id) for prompt in prompts]
        engine: Any = open_engine(self.ctx, draw.engine, draw.quantize, tokens, probes)
        if draw.engine.in_worker:
            return engine
        from rlhf.tuning.rollout.servers.streaming import Turns

        return stack.enter_context(contextlib.closing(Turns(engine, self.settings.processes)))

    def _spec(self) -> Spec:
        from rlhf.tuning.chat.calls import resolve

        s = self.settings
        form = resolve(s.tool_format, str(self.tokenizer.chat_template or ""))
        return Spec(s.name, s.arguments, s.tools, s.tool_arguments, form, s.tool_seconds)

    def _words(self, environments: Environments) -> Renderer:
        from rlhf.tuning.chat.renderer import Renderer

        form = self._spec().tool_format
        return Renderer(self.tokenizer, environments.schemas(), self.settings.system_prompt, form)

    def _messages(self, prompt: PromptRow) -> list[dict[str, Any]]:
        """The prompt's messages: of a conversation or a system text those of the record, else one of the user.

        Raises ValueError for a prompt with values of its own for the template, which no program renders by.
        """
        metadata = json.loads(prompt.metadata or "{}")
        if metadata.get("chat_template_kwargs") and not self.settings.agent:
            raise ValueError(
                f"prompt {prompt.id} has chat_template_kwargs, and all episodes are rendered alike: set "
                "base.chat_template_kwargs, and leave the field out of the data"
            )
        messages = metadata.get("prompt_messages")
        return messages or [{"role": "user", "content": prompt.prompt}]

    @contextlib.contextmanager
    def _lines(self, path: Any) -> Iterator[BinaryIO]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            yield file

    def _recorder(self, stack: contextlib.ExitStack) -> Any:
        """What is called with each turn: with `replay` it keeps them."""
        if not self.settings.replay:
            return lambda episode, number, turn, context: None
        file = stack.enter_context(self._lines(self.turns))

        def said(episode: Episode, number: int, turn: Turn, context: Sequence[int]) -> None:
            began = list(context) if number == 0 else None
            write_line(file, json.dumps([episode.place, episode.sample, number, vars(turn), began]))

        return said

    def _finished(self, episodes: dict[tuple[int, int], Episode]) -> dict[tuple[int, int], Ended]:
        """Episodes that an earlier try has finished. Those that failed are played again: it may have been an outage."""
        found: dict[tuple[int, int], Ended] = {}
        for place, sample, values in read_lines(self.journal):
            episode = episodes.get((place, sample))
            if episode is not None and values["status"] not in WITHOUT_REWARD:
                # One whose line is of no use is played again.
                with contextlib.suppress(ValueError):
                    found[place, sample] = from_line(values, episode)
        if found:
            self.ctx.log(f"resumed: {len(found)} of {len(episodes)} episodes had been played")
        return found

    def _recorded(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Turns of unfinished episodes and what they began with, for a replay: fields of `Episode`."""
        turns: dict[tuple[int, int], dict[int, Turn]] = {}
        contexts: dict[tuple[int, int], list[int]] = {}
        for place, sample, number, values, began in read_lines(self.turns):
            mine = turns.setdefault((place, sample), {})
            if number == 0 and values["observation"] is None:
                # A try began anew.
                mine.clear()
            mine[number] = Turn(**values)
            if number == 0:
                contexts[place, sample] = began
        # Without a gap, from the first turn on.
        return {
            name: {"recorded": [mine[i] for i in sorted(mine)], "began": contexts[name]}
            for name, mine in turns.items()
            if len(mine) == max(mine) + 1
        }

    def _check(self, ended: Sequence[Ended]) -> None:
        failed = [e for e in ended if e.status in WITHOUT_REWARD]
        most = math.ceil(self.settings.max_failed_fraction * len(ended))
        for e in failed[:3]:
            self.ctx.log(f"episode {e.episode.name}, sample {e.episode.sample}: {e.status}, {e.reason}")
        if len(failed) > most:
            raise EnvironmentFailed(
                f"{len(failed)} of {len(ended)} episodes have no result, {most} may (environment.max_failed_fraction); "
                f"the first: {failed[0].episode.name}: {failed[0].status}, {failed[0].reason}. Finished episodes are "
                "kept: mend the environment and give the same command"
            )


def _ended(line: bytes, episodes: Mapping[tuple[int, int], Episode]) -> Ended:
    """An episode that another process has played."""
    place, sample, values = json.loads(line)
    return from_line(values, episodes[place, sample])
