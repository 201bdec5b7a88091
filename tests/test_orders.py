"""Orders that are stopped, given up or taken over: what is delivered was made by an env, in one piece, once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
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
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiCollector
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
    page = collector._fleet.members[worker].page

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
            return collector.stats()["frames"] >= 256 and collector._fleet.members[0].due == 0

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
        collector._free_run._give_orders()
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
