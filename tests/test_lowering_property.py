"""Stacks of TorchRL's transforms in any order: lowered, the env gives what it gives as a guest, and in TorchRL's own.

``make test-torchrl`` runs these.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from swath.collectors import Collector
from swath.envs import GuestEnv

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 17


class Foretold(gymnasium.Env):
    """What it gives follows from its number, the step of the episode and the action: one reset more changes nothing."""

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind
        image = spaces.Box(0, 255, (8, 6, 3), np.uint8)
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        other = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = {
            "vector": vector,
            "dict": spaces.Dict(observation=vector, other=other),
            "pixels": image,
        }[kind]
        self.action_space = spaces.Discrete(3)
        self.count = 0

    def _observe(self, action: int) -> Any:
        drawn = np.random.default_rng((self.number, self.count, action))
        if self.kind == "pixels":
            return drawn.integers(0, 256, (8, 6, 3), dtype=np.uint8)
        vector = drawn.normal(size=3) * 3
        return vector if self.kind == "vector" else {"observation": vector, "other": drawn.normal(size=2).astype("f4")}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self._observe(0), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        terminated = self.count == 4 + self.number
        truncated = not terminated and self.count == 6
        return self._observe(int(action)), 0.3 * self.count - int(action), terminated, truncated, {}


def choose(tensordict: Any) -> Any:
    """The action follows from the step of the batch alone: each way of collecting gets the same."""
    choose.count += 1  # type: ignore[attr-defined]
    envs = torch.arange(max(1, tensordict.batch_size.numel())).view(tensordict.batch_size)
    action = torch.nn.functional.one_hot((envs + choose.count) % 3, 3)  # type: ignore[attr-defined]
    return tensordict.set("action", action)


#: By name: what makes one, of the observation key that is there and a number that was drawn.
OF_VECTORS: dict[str, Callable[[Any, str, int], Any]] = {
    "StepCounter": lambda t, key, n: t.StepCounter(max_steps=[None, 3, 5][n % 3], step_count_key=f"steps{n}"),
    "RewardSum": lambda t, key, n: t.RewardSum(in_keys=["reward"], out_keys=[f"sum{n}"]),
    "InitTracker": lambda t, key, n: t.InitTracker(init_key=f"init{n}"),
    "DoubleToFloat": lambda t, key, n: t.DoubleToFloat(in_keys=[key]),
    "ObservationNorm": lambda t, key, n: t.ObservationNorm(
        loc=0.3 * n, scale=1.5 + n, in_keys=[key], standard_normal=n % 2 == 0
    ),
    "RewardScaling": lambda t, key, n: t.RewardScaling(loc=0.1 * n, scale=2.0 + n, standard_normal=n % 2 == 0),
    "RewardClipping": lambda t, key, n: t.RewardClipping(-1.0, 0.5 + n),
    "ClipTransform": lambda t, key, n: t.ClipTransform(in_keys=[key], low=-1 - n, high=1 + n),
    "SignTransform": lambda t, key, n: t.SignTransform(in_keys=["reward"]),
    "VecNorm": lambda t, key, n: t.VecNorm(in_keys=[key], decay=0.9),
    "VecNormV2": lambda t, key, n: t.VecNormV2(in_keys=[key], decay=0.9),
    "UnsqueezeTransform": lambda t, key, n: t.UnsqueezeTransform(dim=-1, in_keys=[key], out_keys=[f"more{n}"]),
    "CatFrames": lambda t, key, n: t.CatFrames(
        N=2 + n % 3, dim=-1, in_keys=[key], out_keys=[f"stacked{n}"], padding=["same", "constant"][n % 2]
    ),
    "CatTensors": lambda t, key, n: t.CatTensors(in_keys=[key], out_key=f"joined{n}", del_keys=False),
    "RenameTransform": lambda t, key, n: t.RenameTransform(in_keys=[key], out_keys=[f"copy{n}"], create_copy=True),
    "FlattenObservation": lambda t, key, n: t.FlattenObservation(-1, -1, in_keys=[key]),
}
OF_PIXELS: dict[str, Callable[[Any, str, int], Any]] = {
    "StepCounter": OF_VECTORS["StepCounter"],
    "RewardSum": OF_VECTORS["RewardSum"],
    "ToTensorImage": lambda t, key, n: t.ToTensorImage(in_keys=[key], from_int=True),
    "GrayScale": lambda t, key, n: t.GrayScale(in_keys=[key]),
    "CatFrames": lambda t, key, n: t.CatFrames(N=2 + n % 3, dim=-3, in_keys=[key]),
    "PermuteTransform": lambda t, key, n: t.PermuteTransform([-1, -3, -2], in_keys=[key]),
}


@st.composite
def stacks(draw: Any) -> tuple[str, int, bool, tuple[tuple[str, int], ...]]:
    kind = draw(st.sampled_from(["vector", "dict", "pixels"]))
    if kind == "pixels":  # what is next needs what was before
        images = ["ToTensorImage", "GrayScale", "CatFrames"][: draw(st.integers(0, 3))]
        counters = draw(st.lists(st.sampled_from(["StepCounter", "RewardSum"]), max_size=2))
        names = draw(st.sampled_from([[*images, *counters], [*counters, *images]]))
    else:
        names = draw(st.lists(st.sampled_from(sorted(OF_VECTORS)), max_size=5))
    numbers = draw(st.lists(st.integers(0, 9), min_size=len(names), max_size=len(names), unique=True))
    return kind, draw(st.sampled_from([1, 3])), draw(st.booleans()), tuple(zip(names, numbers, strict=True))


def make_env(kind: str, num_envs: int, inside: bool, stack: Any) -> Any:
    from torchrl import envs

    table = OF_PIXELS if kind == "pixels" else OF_VECTORS
    key = "pixels" if kind == "pixels" else "observation"  # as TorchRL calls an image

    def transforms() -> Any:
        return envs.Compose(*[table[name](envs, key, number) for name, number in stack])

    def make(number: int) -> Any:
        env = envs.GymWrapper(Foretold(number, kind))
        return envs.TransformedEnv(env, transforms()) if inside else env

    env = make(0) if num_envs == 1 else envs.SerialEnv(num_envs, [lambda n=n: make(n) for n in range(num_envs)])
    return env if inside else envs.TransformedEnv(env, transforms())


def collected(kind: Any, env: Any, num_envs: int) -> tuple[list[Any], str]:
    choose.count = 0  # type: ignore[attr-defined]
    collector = kind(env, choose, frames_per_batch=STEPS * num_envs, total_frames=3 * STEPS * num_envs)
    try:
        stream = iter(collector)
        choose.count = 0  # type: ignore[attr-defined]  # what comes before the first batch may call the policy, too
        batches = [next(stream).clone() for _ in range(3)]
        return batches, collector.env_plan() if kind is Collector else ""
    finally:
        collector.shutdown()


def assert_same(ours: list[Any], theirs: list[Any], who: str) -> None:
    for number, (own, expected) in enumerate(zip(ours, theirs, strict=True)):
        own, expected = own.exclude("collector"), expected.exclude("collector")
        assert own.batch_size == expected.batch_size
        assert set(own.keys(True, True)) == set(expected.keys(True, True)), who
        for key in expected.keys(True, True):
            assert own[key].dtype == expected[key].dtype, (who, key)
            assert torch.equal(own[key].nan_to_num(7e9), expected[key].nan_to_num(7e9)), (who, f"batch {number}", key)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(stacks())
def test_any_stack(drawn: Any) -> None:
    from torchrl.collectors import Collector as TheirCollector

    kind, num_envs, inside, stack = drawn

    def make() -> Any:
        return make_env(kind, num_envs, inside, stack)

    try:
        make().rollout(3)
    except Exception as error:  # TorchRL itself does not take this stack
        event(f"not taken: {type(error).__name__}")
        return
    guest, _ = collected(Collector, GuestEnv(make(), lower=False), num_envs)
    ours, plan = collected(Collector, make(), num_envs)
    event(plan.partition(":")[0])
    event(plan.partition(":")[2] if plan.startswith("stepped as it is") else "lowered")
    assert_same(ours, guest, f"{drawn}: {plan}, the guest")
    if not any(name.startswith("VecNorm") for name, _ in stack):  # theirs may reset once more, which counts there
        theirs, _ = collected(TheirCollector, make(), num_envs)
        assert_same(ours, theirs, f"{drawn}: {plan}, TorchRL")
