"""Part `transforms`: TorchRL's envs with its transforms and policies, as its published scripts set them up.

The very same env in swath's Collector and in TorchRL's; in swath's also with the env left as it is.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from interleaved import order_of
from report import markdown_table, median_ratio, spread

STEPS_PER_BATCH = 250
CHEETAH = "HalfCheetah-v5"


class Pixels(gymnasium.Env):
    """Two images in turn, which cost nothing to make; episodes of 100 steps.

    Of the size that they are used in: TorchRL's Resize needs torchvision, which is not installed here.
    """

    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        drawn = np.random.default_rng(0).integers(0, 256, (2, 84, 84, 3), dtype=np.uint8)
        self._images = list(drawn)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self._step = 0
        return self._images[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return self._images[self._step % 2], 1.0, self._step == 100, False, {}


# -- policies ----------------------------------------------------------------------------------------------------------


def greedy(env: Any) -> Any:
    """Two hidden layers of 64."""
    width = env.observation_spec["observation"].shape[-1]
    actions = env.action_spec.shape[-1]
    layers = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions))

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            values = self.layers(observation)
            return (values == values.amax(-1, keepdim=True)).long()

    return TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])


def tanh_actions(env: Any) -> Any:
    width, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    layers = nn.Sequential(
        nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions), nn.Tanh()
    )
    return TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])


def on_pixels(env: Any) -> Any:
    class Some(nn.Module):
        """So small that the frames are what is measured."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(84, 4)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            values = self.layer(pixels[..., 0, 0, :])
            return (values == values.amax(-1, keepdim=True)).long()

    return TensorDictModule(Some(), in_keys=["pixels"], out_keys=["action"])


def q_values(env: Any) -> Any:
    """DQN: a network of two layers of 120 and 84, epsilon-greedy."""
    from torchrl.modules import MLP, EGreedyModule, QValueActor

    width = env.observation_spec["observation"].shape[-1]
    network = MLP(
        in_features=width, out_features=env.action_spec.shape[-1], num_cells=[120, 84], activation_class=nn.ReLU
    )
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    return TensorDictSequential(actor, EGreedyModule(env.action_spec, eps_init=0.1, eps_end=0.1, annealing_num_steps=1))


def categorical(env: Any) -> Any:
    """PPO, A2C and discrete SAC on classic control."""
    from torch.distributions import OneHotCategorical
    from torchrl.modules import MLP, ProbabilisticActor

    width = env.observation_spec["observation"].shape[-1]
    network = MLP(
        in_features=width, out_features=env.action_spec.shape[-1], num_cells=[64, 64], activation_class=nn.Tanh
    )
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        module, in_keys=["logits"], spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True
    )


def state_independent(env: Any) -> Any:
    """PPO and A2C on MuJoCo: a mean from the network, a scale of its own."""
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal

    width, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = nn.Sequential(
        MLP(in_features=width, out_features=actions, num_cells=[64, 64], activation_class=nn.Tanh),
        AddStateIndependentNormalScale(actions),
    )
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    kwargs = {"low": env.action_spec.space.low, "high": env.action_spec.space.high, "tanh_loc": False}
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs=kwargs,
        return_log_prob=True,
    )


def state_dependent(env: Any) -> Any:
    """SAC and CrossQ: mean and scale from the network."""
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal

    width, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = nn.Sequential(
        MLP(in_features=width, out_features=2 * actions, num_cells=[256, 256], activation_class=nn.ReLU),
        NormalParamExtractor(),
    )
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    kwargs = {"low": env.action_spec.space.low, "high": env.action_spec.space.high, "tanh_loc": False}
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs=kwargs,
        return_log_prob=False,
    )


def noisy(env: Any) -> Any:
    """TD3: a deterministic network, and Gaussian noise."""
    from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule

    width, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = MLP(in_features=width, out_features=actions, num_cells=[256, 256], activation_class=nn.ReLU)
    modules: list[Any] = [
        TensorDictModule(network, in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=env.action_spec),
        AdditiveGaussianModule(env.action_spec, sigma_init=1.0, sigma_end=1.0, annealing_num_steps=1),
    ]
    return TensorDictSequential(*modules)


