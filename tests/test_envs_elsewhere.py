"""Envs of swath where another env, a transform or a policy was expected: they work, or say what to write instead."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from counting import CountingEnv, CountingTensorDictEnv
from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from swath.envs import GymEnv, GymWrapper, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from swath.envs.guest import GuestEnv

needs_torchrl = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
with_torchrl = functools.reduce(lambda before, mark: lambda test: mark(before(test)), needs_torchrl, lambda test: test)


def counting() -> GymWrapper:
    return GymWrapper(CountingEnv(9))


def in_turn() -> Any:
    return SerialEnv(2, counting)


def transformed() -> TransformedEnv:
    return TransformedEnv(counting(), StepCounter())


def on_tensordicts() -> CountingTensorDictEnv:
    return CountingTensorDictEnv(9)


OWN = [counting, in_turn, transformed, on_tensordicts]


@pytest.mark.parametrize("make", OWN)
def test_append_transform(make: Callable[[], Any]) -> None:
    env = make()
    changed = env.append_transform(RewardSum()).append_transform(StepCounter(max_steps=3, step_count_key="count"))
    assert isinstance(changed, TransformedEnv)
    assert (changed is env) is (make is transformed)  # as of TorchRL: one that has transforms gets another
    batch = next(iter(Collector(changed, frames_per_batch=40)))
    count = batch["next", "count"]
    assert count.max() == 3
    assert batch["next", "done"][count == 3].all()
    torch.testing.assert_close(batch["next", "episode_reward"], batch["episode_reward"] + batch["next", "reward"])


@pytest.mark.processes
def test_append_transform_to_envs_in_processes() -> None:
    with ParallelEnv(2, counting) as env:
        batch = next(iter(Collector(env.append_transform(StepCounter(max_steps=3)), frames_per_batch=40)))
        assert batch["next", "step_count"].max() == 3


def test_append_transform_wants_one_of_ours() -> None:
    with pytest.raises(TypeError, match=r"a transform is a swath.envs.Transform, not builtins.function"):
        counting().append_transform(lambda data: data)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, AsyncBatchedCollector])
@pytest.mark.processes
def test_rand_step_is_no_policy(kind: Any) -> None:
    env = GymEnv("CartPole-v1")
    given = env if kind is Collector else [lambda: GymEnv("CartPole-v1")]
    with pytest.raises(TypeError, match=r"rand_step would step the env .* for random actions leave the policy out"):
        kind(given, env.rand_step, frames_per_batch=10)


def test_rand_action_is_one() -> None:
    env = counting()
    (batch,) = Collector(env, env.rand_action, frames_per_batch=60, total_frames=60)
    assert bool((batch["action"].sum(-1) == 1).all())
    assert len(batch["action"].argmax(-1).unique()) == 3


@with_torchrl
def test_rand_step_of_torchrl() -> None:
    import torchrl.envs

    env = torchrl.envs.GymEnv("CartPole-v1")
    with pytest.raises(TypeError, match="leave the policy out"):
        Collector(env, env.rand_step, frames_per_batch=10)
    (batch,) = Collector(env, env.rand_action, frames_per_batch=10, total_frames=10)
    assert bool((batch["action"].sum(-1) == 1).all())


@with_torchrl
@pytest.mark.parametrize("make", OWN)
def test_torchrl_containers_say_what_to_write(make: Callable[[], Any]) -> None:
    import torchrl.envs

    with pytest.raises(TypeError, match=r"write swath.envs.TransformedEnv\(env, transform\)"):
        torchrl.envs.TransformedEnv(make(), torchrl.envs.StepCounter())
    for container in (torchrl.envs.SerialEnv, torchrl.envs.ParallelEnv):
        for factory in (make, lambda: make()):
            with pytest.raises(TypeError, match=r"write swath.envs.SerialEnv\(num_workers, create_env_fn\) or swath"):
                container(2, factory)


@with_torchrl
def test_append_transform_of_guests() -> None:
    import torchrl.envs

    env = GuestEnv(torchrl.envs.GymWrapper(CountingEnv(9)))
    theirs = env.append_transform(torchrl.envs.StepCounter(max_steps=3))
    assert isinstance(theirs, GuestEnv)
    assert theirs.append_transform(torchrl.envs.RewardSum()) is theirs  # as TorchRL does it
    ours = theirs.append_transform(StepCounter(max_steps=2, step_count_key="count"))
    assert isinstance(ours, TransformedEnv)
    batch = next(iter(Collector(ours, frames_per_batch=40)))
    assert batch["next", "count"].max() == batch["next", "step_count"].max() == 2
    assert "episode_reward" in batch["next"]


@with_torchrl
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_our_transforms_over_a_guest(lower: bool, num_envs: int) -> None:
    """The flags are those of the guest: what it truncated is not terminated."""
    import torchrl.envs

    def guest() -> Any:
        return torchrl.envs.GymWrapper(CountingEnv(9))

    def collect(over: str) -> list[Any]:
        CountingEnv.made = int(over == "own" and num_envs > 1)  # TorchRL makes one more, to look at it
        if over == "guest":
            inner = GuestEnv(guest() if num_envs == 1 else torchrl.envs.SerialEnv(num_envs, guest), lower=lower)
        else:
            inner = counting() if num_envs == 1 else SerialEnv(num_envs, counting)
        env = inner.append_transform(RewardSum()).append_transform(StepCounter(max_steps=6))
        collector = Collector(env, frames_per_batch=40 * num_envs, total_frames=120 * num_envs)
        torch.manual_seed(0)
        collector.runner.seed_random(0)
        return [batch.clone() for batch in collector]

    for mine, theirs in zip(collect("guest"), collect("own"), strict=True):
        assert theirs["next", "truncated"].any()
        assert theirs["next", "terminated"].any()
        for key in theirs.keys(True, True):
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=0, msg=lambda t, key=key: f"{key}: {t}")
