"""Part `transforms`: TorchRL's envs with its transforms and policies, as its published scripts set them up.

The very same env in swath's Collector and in TorchRL's; in swath's also with the env left as it is. What the scripts
are is in tests/torchrl_scripts.py. Before anything is timed, both must have delivered the same data.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from check import WrongData
from interleaved import order_of
from report import markdown_table, median_ratio, spread

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from torchrl_scripts import CARTPOLE, CHEETAH, SCRIPTS, Pixels, Script, collected, first_difference

STEPS_PER_BATCH = 250


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


# -- cases -------------------------------------------------------------------------------------------------------------


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
    script: Script
    counts: tuple[int, ...] = (1, 8)
    #: Of TorchRL's published scripts.
    is_published: bool = False
    make_base: Callable[[], Any] | None = None

    @property
    def title(self) -> str:
        return self.script.title

    def make_env(self, num_envs: int) -> Any:
        return self.script.make_env(num_envs, self.make_base)


COUNTERS = ("StepCounter", "RewardSum")
#: The tutorial has one env; with eight the convolutions take minutes, in either library.
ONLY = {"recurrent-dqn-pixels": (1,)}
CASES = {
    "counters": Case(Script("StepCounter, RewardSum (CartPole)", CARTPOLE, COUNTERS, greedy)),
    "norm": Case(
        Script(
            "ObservationNorm, DoubleToFloat, StepCounter, RewardSum (HalfCheetah)",
            CHEETAH,
            (
                ("ObservationNorm", {"loc": 0.5, "scale": 2.0, "in_keys": ["observation"]}),
                "DoubleToFloat",
                *COUNTERS,
            ),
            tanh_actions,
        )
    ),
    "vecnorm": Case(
        Script(
            "VecNormV2, DoubleToFloat, StepCounter, RewardSum (HalfCheetah)",
            CHEETAH,
            (("VecNormV2", {"in_keys": ["observation"]}), "DoubleToFloat", *COUNTERS),
            tanh_actions,
        )
    ),
    "pixels": Case(
        Script(
            "ToTensorImage, GrayScale, CatFrames (84 × 84 pixels)",
            "pixels",
            (
                ("ToTensorImage", {"in_keys": ["pixels"]}),
                ("GrayScale", {"in_keys": ["pixels"]}),
                ("CatFrames", {"N": 4, "dim": -3, "in_keys": ["pixels"]}),
            ),
            on_pixels,
        ),
        make_base=pixels,
    ),
    "guest": Case(
        Script("a transform of one's own (CartPole), not lowered", CARTPOLE, (unknown_transform, *COUNTERS), greedy)
    ),
    **{name: Case(script, ONLY.get(name, (1, 8)), is_published=True) for name, script in SCRIPTS.items()},
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
    for name in options.stacks or CASES:
        case = CASES[name]
        if case.script.is_missing:
            print(f"{case.title}: left out, it needs the package {case.script.needed!r}\n")
            continue
        for num_envs in case.counts:
            check(case, num_envs)
            yield measure(case, num_envs, options)


def check(case: Case, num_envs: int) -> None:
    """Raise WrongData unless both libraries deliver the same, bit by bit, from the same random numbers."""
    from torchrl.collectors import Collector as TheirCollector

    from swath.collectors import Collector

    batches = []
    for kind in (Collector, TheirCollector):
        torch.manual_seed(0)
        env = case.make_env(num_envs)
        batches.append(collected(kind, env, case.script.make_policy(env), steps=30, num_batches=3)[0])
    problem = first_difference(*batches)
    if problem is not None:
        raise WrongData(f"{case.title}, {num_envs} env: {problem}")


def measure(case: Case, num_envs: int, options: argparse.Namespace) -> Measured:
    from torchrl.collectors import Collector as TheirCollector

    from swath.collectors import Collector
    from swath.envs import GuestEnv

    def collector(name: str) -> Any:
        torch.manual_seed(0)
        env = case.make_env(num_envs)
        policy = case.script.make_policy(env)
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
        rows.append([title, *cells, *[""] * (6 - len(cells))])
    heads = [f"{what}, {n} env" for n in (1, 8) for what in ("swath", "TorchRL", "gain")]
    lines = [markdown_table(["env", *heads], rows)]
    for n in (1, 8):
        gains = [result.ratio("torchrl") for result in results if result.case.is_published and result.num_envs == n]
        if gains:
            lines.append(f"Published scripts, {n} env: median {median(gains):.1f} ×, least {min(gains):.1f} ×")
    return "\n\n".join(lines)
