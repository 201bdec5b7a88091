"""Policies whose result depends on something that Python code reads, one way of reading it each."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

#: Read by policies that `from_global` makes.
SCALE = 1.0

#: A user's own module of settings.
settings = types.ModuleType("settings_of_a_user")


class Net(nn.Module):
    """Overridden: ``factor()``, by which the result is multiplied."""

    scale: Any = 1.0
    #: What some of the policies are given.
    items: Any
    config: Any
    rest: Any
    numbers: Any
    function: Any
    value: Any
    getter: Any
    table: Any
    count: Any
    mean: Any
    epsilon: Any
    last: Any
    matrix: Any
    generator: Any
    sign: Any
    step: Any
    raises: Any
    handle: Any
    dropout: Any
    other: Any
    kept: Any
    _hidden: Any

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation) * self.factor()

    def factor(self) -> Any:
        return self.scale


class Child(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(observation))


class FromGlobal(Net):
    def factor(self) -> float:
        return SCALE


class FromModule(Net):
    def factor(self) -> float:
        return settings.scale


class FromClass(Net):
    shared = 1.0

    def factor(self) -> float:
        return type(self).shared


class FromProperty(Net):
    @property
    def hidden(self) -> float:
        return self._hidden

    def factor(self) -> float:
        return self.hidden


class FromItems(Net):
    """Of a list, a dictionary, a deque, … named ``items``."""

    def factor(self) -> float:
        return self.items[0]


class FromLength(Net):
    def factor(self) -> float:
        return float(len(self.items))


class FromAttribute(Net):
    """Of an object named ``config``."""

    def factor(self) -> float:
        return float(self.config.scale)


class FromReference(Net):
    def factor(self) -> float:
        return self.config().scale


class ByComputedName(Net):
    def factor(self) -> float:
        return getattr(self, "sc" + self.rest)


class FromDict(Net):
    def factor(self) -> float:
        return self.__dict__["sc" + self.rest]


class FromRequiresGrad(Net):
    def factor(self) -> float:
        return 2.0 if self.net.weight.requires_grad else 1.0


class FromGrad(Net):
    def factor(self) -> float:
        return 2.0 if self.net.weight.grad is None else 1.0


class FromDefaultDtype(Net):
    def factor(self) -> torch.Tensor:
        return torch.full((3,), 1e8).add(1).sub(1e8).float() + 1


class FromFunctional(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return F.silu(self.net(observation))


class FromTensor(Net):
    """A Python attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net.weight.scale = 1.0

    def factor(self) -> float:
        return self.net.weight.scale


