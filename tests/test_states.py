"""``load_state_dict`` of the state of something else: it says what that is and what to do, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import make_counting
from policies_for_tests import deterministic
from swath.collectors import (
    AsyncBatchedCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.errors import CollectorClosed, StateMismatch
from swath.states import COUNTERS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
FRAMES: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 120}

KINDS: dict[str, Callable[[Any], Any]] = {
    "Collector": lambda policy: Collector(make_counting, policy, **FRAMES),
    "Collector of 2": lambda policy: Collector(SerialEnv(2, make_counting), policy, **FRAMES),
    "Collector of workers": lambda policy: Collector(ParallelEnv(2, make_counting, num_workers=2), policy, **FRAMES),
    "MultiSyncCollector": lambda policy: MultiSyncCollector([make_counting] * 2, policy, num_workers=2, **FRAMES),
    "MultiAsyncCollector of 1": lambda policy: MultiAsyncCollector([make_counting], policy, **FRAMES),
    "MultiSyncCollector of 4": lambda policy: MultiSyncCollector([make_counting] * 4, policy, num_workers=2, **FRAMES),
    "AsyncBatchedCollector": lambda policy: AsyncBatchedCollector([make_counting] * 3, policy, num_workers=1, **FRAMES),
    "DistributedCollector": lambda policy: DistributedCollector([make_counting], policy, **FRAMES),
}
_TORCHRL = {"policy_state_dict": {}, "env_state_dict": {}, "frames": 5, "iter": 1}
#: What is no state of a collector, and how it is called.
OTHERS: dict[str, tuple[Any, str]] = {
    "None": (None, "given None; it takes"),
    "a list": ([], "given a list; it takes"),
    "nothing": ({}, "given an empty dict; it takes"),
    "a module": (torch.nn.Linear(1, 1).state_dict(), "state dict of a module.*load it into the module"),
    "an optimizer": (torch.optim.SGD([torch.zeros(1)], lr=1.0).state_dict(), "state of an optimizer"),
    "an evaluator": ({"step": 3}, "state of an Evaluator"),
    "a buffer": (ReplayBuffer(storage=LazyTensorStorage(3)).state_dict(), "state of a replay buffer.*load it into one"),
    "TorchRL": (_TORCHRL, r"collector of TorchRL.*state\['policy_state_dict'\]"),
    "TorchRL, workers": (
        {"worker0": _TORCHRL, "frames": 5, "iter": 1},
        r"TorchRL.*\['worker0'\]\['policy_state_dict'\]",
    ),
    "something": ({"a": 1, "b": 2}, "given a dict with 'a', 'b'; it takes"),
}
#: What the state of one kind is called where it is refused by another.
NAMES = {
    "Collector": "state of (a single Collector|1 Gymnasium env)",
    "Collector of 2": "state of (a single Collector|2 Gymnasium envs)",
    "Collector of workers": "state of (a single Collector whose )?envs (are )?in 2 workers",
    "MultiSyncCollector": "state of (a MultiCollector of 2 workers|1 Gymnasium env)",
    "MultiAsyncCollector of 1": "state of a MultiCollector of 1 worker.*num_workers=1",
    "MultiSyncCollector of 4": "state of (a MultiCollector of 2 workers|2 Gymnasium envs)",
    "AsyncBatchedCollector": "state of (a single Collector whose )?envs (are )?in 1 worker",
    "DistributedCollector": "state of a collector of 1 node",
}


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    """Of every kind, after a batch."""
    found = {}
    for kind, make in KINDS.items():
        with make(deterministic()) as collector:
            collector.next()
            found[kind] = collector.state_dict()
    return found


def show(value: Any) -> Any:
    """A state as something that can be compared."""
    if isinstance(value, dict):
        return {key: show(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [show(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


def saved(kind: str, collector: Any) -> Any:
    """What is the same when it is asked for again: envs that go on after a batch have another state by then."""
    state = show(collector.state_dict())
    return {name: state[name] for name in COUNTERS} if "Async" in kind else state


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_kind_is_refused_and_changes_nothing(kind: str, states: dict[str, Any]) -> None:
    policy = deterministic()
    with KINDS[kind](policy) as collector:
        collector.next()
        before, weights = saved(kind, collector), show(policy.state_dict())
        given = {**OTHERS, **{name: (states[name], NAMES[name]) for name in KINDS if name != kind}}
        for what, (state, told) in given.items():
            with pytest.raises(StateMismatch, match=told) as caught:
                collector.load_state_dict(state)
            assert re.search("load_state_dict was given .*; it takes .* Next: ", str(caught.value)), what
        assert saved(kind, collector) == before
        assert show(policy.state_dict()) == weights
        assert sum(batch.numel() for batch in collector) == 108  # it goes on


@pytest.mark.parametrize("kind", ["Collector", "Collector of 2", "MultiSyncCollector", "DistributedCollector"])
def test_weights_that_do_not_fit_change_nothing(kind: str) -> None:
    """Torch copies what fits before it raises."""

    def two_layers(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, width), torch.nn.Linear(width, 3))

    with KINDS[kind](two_layers(6)) as other:
        other.next()
        state = other.state_dict()
    policy = two_layers(7)
    with KINDS[kind](policy) as collector:
        collector.next()
        before, weights = collector.state_dict(), show(policy.state_dict())
        with pytest.raises(RuntimeError, match="size mismatch"):
            collector.load_state_dict(state)
        assert show(policy.state_dict()) == weights
        assert show(collector.state_dict()) == show(before)


@pytest.mark.parametrize(
    ("key", "value"),
    [("frames", -1), ("iter", "three"), ("policy_version", None), ("traj_pool", 1.5), ("random_state", {"torch": [1]})],
)
def test_a_state_that_was_tampered_with_changes_nothing(key: str, value: Any, states: dict[str, Any]) -> None:
    with KINDS["Collector"](deterministic()) as collector:
        before = collector.state_dict()
        with pytest.raises(StateMismatch, match=key):
            collector.load_state_dict({**states["Collector"], key: value})
        assert show(collector.state_dict()) == show(before)


def test_weights_that_only_one_of_the_two_has() -> None:
    """Also those of a network that the policy hides: they were left as they were, without a word."""
    hidden = torch.nn.Linear(4, 3)
    with Collector(make_counting, deterministic(), **FRAMES) as collector:
        of_module = collector.state_dict()
    with Collector(make_counting, lambda observation: hidden(observation), **FRAMES) as collector:
        of_hidden = collector.state_dict()
        with pytest.raises(StateMismatch, match=r"has policy weights, but this policy has none.*strict=False"):
            collector.load_state_dict(of_module)
        assert "hidden_weights" in of_hidden
        without = {key: value for key, value in of_hidden.items() if key != "hidden_weights"}
        with pytest.raises(StateMismatch, match=r"has no weights of networks that the policy hides.*strict=False"):
            collector.load_state_dict(without)
        collector.load_state_dict(without, strict=False)
    with Collector(make_counting, RandomPolicy(), **FRAMES) as collector:
        of_nothing = collector.state_dict()
    with Collector(make_counting, deterministic(), **FRAMES) as collector:
        with pytest.raises(StateMismatch, match=r"has no policy weights, but this policy needs them"):
            collector.load_state_dict(of_nothing)
        collector.load_state_dict(of_nothing, strict=False)


@pytest.mark.parametrize("state", [{"env0": {}, "env1": {}, "env2": {}}, {}, None, {"worker0": {}}])
def test_an_env_takes_what_is_its_own(state: Any) -> None:
    """A SerialEnv of envs that keep nothing took the state of any other number."""
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    with env, pytest.raises(StateMismatch, match="load_state_dict was given"):
        env.load_state_dict(state)
    with ParallelEnv(2, make_counting) as env, pytest.raises(StateMismatch, match="load_state_dict was given"):
        env.load_state_dict(state)
    with GymEnv("CartPole-v1") as env, pytest.raises(StateMismatch, match="it takes the state of 1 Gymnasium env"):
        env.load_state_dict(state)


@pytest.mark.parametrize("what", OTHERS)
def test_buffers_and_evaluators_refuse_the_state_of_others(what: str) -> None:
    state, told = OTHERS[what]
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(TensorDict(x=torch.arange(3), batch_size=3))
    if what != "a buffer":
        with pytest.raises(StateMismatch, match=f"^ReplayBuffer.load_state_dict was.*{told}"):
            rb.load_state_dict(state)
        assert len(rb) == 3
    if what != "an evaluator":
        with Evaluator(make_counting, RandomPolicy()) as evaluator:
            with pytest.raises(StateMismatch, match=f"^Evaluator.load_state_dict was.*{told}"):
                evaluator.load_state_dict(state)
            assert evaluator.state_dict() == {"step": 0}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Collector", "Collector of 2")])
def test_after_its_end_a_collector_says_that_it_was_closed(kind: str, states: dict[str, Any]) -> None:
    with KINDS[kind](deterministic()) as collector:
        pass
    for ask in (collector.state_dict, lambda: collector.load_state_dict(states[kind])):
        with pytest.raises(CollectorClosed, match="was shut down"):
            ask()


def test_what_a_closed_collector_still_has() -> None:
    """Its envs are here: they can be asked. But nothing would come of a state that is loaded."""
    collector = Collector(make_counting, deterministic(), **FRAMES)
    list(collector)
    state = collector.state_dict()
    assert state["frames"] == 120
    with pytest.raises(CollectorClosed, match="was shut down"):
        collector.load_state_dict(state)
