"""Orders that are stopped, given up or taken over: what is delivered was made by an env, in one piece, once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from leaks import wait_until
from numbered import (
    ENV,
    assert_frames_whole,
    assert_tracks_in_one_piece,
    assert_trajectories_in_one_piece,
    make_numbered,
    numbered_envs,
)
from swath.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from swath.collectors.distributed.node import Node
from swath.collectors.distributed.requests import IdSpace, NodePlan, Order
from swath.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from swath.envs import SerialEnv
from swath.modules import RandomPolicy

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*started again")]


def buffer(size: int = 100_000) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=16)


def kill(collector: Any, worker: int) -> None:
    def is_there() -> bool:
        line = collector.stats()["workers"][worker]
        return line["pid"] == pid and line["alive"]

    pid = collector.stats()["workers"][worker]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_there(), 30)


def finish(collector: Any) -> None:
    assert wait_until(lambda: not collector.is_running(), 60)
    collector.async_shutdown()


@contextlib.contextmanager
def opened_when_asked(gate: Path, collector: Any, worker: int) -> Iterator[None]:
    """An env that waits at ``gate`` in the middle of a batch goes on when its worker has been sent a message."""
    page = collector._workers.handles[worker].page

    def open_gate() -> None:
        wait_until(lambda: page.waiting[0] == 1, 30)
        gate.touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    yield
    opener.join()


def frames_of(collector: Any, worker: int) -> Callable[[], int]:
    return lambda: collector.stats()["workers"][worker]["frames"]


# -- what one order left on the board is nothing to the next ---------------------------------------------------------


@pytest.mark.parametrize("deed", ["reset", "set_seed", "load_state_dict"])
def test_a_worker_that_dies_after_its_batch_was_given_up_delivers_no_rows_that_no_env_made(
    tmp_path: Path, deed: str
) -> None:
    gate = tmp_path / "gate"
    collector = MultiAsyncCollector(
        numbered_envs(1, longest=1000, gate=str(gate), free_ticks=150), frames_per_batch=100, restart_workers=3
    )
    state = collector.state_dict()
    batches = iter(collector)
    delivered = [next(batches)]
    assert wait_until(lambda: frames_of(collector, 0)() >= 145, 30)  # it is in the middle of the second batch
    with opened_when_asked(gate, collector, 0):
        {
            "reset": collector.reset,
            "set_seed": lambda: collector.set_seed(3),
            "load_state_dict": lambda: collector.load_state_dict(state),
        }[deed]()
    kill(collector, 0)
    batches = iter(collector)
    delivered += [next(batches) for _ in range(3)]
    collector.shutdown()
    assert all(len(batch) == 100 for batch in delivered)
    frames: Any = torch.cat(delivered)
    assert_frames_whole(frames)
    assert_trajectories_in_one_piece(frames)


# -- no env takes a step that is not stored --------------------------------------------------------------------------


def test_frames_that_come_back_to_the_budget_leave_no_hole(tmp_path: Path) -> None:
    """Two envs share a worker, and one frame is left for them; then another worker is stopped before its end."""
    gate = tmp_path / "gate"
    rb = buffer()
    envs = [*numbered_envs(2), lambda: make_numbered(2, gate=str(gate), free_ticks=10)]
    collector = MultiCollector(envs, frames_per_batch=30, total_frames=385, num_workers=2, replay_buffer=rb, sync=False)
    collector.start()

    def has_done_all_it_can() -> bool:
        with collector.lock:
            return collector.stats()["frames"] >= 256 and collector._workers.handles[0].due == 0

    assert wait_until(has_done_all_it_can, 30)  # two orders of 64 steps
    assert wait_until(lambda: frames_of(collector, 1)() >= 8, 30)
    with opened_when_asked(gate, collector, 1), collector.pause():
        assert rb.write_count < 385
    finish(collector)
    assert rb.write_count == len(rb) == 385
    assert_tracks_in_one_piece(rb, 3)


def chooses() -> TensorDictModule:
    """A policy whose frames are known: what else it writes is zero in random ones."""

    def choose(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lead = observation.shape[:-1]
        return torch.tensor([0, 1]).expand(*lead, 2).clone(), torch.ones(*lead, 1)

    return TensorDictModule(choose, in_keys=["observation"], out_keys=["action", "chosen"])


# -- frames are counted as they are committed ------------------------------------------------------------------------


def keep_shape(batch: Any) -> Any:
    return batch.set("double", batch["next", "reward"] * 2)


def halve(batch: Any) -> Any:
    """Every frame of an even tick: how many of a batch, depends."""
    return batch[batch["next", "reward"].reshape(-1) % 2 == 0]


@pytest.mark.parametrize("postproc", [None, keep_shape])
def test_orders_whose_end_was_not_heard_of_yet_are_counted_once_when_their_worker_dies(postproc: Any) -> None:
    rb = buffer()
    collector = MultiCollector(
        numbered_envs(2),
        frames_per_batch=30,
        total_frames=1000,
        num_workers=1,
        replay_buffer=rb,
        sync=False,
        postproc=postproc,
        restart_workers=3,
    )
    with collector.lock:  # its owner does not look
        collector.start()
        collector._buffer_fill.make_requests()  # type: ignore[union-attr]
        assert wait_until(lambda: rb.write_count >= 256, 30)  # both orders
        kill(collector, 0)
    finish(collector)
    assert rb.write_count == len(rb) == collector.stats()["frames"] == 1000
    assert_tracks_in_one_piece(rb, 2)


@pytest.mark.parametrize("random_frames", [0, 100])
def test_a_worker_that_dies_between_the_envs_of_an_order_makes_no_frame_too_many(
    tmp_path: Path, random_frames: int
) -> None:
    there, gate = tmp_path / "there", tmp_path / "gate"

    def wait_in_the_second_env(batch: Any) -> Any:
        if batch["observation"][0, ENV] == 1 and len(batch) > 30 and not gate.exists():
            there.touch()
            wait_until(gate.exists, 60)
        return batch.set("double", batch["next", "reward"] * 2)

    rb = buffer()
    collector = MultiCollector(
        numbered_envs(3),
        chooses(),
        frames_per_batch=30,
        total_frames=1000,
        num_workers=1,
        replay_buffer=rb,
        sync=False,
        postproc=wait_in_the_second_env,
        init_random_frames=random_frames,
        restart_workers=3,
    )
    collector.start()
    assert wait_until(there.exists, 30)
    kill(collector, 0)
    gate.touch()
    finish(collector)
    assert rb.write_count == len(rb) == collector.stats()["frames"] == 1000
    assert_tracks_in_one_piece(rb, 3)
    assert int((rb[:]["chosen"] == 0).sum()) == random_frames


# -- an episode that does not go on is marked where it is stored -----------------------------------------------------

DEEDS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda collector: collector.reset(),
    "set_seed": lambda collector: collector.set_seed(7),
    "load_state_dict": lambda collector: collector.load_state_dict(collector.state_dict()),
    "reset of one": lambda collector: (
        collector.reset([False, True, False])
        if isinstance(collector, MultiCollector)
        else collector.reset(torch.tensor([False, True, False]))
    ),
    "kill": lambda collector: kill(collector, 0),
}


def filling(kind: str, rb: Any, **kwargs: Any) -> Any:
    envs = numbered_envs(3, longest=200)
    kwargs = {"frames_per_batch": 30, "replay_buffer": rb, **kwargs}
    if kind == "single":
        return Collector(SerialEnv(3, envs), **kwargs)
    if kind == "batched":
        return AsyncBatchedCollector(envs, **{"policy": RandomPolicy(), "num_workers": 2, **kwargs})
    return MultiCollector(envs, sync=kind == "sync", **{"num_workers": 2, "restart_workers": 9, **kwargs})


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("kind", ["single", "sync", "async", "batched"])
def test_cut_episodes_are_marked_while_iterating(kind: str, storage: Any) -> None:
    rb = TensorDictReplayBuffer(storage=storage(10_000))
    collector = filling(kind, rb)
    for deed in DEEDS:
        if deed != "kill" or kind in ("sync", "async"):
            batches = iter(collector)
            for _ in range(4):
                next(batches)
            DEEDS[deed](collector)
    batches = iter(collector)
    for _ in range(8):
        next(batches)
    collector.shutdown()
    assert_tracks_in_one_piece(rb, 3)


@pytest.mark.parametrize("through_the_owner", [True, False])
@pytest.mark.parametrize("kind", ["single", "sync", "async", "batched"])
def test_cut_episodes_are_marked_in_the_background(kind: str, through_the_owner: bool) -> None:
    rb = buffer()
    hook = {"post_collect_hook": lambda _: None} if through_the_owner else {}
    collector = filling(kind, rb, **hook)
    collector.start()
    for deed in DEEDS:
        if deed != "kill" or kind in ("sync", "async"):
            before = rb.write_count
            assert wait_until(lambda: rb.write_count > before + 100, 30)  # noqa: B023
            with collector.pause():
                DEEDS[deed](collector)
    before = rb.write_count
    assert wait_until(lambda: rb.write_count > before + 500, 30)
    collector.async_shutdown()
    assert_tracks_in_one_piece(rb, 3)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_iterating_first_and_then_in_the_background(kind: str) -> None:
    rb = buffer()
    collector = filling(kind, rb, total_frames=1001)
    batches = iter(collector)
    for _ in range(3):
        next(batches)
    collector.start()
    finish(collector)
    assert rb.write_count == 1001
    assert_tracks_in_one_piece(rb, 3)


# -- steps that nobody got -------------------------------------------------------------------------------------------


class Interruptor:
    is_stopped = False

    def collection_stopped(self) -> bool:
        return self.is_stopped


def in_order_of_envs(batches: list[Any]) -> Any:
    return torch.cat([batch.reshape(-1) for batch in batches])


def test_envs_that_were_ahead_when_a_sync_batch_was_stopped_have_no_hole(tmp_path: Path) -> None:
    gate, stop = tmp_path / "gate", Interruptor()
    envs = [*numbered_envs(1, longest=1000), lambda: make_numbered(1, longest=1000, gate=str(gate), free_ticks=20)]
    collector = MultiCollector(envs, frames_per_batch=200, num_workers=2, sync=True, interruptor=stop)

    def stop_when_one_is_done() -> None:
        wait_until(lambda: frames_of(collector, 0)() >= 100 and frames_of(collector, 1)() >= 18, 30)
        stop.is_stopped = True
        wait_until(lambda: collector._workers.handles[1].page.waiting[0] == 1, 30)
        gate.touch()

    stopper = threading.Thread(target=stop_when_one_is_done)
    stopper.start()
    batches = iter(collector)
    delivered = [next(batches)]
    stopper.join()
    stop.is_stopped = False
    delivered += [next(batches), next(batches)]
    collector.shutdown()
    assert delivered[0].shape[1] < 100
    assert_frames_whole(in_order_of_envs(delivered))
    assert_trajectories_in_one_piece(in_order_of_envs(delivered))
    assert delivered[0]["next", "truncated"][0, -1]  # its episode did not go on
    assert not delivered[0]["next", "done"][1].any()


def test_an_async_order_of_which_some_envs_deliver_less_leaves_no_hole(tmp_path: Path) -> None:
    """The end of ``total_frames``, and then an interruptor gives frames back to it."""
    gates, stop = [tmp_path / "2", tmp_path / "3"], Interruptor()
    envs = numbered_envs(2, longest=1000)
    envs += [partial(make_numbered, int(gate.name), longest=1000, gate=str(gate), free_ticks=10) for gate in gates]
    # Orders, in turns: 40 and 40 frames, 40, 40; then 40 and 30, which is all there is.
    collector = MultiCollector(envs, frames_per_batch=40, total_frames=230, num_workers=3, sync=False, interruptor=stop)
    batches = iter(collector)
    delivered = [next(batches) for _ in range(4)]  # what the first worker has
    assert sum(batch.numel() for batch in delivered) == 150
    assert wait_until(lambda: min(frames_of(collector, 1)(), frames_of(collector, 2)()) >= 8, 30)
    stop.is_stopped = True
    with opened_when_asked(gates[0], collector, 1), opened_when_asked(gates[1], collector, 2):
        delivered.append(next(batches))
    delivered.append(next(batches))
    stop.is_stopped = False
    delivered += list(batches)
    assert sum(batch.numel() for batch in delivered) == 230
    assert_frames_whole(in_order_of_envs(delivered))
    assert_trajectories_in_one_piece(in_order_of_envs(delivered))


def test_frames_that_were_dropped_for_their_age_are_the_end_of_a_trajectory() -> None:
    rb = buffer()
    collector = MultiAsyncCollector(
        numbered_envs(2, longest=1000),
        chooses(),
        frames_per_batch=20,
        num_workers=1,
        max_policy_lag=0,
        on_policy_lag="drop",
        replay_buffer=rb,
    )
    batches = iter(collector)
    for round_ in range(6):
        next(batches)
        # Both orders of the worker are there, or under way, with the weights of before.
        assert wait_until(lambda: frames_of(collector, 0)() >= 40 * (round_ + 2), 30)  # noqa: B023
        collector.increment_version()
        collector.send_weights({})
    collector.shutdown()
    assert collector.stats()["dropped_frames"]
    assert_tracks_in_one_piece(rb, 2)


@pytest.mark.parametrize("kind", ["single", "batched"])
@pytest.mark.parametrize("by_episode", [False, True])
def test_a_rollout_in_between_leaves_no_hole_in_what_is_stored(kind: str, by_episode: bool) -> None:
    rb = buffer()
    collector = filling(kind, rb, **({"trajs_per_batch": 2} if by_episode else {}))
    batches = iter(collector)
    for _ in range(3):
        next(batches)
        assert collector.rollout().numel() == 30
    next(batches)
    collector.shutdown()
    assert_frames_whole(rb[:])
    assert_trajectories_in_one_piece(rb[:])


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_node_that_was_asked_for_some_envs_only_leaves_no_hole(kind: type) -> None:
    """The end of ``total_frames``, and then a node is lost, and its frames are others' to collect."""
    envs = numbered_envs(3, longest=1000)
    factories = envs if kind is MultiSyncCollector else [lambda: SerialEnv(3, envs)]
    node = Node(NodePlan(0, kind, factories, None, None, None, 30, {}, IdSpace.of_node(0, 1), base_seed=0))
    orders = [Order(1, 10), Order(2, 1, num_envs=2), Order(3, 10), Order(4, 3), Order(5, 10)]
    delivered = [node._collect(order)[0] for order in orders]
    node.close()
    assert [batch.numel() for batch in delivered] == [30, 2, 30, 9, 30]
    assert_frames_whole(in_order_of_envs(delivered))
    assert_trajectories_in_one_piece(in_order_of_envs(delivered))


