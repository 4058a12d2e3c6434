"""The data card shows where data is from and never what opens it."""

import json
import shutil

from rlhf.stages.prepare.card import write_card
from rlhf.stages.prepare.settings import Config


def test_it_names_sources_without_what_opens_them(smoke_store, tmp_path):
    [made] = (smoke_store / "artifacts" / "prepare").iterdir()
    out = shutil.copytree(made, tmp_path / "out")
    source = {"source": "https://me:SECRET@host/x.jsonl?sig=SECRET", "source_args": {"also": "s3://me:SECRET@b/x"}}
    write_card(out, json.loads((out / "statistics.json").read_text()), Config.model_validate(source))
    page = (out / "card.html").read_text()
    assert "https://host/x.jsonl?sig=***" in page and "s3://b/x" in page and "SECRET" not in page
