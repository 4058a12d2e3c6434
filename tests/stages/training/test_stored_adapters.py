"""Artifacts that hold an adapter alone: every reader merges it with the weights of the artifact below."""

import jax
import pytest

from rlhf.stages import base as base_model
from rlhf.stages import distill, export, preference, reward, sft, start
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.common.models import below, load_frozen, load_policy, load_scorer
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.collect import Limits, collect
from rlhf.stages.store.reachability import Roots
from rlhf.tuning.device import Compute
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.training.completions import token_logps
from tests.stages.support import context
from tests.stages.training.support import FAST, data, rows_of, settings

LORA = {"rank": 4, "alpha": 8.0, "targets": ["down", "q", "v"]}
QUICK = FAST | {"learning_rate": 3e-2}


class Lab:
    """Stages over a store, each with a worker that remembers nothing."""

    def __init__(self, folder):
        configure_jax()
        self.folder, self.store, self.count = folder, Store(str(folder / "store")), 0
        self.base = self.run(base_model, base_model.Config(source="random:tiny"))[0]
        names = {"preference": 16, "heldout_preference": 4, "sft": 16}
        self.data = self.commit("prepare", data(folder / "data", **{n: rows_of(n, c) for n, c in names.items()}).path)

    def context(self, config, inputs=None):
        self.count += 1
        place = self.folder / f"{self.count:02d}"
        return context(config, place / "out", place / "work", inputs=inputs or {}, seed=3)

    def commit(self, stage, folder, config=None, inputs=None):
        refs = {name: {"stage": a.stage, "key": a.key, "digest": a.digest} for name, a in (inputs or {}).items()}
        facts = {"seed": 3, "config": config or {}, "inputs": refs, "versions": {}, "device": "cpu", "metrics": {}}
        return self.store.commit(folder, {"stage": stage, "key": f"{stage}{self.count:02d}", **facts})

    def run(self, module, config, **inputs) -> tuple[Artifact, dict]:
        """What a stage made, and what it left in its worker's memory."""
        ctx = self.context(config, inputs)
        module.run(ctx)
        ctx.close()
        return self.commit(module.STAGE.name, ctx.out, config.model_dump(mode="json"), inputs), ctx.memory

    def sft(self, below, **lora):
        config = settings(sft, optimizer=QUICK, lora=LORA | lora)
        return self.run(sft, config, base=below, data=self.data, tokenizer=self.base)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def tuned(lab):
    return lab.sft(lab.base)


def logps(model, params):
    pairs = [([5, 6, 7], list(range(8, 24))), ([9], [1, 2, 3])]
    return token_logps(model, params, pairs, 1.0, Compute(), 64)


def test_an_adapter_is_stored_without_its_base_and_read_with_it(lab, tuned):
    made, memory = tuned
    model, trained = memory["decoder:new"]
    assert {f["path"].split("/")[0] for f in made.manifest["files"]} == {"adapter", "logs"}
    assert below(made).digest == lab.base.digest
    ctx = lab.context(settings(sft))
    _, read = load_policy(ctx, made)
    assert fingerprint(read) == fingerprint(trained)
    assert logps(model, read) == logps(model, trained)
    assert load_policy(ctx, made)[1] is read
    small = lab.context(settings(sft, compute={"dtype": "bfloat16"}))
    frozen = jax.tree.leaves(load_frozen(small, made)[1])
    assert {x.dtype.name for x in frozen} == {"bfloat16", "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_an_adapter_over_an_adapter_follows_the_chain(kind, lab, tuned):
    made, memory = lab.sft(tuned[0], quantize=kind)
    assert not made.has("model/") and below(made).digest == tuned[0].digest
    assert fingerprint(load_policy(lab.context(settings(sft)), made)[1]) == fingerprint(memory["decoder:new"][1])


@pytest.mark.slow
def test_other_stages_store_their_adapters_and_read_others(lab, tuned):
    common = {"optimizer": QUICK, "lora": LORA}
    inputs = {"policy": tuned[0], "data": lab.data, "tokenizer": lab.base}
    for module, more in ((preference, {"reference": tuned[0]}), (distill, {"teacher": tuned[0]})):
        made, memory = lab.run(module, settings(module, **common), **inputs, **more)
        assert not made.has("model/")
        assert fingerprint(load_policy(lab.context(settings(sft)), made)[1]) == fingerprint(memory["decoder:new"][1])
    inputs = {"base": lab.base, "data": lab.data, "tokenizer": lab.base}
    made, memory = lab.run(reward, settings(reward, **common), **inputs)
    assert not made.has("model/")
    assert fingerprint(load_scorer(lab.context(settings(sft)), made)[1]) == fingerprint(memory["scorer:new"][1])


@pytest.mark.slow
def test_the_export_and_the_start_of_another_run_hold_the_merged_model(lab, tuned):
    made, memory = tuned
    _, trained = memory["decoder:new"]
    exported, _ = lab.run(export, export.Config(dtype="float32"), policy=made, tokenizer=lab.base)
    config = start.Config(digest=made.digest, stage=made.stage, key=made.key)
    begun, _ = lab.run(start, config, tokenizer=lab.base)
    for folder in (exported.local(), begun.local("model/")):
        assert fingerprint(huggingface.load_decoder(folder)[1]) == fingerprint(trained)
    assert exported.has("adapter/")


@pytest.mark.slow
def test_a_collection_keeps_the_base_of_an_adapter_and_a_missing_one_is_named(tmp_path):
    lab = Lab(tmp_path)
    made, _ = lab.sft(lab.base)
    other, _ = lab.run(base_model, base_model.Config(source="random:tiny"))
    everything = Limits(grace_seconds=-60.0, settle_seconds=0.0)
    freed = collect(lab.store, lambda: Roots((), frozenset({made.digest})), everything)
    # The same content under another key: nothing refers to it.
    assert [v.key for v in freed.garbage] == [other.key]
    load_policy(lab.context(settings(sft)), made)
    collect(lab.store, lambda: Roots((), frozenset({lab.data.digest})), everything)
    with pytest.raises(RuntimeError, match=f"sft/{made.key} was trained from base/{lab.base.key}, which is gone"):
        load_policy(lab.context(settings(sft)), made)
