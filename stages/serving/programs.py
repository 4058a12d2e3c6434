"""Episodes that a program plays: it speaks to an OpenAI URL, and its calls are recorded as a trajectory.

    program  --OPENAI_BASE_URL-->  a session of a server in this process  -->  the stage's engine
             <--RLHF_TASK--        the task: columns of its prompt without ANSWERS, and its seed
             <--RLHF_GRADER_FD--   ANSWERS and the key of the reward, to be read once (environment.agent_grades)
             --last line-->        {"reward": 1.0, "success": true}, or POST .../reward

The server takes OPENAI_API_KEY alone, which each stage draws. The policy's commands usually inherit the program's
variables: none holds a secret of the worker, the answer, or the key that a reward needs.

The program is ended with all that it has started, at its deadline and with this process. What its client asks of
sampling is not heeded: a rollout has one temperature. Random numbers follow from the episode's names and the number of
the call, so an episode depends on no other; the order of calls that a program makes at once is its own.

`rlhf.stages.sampling.episodes` loads this module by name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf.stages.sampling.environment import AGENT_SECONDS, Environment
from rlhf.stages.serving.access import Keys
from rlhf.stages.serving.app import make_app
from rlhf.stages.serving.connection import web_server
from rlhf.stages.serving.guard import Bounds
from rlhf.stages.serving.server import Server
from rlhf.stages.serving.sessions import Call, Part, Session, Sessions, Terms, UnknownSession
from rlhf.tuning.agents.contract import LIMITS, Fault, Status
from rlhf.tuning.agents.play import turn_seed
from rlhf.tuning.agents.trajectory import Ended, Episode, Turn
from rlhf.tuning.chat import Message
from rlhf.tuning.parallel.children import clean_environment
from rlhf.tuning.rollout.servers import keeper

ANSWERS = ("answer", "answers", "tests")
"""Columns of a prompt that built-in rewards read as its answer."""
TAIL_BYTES = 65536
"""Of a program's output: its last line, or its last words, are in them."""
START_SECONDS = 60.0
CANCEL_SECONDS = 10.0
"""For the engine to take back what programs have left open when their server ends."""
DAY = 86400.0
_LIMITED = ("/bin/sh", "-c", 'ulimit -d "$0" 2>/dev/null; exec "$@"')
"""Runs a command, behind the KiB of data that each of its processes may have.

Data, not address space: libraries reserve far more addresses than they use. Where the system allows less than that, its
own limit stays.
"""
_OF_MEMORY = re.compile(r"MemoryError|cannot allocate memory|bad_alloc|out of memory", re.IGNORECASE)
"""What runtimes say whose allocation has failed."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A program that ended by itself."""

    reward: float | None = None
    success: bool | None = None


