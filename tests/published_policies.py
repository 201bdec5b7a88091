"""Policies as people have published them, rebuilt from their descriptions: what each is built of is what matters here.

``make(name)`` gives the env's factory and the policy. Those of ``TORCHRL`` need that package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical, Normal

from swath.envs import GymEnv, GymWrapper


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def tanh_network(num_inputs: int, num_outputs: int, gain: float) -> nn.Sequential:
    hidden = [orthogonal(nn.Linear(num_inputs, 64)), nn.Tanh(), orthogonal(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*hidden, orthogonal(nn.Linear(64, num_outputs), gain))


class DiscretePpo(nn.Module):
    """CleanRL's PPO: one method gives action, log-probability, entropy and value."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = tanh_network(4, 1, 1.0)
        self.actor = tanh_network(4, 2, 0.01)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class ContinuousPpo(nn.Module):
    """CleanRL's PPO for continuous actions: the standard deviation is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = tanh_network(3, 1, 1.0)
        self.actor_mean = tanh_network(3, 1, 0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(1, 1))

    def get_action_and_value(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean = self.actor_mean(x)
        std = torch.exp(self.actor_logstd.expand_as(mean.view(-1, 1))).view_as(mean)
        probs = Normal(mean, std)
        action = probs.sample()
        return action, probs.log_prob(action).sum(-1), probs.entropy().sum(-1), self.critic(x)


class QNetwork(nn.Module):
    """CleanRL's DQN; epsilon is a buffer that training changes."""

    epsilon: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
        self.register_buffer("epsilon", torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        greedy = self.network(x).argmax(-1)
        at_random = torch.randint_like(greedy, 2)
        return torch.where(torch.rand(greedy.shape) < self.epsilon, at_random, greedy)


class SacActor(nn.Module):
    """CleanRL's SAC: a squashed Gaussian, written out."""

    action_scale: torch.Tensor
    action_bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 256), nn.Linear(256, 256)
        self.fc_mean, self.fc_logstd = nn.Linear(256, 1), nn.Linear(256, 1)
        self.register_buffer("action_scale", torch.tensor(2.0))
        self.register_buffer("action_bias", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = nn.functional.relu(self.fc1(x))
        x = nn.functional.relu(self.fc2(x))
        mean = self.fc_mean(x)
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(self.fc_logstd(x)) + 1)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(-1, keepdim=True)


