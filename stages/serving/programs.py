"""Episodes that a program plays: it calls an OpenAI URL, and its calls are recorded as a trajectory.

    program  --OPENAI_BASE_URL-->  a session of a server in this process  -->  the stage's engine
             <--RLHF_TASK--        the task: columns of its prompt without ANSWERS, and its seed
             <--RLHF_GRADER_FD--   ANSWERS and the key of the reward, to be read once (environment.agent_grades)
             --last line-->        {"reward": 1.0, "success": true}, or POST .../reward

The server accepts only OPENAI_API_KEY, which each stage draws. The policy's commands usually inherit the program's
variables, so no variable holds a secret of the worker, the answer, or the key of the reward.

The program and all processes that it starts end at its deadline and with this process. The server ignores sampling
settings of the program: a rollout has one temperature. Random numbers follow from the episode's name and the number of
the call, so an episode depends on no other episode; the order of concurrent calls is the program's.

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
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf.stages.sampling.environment import AGENT_SECONDS, Environment
from rlhf.stages.serving.app import make_app
from rlhf.stages.serving.server import Server
from rlhf.stages.serving.sessions import Call, Part, Session, Sessions, Terms, UnknownSession
from rlhf.stages.serving.settings import ServeOptions
from rlhf.stages.serving.web import Web
from rlhf.tuning.agents.contract import LIMITS, Fault, Status
from rlhf.tuning.agents.play import turn_seed
from rlhf.tuning.agents.trajectory import Ended, Episode, Turn
from rlhf.tuning.chat import Message
from rlhf.tuning.parallel.children import clean_environment
from rlhf.tuning.rollout.servers import keeper

ANSWERS = ("answer", "answers", "ground_truth", "tests", "entry")
"""Columns of a prompt, and fields within them, that built-in rewards read as its answer; reasoning-gym's `entry` often
has it, and so have the fields `extra_info` and `create_kwargs` of verl's data."""
# In a dict's text: of JSON, of Python, and with escaped quotes.
_ANSWER_KEY = re.compile(rf"""["']({"|".join(ANSWERS)})\\*["']\s*:""")
ASKED = ("prompt", "prompt_messages", "prompt_system")
"""Columns that the policy reads."""
TAIL_BYTES = 65536
"""Bytes of a program's output in which its last lines are looked for."""
START_SECONDS = 60.0
CANCEL_SECONDS = 10.0
"""Time for the engine to cancel the programs' requests after their server has ended."""
UNLIMITED = ServeOptions(requests=2**31, request_seconds=86400.0)
"""The recipe limits the number and the time of programs."""
LIMITED = ("/bin/sh", "-c", 'ulimit -d "$0" 2>/dev/null; exec "$@"')
"""Runs a command whose processes may have a number of KiB of data each, or less if the system's limit is lower.

Data, not address space: libraries reserve far more addresses than they use.
"""


