"""Weights that are in no ``state_dict()``: what is trained reaches those who collect, or an error says why not."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import hidden_networks
import hidden_policies
from counting import make_counting
from hidden_policies import HIDING, Agent, TwoNets, act_with_global, in_module
from swath.collectors import Collector, Evaluator, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import GymWrapper
from swath.weight_update.hidden import HiddenWeights
from swath.weight_update.loads import is_read
from swath.weight_update.weights import require_findable
from warned import warned_here

pytestmark = pytest.mark.processes


def acts(collector: Any, version: int) -> float:
    """What the policy did once this version of the weights acted; it is the same all over."""
    for batch in collector:
        stamps = batch["policy_version"]
        if int(stamps.min()) == version:
            (value,) = batch["action"].unique().tolist()
            return value
    raise AssertionError


@pytest.mark.parametrize("how", HIDING)
def test_weights_that_are_hidden_in_a_policy_reach_the_workers(how: str) -> None:
    agent = Agent(1.0)
    with MultiAsyncCollector(
        [make_counting] * 2, HIDING[how](agent), frames_per_batch=6, num_workers=1, track_policy_version=True
    ) as collector:
        assert acts(collector, 0) == 1
        agent.set(2)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 2
        other = Agent(3)
        collector.update_policy_weights_(other)  # the module that is hidden, or its weights
        assert acts(collector, 2) == 3
        other.set(4)
        collector.update_policy_weights_(other.state_dict())
        assert acts(collector, 3) == 4
        other.set(5)
        collector.update_policy_weights_(policy=HIDING[how](other))
        assert acts(collector, 4) == 5
        with pytest.raises(KeyError, match="do not fit the policy"):
            collector.update_policy_weights_({"valeu": torch.zeros(3)})
        if isinstance(collector.policy, nn.Module):
            with pytest.raises(KeyError, match=r"its state_dict\(\) does not have it: give the policy itself"):
                collector.update_policy_weights_(collector.policy.state_dict())
        assert collector.policy_version == 4


@pytest.mark.filterwarnings("ignore:worker")
def test_a_network_that_a_function_finds_by_its_name() -> None:
    agent = hidden_policies.GLOBAL_AGENT
    agent.set(7)
    with MultiSyncCollector(
        [make_counting] * 2, in_module(act_with_global), frames_per_batch=6, num_workers=2, track_policy_version=True
    ) as collector:
        assert acts(collector, 0) == 7  # a worker that imports the module makes another one
        agent.set(8)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 8


@pytest.mark.parametrize("how", hidden_networks.BY_NAME)
def test_a_network_that_a_policy_finds_by_its_name(how: str) -> None:
    network = hidden_networks.NET
    network.set(1)
    policy = hidden_networks.by_name(how)
    policy(TensorDict({"observation": torch.zeros(1, 4)}, [1]))
    with MultiAsyncCollector(
        [make_counting] * 2, policy, frames_per_batch=6, num_workers=1, track_policy_version=True
    ) as collector:
        assert acts(collector, 0) == 1
        network.set(2)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 2
        collector.update_policy_weights_(Agent(3))
        assert acts(collector, 2) == 3


def test_several_modules_that_are_hidden_in_one_policy() -> None:
    agent, scale = Agent(2), Agent(3)
    with MultiSyncCollector(
        [make_counting] * 2, in_module(TwoNets(agent, scale)), frames_per_batch=6, track_policy_version=True
    ) as collector:
        assert acts(collector, 0) == 6
        agent.set(5)
        scale.set(7)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 35
        with pytest.raises(ValueError, match=r"fit several modules of the policy \(module\.agent, module\.scale\)"):
            collector.update_policy_weights_(agent)


def test_tied_weights_that_are_hidden() -> None:
    one, other = Agent(2), Agent()
    other.value = one.value
    with MultiSyncCollector(
        [make_counting] * 2, in_module(TwoNets(one, other)), frames_per_batch=6, track_policy_version=True
    ) as collector:
        assert acts(collector, 0) == 4
        one.set(3)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 9
        collector.update_policy_weights_(Agent(4))  # it is the same for both
        assert acts(collector, 2) == 16


def test_hidden_weights_on_nodes() -> None:
    agent = Agent(1.0)
    with DistributedCollector(
        [make_counting],
        in_module(lambda observation: agent.get_action(observation)),
        frames_per_batch=6,
        launcher="mp",
        backend="gloo",
        track_policy_version=True,
    ) as collector:
        assert acts(collector, 0) == 1
        agent.set(2)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 2


def test_a_network_that_a_policy_finds_by_its_name_on_nodes() -> None:
    network = hidden_networks.NET
    network.set(1)
    with DistributedCollector(
        [make_counting],
        hidden_networks.by_name("registered and by name"),
        frames_per_batch=6,
        launcher="mp",
        backend="gloo",
        track_policy_version=True,
    ) as collector:
        assert acts(collector, 0) == 1
        network.set(2)
        collector.update_policy_weights_()
        assert acts(collector, 1) == 2
        collector.update_policy_weights_(Agent(3))
        assert acts(collector, 2) == 3


def test_hidden_weights_in_one_process() -> None:
    agent = Agent(1.0)
    with Collector(make_counting(), in_module(agent.get_action), frames_per_batch=6, track_policy_version=True) as own:
        assert acts(own, 0) == 1
        own.update_policy_weights_(Agent(2))
        assert acts(own, 1) == 2
        assert agent.value[0] == 2


def test_an_evaluation_changes_no_weights_that_are_trained() -> None:
    network = hidden_networks.NET
    network.set(1)
    with Evaluator(make_counting, hidden_networks.by_name("forward"), num_trajectories=1, max_steps=3) as evaluator:
        with pytest.raises(RuntimeError, match=r"uses 'hidden_networks:NET\.value', which cannot be copied .*register"):
            evaluator.evaluate({"hidden_networks:NET.value": torch.zeros(3)})
        assert bool((network.value == 1).all())


@pytest.mark.parametrize("sync", [True, False])
def test_hidden_weights_are_part_of_the_state(sync: bool) -> None:
    def make(agent: Agent) -> Any:
        policy = in_module(lambda observation: agent.get_action(observation))
        return MultiCollector(
            [make_counting] * 2, policy, frames_per_batch=6, num_workers=2, track_policy_version=True, sync=sync
        )

    agent = Agent(1.0)
    with make(agent) as before:
        agent.set(2)
        before.update_policy_weights_()
        assert acts(before, 1) == 2
        state = before.state_dict()
    with make(Agent(5)) as after:
        after.load_state_dict(state)
        assert acts(after, 1) == 2


@pytest.mark.filterwarnings("ignore:worker")
def test_a_worker_that_is_started_again_has_the_weights_that_were_loaded() -> None:
    agent = Agent(1.0)
    policy = in_module(agent)
    kwargs: dict[str, Any] = {"frames_per_batch": 6, "num_workers": 2, "track_policy_version": True}
    with MultiSyncCollector([make_counting] * 2, policy, restart_workers=2, **kwargs) as collector:
        agent.set(2)
        collector.update_policy_weights_()
        state = collector.state_dict()
        agent.set(3)
        collector.update_policy_weights_()
        assert acts(collector, 2) == 3
        collector.load_state_dict(state)
        os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
        batch = next(iter(collector))
        assert bool((batch["action"] == 2).all())
        assert bool((batch["policy_version"] == 1).all())


class Opaque:
    """Cannot be looked into, as what is written in C cannot."""

    __slots__ = ()

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*observation.shape[:-1], 3)


def test_what_cannot_be_looked_into_is_told() -> None:
    for policy in (in_module(Opaque()), Opaque()):
        with MultiCollector([make_counting] * 2, policy, frames_per_batch=6, sync=True) as collector:
            with pytest.raises(RuntimeError, match=r"cannot look into .*Opaque.*policy_factory="):
                collector.update_policy_weights_()
            assert collector.policy_version == 0


def test_policies_without_weights_may_be_updated() -> None:
    policy = in_module(lambda observation: torch.zeros(*observation.shape[:-1], 3))
    with MultiSyncCollector([make_counting] * 2, policy, frames_per_batch=6) as collector:
        collector.update_policy_weights_()  # as every training loop does
    env = make_counting()
    assert not HiddenWeights(lambda observation: env.rand_action()).tensors


def test_networks_without_an_order_are_refused() -> None:
    class Crowd:
        def __init__(self, *agents: Agent, **named: Agent) -> None:
            self.agents = set(agents)
            self.named = named

        def __call__(self, observation: torch.Tensor) -> torch.Tensor:
            return sum((agent(observation) for agent in self.agents), torch.zeros(3))

    one, other = Agent(1), Agent(2)
    with pytest.raises(
        ValueError, match=r"several networks of module\.agents, .* another order .*: keep them in a list"
    ):
        MultiSyncCollector([make_counting] * 2, in_module(Crowd(one, other)), frames_per_batch=6)
    assert sorted(HiddenWeights(Crowd(one, other, first=one)).tensors) == ["agents.entry.value", "named.first.value"]


def test_only_what_code_loads_is_looked_at() -> None:
    def uses_modules(observation: torch.Tensor) -> torch.Tensor:
        json.dumps({"NET": 1})
        cloudpickle.dumps(observation)
        return hidden_networks.random.random() * nn.functional.relu(torch.zeros(3))

    assert not HiddenWeights(uses_modules).tensors
    assert not HiddenWeights(hidden_networks.Untrained()).tensors
    assert not HiddenWeights(hidden_networks.Untrained().act).tensors


def test_code_of_packages_that_have_no_networks_is_not_read() -> None:
    assert [
        is_read(name) for name in ("cloudpickle.cloudpickle", "torch.nn", "json", "hidden_networks", "nowhere")
    ] == [*(False, False, False, True, True)]


def test_policies_that_go_round_in_circles_or_are_deep() -> None:
    chain: Any = Agent(1)
    for _ in range(3000):
        chain = [chain]
    chain.append(chain)
    (name,) = HiddenWeights(lambda observation: chain).tensors
    assert name.count(".0") == 3000


def test_policies_without_an_end_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swath.weight_update.hidden._MOST_THINGS", 100)
    things = [[number] for number in range(200)]
    with warned_here(RuntimeWarning, match="not all were looked at"):
        require_findable(lambda observation: things)


def test_envs_are_not_looked_into() -> None:
    class Env(nn.Linear):
        observation_space = None

        def reset(self) -> None: ...

        def step(self) -> None: ...

    env = Env(1, 1)
    assert not HiddenWeights(lambda observation: env.step()).tensors
    assert not HiddenWeights(lambda observation: GymWrapper(env)).tensors
