"""An env raises while a replay buffer is filled: every step that was complete before is in it when that is said."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos_env import ENV, STEP, TICK, SignedEnv, signing_policy
from chaos_oracle import Frames, check_frames, check_story
from leaks import wait_until, warned
from swath.collectors import AsyncBatchedCollector, Collector, MultiCollector
from swath.data import LazyTensorStorage, TensorDictReplayBuffer
from swath.envs import GymWrapper, SerialEnv
from swath.errors import BackgroundFailed, notes_of
from swath.workers import pool

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:the envs wait rather than compute")]
#: So many steps env 0 takes; then it waits until env 1 has taken as many as ``after`` says, and raises.
LAST = 40


class Breaks(SignedEnv):
    """``folder`` is where envs tell of one another, and env 0 of its first life."""

    def __init__(self, number: int, folder: Path, after: int = 0, longest: int = 10**9) -> None:
        super().__init__(number, longest, 0.0, None)
        self.folder, self.after, self.steps = folder, after, 0

    def step(self, action: Any) -> Any:
        if self.number == 1 and 0 < self.after <= self.steps:
            (self.folder / "far").touch()
            self.pause_s = 0.01
        if self.number == 0 and self.steps == LAST and not (self.folder / "broken").exists():
            assert wait_until(lambda: not self.after or (self.folder / "far").exists(), 60)
            (self.folder / "broken").touch()
            raise ValueError("the gearbox is broken")
        self.steps += 1
        return super().step(action)


def make(*args: Any, **kwargs: Any) -> GymWrapper:
    return GymWrapper(Breaks(*args, **kwargs))


def make_pair(first: int, folder: Path) -> SerialEnv:
    return SerialEnv(2, [partial(make, number, folder) for number in (first, first + 1)])


def buffer(size: int = 20_000) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=16)


def collecting(kind: str, envs: list[Any], rb: Any, **kwargs: Any) -> Any:
    kwargs = {"frames_per_batch": 60, "replay_buffer": rb, "track_policy_version": True} | kwargs
    policy = signing_policy(0, 2)
    if "hooked" in kind:  # batches pass through the trainer's process
        kwargs["post_collect_hook"] = lambda batch: None
    if kind == "single":
        return Collector(SerialEnv(len(envs), envs), policy, **kwargs)
    if kind == "batched":
        return AsyncBatchedCollector(envs, policy, **{"num_workers": 2, **kwargs})
    return MultiCollector(envs, policy, sync="async" not in kind, **{"num_workers": 2, **kwargs})


def failed_in_the_background(collector: Any) -> BaseException:
    with warned("the gearbox is broken"):
        collector.start()
        assert wait_until(lambda: not collector.is_running(), 60)
    with pytest.raises(BackgroundFailed) as caught:
        collector.async_shutdown()
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


def frames_in(rb: Any, collector: Any, num_cuts: int = 0) -> Frames:
    assert len(rb) == rb.write_count == collector.stats()["frames"]
    frames = Frames.of(rb[:])
    check_frames(frames)
    check_story(frames, num_cuts=num_cuts, num_kills=0)
    return frames


def of_env(frames: Frames, env: int) -> Frames:
    return frames[frames.root[:, ENV] == env]


@pytest.mark.parametrize("kind", ["single", "batched", "sync", "async", "hooked sync", "hooked async"])
def test_what_was_complete_is_in_the_buffer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SECONDS_TO_SALVAGE", 60.0)  # however busy the machine is
    # In step with env 0, or as far as a batch (of the hooked ones) allows, or in the middle of an order.
    after = {"single": 0, "hooked sync": 59}.get(kind, 10)
    rb = buffer()
    collector = collecting(kind, [partial(make, number, tmp_path, after) for number in range(2)], rb)
    failed_in_the_background(collector)
    frames = frames_in(rb, collector)
    assert np.all(np.diff(frames.root[:, ENV]) >= 0)  # each in its own track
    assert of_env(frames, 0).next[:, STEP].tolist() == list(range(1, LAST + 1))
    others = of_env(frames, 1)
    assert others.next[:, STEP].tolist() == list(range(1, len(others) + 1))
    assert len(others) >= min(after, LAST)
    assert collector.partial_batch is None  # it is where it belongs


def test_while_one_iterates_too(tmp_path: Path) -> None:
    rb = buffer()
    collector = collecting("single", [partial(make, number, tmp_path) for number in range(2)], rb)
    with pytest.raises(ValueError, match="the gearbox is broken"):
        list(collector)
    frames = frames_in(rb, collector)
    assert [len(of_env(frames, env)) for env in range(2)] == [LAST, LAST]


@pytest.mark.parametrize("kind", ["single", "batched", "async", "hooked async"])
def test_of_episodes_the_whole_ones(kind: str, tmp_path: Path) -> None:
    rb = buffer()
    envs = [partial(make, number, tmp_path, longest=3) for number in range(2)]
    # (Workers that write by themselves try out first what is stored, with a batch that is thrown away.)
    frames = 8 if kind == "async" else 60
    collector = collecting(kind, envs, rb, frames_per_batch=frames, trajs_per_batch=1, traj_format="cat")
    failed_in_the_background(collector)
    own = of_env(Frames.of(rb[:]), 0)
    assert own.root[0, STEP] == 0
    assert bool(own.done[-1])
    assert LAST - 3 < len(own) + 8 * (kind == "async") <= LAST
    check_story(own, num_cuts=0, num_kills=0)


@pytest.mark.parametrize("kind", ["single", "async"])
def test_what_cannot_be_stored_is_said(kind: str, tmp_path: Path) -> None:
    def whole_batches(batch: Any) -> Any:
        if batch.shape[-1] not in (12, 64):  # a batch of a Collector, or the one that a worker tries out, and an order
            raise RuntimeError("too short")
        return batch

    envs = [partial(make, number, tmp_path) for number in range(2)]
    frames = 24 if kind == "single" else 12
    error = failed_in_the_background(collecting(kind, envs, buffer(), frames_per_batch=frames, postproc=whole_batches))
    assert isinstance(error, ValueError)
    assert "could not be stored: RuntimeError: too short" in "\n".join(notes_of(error))


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_worker_that_is_started_again_goes_on_behind_it(lanes: int, tmp_path: Path) -> None:
    """Totals are exact, also of random frames; with two lanes, one has taken all its steps, the other some or none."""
    envs = [partial(make, number, tmp_path) for number in range(4)]
    if lanes == 2:
        envs = [partial(make_pair, first, tmp_path) for first in (2, 0)]
    rb = buffer()
    options: dict[str, Any] = {"num_workers": 1, "restart_workers": 1, "total_frames": 1500, "init_random_frames": 200}
    collector = collecting("async", envs, rb, **options)
    with warned("the gearbox is broken"):
        collector.start()
        assert wait_until(lambda: not collector.is_running(), 60)
    collector.async_shutdown()
    frames = frames_in(rb, collector, num_cuts=1)
    assert len(frames) == 1500
    assert int(frames.is_random.sum()) == 200
    own = of_env(frames, 0)
    cut = np.flatnonzero(own.truncated)
    assert cut.tolist() == [LAST - 1]
    assert own.next[cut, TICK].tolist() == [LAST + 1]
