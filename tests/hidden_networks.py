"""Policies that find their network by a name. Where this is imported, it is another one, with other weights."""

from __future__ import annotations

import collections
import enum
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hidden_policies import Agent, act_by_module, in_module

NET = Agent(random.SystemRandom().randrange(1000, 10**6))


class Forward(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return NET(observation)


class Super(Forward):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation)


class InTurn(nn.Module):
    """Methods that call methods, a property, a static one, a private one."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.act(observation)

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        me = self
        return me.__choose(self.net, observation)

    @property
    def net(self) -> Agent:
        return self.find()

    @staticmethod
    def find() -> Agent:
        return NET

    @classmethod
    def __choose(cls, net: Agent, observation: torch.Tensor) -> torch.Tensor:
        return net(observation)


class Nested(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        def act() -> torch.Tensor:
            return next(NET(observation) for _ in range(1))

        return act()


class Importing(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        import hidden_networks

        return hidden_networks.NET(observation)


class ImportingFrom(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        from hidden_networks import NET as net

        return net(observation)


class Config:
    net = NET
    choices = {"first": [NET]}  # noqa: RUF012


class OfClass(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        config = Config
        return config.net(observation)


class OfOwnClass(nn.Module):
    nets = collections.deque([NET])  # noqa: RUF012

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.nets[0](observation)


class Nets(enum.Enum):
    FIRST = Config


class OfEnum(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return Nets.FIRST.value.choices["first"][0](observation)


class Special:
    def __getitem__(self, observation: torch.Tensor) -> torch.Tensor:
        return NET(observation)


class OfSpecial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Special()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.table[observation]


class Made:
    def __init__(self, observation: torch.Tensor) -> None:
        self.action = NET(observation)


class OfMaking(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return Made(observation).action


class Player:
    """Called by a name, on an object that is only found by going on."""

    def __init__(self) -> None:
        self.players = [self]

    def play(self, observation: torch.Tensor) -> torch.Tensor:
        return NET(observation)

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.players[0].play(observation)


PLAYER = Player()


def act_with_player(observation: torch.Tensor) -> torch.Tensor:
    return PLAYER.players[0].play(observation)


class OfDecorator(nn.Module):
    @torch.no_grad()
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return NET(observation)


class OfLibrary(nn.Module):
    """What it overrides is called by the library."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().__call__(observation)

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return NET(observation)


@functools.cache
def find_cached() -> Agent:
    return NET


class OfCache(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return find_cached()(observation)


LOCAL = threading.local()
LOCAL.net = NET


class OfThread(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return LOCAL.net(observation)


def replace(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return NET(output)


def hooked() -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(replace)
    return module


class Both(nn.Module):
    """The same network twice, that are two where this is imported."""

    def __init__(self) -> None:
        super().__init__()
        self.net = NET

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.minimum(self.net(observation), NET(observation))


class Untrained(nn.Module):
    """Has a method that uses the network, which nobody calls who acts."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.act(observation)

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*observation.shape[:-1], 3)

    def learn(self, observation: torch.Tensor) -> torch.Tensor:
        return NET(observation)


#: Each acts with NET.
BY_NAME: dict[str, Callable[[], Any]] = {
    "forward": Forward,
    "a submodule's forward": lambda: nn.Sequential(nn.Identity(), Forward()),
    "forward of super()": Super,
    "methods in turn": InTurn,
    "nested": Nested,
    "import": Importing,
    "from import": ImportingFrom,
    "class": OfClass,
    "own class": OfOwnClass,
    "enum": OfEnum,
    "special method": OfSpecial,
    "object that is made": OfMaking,
    "callable, in turn": Player,
    "method of a global": lambda: act_with_player,
    "decorated forward": OfDecorator,
    "cache": OfCache,
    "local of a thread": OfThread,
    "forward hook": hooked,
    "attribute of a module": lambda: act_by_module,
    "registered and by name": Both,
}


def by_name(how: str) -> Any:
    return in_module(BY_NAME[how]())
