"""``check_transform``: all transforms of ours pass, and each wrong one is told what is wrong with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import swath.envs
from counting import CountingEnv, CountingTensorDictEnv, make_counting
from swath.envs import (
    ActionDiscretizer,
    ActionMask,
    ActionScaling,
    Bounded,
    CatFrames,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    EndOfLifeTransform,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    GrayScale,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    PermuteTransform,
    RandomTruncationTransform,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SerialEnv,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TensorDictPrimer,
    TimeMaxPool,
    ToTensorImage,
    Transform,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from swath.envs.transforms.rows import NOTHING, Stateless
from swath.errors import EnvError
from swath.testing import check_transform
from transform_envs import FloatsEnv


def floats() -> Any:
    return GymWrapper(FloatsEnv())


def mortal() -> Any:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.lives = 3  # type: ignore[attr-defined]
    return GymWrapper(env)


class MaskedEnv(gymnasium.Env):
    """Says which of its actions are allowed."""

    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(3), value=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Discrete(3)

    def _observe(self) -> Any:
        mask = np.ones(3, dtype=np.int8)
        mask[self.np_random.integers(3)] = 0
        return {"action_mask": mask, "value": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        return self._observe(), 1.0, bool(self.np_random.integers(5) == 0), False, {}


OURS: dict[str, tuple[Callable[[], Transform], Callable[[], Any] | None]] = {
    "StepCounter": (lambda: StepCounter(max_steps=6), make_counting),
    "RewardSum": (RewardSum, None),
    "InitTracker": (InitTracker, None),
    "RandomTruncationTransform": (lambda: Compose(StepCounter(), RandomTruncationTransform(2, 5, 0.5)), make_counting),
    "DoubleToFloat": (lambda: DoubleToFloat(["position"], in_keys_inv=["action"]), floats),
    "DTypeCastTransform": (lambda: DTypeCastTransform(torch.uint8, torch.float32, ["image"]), floats),
    "ObservationNorm": (lambda: ObservationNorm(0.5, 2.0, ["observation"]), None),
    "VecNorm": (lambda: VecNorm(["observation"]), None),
    "VecNormV2": (lambda: VecNormV2(["observation"], ["normal"]), None),
    "RewardScaling": (lambda: RewardScaling(0.5, 2.0), None),
    "RewardClipping": (lambda: RewardClipping(-0.5, 0.5), None),
    "ClipTransform": (lambda: ClipTransform(["observation"], low=-0.5, high=0.5), None),
    "SignTransform": (lambda: SignTransform(["observation"]), None),
    "CatTensors": (lambda: CatTensors(["position", "velocity"], "both"), floats),
    "UnsqueezeTransform": (lambda: UnsqueezeTransform(-1, in_keys=["observation"]), None),
    "SqueezeTransform": (lambda: SqueezeTransform(-1, in_keys=["speed"]), floats),
    "FlattenObservation": (lambda: FlattenObservation(-3, -1, ["pixels"]), None),
    "PermuteTransform": (lambda: PermuteTransform((-1, -3, -2), ["pixels"]), None),
    "ExcludeTransform": (lambda: ExcludeTransform("speed"), floats),
    "SelectTransform": (lambda: SelectTransform("speed"), floats),
    "RenameTransform": (lambda: RenameTransform(["speed"], ["pace"], ["action"], ["push"]), floats),
    "CatFrames": (lambda: CatFrames(3, -1, ["observation"], ["stacked"]), None),
    "TimeMaxPool": (lambda: TimeMaxPool(["observation"], ["pooled"], 2), None),
    "ToTensorImage": (lambda: ToTensorImage(in_keys=["pixels"]), None),
    "GrayScale": (lambda: Compose(ToTensorImage(in_keys=["pixels"]), GrayScale(["pixels"])), None),
    "Resize": (lambda: Compose(ToTensorImage(in_keys=["pixels"]), Resize(4, in_keys=["pixels"])), None),
    "CenterCrop": (lambda: Compose(ToTensorImage(in_keys=["pixels"]), CenterCrop(4, in_keys=["pixels"])), None),
    "TensorDictPrimer": (lambda: TensorDictPrimer(h=Unbounded((2,)), expand_specs=True), None),
    "ActionDiscretizer": (lambda: ActionDiscretizer(torch.tensor([3, 5])), floats),
    "ActionScaling": (ActionScaling, floats),
    "DiscreteActionProjection": (lambda: DiscreteActionProjection(3, 5), make_counting),
    "ActionMask": (ActionMask, lambda: GymWrapper(MaskedEnv())),
    "NoopResetEnv": (lambda: NoopResetEnv(3), floats),
    "FrameSkipTransform": (lambda: FrameSkipTransform(2), lambda: CountingTensorDictEnv()),
    "EndOfLifeTransform": (lambda: EndOfLifeTransform(eol_attribute="unwrapped.lives"), mortal),
}


def test_none_is_left_out() -> None:
    kinds = {name for name in swath.envs.__all__ if isinstance(getattr(swath.envs, name), type)}
    known = {name for name in kinds if issubclass(getattr(swath.envs, name), Transform)} - {"Compose", "Transform"}
    assert known == set(OURS)


@pytest.mark.parametrize(("make", "make_env"), OURS.values(), ids=OURS)
def test_ours(make: Callable[[], Transform], make_env: Callable[[], Any] | None) -> None:
    check_transform(make(), make_env)


def test_on_envs_of_every_kind() -> None:
    transform = CatFrames(2, -1, ["observation"], ["stacked"])
    for env in ("CartPole-v1", CountingEnv(), SerialEnv(2, make_counting), make_counting):
        check_transform(transform, env, num_steps=15)
    check_transform(transform, SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP), num_steps=15)
    in_an_env = TransformedEnv(make_counting(), transform)
    check_transform(in_an_env.transform[0], make_counting)
    assert in_an_env.rollout(3)["stacked"].shape == (3, 8)


def test_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(2), np.random.rand(2)  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    check_transform(RewardSum())
    assert torch.equal(torch.rand(2), expected[0])
    assert np.array_equal(np.random.rand(2), expected[1])  # noqa: NPY002


# -- wrong ones --------------------------------------------------------------------------------------------------------


class Total(Transform):
    """The sum of an episode's rewards, right; the wrong ones below differ from it in one thing."""

    def transform_specs(self, specs: Any) -> None:
        specs.find(("reward",), self)
        specs.put(("total",), Unbounded((*specs.batch_size, 1)), "observation")

    def bind(self, rows: Any) -> Any:
        return self.stage(rows, rows["reward"].array, rows.new("total", (1,), torch.float32).array)

    class stage:
        def __init__(self, rows: Any, reward: Any, total: Any) -> None:
            self.rows, self.reward, self.total = rows, reward, total

        def step(self, env_ids: Any) -> Any:
            which = slice(None) if env_ids is None else env_ids
            self.total[which] += self.reward[which]

        def reset(self, env_ids: Any) -> None:
            self.total[env_ids] = 0