def wandering(env: Any) -> Any:
    """DDPG: a deterministic network, and Ornstein-Uhlenbeck noise, which needs to know where episodes begin."""
    from torchrl.modules import MLP, OrnsteinUhlenbeckProcessModule, TanhModule

    width, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = MLP(in_features=width, out_features=actions, num_cells=[256, 256], activation_class=nn.ReLU)
    modules: list[Any] = [
        TensorDictModule(network, in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=env.action_spec),
        OrnsteinUhlenbeckProcessModule(eps_init=1.0, eps_end=1.0, annealing_num_steps=1, spec=env.action_spec),
    ]
    return TensorDictSequential(*modules)


# -- envs --------------------------------------------------------------------------------------------------------------


def several(num_envs: int, make: Callable[[], Any]) -> Any:
    from torchrl.envs import SerialEnv

    return make() if num_envs == 1 else SerialEnv(num_envs, make)


def transformed(make: Callable[[], Any], *names: str | Callable[[Any], Any]) -> Callable[[int], Any]:
    """TorchRL's env with its transforms, by name or made."""

    def make_env(num_envs: int) -> Any:
        import torchrl.envs as envs

        env = several(num_envs, make)
        transforms = [getattr(envs, name)() if isinstance(name, str) else name(envs) for name in names]
        return envs.TransformedEnv(env, envs.Compose(*transforms))

    return make_env


def gym(env_id: str) -> Callable[[], Any]:
    def make() -> Any:
        from torchrl.envs import GymEnv

        return GymEnv(env_id)

    return make


def pixels() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(Pixels())


def unknown_transform(envs: Any) -> Any:
    class OfOnesOwn(envs.Transform):
        def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
            return obs * 1.5

        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            return self._call(tensordict_reset)

    return OfOnesOwn(in_keys=["observation"], out_keys=["observation"])


@dataclass(frozen=True)
class Case:
    title: str
    make_env: Callable[[int], Any]
    make_policy: Callable[[Any], Any]
    counts: tuple[int, ...] = (1, 8)
    #: Of TorchRL's published scripts.
    is_script: bool = False


COUNTERS = ("StepCounter", "RewardSum")
CLASSIC = transformed(gym("CartPole-v1"), "RewardSum", "StepCounter")
CASES = {
    "counters": Case("StepCounter, RewardSum (CartPole)", transformed(gym("CartPole-v1"), *COUNTERS), greedy),
    "norm": Case(
        "ObservationNorm, DoubleToFloat, StepCounter, RewardSum (HalfCheetah)",
        transformed(
            gym(CHEETAH),
            lambda envs: envs.ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]),
            "DoubleToFloat",
            *COUNTERS,
        ),
        tanh_actions,
    ),
    "vecnorm": Case(
        "VecNormV2, DoubleToFloat, StepCounter, RewardSum (HalfCheetah)",
        transformed(gym(CHEETAH), lambda envs: envs.VecNormV2(in_keys=["observation"]), "DoubleToFloat", *COUNTERS),
        tanh_actions,
    ),
    "pixels": Case(
        "ToTensorImage, GrayScale, CatFrames (84 × 84 pixels)",
        transformed(
            pixels,
            lambda envs: envs.ToTensorImage(in_keys=["pixels"]),
            lambda envs: envs.GrayScale(in_keys=["pixels"]),
            lambda envs: envs.CatFrames(N=4, dim=-3, in_keys=["pixels"]),
        ),
        on_pixels,
    ),
    "guest": Case(
        "a transform of one's own (CartPole), not lowered",
        transformed(gym("CartPole-v1"), unknown_transform, *COUNTERS),
        greedy,
    ),
    "dqn": Case("DQN, CartPole", CLASSIC, q_values, is_script=True),
    "ppo": Case("PPO, CartPole", CLASSIC, categorical, is_script=True),
    "discrete-sac": Case(
        "discrete SAC, CartPole",
        transformed(gym("CartPole-v1"), "InitTracker", "StepCounter", "DoubleToFloat", "RewardSum"),
        categorical,
        is_script=True,
    ),
    "ppo-mujoco": Case(
        "PPO, HalfCheetah",
        transformed(
            gym(CHEETAH),
            lambda envs: envs.VecNormV2(in_keys=["observation"], decay=0.99999, eps=1e-2),
            lambda envs: envs.ClipTransform(in_keys=["observation"], low=-10, high=10),
            "RewardSum",
            "StepCounter",
            lambda envs: envs.DoubleToFloat(in_keys=["observation"]),
        ),
        state_independent,
        is_script=True,
    ),
    "sac": Case(
        "SAC, HalfCheetah",
        transformed(gym(CHEETAH), "InitTracker", lambda envs: envs.StepCounter(1000), "DoubleToFloat", "RewardSum"),
        state_dependent,
        is_script=True,
    ),
    "td3": Case(
        "TD3, HalfCheetah",
        transformed(gym(CHEETAH), "InitTracker", lambda envs: envs.StepCounter(1000), "DoubleToFloat", "RewardSum"),
        noisy,
        is_script=True,
    ),
    "ddpg": Case(
        "DDPG, HalfCheetah",
        transformed(gym(CHEETAH), "InitTracker", lambda envs: envs.StepCounter(1000), "DoubleToFloat", "RewardSum"),
        wandering,
        is_script=True,
    ),
}
CONTENDERS = {"swath": "swath Collector", "swath-guest": "swath, env as it is", "torchrl": "torchrl Collector"}


