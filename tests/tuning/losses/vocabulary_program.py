"""Heads and lookups on meshes that cut the vocabulary, against one device; run by `test_vocabulary`, prints JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlhf.tuning.axes import Axes
from rlhf.tuning.losses.distillation_head import token_divergences
from rlhf.tuning.losses.head import token_logps
from rlhf.tuning.mesh import make_mesh, under
from rlhf.tuning.models.vocabulary import embedded
from rlhf.tuning.precision import use
from tests.aot.account import collectives

M, V, D, E = 24, 520, 12, 8
MESHES = {"tensor": Axes(1, 1, 4), "all": Axes(1, 2, 2, 2)}


def arrays():
    k = jax.random.split(jax.random.key(0), 4)
    shapes = ((M, D), (V, D), (M, E), (V, E))
    return [jax.random.normal(key, shape) for key, shape in zip(k, shapes, strict=True)]


def loss(hidden, table, teacher, of_teacher):
    """A weighted sum of all that reads the table: slices that repeat tokens, logits that are kept and that are not."""
    k = jax.random.split(jax.random.key(1), 2)
    targets, tokens = jax.random.randint(k[0], (M,), 0, V), jax.random.randint(k[1], (4, 6), 0, V)
    capped = token_logps(hidden, targets, table, temperature=0.7, softcap=2.0, elements=3 * 128, kept=0)
    plain = token_logps(hidden, targets, table)
    distilled = token_divergences(
        hidden, table, teacher, of_teacher, beta=0.3, temperature=1.7, softcaps=(2.0, None), chunk=5
    )
    looked_up = jnp.sin(embedded(table, tokens, jnp.float64)).sum(axis=(0, 2))
    weights = 1.0 + jnp.arange(M)
    total = sum((weights * x).sum() for x in (*capped, *plain, distilled)) + (jnp.arange(6) * looked_up).sum()
    return total, (capped, plain, distilled)


def main():
    use("float64")
    program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    wanted, found = program(*arrays()), {}
    for name, axes in MESHES.items():
        mesh = make_mesh(axes, jax.devices()[: axes.data * axes.fsdp * axes.tensor * axes.context])
        cut = [PartitionSpec(), PartitionSpec("tensor", "fsdp")] * 2
        given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(), cut, strict=True)]
        with under(mesh):
            compiled = program.lower(*given).compile()
        gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), compiled(*given), wanted)
        found[name] = {"gap": max(jax.tree.leaves(gaps)), "collectives": collectives(compiled.as_text())}
    print(json.dumps(found))


main()
