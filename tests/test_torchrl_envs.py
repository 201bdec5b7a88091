"""TorchRL's envs as guests: each collector delivers what TorchRL's own delivers. ``make test-torchrl`` runs these.

The envs count, so that every number is foretold; each has another form of keys: nested, several groups of flags and
rewards, agents of different shapes, growing tensors, strings. Those that swath knows as a whole
are stepped in both ways: on rows, and as they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection
from tensordict.utils import is_non_tensor

from guest_ways import assert_way, in_this_way
from swath.collectors import AsyncBatchedCollector, AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.errors import EnvError
from transform_envs import Foretold

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.processes,
]
STEPS = 12
NUM_BATCHES = 2


def mocks() -> Any:
    from torchrl.testing import mocking_classes

    return mocking_classes


def ones(env: Any) -> Callable[[Any], Any]:
    """A policy whose actions are ones, for however many envs it is called."""
    spec, own_dims = env.full_action_spec, env.batch_dims

    def policy(tensordict: Any) -> Any:
        side_by_side = tensordict.batch_size[: tensordict.batch_dims - own_dims]
        whole = spec.expand(*side_by_side, *spec.shape) if side_by_side else spec
        return tensordict.update(whole.zero().apply(lambda leaf: leaf + 1))

    return policy


def count(env: Any) -> Any:
    return mocks().CountingEnvCountPolicy(env.full_action_spec[env.action_key], env.action_key)


@dataclass(frozen=True)
class Guest:
    name: str
    make: Callable[[], Any]
    policy: Callable[[Any], Any] = ones
    #: Whether it gives what is no tensor of a fixed shape.
    has_objects: bool = False
    #: Whether it is one that is lowered, if it may be.
    is_known: bool = False
    may_lower: bool = True

    def __str__(self) -> str:
        return f"{self.name}, as it is" if self.is_known and not self.may_lower else self.name


def nested(**which: bool) -> Callable[[], Any]:
    return lambda: mocks().NestedCountingEnv(max_steps=4, **which)


def multi_key_policy(env: Any) -> Any:
    return mocks().MultiKeyCountingEnvPolicy(env.full_action_spec, deterministic=True)


def heterogeneous_policy(env: Any) -> Any:
    return mocks().HeterogeneousCountingEnvPolicy(env.full_action_spec)


def sways(env: Any) -> Callable[[Any], Any]:
    """A policy that looks at what it is given, for however many envs it is called."""

    def policy(tensordict: Any) -> Any:
        to_the_right = (tensordict["observation"][..., 0] > 0).long()
        return tensordict.set("action", torch.nn.functional.one_hot(to_the_right, 3))

    return policy


def gym(number: int = 0) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(Foretold(number, "vector"))


def transformed_gym(number: int = 0) -> Any:
    """One in another: counters, frames that are stacked, and episodes that are cut."""
    from torchrl import envs

    stack = envs.Compose(
        envs.InitTracker(),
        envs.StepCounter(max_steps=5),
        envs.CatFrames(N=2, dim=-1, in_keys=["observation"], out_keys=["frames"]),
    )
    return envs.TransformedEnv(envs.TransformedEnv(gym(number), stack), envs.RewardSum())


def several(make: Callable[[int], Any]) -> Any:
    from torchrl.envs import SerialEnv

    return SerialEnv(3, [lambda number=number: make(number) for number in range(3)])


def several_transformed() -> Any:
    from torchrl import envs

    return envs.TransformedEnv(several(transformed_gym), envs.StepCounter(step_count_key="steps"))


UNKNOWN = [
    Guest("counting", lambda: mocks().CountingEnv(max_steps=4), count),
    Guest("counting, function", lambda: mocks().CountingEnv(max_steps=4)),
    Guest("batched", lambda: mocks().CountingBatchedEnv(max_steps=torch.tensor([4, 5]), batch_size=[2]), count),
    Guest("nested", nested(), count),
    Guest("nested observation", nested(nest_done=False, nest_reward=False), count),
    Guest("nested reward", nested(nest_done=False), count),
    Guest("several keys", lambda: mocks().MultiKeyCountingEnv(max_steps=4), multi_key_policy),
    Guest("several keys, batched", lambda: mocks().MultiKeyCountingEnv(max_steps=4, batch_size=(3,)), multi_key_policy),
    Guest("heterogeneous", lambda: mocks().HeterogeneousCountingEnv(max_steps=4), heterogeneous_policy),
    Guest(
        "heterogeneous, batched",
        lambda: mocks().HeterogeneousCountingEnv(max_steps=4, batch_size=(2,)),
        heterogeneous_policy,
    ),
    Guest("resets by itself", lambda: mocks().AutoResettingCountingEnv(max_steps=4, auto_reset=True), count),
    Guest("growing", lambda: mocks().EnvWithDynamicSpec(max_count=4), has_objects=True),
    Guest("not tensors", lambda: mocks().EnvWithMetadata(), has_objects=True),
    Guest("tensorclass", lambda: mocks().EnvWithTensorClass(max_steps=4), count, has_objects=True),
]
KNOWN = [
    Guest("gym with transforms", transformed_gym, sways, is_known=True),
    Guest("several gyms with transforms", several_transformed, sways, is_known=True),
]
PLAIN = [
    Guest("gym", gym, sways, is_known=True),
    Guest("several gyms", lambda: several(gym), sways, is_known=True),
]


def in_both_ways(guests: list[Guest]) -> list[Guest]:
    return [*guests, *[replace(guest, may_lower=False) for guest in guests]]


GUESTS = [*UNKNOWN, *in_both_ways(KNOWN)]


def entries(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Everything in a TensorDict: leaves, and the batch sizes of nested ones; members of lazy stacks by number."""
    if isinstance(node, LazyStackedTensorDict):
        for number, member in enumerate(node.tensordicts):
            yield from entries(member, (*path, f"dim {node.stack_dim - node.batch_dims}, {number}"))
        return
    for name in node.keys():  # noqa: SIM118
        value = node.get(name)
        if is_non_tensor(value):
            yield (*path, name), value.tolist()
        elif is_tensor_collection(value):
            yield (*path, name, "batch size"), tuple(value.batch_size)
            yield from entries(value, (*path, name))
        else:
            yield (*path, name), value


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.batch_size == theirs.batch_size
    own, expected = dict(entries(ours)), dict(entries(theirs))
    assert own.keys() == expected.keys()
    for key, value in expected.items():
        if "traj_ids" in key:
            assert own[key].shape == value.shape
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(own[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")
        else:
            assert own[key] == value, key


def for_several(guest: Guest) -> Guest:
    """With a policy that takes several envs at once."""
    return guest if guest.is_known else replace(guest, policy=ones)


def collected(kind: Any, guest: Guest, num_envs: int | None = None, **kwargs: Any) -> list[Any]:
    """``NUM_BATCHES`` batches of each env, of ``STEPS`` steps."""
    probe = guest.make()
    each = STEPS * max(1, probe.batch_size.numel())
    make = in_this_way(guest.make, guest.may_lower)
    envs = make if num_envs is None else [make] * num_envs
    frames = each * (num_envs or 1)
    collector = kind(
        envs,
        guest.policy(probe),
        frames_per_batch=each if kind is MultiAsyncCollector else frames,
        total_frames=NUM_BATCHES * frames,
        **kwargs,
    )
    collector.set_seed(3)
    batches = [batch.clone() for batch in collector]
    assert_way(collector, guest.is_known and guest.may_lower)
    collector.shutdown()
    return batches


def of_torchrl(guest: Guest, **kwargs: Any) -> list[Any]:
    import torchrl.collectors

    return collected(torchrl.collectors.Collector, replace(guest, may_lower=True), **kwargs)


@pytest.mark.parametrize("guest", [*GUESTS, *in_both_ways(PLAIN)], ids=str)
def test_collector(guest: Guest) -> None:
    for ours, theirs in zip(collected(Collector, guest), of_torchrl(guest), strict=True):
        assert type(ours) is type(theirs)
        assert ours.names[-1] == "time"
        assert_same(ours, theirs)


@pytest.mark.parametrize("guest", GUESTS, ids=str)
def test_multi_sync(guest: Guest) -> None:
    batches = collected(MultiSyncCollector, guest, 2, num_workers=2)
    for ours, theirs in zip(batches, of_torchrl(guest), strict=True):
        for env in range(2):
            assert_same(ours[env], theirs)


@pytest.mark.parametrize("guest", GUESTS, ids=str)
def test_several_in_a_worker(guest: Guest) -> None:
    """Where envs share a policy call, the policy must take several at once."""
    guest = for_several(guest)
    batches = collected(MultiSyncCollector, guest, 2, num_workers=1)
    for ours, theirs in zip(batches, of_torchrl(guest), strict=True):
        for env in range(2):
            assert_same(ours[env], theirs)


@pytest.mark.parametrize("guest", GUESTS, ids=str)
def test_multi_async(guest: Guest) -> None:
    batches = collected(MultiAsyncCollector, guest, 2, num_workers=2)
    due = [[*of_torchrl(guest)], [*of_torchrl(guest)]]
    for ours in batches:  # each is the next of one of the envs, which are alike
        env = 0 if due[0] and is_same(ours, due[0][0]) else 1
        assert_same(ours, due[env].pop(0))
    assert due == [[], []]


@pytest.mark.parametrize("guest", GUESTS, ids=str)
def test_async(guest: Guest) -> None:
    for ours, theirs in zip(collected(AsyncCollector, guest), of_torchrl(guest), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("guest", GUESTS, ids=str)
def test_async_batched(guest: Guest) -> None:
    if guest.has_objects:
        with pytest.raises(EnvError, match="no tensor of a fixed shape"):
            collected(AsyncBatchedCollector, guest, 1)
        return
    guest = for_several(guest)
    theirs = torch.cat(of_torchrl(guest), -1)
    theirs = theirs.reshape(-1, theirs.shape[-1])
    ours = torch.cat(collected(AsyncBatchedCollector, guest, 1), 0)
    index = ours.pop("env_index").reshape(-1)
    ours = ours.exclude("policy_version", ("next", "policy_version"))
    for row in index.unique().tolist():
        assert_same(ours[index == row], theirs[row])


def is_same(ours: Any, theirs: Any) -> bool:
    try:
        assert_same(ours, theirs)
    except AssertionError:
        return False
    return True
