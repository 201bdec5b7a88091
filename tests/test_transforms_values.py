"""Transforms of values, shapes, keys and actions on envs of ours; beside TorchRL's: ``test_lowering_values.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from counting import CountingEnv, CountingTensorDictEnv
from swath.collectors import Collector, MultiSyncCollector
from swath.envs import (
    ActionMask,
    ActionScaling,
    Bounded,
    CatTensors,
    ClipTransform,
    Compose,
    Composite,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    EnvBase,
    ExcludeTransform,
    FlattenObservation,
    GymWrapper,
    ObservationNorm,
    OneHot,
    ParallelEnv,
    PermuteTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SerialEnv,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    Transform,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
)
from transform_envs import FloatsEnv


def floats(*transforms: Transform, num_envs: int = 0) -> Any:
    env: Any = GymWrapper(FloatsEnv()) if num_envs == 0 else SerialEnv(num_envs, lambda: GymWrapper(FloatsEnv()))
    return TransformedEnv(env, Compose(*transforms))


def batches(env: Any, num_batches: int = 2) -> Any:
    """Some steps of an env with seed 3 and random actions of seed 0."""
    torch.manual_seed(0)
    with Collector(env, frames_per_batch=24, total_frames=24 * num_batches) as collector:
        collector.set_seed(3)
        return torch.cat([batch.clone() for batch in collector], -1)


@pytest.mark.parametrize("num_envs", [0, 3])
def test_values_are_those_of_the_env_changed(num_envs: int) -> None:
    """At the root and under next, at an episode's end as well; another key stays what it was."""
    plain = batches(floats(num_envs=num_envs))
    loc, scale = torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([2.0, 3.0, 4.0]).double()
    env = floats(
        ObservationNorm(loc, scale, ["position"], ["normal"], standard_normal=True),
        ClipTransform(["velocity"], low=-1.0, high=0.5),
        SignTransform(["speed"], ["sign"]),
        DTypeCastTransform(torch.uint8, torch.float32, ["image"]),
        RewardScaling(1.0, 0.5, out_keys=["scaled"]),
        RewardClipping(-0.5, 0.5),
        RewardSum(),
        num_envs=num_envs,
    )
    got = batches(env)
    assert plain["next", "done"].sum() > 3
    for path in ((), ("next",)):

        def value(name: str, data: Any = plain, path: Any = path) -> torch.Tensor:
            return data[(*path, name)]

        assert torch.equal(value("normal", got), (value("position") - loc) / scale)
        assert torch.equal(value("position", got), value("position"))
        assert torch.equal(value("velocity", got), value("velocity").clamp(-1.0, 0.5))
        assert torch.equal(value("sign", got), value("speed").sign())
        assert torch.equal(value("image", got), value("image").float())
    reward = plain["next", "reward"]
    assert torch.equal(got["next", "scaled"], reward * 0.5 + 1.0)
    assert torch.equal(got["next", "reward"], reward.clamp(-0.5, 0.5))
    assert "scaled" not in got.keys()  # noqa: SIM118
    for key in ("velocity", "image", "sign", "normal"):
        assert env.observation_spec[key].is_in(got[..., 0][key])


