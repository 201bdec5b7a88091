"""The policies of part `policies`: those that people write, with two hidden layers of 64 and tanh.

Each is made anew with the same weights, and given as it is to swath's collector, to torchrl's, and to a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

#: Of the seeds 0, 1, 2, ... the first whose actor, on CartPole, and whose CNN use both actions.
SEED = 9
HIDDEN = 64
IMAGES = "Images-v0"


def seeded(make: Callable[[], Any]) -> Any:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return make()


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(num_inputs, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, num_outputs),
        )
    )


class Greedy(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


class OwnForward(nn.Module):
    """The greedy action."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.network(observation).argmax(-1)


class Logits(OwnForward):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.network(observation)


class Agent(nn.Module):
    """As CleanRL's PPO writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(4, 2), mlp(4, 1)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), self.critic(x)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.get_action_and_value(observation)


class SmallCnn(nn.Module):
    """Greedy, on images ``[..., 84, 84, 4]`` of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 16, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 9 * 9, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 2),
        )

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        x = images.reshape(-1, *images.shape[-3:]).permute(0, 3, 1, 2) / 255
        return self.network(x).reshape(*images.shape[:-3], 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.logits(observation).argmax(-1)


class NoStart(nn.Module):
    """``is_init`` for torchrl's LSTMModule: never set, since who calls it zeroes the state where an episode starts."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*observation.shape[:-1], 1, dtype=torch.bool)


# -- policies ----------------------------------------------------------------------------------------------------------


def sequential() -> TensorDictModule:
    return _on_observations(nn.Sequential(*mlp(4, 2), Greedy()))


def own_forward() -> TensorDictModule:
    return _on_observations(OwnForward())


def function() -> Callable[[torch.Tensor], torch.Tensor]:
    network = mlp(4, 2)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return network(observation).argmax(-1)

    return policy


def agent() -> TensorDictModule:
    return _on_observations(Agent(), "action", "log_prob", "value")


def probabilistic() -> ProbabilisticTensorDictSequential:
    sample = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], **_sampling(Categorical))
    parts: list[Any] = [_on_observations(Logits(), "logits"), sample]
    return ProbabilisticTensorDictSequential(*parts)


def probabilistic_actor() -> Any:
    from torchrl.modules import MLP, ProbabilisticActor

    network = MLP(in_features=4, out_features=2, num_cells=[HIDDEN, HIDDEN], activation_class=nn.Tanh)
    network.load_state_dict(mlp(4, 2).state_dict())
    return ProbabilisticActor(_on_observations(network, "logits"), in_keys=["logits"], **_sampling(Categorical))


def cnn() -> TensorDictModule:
    return _on_observations(seeded(SmallCnn))


def lstm() -> TensorDictSequential:
    from torchrl.modules import LSTMModule

    def make() -> TensorDictSequential:
        keys = {"in_keys": ["embedding", "h", "c"], "out_keys": ["features", ("next", "h"), ("next", "c")]}
        parts: list[Any] = [
            _on_observations(NoStart(), "is_init"),
            _on_observations(nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh()), "embedding"),
            LSTMModule(input_size=HIDDEN, hidden_size=HIDDEN, **keys),
            TensorDictModule(nn.Linear(HIDDEN, 2), in_keys=["features"], out_keys=["logits"]),
            TensorDictModule(Greedy(), in_keys=["logits"], out_keys=["action"]),
        ]
        return TensorDictSequential(*parts)

    return seeded(make)


def sac() -> Any:
    from torchrl.modules import ProbabilisticActor, TanhNormal

    network = nn.Sequential(*mlp(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        _on_observations(network, "loc", "scale"),
        in_keys=["loc", "scale"],
        distribution_kwargs={"low": -2.0, "high": 2.0},
        **_sampling(TanhNormal),
    )


def _on_observations(network: nn.Module, *out_keys: str) -> TensorDictModule:
    return TensorDictModule(network, in_keys=["observation"], out_keys=list(out_keys or ["action"]))


def _sampling(distribution: type) -> dict[str, Any]:
    return {
        "distribution_class": distribution,
        "return_log_prob": True,
        "log_prob_key": "log_prob",
        "default_interaction_type": InteractionType.RANDOM,
    }


# -- an env for images -------------------------------------------------------------------------------------------------


class Images(gymnasium.Env):
    """Images of noise, made once; episodes of 50 steps."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._images = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._images[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return self._images[self._step % 16], 1.0, self._step == 50, False, {}


gymnasium.register(IMAGES, f"{__name__}:Images", disable_env_checker=True, order_enforce=False)
