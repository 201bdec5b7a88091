"""Five staged bottlenecks: the verdict names each, from what real collectors tell of themselves."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from swath.collectors import AsyncBatchedCollector, Collector, MultiCollector
from swath.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
from swath.envs import GymWrapper, ParallelEnv, SerialEnv
from swath.insight.history import History
from swath.insight.reading import facts_between
from swath.insight.screen import live_view
from swath.insight.verdict import Limit, verdict

pytestmark = [pytest.mark.processes, pytest.mark.alone]


@dataclass
class Made:
    """An env whose steps take a while."""

    sleep_s: float = 0.0
    burn_s: float = 0.0

    def __call__(self) -> GymWrapper:
        return GymWrapper(_Takes(self.sleep_s, self.burn_s))


class _Takes(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, sleep_s: float, burn_s: float) -> None:
        self._sleep_s, self._burn_s = sleep_s, burn_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        burn(self._burn_s)
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def burn(seconds: float) -> None:
    """So much of this process's own time on a core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Slow(nn.Module):
    """A policy of which a call takes a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.seconds = seconds

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        burn(self.seconds)
        return self.net(observation)


def workers(env: Any, policy: nn.Module, sync: bool = True, **more: Any) -> Any:
    envs = env if isinstance(env, list) else [env] * 4
    return MultiCollector(envs, policy, frames_per_batch=64, sync=sync, capture_policy=False, **more)


def alone(env: Any, policy: nn.Module) -> Any:
    return Collector(SerialEnv(2, env), policy, frames_per_batch=64, capture_policy=False)


def parallel(env: Any, policy: nn.Module) -> Any:
    return Collector(ParallelEnv(4, env, num_workers=2), policy, frames_per_batch=64, capture_policy=False)


def batched(env: Any, policy: nn.Module) -> Any:
    envs = env if isinstance(env, list) else [env] * 4
    return AsyncBatchedCollector(envs, policy, frames_per_batch=64, num_workers=2, capture_policy=False)


QUICK, SLOW_POLICY = nn.Linear(4, 2), Slow(0.004)
BUSY, SLEEPING, TRIVIAL = Made(burn_s=0.002), Made(sleep_s=0.004), Made()
STRAGGLER = [Made(burn_s=0.0005)] * 3 + [Made(burn_s=0.004)]

CASES: dict[str, tuple[Callable[[], Any], float, Limit, str]] = {
    "slow env, alone": (lambda: alone(BUSY, QUICK), 0, Limit.ENV, "MultiCollector with num_workers"),
    "slow env, sync": (lambda: workers(BUSY, QUICK), 0, Limit.ENV, "workers"),
    "slow env, async": (lambda: workers(BUSY, QUICK, sync=False), 0, Limit.ENV, "workers"),
    "slow env, parallel": (lambda: parallel(BUSY, QUICK), 0, Limit.ENV, "workers"),
    "slow env, batched": (lambda: batched(BUSY, QUICK), 0, Limit.ENV, "workers"),
    "slow policy, alone": (lambda: alone(TRIVIAL, SLOW_POLICY), 0, Limit.POLICY, "SerialEnv"),
    "slow policy, sync": (lambda: workers(TRIVIAL, SLOW_POLICY), 0, Limit.POLICY, "envs_per_worker"),
    "slow policy, parallel": (lambda: parallel(TRIVIAL, SLOW_POLICY), 0, Limit.POLICY, "more envs"),
    "slow policy, batched": (lambda: batched(TRIVIAL, SLOW_POLICY), 0, Limit.POLICY, "more envs"),
    "slow learner, alone": (lambda: alone(TRIVIAL, QUICK), 0.1, Limit.LEARNER, "start()"),
    "slow learner, sync": (lambda: workers(TRIVIAL, QUICK), 0.1, Limit.LEARNER, "sync=False"),
    "slow learner, async": (lambda: workers(TRIVIAL, QUICK, sync=False), 0.1, Limit.LEARNER, "fewer workers"),
    "straggler, sync": (lambda: workers(STRAGGLER, QUICK, num_workers=4), 0, Limit.STRAGGLER, "preemptive_threshold"),
    "straggler, async": (
        lambda: workers(STRAGGLER, QUICK, sync=False, num_workers=4),
        0,
        Limit.STRAGGLER,
        "look at its env",
    ),
    "sleeping, alone": (lambda: alone(SLEEPING, QUICK), 0, Limit.SLEEPING, "MultiCollector with num_workers=2"),
    "sleeping, sync": (lambda: workers([SLEEPING] * 8, QUICK, num_workers=2), 0, Limit.SLEEPING, "num_workers=8"),
    "sleeping, parallel": (lambda: parallel(SLEEPING, QUICK), 0, Limit.SLEEPING, "num_workers=4"),
}


@pytest.mark.filterwarnings("ignore:the envs wait rather than compute")
@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_what_limits(case: str) -> None:
    make, train_s, limit, advice = CASES[case]
    with make() as collector:
        collector.next()
        before = collector.reading()
        while collector.reading().at_s - before.at_s < 1.2:
            collector.next()
            time.sleep(train_s)
        found = verdict(facts_between(before, collector.reading()))
    assert found.limit == limit, found
    assert advice in str(found)


#: What the verdict on each says.
SAYS = {
    "slow env, sync": "busy, env",
    "slow policy, sync": "policy takes",
    "slow learner, sync": "wait for you",
    "straggler, sync": "slower than the others",
    "sleeping, sync": "steps sleep",
}


@pytest.mark.filterwarnings("ignore:the envs wait rather than compute")
@pytest.mark.parametrize("case", SAYS)
def test_it_is_named_live_and_in_the_report(case: str, tmp_path: Path) -> None:
    make, train_s, _, advice = CASES[case]
    history = History()
    with make() as collector, collector.report(tmp_path / "run.html") as report:
        collector.next()
        history.add(collector.reading())
        while history.latest is None or history.latest.age_s < 3:
            collector.next()
            time.sleep(train_s)
            history.add(collector.reading())
        page = report.stop().read_text()
    for shown in (live_view(history, 160).plain, html.unescape(page)):
        assert SAYS[case] in shown
        assert advice in shown


def test_a_learner_that_samples_too_little_holds_back() -> None:
    limiter = SamplesPerInsert(4.0, min_size=100, slack=1000)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32, rate_limiter=limiter)
    with workers(TRIVIAL, QUICK, sync=False, replay_buffer=buffer) as collector:
        collector.start()
        before = collector.reading()
        while collector.reading().at_s - before.at_s < 1.2:
            buffer.sample()
            time.sleep(0.05)
        found = verdict(facts_between(before, collector.reading()))
        collector.async_shutdown()
    assert found.limit == Limit.LEARNER, found
    assert "samples_per_insert" in found.says
