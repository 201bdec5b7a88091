"""Collectors in processes that are asked to stop, or fail: what was collected is there, and shown while it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from counting import assert_consistent, make_counting
from leaks import wait_until
from slow_envs import Fails, WaitsForFile, released
from swath.collectors import MultiAsyncCollector, MultiSyncCollector

pytestmark = pytest.mark.processes


class Interruptor:
    is_stopped = False

    def collection_stopped(self) -> bool:
        return self.is_stopped


@pytest.mark.parametrize(("envs", "workers"), [(1, 1), (3, 3), (5, 2)])
def test_async_delivers_what_is_under_way_and_then_nothing(envs: int, workers: int) -> None:
    stop = Interruptor()
    delivered = []
    with MultiAsyncCollector(
        [make_counting] * envs,
        frames_per_batch=200,
        num_workers=workers,
        init_random_frames=10**9,
        interruptor=stop,
        track_env=True,
    ) as collector:
        batches = iter(collector)
        for _ in range(2):
            stop.is_stopped = False
            delivered.append(next(batches))
            stop.is_stopped = True
            while (batch := next(batches)).batch_size.numel():
                delivered.append(batch)
            assert batch.shape == (0,)
        stats = collector.stats()
        assert stats["frames"] == sum(map(len, delivered)) == sum(line["frames"] for line in stats["workers"])
        assert collector._random_frames_left == 10**9 - stats["frames"]  # those that were not collected are still due
    assert_consistent(delivered)
    assert {int(number) for batch in delivered for number in batch["collector", "env"]} == set(range(envs))


def test_async_keeps_completed_steps() -> None:
    def fail() -> None:
        raise ValueError("the door is stuck")

    collector = MultiAsyncCollector(
        [make_counting, lambda: Fails(70, fail)], frames_per_batch=10**5, num_workers=2, track_env=True
    )
    with pytest.raises(ValueError, match="the door is stuck"):
        next(iter(collector))
    left = collector.partial_batch
    assert left is not None
    env = left["collector", "env"]
    assert 69 <= int((env == 1).sum()) <= 70
    assert_consistent([left[env == number] for number in (0, 1) if (env == number).any()])


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_frames_under_way_are_counted(kind: type) -> None:
    with released() as switch:
        collector = kind([lambda: WaitsForFile(switch, 300)], frames_per_batch=500, total_frames=500)

        def frames() -> int:
            return collector.stats()["workers"][0]["frames"]

        batches: list[Any] = []
        consumer = threading.Thread(target=lambda: batches.extend(collector))
        consumer.start()
        assert wait_until(lambda: 300 <= frames() < 500)
        assert not batches
        switch.turn_on()
        consumer.join()
        assert torch.cat(batches, -1).numel() == frames() == 500
