"""Collectors that fill a replay buffer: while they are iterated over, and in the background."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from counting import make_counting
from leaks import children, wait_until, warned
from numbered import (
    ENV,
    EPISODE,
    TICK,
    assert_frames_whole,
    assert_nothing_lost_or_doubled,
    make_numbered,
    numbered_envs,
)
from policies_for_tests import deterministic
from slow_envs import Fails
from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplesPerInsert,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from swath.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv
from swath.errors import BackgroundFailed, CollectorClosed, WorkerDied

pytestmark = pytest.mark.processes
KINDS = ["single", "sync", "async", "batched"]
STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]
NUM_ENVS = 3


def buffer(size: int = 100_000, storage: Any = LazyTensorStorage, **kwargs: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(size), **{"batch_size": 16, **kwargs})


def collecting(kind: str, rb: Any, envs: list[Any] | None = None, **kwargs: Any) -> Any:
    envs = numbered_envs(NUM_ENVS) if envs is None else envs
    kwargs = {"frames_per_batch": 30, "replay_buffer": rb, **kwargs}
    if kind == "single":
        return Collector(SerialEnv(len(envs), envs), **kwargs)
    if kind == "batched":
        from swath.modules import RandomPolicy

        return AsyncBatchedCollector(envs, **{"policy": RandomPolicy(), "num_workers": 2, **kwargs})
    return MultiCollector(envs, sync=kind == "sync", **{"num_workers": 2, **kwargs})


def wait_for_frames(rb: Any, count: int) -> None:
    assert wait_until(lambda: rb.write_count >= count, 60), rb


def finish(collector: Any) -> None:
    """Wait until it has collected all that it was to."""
    assert wait_until(lambda: not collector.is_running(), 60)
    collector.async_shutdown()


# -- everything arrives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_is_there_once(kind: str, how: str, storage: Any) -> None:
    rb = buffer(storage=storage)
    collector = collecting(kind, rb, total_frames=1001)  # not a multiple of anything
    if how == "iterated":
        batches = list(collector)
        assert set(batches) == {None}
        assert len(batches) >= 1001 // 30
    else:
        collector.start()
        collector.start()  # harmless
        finish(collector)
    assert (len(rb), rb.write_count) == (1001, 1001)
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)
    sample = rb.sample(64)
    assert_frames_whole(sample)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_buffer_keeps_the_newest_of_each_env(kind: str) -> None:
    rb = buffer(300)
    collector = collecting(kind, rb, total_frames=3000)
    collector.start()
    finish(collector)
    written = rb.storage.tracks.committed.tolist()  # who is first, is up to the machine, but in lock-step
    assert rb.write_count == sum(written) == 3000
    assert kind != "single" or written == [1000] * 3
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)
    frames = rb[:]["observation"]
    ticks = [frames[:, TICK][frames[:, ENV] == env] for env in range(NUM_ENVS)]
    assert [len(each) for each in ticks] == [min(100, count) for count in written]
    newest = rb[:]["next", "observation"][:, TICK]
    # Ticks count resets, too: an env that has written n frames has ticked n times, and once for each episode.
    assert all(newest[frames[:, ENV] == env].max() > written[env] for env in range(NUM_ENVS))


def vector_env(mode: str) -> Any:
    inner = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=gymnasium.vector.AutoresetMode[mode]
    )
    return GymWrapper(inner)


ENV_KINDS = {
    "gym": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(2, functools.partial(GymEnv, "CartPole-v1")),
    "parallel": lambda: ParallelEnv(2, functools.partial(GymEnv, "CartPole-v1")),
    "vector, next step": functools.partial(vector_env, "NEXT_STEP"),
    "vector, same step": functools.partial(vector_env, "SAME_STEP"),
}


def every_pair(first: list[Any], second: list[Any], third: list[Any]) -> list[Any]:
    """All triples; those that are not needed to have every pair of values are slow. (The third is no shorter.)"""
    triples = itertools.product(enumerate(first), enumerate(second), enumerate(third))
    return [
        pytest.param(x, y, z, marks=() if (i + j) % len(third) == k else pytest.mark.slow)
        for (i, x), (j, y), (k, z) in triples
    ]


@pytest.mark.parametrize(("kind", "env", "storage"), every_pair(["single", "sync", "async"], list(ENV_KINDS), STORAGES))
def test_every_collector_env_and_storage(kind: str, env: str, storage: Any) -> None:
    rb = buffer(storage=storage)
    make = ENV_KINDS[env]
    kwargs: dict[str, Any] = {"frames_per_batch": 40, "total_frames": 160, "replay_buffer": rb}
    if kind == "single":
        collector: Any = Collector(make, **kwargs)
    else:
        collector = MultiCollector([make] * 2, sync=kind == "sync", num_workers=2, **kwargs)
    collector.start()
    finish(collector)
    assert rb.write_count == len(rb) == 160
    frames = rb[:]
    assert frames["observation"].shape == (160, 4)
    ids, done = frames["collector", "traj_ids"], frames["next", "done"].reshape(-1)
    num_tracks = {"single": 1, "sync": 2, "async": 2}[kind] * (1 if env == "gym" else 2)
    # Within a track, "next" is the following root but at an episode's end.
    together = torch.ones(159, dtype=torch.bool)
    together[[i for i in range(159) if i + 1 in torch.tensor(_sizes(rb)).cumsum(0).tolist()]] = False
    assert len(_sizes(rb)) == num_tracks
    goes_on = together & ~done[:-1]
    assert torch.equal(frames["next", "observation"][:-1][goes_on], frames["observation"][1:][goes_on])
    assert torch.equal((ids[1:] != ids[:-1])[together], done[:-1][together])


def _sizes(rb: Any) -> list[int]:
    return rb.storage.tracks.window().sizes.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_random_frames_are_counted_in_frames(kind: str) -> None:
    class Chooses(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0, 1]).expand(*observation.shape[:-1], 2).clone()

    rb = buffer()
    envs = [functools.partial(make_numbered, number) for number in range(NUM_ENVS)]
    collector = collecting(kind, rb, envs, policy=Chooses(), init_random_frames=500, total_frames=1000)
    collector.start()
    finish(collector)
    chosen = rb[:]["action"][:, 1] == 1
    # Half of 500 random ones are not what the policy chooses.
    assert 180 < int((~chosen).sum()) < 320


@pytest.mark.parametrize("kind", ["sync", "async", "batched", "single"])
def test_policy_versions_are_kept(kind: str) -> None:
    rb = buffer()
    envs = [make_counting] * 2
    policy = deterministic()
    collector = collecting(kind, rb, envs, policy=policy, track_policy_version=True)
    collector.start()
    for _ in range(3):
        before = rb.write_count
        wait_for_frames(rb, before + 200)
        collector.update_policy_weights_()
    wait_for_frames(rb, rb.write_count + 400)
    collector.async_shutdown()
    versions = rb[:]["policy_version"]
    assert set(versions.tolist()) == {0, 1, 2, 3}
    for start, size in zip([0, *torch.tensor(_sizes(rb)).cumsum(0).tolist()], _sizes(rb), strict=False):
        own = versions[start : start + size]
        assert (own[1:] >= own[:-1]).all()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_worker_and_env_numbers(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb, track_worker=True, track_env=True, total_frames=600)
    collector.start()
    finish(collector)
    frames = rb[:]
    assert torch.equal(frames["collector", "env"], frames["observation"][:, ENV])
    assert frames["collector", "worker"].tolist() == [[0, 0, 1][env] for env in frames["collector", "env"].tolist()]


# -- what is done to batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize("kind", KINDS)
def test_postproc_and_hooks(kind: str, how: str) -> None:
    seen: list[Any] = []
    rb = buffer()
    collector = collecting(
        kind,
        rb,
        total_frames=300,
        postproc=lambda batch: batch.set("double", batch["next", "reward"] * 2),
        post_collect_hook=lambda batch: seen.append(batch.numel()),
    )
    if how == "iterated":
        list(collector)
    else:
        collector.start()
        finish(collector)
    assert sum(seen) == len(rb) == 300
    frames = rb[:]
    assert torch.equal(frames["double"], frames["next", "reward"] * 2)
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)


@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize("kind", KINDS)
def test_postproc_may_change_the_shape(kind: str, how: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb, total_frames=300, postproc=lambda batch: batch.reshape(-1)[::2])
    if how == "iterated":
        list(collector)
    else:
        collector.start()
        finish(collector)
    # An odd batch at the end, of one env or of several, has one more.
    assert 150 <= len(rb) <= 150 + NUM_ENVS
    assert_frames_whole(rb[:])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_workers_process_what_they_write(kind: str) -> None:
    """Each env's own batch, with time last, where it was collected."""

    def process(batch: Any) -> Any:
        assert batch.ndim == 1
        return batch.set("pid", torch.full(batch.shape, os.getpid()))

    rb = buffer()
    collector = collecting(kind, rb, total_frames=1000, postproc=process, set_truncated=True, check_finite=True)
    collector.start()
    pids = {line["pid"] for line in collector.stats()["workers"]}
    finish(collector)
    frames = rb[:]
    assert len(frames) == 1000
    assert set(frames["pid"].tolist()) == pids
    assert_frames_whole(frames)
    # The first batch is of 64 steps (what is left over at the end may be less).
    assert frames["next", "truncated"].reshape(-1)[63]
    assert frames["next", "done"].reshape(-1)[63]


