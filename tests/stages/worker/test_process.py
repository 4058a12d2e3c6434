"""What the worker's process does beside its stages."""

import os

from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.worker import process
from rlhf.stages.worker.process import smallest_model
from rlhf.stages.worker.protocol import Heartbeat, parse_event


def test_beats_end_in_silence_with_the_pipe_that_they_are_written_to(monkeypatch):
    """A run that ends closes it a moment before its worker has left: that is nothing for the log."""
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0.0)
    read, write = os.pipe()
    told, seen = [], []

    def compiling():
        if len(told) == 2:
            seen.extend(parse_event(line) for line in os.read(read, 10_000).splitlines())
            os.close(read)
        told.append(len(told) == 1)
        return told[-1]

    process.heartbeat(process.Events(os.fdopen(write, "w")), compiling)
    assert told == [False, True, False] and seen == [Heartbeat(False), Heartbeat(True)]


def test_the_room_that_a_model_needs_is_not_that_of_data_teachers_and_moments():
    def artifact(**sizes):
        files = [{"path": path.replace("_", "/", 1), "size": size} for path, size in sizes.items()]
        return Artifact(None, {"files": files})

    base, teacher = artifact(model_weights=100, tokenizer_json=7), artifact(model_weights=5000)
    data, update = artifact(sft_part=10**12), artifact(state_trainer=900)
    assert smallest_model([data, teacher, base]) == 100
    assert smallest_model([data, update]) == 0