# -- each env has its track ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"cat_results": -1}, {"preemptive_threshold": 0.5}])
def test_every_env_has_its_track_whatever_shape_batches_have(arguments: dict[str, Any]) -> None:
    rb = buffer()
    collector = MultiCollector(
        numbered_envs(3),
        frames_per_batch=30,
        total_frames=1001,
        num_workers=2,
        sync=True,
        replay_buffer=rb,
        **arguments,
    )
    assert set(collector) == {None}
    assert rb.write_count == len(rb) == 1001
    assert rb.storage.tracks.num_tracks == 3
    frames = rb[:]["observation"]
    assert torch.equal(frames[:, ENV], frames[:, ENV].sort().values)
    assert_tracks_in_one_piece(rb, 3)


def test_a_postproc_that_keeps_nothing_of_a_batch() -> None:
    """The last order is one step of each of two envs, of which it keeps some, or none."""
    rb = buffer()
    collector = MultiCollector(
        numbered_envs(5),
        frames_per_batch=20,
        total_frames=642,
        num_workers=1,
        replay_buffer=rb,
        sync=False,
        postproc=halve,
    )
    collector.start()
    finish(collector)
    assert collector.stats()["frames"] == 642
    assert rb.storage.tracks.num_tracks == 1
    rewards = rb[:]["next", "reward"]
    assert len(rewards) == rb.write_count > 300
    assert (rewards % 2 == 0).all()


def test_a_batch_of_many_envs_that_was_stopped_before_its_first_frame() -> None:
    rb = buffer()
    collector = filling("batched", rb)
    collector._rollout.control.ask_to_stop()
    next(iter(collector))
    assert not len(rb)
    collector._rollout.control.go_on()
    next(iter(collector))
    collector._rollout.control.ask_to_stop()
    next(iter(collector))
    collector.shutdown()
    assert len(rb) >= 30
    assert_tracks_in_one_piece(rb, 3)