def test_a_postproc_that_cannot_be_sent_or_fails_is_named() -> None:
    lock = threading.Lock()
    rb = buffer()
    collector = collecting("async", rb, postproc=lambda batch: batch if lock else None)
    with pytest.raises(TypeError, match="postproc cannot be sent"):
        collector.start()
    collector.shutdown()
    collector = collecting("async", buffer(), postproc=lambda batch: 3)
    with pytest.raises(TypeError, match="must return a TensorDict"):
        collector.start()
    collector.shutdown()
    collector = collecting("async", buffer(), postproc=lambda batch: batch["missing"])
    with pytest.raises(KeyError, match="missing"):
        collector.start()
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:.*started again")
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_whole_episodes_when_workers_are_killed(tmp_path: Path, kind: str) -> None:
    rb = killed_at_random(tmp_path / "gate", kind, LazyTensorStorage, 20_000, trajs_per_batch=1)
    frames = rb[:]
    assert_frames_whole(frames)
    ids, done = frames["collector", "traj_ids"], frames["next", "done"].reshape(-1)
    assert torch.equal(ids[1:] != ids[:-1], done[:-1])
    assert len(ids.unique()) == int(done.sum())
    first = torch.cat([torch.ones(1, dtype=torch.bool), done[:-1]])
    ticks = frames["observation"][:, TICK]
    assert torch.equal(ticks[1:][~first[1:]], ticks[:-1][~first[1:]] + 1)


