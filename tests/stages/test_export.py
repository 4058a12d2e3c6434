"""An exported folder stops where training stopped: its generation config names every end of a turn (R10, R23)."""

import json

import numpy as np
import pytest

from rlhf.stages import base, export
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.tensors import Tensors
from rlhf.tuning.models.tokenizer import save_tokenizer, turn_end
from tests.stages.support import context


@pytest.fixture
def run(tmp_path):
    """Runs a stage; what it made, in a store."""
    store = Store(str(tmp_path / "store"))

    def made(stage, settings, **inputs):
        out = tmp_path / f"{stage.__name__}-{len(list(tmp_path.iterdir()))}"
        stage.run(context(settings, out, tmp_path, inputs=inputs))
        facts = {"seed": 0, "config": {}, "inputs": {}, "versions": {}, "device": "cpu", "metrics": {}}
        return store.commit(out, {"stage": stage.STAGE.name, "key": out.name, **facts})

    return made


@pytest.mark.parametrize(
    ("stored", "asked", "exported"),
    [("bfloat16", "base", "BF16"), ("float32", "base", "F32"), ("bfloat16", "float32", "F32")],
)
def test_weights_are_exported_in_the_type_of_the_base_or_in_the_one_asked_for(run, tmp_path, stored, asked, exported):
    model, tokenizer = tmp_path / "model", byte_tokenizer()
    config = tiny(len(tokenizer))
    params = huggingface.random_params(config, 0)
    huggingface.save_decoder(model, config, params, {}, dtype=stored)
    save_tokenizer(tokenizer, model)
    start = run(base, base.Config(source=str(model)))
    made = run(export, export.Config(dtype=asked), policy=start, tokenizer=start)
    with Tensors(start.local("model/")) as kept, Tensors(made.local()) as found:
        assert set(kept.kinds.values()) == {"BF16" if stored == "bfloat16" else "F32"}
        assert set(found.kinds.values()) == {exported}
        for name in kept.shapes:
            np.testing.assert_array_equal(found.read(name).astype(np.float32), kept.read(name).astype(np.float32))


def test_the_end_of_a_turn_is_among_the_stop_ids_of_the_export(run, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<turn_end>"], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<turn_end>")
    model, ids = tmp_path / "model", {"eos_token_id": 7}
    config = tiny(len(tokenizer))
    huggingface.save_decoder(model, config, huggingface.random_params(config, 0), ids)
    save_tokenizer(tokenizer, model)
    start = run(base, base.Config(source=str(model)))
    made = run(export, export.Config(), policy=start, tokenizer=start)
    ends = json.loads(made.local("generation_config.json").read_text())["eos_token_id"]
    assert ends == sorted({7, tokenizer.eos_token_id, turn_end(tokenizer)}) and len(ends) == 3
