"""A run in an environment that is made of artifacts alone: real episodes of `guess` by a policy that is a script."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.flows.recipe.model import Recipe
from rlhf.stages.sampling.environment import ENVIRONMENT
from rlhf.stages.sampling.episode_tables import summary, task_of
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.agents.environments import guess
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.agents.trajectory import Ended, Episode, Turn, completion_rows, trajectory_row, turn_rows
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.rows import CompletionRow, FateRow, PromptRow, ScoreRow, VerdictRow, write_table
from tests.flows.report.support import Maker

TURNS, SAMPLES, HIGH = 3, 4, 7
FAILED = (1, 3)
"""Place and sample of the episode of each round that its environment fails after a turn."""
POLICY = "0" * 64
TOKENIZER = byte_tokenizer()
WORDS = Renderer(TOKENIZER, [], None, "hermes")
SAID = "<b>Ω</b> "
"""Before each guess: what a page must escape, and a character of two tokens."""
REASON = "crash of the environment: step 1 <script>x</script>"


def recipe_of(store: str, **more: Any) -> Recipe:
    """Two rounds of 7 tasks x 4 episodes, and an evaluation of each policy."""
    values = {"name": "guess", "store": store, "environment": {"name": "guess", "turns": TURNS, "max_tokens": 400}}
    values |= {"rl": {"rounds": 2, "rollout": {"prompts": HIGH, "completions": SAMPLES, "max_tokens": 20}}}
    values |= {"evaluate": {"samples": 2, "max_tokens": 20}}
    return Recipe.model_validate_json(json.dumps(values | more))


def tasks(split: str) -> list[PromptRow]:
    """Seven tasks, one for each hidden number."""
    shift = {"prompts": 0, "heldout": 700}[split]
    return [
        PromptRow(id=name, prompt_ids=[1, 2], prompt=f"guess {seed}", metadata=f'{{"seed": {seed}}}', group=name)
        for seed, name in ((seed, f"{split}-{seed}") for seed in range(shift, shift + HIGH))
    ]


def play(place: int, sample: int, prompt: PromptRow, skill: float, fails: bool = False) -> Ended:
    """One episode of a policy that halves the interval with probability `skill`, and else guesses at random."""
    draw = random.Random(f"{prompt.id} {sample} {skill}")
    environment, low, high = guess.Guess(HIGH, TURNS), 1, HIGH
    task = task_of(prompt)
    said, info = environment.reset(seed=task.seed)
    conversation: list[Mapping[str, Any]] = list(WORDS.messages(said))
    context = WORDS.first(conversation)
    turns: list[Turn] = []
    length = 0
    for _ in range(TURNS):
        number = (low + high) // 2 if draw.random() < skill else draw.randint(1, HIGH)
        text = f"{SAID}{number}"
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        turn = Turn(length, ids, [-0.25 * (1 + i % 3) for i in range(len(ids))], text, "eos", state=info["state"])
        turns.append(turn)
        conversation.append({"role": "assistant", "content": text})
        if fails:
            return Ended(
                Episode(place, sample, prompt.id, task), context, turns, "failed", REASON, 2, conversation, 0.1
            )
        said, turn.reward, turn.terminated, turn.truncated, info = environment.step(text)
        turn.observation = list(WORDS.messages(said))
        turn.action, turn.valid, turn.success = info["action"], info["valid"], info["success"]
        turn.calls = [{"name": "look", "arguments": {"at": number}, "result": said, "failed": False}]
        conversation += turn.observation
        if turn.terminated:
            break
        low, high = (number + 1, high) if said == "higher" else (low, number - 1)
        turn.observation_ids = WORDS.suffix(turn.observation, ended=True)
        length += len(ids) + len(turn.observation_ids)
    return Ended(Episode(place, sample, prompt.id, task), context, turns, "done", None, 1, conversation, 0.1)


def named(episode: TrajectoryRow) -> dict[str, Any]:
    """What names a row of an episode in each table."""
    return {"place": episode.place, "sample": episode.sample, "prompt_id": episode.prompt_id}


def write_played(out: Path, played: Sequence[Ended], prompts: Sequence[PromptRow]) -> list[TrajectoryRow]:
    """The three tables of episodes; returns their rows."""
    rows = [row for e in played for row in completion_rows(e, prompts[e.episode.place], POLICY, 1, 1.0)]
    episodes = [trajectory_row(e) for e in played]
    write_table(out / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
    write_table(out / "trajectories" / "part-00000.parquet", episodes, TrajectoryRow.schema())
    turns = [row for e in played for row in turn_rows(e, POLICY)]
    write_table(out / "turns" / "part-00000.parquet", turns, TurnRow.schema())
    return episodes


class PlayedMaker(Maker):
    """Makes what a run of `recipe_of` leaves: the policy learns to halve the interval."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.episodes: dict[str, list[TrajectoryRow]] = {}

    def make_base(self, node, out):
        (out / "tokenizer").mkdir()
        TOKENIZER.backend_tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
        return {"parameters": 100}

    def make_prepare(self, node, out):
        for split in ("prompts", "heldout"):
            write_table(out / split / "part-00000.parquet", tasks(split), PromptRow.schema())
        return {}

    def make_export(self, node, out):
        return {}

    def make_rollout(self, node, out):
        prompts, skill = tasks("prompts"), 0.2 + 0.8 * node.config.round
        names = [(place, sample) for place in range(HIGH) for sample in range(SAMPLES)]
        played = [play(p, s, prompts[p], skill, (p, s) == FAILED) for p, s in names]
        episodes = self.episodes[node.name] = write_played(out, played, prompts)
        found = {"completions": len(played), "tokens": 900, "mean_length": 30.0, "truncated": 0.0}
        return summary(episodes) | found | {"tokens_per_second": 100.0, "refused_prompts": 0}

    def make_score(self, node, out):
        rows = [
            ScoreRow(
                **named(e),
                rewards={ENVIRONMENT: e.reward},
                total=e.reward,
                failure=None if e.reward is not None else f"{ENVIRONMENT}: {e.status}: {e.reason}",
            )
            for e in self.episodes[node.name.replace("score", "rollout")]
        ]
        write_table(out / "scores" / "part-00000.parquet", rows, ScoreRow.schema([ENVIRONMENT]))
        known = [row.total for row in rows if row.total is not None]
        return {"reward": sum(known) / len(known), f"reward_{ENVIRONMENT}": sum(known) / len(known), "failed": 0.03}

    def make_update(self, node, out):
        rows = [
            FateRow(
                **named(e),
                fate="trained" if e.reward is not None else "failed",
                reason=None if e.reward is not None else "its episode failed",
                advantage=None if e.reward is None else e.reward - 0.5,
            )
            for e in self.episodes[re.sub("update", "rollout", node.name)]
        ]
        write_table(out / "fates" / "part-00000.parquet", rows, FateRow.schema())
        return super().make_update(node, out)

    def make_evaluate(self, node, out):
        prompts, skill = tasks("heldout"), {"base": 0.0, "sft": 0.1, "rl": 1.0}[node.name.split(".")[1]]
        played = [play(p, s, prompts[p], skill) for p in range(HIGH) for s in range(2)]
        episodes = write_played(out, played, prompts)
        verdicts = [
            VerdictRow(
                **named(e),
                group=e.prompt_id,
                judge=ENVIRONMENT,
                answer=None,
                score=float(bool(e.success)),
                failure=None,
            )
            for e in episodes
        ]
        write_table(out / "verdicts" / "part-00000.parquet", verdicts, VerdictRow.schema())
        mean = sum(bool(e.success) for e in episodes) / len(episodes)
        found = {"score": mean, "score_low": max(0.0, mean - 0.1), "score_high": min(1.0, mean + 0.1), "samples": 2}
        found |= {"problems": HIGH, "mean_length": 30.0, "truncated": 0.0, "judge_failures": 0, "pass_at_1": mean}
        levels = vars(guess.levels([task_of(p) for p in prompts], turns=TURNS))
        return found | summary(episodes) | {"levels": levels}


def made_run(tmp: Path, name: str = "guess-wise-owl") -> tuple[Store, dict[str, Any]]:
    """A store with such a run, and its record."""
    store = Store(str(tmp / "store"))
    return store, PlayedMaker(store, recipe_of(store.url), tmp, name).run()
