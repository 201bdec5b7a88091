"""Two threads, or a thread and the background, that would get batches of one collector at the same time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from counting import make_counting
from leaks import wait_until
from policies_for_tests import deterministic
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer

pytestmark = pytest.mark.processes

KINDS: dict[str, Any] = {
    "single": lambda **more: Collector(make_counting, deterministic(), frames_per_batch=10, **more),
    "sync": lambda **more: MultiSyncCollector([make_counting] * 2, deterministic(), frames_per_batch=10, **more),
    "async": lambda **more: MultiAsyncCollector([make_counting] * 2, deterministic(), frames_per_batch=10, **more),
    "batched": lambda **more: AsyncBatchedCollector([make_counting] * 2, deterministic(), frames_per_batch=10, **more),
}


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(1000))


class Gate:
    """A hook that holds a batch until it may go on."""

    def __init__(self) -> None:
        self.came, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.came.set()
        assert self.may_go_on.wait(60)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_that_iterate(kind: str) -> None:
    """The second is told; the first, whose episodes would have had gaps, goes on."""
    gate = Gate()
    got: list[Any] = []
    collector = KINDS[kind](total_frames=100, pre_collect_hook=gate)
    first = threading.Thread(target=lambda: got.extend(collector))
    first.start()
    assert gate.came.wait(60)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="another thread is getting a batch"):
            collector.next()
    gate.may_go_on.set()
    first.join(60)
    assert sum(batch.numel() for batch in got) == 100


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_take_turns(kind: str) -> None:
    got: list[Any] = []
    collector = KINDS[kind](total_frames=40)
    for _ in range(4):
        thread = threading.Thread(target=lambda: got.append(collector.next()))
        thread.start()
        thread.join(60)
    assert sum(batch.numel() for batch in got) == 40
    assert collector.next() is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_that_is_older_than_the_background(kind: str) -> None:
    rb = buffer()
    collector = KINDS[kind](replay_buffer=rb)
    batches = iter(collector)
    next(batches)
    collector.start()
    with pytest.raises(RuntimeError, match="sample its replay buffer"):
        next(batches)
    before = rb.write_count
    assert wait_until(lambda: rb.write_count > before, 60)
    collector.async_shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_background_that_is_started_while_a_thread_gets_a_batch(kind: str) -> None:
    gate, rb = Gate(), buffer()
    collector = KINDS[kind](total_frames=40, pre_collect_hook=gate, replay_buffer=rb)
    first = threading.Thread(target=lambda: list(collector))
    first.start()
    assert gate.came.wait(60)
    with pytest.raises(RuntimeError, match="another thread is getting a batch"):
        collector.start()
    gate.may_go_on.set()
    first.join(60)
    assert rb.write_count == 40
