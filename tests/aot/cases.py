"""The programs that are compiled, by name. Every kind of program, family, topology and axis is in one of them."""

import dataclasses
from typing import Literal

Program = Literal["sft", "grpo", "dpo", "reward", "score", "move", "prefill", "decode", "mixed"]
TRAINING = ("sft", "grpo", "dpo", "reward", "score")
"""Programs that read packed rows: optimizer steps, and scores of a reward model."""
PROMPT, COMPLETION = 256, 1792
"""Tokens of an example; with its prompt it fills a row."""
ROWS_A_DEVICE = 4
"""Rows of a micro-batch on each device."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program for one model on one topology."""

    program: Program
    model: str
    topology: str
    """A TPU's, as libtpu names it, or `h100x8`."""
    data: int = 1
    tensor: int = 1
    context: int = 1
    lora: int = 0
    """Rank of the adapter that is trained; 0: everything."""
    rows: int = ROWS_A_DEVICE
    completion: int = COMPLETION
    paged: bool = False
    """Whether the cache of decoding is in pages; that of a mixed step always is."""
    int8: bool = False
    """Whether the engine's matrices are int8."""
    kv8: bool = False
    """Whether the pages' keys and values are int8."""
    layers: int = 4
    """Of the engine's model, whose layers are compiled one by one: bytes and FLOPs are those of so many."""

    @property
    def name(self) -> str:
        """PROGRAM MODEL TOPOLOGY; what differs from the usual is written behind the program."""
        marks = [self.program]
        marks += [f"{name}{size}" for name in ("data", "tensor", "context") if (size := getattr(self, name)) > 1]
        marks += [mark for mark in ("paged", "kv8", "int8") if getattr(self, mark)]
        marks += [f"lora{self.lora}"] if self.lora else []
        if (self.rows, self.completion) != (ROWS_A_DEVICE, COMPLETION) and self.program in ("sft", "grpo"):
            marks.append(f"{self.rows}x{PROMPT + self.completion}")
        return f"{'/'.join(marks)} {self.model} {self.topology}"

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        return "gpu" if self.topology.startswith("h100") else "tpu"


PAIR = 768
"""Tokens of a completion of a pair; a row holds both, each behind the prompt."""
SMALL = Case("sft", "small", "v5e:2x2", completion=256)
SMALL_GPU = Case("sft", "small", "h100x8", completion=256)
"""The programs that are compiled soonest: changes for the worse are tried on them."""
MIXTURE_GPU = Case("sft", "qwen3-30b-a3b", "h100x8")
CASES = [
    SMALL,
    Case("sft", "qwen3-0.6b", "v5e:2x4"),
    Case("grpo", "qwen3-0.6b", "v5e:2x4"),
    Case("dpo", "qwen3-0.6b", "v5e:2x4", completion=PAIR),
    Case("reward", "qwen3-0.6b", "v5e:2x4", completion=PAIR),
    Case("score", "qwen3-0.6b", "v5e:2x4"),
    Case("move", "qwen3-0.6b", "v5e:2x4"),
    Case("prefill", "qwen3-0.6b", "v5e:2x4"),
    Case("decode", "qwen3-0.6b", "v5e:2x4"),
    Case("decode", "qwen3-0.6b", "v5e:2x4", paged=True),
    Case("mixed", "qwen3-0.6b", "v5e:2x4", paged=True),
    Case("sft", "qwen3-0.6b", "v5e:2x4", context=2, rows=1, completion=8192 - PROMPT),
    Case("sft", "llama-3-8b", "v5e:4x4"),
    Case("grpo", "llama-3-8b", "v5e:4x4", rows=2),
    Case("decode", "llama-3-8b", "v6e:2x4", tensor=4),
    Case("decode", "llama-3-8b", "v6e:2x4", tensor=4, paged=True),
    # One row is twice the window of Gemma 2; Gemma 3's is half of a usual row.
    Case("sft", "gemma-2-9b", "v6e:4x4", data=2, rows=1, completion=8192 - PROMPT),
    Case("sft", "gemma-3-12b", "v5p:2x2x2"),
    Case("grpo", "qwen3-32b", "v5e:16x16", tensor=4),
    Case("sft", "llama-3-70b", "v5p:2x2x4", tensor=2, lora=16),
    SMALL_GPU,
    Case("dpo", "qwen3-0.6b", "h100x8", completion=PAIR),
    Case("reward", "qwen3-0.6b", "h100x8", completion=PAIR),
    Case("sft", "gemma-2-9b", "h100x8", data=2, rows=1, completion=8192 - PROMPT),
    Case("sft", "gemma-3-12b", "h100x8"),
    Case("sft", "llama-3-8b", "h100x8"),
    Case("grpo", "llama-3-8b", "h100x8"),
    Case("sft", "llama-3-8b", "h100x8", context=2, rows=1, completion=8192 - PROMPT),
    Case("move", "llama-3-8b", "h100x8", tensor=2),
    Case("prefill", "llama-3-8b", "h100x8"),
    Case("decode", "llama-3-8b", "h100x8"),
    Case("decode", "llama-3-8b", "h100x8", int8=True),
    Case("decode", "llama-3-8b", "h100x8", tensor=2),
    Case("decode", "llama-3-8b", "h100x8", paged=True),
    Case("decode", "llama-3-8b", "h100x8", paged=True, kv8=True),
    Case("mixed", "llama-3-8b", "h100x8", paged=True),
    Case("decode", "llama-3-8b", "h100x8", tensor=2, paged=True),
    Case("decode", "gemma-3-12b", "h100x8", paged=True),
    Case("sft", "qwen3-32b", "h100x8", tensor=2, lora=16),
    Case("decode", "qwen3-30b-a3b", "v5e:2x4", tensor=4),
    MIXTURE_GPU,
    Case("decode", "qwen3-30b-a3b", "h100x8"),
    Case("decode", "qwen3-30b-a3b", "h100x8", tensor=2),
]


def named(name: str) -> Case:
    """The case of this name. Raises ValueError for an unknown one."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case is named {name!r}; there are {', '.join(c.name for c in CASES)}")
