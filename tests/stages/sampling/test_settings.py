"""Settings of the engine that samples: what cannot be meant is refused, and what changes no result is no content."""

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.sampling.settings import EngineSettings
from rlhf.stages.store.keys import SHOWN, config_content, published

URL = ["rl.rollout.engine.kind=vllm", "rl.rollout.engine.url=http://127.0.0.1:8000", "rl.rollout.engine.version='1.0'"]


def sets(**values):
    return [f"rl.rollout.engine.{k}={v}" for k, v in values.items()]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (sets(kind="vlm"), "'native', 'vllm' or 'sglang'"),
        (sets(concurrency=3), "concurrency has no meaning with kind native in the worker; say kind: vllm or"),
        (sets(url="http://x"), "version is missing; a server tells it at /version"),
        (
            sets(url="http://x", version="'1'"),
            "sync transfer is for vllm and native servers at url: set url, and folder",
        ),
        (sets(url="http://x", version="'1'", sync="adapter"), "native servers are at url, and read whole policies"),
        (sets(command="rlhf serve", version="'1'"), "native servers are at url, and read whole policies"),
        (sets(url="http://x", version="'1'", quantization="int8"), "quantization is of kind native in the worker"),
        (sets(kind="vllm", version="'1'"), "say url, where servers are, or command, which starts one"),
        ([*URL, *sets(command="vllm serve")], "not both"),
        (URL[:2], "version is missing; a server tells it at /version"),
        (sets(kind="sglang", url="http://x"), "a server tells it at /server_info"),
        ([*URL, *sets(servers=2)], "servers is of servers that are started here: say command in place of url"),
        ([*URL, *sets(arguments="[--x]")], "arguments is of servers that are started here"),
        ([*URL, *sets(sleep="true")], "sleep is of servers that are started here: say command in place of url"),
        (
            sets(kind="vllm", command="x", version="'1'", sleep="true", sync="restart"),
            "gets new weights when it wakes up, not by sync restart: say auto",
        ),
        ([*URL, *sets(sync="transfer")], "set url, and folder to a folder or URL that they and this machine reach"),
        (
            sets(kind="sglang", url="http://x", version="'1'", folder="s3://b/x"),
            "sync transfer is for vllm and native servers at url",
        ),
        (sets(kind="vllm", command="x", version="'1'", folder="s3://b/x"), "sync transfer is for vllm and native"),
        ([*URL, *sets(sync="adapter", folder="s3://b/x")], "sync adapter needs a folder that is a path: s3://b/x"),
        ([*URL, *sets(sync="restart")], "sync restart is for servers that are started here"),
        ([*URL, *sets(quantization="int8")], "is of kind native in the worker; give servers `arguments`"),
        ([*URL, *sets(kv_cache_dtype="int8")], "kv_cache_dtype is of kind native"),
        ([*URL, *sets(cache="paged")], "cache is of kind native"),
        ([*URL, *sets(timout=5)], "unknown key; did you mean timeout?"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_says_what_to_write(told, message):
    with pytest.raises(RecipeError) as e:
        load_recipe("smoke", sets=told)
    assert message in str(e.value)


def test_where_servers_are_is_no_content_and_what_they_are_is():
    def content(*told):
        return config_content(load_recipe("smoke", sets=[*URL, *told]).rl.rollout)

    assert content(*sets(url="[http://a, http://b]", concurrency=3, tolerance=0.2)) == content()
    assert content(*sets(folder="s3://b/x")) == content(*sets(sync="weights", folder="/x")) == content()
    assert content(*sets(version="'1.1'")) != content()
    assert content(*sets(dtype="float32")) != content()
    assert content(*sets(kind="native", folder="/x")) != config_content(load_recipe("smoke").rl.rollout)


def test_how_a_server_is_started_is_content_and_who_asks_and_where_it_lies_is_not():
    def content(command="a/bin/vllm serve", **variables):
        settings = EngineSettings(kind="vllm", version="1", command=command, environment=variables)
        return config_content(settings)

    plain = content(VLLM_SEED="1")
    assert content("b/bin/vllm serve", VLLM_SEED="1", HF_TOKEN="x", OPENAI_API_KEY="y") == plain
    assert content("a/bin/vllm serve --quantization fp8", VLLM_SEED="1") != plain != content(VLLM_SEED="2")
    same = EngineSettings(kind="vllm", version="1", command="a", servers=2, sleep=True)
    assert config_content(same) == config_content(EngineSettings(kind="vllm", version="1", command="a"))
    assert "hidden" not in str(content(VLLM_SEED="hidden"))


def test_a_variable_that_a_record_hides_comes_from_the_environment(monkeypatch):
    settings = EngineSettings(kind="vllm", version="1", command="c", environment={"HF_TOKEN": "x"})
    values = published({"engine": settings.model_dump()})["engine"]
    assert values["environment"] == {"HF_TOKEN": "***"}
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ValueError, match="HF_TOKEN is not recorded: export HF_TOKEN"):
        EngineSettings.model_validate(values)
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert EngineSettings.model_validate(values).environment == {"HF_TOKEN": "mine"}


def test_a_variable_of_a_record_is_never_another_one_of_the_environment(monkeypatch):
    settings = EngineSettings(kind="vllm", version="1", command="c", environment={"CUDA_VISIBLE_DEVICES": "1"})
    values = published({"engine": settings.model_dump()})["engine"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is not recorded, and here it has another: export"):
        EngineSettings.model_validate(values)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert EngineSettings.model_validate(values) == settings
    # Shown, its key is that of the run.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert config_content(EngineSettings.model_validate(values, context=SHOWN)) == config_content(settings)


def test_how_the_native_engine_holds_numbers_is_content():
    def content(*told):
        return config_content(load_recipe("smoke", sets=told).rl.rollout)

    assert content(*sets(quantization="int8")) != content() != content(*sets(kv_cache_dtype="bfloat16"))
    assert content(*sets(cache="paged")) == content()


def test_one_url_and_words_in_a_line_may_be_written_short():
    assert EngineSettings(kind="vllm", version="1", url="http://a").urls == ["http://a"]
    started = EngineSettings(kind="vllm", version="1", command="env/bin/python -m 'a b'")
    assert started.words == ["env/bin/python", "-m", "a b"]


def test_every_stage_that_samples_for_training_gets_the_engine():
    told = [*URL, "rl.refills=1", "rl.update.algorithm=grpo", "rl.rounds=1"]
    greedy = [*URL, "rl.update.algorithm=remax", "rl.rounds=1"]
    found = {n.stage: n for recipe in (told, greedy) for n in build(load_recipe("smoke", sets=recipe))}
    for name in ("rollout", "refill", "greedy"):
        assert found[name].config.engine.kind == "vllm"
    assert not hasattr(found["evaluate"].config, "engine")
