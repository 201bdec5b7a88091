"""Modules made at random, changed at random: captured and called, they give the same to the last bit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch import nn

from capture_checks import both_ways

#: By hand: many more of them.
NUM_EXAMPLES = int(os.environ.get("SWATH_CAPTURE_EXAMPLES", "40"))
WIDTH = 6

# -- parts: (observation, features) -> features ------------------------------------------------------------------------


class Part(nn.Module):
    """Overridden: ``run``."""

    #: What changes between batches may change.
    flag = True
    gain = 1.0

    def forward(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.run(observation, x)

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Layer(Part):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Embedded(Part):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(observation[..., 1].long() % 8)


class Picture(Part):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 2, 2, padding=1), nn.Linear(24, WIDTH)

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu_(self.conv(x.view(-1, 1, 2, 3))).flatten(1))


class Attention(Part):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        tokens = x.unflatten(-1, (3, 2))
        return x + self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(-2)


class Scaled(Part):
    """A branch on an attribute."""

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain if self.flag else torch.tanh(x)


class Branching(Part):
    """A branch on a value."""

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if observation[..., 1].max() > 8:
            return x - 1
        return x.abs() if self.flag and bool((observation[..., 2] >= 1).any()) else x


class Shuffled(Part):
    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first, second, third = x.chunk(3, -1)
        stacked = torch.stack([first + third, second, third * self.gain], -2)
        return torch.cat([stacked.transpose(-1, -2).reshape(*x.shape[:-1], WIDTH)[..., :4], first], -1)


class WrittenTo(Part):
    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[..., ::2] *= 2
        y[..., 0].add_(observation[..., 3])
        y.clamp_(-5, 5)
        x = torch.zeros_like(y)
        x[..., 1:] = y[..., :-1]
        return x.masked_fill_(x > 4, self.gain)


class Statistics(Part):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.count = nn.Buffer(torch.zeros(WIDTH)), nn.Buffer(torch.zeros((), dtype=torch.int64))

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean += (x.mean(0) - self.mean) / self.count
        return x - self.mean


class Rebound(Part):
    """Cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(WIDTH))

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class Recurrent(Part):
    """State of its own, in place."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.is_lstm = cell(WIDTH, WIDTH), cell is nn.LSTMCell
        self.h, self.c = nn.Buffer(torch.zeros(8, WIDTH)), nn.Buffer(torch.zeros(8, WIDTH))

    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h, c = self.h[: len(x)], self.c[: len(x)]
        new = self.cell(x, (h, c)) if self.is_lstm else (self.cell(x, h), c)
        self.h[: len(x)] = new[0]
        self.c[: len(x)].copy_(new[1])
        return new[0]


class Noisy(Part):
    def run(self, observation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        return x + noise if torch.rand(()) < 0.5 else x - noise * self.gain


PARTS: dict[str, Callable[[], Part]] = {
    "linear": lambda: Layer(nn.Linear(WIDTH, WIDTH)),
    "no bias": lambda: Layer(nn.Linear(WIDTH, WIDTH, bias=False)),
    "layer norm": lambda: Layer(nn.LayerNorm(WIDTH)),
    "tanh": lambda: Layer(nn.Tanh()),
    "elu": lambda: Layer(nn.ELU()),
    "relu": lambda: Layer(nn.ReLU()),
    "gelu": lambda: Layer(nn.GELU()),
    "softmax": lambda: Layer(nn.Softmax(-1)),
    "prelu": lambda: Layer(nn.PReLU()),
    "dropout": lambda: Layer(nn.Dropout(0.3)),
    "embedding": Embedded,
    "picture": Picture,
    "attention": Attention,
    "scaled": Scaled,
    "branching": Branching,
    "shuffled": Shuffled,
    "written to": WrittenTo,
    "statistics": Statistics,
    "rebound": Rebound,
    "GRU": lambda: Recurrent(nn.GRUCell),
    "LSTM": lambda: Recurrent(nn.LSTMCell),
    "noisy": Noisy,
}

# -- heads: features and options -> action and more --------------------------------------------------------------------


def positive(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(x) + 0.1


def squashed(x: torch.Tensor, **options: Any) -> td.Distribution:
    normal = td.Independent(td.Normal(x[..., :3].clamp(-3, 3), positive(x[..., 3:]), **options), 1)
    return td.TransformedDistribution(normal, [td.TanhTransform(cache_size=1)], **options)


def multivariate(x: torch.Tensor, **options: Any) -> td.Distribution:
    scale = torch.diag_embed(positive(x[..., 3:])) + x[..., :1, None] * torch.ones(3, 3).tril(-1)
    return td.MultivariateNormal(x[..., :3], scale_tril=scale, **options)


def mixture(x: torch.Tensor, **options: Any) -> td.Distribution:
    parts = td.Independent(td.Normal(x.unflatten(-1, (2, 3)), 0.5, **options), 1)
    return td.MixtureSameFamily(td.Categorical(logits=x[..., :2], **options), parts, **options)


HEADS: dict[str, Callable[..., td.Distribution] | None] = {
    "none": None,
    "Categorical": lambda x, **options: td.Categorical(logits=x[..., :3], **options),
    "probabilities": lambda x, **options: td.Categorical(probs=positive(x[..., :3]), **options),
    "OneHotCategorical": lambda x, **options: td.OneHotCategorical(logits=x[..., :3], **options),
    "Normal": lambda x, **options: td.Normal(x[..., :3], positive(x[..., 3:]), **options),
    "Independent": lambda x, **options: td.Independent(td.Normal(x[..., :3], 1.0, **options), 1),
    "Bernoulli": lambda x, **options: td.Bernoulli(logits=x[..., :3], **options),
    "MultivariateNormal": multivariate,
    "TransformedDistribution": squashed,
    "MixtureSameFamily": mixture,
}


class Policy(nn.Module):
    def __init__(self, parts: list[str], heads: list[str], validate: bool | None, *, reparametrized: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.parts: Any = nn.ModuleList(PARTS[name]() for name in parts)
        self.heads, self.reparametrized = heads, reparametrized
        self.options = {} if validate is None else {"validate_args": validate}
        self.value = nn.Linear(WIDTH, 1)
        linears = [part.layer for part in self.parts if isinstance(part, Layer) and isinstance(part.layer, nn.Linear)]
        for linear in linears[1:]:
            linear.weight = linears[0].weight

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.first(observation)
        for part in self.parts:
            x = part(observation, x)
        results = [y for head in self.heads for y in self.act(HEADS[head], x)]
        return (*results, self.value(x))

    def act(self, head: Callable[..., td.Distribution] | None, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if head is None:
            return x[..., :3], x.sum(-1)
        distribution = head(x, **self.options)
        is_reparametrized = self.reparametrized and distribution.has_rsample
        sample = distribution.rsample() if is_reparametrized else distribution.sample()
        log_prob = distribution.log_prob(sample)
        if sample.dtype is torch.int64:
            sample = nn.functional.one_hot(sample, 3).float()
        return sample, log_prob


class WithState(nn.Module):
    """A state that the collector carries."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.cell = policy, nn.GRUCell(4, 4)

    def forward(self, observation: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.cell(observation, hidden)
        return self.policy(hidden)[0], hidden


def with_state(policy: Policy) -> TensorDictModule:
    return TensorDictModule(
        WithState(policy), in_keys=["observation", "hidden"], out_keys=["action", ("next", "hidden")]
    )


# -- changes -----------------------------------------------------------------------------------------------------------


def inner(policy: Any) -> Policy:
    return next(module for module in policy.modules() if isinstance(module, Policy))


def step(policy: Any) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.9)


