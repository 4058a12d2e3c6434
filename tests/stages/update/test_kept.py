"""A round is trained once: the next one, and the rollouts between, find the policy where the update left it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from rlhf.stages.common.models import load_policy
from rlhf.stages.update import stage as update
from tests.stages.update.support import Rounds, settings
from tests.support import with_devices

pytestmark = pytest.mark.slow


def advanced(rounds, count, **more):
    """Policies of rounds in a worker, with what sampling and scoring load between them."""
    memory, policy, made = {}, rounds.base, []
    for number in range(count):
        config = settings(number, None, **more)
        inputs = rounds.inputs(config, policy)
        load_policy(rounds.context(config, inputs, memory), policy)
        load_policy(rounds.context(config, inputs, memory), rounds.base)
        policy, metrics, _ = rounds.run(config, inputs, memory)
        made.append(metrics["steps"])
    return made


def test_six_rounds_are_trained_six_times_however_little_is_kept(tmp_path, monkeypatch):
    calls, advance = [], update._advance

    def counted(ctx, *rest, **named):
        calls.append(ctx.config.round)
        return advance(ctx, *rest, **named)

    monkeypatch.setattr(update, "_advance", counted)
    monkeypatch.setattr("rlhf.tuning.device.memory_bytes", lambda: 1)
    assert all(advanced(Rounds(tmp_path), 6)) and calls == list(range(6))


def program(folder, devices, *words):
    environment = with_devices(devices)
    command = [sys.executable, "-m", "tests.stages.update.devices_program", str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folders = {devices: tmp_path_factory.mktemp(f"on-{devices}") for devices in (1, 8)}
    return {devices: (folder, program(folder, devices)) for devices, folder in folders.items()}


EIGHTH = 1 / 8 + 0.02


@pytest.mark.parametrize("stage", ["sft", "grpo", "ppo"])
def test_eight_devices_hold_an_eighth_each_when_weights_are_loaded_and_from_the_first_step_on(found, stage):
    _, eight = found[8]
    shares = eight[stage]["shares"]
    assert shares.keys() >= {"loaded", "trained", "at work"}
    assert all(share <= EIGHTH for share in shares.values()), shares


def test_a_stored_state_is_restored_to_its_shards(found):
    _, eight = found[8]
    for stage in ("grpo", "ppo"):
        assert eight[stage]["restored"] <= EIGHTH and eight[stage]["same"]


@pytest.mark.parametrize("devices", [4, 1])
def test_a_state_that_eight_devices_stored_is_gone_on_with_on_fewer(found, devices):
    folder, _ = found[8]
    for stage, there in program(folder, devices, "again").items():
        assert there["same"] and there["steps"] > 0, stage
        assert all(share <= 1 / devices + 0.02 for share in there["shares"].values()), there


def test_a_device_has_its_own_share_of_what_is_kept(found):
    _, eight = found[8]
    assert eight["kept"] == {"within an eighth": True, "within less": False}


@pytest.mark.parametrize("stage", ["sft", "grpo", "ppo"])
def test_losses_and_parameters_are_those_of_one_device(found, stage):
    (one, single), (eight, several) = found[1], found[8]
    assert several[stage]["losses"] == pytest.approx(single[stage]["losses"], abs=1e-6)
    mine, theirs = (np.load(folder / f"{stage}.npz") for folder in (one, eight))
    assert mine.files == theirs.files and len(mine.files) > 10
    for name in mine.files:
        np.testing.assert_allclose(theirs[name], mine[name], atol=1e-6, err_msg=name)
