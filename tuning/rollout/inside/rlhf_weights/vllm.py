"""What vLLM's workers do with a push: `--worker-extension-cls rlhf_weights.vllm.Worker`, behind `routes.Weights`.

Tensors have the names and whole shapes of a Hugging Face checkpoint. vLLM's own `load_weights` divides them among the
workers of tensor and pipeline parallelism, and its layerwise reload processes each layer as at the start. Held beside
the model are tensors of layers of which others have yet to come.

This runs in vLLM's environment, which has torch and numpy and nothing else of this project.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .arriving import Arriving, PushRefused
from .frames import BrokenBucket, Kind

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Held:
    """SHA-256 of a model's tensors under their names in checkpoints, as the model's own loaders have placed them.

    Fused matrices (`packed_modules_mapping`) are taken apart again. One of several workers has parts of most tensors,
    which are left out.
    """

    def __init__(self, model: Any):
        self._model = model
        self._fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._names = {module: name.replace(".base_layer", "") for name, module in model.named_modules()}
        self._packed: dict[str, str] = {}
        """Digests of matrices that the platform then packs away."""

    def watch(self, given: dict[str, tuple[Kind, str]]) -> Callable[[], None]:
        """Has matrices read before a platform packs them, by the kinds in `given`; returns what ends that."""
        methods = {m.quant_method for m in self._names if getattr(m, "quant_method", None) is not None}

        def read(original: Callable[[Any], None], layer: Any) -> None:
            self._packed |= dict(self._digests(layer, given))
            original(layer)

        for method in methods:
            method.process_weights_after_loading = functools.partial(read, method.process_weights_after_loading)

        def end() -> None:
            for method in methods:
                vars(method).pop("process_weights_after_loading", None)

        return end

    def apart(self, given: dict[str, tuple[Kind, str]]) -> tuple[int, list[str]]:
        """How many tensors of `given` could be read, and the names of those that are not what was given."""
        found = dict(self._packed)
        for module in self._names:
            found |= dict(self._digests(module, given))
        return len(found), sorted(name for name, digest in found.items() if digest != given[name][1])

    def _digests(self, module: Any, given: dict[str, tuple[Kind, str]]) -> Iterator[tuple[str, str]]:
        for name, tensor in self._parts(module):
            if name not in given:
                continue
            kind = given[name][0]
            # Vocabularies are padded.
            value = tensor[: kind.shape[0]]
            if tuple(value.shape) == kind.shape:
                value = value.detach().to("cpu", getattr(torch, kind.dtype)).contiguous()
                yield name, hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()

    def _parts(self, module: Any) -> Iterator[tuple[str, Any]]:
        """The names of a module's own parameters in checkpoints, with their values."""
        prefix = self._names.get(module)
        if prefix is None or getattr(module, "tp_size", 1) > 1:
            return
        stem, _, last = prefix.rpartition(".")
        parts, sizes = self._fused.get(last), getattr(module, "output_sizes", ())
        for leaf, tensor in module.named_parameters(recurse=False):
            if tensor.is_meta or tensor.numel() == 0:
                continue
            if parts is None or len(parts) != len(sizes) or sum(sizes) != tensor.shape[0]:
                yield f"{prefix}.{leaf}", tensor
                continue
            for part, value in zip(parts, tensor.split(list(sizes)), strict=True):
                yield f"{stem}.{part}.{leaf}", value


class Loading:
    """A push on its way into a model, which serves nothing meanwhile."""

    def __init__(self, number: str, policy: str, runner: Any, config: Any, tied: bool, mine: bool):
        """tied: whether the policy's head is its embedding; mine: whether the model's is."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.arriving = Arriving(number, policy)
        self._runner, self._model, self._config = runner, runner.get_model(), config
        self._twice, self._tied = tied and not mine, mine
        self._names = {name.replace(".base_layer.", ".") for name, _ in self._model.named_parameters()}
        self._missing = set(self._names)
        self._held = Held(self._model)
        initialize_layerwise_reload(self._model)
        self._unwatch = self._held.watch(self.arriving.given) if _on_cpu() else lambda: None

    def add(self, bucket: bytes) -> None:
        """Loads the tensors that a bucket completes. Raises BrokenBucket, PushRefused, and what the model raises."""
        tensors = []
        for name, kind, data in self.arriving.add(bucket):
            value = torch.frombuffer(data, dtype=getattr(torch, kind.dtype)).reshape(kind.shape)
            tensors.append((name, value))
            if self._twice and name == EMBEDDING:
                tensors.append((HEAD, value))
                self.arriving.given[HEAD] = self.arriving.given[EMBEDDING]
        if tensors:
            self._missing -= set(self._model.load_weights(tensors) or ())

    def commit(self, fingerprint: str) -> int:
        """Ends a push that is whole; returns how many of its tensors were read again and compared.

        Raises PushRefused where it is not whole, or the model holds something else.
        """
        self.arriving.check(fingerprint)
        dense = self._config.quantization is None
        # A server that quantises has other parameters, of other numbers, in the same layers.
        layers = layers_of(self._names) - layers_of(self.arriving.given)
        missing = self._missing if dense else {f"layer {number}" for number in layers}
        if missing:
            raise PushRefused(f"the push has nothing for {min(missing)}: it is of another model")
        self.finish()
        read, apart = self._held.apart(self.arriving.given) if dense else (0, [])
        if apart:
            raise PushRefused(f"the model holds other numbers than were sent in {len(apart)} tensors ({apart[0]})")
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self._runner, forget, lambda: None)()
        return read

    def finish(self) -> None:
        """Puts the model together again, whatever has come: layers of which nothing came keep their weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        try:
            finalize_layerwise_reload(self._model, self._config)
        finally:
            self._unwatch()
        if self._tied and _on_cpu():
            self._pack_head()

    def _pack_head(self) -> None:
        """A head that is the embedding is loaded with it, and its packed copy on a CPU is not."""
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        for module in self._model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)