class NeverRestarts(Total):
    class stage(Total.stage):
        def __init__(self, rows: Any, reward: Any, total: Any) -> None:
            super().__init__(rows, reward, total)
            self.mine = np.zeros_like(total)

        def step(self, env_ids: Any) -> Any:
            which = slice(None) if env_ids is None else env_ids
            self.mine[which] += self.reward[which]
            self.total[which] = self.mine[which]


class RestartsAll(Total):
    class stage(Total.stage):
        def reset(self, env_ids: Any) -> None:
            self.total[:] = 0


class RestartsAllInItsOwnMemory(NeverRestarts):
    class stage(NeverRestarts.stage):
        def reset(self, env_ids: Any) -> None:
            self.mine[:] = 0
            self.total[env_ids] = 0


class StepsAll(Total):
    class stage(Total.stage):
        def step(self, env_ids: Any) -> Any:
            self.total += self.reward


class LeavesMemory(Total):
    class stage(Total.stage):
        def reset(self, env_ids: Any) -> None:
            pass


class OtherShape(Total):
    def transform_specs(self, specs: Any) -> None:
        specs.put(("total",), Unbounded((*specs.batch_size, 4)), "observation")


class OfOneEnv(Total):
    def transform_specs(self, specs: Any) -> None:
        specs.find(("reward",), self)
        specs.put(("total",), Unbounded((1,)), "observation")


