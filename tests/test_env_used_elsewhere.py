"""An env object that a collector shares with its user, or with another collector: the frames stay true."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from counting import CountingTensorDictEnv, assert_consistent, make_counting
from policies_for_tests import deterministic
from swath.collectors import Collector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import ParallelEnv, SerialEnv, StepCounter, TransformedEnv

CUT = "was reset or stepped by someone else between two batches"


def a_transformed() -> Any:
    return TransformedEnv(make_counting(1000), StepCounter())


def roll_out(env: Any) -> None:
    env.rollout(3)


def only_reset(env: Any) -> None:
    env.reset()


def step_the_innermost(env: Any) -> None:
    inner = getattr(env, "base_env", env)
    inner.rand_step(inner.reset())


ENVS: dict[str, Callable[[], Any]] = {
    "rows": lambda: make_counting(1000),
    "TensorDicts": lambda: CountingTensorDictEnv(1000),
    "transformed": a_transformed,
    "serial": lambda: SerialEnv(2, lambda: make_counting(1000)),
    "parallel": lambda: ParallelEnv(2, lambda: make_counting(1000), num_workers=1),
}


@pytest.mark.processes
@pytest.mark.parametrize("use", [roll_out, only_reset, step_the_innermost])
@pytest.mark.parametrize("kind", ENVS)
def test_its_user_takes_it_between_two_batches(kind: str, use: Callable[[Any], None]) -> None:
    env = ENVS[kind]()
    use(env)
    with Collector(env, deterministic(), frames_per_batch=12, track_policy_version=False) as collector:
        use(env)  # nothing was collected yet, so nothing is cut
        batches = [collector.next(), collector.next()]
        assert batches[0]["collector", "traj_ids"].unique().tolist() == list(range(env.numel()))
        assert_consistent(batches)
        use(env)
        with pytest.warns(UserWarning, match=CUT):
            batches.append(collector.next())
        use(env)
        batches += [collector.next(), collector.next()]  # told once
        assert_consistent(batches)
        ids = [set(batch["collector", "traj_ids"].unique().tolist()) for batch in batches]
        assert ids[0] == ids[1]
        assert ids[3] == ids[4]
        assert len(ids[0] | ids[2] | ids[3]) == 3 * env.numel()


@pytest.mark.parametrize("kind", ["rows", "TensorDicts", "transformed", "serial"])
def test_whoever_leaves_it_alone_hears_nothing(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = Collector(ENVS[kind](), deterministic(), frames_per_batch=12, total_frames=60)
        collector.set_seed(0)
        batches = list(collector)
    assert_consistent(batches)
    assert len({int(each) for batch in batches for each in batch["collector", "traj_ids"].unique()}) <= 2


def test_two_collectors_of_one_env_take_turns() -> None:
    env = make_counting(1000)
    train, evaluate = (Collector(env, deterministic(), frames_per_batch=7) for _ in range(2))
    found: list[list[Any]] = [[], []]

    def take_turns() -> None:
        for _ in range(4):
            found[0].append(train.next())
            found[1] += [evaluate.next(), evaluate.next()]

    with train, evaluate, pytest.warns(UserWarning, match=CUT):
        take_turns()
    for batches in found:
        assert_consistent(batches)
    assert [batch["collector", "traj_ids"].unique().tolist() for batch in found[0]] == [[0], [1], [2], [3]]


def test_what_was_cut_is_truncated_in_the_buffer() -> None:
    env = make_counting(1000)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with Collector(env, deterministic(), frames_per_batch=10, total_frames=30, replay_buffer=buffer) as collector:
        batches = iter(collector)
        next(batches)
        env.rollout(2)
        with pytest.warns(UserWarning, match=CUT):
            next(batches)
    assert buffer[:]["next", "truncated"].reshape(-1)[:20].nonzero().reshape(-1).tolist()[:1] == [9]


@pytest.mark.processes
def test_an_env_in_a_worker_that_is_asked_to_reset() -> None:
    with MultiSyncCollector([make_counting] * 2, deterministic(), frames_per_batch=20, num_workers=1) as collector:
        batches = [collector.next()]
        collector.map_fn("env.reset", [()] * 1)
        batches += [collector.next(), collector.next()]
    assert_consistent(batches)
    assert torch.equal(batches[1]["observation"][:, 0, 1], torch.zeros(2))
