"""The oracle finds what it is there for: each of these changes of the product, on a copy of it, makes its test fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.support import JOURNAL, ROOT, Mutation, mutated

pytestmark = pytest.mark.slow

# By name: file, what is replaced in it, by what, and the test that has to fail.
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "the first token of a completion is masked": (
        "tuning/training/batch.py",
        "mask[slot, within] = 1 if member.masks is None else member.masks[arm - 1]",
        "mask[slot, 1:m] = 1 if member.masks is None else member.masks[arm - 1][1:]",
        "test_fit.py::test_sft[tokens]",
    ),
    "every epoch has the same order": (
        "tuning/data/reading.py",
        "shuffle(seed=(seed + epoch) % 2**31)",
        "shuffle(seed=seed % 2**31)",
        "test_fit.py::test_sft[tokens]",
    ),
    "each micro-batch divides by its own tokens": (
        "tuning/training/step.py",
        "return [p.arrays() | sizes for p in packed]",
        'return [p.arrays() | sizes | {"n_tokens": np.float32(c.n_tokens)} for p, c in zip(packed, counts)]',
        "test_fit.py::test_sft[lora]",
    ),
    "the reward model is read one token early": (
        "tuning/training/batch.py",
        "last[slot], begins[slot] = first + m - 1 if m",
        "last[slot], begins[slot] = first + m - 2 if m",
        "test_fit.py::test_reward_model[None]",
    ),
    "the reference of a pair is that of its neighbour": (
        "stages/preference.py",
        "p.gather(known[examples].reshape(-1))",
        "p.gather(known[examples][:, ::-1].reshape(-1))",
        "test_fit.py::test_preference_on_pairs[dpo]",
    ),
    "the KL is added twice": (
        "tuning/algorithms/objective.py",
        "value = value + objective.kl_coef *",
        "value = value + 2 * objective.kl_coef *",
        "test_rl.py::test_every_algorithm[grpo]",
    ),
    "groups are prompts and not places": (
        "tuning/algorithms/round_data.py",
        "groups_N=np.asarray(numbers_of_groups(last))",
        "groups_N=np.asarray([int(row.prompt_id[1:]) for row in last])",
        "test_rl.py::test_every_algorithm[grpo]",
    ),
    "the journal of a reward knows prompts and not places": (
        *JOURNAL,
        "test_score.py::test_each_completion_has_its_own_score",
    ),
    "failed completions are in the baseline": (
        "tuning/algorithms/advantages.py",
        "jnp.ones(groups.shape, bool) if valid is None else",
        "jnp.ones(groups.shape, bool) if True else",
        "test_rl.py::test_every_algorithm[grpo]",
    ),
    "the sampler's weight is upside down": (
        "tuning/losses/importance.py",
        "weights = jnp.exp(clamp(jnp.broadcast_to(stat",
        "weights = jnp.exp(clamp(jnp.broadcast_to(-stat",
        "test_rl.py::test_every_algorithm[grpo]",
    ),
    "pi_old is at another temperature": (
        "tuning/algorithms/rounds.py",
        "logps = logps_program(self.model, self.settings.temperature, self.device.compute)",
        "logps = logps_program(self.model, 1.0, self.device.compute)",
        "test_rl.py::test_every_algorithm[rloo]",
    ),
    "the mean of the others includes oneself": (
        "tuning/algorithms/advantages.py",
        "advantages = deviation * n / jnp.maximum(n - 1, 1)",
        "advantages = deviation",
        "test_rl.py::test_every_algorithm[rloo]",
    ),
    "lambda is left out of GAE": (
        "tuning/losses/returns.py",
        "m * (gamma * lam) + (1 - m)",
        "m * gamma + (1 - m)",
        "test_rl.py::test_every_algorithm[ppo]",
    ),
    "a turn that earned nothing is none": (
        "tuning/algorithms/turns.py",
        "number = self.number_NT[i, counts]",
        "number = np.cumsum(self.rewards_NU[i] != 0)[self.number_NT[i, counts]]",
        "test_turns.py::test_trajectories[ppo over turns]",
    ),
    "all of a place begin from its first context": (
        "tuning/algorithms/round_data.py",
        "of_prompt.setdefault(self.prompts[i].tobytes(), []).append(i)",
        'of_prompt.setdefault(b"", []).append(i)',
        "test_turns.py::test_trajectories[ppo over turns]",
    ),
    "the optimizer starts afresh in every round": (
        "stages/update/stage.py",
        "if states.continues(config, parent):\n        state =",
        "if False:\n        state =",
        "test_rl.py::test_two_rounds_with_what_they_pass_on[None]",
    ),
    "norms decay": (
        "tuning/training/optimizers.py",
        'for word in ("norm", "bias", "score"))',
        'for word in ("bias", "score"))',
        "test_rl.py::test_two_rounds_with_what_they_pass_on[None]",
    ),
}


def oracle(folder: Path, mutation: Mutation, test: str) -> subprocess.CompletedProcess[str]:
    """The test, run on a copy of the product in `folder` with the mutation."""
    env = mutated(folder, mutation)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "slow or not slow", f"tests/oracle/{test}"]
    # Programs that the mutation leaves as they are have been compiled.
    command += ["-o", f"cache_dir={ROOT / '.pytest_cache'}"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_is_found(name: str, tmp_path: Path) -> None:
    file, old, new, test = MUTATIONS[name]
    done = oracle(tmp_path, (file, old, new), test)
    # Failed by what it asserts, and not by an exception of the mutation.
    found = re.search(r"^E +(AssertionError|assert )", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and found, done.stdout[-2000:] + done.stderr[-500:]
