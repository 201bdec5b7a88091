"""Lowering: TorchRL's plain Gymnasium envs, several of them in turn, and the transforms that we know, on rows.

Only what is sure to give the same data is lowered: the very classes of TorchRL, not a subclass, with their own methods,
no hooks, and options that are known here; and the layout must come out the same. All else runs as a guest. The user's
objects stay what they are: their gymnasium envs are stepped, their statistics are updated in place.
"""

from __future__ import annotations

import abc
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from swath.envs.base import EnvBase
from swath.envs.gym import PixelsUnderTheirName
from swath.envs.gym_rows import GymRowEnv, GymStepper
from swath.envs.gym_spaces import ObservationLeaf
from swath.envs.serial import SerialRowEnv
from swath.envs.specs import OneHot, Spec, Unbounded
from swath.envs.transforms.actions import ActionScaling, DiscreteActionProjection
from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.discretize import ActionDiscretizer
from swath.envs.transforms.driving import (
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RandomTruncationTransform,
)
from swath.envs.transforms.env import FLAG_KEYS, TransformedEnv, TransformedStepper
from swath.envs.transforms.frames import CatFrames, History, TimeMaxPool
from swath.envs.transforms.images import GrayScale, ToTensorImage
from swath.envs.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from swath.envs.transforms.primer import TensorDictPrimer
from swath.envs.transforms.shapes import (
    CatTensors,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
from swath.envs.transforms.statistics import Normalizing, VecNorm, VecNormV2
from swath.envs.transforms.values import (
    ClipTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    SignTransform,
    TensorTransform,
)
from swath.errors import EnvDataError
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, Key, as_key, show
from swath.rollout.strip import Strip


class NotLowered(Exception):
    """Why an env stays a guest."""


def lowered(guest: Any) -> tuple[TransformedEnv, Watch]:
    """An env of ours that steps the guest's own envs, and what was read of it; ``NotLowered`` has the reason."""
    try:
        env = lower(guest)
        env = env if isinstance(env, TransformedEnv) else TransformedEnv(env)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # which theirs may take
        raise NotLowered(str(error)) from error
    counted_in(env)
    return env, Watch(guest, _gym_envs_of(env), _processes_of(env))


def _gym_envs_of(env: Any) -> list[gymnasium.Env]:
    if isinstance(env, SerialRowEnv):
        return [each for child in env.children for each in _gym_envs_of(child)]
    if isinstance(env, TransformedEnv):
        return _gym_envs_of(env.base_env)
    return list(env.gym_envs) if isinstance(env, GymRowEnv) else []


def _transforms_of(env: Any) -> list[Transform]:
    """All of them that are here, from the innermost to the outermost."""
    if isinstance(env, SerialRowEnv):
        return _transforms_of(env.children[0])
    return [*_transforms_of(env.base_env), *env.transform] if isinstance(env, TransformedEnv) else []


def _processes_of(env: Any) -> Any:
    """The env in it that is stepped in processes of TorchRL (``lowered_parallel.py``), or None."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env if hasattr(type(env), "has_changed") else None


def changes_actions(env: TransformedEnv) -> bool:
    """Whether any transform stands between what a policy writes and what the env gets."""
    elsewhere = _processes_of(env)
    return any(transform.in_keys_inv for transform in _transforms_of(env)) or (
        elsewhere is not None and elsewhere.changes_actions
    )


def counted_in(env: TransformedEnv) -> dict[Key, str]:
    """The keys of counts and sums, and who goes on from them.

    Nobody may change one on its way to the data: TorchRL's transforms go on from what they find there.
    """
    elsewhere = _processes_of(env)
    counted: dict[Key, str] = {} if elsewhere is None else dict(elsewhere.counted)
    for transform in _transforms_of(env):
        for key in transform.touched_keys():
            if key in counted:
                raise NotLowered(f"{type(transform).__name__} changes {show(key)}, with which {counted[key]} goes on")
        if isinstance(transform, StepCounter):
            counted[as_key(transform.step_count_key)] = "StepCounter"
        elif isinstance(transform, RewardSum):
            counted |= {as_key(key): "RewardSum" for key in transform.out_keys}
    return counted


def lower(guest: Any) -> EnvBase:
    lowering = _ENVS.get(name_of(guest))
    if lowering is None:
        raise NotLowered(f"{type(guest).__name__} is not known")
    require_unchanged(guest)
    if guest.device is not None and guest.device.type != "cpu":
        raise NotLowered(f"its device is {guest.device}")
    return lowering(guest)


def bind_lowered(env: TransformedEnv, strip: Strip) -> Stepper:
    """Bind it to a strip of the guest's layout, if it is the same; raises ``NotLowered``."""
    layout, own = strip.layout, env.row_layout()
    if not layout.primed <= own.primable or layout.overridden:
        raise NotLowered("the policy writes what the env gives")
    said = FLAG_KEYS if own.has_truncated else [key for key in FLAG_KEYS if key != ("truncated",)]
    flags = [Field(key, torch.Size((1,)), torch.bool) for key in said]
    theirs = {(field.key, field.shape, field.dtype) for field in layout.carried if field.key not in layout.policy_state}
    ours = {(field.key, field.shape, field.dtype) for field in (*own.carried, *flags)}
    if theirs != ours or layout.structure is not None:
        keys = ", ".join(sorted({show(key) for key, *_ in theirs ^ ours}))
        raise NotLowered(f"its keys would come out differently: {keys}")
    if {(f.key, f.shape, f.dtype) for f in layout.outcomes} != {(f.key, f.shape, f.dtype) for f in own.outcomes}:
        raise NotLowered("its rewards would come out differently")
    casts = False
    for field in own.outputs:
        given = strip.outputs[field.key].field
        if given.shape != field.shape:
            raise NotLowered(f"the policy's {show(field.key)} has shape {tuple(given.shape)}, not {tuple(field.shape)}")
        if given.dtype != field.dtype:
            if changes_actions(env) or not isinstance(env.full_action_spec[field.key], OneHot):
                raise NotLowered(f"the policy's {show(field.key)} is {given.dtype}, its spec says {field.dtype}")
            casts = True  # as TorchRL does it, before it looks for the largest entry
    return TransformedStepper(env.pipeline, strip, casts)


def name_of(thing: Any) -> str | None:
    """The class by the name that TorchRL gives it; None for classes of others."""
    kind = type(thing)
    if not kind.__module__.startswith("torchrl.envs."):
        return None
    return kind.__name__ if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind else None


def require_unchanged(thing: Any) -> None:
    """That nothing of this object was replaced: a method, in it or in its class, or a hook added."""
    kind = type(thing)
    own = vars(thing)
    for name in own:
        if name.startswith("_") and name.endswith("hooks") and own[name]:
            raise NotLowered(f"{kind.__name__} has {name.strip('_').replace('_', ' ')}")
        of_class = getattr(kind, name, None)
        if callable(of_class) and not isinstance(of_class, type) and getattr(own[name], "__self__", None) is not thing:
            raise NotLowered(f"{kind.__name__}.{name} was replaced")
    for owner in kind.__mro__:
        if owner.__module__.startswith("torchrl."):
            _require_unchanged_class(owner)


def _require_unchanged_class(owner: type) -> None:
    methods = list(vars(owner).values())
    known = _UNCHANGED.get(owner)
    if known is not None and len(known) == len(methods) and all(map(operator.is_, known, methods)):
        return
    for name, method in vars(owner).items():
        if not is_written_by_torchrl(method):
            raise NotLowered(f"{owner.__name__}.{name} was replaced")
    _UNCHANGED[owner] = methods


#: Classes that were looked at, and what was in them.
_UNCHANGED: dict[type, list[Any]] = {}


def is_written_by_torchrl(method: Any) -> bool:
    """Whether a function was written there. Not by its ``__module__``: who replaces one often copies that."""
    for part in (method, getattr(method, "__func__", None), getattr(method, "fget", None)):
        code = getattr(part, "__code__", None)
        if code is not None and not code.co_filename.startswith((*_homes(), "<string>")):
            return False
    return True


def _homes() -> tuple[str, ...]:
    """The folders of packages whose functions are TorchRL's own: also decorators, and ``nn.Module``."""
    packages = (sys.modules.get(name) for name in ("torchrl", "tensordict", "torch"))
    files = [package.__file__ for package in packages if package is not None and package.__file__]
    return (*[str(Path(file).parent) for file in files], *_STANDARD_LIBRARY)


#: Of decorators such as ``abc`` and ``contextlib`` have.
_STANDARD_LIBRARY = (str(Path(abc.__file__).parent) + "/", "<frozen ")


class Watch:
    """All that lowering may have read of a guest, to see whether its user has changed any of it since.

    By identity: of the attributes of each object, of what is in their lists and dicts, and of their classes.
    """

    def __init__(self, guest: Any, gym_envs: Sequence[gymnasium.Env], elsewhere: Any = None) -> None:
        things = {id(part): part for root in _parts(guest) for part in root.modules()}
        self._things = list(things.values())
        self._classes = list(
            dict.fromkeys(
                kind for thing in self._things for kind in type(thing).__mro__ if kind.__module__.startswith("torchrl.")
            )
        )
        self._guest = guest
        self._gym_envs = gym_envs
        #: What is in other processes is watched there.
        self._elsewhere = elsewhere
        self._kept: list[Any] = []
        self._seen = self._look(self._kept)

    def again(self) -> Watch:
        """As it is now: what was lowered changes some of it itself, when it is bound and reset for the first time."""
        return Watch(self._guest, self._gym_envs, self._elsewhere)

    def has_changed(self) -> bool:
        return self._look([]) != self._seen or (self._elsewhere is not None and self._elsewhere.has_changed())

    def _look(self, kept: list[Any]) -> list[Any]:
        # What is compared by its id must be kept, or another object may get the same one.
        seen: list[Any] = [env.step for env in self._gym_envs]
        for thing in self._things:
            memory = _MEMORY.get(name_of(thing))
            for name, value in vars(thing).items():
                if name in _CACHES or name == memory:
                    continue
                kept.append(value)
                kind = type(value)
                if kind is list or kind is tuple:
                    kept += value
                elif isinstance(value, dict):
                    kept += value.values()
                elif name == "default_value" and isinstance(value, TensorDictBase):  # others are statistics
                    kept += value.values(True, True)
        for owner in self._classes:
            kept += vars(owner).values()
        seen += map(id, kept)
        return seen


#: What transforms keep of an episode, which is shared with what was lowered.
_MEMORY: dict[str | None, str] = {"CatFrames": "_buffers", "TimeMaxPool": "_buffers"}

#: Attributes that TorchRL writes by itself when it is asked for specs or is given to a collector.
_CACHES = frozenset(
    ("_cache", "_input_spec", "_output_spec", "_cache_in_keys", "_collector", "_is_spec_locked", "_validated", "_seeds")
)


def _parts(guest: Any) -> Iterator[Any]:
    """The guest, and envs in it that are not modules of its own."""
    yield guest
    for part in list(guest.modules()):
        for child in vars(part).get("_envs", ()):
            yield from _parts(child)


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
    env = LoweredGymEnv(gym_envs, batch_size=batch_size, categorical_action_encoding=categorical)
    env.guests = guests
    return env


class LoweredGymEnv(GymRowEnv):
    """Gymnasium envs of TorchRL's wrappers; what they give is read as those do."""

    guests: Sequence[Any] = ()

    def bind_rows(self, strip: Strip) -> GymStepper:
        return LoweredGymStepper(self, strip)


class LoweredGymStepper(GymStepper):
    """What an env gives is taken where it is as its spaces say; else TorchRL's own methods read it."""

    _env: LoweredGymEnv

    def _take(self, t: int, env: int, result: Any, ended: list[int] | None) -> list[int] | None:
        observation, reward, terminated, truncated, _ = result
        try:
            self._rewards[t * self._num_envs + env] = reward
        except (TypeError, ValueError, OverflowError):
            read = self._env.guests[env].read_reward(0 if reward is None else 0 + reward)
            if read.numel() != 1:
                raise EnvDataError(f"the reward is {reward!r}, not a number") from None
            self._rewards[t * self._num_envs + env] = read.item()
        self._write(t + 1, env, observation)
        if terminated or truncated:
            return self._mark_end(t, env, terminated, truncated, ended)
        return ended

    def _result_can_be_mended(self, result: Any) -> bool:
        self.__dict__.pop("step", None)
        return isinstance(result, tuple) and len(result) == 5

    def _casts_can_mend(self, observation: Any, error: Exception) -> bool:
        return False

    def _write(self, row: int, env: int, observation: Any) -> None:
        try:
            super()._write(row, env, observation)
        except Exception:
            given = dict(observation) if isinstance(observation, dict) else observation
            read = self._env.guests[env].read_obs(given)
            index = row * self._num_envs + env
            for leaf, memory, size in self._leaves:
                value = read[leaf.key[0]]
                if value.shape != leaf.spec.shape or value.dtype != leaf.spec.dtype:
                    raise EnvDataError(
                        f"observation {show(leaf.key)} has shape {tuple(value.shape)} and dtype {value.dtype}, its "
                        f"spec says {tuple(leaf.spec.shape)} and {leaf.spec.dtype}"
                    ) from None
                memory[index * size : (index + 1) * size] = value.reshape(-1).numpy()
                self._learn_cast(leaf, observation)

    def _learn_cast(self, leaf: ObservationLeaf, observation: Any) -> None:
        """From one kind of float to another NumPy casts as torch does, without the detour."""
        value = leaf.pick(observation)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and leaf.spec.dtype.is_floating_point:
            self._env.declared_casts[leaf.key] = np.dtype(leaf.space.dtype)
            self.__dict__.pop("step", None)  # the generic step knows about casts


def _plain_gym_env(guest: Any) -> gymnasium.Env:
    if name_of(guest) not in ("GymEnv", "GymWrapper"):
        raise NotLowered(f"{type(guest).__name__} is not known")
    require_unchanged(guest)
    env = guest._env
    if not isinstance(env, gymnasium.Env):
        raise NotLowered(f"it wraps {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env")
    if guest.batch_size:
        raise NotLowered("it is a vector env")
    if guest.info_dict_reader:
        raise NotLowered("it reads its info")
    if not guest._convert_actions_to_numpy:
        raise NotLowered("its actions stay tensors")
    if "read_obs" in vars(guest) and guest.read_obs == guest._read_obs_memo:
        raise NotLowered("it remembers how to read its first observation and reward (fast_encoding)")
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
    env = _lower_children(list(guest._envs))
    if guest._use_buffers and not guest.share_individual_td:
        # There it finds, for transforms, those that are not reset while others are.
        roots = guest.shared_tensordict_parent.exclude("next").items(True, True)
        leaves = {as_key(key): leaf.numpy() for key, leaf in roots}
        env.first_rows_told = {f.key: leaves[f.key] for f in env.row_layout().carried if f.key in leaves}
    return env


def _lower_children(children: list[Any]) -> EnvBase:
    if all(name_of(child) in ("GymEnv", "GymWrapper") for child in children):
        return _rows_of(children, (len(children),))
    if not all(name_of(child) == "TransformedEnv" for child in children):
        raise NotLowered(f"SerialEnv of {type(children[0]).__name__} is not known")
    # Transforms that treat each env alike do the same to all of them at once.
    stacks, bases = zip(*[_peeled(child) for child in children], strict=True)
    if not all(transform.is_by_env for stack in stacks for transform in stack):
        envs = [_lower_transformed(child) for child in children]
        if any(_processes_of(env) is not None for env in envs):
            raise NotLowered("SerialEnv of ParallelEnvs is not known")
        return SerialRowEnv(envs, None)
    if any(repr(stack) != repr(stacks[0]) for stack in stacks):
        raise NotLowered("its envs differ in their transforms")
    base = _rows_of(list(bases), (len(children),))
    joined = []
    for alike in zip(*stacks, strict=True):
        ours, *others = alike
        if isinstance(ours, History):  # each has the memory of one env
            ours.owners += [owner for other in others for owner in other.owners]  # type: ignore[attr-defined]
        joined.append(ours.side_by_side(alike))
    return TransformedEnv(base, Compose(*joined))


def _lower_parallel(guest: Any) -> EnvBase:
    from swath.envs.lowered_parallel import lower_parallel  # which needs this module in its processes

    return lower_parallel(guest)


def _peeled(guest: Any) -> tuple[Compose, Any]:
    """The transforms around an env, and the env: one in another is one with more transforms."""
    stack = Compose()
    while name_of(guest) == "TransformedEnv":
        require_unchanged(guest)
        stack = Compose(lower_transforms(guest.transform), stack)
        guest = guest.base_env
    for number, transform in enumerate(stack):
        # It steps copies of those before it: fine for those that remember nothing by themselves.
        clear = _FORGETFUL if isinstance(transform, NoopResetEnv) else ()
        if transform.drives and not all(isinstance(before, clear) for before in stack[:number]):
            raise NotLowered(f"{type(transform).__name__} steps copies of the transforms before it")
    return stack, guest


def _lower_transformed(guest: Any) -> EnvBase:
    stack, base = _peeled(guest)
    env = lower(base)
    if env.batch_size.numel() > 1:
        _require_clear_resets(stack)
    if _processes_of(env) is not None:
        for transform in stack:
            if transform.drives or isinstance(transform, (EndOfLifeTransform, RandomTruncationTransform)):
                raise NotLowered(f"{type(transform).__name__} is around envs in processes")
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


def lower_transforms(transform: Any) -> Compose:
    if transform is None:
        return Compose()
    require_unchanged(transform)
    if name_of(transform) == "Compose":
        return Compose(*[lower_transforms(each) for each in transform.transforms])
    known = _TRANSFORMS.get(name_of(transform) or "")
    if known is None:
        raise NotLowered(f"{type(transform).__name__} is not known")
    if getattr(transform, "missing_tolerance", False):
        raise NotLowered(f"{type(transform).__name__} tolerates that keys are missing")
    try:
        return Compose(known(transform))
    except (RuntimeError, TypeError, ValueError) as reason:
        raise NotLowered(str(reason)) from reason


def _step_counter(theirs: Any) -> Transform:
    if theirs.truncated_key != "truncated" or not theirs.update_done:
        raise NotLowered("StepCounter does not say truncated and done")
    return StepCounter(theirs.max_steps, step_count_key=theirs.step_count_key)


def _reward_sum(theirs: Any) -> Transform:
    if theirs.parent is None:  # what it was given; it would ask that env for the rest, as ours does
        given = vars(theirs)
        return RewardSum(*map(given.get, ("_in_keys", "_out_keys", "_reset_keys")), reward_spec=theirs.reward_spec)
    if list(theirs.reset_keys) != ["_reset"] or theirs.reward_spec:
        raise NotLowered("RewardSum has reset_keys or a reward_spec of its own")
    return RewardSum(list(theirs.in_keys), list(theirs.out_keys))


def _keys(theirs: Any, names: Sequence[str] = ("in_keys", "out_keys")) -> dict[str, Any]:
    """None for those that it would find out from its env, if it has none."""
    keys = {name: getattr(theirs, name) for name in names}
    return {name: None if given is None else list(given) for name, given in keys.items()}


def _all_keys(theirs: Any) -> dict[str, Any]:
    return _keys(theirs, ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"))


def _with_tensors(transform: TensorTransform, theirs: Any) -> Transform:
    """One that reads the very tensors of theirs, also after they were changed or exchanged."""
    tensors = theirs._buffers
    for name in transform.tensors[0]:
        tensor = tensors.get(name)
        if tensor is not None and (tensor.requires_grad or tensor.device.type != "cpu"):
            raise NotLowered(f"{name} of {type(theirs).__name__} has a gradient or is on {tensor.device}")
    transform.tensors = [tensors]
    return transform


def _require_same_inverse(theirs: Any) -> None:
    if list(theirs.in_keys_inv) != list(theirs.out_keys_inv):
        raise NotLowered(f"{type(theirs).__name__} has another key for actions, which its specs do not know")


def _observation_norm(theirs: Any) -> Transform:
    if not theirs.initialized:
        raise NotLowered("ObservationNorm is not initialized")
    return _with_tensors(ObservationNorm(theirs.loc, theirs.scale, **_all_keys(theirs)), theirs)


def _reward_scaling(theirs: Any) -> Transform:
    return _with_tensors(RewardScaling(theirs.loc, theirs.scale, **_keys(theirs)), theirs)


def _clip(theirs: Any) -> Transform:
    _require_same_inverse(theirs)
    return _with_tensors(ClipTransform(**_all_keys(theirs), low=theirs.low, high=theirs.high), theirs)


def _reward_clipping(theirs: Any) -> Transform:
    return _with_tensors(RewardClipping(theirs.clamp_min, theirs.clamp_max, **_keys(theirs)), theirs)


def _sign(theirs: Any) -> Transform:
    _require_same_inverse(theirs)
    return SignTransform(**_all_keys(theirs))


def _unsqueeze(kind: type[UnsqueezeTransform]) -> Callable[[Any], Transform]:
    return lambda theirs: kind(theirs._dim, allow_positive_dim=True, **_all_keys(theirs))


def _flatten(theirs: Any) -> Transform:
    return FlattenObservation(theirs._first_dim, theirs._last_dim, **_keys(theirs), allow_positive_dim=True)


def _permute(theirs: Any) -> Transform:
    if theirs.in_keys_inv:
        raise NotLowered("PermuteTransform of actions")
    return PermuteTransform(theirs.dims, **_keys(theirs))


def _cat_tensors(theirs: Any) -> Transform:
    if theirs.dim >= 0 or theirs.unsqueeze_if_oor:
        raise NotLowered("CatTensors counts its dimension from the front, or adds one")
    (out_key,) = theirs.out_keys
    in_keys = list(theirs.in_keys) if theirs._initialized else theirs._find_in_keys()
    return CatTensors(in_keys, out_key, theirs.dim, del_keys=theirs._del_keys, sort=False)


def _exclude(theirs: Any) -> Transform:
    _require_no_flags(theirs, theirs.excluded_keys)
    return ExcludeTransform(*theirs.excluded_keys, inverse=theirs.inverse)


def _select(theirs: Any) -> Transform:
    if not theirs.keep_done_keys:
        raise NotLowered("SelectTransform leaves flags out")
    return SelectTransform(*theirs.selected_keys, keep_rewards=theirs.keep_reward_keys)


def _rename(theirs: Any) -> Transform:
    _require_no_flags(theirs, [*theirs.in_keys, *theirs.out_keys])
    return RenameTransform(**_all_keys(theirs), create_copy=theirs.create_copy)


def _require_no_flags(theirs: Any, keys: Any) -> None:
    if any(as_key(key) in FLAG_KEYS for key in keys):
        raise NotLowered(f"{type(theirs).__name__} changes which flags there are")


def _action_scaling(theirs: Any) -> Transform:
    if not theirs.in_keys_inv:
        raise NotLowered("ActionScaling has no action")
    keys: dict[str, Any] = {"in_keys_inv": list(theirs.in_keys_inv), "out_keys_inv": list(theirs.out_keys_inv)}
    if theirs.parent is None and not theirs.initialized:
        return ActionScaling(**keys, standard_normal=theirs.standard_normal)
    theirs._ensure_initialized()  # as it does itself before the first step
    own = ActionScaling(**keys, loc=theirs.loc, scale=theirs.scale, standard_normal=theirs.standard_normal)
    return _with_tensors(own, theirs)


def _projection(theirs: Any) -> Transform:
    (action_key,) = theirs.in_keys_inv
    return DiscreteActionProjection(theirs.num_actions_effective, theirs.max_actions, action_key)


def _discretizer(theirs: Any) -> Transform:
    if theirs.out_action_key != theirs.action_key:
        raise NotLowered("ActionDiscretizer has the env's action in the data, too")
    if theirs.sampling == theirs.SamplingStrategy.RANDOM:
        raise NotLowered("ActionDiscretizer draws the same point for all envs")
    several = isinstance(theirs.num_intervals, torch.Tensor) and theirs.num_intervals.numel() > 1
    if several and theirs.parent is not None and theirs.parent.batch_size:
        raise NotLowered("ActionDiscretizer has a num_intervals for each element, which TorchRL has for single envs")
    sampling = ActionDiscretizer.SamplingStrategy(int(theirs.sampling))
    ours = ActionDiscretizer(theirs.num_intervals, theirs.action_key, None, sampling, theirs.categorical)
    intervals = getattr(theirs, "intervals", None)
    if intervals is not None:  # the very tensors, which its user may change
        is_single = isinstance(intervals, torch.Tensor) and intervals.ndim == 1
        ours._given = [intervals] if is_single else list(intervals)
    return ours


def _primer(theirs: Any) -> Transform:
    if theirs.random or theirs.single_default_value or theirs.call_before_env_reset:
        raise NotLowered("TensorDictPrimer draws its values, asks for them, or is there before a reset")
    if theirs._reset_key not in (None, "_reset"):
        raise NotLowered("TensorDictPrimer has a reset_key of its own")
    batch_size = torch.Size(()) if theirs.parent is None else theirs.parent.batch_size
    lead = len(batch_size) if theirs.primers.shape[: len(batch_size)] == batch_size else 0
    primers: dict[Key, Spec] = {}
    values: dict[Key, Any] = {}
    for name, spec in theirs.primers.items(True, True):
        key, value = as_key(name), theirs.default_value[name]
        if callable(value):
            raise NotLowered("TensorDictPrimer calls its default_value")
        if key[0].startswith("_"):
            raise NotLowered(f"TensorDictPrimer has {show(key)}, which is not delivered")
        if spec.shape[:lead] != batch_size[:lead]:
            raise NotLowered(f"the spec of {show(key)} does not begin with the batch size")
        primers[key] = Unbounded(spec.shape[lead:], spec.dtype)
        # Its own tensor where it has one, which its user may change.
        values[key] = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=spec.dtype)
    return TensorDictPrimer(primers, default_value=values, expand_specs=True)


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
    if parent is not None:
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
    "ParallelEnv": _lower_parallel,
    "TransformedEnv": _lower_transformed,
}

_TRANSFORMS: dict[str, Callable[[Any], Transform]] = {
    "StepCounter": _step_counter,
    "RewardSum": _reward_sum,
    "InitTracker": lambda theirs: InitTracker(theirs.init_key),
    "DoubleToFloat": lambda theirs: DoubleToFloat(**_all_keys(theirs)),
    "DTypeCastTransform": lambda theirs: DTypeCastTransform(theirs.dtype_in, theirs.dtype_out, **_all_keys(theirs)),
    "ObservationNorm": _observation_norm,
    "RewardScaling": _reward_scaling,
    "ClipTransform": _clip,
    "RewardClipping": _reward_clipping,
    "SignTransform": _sign,
    "UnsqueezeTransform": _unsqueeze(UnsqueezeTransform),
    "SqueezeTransform": _unsqueeze(SqueezeTransform),
    "FlattenObservation": _flatten,
    "PermuteTransform": _permute,
    "CatTensors": _cat_tensors,
    "ExcludeTransform": _exclude,
    "SelectTransform": _select,
    "RenameTransform": _rename,
    "ActionScaling": _action_scaling,
    "DiscreteActionProjection": _projection,
    "ActionDiscretizer": _discretizer,
    "TensorDictPrimer": _primer,
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
