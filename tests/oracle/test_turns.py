"""Rounds of trajectories arrive where the oracle arrives: holes, rows apart, rewards of turns, states."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.episodes import Played
from tests.oracle.product import Product
from tests.oracle.rounds import check_episodes
from tests.oracle.support import COMMONLY

RUN = {"environment_weight": 0.7, "epochs": 2}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "ppo": {
        "algorithm": "ppo",
        "critic": {"gamma": 0.9, "lam": 0.8, "bootstrap_truncated": True, "optimizer": {"learning_rate": 0.01}},
    },
    "ppo over turns": {
        "algorithm": "ppo",
        "critic": {"gamma": 0.9, "lam": 0.8, "bi_level_gae": True, "pretrain_epochs": 1}
        | {"high_level_gamma": 0.7, "high_level_lam": 0.6},
    },
    "ppo over turns, cut off": {
        "algorithm": "ppo",
        "kl_in_reward": 0.0,
        "critic": {"bi_level_gae": True, "high_level_lam": 0.5, "bootstrap_truncated": True, "whiten_rewards": True},
    },
    "ppo by the trajectory": {"algorithm": "ppo", "credit": "trajectory", "critic": {"gamma": 0.9}},
    "reinforce-pp": {"algorithm": "reinforce-pp", "credit": "turn"},
    "gigpo": {"algorithm": "gigpo", "step_gamma": 0.8, "kl_coef": 0.0},
    "gigpo by deviations": {"algorithm": "gigpo", "normalisation": "std", "step_advantage_w": 0.4, "kl_coef": 0.1},
    "gspo": {"algorithm": "gspo"},
    "gmpo of the most varied": {"algorithm": "gmpo", "keep_most_varied": 0.5},
    "rloo": {"algorithm": "rloo", "correction": "sequence"},
    "whitening of the most varied": {
        "algorithm": "reinforce-pp-baseline",
        "keep_most_varied": 0.7,
        "truncated": "mask",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_trajectories(case: str, product: Product) -> None:
    now = check_episodes(case, product, RUN | CASES[case], played())
    assert "failed" in {c.fate for c in now.completions} and sum(c.fate == "trained" for c in now.completions) > 3


def played() -> list[Played]:
    """A round with everything that befalls trajectories."""
    return [
        # Of a turn without a reward; in rows apart; of one turn.
        Played(0, 0, 0, [(3, 0.0, "a"), (1, 0.5, "b"), (2, 0.5, "c")], 1.0),
        Played(0, 0, 1, [(2, 0.2, "a"), (2, 0.0, "c"), (1, 0.1, None)], 0.4, apart=True),
        Played(0, 0, 2, [(4, 0.0, "a")], 0.0),
        # First contexts of their own; cut off; failed; the environment's reward counts for a part of the total alone.
        Played(1, 1, 0, [(2, 0.1, "d"), (3, -0.3, "d")], 0.3, stop="length"),
        Played(2, 1, 1, [(1, 0.0, "d"), (2, 0.9, "e")], 0.1, apart=True),
        Played(3, 1, 2, [(2, None, "d")], 0.8, stop="failed"),
        Played(3, 1, 3, [(2, 1.0, "e"), (1, None, "d")], 0.9),
        # A group that ties on the whole, not by when it earned.
        Played(2, 2, 0, [(2, 1.0, "f"), (2, 0.0, "g")], 0.7),
        Played(2, 2, 1, [(1, 0.0, "f"), (2, 1.0, "g")], 0.7, stop="length", apart=True),
        # Ties in every way.
        Played(1, 3, 0, [(2, 0.5, "h")], 0.35),
        Played(1, 3, 1, [(3, 0.5, "h")], 0.35),
    ]


@st.composite
def rounds(draw: st.DrawFn) -> list[Played]:
    """Up to four places of up to three trajectories: any contexts, rows and ends."""
    found = []
    reward = st.sampled_from([None, 0.0, 0.5, 1.0])
    turn = st.tuples(st.integers(1, 4), reward, st.sampled_from([None, "a", "b"]))
    for place in range(draw(st.integers(1, 4))):
        for sample in range(draw(st.integers(1, 3))):
            turns = draw(st.lists(turn, min_size=1, max_size=4))
            total, stop = (
                draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
                draw(st.sampled_from(["eos", "length", "failed"])),
            )
            prompt, apart = draw(st.integers(0, 1)), draw(st.booleans())
            found.append(Played(prompt, place, sample, turns, total, stop, apart))
    # GiGPO refuses a round in which no state is told.
    return [*found, Played(0, 9, 0, [(1, 0.0, "a")], 0.0)]


RECIPES = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from(["grpo", "ppo", "gigpo", "reinforce-pp"]),
        "truncated": st.sampled_from(["keep", "mask"]),
        "keep_most_varied": st.sampled_from([None, 0.5]),
        "environment_weight": st.sampled_from([0.0, 0.3, 1.0]),
        "kl_coef": st.sampled_from([0.0, 0.1]),
        "prompts_per_step": st.sampled_from([2, 8]),
    }
)


@pytest.mark.slow
@settings(max_examples=25, **COMMONLY)
@given(recipe=RECIPES, drawn=rounds())
def test_any_trajectories(product: Product, recipe: dict[str, Any], drawn: list[Played]) -> None:
    if recipe["algorithm"] == "ppo":
        recipe = recipe | {"critic": {"bi_level_gae": drawn[0].apart, "gamma": 0.9, "bootstrap_truncated": False}}
    check_episodes(f"{recipe}", product, recipe, drawn)
