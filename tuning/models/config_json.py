"""Reads and writes the `config.json` of the families in `families`.

Keys that a family's config class in transformers does not read are ignored here too. Values that this decoder does not
implement are refused by name. Two layouts are read: `rope_theta` with `rope_scaling`, and the `rope_parameters` of
transformers 5. The first is written, since releases 4 and 5 both read it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.families import EVERYWHERE, FAMILIES, MULTIPLIERS, Family
from rlhf.tuning.models.rope import RopeScaling

ROPE_FIELDS: Final = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_slow", "beta_fast", "original_max_position_embeddings", "attention_factor"),
    "longrope": (),
}
"""Required numbers of each `rope_type`, as `RopeScaling` has them."""
_PARTIAL: Final = "partial_rotary_factor"
_ORIGINAL: Final = "original_max_position_embeddings"
_LONGROPE: Final = ("short_factor", "long_factor", "attention_factor", _ORIGINAL)
_YARN: Final = ("mscale", "mscale_all_dim", "truncate")

_TYPES: Final[dict[str, tuple[type, str]]] = {
    "model_type": (str, "a string"),
    "use_sliding_window": (bool, "true or false"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "an object")),
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list, "a list")),
}
"""Types of the fields that no other check covers."""


class _File:
    """The values of one `config.json` with the family's defaults; every error names the file and the field."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.source = source
        self.values = values
        for name, (type_, expected) in _TYPES.items():
            if values.get(name) is not None and not isinstance(values[name], type_):
                raise self.refusal(name, values[name], expected)
        kind = self.read("model_type", {})
        if kind not in FAMILIES:
            raise self.refusal("model_type", kind, ", ".join(FAMILIES))
        self.family = FAMILIES[kind]
        if "num_experts" in self.family.defaults and "num_local_experts" in values:
            # As transformers 5 writes it.
            self.values = {"num_experts": values["num_local_experts"], **values}
        if isinstance(quantized := self.values.get("quantization_config"), dict) and "quant_method" in quantized:
            self.values = {**self.values, "quantization_config": quantized["quant_method"]}
        defaults = self.family.defaults
        everywhere = {name: allowed for name, allowed in EVERYWHERE.items() if name not in defaults}
        for name, allowed in (everywhere | dict(self.family.fixed)).items():
            if (value := self.values.get(name, defaults.get(name, allowed[0]))) not in allowed:
                raise self.refusal(name, value, repr(allowed[-1] if allowed[0] is None else allowed[0]))

    def refusal(self, name: str, value: Any, supported: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.source}: {name} is {value!r}, supported is {supported}")

    def read(self, name: str, defaults: Mapping[str, Any] | None = None) -> Any:
        """The value in the file, else the family's default. Raises UnsupportedModel where there is neither."""
        defaults = self.family.defaults if defaults is None else defaults
        if name in self.values:
            return self.values[name]
        if name in defaults:
            return defaults[name]
        raise UnsupportedModel(f"{self.source}: {name} missing")

    def positive(self, name: str) -> int:
        value = self.read(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self.refusal(name, value, "a positive integer")
        return value

    def number(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.refusal(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.read(name)
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return value

    def cap(self, name: str) -> float | None:
        value = self.read(name, {name: None} | dict(self.family.defaults))
        return None if value is None else self.number(name, value)


_SIZES: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
}
"""Sizes by their names in config.json: the fields of `DecoderConfig`."""


def _sizes(family: Family) -> dict[str, str]:
    """Names of the family's sizes in config.json, by field of `DecoderConfig`."""
    return {own: name for name, own in (_SIZES | dict(family.sizes)).items()}


MOST_LAYERS, MOST_EXPERTS = 10_000, 100_000
"""Before the names of their tensors are compared with the file's; experts of all layers."""


def from_hugging_face(values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The config in `values`, the content of a `config.json`.

    Raises UnsupportedModel, naming `source` and the field, for a model_type outside FAMILIES, for a value that the
    decoder does not implement, and for a field that is missing and has no default in transformers.
    """
    file = _File(values, source)
    family = file.family
    hidden, heads, layers = (file.positive(n) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if layers > MOST_LAYERS:
        raise file.refusal("num_hidden_layers", layers, f"at most {MOST_LAYERS}")
    kv_heads = heads if file.read("num_key_value_heads") is None else file.positive("num_key_value_heads")
    if heads % kv_heads:
        raise file.refusal("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    # A null counts as absent, as in transformers.
    default = values.get("head_dim", family.defaults.get("head_dim")) is None
    derived = {"num_key_value_heads": kv_heads, "head_dim": hidden // heads if default else file.positive("head_dim")}
    sizes: dict[str, Any] = {own: derived.get(name) or file.positive(name) for own, name in _sizes(family).items()}
    # Families without such a bias ignore the field.
    attention, mlp = (n in family.biases and n in values and file.flag(n) for n in ("attention_bias", "mlp_bias"))
    traits: dict[str, Any] = {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}
    traits |= _rope(file, sizes["head_dim"]) | _windows(file, layers)
    if (scaling := traits["rope_scaling"]) is not None and scaling.kind == "longrope":
        # Longer sequences have other angles from their first token on: a sampler cannot know which.
        sizes["max_positions"] = min(sizes["max_positions"], scaling.original_positions)
    if "use_qk_norm" in family.defaults:
        traits["qk_norm"] = file.flag("use_qk_norm")
    if "n_shared_experts" in family.defaults:
        traits["shared_size"] = file.positive("n_shared_experts") * sizes["intermediate_size"]
    if "no_rope_layer_interval" in family.defaults and not all(rotates := _rope_pattern(file, layers)):
        traits["rope_layers"] = tuple(rotates)
    if family.tensors:
        traits |= _routed(file, sizes)
    traits |= {own: file.number(name, file.read(name)) for name, own in MULTIPLIERS.items() if name in family.defaults}
    if "norm_offset" in family.traits:
        # Gemma.
        traits["embed_scale"] = hidden**0.5
    if family.softcaps:
        # Logits are scaled by this size rather than the head's.
        traits["query_scale"] = file.number("query_pre_attn_scalar", file.read("query_pre_attn_scalar")) ** -0.5
        traits["attention_softcap"] = file.cap("attn_logit_softcapping")
        traits["final_softcap"] = file.cap("final_logit_softcapping")
    return DecoderConfig(
        **sizes,
        norm_eps=file.number("rms_norm_eps", values.get("rms_norm_eps", family.defaults.get("rms_norm_eps", 1e-6))),
        tie_embeddings=file.flag("tie_word_embeddings"),
        family=values["model_type"],
        **traits | dict(family.traits),
    )


def _routed(file: _File, sizes: Mapping[str, int]) -> dict[str, Any]:
    """How a mixture chooses experts. transformers adds the balance loss where the router's logits are put out."""
    if sizes["experts_per_token"] > sizes["num_experts"]:
        raise file.refusal("num_experts_per_tok", sizes["experts_per_token"], f"at most {sizes['num_experts']}")
    most = MOST_EXPERTS // sizes["num_layers"]
    if sizes["num_experts"] > most:
        raise file.refusal(_sizes(file.family)["num_experts"], sizes["num_experts"], f"at most {most} of a layer")
    defaults = file.family.defaults
    aux = "router_aux_loss_coef" in defaults and file.flag("output_router_logits") and file.cap("router_aux_loss_coef")
    normalised = "norm_topk_prob" in defaults and file.flag("norm_topk_prob")
    return {"router_aux": float(aux or 0), "normalise_experts": normalised}


def _rope(file: _File, head_dim: int) -> dict[str, Any]:
    """Theta and scaling, from either layout; Gemma 3 has a second, unscaled theta for its windowed layers."""
    new, old = file.values.get("rope_parameters"), file.values.get("rope_scaling")
    theta = file.read("rope_theta")
    local = {}
    if "rope_local_base_freq" in file.family.defaults:
        new = dict(new or {})
        stray = sorted(set(new) - {"full_attention", "sliding_attention"})
        if stray:
            raise file.refusal(f"rope_parameters.{stray[0]}", new[stray[0]], "one entry for each layer type")
        name, windowed = "rope_parameters.sliding_attention", new.get("sliding_attention") or {}
        base, scaling = _rope_entry(file, name, windowed, file.read("rope_local_base_freq"))
        if scaling is not None:
            raise file.refusal(name, windowed, "rope_type 'default'")
        local = {"local_rope_theta": base}
        new = new.get("full_attention")
    if new and old:
        entries = [_rope_entry(file, *pair, theta) for pair in (("rope_parameters", new), ("rope_scaling", old))]
        if entries[0] != entries[1]:
            raise file.refusal("rope_scaling", old, f"the value of rope_parameters, {new!r}")
    name, entry = (
        "rope_parameters" if new else "rope_scaling",
        new or old or file.family.defaults.get("rope_scaling", {}),
    )
    base, scaling = _rope_entry(file, name, entry, theta)
    if _PARTIAL in file.family.defaults:
        part = entry.get(_PARTIAL) or file.values.get(_PARTIAL) or file.family.defaults[_PARTIAL]
        factor = file.number(_PARTIAL, part)
        if factor > 1 or int(head_dim * factor) % 2 or head_dim * factor < 2:
            raise file.refusal(_PARTIAL, part, f"an even part of the head's {head_dim} numbers")
        local["rotary_factor"] = factor
        pairs = int(head_dim * factor) // 2
        if scaling and scaling.kind == "longrope" and {len(scaling.short), len(scaling.long)} != {pairs}:
            sizes = [len(scaling.short), len(scaling.long)]
            raise file.refusal(f"lengths of {name}.short_factor and long_factor", sizes, f"{pairs} pairs of a head")
    return local | {"rope_theta": base, "rope_scaling": scaling}


def _rope_entry(file: _File, name: str, entry: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of one dictionary of rotary parameters; `theta` is the default."""
    kind = entry.get("rope_type", entry.get("type", "default"))
    # As the first releases of Phi 3 name it.
    kind = "longrope" if kind == "su" else kind
    known = ("default", "longrope") if _ORIGINAL in file.family.defaults else ("default", "linear", "llama3", "yarn")
    if kind not in known:
        raise file.refusal(f"{name}.rope_type", kind, ", ".join(known))
    required, optional = ROPE_FIELDS[kind], {"yarn": _YARN, "longrope": _LONGROPE}.get(kind, ())
    # transformers falls back to the model's context length for the original one.
    filled = {"original_max_position_embeddings": file.read("max_position_embeddings")} | dict(entry)
    if kind == "yarn":
        filled = _yarn(file, name, {field: value for field, value in filled.items() if value is not None})
    for field, value in entry.items():
        if field == _PARTIAL and (value in (1, 1.0) or field in file.family.defaults):
            continue
        if field not in ("rope_type", "type", "rope_theta", *required, *optional) and value is not None:
            raise file.refusal(f"{name}.{field}", value, f"absence, with rope_type {kind!r}")
    missing = [field for field in required if filled.get(field) is None]
    if missing:
        raise UnsupportedModel(f"{file.source}: {name}.{missing[0]} missing, with rope_type {kind!r}")
    base = file.number(f"{name}.rope_theta", entry.get("rope_theta", theta))
    if kind == "default":
        return base, None
    if kind == "longrope":
        return base, _longrope(file, name, entry)
    factor, *rest = (file.number(f"{name}.{field}", filled[field]) for field in required)
    if kind == "linear":
        return base, RopeScaling(kind, factor)
    low, high, original = rest[:3]
    if low >= high:
        raise file.refusal(f"{name}.{required[1]}", low, f"a number below {required[2]}, {high}")
    if not isinstance(whole := filled.get("truncate", True), bool):
        raise file.refusal(f"{name}.truncate", whole, "true or false")
    return base, RopeScaling(kind, factor, low, high, int(original), rest[3] if optional else 1.0, whole)


def _longrope(file: _File, name: str, entry: Mapping[str, Any]) -> RopeScaling:
    """The scaling, with the amplitude that transformers gives it by default."""
    original, most = file.positive(_ORIGINAL), file.positive("max_position_embeddings")
    if (own := entry.get(_ORIGINAL)) not in (None, original):
        raise file.refusal(f"{name}.{_ORIGINAL}", own, f"that of the model, {original}")
    divisors = []
    for field in ("short_factor", "long_factor"):
        if not isinstance(entry.get(field), list):
            raise file.refusal(f"{name}.{field}", entry.get(field), "a list of numbers")
        divisors.append(tuple(file.number(f"{name}.{field}", divisor) for divisor in entry[field]))
    given = entry.get("attention_factor")
    amplitude = grown(most, original) if given is None else file.number(f"{name}.attention_factor", given)
    return RopeScaling("longrope", most / original, 1.0, 4.0, original, amplitude, True, *divisors)


def grown(positions: float, original: int) -> float:
    """The amplitude of longrope for an extended context."""
    return math.sqrt(1 + math.log(positions / original) / math.log(original)) if positions > original else 1.0


def _yarn(file: _File, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with the values that transformers gives to absent fields."""
    factor, scale, every = (
        file.number(f"{name}.{field}", entry.get(field) or 1.0) for field in ("factor", "mscale", "mscale_all_dim")
    )

    def amplitude(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = entry.get("mscale") and entry.get("mscale_all_dim")
    grown = amplitude(scale) / amplitude(every) if both else amplitude(1.0)
    return {"beta_slow": 1, "beta_fast": 32, "attention_factor": grown} | dict(entry)


def _windows(file: _File, layers: int) -> dict[str, Any]:
    """The window and the layers that have it."""
    how = file.family.windows
    if how == "none" or (how == "switch" and not file.values.get("use_sliding_window", False)):
        if "sliding_attention" in (file.values.get("layer_types") or ()) and how != "none":
            raise file.refusal("layer_types", file.values["layer_types"], "full_attention, without use_sliding_window")
        return {}
    if how == "all":
        return {} if file.read("sliding_window") is None else {"sliding_window": file.positive("sliding_window")}
    slides = _sliding_layers(file, layers)
    if not any(slides):
        return {}
    return {"sliding_window": file.positive("sliding_window"), "sliding_layers": () if all(slides) else tuple(slides)}


def _sliding_layers(file: _File, layers: int) -> list[bool]:
    """Which layers are windowed: as `layer_types` says, else by the family's rule."""
    kinds = file.values.get("layer_types")
    if kinds is not None:
        strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if strange or len(kinds) != layers:
            raise file.refusal("layer_types", kinds, f"{layers} of full_attention and sliding_attention")
        return [kind == "sliding_attention" for kind in kinds]
    if file.family.windows == "pattern":
        # Gemma 2 alternates; Gemma 3 lets every n-th layer see everything.
        every = file.positive("sliding_window_pattern") if "sliding_window_pattern" in file.family.defaults else 2
        return _but_every(every, layers)
    if file.values.get("sliding_window", file.family.defaults.get("sliding_window")) is None:
        return [False] * layers
    if "no_rope_layer_interval" in file.family.defaults:
        # SmolLM3 puts its windows on the layers without positions.
        return [not rotates for rotates in _rope_pattern(file, layers)]
    # Qwen: layers below this number see everything.
    return [layer >= file.read("max_window_layers") for layer in range(layers)]


def _rope_pattern(file: _File, layers: int) -> list[bool]:
    """Which layers of SmolLM3 have positions: as `no_rope_layers` says (1 for rotation), else all but every n-th."""
    listed = file.values.get("no_rope_layers")
    if listed is None:
        return _but_every(file.positive("no_rope_layer_interval"), layers)
    if len(listed) < layers or any(value not in (0, 1) for value in listed):
        raise file.refusal("no_rope_layers", listed, f"{layers} of 0 and 1")
    return [bool(value) for value in listed[:layers]]


def _but_every(n: int, layers: int) -> list[bool]:
    """True for all but every n-th layer."""
    return [(layer + 1) % n != 0 for layer in range(layers)]


def to_hugging_face(config: DecoderConfig, *, scalar: bool = False, **extra: Any) -> dict[str, Any]:
    """The values of a `config.json` that transformers 4 and 5 load and `from_hugging_face` reads back equal.

    `scalar` names the sequence classifier of one label; `extra` adds values such as bos, eos and pad ids.
    """
    family = FAMILIES[config.family]
    classes = family.classes + ("Text" if scalar and config.family == "gemma3_text" else "")
    values: dict[str, Any] = {
        "architectures": [classes + ("ForSequenceClassification" if scalar else "ForCausalLM")],
        "model_type": config.family,
        **{name: getattr(config, own) for own, name in _sizes(family).items()},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
    }
    values |= {name: allowed[0] for name, allowed in family.fixed.items() if allowed[0] is not None}
    biases = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    values |= {name: biases[name] for name in family.biases} | _write_rope(config) | _write_windows(config, family)
    values |= {name: getattr(config, own) for name, own in MULTIPLIERS.items() if name in family.defaults}
    if "no_rope_layer_interval" in family.defaults:
        values["no_rope_layers"] = [int(r) for r in config.rope_layers] or [1] * config.num_layers
    if _PARTIAL in family.defaults:
        values[_PARTIAL] = config.rotary_factor
    if "use_qk_norm" in family.defaults:
        values["use_qk_norm"] = config.qk_norm
    if "n_shared_experts" in family.defaults:
        values["n_shared_experts"] = config.shared_size // config.intermediate_size
    if "router_aux_loss_coef" in family.defaults:
        values["output_router_logits"] = config.router_aux > 0
        values["router_aux_loss_coef"] = config.router_aux or family.defaults["router_aux_loss_coef"]
    if "norm_topk_prob" in family.defaults:
        values["norm_topk_prob"] = config.normalise_experts
    if family.softcaps:
        size = config.attention_scale**-2
        # The integer that it is up to rounding: (2 ** -0.5) ** -2 is not exactly 2.
        values["query_pre_attn_scalar"] = round(size) if abs(size - round(size)) < 1e-9 * size else size
        values["attn_logit_softcapping"] = config.attention_softcap
        values["final_logit_softcapping"] = config.final_softcap
    if scalar:
        values["num_labels"] = 1
    values |= extra
    # A value that the family's file has no field for would be lost silently, so the result is read back.
    reread = from_hugging_face(values, "config.json to be written")
    if reread != config:
        names = [f.name for f in dataclasses.fields(config) if getattr(reread, f.name) != getattr(config, f.name)]
        raise UnsupportedModel(f"family {config.family} cannot express {', '.join(names)} of {config}")
    return values


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": config.rope_theta}
    layered = FAMILIES[config.family].layered_rope
    if config.local_rope_theta is not None and not layered:
        values["rope_local_base_freq"] = config.local_rope_theta
    scaling, entry = config.rope_scaling, dict[str, Any](rope_type="default")
    if scaling is not None:
        kind, *numbers = dataclasses.astuple(scaling)
        entry = {"rope_type": kind} | dict(zip(ROPE_FIELDS[kind], numbers, strict=False))
        entry |= {"truncate": scaling.whole} if kind == "yarn" else {}
        if kind == "longrope":
            values[_ORIGINAL], most = scaling.original_positions, round(scaling.factor * scaling.original_positions)
            values["max_position_embeddings"] = most
            # transformers 4 takes no other field.
            entry = {"type": kind, "short_factor": list(scaling.short), "long_factor": list(scaling.long)}
            if scaling.amplitude != grown(most, scaling.original_positions):
                entry["attention_factor"] = scaling.amplitude
        values["rope_scaling"] = entry
    if layered:
        windowed = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        whole = entry | {"rope_theta": config.rope_theta}
        values["rope_parameters"] = {"full_attention": whole, "sliding_attention": windowed}
    return values


def _write_windows(config: DecoderConfig, family: Family) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    values: dict[str, Any] = {"sliding_window": config.sliding_window}
    if family.windows == "switch":
        values["use_sliding_window"] = config.sliding_window is not None
    if family.windows != "all":
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [kinds[config.slides(layer)] for layer in range(config.num_layers)]
    return values