@dataclass
class Measured:
    """Frames per second of every repeat."""

    case: Case
    num_envs: int
    plans: dict[str, str] = field(default_factory=dict)
    fps: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, name: str) -> float:
        return median_ratio(self.fps["swath"], self.fps[name])

    def table(self) -> str:
        lines = [f"{self.case.title}, {self.num_envs} env", *(f"  {what}: {plan}" for what, plan in self.plans.items())]
        for name, samples in self.fps.items():
            cell = "" if name == "swath" else f"{self.ratio(name):.2f} ×"
            lines.append(f"  {CONTENDERS[name]:<22}{spread(samples)}{cell:>11}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {"case": self.case.title, "num_envs": self.num_envs, "plans": self.plans, "fps": self.fps}


def heading(options: argparse.Namespace) -> str:
    return (
        f"TorchRL's envs with transforms, in one process; {options.repeats} repeats of at least {options.seconds:g} s, "
        f"interleaved; batches of {STEPS_PER_BATCH} steps"
    )


def run(options: argparse.Namespace) -> Iterator[Measured]:
    for case in CASES.values():
        for num_envs in case.counts:
            yield measure(case, num_envs, options)


def measure(case: Case, num_envs: int, options: argparse.Namespace) -> Measured:
    from torchrl.collectors import Collector as TheirCollector

    from swath.collectors import Collector
    from swath.envs import GuestEnv

    def collector(name: str) -> Any:
        torch.manual_seed(0)
        env = case.make_env(num_envs)
        policy = case.make_policy(env)
        frames = STEPS_PER_BATCH * num_envs
        if name == "torchrl":
            return TheirCollector(env, policy, frames_per_batch=frames, total_frames=-1)
        return Collector(GuestEnv(env, lower=name == "swath"), policy, frames_per_batch=frames, total_frames=-1)

    result = Measured(case, num_envs)
    collectors = {name: collector(name) for name in CONTENDERS}
    try:
        streams = {name: iter(each) for name, each in collectors.items()}
        result.fps = {name: [] for name in streams}
        for repeat in range(options.repeats + 1):  # the first warms up
            for name in order_of(list(streams), repeat):
                gc.collect()
                fps = _frames_per_second(streams[name], options.seconds or 0.0)
                if repeat:
                    result.fps[name].append(fps)
        ours = collectors["swath"]
        result.plans = {"env": ours.env_plan(), "policy": ours.policy_plan()}
        return result
    finally:
        for each in collectors.values():
            each.shutdown()


def _frames_per_second(stream: Iterator[Any], seconds: float) -> float:
    delivered, started = 0, time.perf_counter()
    while True:
        delivered += next(stream).numel()
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return delivered / elapsed


def markdown(results: Sequence[Measured]) -> str:
    """One row a case: for 1 and 8 envs, frames per second of swath and TorchRL, and how many times more."""
    rows = []
    for title in dict.fromkeys(result.case.title for result in results):
        found = [result for result in results if result.case.title == title]
        cells = [
            cell
            for result in found
            for cell in (
                f"{median(result.fps['swath']):,.0f}",
                f"{median(result.fps['torchrl']):,.0f}",
                f"{result.ratio('torchrl'):.1f} ×",
            )
        ]
        rows.append([title, *cells])
    heads = [f"{what}, {n} env" for n in (1, 8) for what in ("swath", "TorchRL", "gain")]
    lines = [markdown_table(["env", *heads], rows)]
    for n in (1, 8):
        gains = [result.ratio("torchrl") for result in results if result.case.is_script and result.num_envs == n]
        if gains:
            lines.append(f"Published scripts, {n} env: median {median(gains):.1f} ×, least {min(gains):.1f} ×")
    return "\n\n".join(lines)