class Programs:
    """Plays episodes by a program, some at a time."""

    def __init__(
        self, settings: Environment, url: str, key: str, sessions: Sessions, terms: Callable[[Episode], Terms]
    ):
        """url: where the server of the sessions listens. key: the one that it takes."""
        self._settings, self._url, self._key, self._sessions, self._terms = settings, url, key, sessions, terms
        self._ending = threading.Event()

    def play(self, episodes: Sequence[Episode], live: int) -> Generator[Ended, None, None]:
        """The episodes as they end; `live` of them are under way at a time."""
        with concurrent.futures.ThreadPoolExecutor(live, thread_name_prefix="program") as threads:
            played = [threads.submit(self.one, episode) for episode in episodes]
            try:
                for future in concurrent.futures.as_completed(played):
                    yield future.result()
            finally:
                self._ending.set()
                threads.shutdown(wait=True, cancel_futures=True)

    def one(self, episode: Episode) -> Ended:
        """An episode, which is begun again where its program fails."""
        for tries in range(1, self._settings.tries + 1):
            session = Session(secrets.token_hex(16), self._terms(episode), reward_key=secrets.token_hex(16))
            self._sessions.add(session)
            began = time.monotonic()
            try:
                outcome = self._run(episode, session)
            finally:
                # What still arrives reaches no trajectory. The program may have ended its session itself.
                with contextlib.suppress(UnknownSession):
                    self._sessions.remove(session.name)
            found = ended(episode, session, outcome, tries, time.monotonic() - began)
            if found.status != "failed" or self._ending.is_set():
                break
        return found

    def _run(self, episode: Episode, session: Session) -> Finished | Fault:
        """Runs the program on a session of its own."""
        seconds = self._settings.episode_seconds or AGENT_SECONDS
        words = list(self._settings.agent)
        command = [sys.executable if words[0] in ("python", "python3") else words[0], *words[1:]]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            try:
                process = self._started(command, episode, session, out, errors)
            except OSError as error:
                # A task longer than the system lets a variable be, such as 128 KiB.
                return Fault("error", f"{' '.join(words)} cannot be started: {error}")
            try:
                in_time = self._wait(process, time.monotonic() + seconds)
            finally:
                _end(process)
            if not in_time:
                return Fault("timeout", f"{' '.join(words)} took longer than {seconds:g} s")
            if process.returncode != 0:
                said = _tail(errors) or ["nothing on its standard error"]
                more = self._limit if sys.platform == "linux" and any(map(_OF_MEMORY.search, said)) else ""
                return Fault("crash", f"{' '.join(words)} ended with status {process.returncode}: {said[-1]}{more}")
            return outcome_of(_tail(out))

    def _started(
        self, command: Sequence[str], episode: Episode, session: Session, out: IO[bytes], errors: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """The program under a keeper, which ends it with this process, and with a limit of memory on Linux."""
        limited = [*_LIMITED, str(self._settings.megabytes * 1024)] if sys.platform == "linux" else []
        environment = self._environment(episode, session)
        grader = {name: episode.task.row.get(name) for name in ANSWERS} | {"reward_key": session.reward_key}
        ends = [_readable(json.dumps(grader).encode())] if self._settings.agent_grades else []
        if ends:
            environment[keeper.GRADER] = str(ends[0])
        try:
            return subprocess.Popen(
                [sys.executable, "-S", str(Path(keeper.__file__)), *limited, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
                env=environment,
                pass_fds=ends,
                start_new_session=True,
            )
        finally:
            for end in ends:
                os.close(end)

    @property
    def _limit(self) -> str:
        return f" (environment.megabytes gives each of its processes {self._settings.megabytes} MB)"

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Whether it ended before its deadline, and before all are to end."""
        while not self._ending.is_set() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left, 0.5))
                return True
        return False

    def _environment(self, episode: Episode, session: Session) -> dict[str, str]:
        here = clean_environment()
        url = f"{self._url}/sessions/{session.name}"
        # Loopback is reached without the machine's proxies.
        direct = {n: ",".join(filter(None, (here.get(n), "127.0.0.1"))) for n in ("NO_PROXY", "no_proxy")}
        row = {name: value for name, value in episode.task.row.items() if name not in ANSWERS}
        task = {**row, "seed": episode.task.seed, "sample": episode.sample}
        return {
            **here,
            **direct,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self._key,
            "RLHF_SESSION": url,
            "RLHF_TASK": json.dumps(task, ensure_ascii=False),
        }


def _readable(data: bytes) -> int:
    """A descriptor from which data can be read once. Raises OSError for more than a pipe holds (64 KiB)."""
    end, start = os.pipe()
    os.set_blocking(start, False)
    with open(start, "wb", buffering=0) as pipe:
        written = pipe.write(data)
    if written != len(data):
        os.close(end)
        raise OSError(f"its answer has {len(data)} bytes, more than a pipe holds")
    return end


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and all that it started, if it runs: its keeper sees this end of the pipe close."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _tail(file: IO[bytes]) -> list[str]:
    """The last lines of a file that are not empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def outcome_of(lines: Sequence[str]) -> Finished | Fault:
    """What the last line of a program's output says, if it is a JSON object with `reward`."""
    try:
        said = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    except (ValueError, RecursionError):
        said = {}
    if "reward" not in said:
        return Finished()
    reward, success = said["reward"], said.get("success")
    number = isinstance(reward, int | float) and not isinstance(reward, bool) and abs(reward) <= sys.float_info.max
    if not number or not isinstance(success, bool | None):
        form = '{"reward": NUMBER, "success": true or false}'
        return Fault("error", f"the program's last line is {lines[-1][:200]}; expected {form}")
    return Finished(float(reward), success)


def ended(episode: Episode, session: Session, outcome: Finished | Fault, tries: int, seconds: float) -> Ended:
    """The trajectory of a session whose program has ended.

    A program that met a limit of its episode was cut: that is no failure, however it ended, and without a reward of its
    own it has earned none.
    """
    session.closed = True
    # By their last calls: the last row of a trajectory, which rewards read, ends with its last turn.
    parts = sorted(session.parts(), key=lambda part: part.calls[-1].number)
    turns = _turns(parts)
    status: Status = "done"
    reason: str | None = None
    reward, success = session.reward, session.success
    if isinstance(outcome, Finished) and outcome.reward is not None:
        reward, success = outcome.reward, outcome.success
    if session.limit is not None:
        status = session.limit
        reward = 0.0 if reward is None else reward
    elif isinstance(outcome, Fault):
        status, reason = "failed", f"{outcome.kind} of the program: {outcome.message}"
    if status != "failed" and not turns:
        status, reason = "failed", "the program has made no call to OPENAI_BASE_URL that was answered"
    if turns:
        turns[-1].reward, turns[-1].success = reward, success
        turns[-1].terminated, turns[-1].truncated = status == "done", status in LIMITS
    contexts = [part.prompt_ids for part in parts] or [[]]
    calls = sorted((call for part in parts for call in part.calls), key=lambda call: call.number)
    conversation = _conversation(calls[-1]) if calls else []
    return Ended(episode, contexts[0], turns, status, reason, tries, conversation, seconds, contexts[1:])


def _turns(parts: Sequence[Part]) -> list[Turn]:
    """The calls of all parts as turns, in the order of their arrival."""
    turns: dict[int, Turn] = {}
    for number, part in enumerate(parts):
        start = 0
        for call, following in zip(part.calls, [*part.calls[1:], None], strict=True):
            turns[call.number] = Turn(
                start=start,
                token_ids=call.token_ids,
                logprobs=call.logprobs,
                text=call.text,
                stop="length" if call.stop == "length" else "eos",
                valid=call.valid,
                calls=_called(call, following),
                observation=list[Message](following.messages) if following else None,
                observation_ids=following.context_ids if following else [],
                part=number,
            )
            start += len(call.token_ids) + (len(following.context_ids) if following else 0)
    return [turns[number] for number in sorted(turns)]


def _called(call: Call, following: Call | None) -> list[dict[str, Any]] | None:
    """The calls of tools of an answer, with their results where the conversation went on."""
    called = (call.reply or {}).get("tool_calls")
    if not called:
        return None
    results = [m["content"] for m in (following.messages if following else []) if m["role"] == "tool"]
    results += [None] * len(called)
    return [
        {"name": one["function"]["name"], "arguments": json.loads(one["function"]["arguments"]), "result": result}
        for one, result in zip(called, results, strict=False)
    ]


def _conversation(last: Call) -> list[Message]:
    """The messages of a branch."""
    conversation: list[Message] = []
    for call in last.path():
        reply: Mapping[str, Any] = call.reply or {}
        conversation += [*call.messages, {k: v for k, v in reply.items() if v is not None or k == "content"}]
    return conversation


@contextlib.contextmanager
def listening(server: Server, key: str) -> Iterator[str]:
    """Serves on a free port of loopback, in a thread, to those who have the key; gives its URL."""
    # Any user of this machine reaches the port. How many programs ask at once is the recipe's, and so is their time.
    bounds = Bounds(requests=sys.maxsize, request_seconds=DAY)
    web = web_server(make_app(server, bounds, Keys([key])), "127.0.0.1", 0)
    thread = threading.Thread(target=web.run, name="endpoint", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not web.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server for agents did not start; see the log")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
    finally:
        # Without a wait for clients that keep their connections.
        web.should_exit = web.force_exit = True
        thread.join(CANCEL_SECONDS)
        if thread.is_alive():
            # A step hangs, and threads of the server wait for it.
            server.live.stop()
            thread.join()


def played(
    settings: Environment,
    engine: Any,
    tokenizer: Any,
    stops: tuple[int, ...],
    policy: str,
    tokens: int,
    turn_tokens: int,
    temperature: float,
    seed: int,
    episodes: Sequence[Episode],
) -> Generator[Ended, None, None]:
    """The episodes as they end, with one policy; the engine is the caller's, and idle again behind the last one.

    tokens: of a part of a trajectory. turn_tokens: of a turn's sampled ids.
    """
    from rlhf.tuning.rollout.engine.live import EngineStopped, Live

    def terms(episode: Episode) -> Terms:
        def of_turn(number: int) -> int:
            return turn_seed(seed, episode.place, episode.sample, number)

        return Terms(temperature, settings.turns, turn_tokens, tokens, of_turn)

    sessions = Sessions(most=sys.maxsize, tokens=sys.maxsize, closed=True)
    with contextlib.closing(Live(engine)) as live:
        server = Server(
            live, tokenizer, "policy", stops, tokens, policy, sessions, settings.tool_format, any_model=True
        )
        key = secrets.token_urlsafe(32)
        with listening(server, key) as url:
            most = min(settings.processes, engine.slots_for(tokens))
            with contextlib.closing(Programs(settings, url, key, sessions, terms).play(episodes, most)) as plays:
                for one in plays:
                    if live.failure is not None:
                        # No fault of a program.
                        raise EngineStopped("the engine has stopped") from live.failure
                    yield one
