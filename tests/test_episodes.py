"""``collector.episodes()``: every episode that has ended, once, with all of its frames, over the borders of batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from counting import make_counting
from leaks import wait_until
from swath.collectors import (
    AsyncBatchedCollector,
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from swath.collectors.distributed import DistributedCollector, RayCollector
from swath.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer
from swath.data.episode_backlog import EpisodeBacklog
from swath.data.episodes import Ended, EpisodeHistory, Episodes, EpisodeTally, Frames
from swath.envs import ParallelEnv, SerialEnv

IDS = ("collector", "traj_ids")


def of_frames(frames: Iterable[TensorDict]) -> dict[int, tuple[float, int]]:
    """The plain way: return and length by trajectory, of those that ended."""
    sums: dict[int, list[float]] = {}
    over = set()
    for batch in frames:
        flat = batch.reshape(-1)
        columns = flat[IDS], flat["next", "reward"], flat["next", "done"]
        for traj_id, reward, done in zip(*(column.reshape(-1).tolist() for column in columns), strict=True):
            sums.setdefault(traj_id, []).append(reward)
            if done:
                over.add(traj_id)
    return {traj_id: (sum(sums[traj_id]), len(sums[traj_id])) for traj_id in over}


def as_dict(found: Iterable[Episodes]) -> dict[int, tuple[float, int]]:
    pairs = [
        (traj_id, (episode_return, length))
        for episodes in found
        for traj_id, episode_return, length in zip(
            episodes.traj_ids.tolist(), episodes.returns.tolist(), episodes.lengths.tolist(), strict=True
        )
    ]
    assert len(dict(pairs)) == len(pairs)  # each once
    return dict(pairs)


def assert_whole(episodes: Episodes) -> None:
    """In the k-th step, ``CountingEnv`` gives k and a quarter of the action, which is 0, 1 or 2."""
    steps = episodes.lengths * (episodes.lengths + 1) / 2
    assert (steps <= episodes.returns).all()
    assert (episodes.returns <= steps + 0.5 * episodes.lengths).all()
    assert (episodes.terminated != episodes.truncated).all()


# -- the tally, in made-up batches -------------------------------------------------------------------------------------

SHAPES: dict[str, dict[tuple[str, ...], tuple[int, ...]]] = {
    "scalar": {("reward",): ()},
    "one entry": {("reward",): (1,)},
    "objectives": {("reward",): (3,)},
    "groups": {("agents", "reward"): (2, 1), ("others", "reward"): (3, 1)},
    "a group beside the root": {("reward",): (1,), ("agents", "reward"): (2, 1)},
    "none": {},
}


def made_up(num_envs: int, num_steps: int, shapes: dict[tuple[str, ...], tuple[int, ...]]) -> TensorDict:
    """``[envs, steps]`` of random episodes, of which some are cut without an end."""
    rng = random.Random(num_envs * num_steps)
    done = torch.zeros(num_envs, num_steps, 1, dtype=torch.bool)
    ids = torch.zeros(num_envs, num_steps, dtype=torch.int64)
    names = iter(range(10**6))
    for env in range(num_envs):
        name = next(names)
        for step in range(num_steps):
            ids[env, step] = name
            done[env, step] = rng.random() < 0.15
            if done[env, step] or rng.random() < 0.02:
                name = next(names)
    after = TensorDict({"done": done, "terminated": done, "truncated": torch.zeros_like(done)})
    for key, shape in shapes.items():
        after[key] = torch.randint(-9, 9, (num_envs, num_steps, *shape)).float()
        if len(key) > 1:  # each group has flags of its own; the root's decide
            after[key[0], "done"] = torch.rand(num_envs, num_steps, *shape) < 0.5
    return TensorDict({"next": after, "collector": {"traj_ids": ids}}, batch_size=(num_envs, num_steps))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_rewards_of_all_shapes_over_batch_borders(shapes: dict[tuple[str, ...], tuple[int, ...]]) -> None:
    data = made_up(4, 200, shapes)
    tally, history, at = EpisodeTally(), EpisodeHistory(), 0
    for size in [1, 7, 30, 2, 60, 100]:
        ended = tally.add(Frames.of_batch(data[:, at : at + size]), np.arange(4))
        again = Ended.of_lists(ended.as_lists()) if len(ended) else ended  # as nodes tell it
        assert again is not None
        history.add(again, np.zeros(len(ended), np.int64), 7, 4 * (at + size))
        at += size
    found = history.take()
    whole: dict[int, list[tuple[int, int]]] = {}
    for env in range(4):
        for step in range(200):
            whole.setdefault(int(data[IDS][env, step]), []).append((env, step))
    over = {name: places for name, places in whole.items() if bool(data["next", "done"][places[-1]])}
    assert sorted(found.traj_ids.tolist()) == sorted(over)
    for i, name in enumerate(found.traj_ids.tolist()):
        places = over[name]
        assert found.lengths[i] == len(places)
        assert found.envs[i] == places[0][0]
        for key, shape in shapes.items():
            own = sum(data.get(("next", *key))[place] for place in places)
            assert found.rewards[".".join(key)].shape[1:] == shape
            np.testing.assert_array_equal(found.rewards[".".join(key)][i], own)
        counted = [key for key in shapes if key == ("reward",)] or list(shapes)
        total = sum(float(data.get(("next", *key))[place].sum()) for key in counted for place in places)
        assert found.returns[i] == total if shapes else np.isnan(found.returns[i])
    assert (found.policy_versions == 7).all()
    assert (np.diff(found.frames) >= 0).all()


def test_envs_that_are_mixed_in_a_batch_and_frames_that_are_missing() -> None:
    data = made_up(3, 90, SHAPES["scalar"])
    plain, mixed = EpisodeTally(), EpisodeTally()
    rng = np.random.default_rng(0)
    expected, found = [], []
    for at in range(0, 90, 30):
        part = data[:, at : at + 30]
        expected.append(plain.add(Frames.of_batch(part), np.arange(3)))
        # Each env's frames in order, those of different envs anyhow between one another.
        envs = rng.permutation(np.repeat(np.arange(3), 30))
        steps = np.empty(90, np.int64)
        for env in range(3):
            steps[envs == env] = np.arange(30)
        found.append(mixed.add(Frames.of_batch(part[torch.from_numpy(envs), torch.from_numpy(steps)]), envs))
    for column in ("envs", "traj_ids", "lengths", "sums"):
        one, other = (
            np.concatenate([getattr(ended, column)[np.argsort(ended.traj_ids)] for ended in both])
            for both in (expected, found)
        )
        np.testing.assert_array_equal(one, other)
    # What a worker that was stopped did not collect is blank, and has no id.
    masked = data[:, :30].clone()
    masked.get(IDS)[1, 10:] = -1
    masked.get(("next", "done"))[1, 10:] = False
    tally = EpisodeTally()
    tally.add(Frames.of_batch(masked), np.arange(3))
    ended = tally.add(Frames.of_batch(data[:, 10:40][1:2]), np.array([1]))  # the same env goes on
    assert as_pairs(ended) == {
        name: length for name, length in lengths_of(data[1:2, :40]).items() if name in ended.traj_ids
    }


def as_pairs(ended: Ended) -> dict[int, int]:
    return dict(zip(ended.traj_ids.tolist(), ended.lengths.tolist(), strict=True))


def lengths_of(data: TensorDict) -> dict[int, int]:
    names, counts = data[IDS].unique(return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def test_what_is_no_whole_episode_is_not_counted() -> None:
    data = made_up(1, 60, SHAPES["scalar"])
    names = EpisodeTally().add(Frames.of_batch(data), np.arange(1)).traj_ids.tolist()
    tally = EpisodeTally()
    tally.fragments.update(names[1:3])
    assert tally.add(Frames.of_batch(data), np.arange(1)).traj_ids.tolist() == [names[0], *names[3:]]
    assert not tally.fragments  # and nothing grows


def test_as_many_as_are_kept() -> None:
    data = made_up(1, 300, SHAPES["scalar"])
    ended = EpisodeTally().add(Frames.of_batch(data), np.arange(1))
    history = EpisodeHistory(most_kept=5)
    assert len(history.take()) == 0
    for _ in range(3):
        history.add(ended, np.zeros(len(ended), np.int64), 0, 0)
    assert len(history.last(3)) == 3
    found = history.take()
    assert (len(found), found.missed) == (5, 3 * len(ended) - 5)
    assert found.traj_ids.tolist() == ended.traj_ids.tolist()[-5:]
    assert len(history.take()) == 0 == history.take().missed
    assert history.count == 3 * len(ended)


# -- of every collector ------------------------------------------------------------------------------------------------

Make = Callable[..., BaseCollector]


def on_nodes(sync: bool) -> Make:
    return lambda **kwargs: DistributedCollector([make_counting] * 2, frames_per_batch=40, sync=sync, **kwargs)


def workers(kind: Any, envs: int, **others: Any) -> Make:
    return lambda **kwargs: kind([make_counting] * envs, frames_per_batch=20 * envs, num_workers=2, **others, **kwargs)


KINDS: dict[str, Make] = {
    "one": lambda **kwargs: Collector(make_counting, frames_per_batch=30, **kwargs),
    "serial": lambda **kwargs: Collector(SerialEnv(3, make_counting), frames_per_batch=60, **kwargs),
}
WITH_PROCESSES: dict[str, Make] = {
    "parallel": lambda **kwargs: Collector(ParallelEnv(3, make_counting), frames_per_batch=60, **kwargs),
    "sync": workers(MultiSyncCollector, 4),
    "joined in time": workers(MultiSyncCollector, 3, cat_results=-1),
    "preemptive": workers(MultiSyncCollector, 4, preemptive_threshold=0.5),
    "async": workers(MultiAsyncCollector, 3),
    "batched": lambda **kwargs: AsyncBatchedCollector(
        [make_counting] * 4, RandomPolicy(), frames_per_batch=61, **kwargs
    ),
    "nodes": on_nodes(True),
    "nodes, async": on_nodes(False),
}
ALL = [
    *(pytest.param(make, id=name) for name, make in KINDS.items()),
    *(pytest.param(make, id=name, marks=pytest.mark.processes) for name, make in WITH_PROCESSES.items()),
]


@pytest.mark.parametrize("make", ALL)
def test_episodes_are_those_in_the_batches(make: Make) -> None:
    batches, found = [], []
    collector = make(total_frames=1200)
    for batch in collector:
        batches.append(batch.clone())
        found.append(collector.episodes())
    found.append(collector.episodes())
    expected = of_frames(batches)
    assert expected
    if getattr(collector, "_threshold", 1.0) < 1:  # frames that are missing are blank, with -1 as their id
        expected.pop(-1, None)
    assert {name: (pytest.approx(total), length) for name, (total, length) in expected.items()} == as_dict(found)
    for episodes in found:
        assert_whole(episodes)
        assert (episodes.frames <= 1200).all()
    last = collector.episodes(last=5)
    assert len(last) == 5
    assert_whole(last)
    stats = collector.stats()
    assert stats["episodes"] == len(expected)
    everything = collector.episodes(last=100)
    assert stats["episode_return"] == pytest.approx(everything.returns.mean())
    assert stats["episode_length"] == pytest.approx(everything.lengths.mean())


@pytest.mark.parametrize("make", ALL)
def test_it_does_not_matter_when_one_asks(make: Make) -> None:
    """Small batches wait to be counted together; what their user does with them meanwhile changes nothing."""
    collector = make(total_frames=1200)
    batches, ended_with = [], {}
    for batch in collector:
        batches.append(batch.clone())
        batch.zero_()
        there = batches[-1].reshape(-1)
        there = there[there[IDS] >= 0]
        delivered = sum(int((each[IDS] >= 0).sum()) for each in batches)
        for traj_id in there[there["next", "done"].reshape(-1)][IDS].tolist():
            ended_with[traj_id] = delivered
    episodes = collector.episodes()
    expected = of_frames(batches)
    expected.pop(-1, None)
    assert {name: (pytest.approx(total), length) for name, (total, length) in expected.items()} == as_dict([episodes])
    assert episodes.frames.tolist() == sorted(episodes.frames.tolist())
    assert dict(zip(episodes.traj_ids.tolist(), episodes.frames.tolist(), strict=True)) == ended_with
    assert_whole(episodes)


def test_batches_that_waited_are_told_as_if_each_was_counted_at_once() -> None:
    """All that is known of episodes, in the order in which they ended."""
    batches = [made_up(4, steps, SHAPES["groups"]) for steps in (1, 7, 30, 2, 60)]
    found = []
    for is_counted_at_once in (False, True):
        history = EpisodeHistory()
        backlog = EpisodeBacklog(EpisodeTally())

        def tell(ended: Ended, versions: np.ndarray, frames: np.ndarray, history: EpisodeHistory = history) -> None:
            history.add(ended, ended.envs // 2, versions, frames)

        for number, batch in enumerate(batches):
            add = backlog.add_and_count if is_counted_at_once else backlog.add
            add(Frames.of_batch(batch), np.array([1, 2, 3, 5]), 100 * number, number, tell)
        assert history.count == 0 or is_counted_at_once
        backlog.count(tell)
        found.append(history.take())
    later, at_once = found
    assert len(later) > 10
    for name in ("returns", "lengths", "envs", "workers", "traj_ids", "policy_versions", "frames", "terminated"):
        assert (getattr(later, name) == getattr(at_once, name)).all(), name
    for key, rewards in at_once.rewards.items():
        assert (later.rewards[key] == rewards).all()


@pytest.mark.parametrize("make", ALL)
def test_episodes_with_a_replay_buffer(make: Make) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(2000))
    collector = make(total_frames=900, replay_buffer=rb)
    found = [collector.episodes() for _ in collector]
    found.append(collector.episodes())
    expected = of_frames([rb[:]])
    assert {name: (pytest.approx(total), length) for name, (total, length) in expected.items()} == as_dict(found)


@pytest.mark.processes
@pytest.mark.parametrize("make", ALL)
def test_episodes_in_the_background(make: Make) -> None:
    """Of workers that write to the buffer themselves, too."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4000))
    collector = make(total_frames=2000, replay_buffer=rb)
    collector.start()
    found = []
    for frames in (200, 1000):
        assert wait_until(lambda frames=frames: collector.stats()["frames"] >= frames, 60)
        with collector.pause():
            found.append(collector.episodes())
            assert collector.stats()["episodes"] == len(of_frames([rb[:]]))
    assert wait_until(lambda: not collector.is_running(), 60)
    collector.async_shutdown()
    found.append(collector.episodes())
    expected = of_frames([rb[:]])
    assert expected
    assert {name: (pytest.approx(total), length) for name, (total, length) in expected.items()} == as_dict(found)
    for episodes in found:
        assert_whole(episodes)