@pytest.mark.parametrize("num_envs", [0, 3])
def test_shapes_and_keys(num_envs: int) -> None:
    plain = batches(floats(num_envs=num_envs))
    env = floats(
        PermuteTransform((-1, -3, -2), ["image"], ["channels_first"]),
        FlattenObservation(-3, -1, ["image"], ["flat"]),
        UnsqueezeTransform(-2, in_keys=["speed"]),
        SqueezeTransform(-1, in_keys=["reward"]),
        CatTensors(["velocity", "position"], "observation"),
        RenameTransform(["observation", "reward"], [("agent", "seen"), "gain"]),
        num_envs=num_envs,
    )
    got = batches(env)
    assert set(env.observation_spec.keys(True, True)) == {"image", "speed", "channels_first", "flat", ("agent", "seen")}
    lead = plain.ndim
    for path in ((), ("next",)):
        image = plain[(*path, "image")]
        order = [lead + 2, lead, lead + 1]
        assert torch.equal(got[(*path, "channels_first")], image.permute(*range(lead), *order))
        assert torch.equal(got[(*path, "flat")], image.flatten(lead))
        assert torch.equal(got[(*path, "speed")], plain[(*path, "speed")].unsqueeze(-2))
        # Sorted by name, whatever the order that was given.
        vectors = [plain[(*path, "position")], plain[(*path, "velocity")]]
        assert torch.equal(got[(*path, "agent", "seen")], torch.cat(vectors, -1))
        assert "position" not in got[path] if path else "position" not in got.keys()  # noqa: SIM118
    assert torch.equal(got["next", "gain"], plain["next", "reward"].squeeze(-1))
    assert not {"reward", "observation"} & set(got["next"].keys())


def test_keys_are_left_out() -> None:
    env = floats(StepCounter(), ExcludeTransform("image", "reward"), SelectTransform("speed", "step_count"))
    got = batches(env)
    flags = {"done", "terminated", "truncated"}
    assert set(got["next"].keys()) == {"speed", "step_count", *flags}
    assert set(got.keys()) == {"speed", "step_count", "action", "collector", "next", *flags}
    env = floats(ExcludeTransform("truncated"), SelectTransform("speed"))
    got = batches(env)
    assert set(got["next"].keys()) == {"speed", "reward", "done", "terminated"}
    assert (got["next", "done"] & ~got["next", "terminated"]).any(), "an episode that was truncated is done"


class Taken(FloatsEnv):
    """Remembers what it was given."""

    def step(self, action: Any) -> Any:
        self.taken = [*getattr(self, "taken", []), action]
        return super().step(action)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([DoubleToFloat()], lambda a: a.double()),
        ([DoubleToFloat(), ActionScaling()], lambda a: (a * 3 + 1).double()),
        ([ActionScaling(standard_normal=False)], lambda a: (a * 2 - 1) * 3 + 1),
        ([ClipTransform(in_keys_inv=["action"], low=0)], lambda a: a.clamp_min(0)),
        ([SignTransform(in_keys_inv=["action"])], lambda a: a.sign()),
        ([UnsqueezeTransform(-1, in_keys_inv=["action"])], lambda a: a.squeeze(-1)),
        ([SqueezeTransform(-1, in_keys_inv=["action"])], lambda a: a),
        ([PermuteTransform((-1,), in_keys_inv=["action"])], lambda a: a),
        ([ObservationNorm(0.5, 2.0, [], in_keys_inv=["action"])], lambda a: (a - 0.5) / 2),
        ([RenameTransform([], [], ["action"], [("agent", "act")])], lambda a: a),
        (
            [RenameTransform([], [], ["action"], ["act"]), ClipTransform(in_keys_inv=["act"], high=0)],
            lambda a: a.clamp_max(0),
        ),
    ],
    ids=lambda value: repr(value)[:50] if isinstance(value, list) else "",
)
def test_actions_reach_the_env_changed(transforms: list[Transform], expected: Callable[[Any], Any]) -> None:
    """Those that are delivered are those that were written."""
    gym_env = Taken()
    env = TransformedEnv(GymWrapper(gym_env), Compose(*transforms))
    (key,) = env.action_keys
    got = batches(env)
    assert env.full_action_spec[key].is_in(got[key])
    assert np.array_equal(np.stack(gym_env.taken[: got.numel()]), expected(got[key]).numpy())


def test_a_choice_beyond_the_envs_is_drawn_again() -> None:
    env = TransformedEnv(GymWrapper(CountingEnv(5)), DiscreteActionProjection(3, 8))
    got = batches(env)
    choice, taken = got["action"].argmax(-1), got["next", "observation"][:, 2]
    assert got["action"].shape[-1] == 8
    assert torch.equal(taken[choice < 3], choice[choice < 3].float())
    assert set(taken[choice >= 3].tolist()) == {0.0, 1.0, 2.0}


