"""Envs and policies as TorchRL's published scripts and tutorials set them up, rebuilt from their configuration.

A script is what its collector is given: a base env, the transforms around it, and a policy. Tests show that swath's
collector delivers what TorchRL's does; ``benchmarks/transforms.py`` measures both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

CARTPOLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
#: No id: a scenario of VMAS, which is a batch of envs by itself.
NAVIGATION = "navigation"


class Pixels(gymnasium.Env):
    """Two images in turn, which cost nothing to make; episodes of 100 steps.

    Of the size that they are used in: TorchRL's Resize needs torchvision.
    """

    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def __init__(self, num_actions: int = 4) -> None:
        self.action_space = spaces.Discrete(num_actions)
        drawn = np.random.default_rng(0).integers(0, 256, (2, 84, 84, 3), dtype=np.uint8)
        self._images = list(drawn)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self._step = 0
        return self._images[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return self._images[self._step % 2], 1.0, self._step == 100, False, {}


class LikeCheetah(gymnasium.Env):
    """Has the spaces of HalfCheetah and needs no MuJoCo; what it observes follows from its random numbers and actions.

    Episodes are shorter: it is for tests of data.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (17,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(5, 25))
        self._state = self.np_random.normal(size=17)
        return self._state.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._left -= 1
        self._state = 0.9 * self._state + self.np_random.normal(size=17)
        self._state[:6] += action
        over = self._left <= 0
        return self._state.copy(), float(self._state[0]), over and self._state[1] > 0, over and self._state[1] <= 0, {}


# -- policies ----------------------------------------------------------------------------------------------------------


def sizes(env: Any) -> tuple[int, int]:
    """Of what is observed, and of the action."""
    return env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]


def q_values(env: Any) -> Any:
    """DQN: a network of two layers of 120 and 84, epsilon-greedy."""
    from torchrl.modules import MLP, EGreedyModule, QValueActor

    width, actions = sizes(env)
    network = MLP(in_features=width, out_features=actions, num_cells=[120, 84], activation_class=nn.ReLU)
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    return TensorDictSequential(actor, EGreedyModule(env.action_spec, eps_init=0.1, eps_end=0.1, annealing_num_steps=1))


def categorical(env: Any) -> Any:
    """PPO, A2C and discrete SAC on classic control."""
    from torch.distributions import OneHotCategorical
    from torchrl.modules import MLP, ProbabilisticActor

    width, actions = sizes(env)
    network = MLP(in_features=width, out_features=actions, num_cells=[64, 64], activation_class=nn.Tanh)
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        module, in_keys=["logits"], spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True
    )


def squashed(env: Any, network: nn.Module, *, return_log_prob: bool) -> Any:
    """A Gaussian of what a network gives, between the limits of the action."""
    from torchrl.modules import ProbabilisticActor, TanhNormal

    space = env.action_spec_unbatched.space
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec_unbatched,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high, "tanh_loc": False},
        return_log_prob=return_log_prob,
    )


def state_independent(env: Any) -> Any:
    """PPO and A2C on MuJoCo: a mean from the network, a scale of its own."""
    from torchrl.modules import MLP

    width, actions = sizes(env)
    network = MLP(in_features=width, out_features=actions, num_cells=[64, 64], activation_class=nn.Tanh)
    return squashed(env, nn.Sequential(network, AddStateIndependentNormalScale(actions)), return_log_prob=True)


def state_dependent(env: Any) -> Any:
    """SAC: mean and scale from the network."""
    from torchrl.modules import MLP

    width, actions = sizes(env)
    network = MLP(in_features=width, out_features=2 * actions, num_cells=[256, 256], activation_class=nn.ReLU)
    return squashed(env, nn.Sequential(network, NormalParamExtractor()), return_log_prob=False)


def renormalised(env: Any) -> Any:
    """CrossQ: as SAC's, with batch renormalisation, which is in the mode of evaluation while data are collected."""
    from torchrl.modules import MLP
    from torchrl.modules.models.batchrenorm import BatchRenorm1d

    width, actions = sizes(env)
    network = MLP(
        in_features=width,
        out_features=2 * actions,
        num_cells=[256, 256],
        activation_class=nn.ReLU,
        norm_class=BatchRenorm1d,
        norm_kwargs={"momentum": 0.01, "num_features": 256, "warmup_steps": 100_000},
    )
    options: dict[str, Any] = {"scale_mapping": "biased_softplus_1.0", "scale_lb": 0.1}
    extractor = NormalParamExtractor(**options)
    return squashed(env, nn.Sequential(network, extractor), return_log_prob=False).eval()


def deterministic(env: Any, noise: nn.Module) -> Any:
    from torchrl.modules import MLP, TanhModule

    width, actions = sizes(env)
    network = MLP(in_features=width, out_features=actions, num_cells=[256, 256], activation_class=nn.ReLU)
    modules: list[Any] = [
        TensorDictModule(network, in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=env.action_spec),
        noise,
    ]
    return TensorDictSequential(*modules)


