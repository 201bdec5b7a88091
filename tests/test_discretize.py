"""ActionDiscretizer, and choices as integers or one-hot vectors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import swath.envs as ours
from counting import make_counting
from swath.collectors import Collector
from swath.envs import (
    ActionDiscretizer,
    ActionScaling,
    Bounded,
    Categorical,
    Compose,
    GymEnv,
    GymWrapper,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    RenameTransform,
    SerialEnv,
    TransformedEnv,
    Unbounded,
)
from swath.errors import EnvDataError
from swath.testing import check_transform
from transform_envs import FloatsEnv

Sampling = ActionDiscretizer.SamplingStrategy


class Told(FloatsEnv):
    """Notes the actions that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[np.ndarray] = []

    def step(self, action: Any) -> Any:
        self.taken.append(np.array(action))
        return super().step(action)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling.MEDIAN, ([-1.0, 1.0, 3.0], [-1.4, -0.2, 1.0, 2.2, 3.4])),
        (Sampling.LOW, ([-2.0, 0.0, 2.0], [-2.0, -0.8, 0.4, 1.6, 2.8])),
        (Sampling.HIGH, ([0.0, 2.0, 4.0], [-0.8, 0.4, 1.6, 2.8, 4.0])),
    ],
)
@pytest.mark.parametrize("categorical", [True, False])
def test_what_the_env_gets(sampling: Any, expected: Any, categorical: bool) -> None:
    """Its action is in [-2, 4], in float64."""
    env = Told()
    transformed = TransformedEnv(
        GymWrapper(env), ActionDiscretizer(torch.tensor([3, 5]), sampling=sampling, categorical=categorical)
    )
    spec = transformed.action_spec
    assert isinstance(spec, MultiCategorical if categorical else MultiOneHot)
    for first in range(3):
        for second in range(5):
            choice = torch.tensor([first, second])
            action = choice if categorical else MultiCategorical([3, 5]).to_one_hot(choice)
            transformed.step(transformed.reset().set("action", action))
            assert env.taken[-1].dtype == np.float64
            assert env.taken[-1] == pytest.approx([expected[0][first], expected[1][second]])
    for _ in range(5):
        assert spec.is_in(transformed.rand_action()["action"])


def test_random_points_are_in_their_part() -> None:
    env = Told()
    transformed = TransformedEnv(GymWrapper(env), ActionDiscretizer(3, sampling=Sampling.RANDOM))
    for _ in range(20):
        transformed.step(transformed.reset().set("action", torch.tensor([1, 2])))
    taken = np.stack(env.taken)
    assert ((taken >= [0, 2]) & (taken <= [2, 4])).all()
    assert len(np.unique(taken)) == 40
    check_transform(ActionDiscretizer(3, sampling=Sampling.RANDOM), lambda: GymWrapper(FloatsEnv()))


@pytest.mark.parametrize("categorical", [True, False])
def test_in_collectors(categorical: bool) -> None:
    env = TransformedEnv(SerialEnv(3, lambda: GymEnv("Pendulum-v1")), ActionDiscretizer(4, categorical=categorical))
    with Collector(env, None, frames_per_batch=60, total_frames=60) as collector:
        (batch,) = collector
    assert batch["action"].shape == (3, 20, 1 if categorical else 4)
    assert env.action_spec.is_in(batch["action"][:, 0])
    check_transform(ActionDiscretizer(4, categorical=categorical), SerialEnv(2, lambda: GymEnv("Pendulum-v1")))


def test_with_others() -> None:
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(ActionScaling(), ActionDiscretizer(3), RenameTransform([], [], ["action"], ["choice"])),
    )
    assert env.rollout(3)["choice"].dtype == torch.int64


def test_choices_that_are_none() -> None:
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), ActionDiscretizer(3))
    for choice in (3, -1):
        with pytest.raises(EnvDataError, match=r"not all among the \[3\] parts"):
            env.step(env.reset().set("action", torch.tensor([[0], [choice]])))


def test_the_largest_of_a_vector_is_chosen() -> None:
    """As wherever a one-hot action is taken: a network's outputs will do."""
    env = Told()
    transformed = TransformedEnv(GymWrapper(env), ActionDiscretizer(2, categorical=False, sampling=Sampling.LOW))
    transformed.step(transformed.reset().set("action", torch.tensor([0.1, 0.2, 0.9, -0.3])))
    assert env.taken[-1].tolist() == [1.0, -2.0]


def test_its_values_can_be_changed() -> None:
    env = Told()
    transformed = TransformedEnv(GymWrapper(env), ActionDiscretizer(2))
    root = transformed.reset()
    transformed.transform[0].intervals[1][0] = 3.5
    transformed.step(root.set("action", torch.tensor([1, 0])))
    assert env.taken[-1].tolist() == [2.5, 3.5]


def test_another_spacing() -> None:
    class Ends(ActionDiscretizer):
        def custom_arange(self, nint: int, device: Any = None) -> torch.Tensor:
            return torch.linspace(0, 1, nint, dtype=torch.float64)

    env = Told()
    transformed = TransformedEnv(GymWrapper(env), Ends(2))
    transformed.step(transformed.reset().set("action", torch.tensor([0, 1])))
    assert env.taken[-1].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActionDiscretizer(0), "positive integers"),
        (lambda: ActionDiscretizer(torch.tensor([2.5])), "positive integers"),
        (lambda: ActionDiscretizer(3, out_action_key="disc"), "leave it out, or put a RenameTransform behind"),
        (lambda: ActionDiscretizer(3, sampling=7), "7 is not a valid"),
        (lambda: TransformedEnv(make_counting(), ActionDiscretizer(3)), "'action' is OneHot.*not continuous"),
        (
            lambda: TransformedEnv(GymEnv("Pendulum-v1"), ActionDiscretizer(torch.tensor([2, 3]))),
            "2 num_intervals for 1 elements of 'action'",
        ),
        (
            lambda: TransformedEnv(GymEnv("Pendulum-v1"), ActionDiscretizer(3, "typo")),
            "takes no 'typo'; it takes 'acti",
        ),
    ],
)
def test_what_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        make()