class Masked(EnvBase):
    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(action_mask=Unbounded((3,), torch.bool))
        self.action_spec = OneHot(3)

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        return TensorDict(action_mask=torch.tensor([False, True, False]))

    def _step(self, tensordict: Any) -> TensorDict:
        mask = torch.tensor([False, True, False])
        return TensorDict(action_mask=mask, reward=torch.zeros(1), terminated=torch.zeros(1, dtype=torch.bool))


def test_random_actions_are_those_that_the_mask_allows() -> None:
    got = batches(TransformedEnv(Masked(), ActionMask()))
    assert (got["action"].argmax(-1) == 1).all()


@pytest.mark.parametrize("base", [CountingTensorDictEnv, lambda: GymWrapper(CountingEnv(5))])
def test_envs_on_tensordicts_and_on_rows(base: Callable[[], Any]) -> None:
    CountingEnv.made = 0
    plain = batches(base())
    CountingEnv.made = 0
    env = TransformedEnv(base(), Compose(RenameTransform(["observation"], ["seen"]), CatTensors(["seen"], "vector")))
    got = batches(env)
    assert torch.equal(got["vector"], plain["observation"])
    assert torch.equal(got["next", "vector"], plain["next", "observation"])
    assert TransformedEnv(base(), CatTensors()).rollout(3)["observation_vector"].shape[-1] == 4


def small() -> Any:
    return TransformedEnv(
        GymWrapper(FloatsEnv()),
        Compose(DoubleToFloat(), CatTensors(["position", "velocity"], "observation"), ExcludeTransform("image")),
    )


@pytest.mark.processes
def test_in_processes() -> None:
    plain = batches(SerialEnv(2, small))
    with ParallelEnv(2, small) as env:
        got = batches(env)
    assert set(got.keys(True, True)) == set(plain.keys(True, True))
    assert torch.equal(got["next", "observation"], plain["next", "observation"])
    with MultiSyncCollector([small] * 2, frames_per_batch=20, total_frames=40) as collector:
        for batch in collector:
            assert batch["observation"].dtype == batch["action"].dtype == torch.float32
            assert "image" not in batch.keys()  # noqa: SIM118


# -- statistics --------------------------------------------------------------------------------------------------------


def test_stats_are_found_before_the_first_step() -> None:
    env = floats(
        StepCounter(),
        DoubleToFloat(),
        ObservationNorm(in_keys=["position"]),
        CatTensors(["position", "velocity"], "observation"),
        num_envs=2,
    )
    with pytest.raises(RuntimeError, match="call init_stats before"):
        env.reset()
    norm = env.transform[2]
    env.set_seed(0)
    torch.manual_seed(0)
    norm.init_stats(200, reduce_dim=(0, 1), cat_dim=1)
    assert norm.loc.shape == (3,)
    position = batches(env, 20)["observation"][..., :3]
    assert (position.mean((0, 1)).abs() < 0.3).all()
    assert ((position.std((0, 1)) - 1).abs() < 0.3).all()
    with pytest.raises(RuntimeError, match="are known already"):
        norm.init_stats(10)
    assert norm.container is env
    assert list(norm.parent.transform) == list(env.transform)[:2]


def test_stats_in_the_order_of_the_transforms() -> None:
    env = floats(ObservationNorm(in_keys=["position"]), ObservationNorm(in_keys=["velocity", "speed"]))
    first, second = env.transform
    with pytest.raises(ValueError, match="Give key"):
        second.init_stats(10)
    with pytest.raises(RuntimeError, match="first that of ObservationNorm"):
        second.init_stats(10, key="velocity")
    with pytest.raises(ValueError, match="give cat_dim"):
        first.init_stats(10, reduce_dim=(0, 1))
    with pytest.raises(ValueError, match="must be in reduce_dim"):
        first.init_stats(10, cat_dim=1)
    first.init_stats(10)
    with pytest.raises(ValueError, match=r"loc has shape \(1, 1\), the values \(2,\)"):
        second.init_stats(10, key="speed", keep_dims=(0,))
    second.init_stats(10, key="speed")
    assert env.rollout(3)["velocity"].shape[-1] == 2
    with pytest.raises(RuntimeError, match="belongs to no env"):
        ObservationNorm(in_keys=["position"]).init_stats(3)


