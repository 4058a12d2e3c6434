"""Requests of the API as requests of the engine, with the ids that their sessions have recorded.

`ChatRenderer` has conversations of the API as token ids, with calls and results of tools, by the tokenizer's template.

Prometheus metrics of one server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import queue
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from rlhf.stages.serving.answers import Choice, Completed, Spoken, Text
from rlhf.stages.serving.api import ANY, Asked, ChatRequest, Message
from rlhf.stages.serving.errors import RequestError
from rlhf.stages.serving.sessions import Call, Session, Sessions, signatures_of
from rlhf.stages.serving.settings import Named
from rlhf.stages.serving.tools import Offer, same_call, without_thoughts
from rlhf.tuning.chat import calls
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.chat.schemas import MOST_BYTES
from rlhf.tuning.chat.template import Template
from rlhf.tuning.models.tokenizer import begins_with_bos


class Metrics:
    """The counters of one server; their names begin with `rlhf_serve_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"namespace": "rlhf_serve", "registry": self.registry}
        buckets = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
        self.requests = Counter(
            "requests", "Answers; status 0 if the client left before.", ["route", "status"], **options
        )
        self.seconds = Histogram("request_seconds", "Time of an answer.", buckets=buckets, **options)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **options)
        self.completion_tokens = Counter("completion_tokens", "Sampled tokens.", **options)


KEPT = 32
"""Renderers that are cached, by tools: each is checked when it is built."""


class ChatRenderer:
    """Renders messages with the model's template."""

    def __init__(self, tokenizer: Any, tool_format: str = "auto"):
        self._tokenizer = tokenizer
        self.form = calls.resolve(tool_format, str(tokenizer.chat_template or ""))
        """The format of calls."""
        self._renderer = functools.lru_cache(KEPT)(self._make_renderer)

    def renderer(self, tools: Sequence[calls.Schema], options: Mapping[str, Any]) -> Renderer:
        """Return the renderer for these tools and values of the template. Raises TemplateRefused, a ValueError."""
        # In the order of the request, which the template writes.
        return self._renderer(json.dumps([list(tools), options]))

    def _make_renderer(self, given: str) -> Renderer:
        tools, options = json.loads(given)
        return Renderer(self._tokenizer, tools, None, self.form, options)

    def context(self, asked: ChatRequest) -> list[int]:
        """Return the ids of a conversation through the header of the next answer, as training data has them.

        Raises TemplateRefused, a ValueError, such as for roles that do not alternate.
        """
        messages = self.messages(asked.messages)
        template = Template(self._tokenizer, asked.schemas, None, self.form, asked.chat_template_kwargs)
        has_tools = asked.tools or any(m.role == "tool" or m.tool_calls for m in asked.messages)
        return template.plain_ids(messages) if has_tools else template.ids(messages)

    def call_start(self, offer: Offer) -> list[int]:
        """Return the ids of the beginning of a call that the request asks for."""
        return Template(self._tokenizer, (), None, self.form).begun(offer.call_start) if offer.call_start else []

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as training data has them: text, calls with their arguments as objects, names of tools."""
        written: list[dict[str, Any]] = []
        names: dict[str | None, str] = {}
        for message in messages:
            one: dict[str, Any] = {"role": message.role, "content": message.text}
            if message.role == "tool":
                named = {"tool_call_id": message.tool_call_id, "name": message.name or names.get(message.tool_call_id)}
                one |= {key: value for key, value in named.items() if value}
            if message.tool_calls:
                names |= {call.id: call.function.name for call in message.tool_calls}
                one["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
            written.append(one)
        return written


READERS = 2
"""Requests that are rendered and tokenized at a time."""

T = TypeVar("T")


class UnknownModel(RequestError):
    """A request for a model that this server does not serve."""

    status, code, param = 404, "model_not_found", "model"


class PolicyChanged(RequestError):
    """A request whose samples are of two policies."""

    status, code = 503, "policy_changed"


class ContextFull(RequestError):
    """A prompt that leaves no room for an answer."""

    code = "context_length_exceeded"


@dataclasses.dataclass
class Job:
    """A request of the API, ready for the engine."""

    asked: Asked
    prompts: list[list[int]]
    max_tokens: int | None
    choice: Callable[[Text, int], Choice]
    """Makes a choice from its text and the number of its prompt."""
    session: Session | None
    calls: list[Call] = dataclasses.field(default_factory=list)
    """The call of each choice; empty without a session."""
    generations: set[int] = dataclasses.field(default_factory=set)
    """Generations of the weights that answered."""


class Server:
    """Turns requests of the API into requests of the engine, and completions into answers."""

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
        """policy: the name of the weights. any_model: whether requests may name any model."""
        self.any_model = any_model
        self.policies: dict[int, str | None] = {live.generation: policy}
        """Names of weights by their generation (`Live.swap`)."""
        self.named: Named | None = None
        """The entry of the registry that is served."""
        self.live, self._tokenizer, self.name, self._stops, self._context = live, tokenizer, name, stops, context
        self._special = set(tokenizer.all_special_ids) | set(stops)
        self.sessions = Sessions(1024, 2**22) if sessions is None else sessions
        self.renderer = ChatRenderer(tokenizer, tool_format)
        self.metrics = Metrics()
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, thread_name_prefix="reader")

    @property
    def policy(self) -> str | None:
        """Name of the present weights."""
        return self.policies.get(self.live.generation)

    @functools.cached_property
    def dtype(self) -> str:
        """Type of the matrices of layers."""
        return str(self.live.look(lambda engine, _: engine.weights_dtype))

    @property
    def ids(self) -> list[str]:
        """Names of the model: of the run, and of the registry's entry."""
        return [self.name, *([] if self.named is None else [self.named.name])]

    def policy_of(self, job: Job) -> str | None:
        """Return the name of the weights that have answered a job. Raises PolicyChanged if there were several."""
        if len(job.generations) > 1:
            raise PolicyChanged("the server got another policy while it answered: ask again")
        return self.policies.get(next(iter(job.generations), self.live.generation))

    def check_model(self, asked: Asked) -> None:
        """Raise UnknownModel if a request is for another model."""
        if not self.any_model and asked.model not in (ANY, *self.ids):
            raise UnknownModel(f"no model {asked.model!r}; this server has {', '.join(self.ids)}, and {ANY!r} for it")

    async def in_reader(self, action: Callable[..., T], *arguments: Any) -> T:
        """Return the result of an action on large data, in a thread: the event loop continues the streams of others."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, action, *arguments)

    def read(self, asked: Asked, session: Session | None) -> Job:
        """Return the job of a request. Raises ValueError and RequestError for one that cannot be answered."""
        with session.lock if session is not None else contextlib.nullcontext():
            return self._chat(asked, session) if isinstance(asked, ChatRequest) else self._completion(asked, session)

    def _completion(self, asked: Any, session: Session | None) -> Job:
        prompts = [self._prompt_ids(prompt) for prompt in asked.prompt]
        job = Job(asked, prompts, asked.max_tokens, lambda text, i: Completed(text, asked.logprobs), session)
        if session is None:
            return job
        if asked.echo:
            raise ValueError("echo is not offered in a session; leave it out")
        for prompt in prompts:
            before = session.find_ids("text", prompt)
            added = prompt if before is None else prompt[len(before.ids()) :]
            self._record(job, session, "text", before, added, [{"role": "user", "content": self.decode(added)}], ())
        return job

    def _chat(self, asked: ChatRequest, session: Session | None) -> Job:
        top = asked.top_logprobs if asked.logprobs else None
        offer = Offer(asked.schemas, self.renderer.form, asked.tool_choice, asked.parallel_tool_calls)
        limit = asked.max_completion_tokens or asked.max_tokens
        job = Job(asked, [], limit, lambda text, i: Spoken(text, offer, job.prompts[i], top), session)
        # Each takes a token, and the check of a rendering takes the square of their number.
        if len(asked.messages) > self._context:
            raise ContextFull(f"{len(asked.messages)} messages; the context is {self._context} tokens: send fewer")
        # A template may leave small schemas out. A tool has further fields, of any size.
        tools = max(0, len(json.dumps(asked.schemas)) - MOST_BYTES)
        self._check_length(sum(message.size for message in asked.messages) + tools)
        start = self.renderer.call_start(offer)
        if session is None:
            job.prompts.append(self.renderer.context(asked) + start)
            return job
        signatures, kind = signatures_of(asked.messages), f"chat {offer.tools} {asked.chat_template_kwargs}"
        before, used = session.find(kind, signatures)
        if any(role == "assistant" for role, _, _ in signatures[used:]):
            # Answers that this server did not sample are context only.
            before, used = None, 0
        messages = self.renderer.messages(asked.messages)[used:]
        renderer = self.renderer.renderer(asked.schemas, asked.chat_template_kwargs)
        ids = renderer.first(messages) if before is None else renderer.suffix(messages, before.ended)
        self._record(job, session, kind, before, ids + start, messages, tuple(signatures[used:]))
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
        signatures: tuple[Any, ...],
    ) -> None:
        """Begin a call for each sample of a prompt."""
        for _ in range(job.asked.n):
            job.calls.append(
                session.open(kind, before, ids, messages=messages, signatures=signatures, policy=self.policy)
            )

    def submit(self, job: Job, notify: Callable[[], None]) -> list[Any]:
        """Return the streams of a job's prompts, all from the same weights. Raises ValueError and RequestError."""
        streams: list[Any] = self.live.submit_all([self._request(job, i) for i in range(len(job.prompts))], notify)
        job.generations |= {stream.generation for stream in streams}
        return streams

    def _request(self, job: Job, number: int) -> Any:
        """Return the engine's request of a prompt."""
        from rlhf.tuning.rollout.requests import Request, Sampling, stop_strings

        asked, prompt, terms = job.asked, job.prompts[number], job.session.terms if job.session else None
        context = self._context if terms is None else min(self._context, terms.tokens)
        room = context - len(prompt)
        if room < 1:
            if job.session is not None:
                job.session.limit = job.session.limit or "token_limit"
            remedy = "shorten it, or serve with more" if terms is None else "environment.max_tokens limits an episode"
            raise ContextFull(f"the prompt has {len(prompt)} tokens; the context is {context}: {remedy}")
        longest, sampling, seed = min(job.max_tokens or room, room), asked.sampling(), asked.root()
        if terms is not None:
            longest = min(longest, terms.turn_tokens)
            sampling = Sampling(temperature=terms.temperature)
            seed = terms.seed(job.calls[number * asked.n].number)
            number = 0
        decode = self.text().decode
        return Request(
            prompt,
            longest,
            sampling,
            tuple(dict.fromkeys([*(() if asked.ignore_eos else self._stops), *asked.stop_token_ids])),
            seed,
            number,
            asked.n,
            stop_strings(decode, asked.stop) if asked.stop else None,
            name="prompt" if job.session is None else job.session.name,
        )

    def score(self, job: Job, prompt: list[int]) -> tuple[list[float | None], list[Any]]:
        """Return log-probabilities and most probable tokens at each token of a prompt; None at the first token."""
        if not prompt:
            raise ValueError("an empty prompt has no log-probabilities; begin it with a token such as BOS")
        scores, generation = self.live.score(prompt)
        job.generations.add(generation)
        return [None, *scores.logps], [None, *scores.top]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids)))

    def text(self, strings: Sequence[str] = ()) -> Text:
        """Return an empty text that ends before one of these strings."""
        return Text(self._tokenizer, self._special, strings)

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest text whose tokens fit into the context."""
        return self._context * max(map(len, self._tokenizer.get_vocab()))

    def _check_length(self, characters: int) -> None:
        """Raise ContextFull for a text that is too long to tokenize: tokenizers take hundreds of its bytes."""
        if characters > self.longest:
            raise ContextFull(
                f"the prompt has {characters} characters; a context of {self._context} tokens takes at most "
                f"{self.longest}: shorten it, or serve with more"
            )

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. A text gets the BOS that the tokenizer puts before documents."""
        if not isinstance(prompt, str):
            return prompt
        self._check_length(len(prompt))
        ids = list(self._tokenizer.encode(prompt, add_special_tokens=False))
        bos = [self._tokenizer.bos_token_id] if begins_with_bos(self._tokenizer) else []
        return ids if ids[:1] == bos else bos + ids

    async def chunks(self, job: Job, gone: Callable[[], Any]) -> AsyncIterator[tuple[int, Any, Choice, str]]:
        """Yield (number, update, choice, new part of its text) until all samples of all prompts have ended."""
        fresh, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            # Called in the engine's thread; the loop may have ended before the engine is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(fresh.set)

        streams: list[Any] = []
        texts: dict[int, tuple[Text, Choice]] = {}
        try:
            streams = await _streams_of(loop.run_in_executor(None, self.submit, job, notify))
            self.metrics.prompt_tokens.inc(sum(map(len, job.prompts)))
            while not all(s.ended for s in streams):
                # At least once a second, also without an update, to check whether the client has left.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(fresh.wait(), timeout=1.0)
                fresh.clear()
                for i, stream in enumerate(streams):
                    while (update := _next(stream)) is not None:
                        number = i * job.asked.n + update.sample
                        if number not in texts:
                            text = self.text(job.asked.stop)
                            texts[number] = text, job.choice(text, i)
                        text, choice = texts[number]
                        new = text.add(update.tokens, update.completion is not None)
                        self.metrics.completion_tokens.inc(len(update.tokens))
                        if update.completion is not None:
                            await asyncio.to_thread(self._keep, job, number, update.completion, text, choice)
                        yield number, update, choice, new
                if await gone():
                    return
        finally:
            for stream in streams:
                # After an error, or for a client that left, the engine must not continue.
                if not stream.ended:
                    stream.cancel()

    def _keep(self, job: Job, number: int, done: Any, text: Text, choice: Choice) -> None:
        """Record an ended sample in its session, before the client has it: its next call finds the sample."""
        # Compares calls in the answer with their schemas, which takes time.
        choice.finish(done)
        if job.session is None or done.stop == "cancelled":
            return
        call = job.calls[number]
        reply = choice.whole(done).get("message") or {"role": "assistant", "content": text.sent}
        call.policy, call.text = self.policy_of(job), text.sent
        call.token_ids, call.logprobs, call.stop = list(done.tokens), list(done.logps), done.stop
        call.whole, call.valid = done.stop != "string" and choice.complete, choice.valid
        call.ended = done.stop == "eos" and done.tokens[-1] in self._stops
        functions = [one["function"] for one in reply.get("tool_calls", ())]
        calls = tuple(same_call(one["name"], json.loads(one["arguments"])) for one in functions)
        with job.session.lock:
            job.session.keep(call, reply, ("assistant", without_thoughts(reply["content"] or ""), calls))
        self.sessions.evict(keep=job.session)


async def _streams_of(submitting: asyncio.Future[Any]) -> Any:
    """Return the streams of a request that a thread submits; the thread waits for the engine's present step.

    A cancelled request cannot stop the thread. Its streams are cancelled when they exist.
    """

    def drop(submitted: asyncio.Future[Any]) -> None:
        if submitted.exception() is None:
            for stream in submitted.result():
                stream.cancel()

    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(drop)
        raise


def _next(stream: Any) -> Any:
    """Return the next update if the engine has delivered it, else None."""
    try:
        return None if stream.ended else stream.next(timeout=0)
    except queue.Empty:
        return None
