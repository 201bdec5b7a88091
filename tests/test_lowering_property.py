"""Stacks of TorchRL's transforms in any order: lowered, the env gives what it gives as a guest, and in TorchRL's own.

What fits behind the transforms before is known from the keys, shapes and dtypes that they leave, so that TorchRL takes
most of what is drawn. ``make test-torchrl`` runs these.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from swath.collectors import Collector
from swath.envs import GuestEnv
from transform_envs import Foretold

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 17
NUM_ACTIONS = 3
#: How many stacks are drawn.
STACKS = int(os.environ.get("SWATH_STACKS", "30"))

F4, F8, U1, I8, BOOL = torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool
FLOATS = (F4, F8)


@dataclass
class Keys:
    """What the env gives behind the transforms so far: shape and dtype by key; and how many actions there are."""

    leaves: dict[str, tuple[tuple[int, ...], torch.dtype]]
    num_actions: int = NUM_ACTIONS
    #: Keys with which a transform goes on by itself.
    counted: set[str] = field(default_factory=set)
    #: Of rewards: behind a transform that limits them TorchRL takes no other one for rewards.
    is_bounded: bool = False
    is_empty: bool = True

    def observations(self, fits: Callable[[tuple[int, ...], torch.dtype], bool], reward: bool = False) -> list[str]:
        return [
            key
            for key, leaf in self.leaves.items()
            if fits(*leaf) and key not in self.counted and (reward or key != "reward")
        ]

    def put(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.leaves[key] = (shape, dtype)


START: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    "vector": {"observation": ((3,), F8), "reward": ((1,), F4)},
    "dict": {"observation": ((3,), F8), "other": ((2,), F4), "reward": ((1,), F4)},
    "pixels": {"pixels": ((8, 6, 3), U1), "reward": ((1,), F4)},
}

#: A transform's name and arguments.
Drawn = tuple[str, dict[str, Any]]


def is_float(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return dtype in FLOATS


def is_image(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return len(shape) == 3 and shape[-3] == 3 and dtype in FLOATS


def has_dims(least: int) -> Callable[[tuple[int, ...], torch.dtype], bool]:
    return lambda shape, dtype: len(shape) >= least and dtype is not BOOL


def same_or_new(draw: Any, key: str, number: int) -> str:
    """The key itself, or another one beside it."""
    return draw(st.sampled_from([key, f"{key}{number}"])) if key != "reward" else key


# -- by name: draws the arguments that fit, and notes what becomes of the keys; None where nothing fits ----------------


def step_counter(draw: Any, keys: Keys, number: int) -> dict[str, Any]:
    keys.put(f"steps{number}", (1,), I8)
    keys.counted.add(f"steps{number}")
    return {"max_steps": draw(st.sampled_from([None, 1, 3, 5])), "step_count_key": f"steps{number}"}


def reward_sum(draw: Any, keys: Keys, number: int) -> dict[str, Any]:
    keys.put(f"sum{number}", *keys.leaves["reward"])
    keys.counted.add(f"sum{number}")
    return {"in_keys": ["reward"], "out_keys": [f"sum{number}"]}


def init_tracker(draw: Any, keys: Keys, number: int) -> dict[str, Any]:
    keys.put(f"init{number}", (1,), BOOL)
    return {"init_key": f"init{number}"}


def of_key(
    fits: Callable[[tuple[int, ...], torch.dtype], bool],
    arguments: Callable[[Any], dict[str, Any]],
    made: Callable[[tuple[int, ...], torch.dtype, dict[str, Any]], tuple[tuple[int, ...], torch.dtype]] | None = None,
    *,
    renames: bool = True,
    reward: bool = False,
) -> Callable[[Any, Keys, int], dict[str, Any] | None]:
    """Of one that reads a key and writes it, or another one beside it."""

    def maker(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
        fitting = keys.observations(fits, reward)
        if not fitting:
            return None
        key = draw(st.sampled_from(fitting))
        own = arguments(draw)
        out_key = same_or_new(draw, key, number) if renames else key
        keys.is_bounded |= key == "reward"
        if made is not None:
            leaf = made(*keys.leaves[key], own)
            if any(size > 64 for size in leaf[0]) or len(leaf[0]) > 4:
                return None
            keys.put(out_key, *leaf)
        else:
            keys.put(out_key, *keys.leaves[key])
        return {"in_keys": [key], **({} if out_key == key else {"out_keys": [out_key]}), **own}

    return maker


def of_rewards(arguments: Callable[[Any], dict[str, Any]], *, bounds: bool) -> Any:
    def maker(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
        if keys.is_bounded:
            return None
        keys.is_bounded = bounds
        return arguments(draw)

    return maker


def norm(draw: Any) -> dict[str, Any]:
    loc, scale = draw(st.sampled_from([0.0, 0.3, -2.0])), draw(st.sampled_from([0.5, 1.5, 7.0]))
    return {"loc": loc, "scale": scale, "standard_normal": draw(st.booleans())}


def clip(draw: Any) -> dict[str, Any]:
    return {"low": draw(st.sampled_from([-2, -0.25, None])), "high": draw(st.sampled_from([1, 0.5]))}


def frames(draw: Any) -> dict[str, Any]:
    padding = draw(st.sampled_from([{}, {"padding": "constant"}, {"padding": "constant", "padding_value": 3}]))
    return {"N": draw(st.integers(1, 4)), "dim": -1, **padding}


def image_frames(draw: Any) -> dict[str, Any]:
    return {**frames(draw), "dim": -3}


def stacked(shape: tuple[int, ...], dtype: torch.dtype, own: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    sizes = list(shape)
    sizes[own["dim"]] *= own["N"]
    return tuple(sizes), dtype


def squeezed(shape: tuple[int, ...], dtype: torch.dtype, own: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    sizes = list(shape)
    del sizes[own["dim"]]
    return tuple(sizes), dtype


def permuted(shape: tuple[int, ...], dtype: torch.dtype, own: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(shape[dim] for dim in own["dims"]), dtype


def cast(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    fitting = keys.observations(is_float)
    if not fitting:
        return None
    key = draw(st.sampled_from(fitting))
    shape, dtype = keys.leaves[key]
    other = F4 if dtype is F8 else F8
    keys.put(key, shape, other)
    return {"dtype_in": dtype, "dtype_out": other, "in_keys": [key]}


def cat_tensors(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    by_dtype: dict[torch.dtype, list[str]] = {}
    for key in keys.observations(lambda shape, dtype: len(shape) == 1 and dtype in FLOATS):
        by_dtype.setdefault(keys.leaves[key][1], []).append(key)
    dtype = draw(st.sampled_from(sorted(by_dtype, key=str))) if by_dtype else None
    if dtype is None:
        return None
    chosen = draw(st.lists(st.sampled_from(by_dtype[dtype]), min_size=1, max_size=3, unique=True))
    delete = draw(st.booleans())
    width = sum(keys.leaves[key][0][0] for key in chosen)
    for key in chosen if delete else ():
        del keys.leaves[key]
    keys.put(f"joined{number}", (width,), dtype)
    return {"in_keys": chosen, "out_key": f"joined{number}", "del_keys": delete}


def rename(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    fitting = keys.observations(lambda shape, dtype: dtype is not BOOL)
    if not fitting:
        return None
    key = draw(st.sampled_from(fitting))
    copies = draw(st.booleans())
    keys.put(f"named{number}", *keys.leaves[key])
    if not copies:
        del keys.leaves[key]
    return {"in_keys": [key], "out_keys": [f"named{number}"], "create_copy": copies}


def exclude(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    fitting = keys.observations(lambda shape, dtype: dtype is not BOOL)
    if len(fitting) < 2:
        return None
    key = draw(st.sampled_from(fitting))
    del keys.leaves[key]
    return {"keys": [key]}


def select(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    fitting = keys.observations(lambda shape, dtype: True)
    if not fitting:
        return None
    chosen = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3, unique=True))
    kept = {*chosen, *keys.counted, "reward"}
    keys.leaves = {key: leaf for key, leaf in keys.leaves.items() if key in kept}
    return {"keys": [*chosen, *sorted(keys.counted & keys.leaves.keys()), "reward"]}


def only_first(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    return {"frame_skip": draw(st.integers(1, 3))} if keys.is_empty else None


def projection(draw: Any, keys: Keys, number: int) -> dict[str, Any] | None:
    fewer, keys.num_actions = keys.num_actions, keys.num_actions + 2
    return {"num_actions_effective": fewer, "max_actions": keys.num_actions}


MAKERS: dict[str, Callable[[Any, Keys, int], dict[str, Any] | None]] = {
    "StepCounter": step_counter,
    "RewardSum": reward_sum,
    "InitTracker": init_tracker,
    "DoubleToFloat": of_key(
        lambda shape, dtype: dtype is F8, lambda draw: {}, lambda shape, dtype, own: (shape, F4), renames=False
    ),
    "DTypeCastTransform": cast,
    "ObservationNorm": of_key(is_float, norm),
    "RewardScaling": of_rewards(norm, bounds=False),
    "RewardClipping": of_rewards(
        lambda draw: {"clamp_min": -1.0, "clamp_max": draw(st.sampled_from([0.5, 2]))}, bounds=True
    ),
    "ClipTransform": of_key(is_float, clip, reward=True),
    "SignTransform": of_key(is_float, lambda draw: {}, reward=True),
    "VecNorm": of_key(is_float, lambda draw: {"decay": draw(st.sampled_from([0.9, 1.0]))}, renames=False),
    "VecNormV2": of_key(is_float, lambda draw: {"decay": draw(st.sampled_from([0.9, 1.0]))}, renames=False),
    "UnsqueezeTransform": of_key(
        has_dims(1), lambda draw: {"dim": -1}, lambda shape, dtype, own: ((*shape, 1), dtype), renames=True
    ),
    "SqueezeTransform": of_key(
        lambda shape, dtype: len(shape) >= 2 and shape[-1] == 1 and dtype is not BOOL,
        lambda draw: {"dim": -1},
        squeezed,
    ),
    "FlattenObservation": of_key(
        has_dims(2),
        lambda draw: {"first_dim": -2, "last_dim": -1},
        lambda shape, dtype, own: ((*shape[:-2], shape[-2] * shape[-1]), dtype),
    ),
    "PermuteTransform": of_key(
        lambda shape, dtype: len(shape) == 3,
        lambda draw: {"dims": draw(st.sampled_from([[-1, -3, -2], [-1, -2, -3], [-2, -3, -1]]))},
        permuted,
    ),
    "CatTensors": cat_tensors,
    "ExcludeTransform": exclude,
    "SelectTransform": select,
    "RenameTransform": rename,
    "CatFrames": of_key(lambda shape, dtype: len(shape) >= 1 and dtype in FLOATS, frames, stacked),
    "TimeMaxPool": of_key(is_float, lambda draw: {"T": draw(st.integers(1, 3))}),
    "FrameSkipTransform": only_first,
    "DiscreteActionProjection": projection,
}
IMAGES: dict[str, Callable[[Any, Keys, int], dict[str, Any] | None]] = {
    "ToTensorImage": of_key(
        lambda shape, dtype: len(shape) == 3 and shape[-1] == 3 and dtype is U1,
        lambda draw: {},
        lambda shape, dtype, own: ((shape[2], shape[0], shape[1]), F4),
    ),
    "GrayScale": of_key(is_image, lambda draw: {}, lambda shape, dtype, own: ((1, *shape[1:]), dtype)),
    "CatFrames": of_key(lambda shape, dtype: len(shape) == 3 and dtype in FLOATS, image_frames, stacked),
}


@dataclass(frozen=True)
class Case:
    kind: str
    num_envs: int
    #: Whether each env has the transforms itself.
    inside: bool
    #: How many of the transforms are those of an env around the env with the others.
    outer: int
    stack: tuple[Drawn, ...]
    num_actions: int
    options: dict[str, Any]
    #: Which envs are reset after the first batch, besides those whose episodes end.
    reset: tuple[int, ...]


@st.composite
def cases(draw: Any) -> Case:
    kind = draw(st.sampled_from(["vector", "dict", "pixels"]))
    keys = Keys(dict(START[kind]))
    makers = {**MAKERS, **{f"image {name}": maker for name, maker in IMAGES.items()}} if kind == "pixels" else MAKERS
    stack: list[Drawn] = []
    for number in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(sorted(makers)))
        arguments = makers[name](draw, keys, number)
        if arguments is not None:
            stack.append((name.removeprefix("image "), arguments))
            keys.is_empty = False
    num_envs = draw(st.sampled_from([1, 3]))
    options = draw(st.sampled_from([{}, {}, {"reset_at_each_iter": True}, {"max_frames_per_traj": 4}]))
    reset = draw(st.sampled_from([(), (), (0,), (1, 2)])) if num_envs > 1 else ()
    outer = draw(st.integers(0, 2))
    return Case(kind, num_envs, draw(st.booleans()), outer, tuple(stack), keys.num_actions, options, reset)


# -- collecting --------------------------------------------------------------------------------------------------------


def make_env(case: Case) -> Any:
    from torchrl import envs

    def transform(name: str, arguments: dict[str, Any]) -> Any:
        arguments = dict(arguments)
        return getattr(envs, name)(*arguments.pop("keys", ()), **arguments)

    def transformed(env: Any) -> Any:
        made = [transform(*drawn) for drawn in case.stack]
        inner = len(made) - min(case.outer, len(made))
        env = envs.TransformedEnv(env, envs.Compose(*made[:inner]))
        return envs.TransformedEnv(env, envs.Compose(*made[inner:])) if inner < len(made) else env

    def make(number: int) -> Any:
        env = envs.GymWrapper(Foretold(number, case.kind))
        return transformed(env) if case.inside else env

    if case.num_envs == 1:
        env = make(0)
    else:
        env = envs.SerialEnv(case.num_envs, [lambda n=n: make(n) for n in range(case.num_envs)])
    return env if case.inside else transformed(env)


class Chooser:
    """The action follows from the step of the batch alone: each way of collecting gets the same."""

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.count = 0

    def __call__(self, tensordict: Any) -> Any:
        self.count += 1
        envs = torch.arange(max(1, tensordict.batch_size.numel())).view(tensordict.batch_size)
        action = torch.nn.functional.one_hot((envs + self.count) % self.num_actions, self.num_actions)
        return tensordict.set("action", action)


def collected(kind: Any, env: Any, case: Case) -> tuple[list[Any], str]:
    choose = Chooser(case.num_actions)
    frames = STEPS * case.num_envs
    collector = kind(env, choose, frames_per_batch=frames, total_frames=3 * frames, **case.options)
    try:
        stream = iter(collector)
        choose.count = 0  # what comes before the first batch may call the policy, too
        torch.manual_seed(0)  # an action that there is not is drawn again
        batches = []
        for number in range(3):
            batches.append(next(stream).clone())
            if case.reset and number == 0:
                collector.reset(list(case.reset))
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


def check(case: Case) -> str:
    """What became of it: ``refused`` by TorchRL, ``lowered`` or ``as it is``; raises where data differ."""
    from torchrl.collectors import Collector as TheirCollector

    try:
        make_env(case).rollout(3)
    except Exception as error:  # TorchRL itself does not take this stack
        return f"refused: {type(error).__name__}: {error}"
    guest, _ = collected(Collector, GuestEnv(make_env(case), lower=False), case)
    ours, plan = collected(Collector, make_env(case), case)
    assert_same(ours, guest, f"{case}: {plan}, the guest")
    # Theirs may reset once more, which counts in statistics; and it resets all envs where some are asked for.
    if not case.reset and not any(name.startswith("VecNorm") for name, _ in case.stack):
        theirs, _ = collected(TheirCollector, make_env(case), case)
        assert_same(ours, theirs, f"{case}: {plan}, TorchRL")
    return plan


def test_any_stack() -> None:
    became: Counter[str] = Counter()

    @settings(
        max_examples=STACKS,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(cases())
    def check_one(case: Case) -> None:
        what, _, why = check(case).partition(": ")
        event(f"{what}: {why}" if what != "lowered" else what)
        became[what] += 1

    check_one()
    assert became["refused"] < 0.2 * became.total(), became
    assert became["lowered"] > 0.5 * became.total(), became
