"""Trains SFT, GRPO and PPO on the devices of this program and prints what each held; run by `test_kept`.

Everything is in float64. Usage: devices_program.py FOLDER [again]; with `again` it goes on with what a program on other
devices has left in the folder.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from rlhf.stages import sft
from rlhf.stages.common import models
from rlhf.stages.common.models import bytes_by_device, load_policy, remember
from rlhf.stages.store.artifacts import Store
from rlhf.stages.update import stage as update
from rlhf.stages.update.state import state_after
from rlhf.tuning import precision
from rlhf.tuning.device import memory_bytes
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.identity import fingerprint
from tests.stages.training.support import data
from tests.stages.training.support import settings as settings_of
from tests.stages.update.support import Rounds, settings

COMPUTE = {"dtype": "float64"}
# Every matrix can be cut by eight, and the norms, which are not, are less than a hundredth.
MODEL = dataclasses.replace(tiny(128), intermediate_size=256, num_heads=4, num_kv_heads=4)


def share(tree):
    """The part of a tree's bytes that the fullest device holds."""
    return max(bytes_by_device(tree).values()) / sum(x.nbytes for x in jax.tree.leaves(tree))


class Watch:
    """The most that a device has held at a report of progress, in parts of what the arrays have in all."""

    def __init__(self):
        self.most = 0.0

    def __call__(self, done, total, unit, **metrics):
        held = [x for x in jax.live_arrays() if not x.is_deleted()]
        self.most = max(self.most, share(held))


def dump(path, params):
    np.savez(path, **{jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)})


def supervised(folder):
    rng, rounds, memory = np.random.default_rng(0), Rounds(folder / "sft", MODEL), {}
    rows = [
        {"id": f"{i:03d}", "prompt": "p", "completion": "c", "completion_mask": None}
        | {"prompt_ids": rng.integers(3, 61, 5).tolist(), "completion_ids": [*rng.integers(3, 61, 6).tolist(), 2]}
        for i in range(24)
    ]
    inputs = {"base": rounds.base, "tokenizer": rounds.base, "data": data(folder / "rows", sft=rows)}
    ctx = rounds.context(settings_of(sft, compute=COMPUTE, epochs=2), inputs, memory)
    shares = {"loaded": share(load_policy(ctx, rounds.base)[1])}
    ctx.progress = watch = Watch()
    metrics = sft.run(ctx)
    ctx.close()
    _, params = memory["decoder:new"]
    dump(folder / "sft.npz", params)
    lines = [json.loads(line) for line in (ctx.out / "logs" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines] + [metrics.get("grad_norm", 0.0)]
    return {"losses": losses, "shares": shares | {"trained": share(params), "at work": watch.most}}


def reinforced(folder, algorithm):
    rounds, memory, policy, losses, shares = Rounds(folder / algorithm, MODEL), {}, None, [], {}
    policy, watch = rounds.base, Watch()
    make = rounds.context

    def watched(*given):
        ctx = make(*given)
        ctx.progress = watch
        return ctx

    rounds.context = watched
    for number in range(2):
        config = settings(number, None, algorithm=algorithm, compute=COMPUTE, store_state=True)
        inputs = rounds.inputs(config, policy)
        loaded = load_policy(make(config, inputs, memory), policy)[1]
        shares.setdefault("loaded", share(loaded))
        del loaded
        policy, metrics, params = rounds.run(config, inputs, memory)
        losses += [metrics["loss"], metrics["kl"], metrics["grad_norm"]]
        shares.setdefault("trained", share(memory[f"trainer:{policy.digest}"]))
    dump(folder / f"{algorithm}.npz", params)
    again = state_after(make(config, inputs, {}), policy, update._advance)
    restored = (again.params, *again.trainer)
    found = {"losses": losses, "shares": shares | {"at work": watch.most}, "restored": share(restored)}
    same = {"same": fingerprint(again.params) == fingerprint(params)}
    return found | same | {"policy": (policy.stage, policy.key, policy.digest), "fingerprint": fingerprint(params)}


def gone_on_with(folder, algorithm, policy, recorded):
    """The stored state of the last round on these devices, and a round after it."""
    rounds = Rounds(folder / f"on-{jax.device_count()}" / algorithm, MODEL)
    stored = Store(str(folder / algorithm / "store")).with_digest(*policy)
    config = settings(2, None, algorithm=algorithm, compute=COMPUTE)
    inputs = rounds.inputs(config, stored)
    loaded = state_after(rounds.context(config, inputs, {}), stored, update._advance)
    _, metrics, params = rounds.run(config, inputs, {})
    shares = {"restored": share((loaded.params, *loaded.trainer)), "trained": share(params)}
    return {"same": fingerprint(loaded.params) == recorded, "shares": shares, "steps": metrics["steps"]}


def kept(folder):
    """Whether two policies are kept where the share of a device has room for their parts, and where it has not."""
    rounds = Rounds(folder / "kept", MODEL)
    config = settings(0, None, compute=COMPUTE)
    _, params = load_policy(rounds.context(config, {}, {}), rounds.base)
    other = jax.tree.map(lambda x: x + 1, params)
    needed = max(bytes_by_device((params, other)).values())
    found = {}
    for name, room in (("within an eighth", needed), ("within less", needed - 1)):
        memory = {}
        ctx = rounds.context(config, {}, memory)
        models.MEMORY_SHARE = room / memory_bytes()
        remember(ctx, "decoder:a", params)
        remember(ctx, "decoder:b", other)
        found[name] = len(memory) == 2
    return found


def main():
    precision.use("float64")
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["again"]:
        before = json.loads((folder / "found.json").read_text())
        found = {n: gone_on_with(folder, n, before[n]["policy"], before[n]["fingerprint"]) for n in ("grpo", "ppo")}
        print(json.dumps(found))
        return
    found = {"sft": supervised(folder)} | {name: reinforced(folder, name) for name in ("grpo", "ppo")}
    found |= {"kept": kept(folder)}
    (folder / "found.json").write_text(json.dumps(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