class OtherDtype(Total):
    def transform_specs(self, specs: Any) -> None:
        specs.put(("total",), Unbounded((*specs.batch_size, 1), torch.float64), "observation")


class NoMemory(Total):
    def bind(self, rows: Any) -> Any:
        return NOTHING


class NoSpec(Total):
    def transform_specs(self, specs: Any) -> None:
        pass


class NoStage(Total):
    def bind(self, rows: Any) -> Any:
        rows.new("total", (1,), torch.float32)


class OutOfBounds(Total):
    def transform_specs(self, specs: Any) -> None:
        specs.put(("total",), Bounded(-0.1, 0.1, (*specs.batch_size, 1)), "observation")


class FindsNothing(Total):
    def transform_specs(self, specs: Any) -> None:
        specs.put(("total",), Unbounded((*specs.batch_size, 1)), "observation")


class NamesNothing(Total):
    def transform_specs(self, specs: Any) -> None:
        if specs.kind_of(("reward",)) is None:
            raise ValueError("something is missing")
        super().transform_specs(specs)


class InPlace(Transform):
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.mul_(2)


class Mixes(Transform):
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value - value.mean()


class Draws(Transform):
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value + float(np.random.default_rng().normal())


class CannotTravel(Transform):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lock = threading.Lock()


class Forgets(Transform):
    scale = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = 3.0

    def __getstate__(self) -> Any:
        return {name: value for name, value in self.__dict__.items() if name != "scale"}

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(in_keys=self.in_keys, out_keys=self.out_keys)

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


class Ends(Total):
    """Ends an episode when its total is large."""

    ends_episodes = True  # type: ignore[assignment]

    class stage(Total.stage):
        def step(self, env_ids: Any) -> Any:
            super().step(env_ids)
            over = np.flatnonzero(self.total.reshape(-1) > 1).tolist()
            self.rows.truncated[over] = True
            return over


class EndsUnsaid(Ends):
    ends_episodes = False  # type: ignore[assignment]


class EndsWithoutFlag(Total):
    ends_episodes = True  # type: ignore[assignment]

    class stage(Total.stage):
        def step(self, env_ids: Any) -> Any:
            super().step(env_ids)
            return np.flatnonzero(self.total.reshape(-1) > 1).tolist()


class EndsInSilence(Ends):
    class stage(Ends.stage):
        def step(self, env_ids: Any) -> Any:
            super().step(env_ids)


class WrongActions(Transform):
    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * 3


class ActionsOfAnotherShape(Transform):
    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value[..., :1]


class ChangesActions(Transform):
    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.mul_(0.5)


class ReadsAnotherMemory(Transform):
    """Looks for its key when it is stepped for the first time."""

    def bind(self, rows: Any) -> Any:
        read, write = rows["observation"], rows.new("copy", (4,), torch.float32)
        return Stateless(lambda: write.row.copy_(read.row))

    def transform_specs(self, specs: Any) -> None:
        specs.put(("copy",), Unbounded((*specs.batch_size, 4)), "observation")


def of_observation(kind: type[Transform]) -> Callable[[], Transform]:
    return lambda: kind(in_keys=["observation"], out_keys=["made"])


