"""A store with small artifacts of the form that a run leaves: data, policies and their evaluations."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.stages.gate import stage
from rlhf.stages.gate.settings import Config
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.tuning.data.schema import ROWS
from rlhf.tuning.rows import CompletionRow, PromptRow, VerdictRow, write_table
from tests.stages.support import context

SETTINGS: dict[str, Any] = {"judge": "exact_match", "samples": 2, "judges": {"polite": {}}}


class Lab:
    """Makes artifacts in one store."""

    def __init__(self, folder: Path):
        self.folder, self.store = folder, Store(str(folder / "store"))

    def commit(
        self, stage: str, files: Mapping[str, str] = {}, inputs: Mapping[str, Artifact] = {}, **more: Any
    ) -> Artifact:
        """An artifact of files by path, and of `tables` by part, made from `inputs`."""
        folder = self.folder / uuid.uuid4().hex
        folder.mkdir()
        for part, rows in more.pop("tables", {}).items():
            kind = {"verdicts": VerdictRow, "rollouts": CompletionRow}.get(part) or ROWS[part]
            write_table(folder / part / "part-00000.parquet", rows, kind.schema())
        for name, text in files.items():
            (folder / name).write_text(text)
        refs = {name: {"stage": a.stage, "key": a.key, "digest": a.digest} for name, a in inputs.items()}
        parts = {"config": more.get("config", {}), "seed": 0, "inputs": {n: a.digest for n, a in inputs.items()}}
        parts["sources"] = more.pop("sources", {})
        manifest = {"stage": stage, "key": uuid.uuid4().hex * 2, "config": {}, "metrics": {}, "seed": 0, "seconds": 0.1}
        return self.store.commit(folder, manifest | {"inputs": refs, "key_parts": parts} | more)

    def data(self, heldout: int, trained: Iterable[str] = ("alpha", "beta")) -> Artifact:
        """Prepared data with prompts `q0`, `q1`, ... held out and others to train on."""
        tables = {"heldout": [prompt(f"q{i}", f"g{i}") for i in range(heldout)]}
        tables["prompts"] = [prompt(text, text) for text in trained]
        return self.commit("prepare", tables=tables)

    def policy(self, name: str, data: Artifact) -> Artifact:
        """A policy that was trained on the prompts of `data`."""
        return self.commit("rewarded", {"policy.json": name}, {"data": data})

    def evaluation(
        self,
        policy: Artifact,
        data: Artifact,
        scores: Sequence[Sequence[float | str | None]],
        polite: float | Sequence[Sequence[float | str | None]] = 1.0,
        lengths: Sequence[int] = (),
        config: Mapping[str, Any] = SETTINGS,
        sources: Mapping[str, str] = {},
        metadata: Sequence[str | None] = (),
        asked: Sequence[int] = (1,),
        **metrics: Any,
    ) -> Artifact:
        """The evaluation of a policy whose verdicts are `scores` by problem and sample; a text is why a judge failed.

        lengths: of the completions of each problem, 10 where it is left out; those above 50 are cut off. sources:
        digests of the user's code. metadata: of each problem, none where it is left out. asked: the tokens of
        each prompt.
        """
        given = [[polite] * 2] * len(scores) if isinstance(polite, float) else polite
        verdicts = [
            VerdictRow(
                place=place, sample=s, prompt_id=f"q{place}", group=f"g{place}", judge=judge, answer=None,
                score=None if isinstance(value, str) else value, failure=value if isinstance(value, str) else None,
            )
            for judge, table in ((config["judge"], scores), ("polite", given))
            for place, row in enumerate(table) for s, value in enumerate(row)
        ]  # fmt: skip
        completions = [
            CompletionRow(
                place=place, sample=s, prompt_id=f"q{place}", prompt_ids=list(asked), token_ids=[2] * length,
                prompt=f"q{place}", logprobs=[0.0] * length, stop="length" if length > 50 else "eos",
                metadata=metadata[place] if metadata else None,
            )
            for place, length in enumerate(lengths or [10] * len(scores)) for s in range(2)
        ]  # fmt: skip
        known = [value for row in scores for value in row if isinstance(value, float)]
        found = {"score": sum(known) / max(1, len(known)), "mean_length": 10.0, "truncated": 0.1}
        found |= {"judges": {"polite": {"score": polite}}} | metrics
        inputs = {"policy": policy, "data": data}
        tables = {"verdicts": verdicts, "rollouts": completions}
        more: dict[str, Any] = {"config": config, "sources": sources, "metrics": found}
        return self.commit("evaluate", {}, inputs, tables=tables, **more)

    def decide(
        self, candidate: Artifact, other: Artifact | None = None, **settings: Any
    ) -> tuple[dict[str, Any], Artifact]:
        """The decision about the policy of an evaluation, against that of another as the champion; and the policy."""
        against = None if other is None else "champion"
        config = Config.model_validate({"audit": False, "against": against} | settings)
        inputs = {"candidate": candidate} | {role: self.input(candidate, role) for role in ("policy", "data")}
        if other is not None:
            inputs |= {"against": other, "champion": self.input(other, "policy")}
        metrics = stage.run(context(config, self.folder / uuid.uuid4().hex, inputs=inputs))
        return metrics, inputs["policy"]

    def input(self, artifact: Artifact, role: str) -> Artifact:
        ref = artifact.manifest["inputs"][role]
        found = self.store.with_digest(ref["stage"], ref["key"], ref["digest"])
        assert found is not None
        return found


def prompt(text: str, group: str) -> PromptRow:
    return PromptRow(id=text, prompt_ids=[1], prompt=text, answer="4", group=group, content=f"content of {text}")
