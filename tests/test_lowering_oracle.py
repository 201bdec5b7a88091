"""Lowered envs against TorchRL's own collector, where their user does something to them between two batches."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

import swath.envs as ours
from swath.collectors import Collector
from swath.envs import GuestEnv
from swath.errors import EnvError
from transform_envs import FloatsEnv, Foretold

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
Attack = Callable[[Any], Any]


def rl() -> Any:
    import torchrl.envs

    return torchrl.envs


def by_observation(observation: torch.Tensor) -> torch.Tensor:
    chosen = (observation.double().sum(-1) * 1000).to(torch.int64) % 3
    return torch.nn.functional.one_hot(chosen, 3)


def batches(kind: Any, env: Any, policy: Any, attack: Attack | None, frames: int = 30) -> list[TensorDictBase]:
    torch.manual_seed(0)  # its own rollouts draw actions
    env = env()
    collector = kind(env, policy, frames_per_batch=frames, total_frames=-1)
    try:
        taken = []
        for number, batch in zip(range(4), collector, strict=False):
            taken.append(batch.clone())
            if number == 1 and attack is not None:
                attack(env.guest if isinstance(env, GuestEnv) else env)
        return taken
    finally:
        collector.shutdown()


def assert_same(make: Callable[[], Any], attack: Attack | None = None, act: Any = by_observation, **keys: Any) -> None:
    """swath's batches, lowered where that may be, are those of TorchRL's collector."""
    from torchrl.collectors import Collector as Theirs

    policy = TensorDictModule(act, in_keys=keys.get("reads", ["observation"]), out_keys=keys.get("writes", ["action"]))
    theirs = batches(Theirs, make, policy, attack)
    mine = batches(Collector, make, policy, attack)
    assert len(theirs) == len(mine) == 4
    for number, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
        names = {str(key): key for key in expected.keys(True, True) if "collector" not in key}
        assert {str(key) for key in got.keys(True, True) if "collector" not in key} == set(names)
        for name, key in names.items():
            value = got.get(key)
            assert value.dtype == expected.get(key).dtype, name
            assert torch.equal(value, expected.get(key)), f"batch {number}: {name}"


# -- several envs, and statistics or counts in them --------------------------------------------------------------------


def numbered() -> Callable[[], Any]:
    numbers = itertools.count()
    return lambda: rl().GymWrapper(Foretold(next(numbers), "vector"))


def normed() -> list[Any]:
    norm = rl().VecNormV2(in_keys=["observation"], out_keys=["normed"])
    return [rl().InitTracker(), norm, rl().StepCounter(5), rl().RewardSum()]


def stacked() -> list[Any]:
    frames = rl().CatFrames(3, -1, in_keys=["observation"], out_keys=["frames"])
    return [frames, rl().InitTracker(), rl().StepCounter(5), rl().RewardSum()]


def around(transforms: Callable[[], list[Any]]) -> Any:
    return rl().TransformedEnv(rl().SerialEnv(3, numbered()), rl().Compose(*transforms()))


def inside(transforms: Callable[[], list[Any]]) -> Any:
    make = numbered()
    return rl().SerialEnv(3, lambda: rl().TransformedEnv(make(), rl().Compose(*transforms())))


def both(transforms: Callable[[], list[Any]]) -> Any:
    return rl().TransformedEnv(inside(transforms), rl().RewardScaling(0.5, 2.0))


ATTACKS: dict[str, Attack | None] = {
    "nothing": None,
    "eval": lambda env: env.eval(),
    "rollout": lambda env: env.rollout(4),
    "reset": lambda env: env.reset(),
    "load": lambda env: env.load_state_dict(env.state_dict()),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("transforms", [normed, stacked])
@pytest.mark.parametrize("form", [around, inside, both])
def test_used_between_batches(form: Any, transforms: Any, attack: Attack | None) -> None:
    """Counts further in go on, statistics see the envs that are not reset, and stacks what was put there meanwhile."""
    assert_same(lambda: form(transforms), attack)


@pytest.mark.parametrize("form", [around, both])
def test_a_transform_is_added_while_collecting(form: Any) -> None:
    assert_same(lambda: form(normed), lambda env: env.append_transform(rl().RewardScaling(1.0, 3.0)))


@pytest.mark.parametrize("options", [{"use_buffers": False}, {"share_individual_td": True}], ids=str)
def test_statistics_around_envs_without_common_buffers(options: Any) -> None:
    """There TorchRL shows zeros, or other memory, of the envs that are not reset."""

    def make() -> Any:
        norm = rl().VecNorm(in_keys=["observation"], out_keys=["normed"])
        return rl().TransformedEnv(rl().SerialEnv(3, numbered(), **options), norm)

    assert_same(make)


# -- single envs -------------------------------------------------------------------------------------------------------


class TwoActions(gymnasium.Env):
    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Dict(left=spaces.Box(-1, 1, (1,)), right=spaces.Box(-1, 1, (1,)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        seen = np.array([action["left"][0], 2.0 * action["right"][0]])
        return seen, float(seen.sum()), False, self.count == 5, {}


def left_and_right(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = observation[..., :1].float()
    return (first * 0.5 + 0.3).clamp(-1, 1), (0.1 - first).clamp(-1, 1)


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("lower", [True, False])
def test_several_actions(num: int, lower: bool) -> None:
    def single() -> Any:
        return rl().TransformedEnv(rl().GymWrapper(TwoActions()), rl().Compose(rl().DoubleToFloat(), rl().RewardSum()))

    def make() -> Any:
        return single() if num == 1 else rl().SerialEnv(num, single)

    as_it_is = make if lower else lambda: GuestEnv(make(), lower=False)
    from torchrl.collectors import Collector as Theirs

    policy = TensorDictModule(left_and_right, in_keys=["observation"], out_keys=["left", "right"])
    mine, theirs = batches(Collector, as_it_is, policy, None), batches(Theirs, make, policy, None)
    for got, expected in zip(mine, theirs, strict=True):
        for key in ("left", "right", "observation", "episode_reward", ("next", "reward"), ("next", "observation")):
            assert torch.equal(got.get(key), expected.get(key)), key


class NoReward(Foretold):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, None, *rest


def test_no_reward_at_all() -> None:
    """TorchRL takes None for zero, also where it repeats steps."""
    for frame_skip in (1, 2):
        assert_same(lambda skip=frame_skip: rl().GymWrapper(NoReward(0, "vector"), frame_skip=skip))


def among_four(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., :2].double() * 1000).to(torch.int64) % 4


@pytest.mark.parametrize("in_compose", [False, True])
@pytest.mark.parametrize("num", [1, 2])
def test_an_action_that_a_step_writes(num: int, in_compose: bool) -> None:
    """The env's own action is an input that no reset gives. TorchRL has it in the data, or zeros in its place."""

    def make() -> Any:
        base = rl().GymWrapper(FloatsEnv())
        base = base if num == 1 else rl().SerialEnv(num, lambda: rl().GymWrapper(FloatsEnv()))
        discretizer = rl().ActionDiscretizer(num_intervals=4, out_action_key="chosen")
        env = rl().TransformedEnv(base, rl().Compose(discretizer) if in_compose else discretizer)
        env.set_seed(3)
        return env

    assert_same(make, None, among_four, reads=["position"], writes=["chosen"])
    batch = batches(Collector, make, TensorDictModule(among_four, ["position"], ["chosen"]), None)[1]
    assert bool(batch["action"].any()) is not in_compose