@dataclasses.dataclass
class Programs:
    """Plays episodes by a program, several at a time."""

    settings: Environment
    url: str
    """URL of the server."""
    key: str
    """Key of the server."""
    sessions: Sessions
    terms: Callable[[Episode], Terms]
    failed: Callable[[], object]
    """Whether the engine has: from then on every call of a program fails."""
    ending: threading.Event = dataclasses.field(default_factory=threading.Event)

    def play(self, episodes: Sequence[Episode], live: int) -> Generator[Ended, None, None]:
        """Yield the episodes as they end; `live` of them run at a time."""
        with concurrent.futures.ThreadPoolExecutor(live, thread_name_prefix="program") as threads:
            futures = [threads.submit(self._play, episode) for episode in episodes]
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            finally:
                self.ending.set()
                threads.shutdown(wait=True, cancel_futures=True)

    def _play(self, episode: Episode) -> Ended:
        """Play an episode, again if its program fails."""
        for tries in range(1, self.settings.tries + 1):
            session = Session(secrets.token_hex(16), self.terms(episode), reward_key=secrets.token_hex(16))
            self.sessions.add(session)
            began = time.monotonic()
            try:
                fault = self._run(episode, session)
            finally:
                # The program may have deleted its session itself.
                with contextlib.suppress(UnknownSession):
                    self.sessions.remove(session.name)
            ended = ended_of(episode, session, fault, tries, time.monotonic() - began)
            if ended.status != "failed" or self.ending.is_set() or self.failed():
                break
        return ended

    def _run(self, episode: Episode, session: Session) -> Fault | None:
        """Run the program on a session; returns its fault."""
        seconds = self.settings.episode_seconds or AGENT_SECONDS
        words = list(self.settings.agent)
        name = " ".join(words)
        words[0] = sys.executable if words[0] in ("python", "python3") else words[0]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            try:
                process = self._start(words, episode, session, out, errors)
            except OSError as error:
                # Such as a task of more than 128 KiB, the longest variable.
                return Fault("error", f"{name} cannot be started: {error}")
            try:
                in_time = self._wait(process, time.monotonic() + seconds)
            finally:
                # The keeper ends the program and all that it started when this pipe closes.
                process.communicate()
            if not in_time:
                return Fault("timeout", f"{name} took longer than {seconds:g} s")
            if process.returncode != 0:
                last = (_tail(errors) or ["nothing on its standard error"])[-1]
                return Fault("crash", f"{name} ended with status {process.returncode}: {last}")
            try:
                reward, success = reward_of(_tail(out))
            except ValueError as error:
                return Fault("error", str(error))
        if reward is not None:
            session.reward, session.success = reward, success
        return None

    def _start(
        self, command: Sequence[str], episode: Episode, session: Session, out: IO[bytes], errors: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start the program under a keeper, which ends it with this process; Linux limits its memory."""
        limited = [*LIMITED, str(self.settings.megabytes * 1024)] if sys.platform == "linux" else []
        here = clean_environment()
        url = f"{self.url}/sessions/{session.name}"
        whole = dict(episode.task.row)
        row = without_answers(whole) | {name: whole[name] for name in ASKED if name in whole}
        environment = {
            **here,
            # Loopback is reached without the machine's proxies.
            **{n: ",".join(filter(None, (here.get(n), "127.0.0.1"))) for n in ("NO_PROXY", "no_proxy")},
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self.key,
            "RLHF_SESSION": url,
            "RLHF_TASK": json.dumps({**row, "seed": episode.task.seed, "sample": episode.sample}, ensure_ascii=False),
        }
        grader = dict.fromkeys(ANSWERS) | {name: value for name, value in whole.items() if row.get(name) != value}
        grader |= {"reward_key": session.reward_key}
        ends = [_pipe_with(json.dumps(grader).encode())] if self.settings.agent_grades else []
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

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Return whether the program ended before its deadline, the end of all programs and a failure of the engine."""
        while not (self.ending.is_set() or self.failed()) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left, 0.5))
                return True
        return False


def without_answers(value: Any) -> Any:
    """Return a JSON value without `ANSWERS`, at any depth and in texts of JSON. The properties of a schema stay."""
    if isinstance(value, dict):
        parts = {name: part for name, part in value.items() if name not in ANSWERS}
        is_schema = _is_schema(value)
        return {n: part if n == "properties" and is_schema else without_answers(part) for n, part in parts.items()}
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            found = json.loads(value)
            rest = without_answers(found)
            return value if rest == found else json.dumps(rest, ensure_ascii=False)
        except (ValueError, RecursionError):
            # Of another form, such as Python's.
            return "" if _ANSWER_KEY.search(value) else value
    return [without_answers(part) for part in value] if isinstance(value, list) else value


def _is_schema(value: dict[str, Any]) -> bool:
    kinds = value.get("type")
    is_object = "object" in kinds if isinstance(kinds, list) else kinds == "object"
    properties = value.get("properties")
    names = isinstance(properties, dict) and all(isinstance(part, dict) for part in properties.values())
    return names and (is_object or "required" in value or "$schema" in value)


def _pipe_with(data: bytes) -> int:
    """Return a descriptor from which data can be read once."""
    end, start = os.pipe()

    def write() -> None:
        # More than a pipe holds waits for its reader, or for the end of the program.
        with contextlib.suppress(BrokenPipeError), open(start, "wb", buffering=0) as pipe:
            left = memoryview(data)
            while left:
                left = left[pipe.write(left) or 0 :]

    threading.Thread(target=write, name="grader", daemon=True).start()
    return end


