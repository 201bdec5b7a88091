"""TorchRL's transforms that remember, of images, and that step envs: lowered, as guests, and ours give the same."""

from __future__ import annotations

import copy
import enum
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from counting import CountingEnv
from swath import envs as ours
from swath.collectors import Collector

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 20
NUM_BATCHES = 3


class PixelEnv(CountingEnv):
    """``CountingEnv`` with an image."""

    def __init__(self, longest: int = 7) -> None:
        super().__init__(longest)
        self.observation_space = spaces.Dict(
            observation=spaces.Box(-np.inf, np.inf, (4,), np.float32), pixels=spaces.Box(0, 255, (6, 5, 3), np.uint8)
        )

    def _observe(self, action: float) -> Any:
        pixels = self.np_random.integers(0, 256, (6, 5, 3), dtype=np.uint8)
        return {"observation": super()._observe(action), "pixels": pixels}


class DoubleEnv(CountingEnv):
    def __init__(self, longest: int = 7) -> None:
        super().__init__(longest)
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)

    def _observe(self, action: float) -> Any:
        return super()._observe(action).astype(np.float64) / 3


class RenderedEnv(CountingEnv):
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self) -> Any:
        image = np.zeros((6, 5, 3), np.uint8)
        image[..., 0] = self.step_count
        image[..., 1] = np.arange(5) + self.episode
        return image


def policy(tensordict: Any) -> Any:
    """What is done depends on the observation; also on a normalised one."""
    some = tensordict.get("observation", None)
    some = tensordict["pixels"].flatten(-3) if some is None else some
    choice = (some.to(torch.float64).abs().sum(-1) * 7).to(torch.int64) % 3
    return tensordict.set("action", torch.nn.functional.one_hot(choice, 3))


def theirs() -> Any:
    import torchrl.envs

    return torchrl.envs


def shapes(make: Callable[[], Any], transform: Callable[[Any], Any], own: bool = False) -> dict[str, Callable[[], Any]]:
    """One env, three with one transform, three with one each."""
    lib: Any = ours if own else theirs()

    def wrapped() -> Any:
        return lib.GymWrapper(make())

    return {
        "one": lambda: lib.TransformedEnv(wrapped(), transform(lib)),
        "transformed serial": lambda: lib.TransformedEnv(lib.SerialEnv(3, [wrapped] * 3), transform(lib)),
        "serial transformed": lambda: lib.SerialEnv(3, [lambda: lib.TransformedEnv(wrapped(), transform(lib))] * 3),
    }


def seed_as_theirs(env: Any, seed: int) -> None:
    """TorchRL's reset their Gymnasium envs at once; ours wait for the next reset."""
    for child in [env] if isinstance(env, ours.TransformedEnv) else env.children:
        for gym_env in child.base_env.gym_envs:
            gym_env.reset(seed=seed)
            seed = ours.next_seed(seed)


def collected(env: Any, seed: int = 3) -> tuple[list[Any], Any, dict[str, torch.Tensor]]:
    if isinstance(env, ours.EnvBase) and not isinstance(env, ours.GuestEnv):
        seed_as_theirs(env, seed)
    else:
        env.set_seed(seed)
    torch.manual_seed(seed)
    num = max(1, env.batch_size.numel())
    collector = Collector(env, policy, frames_per_batch=STEPS * num, total_frames=NUM_BATCHES * STEPS * num)
    batches, state = [], {}
    for batch in collector:
        batches.append(batch.clone())
        guest = getattr(collector.env, "guest", None)
        state = {} if guest is None else {name: leaf.clone() for name, leaf in leaves(guest.state_dict()).items()}
    return batches, collector.env, state


def assert_same(mine: list[Any], others: list[Any]) -> None:
    assert len(mine) == len(others) == NUM_BATCHES
    for ours_, theirs_ in zip(mine, others, strict=True):
        assert set(map(str, ours_.keys(True, True))) == set(map(str, theirs_.keys(True, True)))
        assert_equal(ours_, theirs_)


def assert_equal(ours_: Any, theirs_: Any) -> None:
    for key in theirs_.keys(True, True):
        a, b = ours_.get(key), theirs_.get(key)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), key
        same = (a == b) | ((a != a) & (b != b))
        assert bool(same.all()), (key, (~same).nonzero()[0].tolist(), a[~same][0], b[~same][0])


