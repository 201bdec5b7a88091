"""Where collectors say that they stand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.insight.facts import Way
from swath.insight.reading import Reading, facts_between


def a_policy() -> nn.Module:
    return nn.Linear(4, 2)


def a_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


FRAMES: dict[str, Any] = {"frames_per_batch": 200, "total_frames": 4000}
COLLECTORS: dict[str, tuple[Callable[[], Any], Way, list[str]]] = {
    "single": (lambda: Collector("CartPole-v1", a_policy(), **FRAMES), Way.SINGLE, ["this process"]),
    "serial": (lambda: Collector(SerialEnv(4, a_cartpole), a_policy(), **FRAMES), Way.SINGLE, ["this process"]),
    "parallel": (
        lambda: Collector(ParallelEnv(4, a_cartpole, num_workers=2), a_policy(), **FRAMES),
        Way.BATCHED,
        ["env worker 0", "env worker 1"],
    ),
    "batched": (
        # (Each env in each call: else one of two workers could take nearly all steps, and the other no timed one.)
        lambda: AsyncBatchedCollector(
            [a_cartpole] * 4, a_policy(), num_workers=2, min_batch_size=4, server_timeout=20.0, **FRAMES
        ),
        Way.BATCHED,
        ["env worker 0", "env worker 1"],
    ),
    "sync": (
        lambda: MultiSyncCollector([a_cartpole] * 4, a_policy(), num_workers=2, **FRAMES),
        Way.SYNC,
        ["worker 0", "worker 1"],
    ),
    "async": (
        lambda: MultiAsyncCollector([a_cartpole] * 4, a_policy(), num_workers=2, **FRAMES),
        Way.ASYNC,
        ["worker 0", "worker 1"],
    ),
    "nodes": (
        lambda: DistributedCollector([a_cartpole] * 2, a_policy(), sync=True, **FRAMES),
        Way.SYNC,
        ["node 0", "node 1"],
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_reading_of_each_kind(kind: str) -> None:
    make, way, names = COLLECTORS[kind]
    collector = make()
    reading = collector.reading()
    assert (reading.frames, reading.yours_s, reading.lags) == (0, 0, ())
    for _ in collector:
        collector.update_policy_weights_()
        reading = collector.reading()
    assert (reading.program.way, [place.name for place in reading.places]) == (way, names)
    assert (reading.frames, sum(place.num_envs for place in reading.places)) == (4000, reading.program.num_envs)
    assert sum(place.frames for place in reading.places) >= 4000
    assert sum(reading.lags) == 4000
    assert reading.episodes.count == collector.stats()["episodes"]
    assert "CartPole-v1" in reading.program.env
    for place in reading.places:
        assert place.env_s > 0
        assert place.policy_s > 0
        assert place.alive
    assert 0 < reading.collecting_s + reading.yours_s <= reading.age_s
    text = json.dumps(reading.as_json())
    assert json.dumps(Reading.of_json(json.loads(text)).as_json()) == text
    after = collector.reading()
    assert after.is_closed
    assert after.frames == 4000


def test_whose_turn_it_is_counts_while_it_lasts() -> None:
    collector = Collector("CartPole-v1", a_policy(), frames_per_batch=50)
    assert collector.reading().yours_s == 0
    collector.next()
    first, second = collector.reading(), collector.reading()
    assert second.yours_s > first.yours_s > 0
    assert second.collecting_s == first.collecting_s > 0


def test_a_reading_in_the_middle_of_a_batch_from_another_thread() -> None:
    release, steps = threading.Event(), threading.Event()

    class Held(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            steps.set()
            release.wait(20)
            return observation[..., :2]

    release.set()  # for the call that tells the layout
    collector = Collector("CartPole-v1", Held(), frames_per_batch=4, total_frames=4)
    release.clear()
    steps.clear()
    thread = threading.Thread(target=lambda: list(collector))
    thread.start()
    try:
        assert steps.wait(20)
        before, after = collector.reading(), collector.reading()
        assert after.collecting_s > before.collecting_s > 0
        assert after.places[0].env_s + after.places[0].policy_s > 0
        assert not after.frames
    finally:
        release.set()
        thread.join()
    assert collector.reading().frames == 4


def test_how_old_frames_are_when_they_are_delivered() -> None:
    """Another thread updates twice in the middle of a batch: what came before each is that much older."""
    steps = 0
    updaters: list[threading.Thread] = []

    class Updates(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps in (10, 20):
                updaters.append(threading.Thread(target=collector.update_policy_weights_))
                updaters[-1].start()
                while not collector.runner.rollout.control.waiting[0]:
                    time.sleep(0.001)
            return observation[..., :2] * 1.0

    collector = Collector("CartPole-v1", Updates(), frames_per_batch=30, total_frames=30, capture_policy=False)
    steps = 0
    for _ in collector:
        pass
    for updater in updaters:
        updater.join()
    assert collector.reading().lags == (10, 10, 10)


@pytest.mark.processes
@pytest.mark.parametrize("by_workers", [True, False])
def test_in_the_background_nobody_has_a_turn_and_a_limiter_holds_back(by_workers: bool) -> None:
    limiter = SamplesPerInsert(1.0, min_size=200)
    buffer = ReplayBuffer(storage=LazyTensorStorage(2000), batch_size=50, rate_limiter=limiter)
    envs: dict[str, Any] = (
        {"create_env_fn": [a_cartpole] * 2, "sync": False} if by_workers else {"create_env_fn": a_cartpole}
    )
    make = MultiCollector if by_workers else Collector
    with make(policy=a_policy(), frames_per_batch=100, replay_buffer=buffer, **envs) as collector:
        collector.start()
        while (reading := collector.reading()).held_back_s < 0.05:
            time.sleep(0.01)
        assert reading.in_background
        assert reading.program.way == (Way.ASYNC if by_workers else Way.SINGLE)
        assert reading.yours_s == 0
        assert reading.buffer is not None
        assert reading.buffer.size == len(buffer)
        assert facts_between(None, reading).held_back > 0
        collector.async_shutdown()


class Thinks(nn.Module):
    """A policy beside which CartPole takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return self.linear(observation)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, AsyncBatchedCollector])
def test_who_takes_the_time_is_known_while_it_is_recorded(kind: Any, tmp_path: Path) -> None:
    env = "CartPole-v1" if kind is Collector else [a_cartpole] * 2
    collector = kind(env, Thinks(), frames_per_batch=100, total_frames=600)
    with collector.trace(tmp_path / "run.json"):
        readings = [collector.reading() for _ in collector]
    for place in readings[-1].places:
        assert place.policy_s > place.env_s > 0


def test_who_takes_the_time_is_known_while_an_interruptor_watches() -> None:
    class Never:
        def collection_stopped(self) -> bool:
            return False

    collector = Collector("CartPole-v1", Thinks(), frames_per_batch=100, total_frames=300, interruptor=Never())
    (place,) = [collector.reading() for _ in collector][-1].places
    assert place.policy_s > place.env_s > 0