def replace(policy: Any) -> None:
    first = inner(policy).first
    first.weight = nn.Parameter(first.weight.detach() * 1.1)


def flip(policy: Any) -> None:
    for part in inner(policy).parts:
        part.flag = not part.flag


def gain(policy: Any) -> None:
    for part in inner(policy).parts:
        part.gain = part.gain + 0.5


def turn_round(policy: Any) -> None:
    inner(policy).parts = nn.ModuleList(reversed(inner(policy).parts))


def switch_mode(policy: Any) -> None:
    policy.train(not policy.training)


def hook(policy: Any) -> None:
    def moved(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
        return result + 0.25

    inner(policy).first.register_forward_hook(moved)


def validation(policy: Any) -> None:
    inner(policy).options = {"validate_args": not inner(policy).options.get("validate_args", True)}


def freeze(policy: Any) -> None:
    policy.requires_grad_(False)


CHANGES = [None, None, step, replace, flip, gain, turn_round, switch_mode, hook, validation, freeze]

captured_at_last: Counter[bool] = Counter()


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=NUM_EXAMPLES < 100)
@given(
    parts=st.lists(st.sampled_from(sorted(PARTS)), max_size=5),
    heads=st.lists(st.sampled_from(sorted(HEADS)), min_size=1, max_size=2),
    validate=st.sampled_from([None, True, False]),
    reparametrized=st.booleans(),
    keeps_state=st.booleans(),
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4),
    num_envs=st.integers(1, 3),
)
def check(
    parts: list[str],
    heads: list[str],
    validate: bool | None,
    reparametrized: bool,
    keeps_state: bool,
    changes: list[Any],
    num_envs: int,
) -> None:
    def make() -> Any:
        policy = Policy(parts, heads, validate, reparametrized=reparametrized)
        return with_state(policy) if keeps_state else policy

    plans = both_ways(make, *changes, num_envs=num_envs, steps=24)
    captured_at_last[plans[0].startswith("captured")] += 1
    event(plans[0].partition(",")[0].partition("(")[0])


def test_modules_made_at_random() -> None:
    captured_at_last.clear()
    check()
    assert captured_at_last[True] > captured_at_last[False], captured_at_last
