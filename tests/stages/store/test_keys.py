"""Keys hold content (R17): one canonical form, every setting that can change a result, nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.contract.registry import modules, stage
from rlhf.stages.store.keys import (
    NotCanonical,
    canonical,
    config_content,
    derive_seed,
    differences,
    digest,
    published,
    variables_by_digest,
)

# How a stage computes, not what. Everything else of its config is in the key.
COMPUTE = {
    *("compute.tokens_per_micro_batch", "compute.rollout_rows", "compute.remat", "compute.profile"),
    *("compute.mesh.data", "compute.mesh.fsdp", "compute.mesh.tensor", "compute.mesh.context"),
}
FITTED = COMPUTE | {"checkpoint_every", "heldout_every"}
# Where servers are and how they are used; which engine it is, its version, type, arguments and command are content.
ENGINE = {
    f"engine.{name}"
    for name in (
        *("cache", "url", "servers", "sync", "folder", "concurrency", "timeout"),
        *("start_seconds", "wait_seconds", "tries", "tolerance", "key_variable", "sleep"),
    )
}
EXECUTION = {
    "base": {"chat_template"},
    "prepare": {"source", "workers", "chunk_megabytes", "runner.name", "runner.options", "runner.scratch"},
    **dict.fromkeys(("sft", "preference", "distill", "reward"), FITTED),
    **dict.fromkeys(("rollout", "refill", "greedy"), COMPUTE | ENGINE),
    "score": COMPUTE | {"workers", "max_failed_fraction", "max_concurrency"},
    "update": COMPUTE | {"store_state", "store_weights", "max_idle_rounds", "prompt_limit", "completion_limit"},
    "evaluate": COMPUTE
    | {"workers", "max_failed_fraction", "every", "load_best_model_at_end", "metric_for_best_model"},
    **dict.fromkeys(("select", "export", "gate", "fresh", "scorer"), set()),
    "start": {"stage", "key", "run"},
}


def config_of(name: str) -> Any:
    """The settings of a stage by its defaults; the pipeline tells which policy a run starts from."""
    needed = {"start": {"digest": "d"}, "scorer": {"source": "folder"}}
    return stage(name).config(**needed.get(name, {}))


def leaves(config: BaseModel, place: str = "") -> Iterator[str]:
    """The dotted name of every setting of a config, nested ones and those of named entries included."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{place}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(v, BaseModel) for v in value.values()):
            for entry, inner in value.items():
                yield from leaves(inner, f"{place}{name}.{entry}.")
        else:
            yield place + name


def changed(config: Any, place: str) -> Any:
    """A copy of `config` with another value at `place`."""
    name, _, rest = place.partition(".")
    if isinstance(config, dict):
        return config | {name: changed(config[name], rest)}
    value = changed(getattr(config, name), rest) if rest else "another value"
    return config.model_copy(update={name: value})


SETTINGS = [(name, place) for name in modules() for place in leaves(config_of(name))]


@pytest.mark.parametrize(("name", "place"), SETTINGS)
def test_a_setting_is_in_the_key_unless_it_says_how_to_compute(name, place):
    config = config_of(name)
    same = digest(config_content(config)) == digest(config_content(changed(config, place)))
    assert same == (place in EXECUTION[name])


def test_the_settings_above_are_all_there_are():
    assert set(EXECUTION) == set(modules())
    assert {(n, p) for n, places in EXECUTION.items() for p in places} <= set(SETTINGS)
    assert len(SETTINGS) > 80


@pytest.mark.parametrize("name", modules())
def test_every_config_is_canonical_and_survives_json(name):
    config = config_of(name)
    again = type(config).model_validate_json(json.dumps(config.model_dump(mode="json")))
    assert digest(config_content(again)) == digest(config_content(config))


def test_the_way_a_number_is_written_does_not_matter():
    keys = {
        digest(config_content(load_recipe("smoke", sets=[f"sft.optimizer.learning_rate={text}"]).sft))
        for text in ("0.001", "1e-3", "1.0e-3", "0.0010")
    }
    assert len(keys) == 1
    assert load_recipe("smoke", sets=["rl.update.clip_low=1"]) == load_recipe("smoke", sets=["rl.update.clip_low=1.0"])


def test_order_of_mappings_does_not_matter_and_order_of_lists_does():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest([1, 2]) != digest([2, 1])
    assert digest((1, 2)) == digest([1, 2])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0, False), (1, 1.0), ("1", 1), (None, "null"), ("", None), ({}, []), ("\u00e9", "e\u0301")],
)
def test_different_values_have_different_digests(one, other):
    assert digest({"x": one}) != digest({"x": other})


@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        {1, 2},
        Path("/tmp"),
        b"bytes",
        object(),
        np.int64(3),
        np.zeros(2),
        1j,
        {1: "a"},
        lambda: 0,
    ],
    ids=lambda v: type(v).__name__ + (str(v) if isinstance(v, float) else ""),
)
def test_a_value_without_one_form_is_refused_and_its_place_is_named(bad):
    with pytest.raises(NotCanonical, match=r"value\.sft\.steps\[1\]"):
        canonical({"sft": {"steps": [0, bad]}})


