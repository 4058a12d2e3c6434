"""Reads a store from Python: runs, metrics, samples and evaluations as pandas frames.

    import rlhf

    store = rlhf.open(".rlhf")          # or s3://bucket/path
    store.runs()                        # a row for each run
    run = store.run("demo")             # by name, or the newest of a recipe
    run.rounds()[["reward", "kl"]]      # a row for each round
    run.samples(0)                      # completions of a round with their rewards

Every method reads the store when it is called, and writes nothing. Files of a remote store are downloaded to
RLHF_SCRATCH, only those that a method needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.flows.records import UnknownRun, find_run, readable_runs, summary_of, sweeps
from rlhf.flows.report.measures import round_series
from rlhf.flows.report.run_view import RunView
from rlhf.stages.store.artifacts import Store

PAIR = ["place", "sample"]
"""Columns on which the tables of a round or an evaluation join."""


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as e:
        raise ImportError("rlhf.open returns pandas frames: pip install pandas") from e
    return pandas


class OpenStore:
    """The runs and sweeps of a store (`rlhf.open`)."""

    def __init__(self, url: str):
        self._store = Store(url)
        if not self._store.exists():
            raise FileNotFoundError(f"no store at {self._store.shown}: `rlhf run` creates one")

    def __repr__(self) -> str:
        return f"rlhf.open({self._store.shown!r})"

    def runs(self) -> Any:
        """Return a frame with a row for each run, oldest first; `scores.rl` is the held-out score after RL.

        >>> store.runs()[["recipe", "status", "scores.rl"]]  # doctest: +SKIP
        """
        pandas = _pandas()
        frame = pandas.json_normalize([summary_of(record, self._store) for record in readable_runs(self._store)])
        for column in {"started", "ended"} & set(frame.columns):
            frame[column] = pandas.to_datetime(frame[column], format="ISO8601")
        return frame.set_index("name") if len(frame) else frame

    def run(self, name: str | None = None) -> OpenRun:
        """Return the run of this name, or the newest of the recipe of this name; the newest of all without a name.

        Raises UnknownRun with the nearest name.

        >>> store.run("demo").scores()  # doctest: +SKIP
        """
        return OpenRun(self._store, find_run(self._store, name))

    def sweep(self, name: str | None = None) -> Any:
        """Return a frame with a row for each setting of a sweep: values, runs, score, difference from the first one.

        name: of the sweep, or of a recipe for its newest; None: the newest. Raises UnknownRun without one.

        >>> store.sweep()[["score", "difference.low", "difference.high"]]  # doctest: +SKIP
        """
        found = [sweep for sweep in sweeps(self._store) if name in (None, sweep["name"], sweep["recipe"])]
        if not found:
            raise UnknownRun(f"no sweep {name or ''} in {self._store.shown}; `rlhf sweep` makes one")
        return _pandas().json_normalize(found[-1]["settings"])


class OpenRun:
    """A run with its artifacts (`OpenStore.run`).

    record: the content of `run.json`. name: of the run.
    """

    def __init__(self, store: Store, record: dict[str, Any]):
        self.record, self.name = record, str(record["name"])
        self._view = RunView(store, record)

    def __repr__(self) -> str:
        return f"<run {self.name}: {self.record['status']}, {len(self.record['nodes'])} nodes>"

    def nodes(self) -> Any:
        """Return a frame with a row for each node: stage, state, seconds, metrics.

        >>> run.nodes()[["stage", "state", "seconds"]]  # doctest: +SKIP
        """
        return _pandas().DataFrame.from_dict(self.record["nodes"], orient="index")

    def path(self, node: str, part: str = "") -> Path:
        """Return the local path of a node's artifact, or of a file or folder in it (docs/reference/files.md).

        >>> (run.path("export") / "config.json").read_text()  # doctest: +SKIP
        """
        return self._view.stored(node).local(part)

    def table(self, node: str, part: str) -> Any:
        """Return the table in a folder of a node's artifact as a frame (docs/reference/tables.md).

        >>> run.table("prepare", "heldout/")  # doctest: +SKIP
        """
        import pyarrow.parquet as pq

        _pandas()
        return pq.read_table(self.path(node, part)).to_pandas()

    def steps(self, node: str) -> Any:
        """Return the metrics of each step of a stage that trains.

        >>> run.steps("sft").plot("step", "loss")  # doctest: +SKIP
        """
        return _pandas().read_json(self.path(node, "logs/metrics.jsonl"), lines=True)

    def rounds(self) -> Any:
        """Return the measures of each round of RL: reward, kl, entropy and others.

        >>> run.rounds()[["reward", "kl"]].plot(subplots=True)  # doctest: +SKIP
        """
        return _pandas().DataFrame(round_series(self.record)).set_index("round").dropna(axis=1, how="all")

    def samples(self, number: int) -> Any:
        """Return the completions of a round with their rewards; `total` is the weighted sum.

        >>> run.samples(0).sort_values("total")[["prompt", "text", "total"]]  # doctest: +SKIP
        """
        node = f"round-{number:03d}"
        scores = self.table(f"{node}.score", "scores/").drop(columns="prompt_id")
        return self.table(f"{node}.rollout", "rollouts/").merge(scores, on=PAIR)

    def scores(self) -> Any:
        """Return the metrics of each evaluated policy, a row each: score with its 95 % interval, pass@k, lengths.

        >>> run.scores()[["score", "score_low", "score_high"]]  # doctest: +SKIP
        """
        return _pandas().DataFrame.from_dict(self._view.evaluations(), orient="index")

    def answers(self, policy: str) -> Any:
        """Return the held-out completions of an evaluated policy (base, sft, rl) with the deciding judge's score.

        >>> run.answers("base").merge(run.answers("rl"), on=["place", "sample"])  # doctest: +SKIP
        """
        verdicts = self._view.verdicts(policy)
        rows = [(*pair, score) for pair, score in verdicts.items()]
        scores = _pandas().DataFrame(rows, columns=[*PAIR, "score"])
        return self.table(f"evaluate.{policy}", "rollouts/").merge(scores, on=PAIR)

    def episodes(self, node: str, part: str = "trajectories/") -> Any:
        """Return the episodes of a node in an environment, a row each; `part="turns/"`: their turns.

        >>> run.episodes("round-000.rollout")[["status", "reward", "turns"]]  # doctest: +SKIP
        """
        return self.table(node, part)

    def generate(
        self,
        prompts: Sequence[str],
        node: str = "export",
        *,
        system: str | None = None,
        temperature: float = 0.7,
        max_tokens: int = 128,
    ) -> list[str]:
        """Return the answer of a policy (export, sft, base, round-003.update) to each prompt.

        system: the system prompt; None: the recipe's. Each call loads the policy: ask all prompts at once.

        >>> run.generate(["21 + 7 = ?"], temperature=0)  # doctest: +SKIP
        """
        from rlhf.stages.serving.policy import answers
        from rlhf.stages.serving.settings import ChatOptions, PolicyPlace

        artifact, base = self._view.stored(node), self.record["nodes"]["base"]["key"]
        place = PolicyPlace(
            store=artifact.store.url, stage=artifact.stage, key=artifact.key, digest=artifact.digest, base=base
        )
        options = ChatOptions(temperature=temperature, max_tokens=max_tokens)
        if system is None:
            system = self.record["recipe"]["data"].get("system_prompt")
        return answers(place, prompts, options, system)
