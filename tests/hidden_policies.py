"""Policies whose weights are hidden: used, but registered nowhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    "slots": lambda agent: in_module(Slotted(agent).act),
}


class TwoNets:
    """Two modules, and one of them twice."""

    def __init__(self, agent: Agent, scale: Agent) -> None:
        self.agent, self.again, self.scale = agent, agent, scale

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.again.get_action(observation) * self.scale.get_action(observation)