def noisy(env: Any) -> Any:
    """TD3: a deterministic network, and Gaussian noise."""
    from torchrl.modules import AdditiveGaussianModule

    noise = AdditiveGaussianModule(env.action_spec, sigma_init=1.0, sigma_end=1.0, annealing_num_steps=1)
    return deterministic(env, noise)


def wandering(env: Any) -> Any:
    """DDPG: a deterministic network, and Ornstein-Uhlenbeck noise, which needs to know where episodes begin."""
    from torchrl.modules import OrnsteinUhlenbeckProcessModule

    noise = OrnsteinUhlenbeckProcessModule(eps_init=1.0, eps_end=1.0, annealing_num_steps=1, spec=env.action_spec)
    return deterministic(env, noise)


def lstm(num_inputs: int) -> Any:
    from torchrl.modules import LSTMModule

    key = "observation" if num_inputs == 4 else "embed"
    return LSTMModule(input_size=num_inputs, hidden_size=128, in_key=key, out_key="embed")


def values_of_memory(env: Any, *before: Any) -> Any:
    """A network on what an LSTM makes of it, epsilon-greedy."""
    from torchrl.modules import MLP, EGreedyModule, QValueModule

    network = MLP(in_features=128, out_features=2, num_cells=[64])
    modules = [
        *before,
        TensorDictModule(network, in_keys=["embed"], out_keys=["action_value"]),
        QValueModule(action_space=None, spec=env.action_spec_unbatched),
        EGreedyModule(annealing_num_steps=1_000_000, spec=env.action_spec, eps_init=0.2),
    ]
    return TensorDictSequential(*modules)


def remembering(env: Any) -> Any:
    return values_of_memory(env, lstm(4))


def remembering_images(env: Any) -> Any:
    """The recurrent DQN of the tutorial: convolutions, an LSTM, a small network."""
    from torchrl.modules import ConvNet

    convolutions = ConvNet(
        in_features=1,
        num_cells=[32, 32, 64],
        squeeze_output=True,
        aggregator_class=nn.AdaptiveAvgPool2d,
        aggregator_kwargs={"output_size": (1, 1)},
    )
    features = TensorDictModule(convolutions, in_keys=["pixels"], out_keys=["embed"])
    return values_of_memory(env, features, lstm(64))


def of_agents(env: Any) -> Any:
    """The multi-agent tutorial: one network for all agents, a squashed Gaussian for each."""
    from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal

    network = MultiAgentMLP(
        n_agent_inputs=env.observation_spec["agents", "observation"].shape[-1],
        n_agent_outputs=2 * env.full_action_spec[env.action_key].shape[-1],
        n_agents=env.n_agents,
        centralised=False,
        share_params=True,
        depth=2,
        num_cells=256,
        activation_class=nn.Tanh,
    )
    keys: list[Any] = [("agents", "loc"), ("agents", "scale")]
    space = env.full_action_spec_unbatched[env.action_key].space
    return ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(network, NormalParamExtractor()), in_keys=[("agents", "observation")], out_keys=keys
        ),
        spec=env.action_spec_unbatched,
        in_keys=keys,
        out_keys=[env.action_key],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high},
        return_log_prob=True,
    )


# -- scripts -----------------------------------------------------------------------------------------------------------

#: A transform: its name, its name and arguments, or what makes it.
Named = str | tuple[str, dict[str, Any]] | Callable[[Any], Any]


@dataclass(frozen=True)
class Script:
    title: str
    base: str
    transforms: Sequence[Named]
    make_policy: Callable[[Any], Any]
    #: Whether one env has a batch size, too.
    is_batched: bool = False

    def make_env(self, num_envs: int, make_base: Callable[[], Any] | None = None) -> Any:
        """TorchRL's env with its transforms; ``make_base``: of what, if not of its own base env."""
        import torchrl.envs as envs

        make = make_base or (lambda: base_env(self.base))
        if self.base == NAVIGATION:
            env = navigation(num_envs)
        else:
            env = make() if num_envs == 1 and not self.is_batched else envs.SerialEnv(num_envs, make)
        return envs.TransformedEnv(env, envs.Compose(*[made(envs, named) for named in self.transforms]))

    @property
    def needed(self) -> str | None:
        """The package that its base env needs beside TorchRL and Gymnasium."""
        return {CHEETAH: "mujoco", NAVIGATION: "vmas"}.get(self.base)

    @property
    def is_missing(self) -> bool:
        """Whether that is not installed."""
        return self.needed is not None and importlib.util.find_spec(self.needed) is None


def made(envs: Any, named: Named) -> Any:
    if callable(named):
        return named(envs)
    name, arguments = (named, {}) if isinstance(named, str) else named
    return getattr(envs, name)(**arguments)


def base_env(name: str) -> Any:
    from torchrl.envs import GymEnv, GymWrapper

    return GymWrapper(Pixels(2)) if name == "pixels" else GymEnv(name)


def navigation(num_envs: int) -> Any:
    from torchrl.envs import VmasEnv

    return VmasEnv(scenario=NAVIGATION, num_envs=num_envs, continuous_actions=True, max_steps=100, n_agents=3, seed=0)


