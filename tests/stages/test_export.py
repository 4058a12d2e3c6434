"""An exported folder stops where training stopped: its generation config names every end of a turn (R10, R23)."""

import json

from stages import base, export
from stages.contract.definition import Context
from stages.store.artifacts import Store
from tuning.models import huggingface
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.config import tiny
from tuning.models.tokenizer import save_tokenizer, turn_end


def test_the_end_of_a_turn_is_among_the_stop_ids_of_the_export(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<turn_end>"], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<turn_end>")
    model, ids = tmp_path / "model", {"eos_token_id": 7}
    config = tiny(len(tokenizer))
    huggingface.save_decoder(model, config, huggingface.random_params(config, 0), ids)
    save_tokenizer(tokenizer, model)
    store = Store(str(tmp_path / "store"))

    def run(stage, settings, **inputs):
        out = tmp_path / stage.__name__
        out.mkdir()
        stage.run(
            Context(
                config=settings,
                inputs=inputs,
                out=out,
                work=tmp_path,
                seed=0,
                progress=lambda *a, **k: None,
                log=print,
                memory={},
            )  # fmt: skip
        )
        facts = {"seed": 0, "config": {}, "inputs": {}, "versions": {}, "device": "cpu", "metrics": {}}
        return store.commit(out, {"stage": stage.STAGE.name, "key": "made", **facts})

    start = run(base, base.Config(source=str(model)))
    made = run(export, export.Config(), policy=start, tokenizer=start)
    ends = json.loads(made.local("generation_config.json").read_text())["eos_token_id"]
    assert ends == sorted({7, tokenizer.eos_token_id, turn_end(tokenizer)}) and len(ends) == 3
