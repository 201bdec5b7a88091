"""How a node leaves: in the middle of a batch, with another order waiting; its envs are closed, and not in a step."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from counting import CountingEnv
from leaks import wait_until
from swath.collectors import Collector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.collectors.distributed.answers import PicklingNode
from swath.collectors.distributed.node import Node
from swath.collectors.distributed.requests import IdSpace, NodePlan, Order
from swath.errors import CollectorClosed

#: Of the steps below, ten minutes.
LONG = 60_000


class GatedEnv(CountingEnv):
    """Takes no step before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping, self.gate, self.closed = threading.Event(), threading.Event(), threading.Event()

    def step(self, action: Any) -> Any:
        self.stepping.set()
        assert self.gate.wait(30)
        return super().step(action)

    def close(self) -> None:
        self.closed.set()


class TellingEnv(CountingEnv):
    """A process of its own; the folder has a file once it has taken a step, and one once it was closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def step(self, action: Any) -> Any:
        (self.folder / f"{os.getpid()}.stepped").touch()
        time.sleep(0.01)
        return super().step(action)

    def close(self) -> None:
        (self.folder / f"{os.getpid()}.closed").touch()


@pytest.fixture(autouse=True)
def _nodes_are_in_this_process() -> Iterator[None]:
    """What they set is put back."""
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(numbers)


def plan_of(kind: type, factory: Any) -> NodePlan:
    return NodePlan(0, kind, [factory], None, None, None, LONG, {}, IdSpace.of_node(0, 1), base_seed=0)


def test_a_node_that_was_asked_to_stop_ends_its_batch_and_begins_no_other() -> None:
    env = GatedEnv()
    node = Node(plan_of(Collector, lambda: env))
    with ThreadPoolExecutor(1) as in_turn:
        under_way, waiting = (in_turn.submit(node.collect, Order(number, LONG)) for number in (1, 2))
        assert env.stepping.wait(30)
        node.ask_to_stop()
        env.gate.set()
        assert under_way.result(30)[0].shape == (1,)
        with pytest.raises(CollectorClosed, match="told to leave"):
            waiting.result(30)
    node.close()
    assert env.closed.is_set()


def test_envs_are_not_closed_within_a_step() -> None:
    env = GatedEnv()
    node = Node(plan_of(Collector, lambda: env))
    with ThreadPoolExecutor(2) as threads:
        under_way = threads.submit(node.collect, Order(1, LONG))
        assert env.stepping.wait(30)
        closing = threads.submit(node.close)
        assert not env.closed.wait(0.5)
        env.gate.set()
        assert under_way.result(30)[0].shape == (1,)
        closing.result(30)
        assert env.closed.is_set()


def test_a_node_whose_step_does_not_end_closes_all_the_same() -> None:
    env = GatedEnv()
    node = Node(plan_of(Collector, lambda: env))
    with ThreadPoolExecutor(1) as in_turn:
        under_way = in_turn.submit(node.collect, Order(1, LONG))
        assert env.stepping.wait(30)
        node.close()
        assert env.closed.is_set()
        env.gate.set()
        under_way.result(30)


@pytest.mark.processes
def test_workers_of_a_node_that_was_asked_to_stop_end_their_batch(tmp_path: Path) -> None:
    node = Node(plan_of(MultiSyncCollector, functools.partial(TellingEnv, tmp_path)))
    with ThreadPoolExecutor(1) as in_turn:
        under_way = in_turn.submit(node.collect, Order(1, LONG))
        assert wait_until(lambda: list(tmp_path.glob("*.stepped")) != [], 30)
        node.ask_to_stop()
        with pytest.raises(CollectorClosed):
            under_way.result(30)
    node.close()
    assert list(tmp_path.glob("*.closed"))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_nodes_that_are_shut_down_in_a_batch_close_their_envs(workers: int, tmp_path: Path) -> None:
    """They leave by themselves: one that has to be ended does not close anything."""
    make_env = functools.partial(TellingEnv, tmp_path)
    collector = DistributedCollector([make_env] * 2, frames_per_batch=LONG, num_workers_per_collector=workers)
    with ThreadPoolExecutor(1) as consumer:
        batch = consumer.submit(next, iter(collector))
        assert wait_until(lambda: len(list(tmp_path.glob("*.stepped"))) == 2 * workers, 30)
        collector.shutdown()
        with suppress(CollectorClosed):  # or what there was of it
            assert batch.result(30).numel() < LONG
    assert len(list(tmp_path.glob("*.closed"))) == 2 * workers


def test_a_node_that_was_never_made_leaves_in_silence() -> None:
    node = PicklingNode()
    node.ask_to_stop()
    node.close()
