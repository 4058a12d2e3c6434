"""Chat templates of real models with the byte tokenizer, and messages of chats."""

import functools
import re
from pathlib import Path

from rlhf.tuning.models.byte_tokenizer import byte_tokenizer

TEMPLATES = sorted(path.stem for path in (Path(__file__).parent / "chat_templates").glob("*.jinja"))
CONTROL = re.compile(
    r"<[|｜][^\s'\"<>{}]*?[|｜]>|<(?:start|end)_of_turn>|<bos>|</s>|<end_of_utterance>|\[gMASK\]|<sop>"
)
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"}
THOUGHT = "<think>\nhm, hm\n</think>\n\n"


def tool(name):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


def call(city, content=""):
    function = {"name": "weather", "arguments": {"city": city}}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


@functools.cache
def tokenizer(name):
    made = byte_tokenizer()
    text = (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    made.add_tokens(sorted({"<bos>", "</s>", *CONTROL.findall(text)}), special_tokens=True)
    made.bos_token, made.eos_token, made.chat_template = "<bos>", "</s>", text
    return made
