"""Part `parallel`: envs in processes that are stepped together; with a policy, and alone.

The ideal is C / (s + c + f(b) / b) with b = all envs, and without the network C / (s + c).
"""

from __future__ import annotations

import argparse
import multiprocessing
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from tensordict import TensorDict

from contenders import (
    CollectorContender,
    Contender,
    Transitions,
    swath_env,
    swath_policy,
    torchrl_env,
    torchrl_policy,
)
from interleaved import Race
from machine import usable_cores
from multi_contenders import async_vector_loop
from report import Throughput, throughput_markdown
from setting import ENV_SEED, Setting

SETTING = Setting("Pendulum-v1", 4, 50)
OURS = {"swath": "swath is"}
#: Nobody works ahead by more than a step, but processes that have slept wake slowly.
WARM_UP_ROUNDS = 1
_MAKE_ENV: dict[str, Callable[[Setting], Any]] = {"swath": swath_env, "torchrl": torchrl_env}
_MAKE_POLICY: dict[str, Callable[..., Any]] = {"swath": swath_policy, "torchrl": torchrl_policy}


def parallel_env(library: str, num_envs: int, make_env: Callable[[], Any]) -> Any:
    """``ParallelEnv`` of swath or torchrl, with its defaults."""
    if library == "torchrl":  # its own choice, unless somebody has used multiprocessing before it
        multiprocessing.set_start_method("spawn", force=True)
    env = import_module(f"{library}.envs").ParallelEnv(num_envs, make_env)
    env.set_seed(ENV_SEED)
    return env


def parallel_collector(library: str, setting: Setting) -> Contender:
    """``Collector(ParallelEnv(...))``."""
    # As by default; said, torchrl does not warn.
    said: dict[str, Any] = {"auto_register_policy_transforms": False} if library == "torchrl" else {}
    collector = import_module(f"{library}.collectors").Collector(
        parallel_env(library, setting.num_envs, partial(_MAKE_ENV[library], setting)),
        _MAKE_POLICY[library](setting, setting.make_network()),
        frames_per_batch=setting.frames_per_batch,
        total_frames=-1,
        **said,
    )
    return CollectorContender(setting, collector)


class _Steps(Contender):
    """Envs alone: random actions, drawn ahead; what a step returns is kept until the batch is full."""

    by_network = False

    def __init__(self, setting: Setting) -> None:
        self.batches = setting
        self.frames_per_round = setting.frames_per_batch
        self._steps: list[Any] = []
        env = setting.make_env()
        space = env.action_space
        env.close()
        assert isinstance(space, gymnasium.spaces.Box)
        space.seed(ENV_SEED)
        lead = (setting.steps_per_batch, setting.num_envs)
        self._actions = np.stack([space.sample() for _ in range(setting.frames_per_batch)]).reshape(*lead, -1)

    def collect(self, frames: int) -> int:
        delivered = 0
        with torch.no_grad():
            while delivered < frames:
                self._steps = []
                self._collect_batch()
                delivered += self.batches.frames_per_batch
        return delivered

    @abstractmethod
    def _collect_batch(self) -> None: ...


class TensorDictSteps(_Steps):
    """``ParallelEnv.step_and_maybe_reset`` of swath or torchrl."""

    def __init__(self, library: str, setting: Setting) -> None:
        super().__init__(setting)
        self._env = parallel_env(library, setting.num_envs, partial(_MAKE_ENV[library], setting))
        self._action_rows = torch.from_numpy(self._actions).unbind(0)
        self._root: Any = self._env.reset()

    def _collect_batch(self) -> None:
        root, env, steps = self._root, self._env, self._steps
        for actions in self._action_rows:
            root.set("action", actions)
            step, root = env.step_and_maybe_reset(root)
            steps.append(step)
        self._root = root

    def last_batch(self) -> Transitions:
        return Transitions.of(TensorDict.maybe_dense_stack(self._steps, 0), self.batches.discrete)

    def close(self) -> None:
        self._env.close()


class AsyncVectorSteps(_Steps):
    """``AsyncVectorEnv.step``, with its defaults and the true last observations."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._envs = AsyncVectorEnv(
            [setting.make_env] * setting.num_envs,
            context="forkserver",  # not a fork: it would inherit the other contenders' pipes
            autoreset_mode=AutoresetMode.SAME_STEP,
        )
        self._obs, _ = self._envs.reset(seed=ENV_SEED)
        self._first_obs = self._obs

    def _collect_batch(self) -> None:
        envs, steps = self._envs, self._steps
        self._first_obs = self._obs
        for actions in self._actions:
            steps.append(envs.step(actions))
        self._obs = steps[-1][0]

    def last_batch(self) -> Transitions:
        obs, rewards, terminated, truncated, infos = zip(*self._steps, strict=True)
        next_obs = np.stack(obs)
        for t, info in enumerate(infos):
            if "final_obs" in info:
                ended = info["_final_obs"]
                next_obs[t, ended] = np.stack(info["final_obs"][ended])
        return Transitions(
            obs=np.stack([self._first_obs, *obs[:-1]]),
            next_obs=next_obs,
            actions=self._actions,
            rewards=np.stack(rewards),
            terminated=np.stack(terminated),
            truncated=np.stack(truncated),
        )

    def close(self) -> None:
        self._envs.close()


#: By the names of the command line and of the results.
COLLECTORS: dict[str, Callable[[Setting], Contender]] = {
    "swath": partial(parallel_collector, "swath"),
    "torchrl": partial(parallel_collector, "torchrl"),
    "async-vector": async_vector_loop,
}
ENVS: dict[str, Callable[[Setting], Contender]] = {
    "swath": partial(TensorDictSteps, "swath"),
    "torchrl": partial(TensorDictSteps, "torchrl"),
    "async-vector": AsyncVectorSteps,
}
COLLECTOR_TITLES = {
    "swath": "swath Collector",
    "torchrl": "torchrl Collector",
    "async-vector": "AsyncVectorEnv loop",
}
ENV_TITLES = {"swath": "swath ParallelEnv", "torchrl": "torchrl ParallelEnv", "async-vector": "AsyncVectorEnv"}


def heading(options: argparse.Namespace) -> str:
    return (
        f"envs in processes, stepped together; {options.repeats} repeats, contenders interleaved, one at a time\n"
        "first Collector(ParallelEnv), then ParallelEnv alone with random actions: X* without the network"
    )


def run(options: argparse.Namespace) -> Iterator[Throughput]:
    names = [name for name in COLLECTORS if name in OURS or options.only is None or name in options.only]
    cores = min(usable_cores(), SETTING.num_envs)
    collectors = {name: COLLECTORS[name] for name in names}
    yield Race(SETTING, collectors, COLLECTOR_TITLES, OURS, WARM_UP_ROUNDS, cores, "central").run(options)
    envs = {name: ENVS[name] for name in names}
    yield Race(SETTING, envs, ENV_TITLES, OURS, WARM_UP_ROUNDS, cores, "none").run(options)


markdown = throughput_markdown
