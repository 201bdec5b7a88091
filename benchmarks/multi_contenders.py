"""Collectors with worker processes and their rivals, each written as its users would write it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from gymnasium.vector import AsyncVectorEnv
from torch import nn

from contenders import (
    CollectorContender,
    Contender,
    VectorLoop,
    swath_collector,
    swath_env,
    swath_policy,
    torchrl_env,
    torchrl_policy,
)
from sb3_rollout import Sb3Rollout
from setting import Setting

#: What is different in the two libraries: the env and the policy, see there.
_LIBRARIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "swath": (swath_env, swath_policy),
    "torchrl": (torchrl_env, torchrl_policy),
}


def multi_sync(
    library: str, setting: Setting, network: nn.Sequential | None = None, **options: Any
) -> CollectorContender:
    """``MultiSyncCollector`` of swath or torchrl: a batch has the same number of steps of every env."""
    collector = _collector(library, "MultiSyncCollector", setting, setting.frames_per_batch, network, options)
    return CollectorContender(setting, collector)


def multi_async(
    library: str, setting: Setting, network: nn.Sequential | None = None, steps: int | None = None, **options: Any
) -> CollectorContender:
    """``MultiAsyncCollector`` of swath or torchrl: a batch is ``steps`` of one env, by default a whole batch's."""
    batches = Setting(setting.env_id, 1, steps or setting.frames_per_batch)
    collector = _collector(library, "MultiAsyncCollector", setting, batches.frames_per_batch, network, options)
    contender = StoppedBetween if library == "torchrl" else CollectorContender
    return contender(batches, collector, num_turns=setting.num_envs)


class StoppedBetween(CollectorContender):
    """torchrl's async workers never rest: unasked, they collect one batch after the other and throw it away."""

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.wake()
        super().close()

    def _signal(self, number: int) -> None:
        for process in self.collector.procs:
            os.kill(process.pid, number)


def _collector(
    library: str,
    class_name: str,
    setting: Setting,
    frames_per_batch: int,
    network: nn.Sequential | None,
    options: dict[str, Any],
) -> Any:
    make_env, make_policy = _LIBRARIES[library]
    if library == "torchrl":  # its own choice, unless somebody has used multiprocessing before it
        multiprocessing.set_start_method("spawn", force=True)
    return getattr(import_module(f"{library}.collectors"), class_name)(
        [partial(make_env, setting)] * setting.num_envs,
        make_policy(setting, network or setting.make_network()),
        frames_per_batch=frames_per_batch,
        total_frames=-1,
        **options,
    )


def worker_per_env(library: str, setting: Setting) -> dict[str, int]:
    """Arguments for as many workers as envs; torchrl has no others."""
    return {"num_workers": setting.num_envs} if library == "swath" else {}


def async_vector_loop(setting: Setting) -> Contender:
    # Not a fork: it would inherit the other contenders' pipes.
    return VectorLoop(setting, partial(AsyncVectorEnv, context="forkserver"))


def swath_single_half(setting: Setting) -> Contender:
    """One process with as many envs as one of two workers has."""
    return swath_collector(replace(setting, num_envs=setting.num_envs // 2))


#: By the names of the command line and of the results.
CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "swath-sync": partial(multi_sync, "swath"),
    "swath-async": partial(multi_async, "swath"),
    "torchrl-sync": partial(multi_sync, "torchrl"),
    "torchrl-async": partial(multi_async, "torchrl"),
    "async-vector": async_vector_loop,
    "sb3-subproc": partial(Sb3Rollout, vec_env_name="SubprocVecEnv"),
    "sb3-dummy": partial(Sb3Rollout, vec_env_name="DummyVecEnv"),
}

#: Many envs in two processes. Async: short batches, so that a round is as many frames as a batch of sync.
PACKED_STEPS = 250
PACKED_CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "swath-sync": partial(multi_sync, "swath", num_workers=2),
    "swath-async": partial(multi_async, "swath", steps=PACKED_STEPS, num_workers=2),
    "swath-single": swath_single_half,
}

TITLES = {
    "swath-sync": "swath MultiSync",
    "swath-async": "swath MultiAsync",
    "torchrl-sync": "torchrl MultiSync",
    "torchrl-async": "torchrl MultiAsync",
    "async-vector": "AsyncVectorEnv loop",
    "sb3-subproc": "SB3, SubprocVecEnv",
    "sb3-dummy": "SB3, DummyVecEnv",
    "swath-single": "Collector, 1 process",
}
