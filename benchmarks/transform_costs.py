"""What each transform of swath.envs adds to a step, in µs: ``python transform_costs.py``.

Of an env whose own step is nearly free; the same env with and without the transform, in turns, the best of each. What
drives the env (NoopResetEnv, FrameSkipTransform, EndOfLifeTransform) is not here: it costs steps of the env.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import swath.envs as envs
from swath.rollout.strip import Strip

STEPS, REPEATS = 50, 40
OBS, IMAGE = ["observation"], ["pixels"]
SPACES = {
    "observation": spaces.Box(-np.inf, np.inf, (17,), np.float64),
    "other": spaces.Box(-np.inf, np.inf, (6,), np.float64),
    "pixels": spaces.Box(0, 255, (84, 84, 3), np.uint8),
    "action_mask": spaces.MultiBinary(6),
}


class Free(gymnasium.Env):
    """Gives the same observation again and again."""

    def __init__(self, keys: tuple[str, ...], is_discrete: bool) -> None:
        self.observation_space = spaces.Dict({key: SPACES[key] for key in keys})
        self.action_space = spaces.Discrete(6) if is_discrete else spaces.Box(-1, 1, (6,), np.float32)
        self._given = {key: np.ones(space.shape or (), space.dtype) for key, space in self.observation_space.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        return self._given, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self._given, 1.0, False, False, {}


def planar() -> envs.Transform:
    return envs.ToTensorImage(in_keys=IMAGE)


#: Name: the transform, the keys that the env gives, and what must come before it.
CASES: dict[str, tuple[Callable[[], envs.Transform], str, tuple[Callable[[], envs.Transform], ...]]] = {
    "StepCounter": (lambda: envs.StepCounter(10**6), "observation", ()),
    "RewardSum": (envs.RewardSum, "observation", ()),
    "InitTracker": (envs.InitTracker, "observation", ()),
    "RandomTruncationTransform": (
        lambda: envs.RandomTruncationTransform(10**6, 10**6, 0.5),
        "observation",
        (envs.StepCounter,),
    ),
    "DoubleToFloat": (lambda: envs.DoubleToFloat(OBS), "observation", ()),
    "DTypeCastTransform": (
        lambda: envs.DTypeCastTransform(torch.float64, torch.float32, OBS),
        "observation",
        (),
    ),
    "ObservationNorm": (lambda: envs.ObservationNorm(0.5, 2.0, OBS), "observation", ()),
    "VecNorm": (lambda: envs.VecNorm(OBS), "observation", ()),
    "VecNormV2": (lambda: envs.VecNormV2(OBS), "observation", ()),
    "RewardScaling": (lambda: envs.RewardScaling(0.0, 2.0), "observation", ()),
    "RewardClipping": (lambda: envs.RewardClipping(-1.0, 1.0), "observation", ()),
    "ClipTransform": (lambda: envs.ClipTransform(OBS, low=-1.0, high=1.0), "observation", ()),
    "SignTransform": (lambda: envs.SignTransform(["reward"]), "observation", ()),
    "CatTensors": (lambda: envs.CatTensors(["observation", "other"], "both"), "observation other", ()),
    "UnsqueezeTransform": (lambda: envs.UnsqueezeTransform(-1, in_keys=OBS), "observation", ()),
    "SqueezeTransform": (
        lambda: envs.SqueezeTransform(-1, in_keys=OBS),
        "observation",
        (lambda: envs.UnsqueezeTransform(-1, in_keys=OBS),),
    ),
    "FlattenObservation (an image)": (lambda: envs.FlattenObservation(-3, -1, IMAGE), "pixels", ()),
    "PermuteTransform (an image)": (lambda: envs.PermuteTransform((-1, -3, -2), IMAGE), "pixels", ()),
    "ExcludeTransform": (lambda: envs.ExcludeTransform("other"), "observation other", ()),
    "SelectTransform": (lambda: envs.SelectTransform("observation"), "observation other", ()),
    "RenameTransform": (lambda: envs.RenameTransform(OBS, ["state"]), "observation", ()),
    "TensorDictPrimer": (
        lambda: envs.TensorDictPrimer(h=envs.Unbounded((64,)), expand_specs=True),
        "observation",
        (),
    ),
    "CatFrames (4 vectors)": (lambda: envs.CatFrames(4, -1, OBS), "observation", ()),
    "CatFrames (4 gray images)": (
        lambda: envs.CatFrames(4, -3, IMAGE),
        "pixels",
        (planar, lambda: envs.GrayScale(IMAGE)),
    ),
    "TimeMaxPool": (lambda: envs.TimeMaxPool(OBS, OBS, 2), "observation", ()),
    "ToTensorImage": (planar, "pixels", ()),
    "GrayScale": (lambda: envs.GrayScale(IMAGE), "pixels", (planar,)),
    "Resize (to 42 × 42)": (lambda: envs.Resize(42, in_keys=IMAGE), "pixels", (planar,)),
    "CenterCrop (to 64 × 64)": (lambda: envs.CenterCrop(64, in_keys=IMAGE), "pixels", (planar,)),
    "ActionScaling": (envs.ActionScaling, "observation", ()),
    "ActionDiscretizer": (lambda: envs.ActionDiscretizer(5), "observation", ()),
    "DiscreteActionProjection": (lambda: envs.DiscreteActionProjection(6, 8), "observation discrete", ()),
    "ActionMask": (envs.ActionMask, "observation action_mask discrete", ()),
}


def stepping(keys: str, num_envs: int, transforms: list[envs.Transform]) -> Callable[[], float]:
    """Takes some steps; the µs of one."""
    names = keys.split()
    free = partial(Free, tuple(name for name in names if name != "discrete"), "discrete" in names)
    env: Any = envs.SerialEnv(num_envs, lambda: envs.GymWrapper(free()))
    env = envs.TransformedEnv(env, envs.Compose(*transforms))
    strip = Strip(env.row_layout(), STEPS)
    stepper = env.bind(strip)
    stepper.reset(0, list(range(num_envs)))

    def run() -> float:
        started = time.perf_counter()
        for t in range(STEPS):
            stepper.step(t)
        return (time.perf_counter() - started) / STEPS * 1e6

    return run


def cost(name: str, num_envs: int) -> float:
    make, keys, before = CASES[name]
    without = stepping(keys, num_envs, [each() for each in before])
    with_it = stepping(keys, num_envs, [*(each() for each in before), make()])
    best = [min(pair) for pair in zip(*[(without(), with_it()) for _ in range(REPEATS)], strict=True)]
    return max(0.0, best[1] - best[0])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| transform | 1 env, µs | 8 envs, µs |\n| --- | ---: | ---: |")
    for name in CASES:
        print(f"| {name} | {cost(name, 1):.1f} | {cost(name, 8):.1f} |", flush=True)


if __name__ == "__main__":
    main()
