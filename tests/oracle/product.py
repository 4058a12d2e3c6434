"""Runs stages of the product on tables that a test has made up, in this process and in float64.

Nothing here computes: the second implementation is in `plain`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.stages.common.models import load_policy, load_scorer
from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.data.flat import write_arrays
from rlhf.tuning.data.pipeline import SCHEMAS
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.config import tiny
from rlhf.tuning.rows import CompletionRow, ScoreRow, write_arrow, write_table

VOCABULARY, EOS = 61, 2
MODEL = dataclasses.replace(
    tiny(VOCABULARY), hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8
)
IDS = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
DTYPE = "float64"
SEED = 5


class Product:
    """A store with a policy, another one for a reference or a teacher, and a reward model."""

    def __init__(self, folder: Path):
        self.folder, self.store = folder, Store(str(folder / "store"))
        self.memory: dict[str, Any] = {}
        self.count = 0
        self.base = self._model(1)
        self.other = self._model(2)
        self.reward = self._model(3, score=True)

    def _model(self, seed: int, score: bool = False) -> Artifact:
        # Larger weights than at random: distributions are not flat, so that every token has another gradient.
        params = jax.tree.map(lambda x: 8 * x if x.ndim > 2 else 3 * x, huggingface.random_params(MODEL, seed))
        if score:
            head = jax.random.normal(jax.random.key(seed), (MODEL.hidden_size,), jnp.float32)
            params = huggingface.scalar_head_params(MODEL, params, head)
        made = self.scratch("model")
        huggingface.save_decoder(made / "model", MODEL, params, IDS)
        return self.commit("reward" if score else "base", made)

    def scratch(self, name: str) -> Path:
        """A new folder."""
        self.count += 1
        path = self.folder / "scratch" / f"{name}-{self.count}"
        path.mkdir(parents=True)
        return path

    def commit(
        self,
        stage: str,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Artifact] | None = None,
        seed: int = SEED,
    ) -> Artifact:
        """The folder as an artifact."""
        refs = {name: {"stage": a.stage, "key": a.key, "digest": a.digest} for name, a in (inputs or {}).items()}
        manifest = {"stage": stage, "key": folder.name, "config": config or {}, "inputs": refs, "seed": seed}
        about = {"device": "cpu", "versions": {"jax": jax.__version__}, "metrics": {}}
        return self.store.commit(folder, manifest | about)

    def rollouts(
        self, rows: Sequence[CompletionRow], turns: Sequence[TurnRow] = (), stage: str = "rollout"
    ) -> Artifact:
        """A rollout table, and of episodes that of their turns; `stage` has made it."""
        made = self.scratch("rollouts")
        if turns:
            write_table(made / "turns" / "part-00000.parquet", turns, TurnRow.schema())
        write_table(made / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
        return self.commit(stage, made)

    def scores(self, rows: Sequence[ScoreRow]) -> Artifact:
        """A score table."""
        made = self.scratch("scores")
        names = sorted(rows[0].rewards) if rows else []
        write_table(made / "scores" / "part-00000.parquet", rows, ScoreRow.schema(names))
        return self.commit("score", made)

    def data(self, **tables: Sequence[Mapping[str, Any]]) -> Artifact:
        """Prepared data: a table of each name."""
        import pyarrow as pa

        made = self.scratch("data")
        for name, rows in tables.items():
            table = pa.Table.from_pylist(list(rows), pa.schema(list(SCHEMAS[name].items())))
            write_arrow(made / name / "part-00000.parquet", table)
            write_arrays(made / name)
        return self.commit("prepare", made)

    def run(
        self,
        module: Any,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        seed: int = SEED,
        work: Path | None = None,
    ) -> tuple[Artifact, dict[str, Any], dict[str, Any]]:
        """Runs a stage: what it made, its metrics, and its settings with every default filled in.

        `work` is the folder of an earlier try, from which it goes on.
        """
        settings = module.Config.model_validate_json(json.dumps(config))
        ctx = Context(
            config=settings, inputs=dict(inputs), out=self.scratch("out"), work=work or self.scratch("work"),
            seed=seed, progress=lambda *a, **k: None, log=lambda line: None, memory=self.memory,
        )  # fmt: skip
        metrics = module.run(ctx)
        ctx.close()
        # Later stages read what is stored, not what the worker has kept.
        self.memory.clear()
        content = settings.model_dump(mode="json")
        return self.commit(module.STAGE.name, ctx.out, content, inputs, seed), metrics, content

    def weights(self, made: Artifact) -> Path:
        """The folder of the weights of an artifact, as later stages have them: merged where it has an adapter alone."""
        if made.has("model/"):
            return made.local("model/")
        folder = self.scratch("merged")
        none = {"progress": lambda *a, **k: None, "log": lambda line: None}
        ctx = Context(config=None, inputs={}, out=folder, work=folder, seed=0, memory={}, **none)
        load = load_scorer if made.stage == "reward" else load_policy
        huggingface.save_decoder(folder, *load(ctx, made), IDS)
        return folder

    def adapter(self, settings: Mapping[str, Any], base: Artifact, role: Any, seed: int = SEED) -> Path:
        """A PEFT folder with the adapter that a stage of these settings begins with.

        Its first factor is drawn, so it is an input of the oracle, like the samples of a rollout.
        """
        from rlhf.stages.common.settings import Lora
        from rlhf.stages.training.adapters import lora_config
        from rlhf.tuning.models.lora import tune
        from rlhf.tuning.models.peft import save_adapter

        lora = lora_config(Lora.model_validate(settings))
        load = huggingface.load_decoder if base.stage == "base" else huggingface.load_scalar_head
        config, params = load(base.local("model/"))
        if role == "scalar" and base.stage == "base":
            params = huggingface.scalar_head_params(config, params)
        folder = self.scratch("adapter")
        save_adapter(folder, tune(config, role, params, lora, seed=seed)[0], lora)
        return folder
