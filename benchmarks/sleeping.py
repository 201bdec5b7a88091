"""Part `sleeping`: 64 envs that only wait, in 64 workers; far more of them than cores, so waiting must overlap."""

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

from report import markdown_table

NUM_ENVS = 64
STEP_S = 0.01
CEILING = NUM_ENVS / STEP_S
STEPS_PER_BATCH = 50
REPEATS = 7
#: Collectors that work ahead have up to two batches of each env ready.
WARM_UP_ROUNDS = 3
_HEADER = ["contender", "median fps", "min .. max", "of ceiling", "start-up"]


class SleepingEnv(gymnasium.Env):
    """Every step sleeps; the observation counts the steps; no episode ends."""

    observation_space = spaces.Box(0, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(STEP_S)
        self._steps += 1
        return self._obs(), 0.0, False, False, {}

    def _obs(self) -> np.ndarray:
        return np.full(4, self._steps, np.float32)


@dataclass
class Waiting:
    """By collector: frames per second in every repeat, and the seconds from the constructor to the first batch."""

    fps: dict[str, list[float]] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        return [
            [
                title,
                f"{median(samples):,.0f}",
                f"{min(samples):,.0f} .. {max(samples):,.0f}",
                f"{median(samples) / CEILING:.3f}",
                f"{self.start_s[title]:.1f} s",
            ]
            for title, samples in self.fps.items()
        ]

    def table(self) -> str:
        return "\n".join(
            f"  {title:<20}{fps:>11}{spread:>20}{share:>12}{start:>10}"
            for title, fps, spread, share, start in [_HEADER, *self.rows()]
        )

    def as_json(self) -> dict[str, Any]:
        return {"ceiling": CEILING, "fps": self.fps, "start_s": self.start_s}


def heading(options: argparse.Namespace) -> str:
    return (
        f"{NUM_ENVS} envs whose steps sleep {1e3 * STEP_S:g} ms, in {NUM_ENVS} workers; {REPEATS} repeats\n"
        f"ceiling: {NUM_ENVS} / {1e3 * STEP_S:g} ms = {CEILING:,.0f} frames per second"
    )


def run(options: argparse.Namespace) -> Iterator[Waiting]:
    from swath import collectors

    makers = {
        "swath MultiSync": partial(collectors.MultiSyncCollector, frames_per_batch=NUM_ENVS * STEPS_PER_BATCH),
        "swath MultiAsync": partial(collectors.MultiAsyncCollector, frames_per_batch=STEPS_PER_BATCH),
    }
    result = Waiting()
    for title, make in makers.items():  # one after the other: of both together there would be 128 processes
        result.start_s[title], result.fps[title] = _measure(make)
    yield result


def _measure(make_collector: Callable[..., Any]) -> tuple[float, list[float]]:
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    started = time.perf_counter()
    collector = make_collector([SleepingEnv] * NUM_ENVS, policy, total_frames=-1, num_workers=NUM_ENVS)
    try:
        batches = iter(collector)
        next(batches)
        start_s = time.perf_counter() - started
        _collect_rounds(batches, WARM_UP_ROUNDS)
        return start_s, [_collect_rounds(batches, 4) for _ in range(REPEATS)]
    finally:
        collector.shutdown()


def _collect_rounds(batches: Iterator[Any], num_rounds: int) -> float:
    """Frames per second; a round is a batch's steps of every env."""
    wanted = num_rounds * NUM_ENVS * STEPS_PER_BATCH
    delivered = 0
    started = time.perf_counter()
    while delivered < wanted:
        delivered += next(batches).numel()
    return delivered / (time.perf_counter() - started)


def markdown(results: Sequence[Waiting]) -> str:
    return markdown_table(_HEADER, results[0].rows())