def test_a_digest_is_the_same_in_every_process_and_version():
    assert digest({"b": [1, 2.5, None, True], "a": "é"}) == (
        "0b8cc543e984d4d7398f5f603a4b91d358a2565f1d6b6a058565d662854e37cf"
    )


def test_seeds_depend_on_their_names_alone():
    seeds = [derive_seed(0, "rollout", i) for i in range(100)] + [derive_seed(1, "rollout", 0), derive_seed(0, "sft")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**32 for s in seeds)
    assert derive_seed(0, "rollout", 7) == seeds[7]
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c")


def test_differences_names_each_leaf_with_both_values():
    old = {
        "config": {"optimizer": {"learning_rate": 0.003, "beta1": 0.9}, "epochs": 1},
        "code": {"rlhf.stages.sft": "a"},
    }
    new = {
        "config": {"optimizer": {"learning_rate": 0.001, "beta1": 0.9}, "steps": 5},
        "code": {"rlhf.stages.sft": "b"},
    }
    assert differences(old, new) == [
        'code.rlhf.stages.sft: "a" -> "b"',
        "config.epochs: gone (was 1)",
        "config.optimizer.learning_rate: 0.003 -> 0.001",
        "config.steps: new, 5",
    ]
    assert differences(old, old) == []
    assert differences({"a": [1, 2]}, {"a": [1, 3]}) == ["a: [1, 2] -> [1, 3]"]
    assert differences({"a": {}}, {"a": 1}) == ["a: {} -> 1"]


def test_differences_of_lists_are_those_of_their_items_where_a_line_cannot_hold_them():
    sources = [{"source": f"data/{'very/long/' * 6}{name}.jsonl", "weight": 1.0} for name in "abc"]
    changed = [sources[0], sources[1] | {"weight": 2.0}, {"source": sources[2]["source"][:-7] + "d.jsonl"}]
    weight, source, gone = differences({"data": {"sources": sources}}, {"data": {"sources": changed}})
    assert weight == "data.sources[1].weight: 1.0 -> 2.0"
    assert source.startswith("data.sources[2].source: ") and "c.jsonl" in source and "d.jsonl" in source
    assert gone == "data.sources[2].weight: gone (was 1.0)"
    assert differences({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"b": 2}]}) == ['a[1]: new, {"b": 2}']
    assert differences({"a": [[1, 2], [3]]}, {"a": [[1, 5]]}) == ["a[0]: [1, 2] -> [1, 5]", "a[1]: gone (was [3])"]
    words = ["a long enough word"] * 9
    assert differences({"a": words}, {"a": [*words[:4], "another", *words[5:]]}) == [
        'a[4]: "a long enough word" -> "another"'
    ]


def test_long_texts_that_begin_alike_are_shown_where_they_differ():
    (line,) = differences({"a": "x" * 200 + "old"}, {"a": "x" * 200 + "new"})
    assert line == f'a: "…{"x" * 20}old" -> "…{"x" * 20}new"'


def test_who_reads_a_url_is_neither_in_a_key_nor_in_a_record():
    config, other = (stage("base").config(source=f"s3://{user}bucket/a@b") for user in ("me:secret@", "you:hidden@"))
    assert config_content(config) == config_content(other)
    assert config_content(config)["source"] == "s3://bucket/a@b"
    engine = {"environment": {"A_KEY": "secret", "A": "secret"}}
    record = {"data": {"source": [{"source": "ftp://me:secret@host/x y"}]}, "engine": engine}
    shown = published(record)
    variables = variables_by_digest(engine["environment"])
    assert shown == {
        "data": {"source": [{"source": "ftp://host/x y"}]},
        "engine": {"environment": {"A_KEY": "***", "A": f"***{variables['A']}"}},
    }
    assert published(shown) == shown and variables_by_digest(shown["engine"]["environment"]) == variables


def test_an_address_in_a_text_that_a_model_reads_is_content():
    prompts = ("Log in at ssh://alice@host first.", "Log in at ssh://bob@host first.", "Log in at ssh://host first.")
    keys = [str(config_content(stage("prepare").config(system_prompt=prompt))) for prompt in prompts]
    assert len(set(keys)) == 3 and not any("alice" in key or "bob" in key for key in keys)
    # A record that says another prompt than the run had would sample other rollouts.
    text = "Use GET http://tool/find?key=guess or ssh://alice@host."
    settings = {"data": {"system_prompt": text}, "rewards": [{"arguments": {"rubric": text}}]}
    assert published(settings) == settings
    dsn = {"arguments": {"dsn": "host=db url=postgres://u:pw@db/x", "j": '{"url": "s3://k:s@b/x"}'}}
    assert "pw" not in str(published(dsn)) and "k:s" not in str(published(dsn))
    for place in ("command", "agent", "tools", "api_key"):
        assert published({place: [f"-c {text}"]}) == {place: ["-c Use GET http://tool/find?key=*** or ssh://host."]}
    place = config_content(stage("base").config(source="s3://me:secret@bucket/my model"))
    assert place["source"] == "s3://bucket/my model"


def test_what_episodes_are_played_in_is_no_secret():
    """The section and the reward of that name are settings; a manifest without them could not be audited."""
    recipe = {"environment": {"name": "guess", "turns": 3}, "score": {"rewards": {"environment": {"weight": 1.0}}}}
    assert published(recipe) == recipe