class Td3Actor(nn.Module):
    """CleanRL's TD3: noise is added and the action clipped."""

    action_scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc_mu = nn.Linear(3, 256), nn.Linear(256, 256), nn.Linear(256, 1)
        self.register_buffer("action_scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        action = torch.tanh(self.fc_mu(x)) * self.action_scale
        action = action + torch.normal(torch.zeros_like(action), self.action_scale.expand_as(action) * 0.1)
        return action.clamp(-2.0, 2.0)


class RecurrentPpo(nn.Module):
    """CleanRL's PPO with an LSTM between trunk and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(orthogonal(nn.Linear(4, 64)), nn.Tanh())
        self.lstm = nn.LSTM(64, 64)
        self.actor, self.critic = orthogonal(nn.Linear(64, 2), 0.01), orthogonal(nn.Linear(64, 1), 1.0)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.network(x).reshape(1, -1, 64)
        features, (h_now, c_now) = self.lstm(features, (h.reshape(1, -1, 64), c.reshape(1, -1, 64)))
        features = features.reshape(*x.shape[:-1], 64)
        probs = Categorical(logits=self.actor(features))
        action = probs.sample()
        state = h_now.reshape(h.shape), c_now.reshape(c.shape)
        return action, probs.log_prob(action), self.critic(features), *state


class AtariPpo(nn.Module):
    """CleanRL's PPO for images: NatureCNN on bytes."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()]
        last = [nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()]
        self.network = nn.Sequential(*convolutions, *last)
        self.actor, self.critic = nn.Linear(512, 2), nn.Linear(512, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.network(x.view(-1, 4, 84, 84) / 255.0).view(*x.shape[:-3], 512)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample()
        return action, probs.log_prob(action), self.critic(hidden)


class MlpPolicy(nn.Module):
    """Stable-Baselines3's networks: extractor, two latent branches, heads, a diagonal Gaussian."""

    def __init__(self) -> None:
        super().__init__()
        self.features_extractor = nn.Flatten(-1)
        self.policy_net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.value_net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action_net, self.value_head = nn.Linear(64, 1), nn.Linear(64, 1)
        self.log_std = nn.Parameter(torch.zeros(1))

    def extract(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = obs.flatten(-1)
        return self.policy_net(features), self.value_net(features)

    def forward(self, obs: torch.Tensor, deterministic: bool = False) -> tuple[torch.Tensor, ...]:
        latent_pi, latent_vf = self.extract(obs)
        mean = self.action_net(latent_pi)
        distribution = Normal(mean, torch.ones_like(mean) * self.log_std.exp())
        actions = mean if deterministic else distribution.rsample()
        return actions, self.value_head(latent_vf), distribution.log_prob(actions).sum(-1)


class Images(gym.Env):
    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._at = 0
        self._images = self.np_random.integers(0, 256, (8, 4, 84, 84), np.uint8)
        return self._images[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._at += 1
        return self._images[self._at % 8], 1.0, self._at == 20, False, {}


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


def images() -> Any:
    return GymWrapper(Images(), categorical_action_encoding=True)


def on_observations(function: Any, *out_keys: str) -> TensorDictModule:
    return TensorDictModule(function, in_keys=["observation"], out_keys=list(out_keys))


def recurrent_ppo() -> TensorDictModule:
    keys: list[Any] = ["action", "log_prob", "value", ("next", "h"), ("next", "c")]
    return TensorDictModule(RecurrentPpo(), in_keys=["observation", "h", "c"], out_keys=keys)


SAMPLED = ("action", "log_prob", "entropy", "value")
PUBLISHED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "CleanRL ppo": (cartpole, lambda: on_observations(DiscretePpo().get_action_and_value, *SAMPLED)),
    "CleanRL ppo_continuous_action": (
        pendulum,
        lambda: on_observations(ContinuousPpo().get_action_and_value, *SAMPLED),
    ),
    "CleanRL dqn": (cartpole, QNetwork),
    "CleanRL sac_continuous_action": (pendulum, lambda: on_observations(SacActor(), "action", "log_prob")),
    "CleanRL td3_continuous_action": (pendulum, Td3Actor),
    "CleanRL ppo_atari_lstm": (cartpole, recurrent_ppo),
    "CleanRL ppo_atari": (images, lambda: on_observations(AtariPpo(), "action", "log_prob", "value")),
    "Stable-Baselines3 MlpPolicy": (pendulum, lambda: on_observations(MlpPolicy(), "action", "value", "log_prob")),
}


def torchrl_ppo() -> Any:
    """TorchRL's tutorial: a squashed Gaussian on what one network gives."""
    from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal

    network = MLP(in_features=3, out_features=2, num_cells=[256, 256, 256], activation_class=nn.Tanh)
    return ProbabilisticActor(
        TensorDictModule(nn.Sequential(network, NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )


def torchrl_dqn() -> Any:
    """TorchRL's sota-implementations: values, the largest, and now and then another."""
    from torchrl.data import OneHot
    from torchrl.modules import MLP, EGreedyModule, QValueActor

    network = MLP(in_features=4, out_features=2, num_cells=[120, 84])
    return TensorDictSequential(
        QValueActor(network, in_keys=["observation"], spec=OneHot(2)), EGreedyModule(spec=OneHot(2), eps_init=0.3)
    )


def torchrl_a2c() -> Any:
    """TorchRL's sota-implementations: a common trunk, an actor and a value."""
    from torchrl.modules import MLP, ActorValueOperator, OneHotCategorical, ProbabilisticActor, ValueOperator

    trunk = on_observations(MLP(in_features=4, out_features=64, num_cells=[64], activate_last_layer=True), "hidden")
    actor = TensorDictModule(nn.Linear(64, 2), ["hidden"], ["logits"])
    return ActorValueOperator(
        trunk,
        ProbabilisticActor(actor, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True),
        ValueOperator(nn.Linear(64, 1), in_keys=["hidden"]),
    )


TORCHRL: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "TorchRL ppo tutorial": (pendulum, torchrl_ppo),
    "TorchRL dqn_cartpole": (lambda: GymEnv("CartPole-v1"), torchrl_dqn),
    "TorchRL a2c": (lambda: GymEnv("CartPole-v1"), torchrl_a2c),
}
