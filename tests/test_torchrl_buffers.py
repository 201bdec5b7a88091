"""TorchRL's own replay buffers as guests; needs the extra `torchrl`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leaks import wait_until
from numbered import TICK, assert_frames_whole, make_numbered, numbered_envs
from swath.collectors import AsyncBatchedCollector, Collector, MultiCollector
from swath.envs import SerialEnv
from swath.modules import RandomPolicy

pytestmark = [pytest.mark.torchrl, pytest.mark.processes]
data = pytest.importorskip("torchrl.data")
KINDS = ["single", "sync", "async", "batched"]
#: And whether they are shared: lists cannot be.
STORAGES = [
    ("LazyTensorStorage", False),
    ("LazyTensorStorage", True),
    ("LazyMemmapStorage", False),
    ("LazyMemmapStorage", True),
    ("ListStorage", False),
]
# What torchrl opens when it is first used, and keeps, is not this project's leak.
data.ReplayBuffer(storage=data.LazyTensorStorage(2), batch_size=1, shared=True).extend(torch.zeros(1, 1))


def collecting(kind: str, rb: Any, **kwargs: Any) -> Any:
    kwargs = {"frames_per_batch": 30, "replay_buffer": rb, **kwargs}
    if kind == "single":
        return Collector(make_numbered, **kwargs)
    if kind == "batched":
        return AsyncBatchedCollector(numbered_envs(3), RandomPolicy(), num_workers=2, **kwargs)
    return MultiCollector(numbered_envs(3), sync=kind == "sync", num_workers=2, **kwargs)


def finish(collector: Any) -> None:
    assert wait_until(lambda: not collector.is_running(), 60)
    collector.async_shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize("buffer", ["ReplayBuffer", "TensorDictReplayBuffer"])
@pytest.mark.parametrize(("storage", "shared"), STORAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_filled(kind: str, storage: str, buffer: str, shared: bool, how: str) -> None:
    rb = getattr(data, buffer)(storage=getattr(data, storage)(10_000), batch_size=16, shared=shared)
    collector = collecting(kind, rb, total_frames=300)
    if how == "iterated":
        assert set(collector) == {None}
    else:
        collector.start()
        finish(collector)
    assert len(rb) == 300
    frames: Any = rb[:]
    whole: Any = frames if not isinstance(frames, list) else torch.stack(frames)
    assert_frames_whole(whole)
    assert_frames_whole(rb.sample())


@pytest.mark.filterwarnings("ignore")
def test_envs_that_are_batched_and_steps_that_are_added() -> None:
    rb = data.ReplayBuffer(storage=data.LazyTensorStorage(1000, ndim=2), batch_size=8)
    list(Collector(SerialEnv(3, numbered_envs(3)), frames_per_batch=30, total_frames=90, replay_buffer=rb))
    assert len(rb) == 90
    rows = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), batch_size=2)
    list(Collector(SerialEnv(3, numbered_envs(3)), frames_per_batch=30, total_frames=90, replay_buffer=rows))
    assert (len(rows), rows.sample().shape) == (9, (2, 10))
    steps = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), batch_size=2)
    list(collecting("single", steps, total_frames=90, extend_buffer=False))
    assert torch.equal(steps[:]["observation"][1:, TICK] > steps[:]["observation"][:-1, TICK], torch.ones(89).bool())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_whole_episodes(kind: str) -> None:
    rb = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(10_000),
        sampler=data.SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")),
        batch_size=40,
    )
    collector = collecting(kind, rb, total_frames=1500, trajs_per_batch=2)
    collector.start()
    finish(collector)
    ids = rb.sample().reshape(10, 4)["collector", "traj_ids"]
    assert (ids == ids[:, :1]).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_paused(kind: str) -> None:
    rb = data.ReplayBuffer(storage=data.LazyTensorStorage(100_000), batch_size=8)
    collector = collecting(kind, rb)
    collector.start()
    assert wait_until(lambda: len(rb) > 100, 30)
    with collector.pause():
        before = rb.write_count
        assert not wait_until(lambda: rb.write_count != before, 0.2)
    assert wait_until(lambda: rb.write_count > before, 30)
    collector.async_shutdown()