def test_tensors_can_be_changed_saved_and_loaded() -> None:
    make = [lambda loc=loc: floats(ObservationNorm(loc, 2.0, ["position"])) for loc in (0.0, 1.0)]
    zero, one = (each() for each in make)
    with Collector(zero, frames_per_batch=5) as collector:
        collector.set_seed(1)
        collector.next()
        zero.load_state_dict({**zero.state_dict(), "transforms": one.state_dict()["transforms"]})
        assert zero.transform.loc == 1.0  # a lone transform's attributes
        last = collector.next()
        assert torch.equal(last["next", "position"][:-1][~last["next", "done"][:-1, 0]], _following(last, "position"))
        zero.transform[0].loc.fill_(100.0)
        assert (collector.next()["next", "position"] > 50).all()
        zero.transform[0].tensors[0]["scale"] = torch.ones(3, dtype=torch.float32)
        assert (collector.next()["next", "position"] > 50).all()
        zero.transform[0].tensors[0]["scale"] = torch.ones(2, 3)
        with pytest.raises(ValueError, match="the rows have"):
            collector.next()
    with pytest.raises(ValueError, match="a state has"):
        RewardScaling(0.0, 1.0).load_state_dict({"loc": torch.zeros(())})


def _following(batch: Any, key: str) -> torch.Tensor:
    return batch[key][1:][~batch["next", "done"][:-1, 0]]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DTypeCastTransform(cast(Any, "float"), torch.float32), TypeError, "not a dtype"),
        (lambda: DTypeCastTransform(torch.float32, torch.bfloat16), TypeError, "rows can have"),
        (lambda: DoubleToFloat(out_keys=["a"]), ValueError, "of which in_keys"),
        (lambda: DoubleToFloat(in_keys=["speed"]), TypeError, "the env has torch.float32 there"),
        (lambda: DoubleToFloat(["position"], ["a", "b"]), ValueError, "differ in length"),
        (lambda: DoubleToFloat(["nowhere"]), KeyError, "the env gives no 'nowhere'; it gives 'image'"),
        (lambda: DoubleToFloat([], in_keys_inv=["act"]), KeyError, "the env takes no 'act'; it takes 'action'"),
        (lambda: ObservationNorm(0.0, 1.0), ValueError, "in_keys says which"),
        (lambda: ObservationNorm(0.0, None, ["position"]), ValueError, "together"),
        (lambda: ObservationNorm(torch.zeros(7, 3), 1.0, ["position"]), ValueError, "loc has shape"),
        (lambda: ObservationNorm(0.0, 1.0, ["position"], ["reward"]), ValueError, "reward_spec already"),
        (lambda: RewardScaling(0.0, 1.0, ["position"]), ValueError, "is no reward"),
        (lambda: RewardClipping(), ValueError, "give clamp_min, clamp_max, or both"),
        (lambda: RewardClipping(0.0, 1.0, ["speed"]), ValueError, "is no reward"),
        (lambda: ClipTransform(["position"]), ValueError, "give low, high, or both"),
        (lambda: ClipTransform(["position"], low=1, high=0), ValueError, "must be below"),
        (lambda: ClipTransform(["position"], low=torch.zeros(3)), ValueError, "must be a number"),
        (lambda: ClipTransform(low=0), ValueError, "give in_keys or in_keys_inv"),
        (lambda: SignTransform(), ValueError, "give in_keys or in_keys_inv"),
        (lambda: UnsqueezeTransform(1, in_keys=["position"]), ValueError, "count from the end"),
        (lambda: UnsqueezeTransform(cast(Any, "-1"), in_keys=["position"]), TypeError, "is an integer"),
        (lambda: UnsqueezeTransform(-3, in_keys=["position"]), ValueError, "no dimension -3"),
        (lambda: SqueezeTransform(-2, in_keys=["position"]), ValueError, "no dimension -2"),
        (lambda: FlattenObservation(-1, -2, ["image"]), ValueError, "behind last_dim"),
        (lambda: FlattenObservation(-2, -1), KeyError, "no 'pixels'"),
        (lambda: PermuteTransform((-1, -1), ["image"]), ValueError, "in another order"),
        (lambda: PermuteTransform((-1, -2), ["position"]), ValueError, "fewer dimensions"),
        (lambda: CatTensors([]), ValueError, "none at all"),
        (lambda: CatTensors(dim=-2), ValueError, "needs in_keys"),
        (lambda: CatTensors(["position"], out_key=cast(Any, 3)), TypeError, "out_key must be a key"),
        (lambda: CatTensors(["position", "reward"]), ValueError, "is a reward"),
        (lambda: CatTensors(["position", "velocity"], dim=-2), ValueError, "no dimension -2"),
        (lambda: CatTensors(["position", "image"]), RuntimeError, "number of dimensions"),
        (lambda: ExcludeTransform(), ValueError, "which keys"),
        (lambda: ExcludeTransform(cast(Any, 3)), TypeError, "a key is"),
        (lambda: ExcludeTransform("action", inverse=True), ValueError, "needs them"),
        (lambda: ExcludeTransform("nowhere"), KeyError, "no 'nowhere'"),
        (lambda: ExcludeTransform("done"), ValueError, "it stays"),
        (lambda: SelectTransform("nowhere"), KeyError, "no 'nowhere'"),
        (lambda: SelectTransform("position", keep_dones=False), ValueError, "it stays"),
        (lambda: RenameTransform(["position"], ["a", "b"]), ValueError, "differ in length"),
        (lambda: RenameTransform(["speed"], ["speed"]), ValueError, "use two transforms"),
        (lambda: RenameTransform(["speed"], ["action"]), ValueError, "action_spec already"),
        (lambda: RenameTransform([], [], ["action"], ["a"], create_copy=True), ValueError, "one key"),
        (lambda: ActionScaling(["a", "b"]), ValueError, "one action each"),
        (lambda: ActionScaling(loc=1.0), ValueError, "give both"),
        (lambda: ActionScaling(loc=1.0, scale=0.0), ValueError, "must not be zero"),
        (lambda: ActionScaling(loc=torch.zeros(5), scale=1.0), ValueError, "loc has shape"),
        (lambda: ActionScaling.from_stats(mean=1.0), ValueError, "give mean and std"),
        (lambda: DiscreteActionProjection(3, 2), ValueError, "must be at least"),
        (lambda: DiscreteActionProjection(3, 5), ValueError, "not one-hot of 3"),
        (lambda: ActionMask(mask_key="mask"), ValueError, "RenameTransform"),
        (lambda: ActionMask(), KeyError, "no 'action_mask'"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        floats(make())


def test_an_action_without_bounds_is_not_scaled_unless_told_how() -> None:
    class Free(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.action_spec = Bounded(-np.inf, np.inf, (2,))

    with pytest.raises(ValueError, match="without bounds; give loc and scale"):
        TransformedEnv(Free(), ActionScaling())
    scaling = ActionScaling.from_stats(mean=[1.0, 2.0], std=[2.0, 4.0])
    env = TransformedEnv(Free(), scaling)
    assert isinstance(env.action_spec, Unbounded)
    action = torch.tensor([[3.0, 6.0]])
    assert torch.equal(scaling.normalize(action), torch.ones(1, 2))
    assert torch.equal(scaling.denormalize(torch.ones(1, 2)), action)


def test_a_refused_transform_changes_nothing() -> None:
    env = floats(DoubleToFloat())
    with pytest.raises(KeyError):
        env.append_transform(ExcludeTransform("nowhere"))
    assert len(env.transform) == 1
    env.append_transform(ExcludeTransform("image"))
    assert "image" not in env.rollout(2).keys()  # noqa: SIM118
