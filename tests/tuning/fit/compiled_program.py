"""The bytes of a step on this process's devices by its own program, and as `rlhf.tuning.fit` has them."""

import json
import sys

import jax

from rlhf.tuning.fit.machines import machine
from rlhf.tuning.fit.needs import peak
from tests.tuning.fit.steps import asked, measured

step = asked(*sys.argv[1:], jax.device_count())
on = machine("cpu")
needs = step.needs(on)
print(json.dumps({"measured": measured(step), "found": (needs.held - needs.within, peak(needs, on))}))