def layers_of(names: Iterable[str]) -> set[int]:
    """The numbers of the layers of which these parameters are."""
    return {int(found[1]) for found in map(re.compile(r"\blayers\.(\d+)\.").search, names) if found}


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


class Worker:
    """Methods that vLLM adds to each of its workers. What they refuse is an answer: exceptions lose their type."""

    model_runner: Any
    vllm_config: Any
    rlhf_push: Loading | None = None
    rlhf_last: tuple[str, str] | None = None
    """Number and policy of the push that was committed last."""
    rlhf_ended: tuple[str, bool] | None = None
    """Number of the push that ended last without a commit, and whether the model has none of its tensors."""
    rlhf_given: str | None = None
    """The fingerprint of the last push that is whole; None if weights came in another way."""
    rlhf_compared: int = 0
    """How many of its tensors were read again from the model, and were those that were sent."""

    def rlhf_told(self) -> dict[str, Any]:
        """Type, whether the head is the embedding, the fingerprint, and how many tensors were compared."""
        config = self.vllm_config.model_config
        tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        about = {"dtype": str(config.dtype).removeprefix("torch."), "tied": tied}
        given = self.rlhf_given if self.rlhf_push is None else None
        return about | {"fingerprint": given, "compared": self.rlhf_compared}

    def rlhf_begin(self, number: str, policy: str, tied: bool) -> dict[str, Any]:
        """Begins a push, in place of one that is under way. tied: whether the policy's head is its embedding."""
        self._rlhf_end()
        mine = self.rlhf_told()["tied"]
        if mine and not tied:
            return _refused("the served model has its embedding for a head, and the policy has a head of its own")
        with self._rlhf_config():
            runner, config = self.model_runner, self.vllm_config.model_config
            self.rlhf_push = Loading(number, policy, runner, config, tied, mine)
        return {}

    def rlhf_add(self, number: str, bucket: bytes) -> dict[str, Any]:
        """Loads a bucket. One changed on its way may come again; after another failure the push is given up."""
        if self.rlhf_push is None or self.rlhf_push.arriving.number != number:
            return _refused("there is no such push: another one began, or it was given up", 404)
        try:
            with self._rlhf_config():
                self.rlhf_push.add(bucket)
            return {}
        except BrokenBucket as error:
            return _refused(str(error))
        except Exception as error:
            return self._rlhf_failed(error)

    def rlhf_commit(self, number: str, fingerprint: str) -> dict[str, Any]:
        """Ends a push. The answer has the policy's name. Asked again, the same answer."""
        push = self.rlhf_push
        last = self.rlhf_last
        if push is None and last is not None and (number, fingerprint) == (last[0], self.rlhf_given):
            return {"policy": last[1], "again": True}
        if push is None or push.arriving.number != number:
            return _refused("there is no such push: another one began, or it was given up", 404)
        try:
            with self._rlhf_config():
                self.rlhf_compared = push.commit(fingerprint)
        except Exception as error:
            return self._rlhf_failed(error)
        self.rlhf_push, self.rlhf_given, self.rlhf_last = None, fingerprint, (number, push.arriving.policy)
        return {"policy": push.arriving.policy}

    def rlhf_drop(self, number: str | None = None) -> dict[str, Any]:
        """Gives up a push, by its number or whatever is under way. Without a number the fingerprint is forgotten too.

        The answer says whether the model is `intact`: it has no tensor of this push.
        """
        if self.rlhf_push is not None and number in (None, self.rlhf_push.arriving.number):
            self._rlhf_end()
        if number is None:
            self.rlhf_given, self.rlhf_compared = None, 0
        return {"intact": number is not None and self.rlhf_ended == (number, True)}

    def _rlhf_end(self) -> None:
        """Ends the push that is under way, if any."""
        push, self.rlhf_push = self.rlhf_push, None
        if push is None:
            return
        intact = not push.arriving.given
        self.rlhf_ended = push.arriving.number, intact
        if not intact:
            self.rlhf_given, self.rlhf_compared = None, 0
        with self._rlhf_config():
            push.finish()

    def _rlhf_failed(self, error: Exception) -> dict[str, Any]:
        self._rlhf_end()
        plain = isinstance(error, PushRefused)
        return _refused(str(error) if plain else f"the model does not take it: {type(error).__name__}: {error}")

    def _rlhf_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)


def _refused(why: str, status: int = 400) -> dict[str, Any]:
    return {"refused": why, "status": status}
