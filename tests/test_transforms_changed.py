"""Transforms of an env that change, are copied, or are in several envs; and what would have no effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from swath.collectors import Collector
from swath.envs import (
    ActionScaling,
    Compose,
    DiscreteActionProjection,
    EndOfLifeTransform,
    ExcludeTransform,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RandomTruncationTransform,
    RenameTransform,
    RewardSum,
    SelectTransform,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
    Unbounded,
    VecNorm,
    VecNormV2,
    VectorEnv,
)
from swath.errors import EnvDataError, EnvError
from transform_envs import FloatsEnv
from warned import warned_here


def cart_pole() -> Any:
    return GymEnv("CartPole-v1")


def counted(*transforms: Any) -> TransformedEnv:
    """An env whose transforms have been in use."""
    env = TransformedEnv(cart_pole(), Compose(*(transforms or (StepCounter(), RewardSum()))))
    env.rollout(2)
    return env


def own_keys(env: Any) -> set[str]:
    """Beside those of the env itself; what its specs say is what it gives."""
    given = set(env.rollout(2)["next"].keys()) - {"done", "terminated", "truncated", "reward"}
    assert given == set(env.observation_spec.keys())
    return given - {"observation"}


# -- what changes ------------------------------------------------------------------------------------------------------


def assign(env: TransformedEnv) -> None:
    env.transform[0] = InitTracker()


def delete(env: TransformedEnv) -> None:
    del env.transform[0]


def replace(env: TransformedEnv) -> None:
    env.transform = InitTracker()  # type: ignore[assignment]


CHANGES: dict[str, tuple[Callable[[TransformedEnv], Any], set[str]]] = {
    "append": (lambda env: env.transform.append(InitTracker()), {"step_count", "episode_reward", "is_init"}),
    "insert": (lambda env: env.transform.insert(0, InitTracker()), {"step_count", "episode_reward", "is_init"}),
    "pop": (lambda env: env.transform.pop(), {"step_count"}),
    "assign": (assign, {"episode_reward", "is_init"}),
    "delete": (delete, {"episode_reward"}),
    "replace": (replace, {"is_init"}),
}


@pytest.mark.parametrize(("change", "keys"), CHANGES.values(), ids=CHANGES)
def test_a_change_has_its_effect(change: Callable[[TransformedEnv], Any], keys: set[str]) -> None:
    env = counted()
    gone = env.transform[0]
    change(env)
    assert own_keys(env) == keys
    assert all(transform.container is env for transform in env.transform)
    assert gone.container is (env if gone in env.transform.transforms else None)


def test_the_compose_that_was_given_is_the_envs() -> None:
    stack = Compose(StepCounter())
    env, other = TransformedEnv(cart_pole(), stack), TransformedEnv(cart_pole(), stack)
    stack.append(RewardSum())
    assert env.transform is stack
    assert own_keys(env) == {"step_count", "episode_reward"}
    assert own_keys(other) == {"step_count"}


def test_what_is_refused_changes_nothing() -> None:
    env = counted()
    before = env.transform
    wrong = ExcludeTransform("nothing")
    for change in (
        lambda: env.transform.append(wrong),
        lambda: env.transform.insert(0, wrong),
        lambda: env.transform.__setitem__(0, wrong),
        lambda: setattr(env, "transform", wrong),
    ):
        with pytest.raises(KeyError, match="nothing"):
            change()
        assert env.transform is before
        assert wrong.container is None
    assert own_keys(env) == {"step_count", "episode_reward"}


def test_a_transforms_own_settings() -> None:
    env = counted(FrameSkipTransform(2), StepCounter(5))
    env.transform[0].frame_skip = 3
    env.transform[1].max_steps = 2
    batch: Any = env.rollout(10)["next"]
    assert batch["reward"].flatten().tolist() == [3, 3]
    assert batch["truncated"].flatten().tolist() == [False, True]
    with pytest.raises(ValueError, match="at least 1"):
        env.transform[1].max_steps = 0
    vectors = TransformedEnv(
        VectorEnv(SyncVectorEnv([pole] * 2, autoreset_mode=AutoresetMode.SAME_STEP)), StepCounter()
    )
    with pytest.raises(EnvError, match="one by one"):
        vectors.transform[0].max_steps = 3
    assert vectors.transform[0].max_steps is None


def pole() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_collector_does_not_go_on_with_what_was_before(num_envs: int) -> None:
    envs = [TransformedEnv(cart_pole(), StepCounter()) for _ in range(num_envs)]
    env = envs[0] if num_envs == 1 else SerialEnv(num_envs, [lambda env=env: env for env in envs])
    with Collector(env, None, frames_per_batch=10) as collector:
        batches = iter(collector)
        next(batches)
        envs[-1].transform[0].max_steps = 5
        with pytest.raises(EnvError, match="make another collector"):
            next(batches)


def test_a_step_needs_an_episode_that_was_seen() -> None:
    env = counted()
    root = env.step_mdp(env.rand_step(env.reset()))
    env.append_transform(InitTracker())
    with pytest.raises(EnvError, match=r"call reset\(\) first"):
        env.rand_step(root)


def test_copies_have_memory_of_their_own() -> None:
    env = counted()
    root = env.step_mdp(env.rand_step(env.reset()))
    other = copy.deepcopy(env)
    batch: Any = other.rollout(2)
    assert batch["next", "step_count"].flatten().tolist() == [1, 2]
    assert env.rand_step(root)["next", "step_count"].item() == 2
    assert other.transform[0].container is other


# -- in several envs ---------------------------------------------------------------------------------------------------


class Acted(FloatsEnv):
    """Keeps the actions that it is given."""

    def step(self, action: Any) -> Any:
        self.action = action.copy()
        return super().step(action)


def test_one_object_in_different_envs() -> None:
    class Wide(Acted):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gymnasium.spaces.Box(-20, 40, (2,), np.float64)

    scaling = ActionScaling()
    envs = [TransformedEnv(GymWrapper(kind()), scaling) for kind in (Acted, Wide)]
    for env, centre in zip(envs, (1.0, 10.0), strict=True):
        env.step(env.reset().set("action", torch.zeros(2, dtype=torch.float64)))
        assert env.base_env.env.unwrapped.action.tolist() == [centre] * 2


def test_random_lengths_are_each_envs_own() -> None:
    cut = RandomTruncationTransform(3, 3)
    one, several = (
        TransformedEnv(base, Compose(StepCounter(), cut)) for base in (cart_pole(), SerialEnv(3, cart_pole))
    )
    for _ in range(3):
        assert len(one.rollout(10)) <= 3
        assert several.rollout(10, break_when_any_done=False)["next", "step_count"].max() <= 3


def test_side_by_side_each_has_its_own() -> None:
    """What is put together for all envs of a ``SerialEnv`` differs in what is not shown of it."""

    def scaled(**kwargs: Any) -> Any:
        return TransformedEnv(GymWrapper(Acted()), ActionScaling(**kwargs))

    numbers = {"loc": torch.full((2,), 2.0, dtype=torch.float64), "scale": torch.ones(2, dtype=torch.float64)}
    env = SerialEnv(2, [scaled, partial(scaled, **numbers)])
    env.step(env.reset().set("action", torch.zeros(2, 2, dtype=torch.float64)))
    assert [child.base_env.env.unwrapped.action.tolist() for child in env.children] == [[1, 1], [2, 2]]

    def primed(value: float) -> Any:
        primer = TensorDictPrimer(
            goal=Unbounded((1,)), default_value={"goal": torch.tensor([value])}, expand_specs=True
        )
        return TransformedEnv(cart_pole(), primer)

    values = [0.12345678, 0.12345999]
    first = SerialEnv(2, [partial(primed, value) for value in values]).reset()["goal"]
    assert first.flatten().tolist() == pytest.approx(values, abs=1e-8)


def test_the_largest_of_a_vector_is_chosen() -> None:
    """Of a network's outputs, too, none of which is 1."""

    class Chosen(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            assert action == 1
            return super().step(action)

    env = TransformedEnv(GymWrapper(Chosen(pole())), DiscreteActionProjection(2, 3))
    env.step(env.reset().set("action", torch.tensor([0.1, 0.7, 0.2])))


# -- what would have no effect, or a wrong one -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
def test_steps_are_not_repeated_into_another_episode(mode: AutoresetMode) -> None:
    with pytest.raises(EnvError, match="another episode"):
        TransformedEnv(VectorEnv(SyncVectorEnv([pole] * 2, autoreset_mode=mode)), FrameSkipTransform(2))


@pytest.mark.parametrize("name", ["_call", "_reset", "forward", "transform_observation_spec"])
def test_torchrls_way_to_write_one(name: str) -> None:
    with pytest.raises(TypeError, match=rf"no {name}, so nobody would call it"):
        type("Mine", (Transform,), {name: lambda self, value: value})


def test_one_without_keys() -> None:
    class Twice(Transform):
        def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2

    with pytest.raises(ValueError, match="Twice has no keys"):
        TransformedEnv(cart_pole(), Twice())


@pytest.mark.parametrize("result", [None, np.zeros(4)])
def test_one_that_makes_no_tensor(result: Any) -> None:
    class Wrong(Transform):
        def _apply_transform(self, value: torch.Tensor) -> Any:
            return result

    with pytest.raises(TypeError, match=f"must be a tensor, got {type(result).__name__}"):
        TransformedEnv(cart_pole(), Wrong(in_keys=["observation"]))


def test_one_whose_results_shrink() -> None:
    class Shrinking(Transform):
        is_small = False

        def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
            return value[..., :1] if self.is_small else value

    env = TransformedEnv(cart_pole(), Shrinking(in_keys=["observation"]))
    root = env.reset()
    Shrinking.is_small = True
    with pytest.raises(EnvDataError, match=r"shape \(1,\)"):
        env.rand_step(root)


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
def test_frozen_before_anything_was_seen(kind: Any) -> None:
    env = TransformedEnv(cart_pole(), kind(in_keys=["observation"]).freeze())
    with warned_here(match="nothing was seen yet of 'observation', and it is frozen"):
        env.rollout(2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "next": (lambda: counted(RenameTransform(["observation"], ["next"])), "uses for something else"),
    "collector": (lambda: counted(RenameTransform(["observation"], [("collector", "o")])), "uses for something else"),
    "below a value": (
        lambda: counted(StepCounter(), RenameTransform(["step_count"], [("observation", "count")])),
        "'observation' is no group of keys",
    ),
    "a group": (
        lambda: counted(RewardSum(out_keys=[("a", "b")]), RenameTransform(["observation"], ["a"])),
        "'a' is a group of keys already",
    ),
    "in_keys": (lambda: ActionScaling(in_keys=["action"]), "data that was stored"),
    "include_forward": (lambda: DiscreteActionProjection(2, 3, include_forward=False), "data that was stored"),
    "cache_specs": (lambda: TransformedEnv(cart_pole(), cache_specs=False), "specs are found when"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_torchrls_names() -> None:
    env = TransformedEnv(base_env=cart_pole(), transform=StepCounter(), cache_specs=True)
    assert len(TransformedEnv(env, RewardSum()).transform) == 1
    both = TransformedEnv(env, RewardSum(), auto_unwrap=True)
    assert [type(transform) for transform in both.transform] == [StepCounter, RewardSum]
    assert own_keys(both) == {"step_count", "episode_reward"}
    with pytest.raises(TypeError, match="give one env"):
        TransformedEnv()
    with pytest.raises(TypeError, match="give one env"):
        TransformedEnv(env, base_env=env)


def test_groups_of_keys() -> None:
    class Grouped(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            group=gymnasium.spaces.Dict(one=gymnasium.spaces.Box(0, 1, (1,)), number=gymnasium.spaces.Box(0, 1, ())),
            other=gymnasium.spaces.Box(0, 1, (1,)),
        )
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 0.0, True, False, {}

    def given(transform: Transform) -> set[Any]:
        # Every episode is over after a step, so that numbers without a dimension are reset as well.
        batch = TransformedEnv(GymWrapper(Grouped()), transform).rollout(3, break_when_any_done=False)
        return set(batch["next"].keys(True, True)) - {"done", "terminated", "truncated", "reward"}

    assert given(ExcludeTransform("group")) == {"other"}
    assert given(SelectTransform("group")) == {("group", "one"), ("group", "number")}


@pytest.mark.processes
def test_lives_of_envs_in_processes() -> None:
    env = TransformedEnv(ParallelEnv(2, cart_pole), EndOfLifeTransform(eol_attribute="unwrapped.lives"))
    with pytest.raises(EnvError, match="put it around each env"):
        env.reset()
    env.close()
