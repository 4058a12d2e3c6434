"""A Llama in float64 and what is read off it: one sequence at a time, nothing packed or padded.

Written out, because transformers computes norms, rotary angles and softmaxes in float32 whatever the type of the
weights, and takes fifteen seconds to import. `test_model` compares it with transformers and PEFT.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]


def real(values: Any) -> Tensor:
    """A number, or a list of them, as a tensor in float64: torch's own default is float32."""
    return torch.tensor(values, dtype=torch.float64)


def weights_of(folder: Path) -> Weights:
    """The tensors of a folder's safetensors files, in float64."""
    found: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return {name: x.double() for name, x in found.items()}


class Model:
    """A decoder with its own tensors, and with a `score.weight` among them a reward model; or an adapter over one."""

    def __init__(self, config: dict[str, Any], weights: Weights, adapter: Path | None = None):
        assert config["model_type"] == "llama", config["model_type"]
        self.config, self.weights = config, weights
        self.scale, self.factors = 0.0, Weights()
        if adapter is not None:
            about = json.loads((adapter / "adapter_config.json").read_text())
            rank = about["r"]
            self.scale = about["lora_alpha"] / (math.sqrt(rank) if about["use_rslora"] else rank)
            self.factors = {n.removeprefix("base_model.model."): x for n, x in weights_of(adapter).items()}
        if "score.weight" in self.factors:
            # A score head is trained whole.
            self.weights = weights | {"score.weight": self.factors["score.weight"]}
        for x in self.trained.values():
            x.requires_grad_(True)

    @property
    def trained(self) -> Weights:
        """What an optimizer moves, by name: the adapter and score head where there is one, else everything."""
        return self.factors or self.weights

    @property
    def dense(self) -> Weights:
        """Copies of the weights as a decoder without an adapter has them: W + scale B A."""
        return {name: self._kernel(name).detach().clone() for name in self.weights}

    def _kernel(self, name: str) -> Tensor:
        low = name.removesuffix(".weight")
        a, b = self.factors.get(f"{low}.lora_A.weight"), self.factors.get(f"{low}.lora_B.weight")
        return self.weights[name] if a is None or b is None else self.weights[name] + self.scale * (b @ a)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Zhang and Sennrich, arXiv:1910.07467."""
        return self.weights[name] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """Final hidden states of a sequence, [tokens, hidden]."""
        x = self.weights["model.embed_tokens.weight"][torch.tensor(list(tokens), dtype=torch.long)]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, f"{at}input_layernorm.weight"), f"{at}self_attn.")
            y = self._norm(x, f"{at}post_attention_layernorm.weight")
            gate, up = (y @ self._kernel(f"{at}mlp.{n}_proj.weight").T for n in ("gate", "up"))
            x = x + (silu(gate) * up) @ self._kernel(f"{at}mlp.down_proj.weight").T
        return self._norm(x, "model.norm.weight")

    def _attention(self, x: Tensor, at: str) -> Tensor:
        """Causal attention of grouped queries (Ainslie et al., arXiv:2305.13245)."""
        count, size = len(x), self.config["head_dim"]
        q, k, v = ((x @ self._kernel(f"{at}{n}_proj.weight").T).view(count, -1, size) for n in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        z = torch.einsum("qnh,knh->nqk", q, k) / math.sqrt(size)
        z = z.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -math.inf)
        out = torch.einsum("nqk,knh->qnh", torch.softmax(z, -1), v)
        return out.reshape(count, -1) @ self._kernel(f"{at}o_proj.weight").T

    def _rotated(self, x: Tensor) -> Tensor:
        """Su et al., arXiv:2104.09864, on the halves of each head."""
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x), dtype=torch.float64)[:, None] * rates)[:, None]
        left, right = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def logits(self, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """Logits of the positions that predict the completion's tokens, [tokens of the completion, vocabulary]."""
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        # The token at position p is predicted at p - 1 (R10).
        first = len(prompt) - 1
        return self.hidden([*prompt, *completion])[first : first + len(completion)] @ self.weights[head].T

    def logps(
        self, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """log softmax(z / T) of the completion's tokens, and the entropies of those distributions, [tokens] (R2)."""
        every = torch.log_softmax(self.logits(prompt, completion) / temperature, -1)
        entropy = -(every.exp() * every).sum(-1)
        return every[torch.arange(len(completion)), torch.tensor(list(completion), dtype=torch.long)], entropy

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """The reward model's score, read at the last token of the completion (R12)."""
        return self.hidden([*prompt, *completion])[-1] @ self.weights["score.weight"][0]

    def values(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Values of the states in which each token was chosen [tokens], and of the state behind the last one."""
        every = self.hidden([*prompt, *completion]) @ self.weights["score.weight"][0]
        return every[len(prompt) - 1 : -1], every[-1]


def load(folder: Path, adapter: Path | None = None, fresh_head: bool = False) -> Model:
    """The model of a Hugging Face folder, and a PEFT adapter over it; `fresh_head`: with a score head of zeros."""
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    if fresh_head:
        weights["score.weight"] = torch.zeros(1, config["hidden_size"], dtype=torch.float64)
    return Model(config, weights, adapter)