class Layered(nn.Module):
    """Dropout, and a batch norm that updates its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout, self.second = (
            *(nn.Linear(4, 8), nn.BatchNorm1d(8)),
            *(nn.Dropout(0.5), nn.Linear(8, 3)),
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.norm(self.first(observation))))


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__(dropout=nn.Dropout(0.5))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.net(observation))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.first(observation))))


@dataclass
class Config:
    scale: float = 1.0


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Pair(NamedTuple):
    scale: float
    other: float


class Options(dict):
    """A dictionary with attributes, too."""

    scale: float


class Mode(enum.Enum):
    ONLY = 1


class Proxy:
    """A descriptor."""

    def __get__(self, instance: Any, owner: type) -> float:
        return instance.config.scale


class FromDescriptor(Net):
    described = Proxy()

    def factor(self) -> float:
        return self.described


class Bound:
    """An object with a method, and callable itself."""

    def __init__(self) -> None:
        self.net, self.scale = nn.Linear(4, 3), 1.0

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation) * self.scale

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.act(observation) + 1


class Other(Bound):
    def act(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation) - 1


def scaled(net: nn.Module, observation: torch.Tensor, *, scale: Any) -> torch.Tensor:
    return net(observation) * scale[0]


def partial() -> Any:
    return functools.partial(scaled, nn.Linear(4, 3), scale=[1.0])


def closure() -> Any:
    """A function with ``set(value)``, which changes the cell that it closes over."""
    net, value = nn.Linear(4, 3), 1.0

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return net(observation) * value

    def change(new: float) -> None:
        nonlocal value
        value = new

    policy.set = change  # type: ignore[attr-defined]
    return policy


def function_with_attribute() -> Any:
    net = nn.Linear(4, 3)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return net(observation) * policy.scale  # type: ignore[attr-defined]

    policy.scale = 1.0  # type: ignore[attr-defined]
    return policy


def function_with_default() -> Any:
    net = nn.Linear(4, 3)

    def policy(observation: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return net(observation) * scale

    return policy


def function_that_adds() -> Any:
    net = nn.Linear(4, 3)

    def policy(observation: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return net(observation) + scale

    return policy


def from_options() -> Net:
    options = Options()
    options.scale = 1.0
    return FromAttribute(config=options)


def from_weak_reference() -> Net:
    config = Config()
    return FromReference(kept=config, config=weakref.ref(config))


def from_read_only_view() -> Net:
    items = {0: 1.0}
    return FromItems(kept=items, items=types.MappingProxyType(items))


def from_enum() -> Net:
    Mode.ONLY.scale = 1.0  # type: ignore[attr-defined]
    return FromAttribute(config=Mode.ONLY)


def from_global() -> Net:
    global SCALE
    SCALE = 1.0
    return FromGlobal()


def from_module() -> Net:
    settings.scale = 1.0  # type: ignore[attr-defined]
    return FromModule()


def from_class() -> Net:
    """Of a class of its own, which may be changed."""
    return type("Mine", (FromClass,), {})()


def with_property() -> Net:
    """Of a class of its own, whose getter may be changed."""

    def hidden(self: Any, value: float = 1.0) -> float:
        return value

    return type("Mine", (FromProperty,), {"hidden": property(hidden)})()


def from_deque() -> Net:
    return FromItems(items=collections.deque([1.0], maxlen=1))


# -- what is done in each step, and captured ---------------------------------------------------------------------------


class RunningStatistics(Net):
    def __init__(self) -> None:
        super().__init__(mean=nn.Buffer(torch.zeros(4)), count=nn.Buffer(torch.zeros((), dtype=torch.int64)))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean.lerp_(observation.mean(0), 0.1)
        return self.net(observation - self.mean) / self.count


class Annealed(Net):
    """Acts at random less and less often."""

    def __init__(self) -> None:
        super().__init__(epsilon=nn.Buffer(torch.ones(())))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.epsilon.mul_(0.99)
        values = self.net(observation)
        is_random = torch.rand(values.shape[0], 1) < self.epsilon
        return torch.where(is_random, torch.rand_like(values), values)


class BranchesOnWhatItChanged(Annealed):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.epsilon.mul_(0.99)
        if torch.rand(()) < self.epsilon:
            return torch.rand_like(observation[..., :3])
        return self.net(observation)


class WritesToViews(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        hidden = self.net(observation)
        first, rest = hidden.split([1, 2], -1)
        first.mul_(2)
        rest[:, 0] += first.squeeze(-1)
        rest.t()[1].copy_(observation[:, 1])
        out = torch.zeros(3, len(hidden)).t()
        out[:] = hidden
        return out.view_as(hidden).add_(1)


class WritesLater(Net):
    """What is looked at was written to after a random number was added to it."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        hidden = self.net(observation)
        noisy = hidden + torch.rand_like(hidden)
        hidden.mul_(2)
        return noisy if hidden.sum() < 1e6 else hidden


