"""A conversation with a tool that the served model is taught, and a server in a thread."""

import contextlib

from rlhf.stages.serving.app import make_app
from rlhf.stages.serving.server import Server
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.models.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from rlhf.tuning.models.config import tiny
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.live import Live
from tests.stages.support import running

CONTEXT = 200
LIMITS = Limits(slots=4, context=CONTEXT, steps=4, chunks=(32,), prefill_chunks=1)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
QUESTION = {"role": "user", "content": "2+3?"}
SAID = ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "It is 5."]
RESULT = {"role": "tool", "name": "add", "content": "5"}


def made_tokenizer():
    """The byte tokenizer with a template that names tools."""
    tokenizer = byte_tokenizer()
    tools = "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    tokenizer.chat_template = tools + CHAT_TEMPLATE
    return tokenizer


TOKENIZER = made_tokenizer()
CONFIG = tiny(len(TOKENIZER))
STOPS = (TOKENIZER.eos_token_id,)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def conversation():
    """(first context, first answer, what follows it, second answer) of the conversation with the tool, as ids."""
    words = Renderer(TOKENIZER, [ADD])
    said = [[*ids(text), *STOPS] for text in SAID]
    return words.first([QUESTION]), said[0], words.suffix([RESULT], ended=True), said[1]


def serving(server, options=None, keys=(), weights=None):
    """The base URL of a server in a thread."""
    return running(make_app(server, options, keys, weights))


@contextlib.contextmanager
def living(params, kind=Live):
    """An engine that has these parameters, in a thread."""
    engine = Engine(CONFIG, limits=LIMITS, top=5)
    engine.load(params)
    live = kind(engine)
    try:
        yield live
    finally:
        live.close()


def served(live, digest=None, **options):
    """A server of it."""
    return Server(live, TOKENIZER, "tiny", STOPS, CONTEXT, digest, **options)
