"""The ideal that efficiency η is measured against: nothing but env steps, network and one copy of each frame.

``X* = 1 / (s + c + f(b) / b)`` frames per second on one core, with s = one env step and its share of resets,
c = copying one frame, f(b) = one forward pass for the b envs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from setting import ENV_SEED, Setting

#: Long enough that resets have their usual share.
RECORDED_FRAMES = 5000


@dataclass(frozen=True)
class IdealParts:
    """Seconds of each part; ``forward_kind`` is the way to call the network that was fastest."""

    step_s: float
    copy_s: float
    forward_s: float
    forward_kind: str
    num_envs: int

    @property
    def fps(self) -> float:
        return 1 / (self.step_s + self.copy_s + self.forward_s / self.num_envs)


@dataclass(frozen=True)
class Recording:
    """What the network did in one env, from ``reset(seed=ENV_SEED)`` on."""

    actions: list[Any]
    obs: list[np.ndarray]
    rewards: list[Any]
    terminated: list[bool]
    truncated: list[bool]

    @property
    def num_ends(self) -> int:
        return sum(a or b for a, b in zip(self.terminated, self.truncated, strict=True))

    @property
    def mean_episode(self) -> float:
        return len(self.actions) / max(1, self.num_ends)


def record(setting: Setting) -> Recording:
    """One env run by the network; the actions, played again from the same seed, give the same episodes."""
    env, network = setting.make_env(), setting.make_network()
    recording = Recording([], [], [], [], [])
    obs, _ = env.reset(seed=ENV_SEED)
    with torch.no_grad():
        for _ in range(RECORDED_FRAMES):
            output = network(torch.from_numpy(obs))
            action = int(output.argmax(-1)) if setting.discrete else output.numpy()
            obs, reward, terminated, truncated, _ = env.step(action)
            recording.actions.append(action)
            recording.obs.append(obs)
            recording.rewards.append(reward)
            recording.terminated.append(bool(terminated))
            recording.truncated.append(bool(truncated))
            if terminated or truncated:
                obs, _ = env.reset()
    env.close()
    return recording


class Ideal:
    """Measures the parts; ``seconds`` is about what one ``measure`` takes."""

    def __init__(self, setting: Setting, seconds: float, with_network: bool = True) -> None:
        self._setting = setting
        self._seconds = seconds
        self.recording = record(setting)
        self._env = setting.make_env()
        self._forwards = _forwards(setting) if with_network else {}

    def measure(self) -> IdealParts:
        share = self._seconds / (2 + len(self._forwards))
        with torch.no_grad():
            forwards = {kind: _seconds_per_call(call, share) for kind, call in self._forwards.items()}
        kind = min(forwards, key=forwards.__getitem__, default="none")
        return IdealParts(
            step_s=self._mean(self._replay_s, share),
            copy_s=self._mean(self._copy_s, share),
            forward_s=forwards.get(kind, 0.0),
            forward_kind=kind,
            num_envs=self._setting.num_envs,
        )

    def _mean(self, pass_s: Callable[[], float], seconds: float) -> float:
        """Seconds per frame over whole passes through the recording."""
        total, passes = 0.0, 0
        while total < seconds:
            total += pass_s()
            passes += 1
        return total / passes / len(self.recording.actions)

    def _replay_s(self) -> float:
        env, num_ends = self._env, 0
        step, reset = env.step, env.reset
        reset(seed=ENV_SEED)
        started = time.perf_counter()
        for action in self.recording.actions:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                num_ends += 1
                reset()
        elapsed = time.perf_counter() - started
        if num_ends != self.recording.num_ends:
            raise RuntimeError(f"{self._setting.env_id} is not deterministic: the recorded actions gave other episodes")
        return elapsed

    def _copy_s(self) -> float:
        """Every observation is written once: the next one of a step is the following step's own."""
        recording = self.recording
        num_frames = len(recording.actions)
        obs = np.zeros((num_frames, self._setting.obs_size), np.float32)
        actions = np.zeros((num_frames, *np.shape(recording.actions[0])), np.asarray(recording.actions[0]).dtype)
        rewards = np.zeros(num_frames, np.float32)
        terminated = np.zeros(num_frames, np.bool_)
        truncated = np.zeros(num_frames, np.bool_)
        frames = zip(
            recording.obs,
            recording.actions,
            recording.rewards,
            recording.terminated,
            recording.truncated,
            strict=True,
        )
        started = time.perf_counter()
        for t, (frame_obs, action, reward, is_terminated, is_truncated) in enumerate(frames):
            obs[t] = frame_obs
            actions[t] = action
            rewards[t] = reward
            terminated[t] = is_terminated
            truncated[t] = is_truncated
        return time.perf_counter() - started

    def close(self) -> None:
        self._env.close()


def _seconds_per_call(call: Callable[[], Any], seconds: float) -> float:
    calls, total = 0, 0.0
    while total < seconds:
        started = time.perf_counter()
        for _ in range(100):
            call()
        total += time.perf_counter() - started
        calls += 100
    return total / calls


def _forwards(setting: Setting) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to run the network on one row per env; the argmax of discrete actions is left out."""
    network = setting.make_network().requires_grad_(False)
    first: Any = network[0]  # nn.Linear, which nn.Sequential's types do not say
    last: Any = network[2]
    rows = torch.randn(setting.num_envs, setting.obs_size)
    hidden, out = torch.empty(setting.num_envs, 64), torch.empty(setting.num_envs, setting.num_outputs)
    first_weight, first_bias, last_weight, last_bias = first.weight.t(), first.bias, last.weight.t(), last.bias
    addmm, addmv, relu_ = torch.addmm, torch.addmv, torch.relu_

    def call_module() -> torch.Tensor:
        return network(rows)

    def call_addmm() -> torch.Tensor:
        return addmm(last_bias, relu_(addmm(first_bias, rows, first_weight)), last_weight)

    def call_addmm_out() -> torch.Tensor:
        addmm(first_bias, rows, first_weight, out=hidden)
        return addmm(last_bias, relu_(hidden), last_weight, out=out)

    forwards = {"module": call_module, "addmm": call_addmm, "addmm into memory": call_addmm_out}
    if setting.num_envs == 1:
        row, hidden_row, out_row = rows[0], hidden[0], out[0]
        first_matrix, last_matrix = first.weight, last.weight

        def call_addmv() -> torch.Tensor:
            addmv(first_bias, first_matrix, row, out=hidden_row)
            return addmv(last_bias, last_matrix, relu_(hidden_row), out=out_row)

        forwards["addmv into memory"] = call_addmv
    return forwards
