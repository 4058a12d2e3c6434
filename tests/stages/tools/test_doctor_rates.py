"""What `rlhf doctor` says of a processor's products is measured with the products of models."""

import jax

from rlhf.stages.tools import doctor
from rlhf.tuning.training import speed


def test_rates_are_of_float32_arrays_multiplied_as_models_do(monkeypatch):
    programs = []

    def kept(function, *args, work):
        programs.append(str(jax.make_jaxpr(function)(*args)))
        return [work]

    monkeypatch.setattr(speed, "rate", kept)
    assert doctor._rates() == {"float32": 2.1, "bfloat16": 2.1}
    exact, rounded = programs
    assert "bf16" not in exact and "preferred_element_type=float32" in exact
    # The factors are rounded by the kernel, or before XLA's product; sums stay in float32.
    by_kernel = "rlhf_matmul" in rounded
    assert by_kernel or ("bf16[1024,1024]" in rounded and "preferred_element_type=float32" in rounded)
