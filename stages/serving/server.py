"""Requests of the API as an engine's, with the ids that their sessions have recorded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from rlhf.stages.serving.answers import Choice, Completed, Spoken, Text
from rlhf.stages.serving.api import Asked, ChatRequest, CompletionRequest
from rlhf.stages.serving.chat_rendering import Wording
from rlhf.stages.serving.metrics import Counts
from rlhf.stages.serving.sessions import Call, Session, Sessions, said_by
from rlhf.stages.serving.settings import Named
from rlhf.stages.serving.tools import Offer, same_call, without_thoughts
from rlhf.tuning.models.tokenizer import begins_with_bos

TOP_LOGPROBS = 5
"""Most probable tokens that an answer can show at each position."""
READERS = 2
"""Requests that are rendered and tokenized at a time."""

AskedT = TypeVar("AskedT", bound=Asked)
T = TypeVar("T")


@dataclasses.dataclass
class Job:
    """A request of the API, ready for the engine."""

    asked: Asked
    prompts: list[list[int]]
    max_tokens: int | None
    kind: str
    """`object` of the answer."""
    prefix: str
    """Of the answer's id."""
    choice: Callable[[Text, int], Choice]
    """A choice's fields from its text and the number of its prompt."""
    session: Session | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)
    """One a choice, where there is a session."""
    generations: set[int] = dataclasses.field(default_factory=set)
    """Of the weights that answered."""


ANY = "policy"
"""What a client may call the model where it does not matter which one the server has."""


