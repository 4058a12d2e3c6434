"""The oracle stands alone: it imports nothing of the product, and its decoder is that of transformers and PEFT."""

import ast
from pathlib import Path

import pytest
import torch

from tests.oracle import plain
from tests.oracle.plain import model
from tests.oracle.product import Product
from tests.oracle.tables import tokens_of

LIBRARIES = {"torch", "safetensors", "numpy", "pyarrow", "json", "math", "dataclasses", "pathlib"}
# Grain draws the permutations: what is drawn cannot be derived a second time.
DRAWN = {"order.py": {"grain"}}


def test_nothing_of_the_product_is_imported() -> None:
    for path in Path(plain.__path__[0]).glob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
        roots = {m.partition(".")[0] for m in modules if not m.startswith("tests.oracle.plain")}
        allowed = LIBRARIES | {"__future__", "typing", "collections"} | DRAWN.get(path.name, set())
        assert roots <= allowed, f"{path.name} imports {roots - allowed}"


@pytest.mark.slow
def test_the_decoder_is_that_of_transformers_and_peft(product: Product) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = product.base.local("model/")
    adapter = product.adapter({"rank": 2, "alpha": 3.0, "use_rslora": True}, product.base, "decoder")
    # B is 0 in a new adapter, which would hide its scale.
    weights = model.weights_of(adapter)
    changed = {n: x + 0.05 * torch.arange(x.numel()).reshape(x.shape) / x.numel() for n, x in weights.items()}
    from safetensors.torch import save_file

    save_file({n: x.contiguous() for n, x in changed.items()}, adapter / "adapter_model.safetensors")
    prompt, completion = tokens_of(0, 1, 5), tokens_of(0, 2, 7)
    ids = torch.tensor([prompt + completion])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), adapter)
    for other, own in ((theirs, model.load(folder)), (tuned.double().eval(), model.load(folder, adapter))):
        with torch.no_grad():
            wanted = other(ids).logits[0, len(prompt) - 1 : -1]
        # Norms and rotary angles of transformers are in float32.
        torch.testing.assert_close(own.logits(prompt, completion).detach(), wanted, rtol=0, atol=2e-5)
    scorer = AutoModelForSequenceClassification.from_pretrained(product.reward.local("model/"), dtype=torch.float64)
    with torch.no_grad():
        wanted = scorer.score(scorer.model(ids).last_hidden_state)[0, -1, 0]
    found = model.load(product.reward.local("model/")).score(prompt, completion).detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
