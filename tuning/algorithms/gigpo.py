"""GiGPO (Feng et al., 2025, arXiv:2505.10978): trajectories against their group, and turns against those that began in
the same state. No critic.

    A_it = AE_i + step_advantage_w AS_iu                      t a token of turn u of trajectory i
    AE_i = R_i - mean of R over the turns of the group        of the episode: a trajectory weighs by its turns
    AS_iu = G_iu - mean(G) over the turns of the group's trajectories that were chosen in the state of turn u
    G_iu = sum_{v >= u} step_gamma^(v - u) r_iv               r_iv: reward of turn v (`credit`)

Equation 3 of the paper has the mean over trajectories, the authors' code that over turns
(`compute_mean_std_cross_steps`, on by default). With `normalisation: std` both advantages are divided by the spread of
the values that they are compared with. A state that no other turn of the group met has AS 0. Settings:
`settings.Objective`; presets: `registry` (gigpo).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.advantages import group_advantages
from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped
from rlhf.tuning.algorithms.turns import Turns
from rlhf.tuning.losses.groups import informative_groups
from rlhf.tuning.precision import real


def algorithm(objective: Objective) -> Algorithm:
    """GiGPO with PPO's clip. Raises ValueError for statistics over the round: a turn has its state's alone."""
    if objective.normalisation == "batch-std":
        raise ValueError("gigpo compares turns of one state: normalisation is std or none, not batch-std")

    def advantages(scored: Scored) -> jax.Array:
        of_turns_NT = objective.step_advantage_w * jnp.asarray(_of_turns(scored, objective))
        return _of_episodes(scored, objective)[:, None] + of_turns_NT

    def signal(scored: Scored) -> np.ndarray:
        # A group that ties on the whole may differ within: by when a trajectory earned its reward.
        taught_N = (np.asarray(advantages(scored)) * (scored.mask_NT > 0)).any(-1)
        return scored.valid_N & np.isin(scored.groups_N, scored.groups_N[taught_N])

    return Algorithm(advantages, clipped(objective), signal=signal)


def _of_episodes(scored: Scored, objective: Objective) -> jax.Array:
    """Advantages of the trajectories against the turns of their group, [N]."""
    turns_N = np.asarray([len(states) for states in _with_states(scored).states])
    # Each trajectory as often as it has turns.
    rows = np.repeat(np.arange(len(turns_N)), turns_N)
    found = group_advantages(
        scored.rewards_N[rows],
        scored.groups_N[rows],
        normalisation=objective.normalisation,
        valid=scored.valid_N[rows],
    )
    # A failed episode may have no turn.
    return jnp.zeros(len(turns_N), found.dtype).at[rows].set(found)


def _of_turns(scored: Scored, objective: Objective) -> np.ndarray:
    """Advantages of the turns on their tokens, [N, T], 0 elsewhere."""
    turns = _with_states(scored)
    ends_NT = turns.ends_NT(scored.mask_NT)
    rows, columns = np.nonzero(ends_NT)
    numbers = turns.number_NT[rows, columns]
    returns = _returns(scored, turns, objective.step_gamma)[rows, numbers]
    states = [(i, u, turns.states[i][u]) for i, u in zip(rows.tolist(), numbers.tolist(), strict=True)]
    # A turn without a state has nothing to compare with.
    names = [f"{scored.groups_N[i]} {f'{i} {u}' if state is None else f'state {state}'}" for i, u, state in states]
    groups = np.unique(names, return_inverse=True)[1]
    valid = informative_groups(returns, groups, scored.valid_N[rows])
    found = group_advantages(jnp.asarray(returns), groups, normalisation=objective.normalisation, valid=valid)
    of_turn_NU = np.zeros(turns.rewards_NU.shape, real())
    of_turn_NU[rows, numbers] = np.asarray(found)
    number_NT = np.maximum(turns.number_NT, 0)
    return np.where(scored.mask_NT > 0, np.take_along_axis(of_turn_NU, number_NT, axis=1), 0.0)


def _with_states(scored: Scored) -> Turns:
    """The turns. Raises ValueError if the rollouts have none, or none has a state."""
    turns = scored.turns
    if turns is None or not any(state is not None for own in turns.states for state in own):
        raise ValueError(
            "gigpo compares turns that were chosen in one state, and the rollouts have no "
            f"{'turns' if turns is None else 'states'}: sample them from an environment whose `info` holds `state`"
        )
    return turns


def _returns(scored: Scored, turns: Turns, gamma: float) -> np.ndarray:
    """Discounted sum of the rewards of each turn and the later ones, [N, U]."""
    rewards_NT = np.where(scored.mask_NT > 0, np.asarray(scored.rewards_NT), 0.0)
    earned_NU = np.zeros(turns.rewards_NU.shape, real())
    rows, columns = np.nonzero(turns.number_NT >= 0)
    np.add.at(earned_NU, (rows, turns.number_NT[rows, columns]), rewards_NT[rows, columns])
    for u in reversed(range(earned_NU.shape[1] - 1)):
        earned_NU[:, u] += gamma * earned_NU[:, u + 1]
    return earned_NU