class Server:
    """Turns requests of the API into the engine's and back."""

    def __init__(
        self,
        live: Any,
        tokenizer: Any,
        name: str,
        stops: tuple[int, ...],
        context: int,
        policy: str | None = None,
        sessions: Sessions | None = None,
        tool_format: str = "auto",
        any_model: bool = False,
    ):
        """`policy` is the digest of the artifact whose policy it is; any_model: whether requests may name others."""
        self.any_model = any_model
        self.policies: dict[int, str | None] = {live.generation: policy}
        """Names of the weights that it has had, by their generation (`Live.swap`)."""
        self.named: Named | None = None
        """The entry of the registry that it serves."""
        self.live, self._tokenizer, self.name, self._stops, self._context = live, tokenizer, name, stops, context
        self._special = set(tokenizer.all_special_ids) | set(stops)
        self.sessions = Sessions(most=1024, tokens=2**22) if sessions is None else sessions
        self.wording = Wording(tokenizer, tool_format)
        self.counts = Counts()
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, thread_name_prefix="reader")

    @property
    def policy(self) -> str | None:
        """Name of the weights that it has now."""
        return self.policies.get(self.live.generation)

    @functools.cached_property
    def dtype(self) -> str:
        """Type of the matrices of layers."""
        return str(self.live.look(lambda engine, _: engine.weights_dtype))

    def policy_of(self, job: Job) -> str | None:
        """Name of the weights that a job was answered by. Raises PolicyChanged where it was by several."""
        if len(job.generations) > 1:
            raise PolicyChanged("the server got another policy while it answered: ask again")
        return self.policies.get(next(iter(job.generations), self.live.generation))

    def check_model(self, asked: Asked, policy: str | None) -> None:
        """Raises UnknownModel where a request is for another model than the weights of this name."""
        if not self.any_model and asked.model not in (None, ANY, policy, *self.ids):
            raise UnknownModel(f"no model {asked.model!r}; this server has {', '.join(self.ids)}, and {ANY!r} for it")

    @property
    def ids(self) -> list[str]:
        """Names of its model: its own, and the one of the registry."""
        return [self.name, *([] if self.named is None else [self.named.name])]

    async def read(self, job: Callable[[AskedT, Session | None], Job], asked: AskedT, session: Session | None) -> Job:
        """`completion` or `chat` of a request, in a thread: megabytes of text do not stop the streams of others."""

        def locked() -> Job:
            with session.lock if session is not None else contextlib.nullcontext():
                return job(asked, session)

        return await self.in_reader(locked)

    async def in_reader(self, action: Callable[..., T], *arguments: Any) -> T:
        """The result of an action that grows with a request, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, action, *arguments)

    def completion(self, asked: CompletionRequest, session: Session | None) -> Job:
        """The job of a request. Raises ValueError for one that cannot be met."""
        job = Job(
            asked,
            [self._prompt_ids(prompt) for prompt in asked.prompts],
            asked.max_tokens,
            "text_completion",
            "cmpl",
            lambda text, i: Completed(text, asked.logprobs),
        )
        _check_top("logprobs", asked.logprobs)
        if session is None:
            return job
        if asked.echo:
            raise ValueError("echo is not offered in a session; leave it out")
        for i, prompt in enumerate(asked.prompts):
            before, text, ids = self._going_on(session, prompt)
            self._record(job, session, "text", before, ids, [{"role": "user", "content": text}], ())
            job.prompts[i] = job.calls[-1].prompt_ids()
        return job

    def _going_on(self, session: Session, prompt: str | list[int]) -> tuple[Call | None, str, list[int]]:
        """(the call that a prompt goes on from, the text that it adds, the ids of that)."""
        if isinstance(prompt, str):
            before = session.found_text("text", prompt)
            added = prompt if before is None else prompt[len(before.whole_text()) :]
            return before, added, self._prompt_ids(added, begins=before is None) if added else []
        before = session.found_ids("text", prompt)
        ids = prompt if before is None else prompt[len(before.ids()) :]
        return before, self.decode(ids), ids

    def chat(self, asked: ChatRequest, session: Session | None) -> Job:
        """As `completion`, of a conversation."""
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        _check_top("top_logprobs", asked.top_logprobs)
        limit = asked.max_completion_tokens or asked.max_tokens
        offer = Offer(asked.schemas, self.wording.form, asked.choice, asked.parallel_tool_calls is not False)
        job = Job(
            asked,
            [],
            limit,
            "chat.completion",
            "chatcmpl",
            lambda text, i: Spoken(text, offer, job.prompts[i], top),
            session,
        )
        if len(asked.messages) > self._context:
            raise ContextFull(f"{len(asked.messages)} messages; the context is {self._context} tokens: send fewer")
        self._refuse_longer(sum(message.size for message in asked.messages))
        begun = self.wording.begun(offer)
        if session is None:
            job.prompts.append(self.wording.context(asked) + begun)
            return job
        said, kind = said_by(asked.messages), f"chat {offer.tools} {asked.options or ''}"
        before, used = session.found(kind, said)
        if any(role == "assistant" for role, _, _ in said[used:]):
            # What an assistant is said to have said, and nobody sampled, is part of a context alone.
            before, used = None, 0
        messages = self.wording.messages(asked.messages)[used:]
        words = self.wording.words(asked.schemas, asked.options)
        ids = words.first(messages) if before is None else words.suffix(messages, before.ended)
        self._record(job, session, kind, before, ids + begun, messages, tuple(said[used:]))
        job.prompts.append(job.calls[-1].prompt_ids())
        return job

    def _record(
        self,
        job: Job,
        session: Session,
        kind: str,
        before: Call | None,
        ids: list[int],
        messages: list[dict[str, Any]],
        said: tuple[Any, ...],
    ) -> None:
        """Begins a call for each sample of a prompt."""
        job.session = session
        for _ in range(job.asked.n or 1):
            fields = {"messages": messages, "said": said, "policy": self.policy}
            job.calls.append(session.open(kind, before, ids, **fields))

    def submit(self, job: Job, notify: Callable[[], None]) -> list[Any]:
        """The streams of a job's prompts, all with the same weights.

        Raises ValueError for what cannot be met, UnknownModel where other weights came while it waited.
        """
        streams: list[Any] = self.live.submit_all([self._request(job, i) for i in range(len(job.prompts))], notify)
        job.generations |= {stream.generation for stream in streams}
        try:
            for generation in job.generations:
                self.check_model(job.asked, self.policies.get(generation))
        except UnknownModel:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def _request(self, job: Job, number: int) -> Any:
        """The engine's request of a prompt."""
        from rlhf.tuning.rollout.requests import Request, Sampling, stop_strings

        asked, prompt, terms = job.asked, job.prompts[number], job.session.terms if job.session else None
        strings = asked.strings
        decode = Text(self._tokenizer, self._special, strings).decode
        stops = (*(() if asked.ignore_eos else self._stops), *(asked.stop_token_ids or ()))
        context = self._context if terms is None else min(self._context, terms.tokens)
        room = context - len(prompt)
        if room < 1:
            if job.session is not None:
                job.session.limit = job.session.limit or "token_limit"
            remedy = "shorten it, or serve with more" if terms is None else "environment.max_tokens bounds an episode"
            raise ContextFull(f"the prompt has {len(prompt)} tokens; the context is {context}: {remedy}")
        longest, sampling, seed = min(job.max_tokens or room, room), asked.sampling(), asked.root()
        if terms is not None and job.calls:
            longest = min(longest, terms.turn_tokens)
            sampling = Sampling(temperature=terms.temperature)
            seed = terms.seed(job.calls[number * (asked.n or 1)].number)
        return Request(
            prompt,
            longest,
            sampling,
            tuple(dict.fromkeys(stops)),
            seed,
            0 if terms is not None else number,
            asked.n or 1,
            stop_strings(lambda tokens: decode(list(tokens)), strings) if strings else None,
            name="prompt" if job.session is None else job.session.name,
        )

    def score(self, job: Job, prompt: list[int]) -> tuple[list[float | None], list[Any]]:
        """Log-probabilities of a prompt's tokens and the most probable ones in their places; None at the first."""
        if not prompt:
            raise ValueError("an empty prompt has no log-probabilities; begin it with a token such as BOS")
        scores, generation = self.live.score(prompt)
        job.generations.add(generation)
        self.check_model(job.asked, self.policies.get(generation))
        return [None, *scores.logps], [None, *scores.top]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids)))

    def text(self, strings: Sequence[str] = ()) -> Text:
        """An empty text."""
        return Text(self._tokenizer, self._special, list(strings))

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest text of which all tokens fit into the context."""
        return self._context * max(map(len, self._tokenizer.get_vocab()))

    def _refuse_longer(self, characters: int) -> None:
        """Raises ContextFull for a text that is too long to be tokenized: its tokens take hundreds of its bytes."""
        if characters > self.longest:
            raise ContextFull(
                f"the prompt has {characters} characters; a context of {self._context} tokens takes at most "
                f"{self.longest}: shorten it, or serve with more"
            )

    def _prompt_ids(self, prompt: str | list[int], begins: bool = True) -> list[int]:
        """Token ids of a prompt; a text that begins has the BOS that the tokenizer puts before a text, as documents."""
        if not isinstance(prompt, str):
            return prompt
        self._refuse_longer(len(prompt))
        if not begins:
            # Behind a control token: tokenizers of SentencePiece put a space before a text's beginning.
            anchor = str(self._tokenizer.eos_token or "")
            return list(self._tokenizer.encode(anchor + prompt, add_special_tokens=False))[bool(anchor) :]
        ids = list(self._tokenizer.encode(prompt, add_special_tokens=False))
        bos = [self._tokenizer.bos_token_id] if begins_with_bos(self._tokenizer) else []
        return ids if ids[:1] == bos else bos + ids

    async def chunks(self, job: Job, gone: Callable[[], Any]) -> AsyncIterator[tuple[int, Any, Choice, str]]:
        """(choice, update, its fields, the new part of its text) until all samples of all prompts have ended."""
        fresh, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            # Called in the engine's thread; asyncio's events belong to the thread of their loop.
            with contextlib.suppress(RuntimeError):
                # The loop has ended where the engine is closed behind its server.
                loop.call_soon_threadsafe(fresh.set)

        streams: list[Any] = []
        per_prompt = job.asked.n or 1
        texts: dict[int, tuple[Text, Choice]] = {}
        try:
            streams = await _made_or_cancelled(loop.run_in_executor(None, self.submit, job, notify))
            self.counts.prompt_tokens += sum(map(len, job.prompts))
            while not all(s.ended for s in streams):
                # At least once a second, also without an update, to see whether the client has left.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(fresh.wait(), timeout=1.0)
                fresh.clear()
                for i, stream in enumerate(streams):
                    while (update := _next(stream)) is not None:
                        number = i * per_prompt + update.sample
                        if number not in texts:
                            made = self.text(job.asked.strings)
                            texts[number] = made, job.choice(made, i)
                        text, choice = texts[number]
                        new = text.add(update.tokens, update.completion is not None)
                        self.counts.completion_tokens += len(update.tokens)
                        if update.completion is not None:
                            # Calls in the answer are compared with their schemas.
                            await asyncio.to_thread(choice.finish, update.completion)
                        if update.completion is not None and job.session is not None:
                            kept = (job, job.session, number, update.completion, text, choice)
                            await asyncio.to_thread(self._keep, *kept)
                        yield number, update, choice, new
                if await gone():
                    return
        finally:
            for stream in streams:
                # A client that left, or an error: the engine must not go on for it.
                if not stream.ended:
                    stream.cancel()

    def _keep(self, job: Job, session: Session, number: int, done: Any, text: Text, choice: Choice) -> None:
        """Records a sample in its session. Recorded before the client has it, so that its next call finds it."""
        if done.stop == "cancelled":
            return
        call = job.calls[number]
        reply = choice.whole(done).get("message") or {"role": "assistant", "content": text.sent}
        call.policy = self.policy_of(job)
        call.token_ids, call.logprobs, call.stop = list(done.tokens), list(done.logps), done.stop
        if call.kind == "text":
            # A stop string that ended it too; of control tokens a text has nothing.
            call.text, call.whole = text.decode(call.token_ids), self._special.isdisjoint(call.token_ids)
        else:
            call.text, call.whole = text.sent, done.stop != "string" and choice.complete
        call.ended = done.stop == "eos" and done.tokens[-1] in self._stops
        call.valid = choice.valid
        called = [one["function"] for one in reply.get("tool_calls", ())]
        calls = tuple(same_call(one["name"], _object(one["arguments"])) for one in called)
        with session.lock:
            session.keep(call, reply, ("assistant", without_thoughts(reply["content"] or ""), calls))
        self.sessions.evict(keep=session)


class UnknownModel(LookupError):
    """A request for a model that this server does not serve."""


class PolicyChanged(RuntimeError):
    """An answer that would be of two policies."""


class ContextFull(ValueError):
    """A prompt that leaves no room for an answer."""


def _check_top(field: str, count: int | None) -> None:
    if (count or 0) > TOP_LOGPROBS:
        raise ValueError(f"{field} is {count}; this server has the {TOP_LOGPROBS} most probable tokens of a position")


def _object(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    return value


async def _made_or_cancelled(making: asyncio.Future[Any]) -> Any:
    """The streams of a request that a thread submits, which waits for the step that the engine is in.

    A request that ends meanwhile cannot stop the thread: what it makes is cancelled as soon as it is there.
    """

    def drop(made: asyncio.Future[Any]) -> None:
        if made.exception() is None:
            for stream in made.result():
                stream.cancel()

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(drop)
        raise


def _next(stream: Any) -> Any:
    """The next update that is there already; None where none is."""
    try:
        return None if stream.ended else stream.next(timeout=0)
    except queue.Empty:
        return None
