"""The bytes of a step on this process's devices by its own program, and as `tuning.fit` has them."""

import json
import sys

import jax

from tests.tuning.fit.steps import asked, measured
from tuning.fit.machines import machine
from tuning.fit.needs import peak

step = asked(*sys.argv[1:], jax.device_count())
on = machine("cpu")
needs = step.needs(on)
print(json.dumps({"measured": measured(step), "found": (needs.held - needs.within, peak(needs, on))}))