CLASSIC = ("RewardSum", "StepCounter")
OFF_POLICY = ("InitTracker", ("StepCounter", {"max_steps": 1000}), "DoubleToFloat", "RewardSum")
#: A2C's, whatever the env.
NORMALISED = (
    "RewardSum",
    "StepCounter",
    ("VecNorm", {"in_keys": ["observation"]}),
    ("ClipTransform", {"in_keys": ["observation"], "low": -10, "high": 10}),
    ("DoubleToFloat", {"in_keys": ["observation"]}),
)

SCRIPTS = {
    "dqn": Script("DQN, CartPole", CARTPOLE, CLASSIC, q_values),
    "ppo": Script("PPO, CartPole", CARTPOLE, CLASSIC, categorical),
    "a2c": Script("A2C, CartPole", CARTPOLE, NORMALISED[:-1], categorical),
    "discrete-sac": Script(
        "discrete SAC, CartPole",
        CARTPOLE,
        (("StepCounter", {"max_steps": 500}), "InitTracker", "DoubleToFloat", "RewardSum"),
        categorical,
    ),
    "recurrent-dqn": Script(
        "recurrent DQN (LSTM with primer), CartPole",
        CARTPOLE,
        (
            "StepCounter",
            "InitTracker",
            ("RewardScaling", {"loc": 0.0, "scale": 0.1}),
            lambda envs: lstm(4).make_tensordict_primer(),
        ),
        remembering,
    ),
    "ppo-mujoco": Script(
        "PPO, HalfCheetah",
        CHEETAH,
        (
            ("VecNormV2", {"in_keys": ["observation"], "decay": 0.99999, "eps": 1e-2}),
            ("ClipTransform", {"in_keys": ["observation"], "low": -10, "high": 10}),
            "RewardSum",
            "StepCounter",
            ("DoubleToFloat", {"in_keys": ["observation"]}),
        ),
        state_independent,
    ),
    "a2c-mujoco": Script("A2C, HalfCheetah", CHEETAH, NORMALISED, state_independent),
    "sac": Script("SAC, HalfCheetah", CHEETAH, OFF_POLICY, state_dependent),
    "crossq": Script("CrossQ, HalfCheetah", CHEETAH, OFF_POLICY, renormalised, is_batched=True),
    "td3": Script(
        "TD3, HalfCheetah",
        CHEETAH,
        (("StepCounter", {"max_steps": 1000}), "InitTracker", "DoubleToFloat", "RewardSum"),
        noisy,
    ),
    "ddpg": Script("DDPG, HalfCheetah", CHEETAH, OFF_POLICY, wandering),
    "recurrent-dqn-pixels": Script(
        "recurrent DQN (convolutions, LSTM with primer), 84 × 84 pixels",
        "pixels",
        (
            ("ToTensorImage", {"in_keys": ["pixels"]}),
            ("GrayScale", {"in_keys": ["pixels"]}),
            "StepCounter",
            "InitTracker",
            ("RewardScaling", {"loc": 0.0, "scale": 0.1}),
            ("ObservationNorm", {"loc": 0.5, "scale": 0.3, "standard_normal": True, "in_keys": ["pixels"]}),
            lambda envs: lstm(64).make_tensordict_primer(),
        ),
        remembering_images,
    ),
    "vmas": Script(
        "multi-agent PPO, VMAS navigation",
        NAVIGATION,
        (("RewardSum", {"in_keys": [("agents", "reward")], "out_keys": [("agents", "episode_reward")]}),),
        of_agents,
    ),
}


# -- the same data -----------------------------------------------------------------------------------------------------


def collected(kind: Any, env: Any, policy: Any, *, steps: int, num_batches: int) -> tuple[list[Any], str]:
    """Batches of a collector of either library, and what swath's says of the env; both draw the same numbers."""
    env.set_seed(3)
    torch.manual_seed(5)
    frames = steps * max(1, env.batch_size.numel())
    collector = kind(env, policy, frames_per_batch=frames, total_frames=frames * num_batches)
    try:
        stream = iter(collector)
        torch.manual_seed(7)
        batches = [next(stream).clone() for _ in range(num_batches)]
        return batches, getattr(collector, "env_plan", str)()
    finally:
        collector.shutdown()


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """The first key in which two lists of batches differ; numbers of trajectories are each library's own."""
    for number, (own, expected) in enumerate(zip(ours, theirs, strict=True)):
        own, expected = own.exclude("collector"), expected.exclude("collector")
        keys = {str(key): key for key in expected.keys(True, True)}
        unlike = sorted({str(key) for key in own.keys(True, True)} ^ keys.keys())
        if unlike or own.batch_size != expected.batch_size:
            return f"batch {number}: {own.batch_size} and {expected.batch_size}, keys of one only: {unlike}"
        for name, key in keys.items():
            mine, other = own.get(key), expected.get(key)
            if mine.shape != other.shape or mine.dtype != other.dtype or not torch.equal(mine, other):
                return f"batch {number}: {name} differs"
    return None