class LooksThroughViews(Net):
    """At what an operation with several results gives."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        tokens = self.net(observation).unsqueeze(1).unsqueeze(-1)
        mixed = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return mixed.transpose(1, 2).flatten(1)


class WritesToItsInput(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        observation.mul_(0.5)[..., 0] = 3
        return self.net(observation)


class ReturnsItsInput(Net):
    def forward(self, observation: torch.Tensor) -> Any:
        return observation[..., :3], observation, observation.t().t()


class WithDefaults(Net):
    """A constant, made anew in each step, that is changed."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        bonus = torch.tensor([1.0, 2.0, 3.0])
        bonus += self.net(observation).mean(0)
        bonus *= torch.ones(3).mul_(2)
        return bonus.expand(len(observation), 3)


class RaisesAndGoesOn(Net):
    """Falls back where the step is beyond its table, after a random number was drawn and a buffer was changed."""

    def __init__(self, sign: int = 1) -> None:
        super().__init__(table=nn.Embedding(35, 3), count=nn.Buffer(torch.zeros(())), sign=sign)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        noise = torch.rand(len(observation), 3)
        try:
            return noise + self.count + self.table(self.sign * observation[:, 1].long() + 50 * (self.sign < 0))
        except IndexError:
            return noise - self.count


class DrawsAndGoesOn(RaisesAndGoesOn):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(observation), 3)
        try:
            return noise + self.table(self.sign * observation[:, 1].long() + 50 * (self.sign < 0))
        except IndexError:
            return -noise


class LooksAtRandomNumbers(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) < 0.2:
            return torch.rand(len(observation), 3)
        return self.net(observation)


