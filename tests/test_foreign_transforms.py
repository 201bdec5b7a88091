"""What is given as a transform and is none of ours: it works, or the error has the line to write."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

import swath.envs as ours
from counting import make_counting
from swath.collectors import Collector
from swath.envs import Compose, GuestEnv, GymWrapper, RewardSum, SerialEnv, StepCounter, TransformedEnv
from swath.envs.transforms.rows import NOTHING
from swath.errors import EnvDataError
from test_check_transform import OURS
from transform_envs import FloatsEnv

torchrl = pytest.mark.torchrl
needs_torchrl = pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl")
ignored = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (object(), r"not builtins.object; write class Mine\(swath.envs.Transform\)"),
        (StepCounter, r"not the class StepCounter; that is a class: write StepCounter\(...\)"),
        ([StepCounter()], r"not builtins.list; of several, write Compose\(\*transforms\)"),
        (lambda td: td, r"of a function .* with the method _apply_transform\(self, value\), and give Mine\(in_keys="),
        (torch.nn.Linear(2, 2), r"not torch.nn.modules.linear.Linear; of a function"),
        (gymnasium.wrappers.TimeLimit, "not the class TimeLimit"),
        ("StepCounter", "not builtins.str"),
    ],
)
def test_what_is_no_transform(thing: Any, message: str) -> None:
    env = TransformedEnv(make_counting(), RewardSum())
    for give in (
        lambda: TransformedEnv(make_counting(), thing),
        lambda: Compose(RewardSum(), thing),
        lambda: env.append_transform(thing),
        lambda: env.insert_transform(0, thing),
        lambda: make_counting().append_transform(thing),
        lambda: env.transform.append(thing),
    ):
        with pytest.raises(TypeError, match=message):
            give()
    assert len(env.transform) == 1
    assert "episode_reward" in env.rollout(2)


#: How those of ours are made that read a key: with one that is not there.
WITH_KEYS: dict[str, Callable[[list[Any]], Any]] = {
    "RewardSum": lambda keys: ours.RewardSum(keys),
    "DoubleToFloat": lambda keys: ours.DoubleToFloat(keys),
    "DTypeCastTransform": lambda keys: ours.DTypeCastTransform(torch.float32, torch.float64, keys),
    "ObservationNorm": lambda keys: ours.ObservationNorm(0.0, 1.0, keys),
    "VecNorm": lambda keys: ours.VecNorm(keys),
    "VecNormV2": lambda keys: ours.VecNormV2(keys),
    "RewardScaling": lambda keys: ours.RewardScaling(0.0, 1.0, keys),
    "RewardClipping": lambda keys: ours.RewardClipping(0.0, 1.0, keys),
    "ClipTransform": lambda keys: ours.ClipTransform(keys, low=0.0, high=1.0),
    "SignTransform": lambda keys: ours.SignTransform(keys),
    "CatTensors": lambda keys: ours.CatTensors(keys, "out"),
    "UnsqueezeTransform": lambda keys: ours.UnsqueezeTransform(-1, in_keys=keys),
    "SqueezeTransform": lambda keys: ours.SqueezeTransform(-1, in_keys=keys),
    "FlattenObservation": lambda keys: ours.FlattenObservation(-1, -1, keys),
    "PermuteTransform": lambda keys: ours.PermuteTransform((-1,), keys),
    "ExcludeTransform": lambda keys: ours.ExcludeTransform(*keys),
    "SelectTransform": lambda keys: ours.SelectTransform(*keys),
    "RenameTransform": lambda keys: ours.RenameTransform(keys, ["new"]),
    "CatFrames": lambda keys: ours.CatFrames(2, -1, keys),
    "TimeMaxPool": lambda keys: ours.TimeMaxPool(keys, T=2),
    "ToTensorImage": lambda keys: ours.ToTensorImage(in_keys=keys),
    "GrayScale": lambda keys: ours.GrayScale(keys),
    "Resize": lambda keys: ours.Resize(4, in_keys=keys),
    "CenterCrop": lambda keys: ours.CenterCrop(4, in_keys=keys),
    "RandomTruncationTransform": lambda keys: ours.RandomTruncationTransform(1, 2, step_count_key=keys[0]),
}
WITH_ACTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "DoubleToFloat": lambda keys: ours.DoubleToFloat(["position"], in_keys_inv=keys),
    "ClipTransform": lambda keys: ours.ClipTransform(in_keys_inv=keys, low=0.0, high=1.0),
    "RenameTransform": lambda keys: ours.RenameTransform([], [], keys, ["new"]),
    "ActionScaling": lambda keys: ours.ActionScaling(keys),
    "ActionDiscretizer": lambda keys: ours.ActionDiscretizer(3, keys[0]),
    "DiscreteActionProjection": lambda keys: ours.DiscreteActionProjection(2, 3, keys[0]),
    "SignTransform": lambda keys: ours.SignTransform(in_keys_inv=keys),
}
#: Those that read no key that can be named.
WITHOUT_KEYS = {
    "ActionMask",
    "EndOfLifeTransform",
    "FrameSkipTransform",
    "InitTracker",
    "NoopResetEnv",
    "StepCounter",
    "TensorDictPrimer",
}


def test_none_is_left_out() -> None:
    assert WITH_KEYS.keys() | WITH_ACTIONS.keys() | WITHOUT_KEYS == OURS.keys()


@pytest.mark.parametrize("num_envs", [0, 2])
@pytest.mark.parametrize("key", ["typo", ("deep", "typo")], ids=["flat", "nested"])
@pytest.mark.parametrize("make", WITH_KEYS.values(), ids=WITH_KEYS)
def test_a_key_that_is_not_there(make: Callable[[list[Any]], Any], key: Any, num_envs: int) -> None:
    """The error is raised when the env is made, and has the key and those that there are."""
    env = GymWrapper(FloatsEnv()) if num_envs == 0 else SerialEnv(num_envs, lambda: GymWrapper(FloatsEnv()))
    with pytest.raises(KeyError, match="typo") as raised:
        TransformedEnv(env, make([key]))
    assert "'position'" in str(raised.value) or "put a StepCounter before it" in str(raised.value)


@pytest.mark.parametrize("make", WITH_ACTIONS.values(), ids=WITH_ACTIONS)
def test_an_action_that_is_not_there(make: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(KeyError, match="takes no 'typo'; it takes 'action'"):
        TransformedEnv(GymWrapper(FloatsEnv()), make(["typo"]))


def test_a_spec_without_the_batch_size() -> None:
    class Short(ours.Transform):
        def transform_specs(self, specs: Any) -> None:
            specs.put(("new",), ours.Unbounded((1,)), "observation")

    with pytest.raises(
        ValueError, match=r"'new' has shape \(1,\), which does not begin with the env's batch size \(3,\)"
    ):
        TransformedEnv(SerialEnv(3, make_counting), Short())


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((4,), torch.float32, r"shape \(1,\) and dtype torch.float32"), ((1,), torch.float64, "their specs say shape")],
)
def test_what_is_made_otherwise_than_it_was_said(shape: Any, dtype: Any, message: str) -> None:
    """It would be repeated, or cast."""

    class Wrong(ours.Transform):
        def transform_specs(self, specs: Any) -> None:
            specs.put(("new",), ours.Unbounded((*specs.batch_size, *shape), dtype), "observation")

        def bind(self, rows: Any) -> Any:
            rows.new("new", (1,), torch.float32)
            return NOTHING

    with pytest.raises(EnvDataError, match=message):
        TransformedEnv(make_counting(), Wrong()).reset()


def test_what_is_said_and_not_made() -> None:
    class Silent(ours.Transform):
        def transform_specs(self, specs: Any) -> None:
            specs.put(("new",), ours.Unbounded((*specs.batch_size, 1)), "observation")

    with pytest.raises(EnvDataError, match=r"'new' is not made by Compose\(Silent\(\)\); .*check_transform"):
        Collector(TransformedEnv(make_counting(), Silent()), None, frames_per_batch=10)


def test_a_key_that_bind_does_not_find() -> None:
    class Late(ours.Transform):
        def bind(self, rows: Any) -> Any:
            return rows["typo"]

    with pytest.raises(KeyError, match="asks for 'typo', which nobody gives; there is 'observation', 'reward'"):
        TransformedEnv(make_counting(), Late()).reset()


# -- TorchRL's ---------------------------------------------------------------------------------------------------------


def theirs() -> Any:
    import torchrl.envs

    return torchrl.envs


def numbered(batches: list[Any]) -> list[Any]:
    return [batch.exclude("collector") for batch in batches]


#: Beside those of ``test_lowering_values.FLOATS``.
MORE: dict[str, Callable[[Any], list[Any]]] = {
    "counters": lambda e: [e.StepCounter(4), e.RewardSum(), e.InitTracker()],
    "CatFrames": lambda e: [e.CatFrames(3, -1, ["position"], ["stacked"])],
    "TimeMaxPool": lambda e: [e.TimeMaxPool(["position"], ["pooled"], 2)],
    "VecNorm": lambda e: [e.VecNorm(in_keys=["position"], decay=0.9)],
    "VecNormV2": lambda e: [e.VecNormV2(in_keys=["position"], decay=0.9)],
    "images": lambda e: [e.ToTensorImage(in_keys=["image"]), e.GrayScale(["image"])],
    "FrameSkip": lambda e: [e.FrameSkipTransform(2)],
    "Noop": lambda e: [e.NoopResetEnv(1, random=False)],
    "RandomTruncation": lambda e: [e.StepCounter(), e.RandomTruncationTransform(2, 4)],
    "ActionDiscretizer": lambda e: [e.ActionDiscretizer(3)],
    "no stats": lambda e: [e.ObservationNorm(in_keys=["position"])],
}
#: Those that only know what to do in an env of TorchRL: the error says to write ours.
REFUSED = {"VecNormV2", "no stats"}


@torchrl
@needs_torchrl
@ignored
@pytest.mark.parametrize("num_envs", [0, 3])
@pytest.mark.parametrize("name", ["values", *MORE])
def test_known_ones(name: str, num_envs: int) -> None:
    """In an env of ours they give what ours of the same name give, or say that these are to be written."""
    from test_lowering_values import FLOATS, assert_equal, data_of, make_floats

    def base() -> Any:
        make = lambda: GymWrapper(make_floats())  # noqa: E731
        return make() if num_envs == 0 else SerialEnv(num_envs, make)

    stacks = FLOATS if name == "values" else {name: MORE[name]}
    refused: dict[str, str] = {}
    for each, stack in stacks.items():
        if each == "Noop" and num_envs:
            continue
        torch.manual_seed(0)  # some are made of random numbers
        given = stack(theirs())
        try:
            env = TransformedEnv(base(), theirs().Compose(*given))
        except TypeError as error:
            refused[each] = str(error)
            continue
        torch.manual_seed(0)
        expected = TransformedEnv(base(), Compose(*stack(ours)))
        if each == "FrameSkip":  # which may step an env whose episode is over
            assert repr(env) == repr(expected)
            continue
        assert_equal(data_of(env)[0], data_of(expected)[0])
    assert refused.keys() == REFUSED & stacks.keys()
    for message in refused.values():
        assert "is of TorchRL and cannot work in an env of swath: " in message
        assert "Write swath.envs." in message


@torchrl
@needs_torchrl
@ignored
def test_their_tensors_and_statistics_stay_theirs() -> None:
    norm = theirs().ObservationNorm(torch.zeros(3).double(), torch.ones(3).double(), in_keys=["position"])
    env = TransformedEnv(GymWrapper(FloatsEnv()), norm)
    norm.loc += 1
    env.set_seed(0)
    shifted = env.reset()["position"]
    norm.loc -= 1
    env.set_seed(0)
    assert torch.equal(shifted, env.reset()["position"] + 1)


@torchrl
@needs_torchrl
@ignored
def test_unknown_ones() -> None:
    class Mine(theirs().StepCounter):
        pass

    mine, known_by_torchrl = Mine(), theirs().BinarizeReward()
    for transform, name in ((mine, "Mine"), (known_by_torchrl, "BinarizeReward")):
        env = TransformedEnv(make_counting())
        for give in (
            lambda t=transform: TransformedEnv(make_counting(), t),
            lambda t=transform: Compose(StepCounter(), t),
            lambda t=transform, env=env: env.append_transform(t),
            lambda t=transform: make_counting().append_transform(t),
            lambda t=transform: TransformedEnv(make_counting(), theirs().Compose(theirs().StepCounter(), t)),
        ):
            with pytest.raises(
                TypeError, match=rf"{name} is not known. Write one of swath's.*torchrl.envs.Transf"
            ) as e:
                give()
            assert "docs/transforms.md" in str(e.value)
        assert len(env.transform) == 0


@torchrl
@needs_torchrl
@ignored
def test_unknown_ones_around_envs_of_torchrl() -> None:
    """There they work: the env is the guest's own."""
    transform = theirs().BinarizeReward()
    base = theirs().GymEnv("CartPole-v1")
    env = TransformedEnv(base, transform)
    env.append_transform(StepCounter(5))
    with Collector(env, None, frames_per_batch=40, total_frames=40) as collector:
        (batch,) = collector
    assert batch["next", "reward"].unique().tolist() == [1]
    assert int(batch["next", "step_count"].max()) == 5
    assert not hasattr(base, "transform")
    assert isinstance(env.base_env, GuestEnv)
    assert env.base_env.guest.transform is transform


@torchrl
@needs_torchrl
@ignored
def test_ours_and_theirs_together() -> None:
    env = TransformedEnv(GymWrapper(FloatsEnv()), Compose(theirs().DoubleToFloat(in_keys=["position"]), RewardSum()))
    env.append_transform(theirs().StepCounter(3))
    env.insert_transform(0, theirs().InitTracker())
    assert [type(t).__name__ for t in env.transform] == ["InitTracker", "DoubleToFloat", "RewardSum", "StepCounter"]
    assert all(isinstance(t, ours.Transform) for t in env.transform)
    data = env.rollout(10, break_when_any_done=False)
    assert data["position"].dtype == torch.float32
    assert int(data["next", "step_count"].max()) <= 3
    assert torch.isfinite(data["next", "episode_reward"]).all()
