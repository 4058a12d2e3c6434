"""The room that a stage asks for before it works."""

from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.worker.process import smallest_model


def test_the_room_that_a_model_needs_is_not_that_of_data_teachers_and_moments():
    def artifact(**sizes):
        files = [{"path": path.replace("_", "/", 1), "size": size} for path, size in sizes.items()]
        return Artifact(None, {"files": files})

    base, teacher = artifact(model_weights=100, tokenizer_json=7), artifact(model_weights=5000)
    data, update = artifact(sft_part=10**12), artifact(state_trainer=900)
    assert smallest_model([data, teacher, base]) == 100
    assert smallest_model([data, update]) == 0