@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_episodes_are_written_flat(kind: str, how: str) -> None:
    rb = buffer(sampler=SliceSampler(num_slices=4, strict_length=False))
    collector = collecting(kind, rb, total_frames=2000, trajs_per_batch=4)
    if how == "iterated":
        list(collector)
    else:
        collector.start()
        finish(collector)
    frames = rb[:]
    assert 1500 < len(frames) <= 2000
    ids, done = frames["collector", "traj_ids"], frames["next", "done"].reshape(-1)
    assert torch.equal(ids[1:] != ids[:-1], done[:-1])
    assert done[-1]
    assert len(ids.unique()) == int(done.sum())
    first = torch.cat([torch.ones(1, dtype=torch.bool), done[:-1]])
    assert_frames_whole(frames)
    ticks = frames["observation"][:, TICK]
    assert torch.equal(ticks[1:][~first[1:]], ticks[:-1][~first[1:]] + 1)


def test_split_trajectories_are_written_without_padding() -> None:
    rb = buffer()
    list(collecting("single", rb, total_frames=300, split_trajs=True))
    assert len(rb) == 300
    assert_frames_whole(rb[:])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_highest_values_from_a_collector(kind: str) -> None:
    rb = buffer(50, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
    collector = collecting(kind, rb, total_frames=300)
    collector.start()
    finish(collector)
    rewards = rb[:]["next", "reward"].reshape(-1)
    assert len(rewards) == 50
    assert rewards.min() >= 70  # of about 110 ticks of each of 3 envs


def test_extend_buffer_is_for_whole_batches() -> None:
    with pytest.raises(TypeError, match="extend_buffer=False"):
        collecting("single", buffer(), extend_buffer=False, postproc=lambda batch: batch)
    with pytest.raises(TypeError, match="extend"):
        collecting("single", object())


# -- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3000, 100_000])
@pytest.mark.parametrize("at_least", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_slices_while_workers_write(kind: str, size: int, at_least: int) -> None:
    rb = buffer(size, sampler=SliceSampler(slice_len=6))
    collector = collecting(kind, rb)
    collector.start()
    num_slices = 0
    while num_slices < at_least or rb.write_count < min(2 * size, 12_000):
        sample = rb.sample(600, wait=True, timeout=30)
        assert_frames_whole(sample)
        rows = sample.reshape(100, 6)
        ids, ticks = rows["collector", "traj_ids"], rows["observation"][:, :, TICK]
        assert (ids == ids[:, :1]).all()
        assert (ticks == ticks[:, :1] + torch.arange(6)).all()
        num_slices += 100
    collector.async_shutdown()


# -- pausing and stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_pause(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb)
    with pytest.raises(RuntimeError, match=r"start\(\) first"), collector.pause():
        pass
    collector.start()
    assert collector.is_running()
    assert collector.stats()["running"]
    for _ in range(3):
        wait_for_frames(rb, rb.write_count + 60)
        with collector.pause():
            before = rb.write_count
            time.sleep(0.2)  # the time in which nothing must happen
            assert rb.write_count == before
            assert collector.is_running()
            if kind in ("sync", "async"):
                assert len(collector.get_distant_attr("env.batch_size")) == 2
            with collector.pause():
                assert rb.write_count == before
            assert rb.write_count == before
            rb.extend(rb[:5])  # nobody else writes now
    wait_for_frames(rb, rb.write_count + 60)
    collector.async_shutdown()
    assert not collector.is_running()
    before = rb.write_count
    with pytest.raises(CollectorClosed):
        collector.start()
    assert rb.write_count == before


@pytest.mark.parametrize("kind", KINDS)
def test_pause_after_the_end_and_total_frames_exact(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb, total_frames=997)
    collector.start()
    while collector.is_running():
        with collector.pause():
            before = rb.write_count
        assert wait_until(lambda: rb.write_count > before or not collector.is_running(), 30)  # noqa: B023
    with collector.pause():
        assert rb.write_count == 997
    assert collector.stats()["frames"] == 997
    collector.start()  # nothing is left to do
    assert not collector.is_running()
    collector.shutdown()
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)


@pytest.mark.parametrize("ending", ["shutdown", "async_shutdown", "with", "deleted"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_end(kind: str, ending: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb)
    collector.start()
    wait_for_frames(rb, 100)
    if ending == "with":
        with collector:
            pass
    elif ending == "deleted":
        collector.shutdown()
        del collector
        return
    else:
        getattr(collector, ending)()
        getattr(collector, ending)()
    assert not collector.is_running()
    before = rb.write_count
    assert len(rb.sample(10)) == 10
    assert rb.write_count == before
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)


def test_a_pause_by_the_thread_that_collects_is_refused() -> None:
    """It would wait for itself, for ever."""

    def look(batch: Any) -> None:
        with collector.pause():
            pytest.fail("it is collecting")

    env = GymEnv("CartPole-v1")
    collector = Collector(env, frames_per_batch=10, replay_buffer=buffer(), post_collect_hook=look)
    with warned("the thread that collects"):
        collector.start()
        assert wait_until(lambda: not collector.is_running(), 60)
    with pytest.raises(BackgroundFailed, match="would wait for itself"):
        collector.async_shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_what_must_not_be_done_meanwhile(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb)
    collector.start()
    with pytest.raises(RuntimeError, match="sample its replay buffer"):
        iter(collector)
    with pytest.raises(RuntimeError, match="pause"):
        collector.set_seed(0)
    with pytest.raises(RuntimeError, match="pause"):
        collector.reset()
    with pytest.raises(RuntimeError, match="another collector"):
        collecting("single", rb).start()
    wait_for_frames(rb, 10)
    if kind in ("sync", "async"):
        with pytest.raises(RuntimeError, match="workers are writing"):
            rb.extend(rb[:1])
    with collector.pause():
        collector.reset()
        collector.set_seed(0)
    wait_for_frames(rb, rb.write_count + 100)
    collector.async_shutdown()
    assert_frames_whole(rb[:])


def test_start_needs_a_buffer() -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10)
    with pytest.raises(RuntimeError, match="replay_buffer"):
        collector.start()
    collector.shutdown()


# -- when something breaks -------------------------------------------------------------------------------------------


def raise_value_error() -> None:
    raise ValueError("the env is broken")


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_reaches_the_trainer(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb, [functools.partial(Fails, 40, raise_value_error)] * 2)
    with warned("stopped collecting in the background: ValueError"):
        collector.start()
        with pytest.raises(BackgroundFailed, match="ValueError") as caught:
            rb.sample(100_000, wait=True, timeout=60)  # it would never be enough
    assert isinstance(caught.value.__cause__, ValueError)
    for call in (collector.update_policy_weights_, lambda: iter(collector), collector.start, collector.state_dict):
        with pytest.raises(BackgroundFailed):
            call()
    with pytest.raises(BackgroundFailed):
        collector.async_shutdown()
    collector.shutdown()
    assert not collector.is_running()


@pytest.mark.parametrize("limiter", [None, SamplesPerInsert(ratio=1, slack=1e9)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_gets_no_more_frames_says_so(kind: str, limiter: Any) -> None:
    """Though there is enough in it to go on with: at once, in ``stats()``, and to everybody who would wait."""
    rb = buffer()
    rb.rate_limiter = limiter
    collector = collecting(kind, rb, [functools.partial(Fails, 400, raise_value_error)] * 2)
    assert collector.stats()["failure"] is None
    with warned("has stopped collecting in the background: ValueError: the env is broken"):
        collector.start()
        assert wait_until(lambda: collector.stats()["failure"] is not None, 60)
    assert "ValueError: the env is broken" in collector.stats()["failure"]
    assert len(rb) > 8
    for _ in range(2):
        with pytest.raises(BackgroundFailed, match="ValueError"):
            rb.sample(8, wait=True)
    if limiter is None:
        assert rb.sample(8).numel() == 8  # what is there may be had
    # It ends, as a collector does that fails while one iterates over it.
    assert wait_until(lambda: not collector.is_running(), 30)
    with pytest.raises(BackgroundFailed):
        collector.start()


def test_another_collector_goes_on_where_one_failed() -> None:
    rb = buffer()
    failing = collecting("single", rb, [functools.partial(Fails, 40, raise_value_error)] * 2)
    with warned("ValueError"):
        failing.start()
        assert wait_until(lambda: not failing.is_running(), 30)
    with pytest.raises(BackgroundFailed):
        rb.sample(8, wait=True)
    collector = collecting("single", rb, [functools.partial(Fails, 10**9, raise_value_error)] * 2)
    collector.start()
    assert rb.sample(8, wait=True).numel() == 8
    collector.shutdown()
    failing.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_what_failed_is_known_before_the_collector_closes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks meanwhile is told of the failure, not that somebody has shut it down."""
    rb = buffer()
    collector = collecting(kind, rb, [functools.partial(Fails, 40, raise_value_error)] * 2)
    told: list[BaseException] = []
    close = collector._close

    def ask_and_close(close_env: bool) -> None:
        def ask() -> None:
            for call in (collector.update_policy_weights_, collector.start, lambda: iter(collector)):
                try:
                    call()
                except BaseException as error:
                    told.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        close(close_env)

    monkeypatch.setattr(collector, "_close", ask_and_close)
    with warned("ValueError"):
        collector.start()
        assert wait_until(lambda: not collector.is_running(), 60)
    assert [type(error) for error in told] == [BackgroundFailed] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_that_nobody_keeps_ends(kind: str) -> None:
    """It does not write on, out of reach; and its buffer says why there are no more frames."""
    rb = buffer()
    before = children()
    collector = collecting(kind, rb)
    collector.start()
    wait_for_frames(rb, 100)
    gc.disable()  # at once, not when somebody looks for cycles
    try:
        with warned("nobody had it any more"):
            del collector
            assert wait_until(lambda: not any(t.name.startswith("swath-") for t in threading.enumerate()), 30)
    finally:
        gc.enable()
    assert wait_until(lambda: children() <= before)
    written = rb.write_count
    with pytest.raises(BackgroundFailed, match="nobody had it any more"):
        rb.sample(8, wait=True)
    assert rb.write_count == written
    assert_frames_whole(rb[:])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_worker_wakes_who_waits(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb)
    collector.start()
    wait_for_frames(rb, 100)
    with warned("SIGKILL"):
        os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
        with pytest.raises(BackgroundFailed, match="SIGKILL") as caught:
            rb.sample(10_000_000, wait=True, timeout=60)
    assert isinstance(caught.value.__cause__, WorkerDied)
    collector.shutdown()
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)


def killed_at_random(
    gate: Path, kind: str, storage: Any, total_frames: int, num_kills: int = 6, num_envs: int = 4, **kwargs: Any
) -> Any:
    """Fill a buffer while workers are killed, all in good time, and a reader samples; what is in it then.

    However slow the killer is: until it is done, an env waits after ``free_ticks`` of each of its lives, so that there
    are never enough frames.
    """
    rb = buffer(2 * total_frames, storage)
    free_ticks = total_frames // (2 * (num_envs + num_kills))
    collector = collecting(
        kind,
        rb,
        numbered_envs(num_envs, gate=str(gate), free_ticks=free_ticks),
        num_workers=num_envs,
        total_frames=total_frames,
        frames_per_batch=200,
        restart_workers=1000,
        **kwargs,
    )
    killer = threading.Thread(target=kill_workers, args=(collector, num_kills, free_ticks, gate.touch))
    collector.start()
    killer.start()
    while collector.is_running():
        if len(rb) >= 256:
            assert_frames_whole(rb.sample(256))
    killer.join()
    collector.async_shutdown()
    assert sum(line["restarts"] for line in collector.stats()["workers"]) == num_kills
    return rb


def kill_workers(collector: Any, num_kills: int, free_ticks: int, when_done: Callable[[], None]) -> None:
    """Each in a life of its own, at any instant of it: before its first frame, in the middle, or waiting for more."""
    dice = random.Random(0)
    killed: set[int] = set()
    frames_before = [0] * collector.num_workers  # those of the life that is now

    def line(worker: int) -> dict[str, Any]:
        return collector.stats()["workers"][worker]

    try:
        for _ in range(num_kills):
            victim = dice.randrange(collector.num_workers)
            assert wait_until(lambda: line(victim)["alive"] and line(victim)["pid"] not in killed, 60)  # noqa: B023
            enough = frames_before[victim] + dice.randrange(free_ticks // 2)
            assert wait_until(lambda: line(victim)["frames"] >= enough, 60)  # noqa: B023
            last = line(victim)
            frames_before[victim] = last["frames"]
            killed.add(last["pid"])
            os.kill(last["pid"], signal.SIGKILL)
    finally:
        when_done()


@pytest.mark.filterwarnings("ignore:.*started again")
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_nothing_lost_doubled_or_torn_when_workers_are_killed(tmp_path: Path, kind: str, storage: Any) -> None:
    rb = killed_at_random(tmp_path / "gate", kind, storage, 24_001)
    assert rb.write_count == len(rb) == 24_001
    assert_nothing_lost_or_doubled(rb, 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.*started again")
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_million_frames_with_kills(tmp_path: Path, kind: str) -> None:
    rb = killed_at_random(tmp_path / "gate", kind, LazyTensorStorage, 1_000_000, num_kills=24)
    assert rb.write_count == len(rb) == 1_000_000
    assert_nothing_lost_or_doubled(rb, 4)


# -- the learner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_holds_back_whoever_is_ahead(kind: str) -> None:
    rate = SamplesPerInsert(ratio=4, min_size=200, slack=2000)
    rb = buffer(rate_limiter=rate)
    collector = collecting(kind, rb)
    collector.start()
    # Nobody samples: writing stops, near 200 + 2000 / 4, and what was ordered before.
    assert wait_until(lambda: not rb.may_write(), 30)
    held = 0
    while held != rb.write_count:
        held = rb.write_count
        time.sleep(0.2)
    assert 700 <= held <= 700 + 4 * 30 * NUM_ENVS
    for _ in range(200):
        rb.sample(64)
        assert rb.num_sampled <= 4 * (rb.write_count - 200) + 2000
    assert rb.write_count >= 200 + (200 * 64 - 2000) / 4
    collector.async_shutdown()


def test_a_learner_that_stops_costs_no_memory() -> None:
    """What workers write goes where the oldest was, in every process."""

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rb = buffer(2000)
    collector = collecting("async", rb)
    collector.start()
    wait_for_frames(rb, 20_000)
    pids = [os.getpid(), *(line["pid"] for line in collector.stats()["workers"])]
    before = [resident(pid) for pid in pids]
    wait_for_frames(rb, 120_000)
    after = [resident(pid) for pid in pids]
    collector.async_shutdown()
    assert max(b - a for a, b in zip(before, after, strict=True)) < 4_000_000


def test_priorities_while_workers_write() -> None:
    rb = buffer(3000, sampler=PrioritizedSampler(3000, alpha=1, beta=1))
    collector = collecting("async", rb)
    collector.start()
    while rb.write_count < 20_000:
        sample = rb.sample(64, wait=True, timeout=30)
        assert_frames_whole(sample)
        # Only frames of env 1 are worth anything.
        sample["td_error"] = (sample["observation"][:, ENV] == 1).float()
        rb.update_tensordict_priority(sample)
    with collector.pause():
        whole = rb[:]
        assert len(whole) == 3000
    collector.async_shutdown()


def test_a_buffer_that_was_loaded_is_filled_further(tmp_path: Path) -> None:
    rb = buffer()
    list(collecting("single", rb, total_frames=90))
    rb.dumps(tmp_path)
    for kind in KINDS:
        other = buffer(sampler=SliceSampler(slice_len=4, strict_length=False))
        other.loads(tmp_path)
        collector = collecting(kind, other, total_frames=600)
        if kind == "batched":  # it has a key that the others have not
            with warned("policy_version"):
                collector.start()
                with pytest.raises(BackgroundFailed, match="policy_version"):
                    finish(collector)
            continue
        collector.start()
        finish(collector)
        assert other.write_count == len(other) == 690
        assert_frames_whole(other[:])
        assert other[:]["next", "done"].reshape(-1)[29]  # what was under way has ended


def test_a_program_that_goes_on_with_a_memmap(tmp_path: Path) -> None:
    def storage(size: int) -> LazyMemmapStorage:
        return LazyMemmapStorage(size, scratch_dir=tmp_path / "rb", existsok=True)

    for round_ in range(1, 4):
        rb = buffer(10_000, storage)
        assert len(rb) == (round_ - 1) * 300
        collector = collecting("async", rb, total_frames=300)
        collector.start()
        finish(collector)
        assert len(rb) == round_ * 300
        assert_frames_whole(rb[:])


@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_ids_go_on_in_a_buffer_that_has_some(kind: str, how: str, tmp_path: Path) -> None:
    """That of an earlier program, of another collector, or one that was loaded after the collector was made."""

    def opened(name: str) -> TensorDictReplayBuffer:
        return buffer(10_000, lambda size: LazyMemmapStorage(size, scratch_dir=tmp_path / name, existsok=True))

    def collect(collector: Any) -> None:
        if how == "iterated":
            list(collector)
        else:
            collector.start()
            finish(collector)

    def made(rb: Any, round_: int) -> Any:
        envs = [functools.partial(make_numbered, 10 * round_ + env) for env in range(NUM_ENVS)]
        return collecting(kind, rb, envs, total_frames=150)

    def checked_ids(rb: Any) -> list[int]:
        """As many as there are episodes."""
        frames = rb[:]
        ids = frames["collector", "traj_ids"].unique().tolist()
        assert len(ids) == len(frames["observation"][:, [ENV, EPISODE]].unique(dim=0))
        return ids

    collect(made(opened("first"), 0))
    rb = opened("first")
    before = checked_ids(rb)
    assert before[0] == 0
    collect(made(rb, 1))
    assert checked_ids(rb)[: len(before)] == before
    rb.dumps(tmp_path / "saved")
    other = opened("second")
    late = made(other, 2)
    other.loads(tmp_path / "saved")
    collect(late)
    assert len(other) == 450
    checked_ids(other)


def test_async_collector_and_a_buffer_of_rows() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    collector = AsyncCollector(make_numbered, frames_per_batch=20, total_frames=100, replay_buffer=rb)
    collector.start()
    finish(collector)
    assert len(rb) == 100
    assert isinstance(rb.sample(), TensorDict)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_start_after_iterating(kind: Any) -> None:
    rb = buffer()
    collector = kind(numbered_envs(3), frames_per_batch=30, replay_buffer=rb, num_workers=2, total_frames=2000)
    for _ in zip(range(5), collector, strict=False):
        pass
    iterated = rb.write_count
    assert iterated >= 150
    collector.start()
    finish(collector)
    assert rb.write_count == 2000
    assert_frames_whole(rb[:])


EXAMPLE = """
collector = make(replay_buffer=rb) # pass your replay buffer
collector.start()
# little pause
time.sleep(10)
# Start training
for i in range(optim_steps):
    data = rb.sample()  # Sampling from the replay buffer
    # rest of the training loop
collector.async_shutdown()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_start(kind: str) -> None:
    """As users know it; but for the pause, which is as long as it has to be."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            wait_for_frames(rb, 32)

    scope: dict[str, Any] = {
        "make": lambda replay_buffer: collecting(kind, replay_buffer),
        "rb": rb,
        "time": Clock,
        "optim_steps": 20,
    }
    exec(EXAMPLE, scope)
    assert scope["data"].shape == (32,)
    assert not scope["collector"].is_running()


def killed_before_it_reports() -> None:
    """For ``init_fn``: the first life of worker 0 ends when its third batch is in the buffer and nobody was told."""
    from swath.remote.worker import Worker

    after = Worker._after

    def dies(self: Any, order: Any, steps: list[int]) -> Any:
        if self._incarnation.number == 0 and self._spec.worker == 0 and self._page.integer("batches") == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return after(self, order, steps)

    Worker._after = dies  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore:.*started again")
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_was_committed_and_not_reported_counts(kind: str, processed: bool) -> None:
    rb = buffer()
    options: dict[str, Any] = {"postproc": lambda batch: batch} if processed else {}
    collector = collecting(kind, rb, total_frames=3001, restart_workers=1, init_fn=killed_before_it_reports, **options)
    collector.start()
    finish(collector)
    assert sum(line["restarts"] for line in collector.stats()["workers"]) == 1
    assert collector.stats()["frames"] == len(rb) == 3001
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_paused_at_any_instant(kind: str) -> None:
    rb = buffer()
    collector = collecting(kind, rb, frames_per_batch=6)
    collector.start()
    for _ in range(150):
        wait_for_frames(rb, rb.write_count + 1)
        with collector.pause():
            before = rb.write_count
            time.sleep(0.003)  # the time in which nothing must happen
            assert rb.write_count == before
    collector.async_shutdown()
    assert_nothing_lost_or_doubled(rb, NUM_ENVS)


class Rows:
    """A buffer of somebody else's: it has ``extend`` and ``add``, and nothing that swath knows."""

    def __init__(self) -> None:
        self.extended: list[Any] = []
        self.added: list[Any] = []

    def extend(self, data: Any) -> None:
        self.extended.append(data.clone())

    def add(self, data: Any) -> None:
        self.added.append(data.clone())


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_has_extend_is_a_buffer(kind: str) -> None:
    rows = Rows()
    list(collecting(kind, rows, total_frames=300))
    frames: Any = torch.cat([batch.reshape(-1) for batch in rows.extended])
    assert len(frames) == 300
    assert_frames_whole(frames)
    assert not rows.added


def test_steps_are_added_one_by_one_where_asked() -> None:
    rows = Rows()
    list(collecting("single", rows, total_frames=90, extend_buffer=False))
    assert not rows.extended
    assert [step.shape for step in rows.added] == [(NUM_ENVS,)] * 30
    frames: Any = torch.cat(rows.added)
    assert_frames_whole(frames)
