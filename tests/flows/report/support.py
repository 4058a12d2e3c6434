"""A run that is made of artifacts alone, with numbers that look like training, and a page taken apart."""

import datetime
import html.parser
import json
import re

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.model import Recipe
from rlhf.stages.common.tables import write_rows
from rlhf.stages.store.keys import digest
from rlhf.tuning.rows import CompletionRow, ScoreRow, VerdictRow

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\x00\x1b[31m \u202eevil"
BEGIN = datetime.datetime(2026, 3, 1, 9, 30, tzinfo=datetime.UTC)


def recipe_of(store, **more):
    exact, model = {"function": "exact_match"}, {"function": "reward_model", "weight": 0.2, "squash": "sigmoid"}
    sampling = {"prompts": 4, "completions": 4, "max_tokens": 8}
    values = {"name": "demo", "description": "Addition on a laptop.", "seed": 7, "store": store, "reward": {}}
    values["rl"] = {"rounds": 8, "rollout": sampling, "score": {"rewards": {"exact": exact, "model": model}}}
    values["evaluate"] = {"problems": 40, "samples": 4, "every": 3, "judges": {"digits": {"function": "matches"}}}
    values["evaluate"] |= {"load_best_model_at_end": True, "metric_for_best_model": "pass_at_4"}
    return Recipe.model_validate_json(json.dumps(values | more))


class Maker:
    """Makes the artifacts and the record that a run of a recipe leaves, with numbers that look like training."""

    def __init__(self, store, recipe, tmp, name):
        self.store, self.recipe, self.tmp, self.name = store, recipe, tmp, name
        self.clock = BEGIN
        self.record = {"name": name, "recipe": recipe.model_dump(mode="json"), "status": "finished", "host": "laptop"}
        self.record |= {"started": self.clock.isoformat(), "pid": 4321, "nodes": {}}
        self.seconds = {"base": 3.4, "prepare": 6.1, "sft": 41.0, "reward": 38.5, "rollout": 9.5, "score": 1.5}
        self.seconds |= {"update": 12.0, "evaluate": 8.0, "select": 0.1, "export": 2.2}

    def run(self, until=None, cached=(), error="StageFailed: RuntimeError: sampler and trainer disagree"):
        made = {}
        for node in build(self.recipe):
            if node.name == until:
                key = digest([node.name, self.recipe.seed])
                entry = {"stage": node.stage, "key": key, "started": self.clock.isoformat()}
                self.record["nodes"][node.name] = entry | {"state": "failed", "error": error}
                self.record["status"] = "failed"
                break
            made[node.name] = self.artifact(node, made)
            seconds = self.seconds[node.stage]
            hit = node.name in cached or node.stage in cached
            entry = {"stage": node.stage, "key": made[node.name].key, "started": self.clock.isoformat()}
            entry |= {"digest": made[node.name].digest, "metrics": made[node.name].metrics, "made_seconds": seconds}
            entry |= {"state": "hit" if hit else "made", "seconds": 0.02 if hit else seconds}
            self.record["nodes"][node.name] = entry
            self.clock += datetime.timedelta(seconds=0 if hit else seconds)
        self.record |= {"ended": self.clock.isoformat(), "worker_starts": 1}
        self.save()
        return self.record

    def save(self):
        self.store.write_json(self.record, "runs", self.name, "run.json")

    def artifact(self, node, made):
        out = self.tmp / f"out-{self.name}-{node.name}"
        out.mkdir(parents=True)
        (out / "content.json").write_text(json.dumps([node.name, self.recipe.seed]))
        metrics = getattr(self, f"make_{node.stage}")(node, out)
        sources = {"model.gguf": "a1b2c3d4e5f60718" * 4} if node.stage == "base" else {}
        code = {f"stages.{node.stage}": digest(node.stage)[:16], "rlhf.tuning.device": "0123456789abcdef"}
        parts = {"stage": node.stage, "code": code, "sources": sources, "seed": node.seed, "config": {}, "inputs": {}}
        read = {n: made[i.node] for n, i in node.inputs.items()}
        inputs = {n: {"stage": a.stage, "key": a.key, "digest": a.digest} for n, a in read.items()}
        manifest = {
            "stage": node.stage,
            "key": digest([node.name, self.recipe.seed]),
            "key_parts": parts,
            "inputs": inputs,
        }
        manifest |= {"config": node.config.model_dump(mode="json"), "seed": node.seed, "metrics": metrics}
        manifest |= {"versions": {"jax": "0.10.2", "numpy": "2.4.6"}, "python": "3.11.7", "host": "laptop"}
        manifest |= {"device": "cpu:cpu x1" if node.stage != "prepare" else "none", "run": self.name}
        manifest |= {"started": self.clock.isoformat(), "seconds": self.seconds[node.stage]}
        return self.store.commit(out, manifest)

    def make_base(self, node, out):
        return {"parameters": 134_500_000}

    make_prepare = make_export = make_base

    def log(self, out, lines):
        (out / "logs").mkdir()
        (out / "logs" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def make_sft(self, node, out):
        lines = [{"step": i, "loss": 0.3 + 2 / (1 + i), "grad_norm": 1.5 + 1 / (1 + i)} for i in range(24)]
        self.log(out, lines)
        return {"steps": 24, "loss": 0.383, "tokens_per_second": 812.4, "examples": 200}

    def make_reward(self, node, out):
        lines = [{"step": i, "loss": 0.69 - 0.02 * i, "accuracy": min(1.0, 0.5 + 0.03 * i)} for i in range(18)]
        self.log(out, lines)
        return {"steps": 18, "loss": 0.33, "heldout_accuracy": 0.94, "calibration_error": 0.041, "pairs": 360}

    def completion(self, prompt, sample, text, **more):
        a, b = 17 + prompt, 5 + sample
        row = {"place": prompt, "sample": sample, "prompt_id": f"p{prompt:03d}", "prompt": f"{a} + 5 = ?"}
        row |= {"answer": str(a + 5), "text": text, "metadata": "{}", "prompt_ids": [1, 2, 3], "token_ids": [4, b]}
        return row | {"logprobs": [-0.5, -0.1], "stop": "eos", "policy": "x", "seed": 1, "temperature": 1.0} | more

    def make_rollout(self, node, out):
        # The last place has the prompt of the first.
        last = {"prompt_id": "p000"}
        rows = [
            self.completion(p, s, str(22 + p + (s % 2)), **last if p == 3 else {}) for p in range(4) for s in range(4)
        ]
        rows[0]["text"] = HOSTILE
        write_rows(out / "rollouts" / "part-00000-of-00001.parquet", rows, CompletionRow.schema())
        n = node.config.round
        more = {"mean_length": 5.2 - 0.3 * n, "truncated": 0.3 / (1 + n), "tokens_per_second": 512.3 + 5 * n}
        return {"completions": 16, "tokens": 80} | more

    def make_score(self, node, out):
        names = sorted(node.config.rewards)
        rows = []
        for row in (self.completion(p, s, "") for p in range(4) for s in range(4)):
            right = float(row["sample"] % 2 == 0)
            rewards = {k: 0.7 if k == "model" else right for k in names}
            rows.append({"rewards": rewards, "total": right + 0.14 + row["place"] / 1000, "failure": None, **row})
        rows = [{k: row[k] for k in ScoreRow.schema(names).names} for row in rows]
        rows[5] |= {"total": None, "failure": "exact: TimeoutError: longer than 10 s"}
        write_rows(out / "scores" / "part-00000-of-00001.parquet", rows, ScoreRow.schema(names))
        n = int(re.findall(r"\d+", node.name)[0])
        exact, model = 0.31 + 0.07 * n, 0.5 + 0.03 * n
        found = {"completions": 16, "failed": 0.0, "reward": exact + 0.2 * model, "spread": 0.4}
        return found | {"zero_variance": 0.2 + 0.04 * n, "reward_exact": exact, "reward_model": model}

    def make_update(self, node, out):
        n = node.config.round
        found = {"kl": 0.004 * n**1.5, "entropy": 0.8 / (1 + 0.2 * n), "mismatch_kl": 2.1e-5 + 1e-6 * n}
        return found | {"clip_fraction": 0.01 + 0.002 * n, "grad_norm": 0.9, "steps": 4, "approx_kl": 0.001}

    def make_select(self, node, out):
        candidates = {"002": 0.2, "005": 0.7, "007": 0.6}
        return {"round": 5, "metric": "pass_at_4", "best": 0.7, "candidates": candidates}

    def make_evaluate(self, node, out):
        right = {"evaluate.base": 6, "evaluate.sft": 16, "evaluate.rl": 33}.get(node.name)
        if right is None:
            return {"score": 0.1 * int(node.name[6:9])}
        rows, verdicts = [], []
        for p in range(40):
            # Two problems are lost on the way: reports must not show gains only.
            good = p < right if node.name != "evaluate.rl" else 2 <= p < right + 2
            for s in range(4):
                text = str(22 + p) if good else f"{p + s} is the answer <b>!</b>"
                rows.append(self.completion(p, s, text, stop="eos" if good else "length"))
                place = {"place": p, "prompt_id": f"p{p:03d}", "sample": s, "group": f"g{p}"}
                verdicts.append(place | {"judge": "exact_match", "answer": text, "score": float(good), "failure": None})
        write_rows(out / "rollouts" / "part-00000-of-00001.parquet", rows, CompletionRow.schema())
        write_rows(out / "verdicts" / "part-00000.parquet", verdicts, VerdictRow.schema())
        mean = right / 40
        found = {"score": mean, "score_low": max(0.0, mean - 0.11), "score_high": min(1.0, mean + 0.11), "problems": 40}
        more = {"samples": 4, "pass_at_4": mean, "mean_length": 4.4, "truncated": 1 - mean, "judge_failures": 0}
        more |= {"pass_at_1": mean, "answered": 0.9, "judges": {"digits": {"score": 0.5}}}
        return found | more | {"constant_answer": "42", "constant_score": 0.075}


class Page(html.parser.HTMLParser):
    """What a test asks of a page: its elements, references and words."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.references, self.words, self.unnamed = [], [], [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.references += [v for k, v in attrs if k.split(":")[-1] in ("href", "src", "action", "data", "srcset")]
        if values.get("role") in ("img", "region") and not values.get("aria-label"):
            self.unnamed.append(tag)

    def handle_data(self, data):
        self.words.append(data)
