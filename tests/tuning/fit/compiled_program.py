"""What XLA says of a step on this process's devices, beside the prediction; run by `test_training`."""

import json
import sys

import jax

from tests.tuning.fit.steps import asked, measured
from tuning.fit.machines import Kind, Machine
from tuning.fit.training import training

model, kind, *options = sys.argv[1:]
step = asked(model, kind, jax.device_count(), *options)
machine = Machine("here", Kind("cpu", "cpu", 2**34, 1.0, 1e12, 1e10, 1e10), jax.device_count())
found = training(step, machine)
*memory, unread = measured(step)
print(json.dumps({"measured": memory, "unread": unread, "held": found.held, "temporary": found.temporary}))
