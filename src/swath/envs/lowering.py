"""Lowering: TorchRL's plain Gymnasium envs, several of them in turn, and the transforms that we know, on rows.

Only what is sure to give the same data is lowered: the very classes of TorchRL, not a subclass, with their own methods,
no hooks, and options that are known here; and the layout must come out the same. All else runs as a guest. The user's
objects stay what they are: their gymnasium envs are stepped, their statistics are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from gymnasium import spaces

from swath.envs.base import EnvBase
from swath.envs.gym import PixelsUnderTheirName
from swath.envs.gym_rows import GymRowEnv
from swath.envs.serial import SerialRowEnv
from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.driving import (
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RandomTruncationTransform,
)
from swath.envs.transforms.env import FLAG_KEYS, TransformedEnv
from swath.envs.transforms.frames import CatFrames, History, TimeMaxPool
from swath.envs.transforms.images import GrayScale, ToTensorImage
from swath.envs.transforms.statistics import Normalizing, VecNorm, VecNormV2
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, as_key, show
from swath.rollout.strip import Strip


class NotLowered(Exception):
    """Why an env stays a guest."""


def lowered(guest: Any) -> TransformedEnv:
    """An env of ours that steps the guest's own envs; raises ``NotLowered`` with the reason."""
    try:
        env = lower(guest)
        return env if isinstance(env, TransformedEnv) else TransformedEnv(env)
    except (KeyError, TypeError, ValueError) as error:  # what ours refuse, theirs may have another way with
        raise NotLowered(str(error)) from error


def lower(guest: Any) -> EnvBase:
    lowering = _ENVS.get(_name(guest))
    if lowering is None:
        raise NotLowered(f"{type(guest).__name__} is not known")
    _require_unchanged(guest)
    if guest.device is not None and guest.device.type != "cpu":
        raise NotLowered(f"its device is {guest.device}")
    return lowering(guest)


def bind_lowered(env: TransformedEnv, strip: Strip) -> Stepper:
    """Bind it to a strip of the guest's layout, if it is the same; raises ``NotLowered``."""
    layout = strip.layout
    if layout.primed or layout.overridden:
        raise NotLowered("the policy writes what the env gives")
    own = env.row_layout()
    said = FLAG_KEYS if own.has_truncated else [key for key in FLAG_KEYS if key != ("truncated",)]
    flags = [Field(key, torch.Size((1,)), torch.bool) for key in said]
    theirs = {(field.key, field.shape, field.dtype) for field in layout.carried if field.key not in layout.policy_state}
    ours = {(field.key, field.shape, field.dtype) for field in (*own.carried, *flags)}
    if theirs != ours or layout.structure is not None:
        keys = ", ".join(sorted({show(key) for key, *_ in theirs ^ ours}))
        raise NotLowered(f"its keys would come out differently: {keys}")
    if {(f.key, f.shape, f.dtype) for f in layout.outcomes} != {(f.key, f.shape, f.dtype) for f in own.outcomes}:
        raise NotLowered("its rewards would come out differently")
    for field in own.outputs:
        given = strip.outputs[field.key].field
        if given.shape != field.shape or (given.dtype != field.dtype and not field.dtype.is_floating_point):
            raise NotLowered(f"the policy's {show(field.key)} is {given.dtype}, its spec says {field.dtype}")
    return env.bind_rows(strip)


def _name(thing: Any) -> str | None:
    """The class by the name that TorchRL gives it; None for classes of others."""
    kind = type(thing)
    return kind.__name__ if kind.__module__.startswith("torchrl.envs.") else None


def _require_unchanged(thing: Any) -> None:
    """That nothing of this object was replaced: a method, in it or in its class, or a hook added."""
    kind = type(thing)
    own = vars(thing)
    for name in own:
        if name.startswith("_") and name.endswith("hooks") and own[name]:
            raise NotLowered(f"{kind.__name__} has {name.strip('_').replace('_', ' ')}")
        of_class = getattr(kind, name, None)
        if callable(of_class) and not isinstance(of_class, type) and getattr(own[name], "__self__", None) is not thing:
            raise NotLowered(f"{kind.__name__}.{name} was replaced")
    for name in _METHODS:
        method = getattr(kind, name, None)
        module = getattr(method, "__module__", None) or ""
        if method is not None and not module.startswith(("torchrl.", "tensordict.", "torch.")):
            raise NotLowered(f"{kind.__name__}.{name} was replaced")