def compare(make: Callable[[], Any], transform: Callable[[Any], Any], shape: str, own: bool = True) -> Any:
    """Lowered, as a guest, and with swath's own; what the lowered env and the guest remember at the end."""
    lowered, env, state = collected(shapes(make, transform)[shape]())
    assert env.plan().startswith("lowered"), env.plan()
    guest, other, expected = collected(ours.GuestEnv(shapes(make, transform)[shape](), lower=False))
    assert "as it is" in other.plan()
    assert_same(lowered, guest)
    assert bool(torch.cat([batch["next", "done"].reshape(-1) for batch in guest]).any())
    if own:
        with_own, _, _ = collected(shapes(make, transform, own=True)[shape]())
        assert_same(with_own, guest)
    return state, expected


SHAPES = ["one", "transformed serial", "serial transformed"]


def counting() -> Any:
    return CountingEnv(7)


def leaves(state: Any) -> dict[str, torch.Tensor]:
    """All tensors in a state dict, by path."""
    found: dict[str, torch.Tensor] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, torch.Tensor):
            found[path] = node
        elif hasattr(node, "items"):
            for name, value in node.items():
                walk(value, f"{path}/{name}")

    walk(state, "")
    return found


def assert_same_state(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == expected.keys()
    assert any("observation" in name or "pixels" in name for name in mine), mine.keys()
    for name in mine:
        assert torch.equal(mine[name], expected[name]), name


# -- statistics --------------------------------------------------------------------------------------------------------

NORMS: dict[str, Callable[[Any], Any]] = {
    "VecNorm": lambda lib: lib.VecNorm(in_keys=["observation"], new_api=False),
    "VecNorm, reward": lambda lib: lib.VecNorm(in_keys=["observation", "reward"], decay=0.9, eps=1e-2),
    "VecNorm, other key": lambda lib: lib.VecNorm(in_keys=["observation"], out_keys=["normed"]),
    "VecNorm, shapes": lambda lib: lib.VecNorm(in_keys=["observation", "reward"], shapes=[(4,), (1,)], decay=1.0),
    "VecNormV2": lambda lib: lib.VecNormV2(in_keys=["observation"]),
    "VecNormV2, reward": lambda lib: lib.VecNormV2(in_keys=["observation", "reward"], decay=0.9),
    "VecNormV2, other keys": lambda lib: lib.VecNormV2(in_keys=["observation", "reward"], out_keys=["n", "r"]),
    "VecNormV2, all alike": lambda lib: lib.VecNormV2(in_keys=["observation", "reward"], decay=1.0, eps=0.1),
    "VecNormV2, reduced": lambda lib: lib.VecNormV2(in_keys=["observation", "reward"], reduce_batch_dims=True),
    "VecNormV2, reduced, all alike": lambda lib: lib.VecNormV2(
        in_keys=["reward", "observation"], reduce_batch_dims=True, decay=1.0
    ),
    "twice": lambda lib: lib.Compose(
        lib.VecNormV2(in_keys=["observation"]), lib.VecNorm(in_keys=["observation"]), lib.StepCounter()
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_statistics(name: str, shape: str) -> None:
    assert_same_state(*compare(counting, NORMS[name], shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["VecNorm", "VecNormV2", "VecNormV2, reduced"])
def test_statistics_of_doubles(name: str, shape: str) -> None:
    make = {"VecNorm": "VecNorm"}.get(name, name)

    def transform(lib: Any) -> Any:
        norm = NORMS[make](lib)
        return type(norm)(in_keys=["observation"], decay=0.99)

    assert_same_state(*compare(DoubleEnv, transform, shape))


def test_frozen_midway_and_loaded() -> None:
    """What the user does to the object has its effect at once: it is not copied."""

    def run(lower: bool) -> list[Any]:
        lib = theirs()
        norm = lib.VecNormV2(in_keys=["observation"])
        old = lib.VecNorm(in_keys=["reward"], new_api=False)
        env = lib.TransformedEnv(lib.GymWrapper(counting()), lib.Compose(norm, old))
        env.set_seed(3)
        guest = ours.GuestEnv(env, lower=lower)
        collector = Collector(guest, policy, frames_per_batch=STEPS, total_frames=6 * STEPS)
        batches, states = [], []
        for number, batch in enumerate(collector):
            assert guest.plan().startswith("lowered") == lower
            batches.append(batch.clone())
            states.append([copy.deepcopy(each.state_dict()) for each in (norm, old)])
            if number in (0, 1):
                norm.freeze(), old.freeze()
            elif number == 2:
                norm.unfreeze(), old.unfreeze()
                norm.load_state_dict(states[0][0]), old.load_state_dict(states[0][1])
            elif number == 3:
                norm.decay, norm.eps = 0.5, 0.3
        return batches

    lowered, guest = run(True), run(False)
    for mine, other in zip(lowered, guest, strict=True):
        assert_equal(mine, other)


def test_statistics_refused() -> None:
    """What cannot be shown to be equal stays a guest, and says why."""
    for transform, shape, why in (
        (lambda lib: lib.VecNormV2(in_keys=["observation"], stateful=False), "one", "statistics in the data"),
        (
            lambda lib: lib.Compose(lib.RewardSum(), lib.VecNorm(in_keys=["episode_reward"])),
            "transformed serial",
            "counted",
        ),
    ):
        _, env, _ = collected(shapes(counting, transform)[shape]())
        assert "as it is" in env.plan()
        assert why in env.plan()


# -- frames ------------------------------------------------------------------------------------------------------------

FRAMES: dict[str, Callable[[Any], Any]] = {
    "CatFrames": lambda lib: lib.CatFrames(N=3, dim=-1, in_keys=["observation"]),
    "CatFrames, constant": lambda lib: lib.CatFrames(
        N=4, dim=-1, in_keys=["observation"], out_keys=["past"], padding="constant", padding_value=-2.5
    ),
    "CatFrames, one": lambda lib: lib.CatFrames(N=1, dim=-1, in_keys=["observation"]),
    "CatFrames, images": lambda lib: lib.CatFrames(N=3, dim=-3, in_keys=["pixels"]),
    "CatFrames, last dimension": lambda lib: lib.CatFrames(N=3, dim=-1, in_keys=["pixels"]),
    "CatFrames, middle": lambda lib: lib.CatFrames(N=2, dim=-2, in_keys=["pixels"], padding="constant"),
    "TimeMaxPool": lambda lib: lib.TimeMaxPool(in_keys=["observation"], T=3),
    "TimeMaxPool, one": lambda lib: lib.TimeMaxPool(in_keys=["observation"], out_keys=["most"], T=1),
    "TimeMaxPool, images": lambda lib: lib.TimeMaxPool(in_keys=["pixels", "observation"], T=2),
    "both": lambda lib: lib.Compose(
        lib.TimeMaxPool(in_keys=["pixels"], T=2),
        lib.CatFrames(N=2, dim=-3, in_keys=["pixels", "observation"][:1]),
        lib.CatFrames(N=3, dim=-1, in_keys=["observation"]),
        lib.StepCounter(max_steps=5),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FRAMES)
def test_frames(name: str, shape: str) -> None:
    state, expected = compare(PixelEnv, FRAMES[name], shape)
    if "TimeMaxPool" not in name:  # its buffer is in no state dict
        assert_same_state(state, expected)


# -- images ------------------------------------------------------------------------------------------------------------


def from_env(lib: Any) -> Any:
    return lib.Compose(lib.ToTensorImage(), lib.GrayScale(), lib.CatFrames(N=4, dim=-3), lib.StepCounter())


IMAGES: dict[str, Callable[[Any], Any]] = {
    "ToTensorImage": lambda lib: lib.ToTensorImage(),
    "ToTensorImage, half": lambda lib: lib.ToTensorImage(dtype=torch.float16, out_keys=["image"], in_keys=["pixels"]),
    "ToTensorImage, double": lambda lib: lib.ToTensorImage(dtype=torch.float64),
    "ToTensorImage, bytes": lambda lib: lib.ToTensorImage(from_int=False, dtype=torch.uint8),
    "ToTensorImage, not scaled": lambda lib: lib.ToTensorImage(from_int=False),
    "ToTensorImage, tolerant": lambda lib: lib.Compose(
        lib.ToTensorImage(), lib.ToTensorImage(shape_tolerant=True, from_int=True)
    ),
    "GrayScale": lambda lib: lib.Compose(lib.ToTensorImage(from_int=False, dtype=torch.uint8), lib.GrayScale()),
    "all": from_env,
    "normalised": lambda lib: lib.Compose(from_env(lib), lib.VecNormV2(in_keys=["pixels"], reduce_batch_dims=True)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str, shape: str) -> None:
    compare(PixelEnv, IMAGES[name], shape)


def test_an_image_with_a_dimension_more() -> None:
    compare(PixelEnv, lambda lib: lib.ToTensorImage(unsqueeze=True), "one")
    compare(PixelEnv, lambda lib: lib.ToTensorImage(unsqueeze=True), "transformed serial")


class Interpolation(enum.Enum):
    BILINEAR = "bilinear"
    NEAREST = "nearest"


def resize(image: torch.Tensor, size: list[int], interpolation: Any, antialias: bool) -> torch.Tensor:
    assert antialias
    return ours.Resize(size, interpolation=interpolation)._apply_transform(image)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRL's ``Resize`` and ``CenterCrop`` call it; where it is not installed, what they are given shows that."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    monkeypatch.setattr(importlib.import_module("torchrl.envs.transforms._observation"), "_has_tv", True)
    module: Any = types.ModuleType("torchvision.transforms.functional")
    module.InterpolationMode, module.resize = Interpolation, resize
    module.center_crop = lambda image, size: ours.CenterCrop(*size)._apply_transform(image)
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchvision.transforms.functional", module)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("shape", SHAPES)
def test_sizes(shape: str) -> None:
    def transform(lib: Any) -> Any:
        return lib.Compose(
            lib.ToTensorImage(),
            lib.CenterCrop(4, 5),
            lib.Resize(3, 4),
            lib.GrayScale(),
            lib.Resize(w=5, interpolation="nearest", in_keys=["pixels"], out_keys=["large"]),
            lib.CatFrames(N=4, dim=-3),
        )

    compare(PixelEnv, transform, shape)


# -- Gymnasium envs with options ---------------------------------------------------------------------------------------


class FloatEnv(CountingEnv):
    """Rewards that are float32, of which a sum is another one than of Python's."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.float32(reward / 3), *rest


@pytest.mark.parametrize("pixels_only", [True, False])
@pytest.mark.parametrize("num", [1, 3])
def test_pixels(pixels_only: bool, num: int) -> None:
    def make(lib: Any) -> Any:
        def one() -> Any:
            return lib.GymWrapper(RenderedEnv(7), from_pixels=True, pixels_only=pixels_only)

        return lib.TransformedEnv(one() if num == 1 else lib.SerialEnv(num, [one] * num), from_env(lib))

    lowered, env, _ = collected(make(theirs()))
    assert env.plan().startswith("lowered"), env.plan()
    guest, _, _ = collected(ours.GuestEnv(make(theirs()), lower=False))
    assert_same(lowered, guest)
    assert_same(collected(make(ours))[0], guest)
    assert ("observation" in guest[0]) is not pixels_only


@pytest.mark.parametrize("kind", [CountingEnv, FloatEnv])
@pytest.mark.parametrize("num", [1, 3])
def test_frame_skip(kind: Any, num: int) -> None:
    def make() -> Any:
        lib = theirs()

        def one() -> Any:
            return lib.GymWrapper(kind(17), frame_skip=3)

        return lib.TransformedEnv(one() if num == 1 else lib.SerialEnv(num, [one] * num), lib.RewardSum())

    lowered, env, _ = collected(make())
    assert env.plan().startswith("lowered"), env.plan()
    assert_same(lowered, collected(ours.GuestEnv(make(), lower=False))[0])


def test_an_id_with_pixels_and_frame_skip() -> None:
    def make() -> Any:
        return theirs().GymEnv("CartPole-v1", frame_skip=2)

    def run(lower: bool) -> list[Any]:
        torch.manual_seed(0)
        guest = ours.GuestEnv(make(), lower=lower)
        guest.set_seed(1)
        collector = Collector(guest, None, frames_per_batch=STEPS, total_frames=NUM_BATCHES * STEPS)
        torch.manual_seed(0)
        batches = [batch.clone() for batch in collector]
        assert guest.plan().startswith("lowered") == lower, guest.plan()
        return batches

    assert_same(run(True), run(False))


# -- transforms that step, ask or end ----------------------------------------------------------------------------------


class LivesEnv(CountingEnv):
    """Some steps cost a life."""

    @property
    def lives(self) -> int:
        return 5 - self.step_count // 3

    def lives_left(self) -> int:
        return self.lives


DRIVING: dict[str, Callable[[Any], Any]] = {
    "NoopResetEnv": lambda lib: lib.NoopResetEnv(3),
    "NoopResetEnv, not random": lambda lib: lib.Compose(lib.NoopResetEnv(2, random=False), lib.StepCounter()),
    "NoopResetEnv, behind": lambda lib: lib.Compose(
        lib.StepCounter(), lib.RewardSum(), lib.NoopResetEnv(3), lib.CatFrames(N=3, dim=-1, in_keys=["observation"])
    ),
    "NoopResetEnv, statistics": lambda lib: lib.Compose(lib.NoopResetEnv(3), lib.VecNormV2(in_keys=["observation"])),
}
TRUNCATING: dict[str, Callable[[Any], Any]] = {
    "no more": lambda lib: lib.Compose(lib.StepCounter(), lib.RandomTruncationTransform(2, 5)),
    "always": lambda lib: lib.Compose(lib.StepCounter(), lib.RandomTruncationTransform(1, 6, prob=1.0)),
    "sometimes": lambda lib: lib.Compose(
        lib.StepCounter(max_steps=4),
        lib.RandomTruncationTransform(2, 5, prob=0.3, first_episode_prob=0.8),
        lib.RewardSum(),
    ),
}
LIVES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda lib: lib.EndOfLifeTransform(eol_attribute="unwrapped.lives"),
    "a method": lambda lib: lib.Compose(
        lib.StepCounter(max_steps=5), lib.EndOfLifeTransform("eol", "left", eol_attribute="unwrapped.lives_left")
    ),
}
SKIPPING: dict[str, Callable[[Any], Any]] = {
    "two": lambda lib: lib.FrameSkipTransform(2),
    "three": lambda lib: lib.Compose(lib.FrameSkipTransform(3), lib.RewardSum(), lib.StepCounter(max_steps=2)),
    "one": lambda lib: lib.FrameSkipTransform(),
}


def long_episodes() -> Any:
    return CountingEnv(12)


@pytest.mark.parametrize("shape", ["one", "serial transformed"])
@pytest.mark.parametrize("name", DRIVING)
def test_random_first_actions(name: str, shape: str) -> None:
    compare(long_episodes, DRIVING[name], shape, own=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TRUNCATING)
def test_random_truncation(name: str, shape: str) -> None:
    compare(long_episodes, TRUNCATING[name], shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LIVES)
def test_lives(name: str, shape: str) -> None:
    compare(lambda: LivesEnv(12), LIVES[name], shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SKIPPING)
def test_frame_skip_transform(name: str, shape: str) -> None:
    compare(long_episodes, SKIPPING[name], shape)


class OnceOverEnv(CountingEnv):
    """Says that an episode is over in one step only: who goes on does not hear it again."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        over = self.step_count % self.length == 0
        return observation, reward, terminated and over, truncated and over, info


@pytest.mark.parametrize("shape", SHAPES)
def test_an_end_in_the_middle_of_repeated_steps(shape: str) -> None:
    """It is not seen, as it is not in TorchRL."""
    compare(lambda: OnceOverEnv(12), SKIPPING["two"], shape)


def test_a_reset_of_all_keeps_the_lengths() -> None:
    """TorchRL draws other lengths only for episodes that were over."""

    def run(lower: bool) -> list[Any]:
        guest = ours.GuestEnv(shapes(long_episodes, TRUNCATING["sometimes"])["transformed serial"](), lower=lower)
        guest.set_seed(3)
        torch.manual_seed(3)
        collector = Collector(guest, policy, frames_per_batch=30, total_frames=150, reset_at_each_iter=True)
        return [batch.clone() for batch in collector]

    for mine, other in zip(run(True), run(False), strict=True):
        assert_equal(mine, other)


@pytest.mark.parametrize("shape", ["one", "serial transformed"])
@pytest.mark.parametrize("driving", ["NoopResetEnv", "FrameSkipTransform"])
def test_what_steps_copies_stays_a_guest(driving: str, shape: str) -> None:
    def transform(lib: Any) -> Any:
        return lib.Compose(lib.CatFrames(N=2, dim=-1, in_keys=["observation"]), getattr(lib, driving)(2))

    lowered, env, _ = collected(shapes(long_episodes, transform)[shape]())
    assert "steps copies" in env.plan()
    assert_same(lowered, collected(ours.GuestEnv(shapes(long_episodes, transform)[shape](), lower=False))[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_one_transformed_env_in_another(shape: str) -> None:
    """It is one with more transforms, also within a SerialEnv."""

    def make() -> Any:
        inner = shapes(long_episodes, lambda lib: lib.StepCounter(max_steps=5))
        if shape != "serial transformed":
            return theirs().TransformedEnv(inner[shape](), theirs().RewardSum())
        return theirs().SerialEnv(3, lambda: theirs().TransformedEnv(inner["one"](), theirs().RewardSum()))

    lowered, env, _ = collected(make())
    assert env.plan().endswith("stepped on rows, then StepCounter, RewardSum"), env.plan()
    assert_same(lowered, collected(ours.GuestEnv(make(), lower=False))[0])


# -- any of them, in any order -----------------------------------------------------------------------------------------


def drawn_stack(seed: int) -> Callable[[Any], Any]:
    """Up to five transforms in any order; keys that they change are read by those behind."""
    draw = np.random.default_rng(seed)
    stack: list[tuple[str, dict[str, Any]]] = []
    for place in range(int(draw.integers(1, 6))):
        num = int(draw.integers(1, 5))
        keys = [["observation"], ["observation", "reward"]][draw.integers(2)]
        options = {"in_keys": keys, "decay": [1.0, 0.9][draw.integers(2)]}
        padding = ["same", "constant"][draw.integers(2)]
        count = f"count{place}"
        stack += [
            [("StepCounter", {"max_steps": num + 2, "step_count_key": count})],
            [("RewardSum", {"in_keys": ["reward"], "out_keys": [f"sum{place}"]})],
            [("InitTracker", {"init_key": f"init{place}"})],
            [("VecNorm", options)],
            [("VecNormV2", {**options, "reduce_batch_dims": bool(draw.integers(2))})],
            [("CatFrames", {"N": num, "dim": -1, "in_keys": ["observation"], "padding": padding})],
            [("CatFrames", {"N": 2, "dim": -3, "in_keys": ["pixels"], "out_keys": [f"stack{place}"]})],
            [("TimeMaxPool", {"in_keys": ["observation"], "T": num})],
            [("ToTensorImage", {"in_keys": ["pixels"], "out_keys": [f"image{place}"]})],
            [
                ("StepCounter", {"step_count_key": count}),
                (
                    "RandomTruncationTransform",
                    {"min_horizon": 1, "max_horizon": num + 1, "prob": 0.5, "step_count_key": count},
                ),
            ],
        ][draw.integers(10)]
    return lambda lib: lib.Compose(*[getattr(lib, name)(**options) for name, options in stack])


SEEDS = int(os.environ.get("SWATH_STACKS", "12"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_stack(seed: int) -> None:
    """Lowered or not, as ``plan`` says: the data is the guest's."""
    shape = SHAPES[seed % 3]
    transform = drawn_stack(seed)
    lowered, env, state = collected(shapes(PixelEnv, transform)[shape]())
    guest, _, expected = collected(ours.GuestEnv(shapes(PixelEnv, transform)[shape](), lower=False))
    assert_same(lowered, guest)
    assert state.keys() == expected.keys()
    for name in state:
        assert torch.equal(state[name], expected[name]), name
    if env.plan().startswith("lowered"):
        assert_same(collected(shapes(PixelEnv, transform, own=True)[shape]())[0], guest)
