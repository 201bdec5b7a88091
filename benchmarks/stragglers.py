"""Part `stragglers`: 16 envs whose steps take log-normal times, asleep or at work; who waits for the slowest?

Observations say how long the step was to take. The ceiling is 16 envs (asleep) or C cores (at work) divided by the mean
of these times over the frames that were delivered, so luck with the draws does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from interleaved import order_of, settle
from machine import usable_cores
from report import markdown_table

NUM_ENVS = 16
SIGMA = 1.0
SLEEP_S = 0.01
WORK_S = 0.001
FRAMES_PER_ROUND = NUM_ENVS * 50
#: Of MultiAsync, where each env has batches of its own: short, as a measurement ends in the midst of them.
ASYNC_STEPS = 25
REPEATS = 5
#: MultiAsync has up to two batches of each env ready; the others work ahead by less than a batch.
WARM_UP_ROUNDS = 1
WARM_UP_ROUNDS_AHEAD = 3
_HEADER = ["contender", "median fps", "min .. max", "of ceiling", "start-up"]


class StragglingEnv(gymnasium.Env):
    """Steps take log-normal times, of this mean; the observation is the time that the last step was to take."""

    observation_space = spaces.Box(0, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seed: int, mean_s: float, sleeps: bool) -> None:
        self._times = np.random.default_rng(seed)
        self._mu = np.log(mean_s) - SIGMA**2 / 2
        self._spend = time.sleep if sleeps else _work

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        seconds = self._times.lognormal(self._mu, SIGMA)
        self._spend(seconds)
        return np.full(4, seconds, np.float32), 0.0, False, False, {}


def _work(seconds: float) -> None:
    """Use so much of a core, however many others want it too."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@dataclass
class Straggling:
    """By contender, in every repeat: frames per second, and their share of the ceiling."""

    title: str
    fps: dict[str, list[float]] = field(default_factory=dict)
    share: dict[str, list[float]] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        return [
            [
                title,
                f"{median(samples):,.0f}",
                f"{min(samples):,.0f} .. {max(samples):,.0f}",
                f"{median(self.share[title]):.3f}",
                f"{self.start_s[title]:.1f} s",
            ]
            for title, samples in self.fps.items()
        ]

    def table(self) -> str:
        lines = [
            f"  {title:<28}{fps:>11}{spread:>20}{share:>12}{start:>10}"
            for title, fps, spread, share, start in [_HEADER, *self.rows()]
        ]
        return "\n".join([self.title, *lines])

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "fps": self.fps, "share": self.share, "start_s": self.start_s}


def heading(options: argparse.Namespace) -> str:
    return (
        f"{NUM_ENVS} envs, swath only; steps take log-normal times (sigma {SIGMA:g}); "
        f"{_repeats(options)} repeats, interleaved\n"
        "ceiling: envs (asleep) or cores (at work) / the mean time of the steps that were delivered"
    )


def _repeats(options: argparse.Namespace) -> int:
    return 2 if options.quick else REPEATS


def run(options: argparse.Namespace) -> Iterator[Straggling]:
    from swath.collectors import AsyncBatchedCollector, MultiAsyncCollector, MultiSyncCollector

    cores = min(usable_cores(), NUM_ENVS)
    sync = partial(MultiSyncCollector, frames_per_batch=FRAMES_PER_ROUND)
    free = partial(MultiAsyncCollector, frames_per_batch=ASYNC_STEPS)
    batched = partial(AsyncBatchedCollector, frames_per_batch=FRAMES_PER_ROUND, max_batch_size=NUM_ENVS)
    asleep = {
        f"MultiSync, {NUM_ENVS} workers": partial(sync, num_workers=NUM_ENVS),
        f"MultiAsync, {NUM_ENVS} workers": partial(free, num_workers=NUM_ENVS),
        "AsyncBatched, threads": partial(batched, env_backend="threading"),
        "AsyncBatched, a process each": partial(batched, env_backend="multiprocessing", envs_per_worker=1),
        f"ParallelEnv, {NUM_ENVS} workers": partial(parallel_collector, num_workers=NUM_ENVS),
    }
    at_work = {
        f"MultiSync, {cores} workers": partial(sync, num_workers=cores),
        f"MultiAsync, {cores} workers": partial(free, num_workers=cores),
        "AsyncBatched": batched,
        f"ParallelEnv, {cores} workers": partial(parallel_collector, num_workers=cores),
    }
    yield _measure(f"asleep, {1e3 * SLEEP_S:g} ms on average", asleep, SLEEP_S, True, NUM_ENVS, options)
    yield _measure(f"at work, {1e3 * WORK_S:g} ms on average", at_work, WORK_S, False, cores, options)


def parallel_collector(
    makers: Sequence[Callable[[], Any]], policy: Any, num_workers: int, total_frames: int = -1
) -> Any:
    """``Collector(ParallelEnv(...))``; a step waits for the slowest env."""
    from swath.collectors import Collector
    from swath.envs import ParallelEnv

    env = ParallelEnv(len(makers), makers, num_workers=num_workers)
    return Collector(env, policy, frames_per_batch=FRAMES_PER_ROUND, total_frames=total_frames)


def _measure(
    title: str,
    contenders: dict[str, Callable[..., Any]],
    mean_s: float,
    sleeps: bool,
    num_at_once: int,
    options: argparse.Namespace,
) -> Straggling:
    result = Straggling(title, {name: [] for name in contenders}, {name: [] for name in contenders})
    makers = [partial(StragglingEnv, seed, mean_s, sleeps) for seed in range(NUM_ENVS)]
    collectors: dict[str, Any] = {}
    batches: dict[str, Iterator[Any]] = {}
    try:
        for name, make in contenders.items():
            network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
            policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
            started = time.perf_counter()
            collectors[name] = make(makers, policy, total_frames=-1)
            batches[name] = iter(collectors[name])
            next(batches[name])
            result.start_s[name] = time.perf_counter() - started
        for repeat in range(_repeats(options)):
            for name in order_of(list(contenders), repeat):
                settle(has_processes=True)
                warm_up_rounds = WARM_UP_ROUNDS_AHEAD if "MultiAsync" in name else WARM_UP_ROUNDS
                _collect(batches[name], warm_up_rounds * FRAMES_PER_ROUND, 0)
                fps, step_s = _collect(batches[name], FRAMES_PER_ROUND, 2 * (options.seconds or 1.0))
                result.fps[name].append(fps)
                result.share[name].append(fps * step_s / num_at_once)
        return result
    finally:
        for collector in collectors.values():
            collector.shutdown()


def _collect(batches: Iterator[Any], frames: int, seconds: float) -> tuple[float, float]:
    """Frames per second, and what their steps were to take on average; for at least so many and so long."""
    delivered, total_s, elapsed = 0, 0.0, 0.0
    started = time.perf_counter()
    while delivered < frames or elapsed < seconds:
        batch = next(batches)
        delivered += batch.numel()
        total_s += float(batch["next", "observation"][..., 0].sum())
        elapsed = time.perf_counter() - started
    return delivered / elapsed, total_s / delivered


def markdown(results: Sequence[Straggling]) -> str:
    return "\n\n".join(f"{result.title}:\n\n{markdown_table(_HEADER, result.rows())}" for result in results)