class Convolves(Net):
    """Results of operations that make new memory each time: passed on, in a list, looked at in a view."""

    def __init__(self) -> None:
        super().__init__(config=nn.Conv1d(1, 3, 2), rest=nn.Conv1d(1, 3, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        x = observation.unsqueeze(1)
        passed_on, twice = torch.relu(self.config(x)), self.rest(x)
        in_a_list = torch.cat([passed_on, self.rest(-x)], -1).amax((1, 2))
        viewed = self.config(x + 1).flatten(1).sum(-1) + (twice * torch.sigmoid(twice)).sum((1, 2))
        return self.net(observation) + (in_a_list + viewed).unsqueeze(-1)


class BranchesOnValues(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if observation[..., 1].max() > 10:
            return torch.tanh(self.net(observation))
        return self.net(observation) * float(observation[0, 0])


class ThreeWays(Net):
    """The last of which comes often, and changes a buffer; the second one comes once."""

    def __init__(self) -> None:
        super().__init__(count=nn.Buffer(torch.zeros(())))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if observation[0, 1] == 15:
            return self.net(observation) - 1
        if observation[0, 1] > 20:
            return self.net(observation) + self.count.add_(1)
        return self.net(observation)


class LooksAtANumberThatWasWrittenTo(Net):
    """What looks like a search for NaN is not one."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        is_fine = observation == observation
        is_fine &= observation < 10
        return self.net(observation) if is_fine.all() else self.net(observation) - 1


class AllAgree(Net):
    """A question about drawn indices of several rows."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        logits = self.net(observation) * 0 + torch.tensor([3.0, 0.0, 0.0])
        action = torch.distributions.Categorical(logits=logits).sample()
        hot = nn.functional.one_hot(action, 3).float()
        return hot if (action == action[0]).all() else hot * 2


class SignOfZero(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        zero = torch.where(observation[0, 1] > 10, -0.0, 0.0)
        return torch.ones_like(observation[..., :3]) * zero.item()


class ChangesItselfOnARareBranch(Net):
    """Of which the program does not know: the branch was not recorded."""

    def __init__(self) -> None:
        super().__init__(other=nn.Linear(4, 3))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if 20 < observation[0, 1] < 22:
            self.net, self.other = self.other, self.net
        return self.net(observation)


class SeedsItself(Net):
    def factor(self) -> torch.Tensor:
        torch.default_generator.manual_seed(3)
        return torch.rand(3)


class Heads(Net):
    """Several samples, of which each is looked at."""

    def forward(self, observation: torch.Tensor) -> Any:
        values = self.net(observation)
        categorical = torch.distributions.OneHotCategorical(logits=values)
        normal = torch.distributions.Normal(values, values.exp())
        action, move = categorical.sample(), normal.sample()
        return action, move, categorical.log_prob(action), normal.log_prob(move)


# -- what cannot be captured -------------------------------------------------------------------------------------------


class Calls(Net):
    """Multiplies by what a function returns."""

    def __init__(self, function: Any) -> None:
        super().__init__(function=function)

    def factor(self) -> Any:
        return self.function()


class NextOf(Net):
    """Multiplies by 1, and later by 2."""

    def factor(self) -> float:
        return 1.0 if next(self.numbers) < 60 else 2.0


class Counts(Net):
    calls = 0

    def factor(self) -> float:
        self.calls += 1
        return float(self.calls)


class CountsInAList(Net):
    def factor(self) -> float:
        self.items.append(1)
        return float(len(self.items))


class RebindsItsBuffer(Net):
    def __init__(self) -> None:
        super().__init__(mean=nn.Buffer(torch.zeros(4)))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * observation.mean(0)
        return self.net(observation - self.mean)


class KeepsItsInput(Net):
    def __init__(self) -> None:
        super().__init__(last=torch.zeros(2, 4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, observation
        return self.net(observation - before)


class ByMask(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation) + observation[observation > 1].sum()


class ThroughNumPy(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.net(observation).detach().numpy() * 2)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__(matrix=torch.eye(3).to_sparse())

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.matrix, self.net(observation).t()).t()


class FromGenerator(Net):
    def __init__(self) -> None:
        super().__init__(generator=torch.Generator().manual_seed(0))

    def factor(self) -> torch.Tensor:
        return torch.rand(3, generator=self.generator)


class Typed(nn.Module):
    """For TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :3] * self.scale


class RaisesAtStep(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(observation), 3)
        if observation[0, 1] == self.step:
            raise ArithmeticError("not this one")
        return self.net(observation) + noise


class FromValue(Net):
    def factor(self) -> float:
        return self.value.value


class Getting(Net):
    def factor(self) -> float:
        return self.getter(self)


class ToFloat(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation.float()


def from_array_of_a_library() -> Net:
    layer: Any = nn.ReLU()
    layer.scale = np.ones((), np.float32)
    return FromAttribute(config=layer)


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(Child(), {nn.Linear})


def probabilistic() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        [
            TensorDictModule(Child(), in_keys=["observation"], out_keys=["logits"]),
            ProbabilisticTensorDictModule(
                in_keys=["logits"],
                out_keys=["action"],
                distribution_class=torch.distributions.OneHotCategorical,
                distribution_kwargs={"validate_args": False},  # a mean is no sample
                return_log_prob=True,
                default_interaction_type=InteractionType("random"),
            ),
        ]
    )


class RaisesWhenLookedAt:
    scale = 1.0

    def __getattribute__(self, name: str) -> Any:
        if name in ("scale", "__class__"):
            return object.__getattribute__(self, name)
        raise RuntimeError(f"nobody may ask for {name}")


class Unfriendly(Net):
    def factor(self) -> float:
        return self.config.scale


class RaisesWhenTold(Net):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(observation), 3)
        if self.raises:
            raise ArithmeticError("not this one")
        return self.net(observation) + noise


class Attends(nn.Module):
    """Over the numbers of an observation; or only where the first is odd."""

    def __init__(self, always: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = always
        self.embed = nn.Linear(1, 16)
        self.layer = self.made()

    def made(self) -> nn.Module:
        return nn.MultiheadAttention(16, 2, batch_first=True)

    def over(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x)[0]

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        x = self.embed(observation.unsqueeze(-1))
        if self.always or observation.sum() % 2 == 1:
            x = self.over(x)
        return x.mean(-2)[..., :3]


class Encodes(Attends):
    def made(self) -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def over(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)
