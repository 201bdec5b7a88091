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

from swath.envs.base import EnvBase
from swath.envs.gym_rows import GymRowEnv, GymStepper
from swath.envs.gym_spaces import ObservationLeaf
from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.env import FLAG_KEYS, TransformedEnv
from swath.errors import EnvDataError
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, show
from swath.rollout.strip import Strip


class NotLowered(Exception):
    """Why an env stays a guest."""


def lowered(guest: Any) -> tuple[TransformedEnv, Watch]:
    """An env of ours that steps the guest's own envs, and what was read of it; ``NotLowered`` has the reason."""
    env = lower(guest)
    env = env if isinstance(env, TransformedEnv) else TransformedEnv(env)
    base: Any = env.base_env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    return env, Watch(guest, base.gym_envs if isinstance(base, GymRowEnv) else ())


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
        if given.shape != field.shape or given.dtype != field.dtype:
            raise NotLowered(f"the policy's {show(field.key)} is {given.dtype}, its spec says {field.dtype}")
    return env.bind_rows(strip)


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

    def __init__(self, guest: Any, gym_envs: Sequence[gymnasium.Env]) -> None:
        things = {id(part): part for root in _parts(guest) for part in root.modules()}
        self._things = list(things.values())
        self._classes = list(
            dict.fromkeys(
                kind for thing in self._things for kind in type(thing).__mro__ if kind.__module__.startswith("torchrl.")
            )
        )
        self._gym_envs = gym_envs
        self._kept: list[Any] = []
        self._seen = self._look(self._kept)

    def has_changed(self) -> bool:
        return self._look([]) != self._seen

    def _look(self, kept: list[Any]) -> list[Any]:
        # What is compared by its id must be kept, or another object may get the same one.
        seen: list[Any] = [env.step for env in self._gym_envs]
        for thing in self._things:
            for name, value in vars(thing).items():
                if name in _CACHES:
                    continue
                kept.append(value)
                kind = type(value)
                if kind is list or kind is tuple:
                    kept += value
                elif isinstance(value, dict):
                    kept += value.values()
        for owner in self._classes:
            kept += vars(owner).values()
        seen += map(id, kept)
        return seen


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
    if guest.wrapper_frame_skip != 1:
        raise NotLowered("it repeats actions (frame_skip)")
    if guest.from_pixels:
        raise NotLowered("it renders pixels")
    if not guest._convert_actions_to_numpy:
        raise NotLowered("its actions stay tensors")
    if "read_obs" in vars(guest) and guest.read_obs == guest._read_obs_memo:
        raise NotLowered("it remembers how to read its first observation and reward (fast_encoding)")
    if guest._torchrl_native_autoreset_requested:
        raise NotLowered("it resets by itself")
    for what, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not _is_plain(space):
            raise NotLowered(f"its {what} space is {space}")
    if isinstance(env.observation_space, spaces.Dict) and "state" in env.observation_space.spaces:
        raise NotLowered("an observation is called 'state', which TorchRL renames")
    return env


def _is_plain(space: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return all(isinstance(own, spaces.Box) for own in space.spaces.values())
    return isinstance(space, spaces.Box) or (isinstance(space, spaces.Discrete) and space.start == 0)


def _lower_serial(guest: Any) -> EnvBase:
    if guest.is_closed:
        guest.start()
    children = list(guest._envs)
    if all(name_of(child) in ("GymEnv", "GymWrapper") for child in children):
        return _rows_of(children, (len(children),))
    if not all(name_of(child) == "TransformedEnv" for child in children):
        raise NotLowered(f"SerialEnv of {type(children[0]).__name__} is not known")
    # Transforms that treat each env alike do the same to all of them at once.
    for child in children:
        require_unchanged(child)
    base = _rows_of([child.base_env for child in children], (len(children),))
    stacks = [_lower_transforms(child.transform) for child in children]
    for stack in stacks:
        for transform in stack:
            if not transform.is_by_env:
                raise NotLowered(f"each env of the SerialEnv has its own {type(transform).__name__}")
        if repr(stack) != repr(stacks[0]):
            raise NotLowered("its envs differ in their transforms")
    return TransformedEnv(base, stacks[0])


def _lower_transformed(guest: Any) -> EnvBase:
    return TransformedEnv(lower(guest.base_env), _lower_transforms(guest.transform))


# -- transforms --------------------------------------------------------------------------------------------------------


def _lower_transforms(transform: Any) -> Compose:
    if transform is None:
        return Compose()
    require_unchanged(transform)
    if name_of(transform) == "Compose":
        return Compose(*[_lower_transforms(each) for each in transform.transforms])
    known = _TRANSFORMS.get(name_of(transform) or "")
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
}
