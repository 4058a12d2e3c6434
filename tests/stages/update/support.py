"""Updates by themselves: a store with a model, made-up rollouts, and what a worker keeps between rounds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Store
from rlhf.stages.update import stage as update
from rlhf.stages.worker.process import name_new
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.config import tiny
from rlhf.tuning.rows import CompletionRow

CONFIG = tiny(61)
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Rounds:
    """A store with a base and a reward model, and what runs updates in it."""

    def __init__(self, folder, model=CONFIG):
        self.folder, self.store, self.model = folder, Store(str(folder / "store")), model
        params = jax.tree.map(lambda x: 3 * x if x.ndim > 2 else x, huggingface.random_params(model, 3))
        made = self.scratch("base")
        huggingface.save_decoder(made / "model", model, params, IDS)
        self.base = self.commit("base", made, {}, {})
        score = jax.random.normal(jax.random.key(0), (model.hidden_size,), jnp.float32)
        made = self.scratch("reward")
        huggingface.save_decoder(made / "model", model, huggingface.scalar_head_params(model, params, score), IDS)
        self.reward = self.commit("reward", made, {}, {})
        self.count = 0

    def scratch(self, name):
        path = self.folder / "scratch" / name
        path.mkdir(parents=True)
        return path

    def commit(self, stage, folder, config, inputs):
        refs = {name: {"stage": a.stage, "key": a.key, "digest": a.digest} for name, a in inputs.items()}
        manifest = {"stage": stage, "key": folder.name, "config": config, "inputs": refs, "seed": 5}
        about = {"device": "cpu", "versions": {"jax": jax.__version__}, "metrics": {}}
        return self.store.commit(folder, manifest | about)

    def tables(self, policy, number, logprobs=lambda prompt, tokens: [-4.0] * len(tokens), dtype="auto"):
        """Made-up rollouts of a round and their scores."""
        rng = np.random.default_rng(number)
        rollouts, scores = [], []
        for prompt in range(4):
            prompt_ids = rng.integers(3, 61, 5).tolist()
            for sample in range(3):
                tokens = [*rng.integers(3, 61, rng.integers(2, 6)).tolist(), 2]
                row = dict.fromkeys(CompletionRow.schema().names) | {
                    "place": prompt,
                    "prompt_id": str(prompt),
                    "sample": sample,
                    "seed": 0,
                }
                row |= {"prompt_ids": prompt_ids, "token_ids": tokens, "logprobs": logprobs(prompt_ids, tokens)}
                rollouts.append(row | {"policy": policy.digest})
                scores.append(
                    {"place": prompt, "prompt_id": str(prompt), "sample": sample, "total": float(sample == prompt % 3)}
                )
        found, config = {}, {"compute": {"dtype": dtype}}
        for name, stage, rows in (("rollouts", "rollout", rollouts), ("scores", "score", scores)):
            made = self.scratch(f"{name}-{policy.key}-{number}-{dtype}")
            (made / name).mkdir()
            pq.write_table(pa.Table.from_pylist(rows), made / name / "a.parquet")
            found[name] = self.commit(stage, made, config, {"policy": policy})
        return found

    def context(self, config, inputs, memory):
        self.count += 1
        out, work = self.scratch(f"update-{self.count}"), self.scratch(f"work-{self.count}")
        silent = {"progress": lambda *a, **k: None, "memory": memory}
        self.log: list[str] = []
        return Context(config=config, inputs=inputs, out=out, work=work, seed=5, log=self.log.append, **silent)

    def inputs(self, config, policy):
        more = {"reward": self.reward} if config.algorithm == "ppo" else {}
        tables = self.tables(policy, config.round)
        return tables | more | {"policy": policy, "tokenizer": self.base, "reference": self.base}

    def run(self, config, inputs, memory, ctx=None):
        """Runs one update; what it made, its metrics and its dense policy."""
        ctx = ctx or self.context(config, inputs, memory)
        metrics = update.run(ctx)
        # As the worker does: its logs are written to their end.
        ctx.close()
        _, params = memory["decoder:new"]
        made = self.commit("update", ctx.out, config.model_dump(mode="json"), inputs)
        name_new(memory, made.digest)
        return made, metrics, params


def settings(number, lora, **more):
    values = {"round": number, "prompts_per_step": 2, "max_mismatch_kl": 1e6, "lora": lora, "kl_coef": 0.05}
    return update.Config.model_validate_json(json.dumps(values | {"optimizer": {"learning_rate": 0.02}} | more))


def policy_of(artifact):
    return json.loads(artifact.local("policy.json").read_text())["fingerprint"]
