"""trajs_per_write=: how many whole episodes go into a replay buffer at a time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from swath.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv, SerialEnv


def make() -> Any:
    """With ``max_frames_per_traj=5``, all episodes have five steps: two in each env's ten steps of a batch."""
    return GymEnv("CartPole-v1")


class Extended:
    """A buffer of somebody else's."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def extend(self, batch: Any) -> None:
        self.given.append(batch)


def ends(batch: Any) -> int:
    return int(batch["next", "done"].sum())


@pytest.mark.parametrize(
    ("per_write", "writes"), [(None, [1] * 8), (1, [1] * 8), (2, [2] * 4), (3, [3, 1] * 2), (9, [4, 4])]
)
def test_so_many_are_extended_at_a_time(per_write: int | None, writes: list[int]) -> None:
    buffer = Extended()
    with Collector(
        SerialEnv(2, make),
        frames_per_batch=20,
        total_frames=40,
        replay_buffer=buffer,
        trajs_per_batch=1,
        trajs_per_write=per_write,
        max_frames_per_traj=5,
    ) as collector:
        assert list(collector) == [None] * len(writes)
    assert [ends(batch) for batch in buffer.given] == writes
    for batch in buffer.given:
        assert batch.ndim == 1
        assert bool(batch["next", "done"][-1])
    ids = torch.cat([batch["collector", "traj_ids"] for batch in buffer.given])
    assert [int((ids == each).sum()) for each in ids.unique()] == [5] * 8


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector, DistributedCollector])
@pytest.mark.parametrize("in_background", [False, True])
def test_the_episodes_that_are_stored_are_whole(kind: type, in_background: bool) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    with kind(
        make if kind is Collector else [make] * 2,
        frames_per_batch=20,
        total_frames=200,
        replay_buffer=buffer,
        trajs_per_batch=1,
        trajs_per_write=3,
        max_frames_per_traj=5,
    ) as collector:
        if in_background:
            collector.start()
            while collector.is_running():
                time.sleep(0.01)
        else:
            list(collector)
    stored = buffer[:]
    ids = stored["collector", "traj_ids"].reshape(-1)
    assert len(ids) in ((200,) if kind is Collector or not in_background else range(185, 201, 5))  # cut at the end
    for each in ids.unique():
        flags = stored["next", "done"].reshape(-1)[ids == each]
        assert flags.tolist() == [False] * 4 + [True]


@pytest.mark.processes
@pytest.mark.parametrize("hook", [None, lambda batch: None], ids=["no hook", "a hook of the owner's"])
@pytest.mark.parametrize(
    "kind", [Collector, MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector, DistributedCollector]
)
def test_the_whole_buffer_is_used(kind: type, hook: Any) -> None:
    """Whole episodes are in no env's own track: it would have a fourth of the buffer, and get the episodes of all."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(400))
    options: dict[str, Any] = {"policy": RandomPolicy()} if kind is AsyncBatchedCollector else {}
    with kind(
        SerialEnv(4, make) if kind is Collector else [make] * 4,
        frames_per_batch=40,
        total_frames=400,
        replay_buffer=buffer,
        trajs_per_batch=1,
        max_frames_per_traj=5,
        post_collect_hook=hook,
        **options,
    ) as collector:
        list(collector)
    stats = buffer.stats()
    assert stats["size"] == stats["write_count"] > 300
    frames = buffer[:]
    assert int(frames["next", "done"].sum()) == len(frames["collector", "traj_ids"].unique())


@pytest.mark.parametrize("given", [{"trajs_per_batch": 2}, {"replay_buffer": Extended()}, {}])
def test_it_needs_a_buffer_and_whole_episodes(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs trajs_per_batch= and replay_buffer="):
        Collector(make, frames_per_batch=20, trajs_per_write=2, **given)


@pytest.mark.parametrize("count", [0, -1, 1.5, "two", True])
def test_a_number_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="trajs_per_write must be"):
        Collector(
            make,
            frames_per_batch=20,
            replay_buffer=Extended(),
            trajs_per_batch=2,
            trajs_per_write=count,
        )


@pytest.mark.torchrl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_write", [1, 2, 100])
def test_writes_as_torchrl(per_write: int) -> None:
    theirs, envs = pytest.importorskip("torchrl.collectors"), pytest.importorskip("torchrl.envs")
    data = pytest.importorskip("torchrl.data")

    class Counted(data.ReplayBuffer):  # type: ignore[misc, name-defined]
        def extend(self, batch: Any) -> Any:
            writes.append(ends(batch))
            return super().extend(batch)

    def guest() -> Any:
        return envs.TransformedEnv(envs.GymEnv("CartPole-v1"), envs.StepCounter(max_steps=5))

    seen = []
    for kind in (theirs.Collector, Collector):
        writes: list[int] = []
        collector = kind(
            guest,
            None,
            frames_per_batch=25,
            total_frames=100,
            replay_buffer=Counted(storage=data.LazyTensorStorage(1000)),
            trajs_per_batch=3,
            trajs_per_write=per_write,
        )
        list(collector)
        collector.shutdown()
        seen.append(writes)
    assert seen[0] == seen[1] == {1: [1] * 20, 2: [2, 2, 1] * 4, 100: [5] * 4}[per_write]
