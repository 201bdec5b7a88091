"""TorchRL's transforms that remember, of images, and that step envs: lowered, as guests, and ours, all give the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
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
        for key in theirs_.keys(True, True):
            a, b = ours_.get(key), theirs_.get(key)
            assert a.dtype == b.dtype and a.shape == b.shape, key
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