@pytest.mark.parametrize("make", ALL)
def test_a_reset_and_a_seed_cut_episodes(make: Make) -> None:
    """What was under way is no episode, and what comes next begins with its first frame."""
    collector = make(total_frames=-1)
    batches = iter(collector)
    count = 0
    for turn in range(8):
        next(batches)
        if turn % 2:
            collector.reset()
        else:
            collector.set_seed(turn)
        episodes = collector.episodes()
        assert_whole(episodes)
        count += len(episodes)
    for _ in range(6):
        next(batches)
    assert_whole(collector.episodes())
    assert count
    collector.shutdown()


@pytest.mark.processes
def test_which_worker_and_which_weights() -> None:
    with torch.no_grad():
        policy = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
    collector = MultiSyncCollector(
        [make_counting] * 4, policy, frames_per_batch=400, total_frames=1200, num_workers=2, track_policy_version=True
    )
    for turn, batch in enumerate(collector):
        episodes = collector.episodes()
        assert (episodes.workers == episodes.envs // 2).all()
        assert set(episodes.envs.tolist()) == {0, 1, 2, 3}
        assert (episodes.policy_versions == turn).all()
        assert (episodes.frames == 400 * (turn + 1)).all()
        assert batch["collector", "traj_ids"].unique().numel() >= len(episodes)
        collector.update_policy_weights_()


@pytest.mark.processes
def test_episodes_that_were_too_old_are_not_taken_for_whole_ones() -> None:
    """With ``max_policy_lag`` frames are dropped in the middle of episodes."""
    policy = torch.nn.Linear(4, 3)
    collector = MultiAsyncCollector(
        [make_counting] * 2, policy, frames_per_batch=15, total_frames=900, num_workers=2, max_policy_lag=1
    )
    for _ in collector:
        assert_whole(collector.episodes())
        for _ in range(2):
            collector.update_policy_weights_()
    assert collector.stats()["episodes"]


@pytest.mark.parametrize(
    ("last", "error", "said"),
    [(-1, ValueError, "at least 0"), (2.5, TypeError, "integer"), ("3", TypeError, "'3'"), (True, TypeError, "True")],
)
def test_how_many_is_a_number(last: Any, error: type[Exception], said: str) -> None:
    collector = Collector(make_counting, frames_per_batch=300, total_frames=300)
    list(collector)
    with pytest.raises(error, match=f"last must be.*{said}"):
        collector.episodes(last=last)
    assert len(collector.episodes(last=0)) == 0
    assert len(collector.episodes(last=10**9)) == len(collector.episodes()) > 0


def test_without_trajectory_ids() -> None:
    collector = Collector(make_counting, frames_per_batch=30, total_frames=60, track_traj_ids=False)
    next(iter(collector))
    with pytest.raises(RuntimeError, match="track_traj_ids=True"):
        collector.episodes()


def test_a_rollout_that_is_not_counted_is_a_part_of_its_episode() -> None:
    collector = Collector(make_counting, frames_per_batch=7, total_frames=-1)
    batches = iter(collector)
    for _ in range(20):
        next(batches)
        collector.rollout()
    found = collector.episodes()
    assert len(found) > 3
    assert_whole(found)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_episodes_of_nodes_that_write_to_the_buffer_themselves() -> None:
    rb = RayReplayBuffer(storage=partial(LazyTensorStorage, 1000))
    collector = RayCollector([make_counting] * 2, frames_per_batch=60, total_frames=600, replay_buffer=rb, sync=False)
    found = [collector.episodes() for _ in collector]
    found.append(collector.episodes())
    data = rb[:]
    assert {name: (pytest.approx(total), length) for name, (total, length) in of_frames([data]).items()} == as_dict(
        found
    )
    for episodes in found:
        assert_whole(episodes)
        assert (episodes.workers == episodes.envs).all()  # one env on each node
    assert {0, 1} == {env for episodes in found for env in episodes.envs.tolist()}
    collector.shutdown()
    rb.close()
