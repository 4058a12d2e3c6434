"""The tokens and mask of a conversation."""

from rlhf.tuning.chat.template import Template
from rlhf.tuning.data.conversations import sample, tokenized


def conversation_ids(tokenizer, messages, tools=()):
    return tokenized(tokenizer, [sample(Template(tokenizer, tools), messages)])[0]