def _tail(file: IO[bytes]) -> list[str]:
    """Return the last lines of a file that are not empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def reward_of(lines: Sequence[str]) -> tuple[float | None, bool | None]:
    """Return reward and success of a program's last line, if it is a JSON object with `reward`; else None for both.

    Raises ValueError for a reward that is not a finite number.
    """
    try:
        last = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    except (ValueError, RecursionError):
        last = {}
    if "reward" not in last:
        return None, None
    reward, success = last["reward"], last.get("success")
    if (
        type(reward) not in (int, float)
        or not abs(reward) <= sys.float_info.max
        or not isinstance(success, bool | None)
    ):
        form = '{"reward": NUMBER, "success": true or false}'
        raise ValueError(f"the program's last line is {lines[-1][:200]}; expected {form}")
    return float(reward), success


def ended_of(episode: Episode, session: Session, fault: Fault | None, tries: int, seconds: float) -> Ended:
    """Return the trajectory of a session whose program has ended.

    A program that met a limit of its episode was truncated and did not fail, regardless of its end; without its own
    reward it gets 0.
    """
    session.closed = True
    # By their last calls: rewards read the last row of a trajectory, which ends with its last turn.
    parts = sorted(session.parts(), key=lambda part: part.calls[-1].number)
    turns = _turns(parts)
    status: Status = session.limit or "done"
    reason: str | None = None
    reward = 0.0 if session.limit is not None and session.reward is None else session.reward
    if fault is not None and session.limit is None:
        status, reason = "failed", f"{fault.kind} of the program: {fault.message}"
    elif not turns:
        status, reason = "failed", "the program has made no call to OPENAI_BASE_URL that was answered"
    if turns:
        turns[-1].reward, turns[-1].success = reward, session.success
        turns[-1].terminated, turns[-1].truncated = status == "done", status in LIMITS
    contexts = [part.prompt_ids for part in parts] or [[]]
    conversation = _conversation(session.calls[-1]) if session.calls else []
    return Ended(episode, contexts[0], turns, status, reason, tries, conversation, seconds, contexts[1:])


def _turns(parts: Sequence[Part]) -> list[Turn]:
    """Return the calls of all parts as turns, in the order of their arrival."""
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
                calls=_tool_calls(call, following),
                observation=list[Message](following.messages) if following else None,
                observation_ids=following.context_ids if following else [],
                part=number,
            )
            start += len(call.token_ids) + (len(following.context_ids) if following else 0)
    return [turns[number] for number in sorted(turns)]


def _tool_calls(call: Call, following: Call | None) -> list[dict[str, Any]] | None:
    """Return the calls of tools in an answer, with their results if the conversation continued."""
    called = (call.reply or {}).get("tool_calls")
    if not called:
        return None
    answers = [m for m in (following.messages if following else []) if m["role"] == "tool"]
    ids = [one["id"] for one in called]
    # In any order; some clients give ids of their own.
    results = {
        m["tool_call_id"] if m.get("tool_call_id") in ids else own: m["content"]
        for own, m in zip(ids, answers, strict=False)
    }
    return [
        {**one["function"], "arguments": json.loads(one["function"]["arguments"]), "result": results.get(one["id"])}
        for one in called
    ]


def _conversation(last: Call) -> list[Message]:
    """Return the messages of a branch."""
    conversation: list[Message] = []
    for call in last.path():
        reply = {k: v for k, v in (call.reply or {}).items() if v is not None or k == "content"}
        conversation += [*call.messages, reply]
    return conversation


@contextlib.contextmanager
def endpoint(server: Server, key: str) -> Iterator[str]:
    """Serve on a free port of loopback, in a thread, to clients with the key; yields the URL."""
    # Any user of this machine reaches the port.
    web = Web(make_app(server, UNLIMITED, [key]), "127.0.0.1", 0)
    thread = threading.Thread(target=web.run, name="endpoint", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not web.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server for agents did not start; see the log")
        time.sleep(0.01)
    try:
        yield web.url
    finally:
        # Without a wait for clients that keep their connections.
        web.should_exit = web.force_exit = True
        thread.join(CANCEL_SECONDS)
        if thread.is_alive():
            # A step hangs, and threads of the server wait for it.
            server.live.stop()
            thread.join()


def play_episodes(
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
    """Yield the episodes as they end. The engine is the caller's, and idle after the last episode.

    tokens: limit of a part of a trajectory. turn_tokens: limit of a turn's sampled ids.
    """
    from rlhf.tuning.rollout.engine.live import EngineStopped, Live

    def terms(episode: Episode) -> Terms:
        def of_turn(number: int) -> int:
            return turn_seed(seed, episode.place, episode.sample, number)

        return Terms(temperature, settings.turns, turn_tokens, tokens, of_turn)

    sessions = Sessions(max_sessions=sys.maxsize, tokens=sys.maxsize, closed=True)
    with contextlib.closing(Live(engine)) as live:
        server = Server(live, tokenizer, "policy", stops, tokens, policy, sessions, settings.tool_format, True)
        key = secrets.token_urlsafe(32)
        with endpoint(server, key) as url:
            limit = min(settings.processes, engine.slots_for(tokens))
            programs = Programs(settings, url, key, sessions, terms, lambda: live.failure)
            with contextlib.closing(programs.play(episodes, limit)) as plays:
                for one in plays:
                    if live.failure is not None:
                        # Programs are not at fault.
                        raise EngineStopped(f"the engine has stopped: {live.failure}") from live.failure
                    yield one