def test_choices_as_integers_and_vectors() -> None:
    one, several = OneHot(4, (2, 4)), MultiOneHot([2, 3], (7, 5))
    for spec in (one, several, Categorical(4, (2,)), MultiCategorical([2, 3], (7, 2))):
        integers, vectors = spec.to_categorical_spec(), spec.to_one_hot_spec()
        value = spec.rand()
        assert integers.is_in(spec.to_categorical(value))
        assert vectors.to_categorical(spec.to_one_hot(value)).equal(spec.to_categorical(value))
        assert spec.to_one_hot(value, safe=True).shape == vectors.shape
    assert isinstance(Bounded(0, 1), Bounded)
    with pytest.raises(ValueError, match="is not in"):
        OneHot(3).to_categorical(torch.ones(3).long(), safe=True)
    with pytest.raises(AttributeError):
        Unbounded((3,)).to_categorical  # type: ignore[attr-defined]  # noqa: B018


# -- beside TorchRL's --------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any], list[Any]]] = {
    "one number": lambda t: [t.ActionDiscretizer(4)],
    "one-hot": lambda t: [t.ActionDiscretizer(3, categorical=False)],
    "several numbers": lambda t: [t.ActionDiscretizer(torch.tensor([3, 49]))],
    "one-hot of several": lambda t: [t.ActionDiscretizer(torch.tensor([3, 49]), categorical=False)],
    "low": lambda t: [t.ActionDiscretizer(7, sampling=t.ActionDiscretizer.SamplingStrategy.LOW)],
    "high": lambda t: [t.ActionDiscretizer(7, sampling=t.ActionDiscretizer.SamplingStrategy.HIGH), t.StepCounter(4)],
}


def _name_of(stack: Any) -> str:
    return next(name for name, known in KINDS.items() if known is stack)


def choices(env: Any) -> Any:
    """Of its own stream of random numbers, of the dtype that the spec says."""
    draw = torch.Generator().manual_seed(5)
    spec = env.action_spec
    numbers = [3, 3] if spec.dtype == torch.bool and spec.shape[-1] == 6 else [3, 49 if spec.shape[-1] == 52 else 3]

    def act(tensordict: Any) -> Any:
        chosen = [torch.randint(n, tensordict.batch_size, generator=draw) for n in numbers]
        if spec.dtype == torch.bool:
            action = torch.cat(
                [torch.nn.functional.one_hot(c, n) for c, n in zip(chosen, numbers, strict=True)], -1
            ).bool()
        else:
            action = torch.stack(chosen, -1)
        return tensordict.set("action", action)

    return act


@pytest.mark.torchrl
@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["one", "transformed serial", "serial of transformed"])
@pytest.mark.parametrize("stack", KINDS.values(), ids=KINDS)
def test_lowered(stack: Any, form: str) -> None:
    if form == "transformed serial" and "several" in _name_of(stack):
        pytest.skip("TorchRL has it for single envs")
    import torchrl.envs as theirs

    from test_lowering_values import assert_equal, build, make_floats, seed

    def data_of(env: Any) -> tuple[list[Any], str]:
        seed(env)
        num_envs = max(1, env.batch_size.numel())
        with Collector(env, choices(env), frames_per_batch=20 * num_envs, total_frames=-1) as collector:
            return [collector.next().clone() for _ in range(2)], collector.env.plan()

    expected, _ = data_of(ours.GuestEnv(build(theirs, make_floats, stack, form), lower=False))
    lowered, plan = data_of(build(theirs, make_floats, stack, form))
    assert plan.startswith("lowered"), plan
    assert_equal(lowered, expected)
    own, _ = data_of(build(ours, make_floats, stack, form))
    assert_equal(own, expected)
    assert bool(expected[0]["next", "reward"].any())


@pytest.mark.torchrl
@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl")
@pytest.mark.filterwarnings("ignore")
def test_left_to_torchrl() -> None:
    import torchrl.envs as theirs

    from swath.envs.lowering import lowered
    from swath.envs.recognising import NotLowered

    def make(num_envs: int, *args: Any, **kwargs: Any) -> Any:
        base = lambda: theirs.GymWrapper(FloatsEnv())  # noqa: E731
        env = theirs.SerialEnv(num_envs, base) if num_envs else base()
        return theirs.TransformedEnv(env, theirs.ActionDiscretizer(*args, **kwargs))

    drawn = make(0, 3, sampling=theirs.ActionDiscretizer.SamplingStrategy.RANDOM)
    with Collector(drawn, None, frames_per_batch=10, total_frames=10) as collector:
        assert len(list(collector)) == 1
        assert "draws the same" in collector.env_plan()
    with pytest.raises(NotLowered, match="in the data, too"):
        lowered(make(0, 3, out_action_key="disc"))
    with pytest.raises(NotLowered, match="for single envs"):
        lowered(make(2, torch.tensor([2, 3])))
