"""Whether a contender did what all of them claim to do; run before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from contenders import Transitions
from setting import Setting


class WrongData(AssertionError):
    """A contender's data is not what the env and the network give; its speed would mean nothing."""


def check(name: str, data: Transitions, setting: Setting, by_network: bool = True) -> None:
    """Raise WrongData unless actions are the network's, episodes hang together, and every step is a real one."""
    lead = (setting.steps_per_batch, setting.num_envs)
    for field, array in vars(data).items():
        require(array.shape[:2] == lead, name, setting, f"{field} has shape {array.shape}, expected {lead} first")
    if by_network:
        _check_actions(name, data, setting)
    done = data.terminated | data.truncated
    going_on = ~done[:-1]
    unbroken = np.array_equal(data.next_obs[:-1][going_on], data.obs[1:][going_on])
    require(unbroken, name, setting, "an observation differs from the step before, which did not end an episode")
    same = (data.next_obs[:-1] == data.obs[1:]).reshape(*done[:-1].shape, -1).all(-1)
    stuck = same & done[:-1]
    require(not stuck.any(), name, setting, "next_obs at an episode's end is the reset observation, not the last one")
    if setting.env_id in _STATE_SETTERS:
        _check_steps(name, data, setting)


def _check_actions(name: str, data: Transitions, setting: Setting) -> None:
    with torch.no_grad():
        outputs = setting.make_network()(torch.from_numpy(np.ascontiguousarray(data.obs))).numpy()
    if setting.discrete:
        chosen = np.take_along_axis(outputs, data.actions[..., None], -1)[..., 0]
        greedy = np.allclose(chosen, outputs.max(-1), atol=1e-5)  # near ties, rounding may decide
        require(greedy, name, setting, "an action is not the greedy one")
    else:
        same = np.allclose(data.actions, outputs, atol=1e-5)
        require(same, name, setting, "an action is not the network's output")


def _check_steps(name: str, data: Transitions, setting: Setting) -> None:
    """Put an env into each observation's state, step it, compare: wrong actions and filler steps come out here."""
    env = gymnasium.make(setting.env_id).unwrapped
    env.reset(seed=0)
    set_state = _STATE_SETTERS[setting.env_id]
    for t, index in np.ndindex(setting.steps_per_batch, setting.num_envs):
        set_state(env, data.obs[t, index])
        action = int(data.actions[t, index]) if setting.discrete else data.actions[t, index]
        next_obs, reward, terminated, _, _ = env.step(action)
        same = (
            np.allclose(next_obs, data.next_obs[t, index], atol=1e-3)
            and math.isclose(float(reward), float(data.rewards[t, index]), abs_tol=1e-3)
            and terminated == data.terminated[t, index]
        )
        stored = [getattr(data, field)[t, index] for field in ("obs", "actions", "next_obs", "rewards", "terminated")]
        expected = [next_obs, reward, terminated]
        problem = f"step {t} of env {index} is not what the env does in that state: {stored}, expected {expected}"
        require(same, name, setting, problem)
    env.close()


def _set_cartpole(env: Any, obs: np.ndarray) -> None:
    env.state = obs.astype(np.float64)
    env.steps_beyond_terminated = None


def _set_pendulum(env: Any, obs: np.ndarray) -> None:
    cos, sin, speed = obs.astype(np.float64)
    env.state = np.array([math.atan2(sin, cos), speed])


#: Envs whose state can be had from an observation.
_STATE_SETTERS: dict[str, Callable[[Any, np.ndarray], None]] = {
    "CartPole-v1": _set_cartpole,
    "Pendulum-v1": _set_pendulum,
}


def require(holds: Any, name: str, setting: Setting, problem: str) -> None:
    if not holds:
        raise WrongData(f"{name} ({setting}): {problem}")