# -- envs of swath around envs of TorchRL ------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [True, False])
def test_the_tensordict_api_of_envs_of_ours_around_theirs(lower: bool) -> None:
    def guest() -> Any:
        return GuestEnv(rl().GymWrapper(Foretold(1, "vector")), lower=lower)

    policy = TensorDictModule(by_observation, in_keys=["observation"], out_keys=["action"])
    theirs = rl().TransformedEnv(rl().GymWrapper(Foretold(1, "vector")), rl().StepCounter(4))
    expected = theirs.rollout(12, policy, break_when_any_done=False)
    for env in (
        ours.TransformedEnv(guest(), ours.StepCounter(4)),
        ours.SerialEnv(2, lambda: ours.TransformedEnv(guest(), ours.StepCounter(4))),
    ):
        got = env.rollout(12, policy, break_when_any_done=False)
        row = got if got.ndim == 1 else got[1]
        assert {str(key) for key in row.keys(True, True)} == {str(key) for key in expected.keys(True, True)}
        for key in expected.keys(True, True):
            assert torch.equal(row.get(key), expected.get(key)), key


@pytest.mark.parametrize(
    "wrap", [lambda make: ours.SerialEnv(2, make), lambda make: ours.TransformedEnv(make(), ours.StepCounter())]
)
def test_an_action_that_a_step_writes_is_not_lost(wrap: Any) -> None:
    def make() -> Any:
        discretizer = rl().ActionDiscretizer(num_intervals=4, out_action_key="chosen")
        return rl().TransformedEnv(rl().GymWrapper(FloatsEnv()), discretizer)

    policy = TensorDictModule(among_four, ["position"], ["chosen"])
    with pytest.raises(EnvError, match="a step writes 'action' beside the action"):
        next(iter(Collector(wrap(make), policy, frames_per_batch=8)))