_METHODS = (
    "reset",
    "step",
    "step_and_maybe_reset",
    "maybe_reset",
    "step_mdp",
    "_reset",
    "_step",
    "_call",
    "_apply_transform",
    "forward",
    "inv",
    "_inv_call",
    "read_action",
    "read_obs",
    "read_reward",
    "read_done",
    "_update",
    "_init",
    "_norm",
    "_stateful_update",
    "_stateful_norm",
)


# -- envs --------------------------------------------------------------------------------------------------------------


def _lower_gym(guest: Any) -> GymRowEnv:
    return _rows_of([guest], ())


def _rows_of(guests: list[Any], batch_size: tuple[int, ...]) -> GymRowEnv:
    gym_envs = [_plain_gym_env(guest) for guest in guests]
    first = gym_envs[0]
    for env in gym_envs:
        if env.observation_space != first.observation_space or env.action_space != first.action_space:
            raise NotLowered("its envs differ in their spaces")
    categorical = guests[0]._categorical_action_encoding
    if any(guest._categorical_action_encoding != categorical for guest in guests):
        raise NotLowered("its envs differ in how actions are encoded")
    return GymRowEnv(gym_envs, batch_size=batch_size, categorical_action_encoding=categorical)


def _plain_gym_env(guest: Any) -> gymnasium.Env:
    if _name(guest) not in ("GymEnv", "GymWrapper"):
        raise NotLowered(f"{type(guest).__name__} is not known")
    _require_unchanged(guest)
    env = guest._env
    if not isinstance(env, gymnasium.Env):
        raise NotLowered(f"it wraps {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env")
    if guest.batch_size:
        raise NotLowered("it is a vector env")
    if guest.info_dict_reader:
        raise NotLowered("it reads its info")
    if not guest._convert_actions_to_numpy:
        raise NotLowered("its actions stay tensors")
    if guest._torchrl_native_autoreset_requested:
        raise NotLowered("it resets by itself")
    for what, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not _is_plain(space):
            raise NotLowered(f"its {what} space is {space}")
    if guest.from_pixels:
        env = _with_pixels(env)
    elif isinstance(env.observation_space, spaces.Dict) and "state" in env.observation_space.spaces:
        raise NotLowered("an observation is called 'state', which TorchRL renames")
    return env if guest.wrapper_frame_skip == 1 else _Repeating(env, guest.wrapper_frame_skip)


