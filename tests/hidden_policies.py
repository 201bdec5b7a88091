"""Policies whose weights are hidden: used, but registered nowhere."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn


class Agent(nn.Module):
    """Acts with its weights, which are one number."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((3,), float(value)))

    def get_action(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 3)

    forward = get_action

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.value.fill_(value)


class Player:
    """No module, but it has one."""

    def __init__(self, agent: Agent) -> None:
        self.settings = {"agents": [agent]}

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.settings["agents"][0].get_action(observation)


class Slotted:
    __slots__ = ("agent",)

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        return self.agent.get_action(observation)


def act_with(agent: Agent, observation: torch.Tensor) -> torch.Tensor:
    return agent.get_action(observation)


def act_with_keyword(observation: torch.Tensor, *, agent: Agent | None = None) -> torch.Tensor:
    assert agent is not None
    return agent.get_action(observation)


def act_with_first(agents: Iterable[Agent], observation: torch.Tensor) -> torch.Tensor:
    return next(iter(agents)).get_action(observation)


def act_functionally(observation: torch.Tensor, agent: Agent, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return weights["value"].expand(*observation.shape[:-1], 3)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(observation: torch.Tensor) -> torch.Tensor:
        return function(observation)

    return call


def in_module(function: Any) -> TensorDictModule:
    return TensorDictModule(function, in_keys=["observation"], out_keys=["action"])


def act_with_global(observation: torch.Tensor) -> torch.Tensor:
    return helps(observation)


def helps(observation: torch.Tensor) -> torch.Tensor:
    return GLOBAL_AGENT.get_action(observation)


def act_by_module(observation: torch.Tensor) -> torch.Tensor:
    return hidden_networks.NET.get_action(observation)


class List(list):
    """Has more than its entries."""

    agent: Agent

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.agent.get_action(observation)


class Private:
    __slots__ = ("__agent",)

    def __init__(self, agent: Agent) -> None:
        self.__agent = agent

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.__agent.get_action(observation)


class Recurrent(nn.Module):
    """Has the methods of an env, and is none."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.value = agent.value

    def reset(self) -> None: ...

    def step(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 3)


def listed(agent: Agent) -> List:
    entries = List([1, 2])
    entries.agent = agent
    return entries


def hooked(agent: Agent, *, before: bool) -> nn.Module:
    module = nn.Identity()

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return agent.get_action(output)

    if before:
        module.register_forward_pre_hook(lambda module, args: (agent.get_action(args[0]),))
    else:
        module.register_forward_hook(after)
    return module


#: Made anew, with another value, wherever this module is imported.
GLOBAL_AGENT = Agent(torch.rand(()).item() + 100)


HIDING: dict[str, Callable[[Agent], Any]] = {
    "bound method": lambda agent: in_module(agent.get_action),
    "bound method, bare": lambda agent: agent.get_action,
    "lambda": lambda agent: in_module(lambda observation: agent.get_action(observation)),
    "lambda, bare": lambda agent: lambda observation: agent.get_action(observation),
    "default": lambda agent: in_module(lambda observation, agent=agent: agent.get_action(observation)),
    "decorated": lambda agent: in_module(logged(agent.get_action)),
    "partial": lambda agent: in_module(functools.partial(act_with, agent)),
    "partial, keyword": lambda agent: in_module(functools.partial(act_with_keyword, agent=agent)),
    "partial, weights": lambda agent: in_module(
        functools.partial(act_functionally, agent=agent, weights=dict(agent.named_parameters()))
    ),
    "callable": lambda agent: in_module(Player(agent)),
    "callable, bare": lambda agent: Player(agent),
    "deque": lambda agent: in_module(functools.partial(act_with_first, collections.deque([agent]))),
    "set": lambda agent: in_module(functools.partial(act_with_first, {agent})),
    "keys": lambda agent: in_module(functools.partial(act_with_first, {agent: 0.5})),
    "iterator": lambda agent: in_module(functools.partial(act_with_first, itertools.repeat(agent))),
    "subclass of list": lambda agent: in_module(listed(agent)),
    "forward hook": lambda agent: in_module(hooked(agent, before=False)),
    "forward pre-hook": lambda agent: in_module(hooked(agent, before=True)),
    "private slots": lambda agent: in_module(Private(agent)),
    "reset and step": lambda agent: in_module(Recurrent(agent).step),
    "slots": lambda agent: in_module(Slotted(agent).act),
}


class TwoNets:
    """Two modules, and one of them twice."""

    def __init__(self, agent: Agent, scale: Agent) -> None:
        self.agent, self.again, self.scale = agent, agent, scale

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.again.get_action(observation) * self.scale.get_action(observation)


import hidden_networks  # noqa: E402 (each uses the other)