WRONG: dict[Callable[[], Any], str] = {
    NeverRestarts: r"the episode that begins with step \d+ is another .* first one: 'total' after step \d+ is",
    RestartsAll: r"the reset after step \d+, reset\(env_ids=\[\d\]\) changes 'total' of envs that are not among them",
    RestartsAllInItsOwnMemory: r"env \d of 3 gets other data than the same env alone: 'total' after|the others",
    StepsAll: r"at step \d+, step\(env_ids=\[0, 2\]\) changes 'total' of envs that are not among them: \[1\]",
    LeavesMemory: r"depends on what was in memory before: 'total' before step 0 is .*77.0\]",
    OtherShape: r"bind makes 'total' of shape \(1,\) and dtype torch.float32 for each env, its spec says \(4,\)",
    OfOneEnv: r"it takes one env, but not 3: the spec of 'total' has shape \(1,\), which does not begin with the env's",
    OtherDtype: r"of shape \(1,\) and dtype torch.float32 for each env, its spec says \(1,\) and torch.float64",
    NoMemory: r"transform_specs says that there is 'total', but bind makes no memory for it \(rows.new\)",
    NoSpec: r"bind makes 'total', which is in no spec, so nobody gets it; say specs.put",
    NoStage: r"bind gives None, which has no step\(env_ids\)",
    OutOfBounds: r"after step \d+, 'total' is \[.*\], which is not in its spec Bounded",
    FindsNothing: r"an env without 'reward' is taken, and fails only when it is stepped; say specs.find\(\('reward',\)",
    NamesNothing: r"an env without 'reward' is refused with 'something is missing', which does not name that key",
    of_observation(InPlace): r"at the first reset, reset writes to the memory of 'observation', which it only reads",
    of_observation(Mixes): r"reset\(env_ids=\[.*changes 'made' of envs that are not among them: .* is_by_env = False",
    of_observation(
        Draws
    ): r"the same data and the same seed give other results: 'made' before step 0 is .* a generator",
    of_observation(CannotTravel): r"CannotTravel cannot be copied \(copy.deepcopy\): TypeError: cannot pickle",
    of_observation(Forgets): r"one that was pickled for a worker gives other results: 'made' before step 0 is",
    EndsUnsaid: r"at step \d+, step ends the episodes of envs \[0\], but its property ends_episodes is False",
    EndsWithoutFlag: r"step ends the episodes of envs \[0\], but sets neither rows.truncated nor rows.terminated",
    EndsInSilence: r"step sets rows.truncated or rows.terminated of envs \[0\], but does not return their numbers",
    lambda: WrongActions(in_keys_inv=["action"]): r"at step \d, the env gets 'action' \[.*\], which is not in its spec",
    lambda: ActionsOfAnotherShape(in_keys_inv=["action"]): r"makes 'action' of shape \(1,\) .* the env takes \(2,\)",
    lambda: ChangesActions(
        in_keys_inv=["action"]
    ): r"at step 0, it writes to the memory of 'action', which it is given",
    ReadsAnotherMemory: r"an env without 'observation' is taken, and fails only when it is stepped",
}


@pytest.mark.parametrize(("make", "message"), WRONG.items(), ids=[str(n) for n in range(len(WRONG))])
def test_wrong_ones(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as raised:
        check_transform(make())
    assert str(raised.value).startswith("check_transform: ")


@pytest.mark.parametrize("make", [Total, Ends])
def test_right_ones(make: Callable[[], Any]) -> None:
    check_transform(make())
    check_transform(make(), SerialEnv(2, make_counting))


def test_what_goes_on_over_episodes_says_so() -> None:
    check_transform(NeverRestarts(), restarts=False)


def test_what_needs_another_env() -> None:
    with pytest.raises(AssertionError, match=r"takes two floats: .*one-hot of 3. Give one that it is for"):
        check_transform(DiscreteActionProjection(3, 5))
    with pytest.raises(TypeError, match=r"a transform is a swath.envs.Transform"):
        check_transform(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        check_transform(RewardSum(), num_steps=0)
    with pytest.raises(KeyError, match="gives no 'typo'"):
        check_transform(SignTransform(["typo"]), make_counting)


def test_random_truncation_needs_envs_that_are_reset_one_by_one() -> None:
    """An env that resets by itself would go on with its episode."""
    env = SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(EnvError, match=r"RandomTruncationTransform.* needs an env whose parts can be reset"):
        TransformedEnv(env, Compose(StepCounter(), RandomTruncationTransform(2, 4)))