def _with_pixels(env: gymnasium.Env) -> gymnasium.Env:
    """With the names that TorchRL gives to what Gymnasium renders, and to what was there without it."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        return PixelsUnderTheirName(env)
    if "state" in space.spaces and "observation" not in space.spaces:
        return _StateAsObservation(env)
    return env


class _StateAsObservation(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict(_renamed(env.observation_space))

    def observation(self, observation: Any) -> dict[str, Any]:
        return _renamed(observation)


def _renamed(entries: Any) -> dict[str, Any]:
    return {("observation" if name == "state" else name): value for name, value in entries.items()}


class _Repeating(gymnasium.Wrapper):
    """Repeats each action until an episode ends. Rewards add up as they are: of whichever type, from an integer 0."""

    def __init__(self, env: gymnasium.Env, num: int) -> None:
        super().__init__(env)
        self._num = num

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total: Any = 0
        result: Any = None
        for _ in range(self._num):
            result = self.env.step(action)
            total = total + result[1]
            if result[2] or result[3]:
                break
        return result[0], total, *result[2:]


def _is_plain(space: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return all(isinstance(own, spaces.Box) for own in space.spaces.values())
    return isinstance(space, spaces.Box) or (isinstance(space, spaces.Discrete) and space.start == 0)


def _lower_serial(guest: Any) -> EnvBase:
    if guest.is_closed:
        guest.start()
    children = list(guest._envs)
    if all(_name(child) in ("GymEnv", "GymWrapper") for child in children):
        return _rows_of(children, (len(children),))
    if not all(_name(child) == "TransformedEnv" for child in children):
        raise NotLowered(f"SerialEnv of {type(children[0]).__name__} is not known")
    # Transforms that treat each env alike do the same to all of them at once.
    for child in children:
        _require_unchanged(child)
    stacks = [_lower_transforms(child.transform) for child in children]
    if not all(transform.is_by_env for stack in stacks for transform in stack):
        return SerialRowEnv([_lower_transformed(child) for child in children], None)
    base = _rows_of([child.base_env for child in children], (len(children),))
    for stack in stacks:
        if repr(stack) != repr(stacks[0]):
            raise NotLowered("its envs differ in their transforms")
    for ours, *others in zip(*stacks, strict=True):
        if isinstance(ours, History):  # each has the memory of one env
            ours.owners += [owner for other in others for owner in other.owners]
    return TransformedEnv(base, stacks[0])


def _lower_transformed(guest: Any) -> EnvBase:
    stack = _lower_transforms(guest.transform)
    base = guest.base_env
    while _name(base) == "TransformedEnv":  # one in another is one with more transforms
        _require_unchanged(base)
        stack = Compose(_lower_transforms(base.transform), stack)
        base = base.base_env
    env = lower(base)
    if env.batch_size.numel() > 1:
        _require_clear_resets(stack)
    for number, transform in enumerate(stack):
        # It steps copies of those before it: fine for those that remember nothing by themselves.
        clear = _FORGETFUL if isinstance(transform, NoopResetEnv) else ()
        if transform.drives and not all(isinstance(before, clear) for before in stack[:number]):
            raise NotLowered(f"{type(transform).__name__} steps copies of the transforms before it")
    return TransformedEnv(env, stack)


_FORGETFUL = (GrayScale, RewardSum, StepCounter, ToTensorImage)


def _require_clear_resets(stack: Compose) -> None:
    """That it is known what statistics over all envs see of those that are not reset, where others are."""
    made: set[Any] = set()
    for transform in stack:
        keys = set(map(as_key, transform.in_keys))
        if isinstance(transform, Normalizing) and keys & made:
            raise NotLowered(f"{type(transform).__name__} reads what an episode is counted in")
        if isinstance(transform, (InitTracker, RewardSum, StepCounter, TimeMaxPool)) or keys & made:
            made |= set(map(as_key, transform.out_keys))
            made |= {
                as_key(getattr(transform, name)) for name in ("init_key", "step_count_key") if hasattr(transform, name)
            }


# -- transforms --------------------------------------------------------------------------------------------------------


def _lower_transforms(transform: Any) -> Compose:
    if transform is None:
        return Compose()
    _require_unchanged(transform)
    if _name(transform) == "Compose":
        return Compose(*[_lower_transforms(each) for each in transform.transforms])
    known = _TRANSFORMS.get(_name(transform) or "")
    if known is None:
        raise NotLowered(f"{type(transform).__name__} is not known")
    if getattr(transform, "missing_tolerance", False):
        raise NotLowered(f"{type(transform).__name__} tolerates that keys are missing")
    return Compose(known(transform))


def _step_counter(theirs: Any) -> Transform:
    if theirs.truncated_key != "truncated" or not theirs.update_done:
        raise NotLowered("StepCounter does not say truncated and done")
    return StepCounter(theirs.max_steps, step_count_key=theirs.step_count_key)


def _reward_sum(theirs: Any) -> Transform:
    if list(theirs.reset_keys) != ["_reset"] or theirs.reward_spec:
        raise NotLowered("RewardSum has reset_keys or a reward_spec of its own")
    return RewardSum(list(theirs.in_keys), list(theirs.out_keys))


def _vec_norm(theirs: Any) -> Transform:
    if theirs.shapes is not None and any(len(tuple(shape)) == 0 for shape in theirs.shapes):
        raise NotLowered("VecNorm has a shape without a dimension")
    ours = VecNorm(theirs.in_keys, theirs.out_keys, decay=theirs.decay, eps=theirs.eps, shapes=theirs.shapes)
    ours._source = theirs
    return ours


def _vec_norm_v2(theirs: Any) -> Transform:
    if not theirs.stateful:
        raise NotLowered("VecNormV2 has its statistics in the data")
    if theirs._loc is None:  # as it would be with its first data
        theirs._maybe_stateful_init(theirs.parent.fake_tensordict().get("next"))
    averages: Any = theirs._loc
    dtypes = {leaf.dtype for leaf in averages.values(True, True)}
    if theirs.decay == 1 and dtypes != {torch.get_default_dtype()}:
        raise NotLowered(f"VecNormV2 with decay=1 averages {dtypes}")
    ours = VecNormV2(
        theirs.in_keys,
        theirs.out_keys,
        decay=theirs.decay,
        eps=theirs.eps,
        reduce_batch_dims=theirs.reduce_batch_dims,
    )
    ours._source = theirs
    return ours


def _cat_frames(theirs: Any) -> Transform:
    ours = CatFrames(
        theirs.N,
        theirs.dim,
        theirs.in_keys,
        theirs.out_keys,
        theirs.padding,
        theirs.padding_value,
        theirs.as_inverse,
        theirs._reset_key,
        theirs.done_key,
        theirs.future,
        theirs.mask_key,
    )
    ours.owners = [theirs]
    return ours


def _time_max_pool(theirs: Any) -> Transform:
    ours = TimeMaxPool(theirs.in_keys, theirs.out_keys, theirs.buffer_size, theirs._reset_key)
    ours.owners = [theirs]
    return ours


def _to_tensor_image(theirs: Any) -> Transform:
    return ToTensorImage(
        theirs.from_int,
        theirs.unsqueeze,
        theirs.dtype,
        in_keys=theirs.in_keys,
        out_keys=theirs.out_keys,
        shape_tolerant=theirs.shape_tolerant,
    )


def _noop_reset(theirs: Any) -> Transform:
    ours = NoopResetEnv(theirs.noops, theirs.random)
    parent = theirs.parent
    ours._draw = lambda: parent.rand_action()
    return ours


def _random_truncation(theirs: Any) -> Transform:
    ours = RandomTruncationTransform(
        theirs.min_horizon,
        theirs.max_horizon,
        theirs.prob,
        theirs.first_episode_prob,
        step_count_key=theirs.step_count_key,
        truncated_key=theirs.truncated_key,
        done_key=theirs.done_key,
    )
    ours._source = theirs
    return ours


def _end_of_life(theirs: Any) -> Transform:
    ours = EndOfLifeTransform(theirs.eol_key, theirs.lives_key, theirs.done_key, ".".join(theirs.eol_attribute))
    ours._lives = theirs._get_lives
    return ours


class _AsTheirs(Transform):
    """What TorchRL's does to a value, by calling it: torchvision does the work."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs.in_keys, theirs.out_keys)
        self._theirs = theirs

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._theirs._apply_transform(value)

    def __repr__(self) -> str:
        return f"{self._theirs!r} from {self.in_keys} to {self.out_keys}"


_ENVS: dict[str | None, Callable[[Any], EnvBase]] = {
    "GymEnv": _lower_gym,
    "GymWrapper": _lower_gym,
    "SerialEnv": _lower_serial,
    "TransformedEnv": _lower_transformed,
}

_TRANSFORMS: dict[str, Callable[[Any], Transform]] = {
    "StepCounter": _step_counter,
    "RewardSum": _reward_sum,
    "InitTracker": lambda theirs: InitTracker(theirs.init_key),
    "VecNorm": _vec_norm,
    "VecNormV2": _vec_norm_v2,
    "CatFrames": _cat_frames,
    "TimeMaxPool": _time_max_pool,
    "ToTensorImage": _to_tensor_image,
    "GrayScale": lambda theirs: GrayScale(theirs.in_keys, theirs.out_keys),
    "NoopResetEnv": _noop_reset,
    "RandomTruncationTransform": _random_truncation,
    "EndOfLifeTransform": _end_of_life,
    "FrameSkipTransform": lambda theirs: FrameSkipTransform(theirs.frame_skip),
    "Resize": _AsTheirs,
    "CenterCrop": _AsTheirs,
}
