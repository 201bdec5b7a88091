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
from swath.envs.gym_rows import GymRowEnv
from swath.envs.specs import OneHot
from swath.envs.transforms.actions import ActionScaling, DiscreteActionProjection
from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.env import FLAG_KEYS, TransformedEnv, TransformedStepper
from swath.envs.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from swath.envs.transforms.shapes import (
    CatTensors,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
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
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, Key, as_key, show
from swath.rollout.strip import Strip


class NotLowered(Exception):
    """Why an env stays a guest."""


def lowered(guest: Any) -> TransformedEnv:
    """An env of ours that steps the guest's own envs; raises ``NotLowered`` with the reason."""
    env = lower(guest)
    env = env if isinstance(env, TransformedEnv) else TransformedEnv(env)
    _require_own_counts(_transforms_of(env))
    return env


def _transforms_of(env: Any) -> list[Transform]:
    """All of them, from the innermost to the outermost."""
    return [*_transforms_of(env.base_env), *env.transform] if isinstance(env, TransformedEnv) else []


def _require_own_counts(transforms: list[Transform]) -> None:
    """That nobody changes a count or a sum on its way to the data: TorchRL's go on from what they find there."""
    counted: dict[Key, str] = {}
    for transform in transforms:
        for key in transform.touched_keys():
            if key in counted:
                raise NotLowered(f"{type(transform).__name__} changes {show(key)}, with which {counted[key]} goes on")
        if isinstance(transform, StepCounter):
            counted[as_key(transform.step_count_key)] = "StepCounter"
        elif isinstance(transform, RewardSum):
            counted |= {as_key(key): "RewardSum" for key in transform.out_keys}


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
    changes_actions = any(transform.in_keys_inv for transform in _transforms_of(env))
    casts = False
    for field in own.outputs:
        given = strip.outputs[field.key].field
        if given.shape != field.shape:
            raise NotLowered(f"the policy's {show(field.key)} has shape {tuple(given.shape)}, not {tuple(field.shape)}")
        if given.dtype != field.dtype and (changes_actions or not field.dtype.is_floating_point):
            if changes_actions or not isinstance(env.full_action_spec[field.key], OneHot):
                raise NotLowered(f"the policy's {show(field.key)} is {given.dtype}, its spec says {field.dtype}")
            casts = True  # as TorchRL does it, before it looks for the largest entry
    return TransformedStepper(env.pipeline, strip, casts)


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
    "_inv_apply_transform",
    "_post_step_mdp_hooks",
    "_reset_env_preprocess",
    "transform_fake_tensordict",
    "read_action",
    "read_obs",
    "read_reward",
    "read_done",
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
    if guest.wrapper_frame_skip != 1:
        raise NotLowered("it repeats actions (frame_skip)")
    if guest.from_pixels:
        raise NotLowered("it renders pixels")
    if not guest._convert_actions_to_numpy:
        raise NotLowered("its actions stay tensors")
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
    if all(_name(child) in ("GymEnv", "GymWrapper") for child in children):
        return _rows_of(children, (len(children),))
    if not all(_name(child) == "TransformedEnv" for child in children):
        raise NotLowered(f"SerialEnv of {type(children[0]).__name__} is not known")
    # Transforms that treat each env alike do the same to all of them at once.
    for child in children:
        _require_unchanged(child)
    base = _rows_of([child.base_env for child in children], (len(children),))
    stacks = [_lower_transforms(child.transform) for child in children]
    if any(repr(stack) != repr(stacks[0]) for stack in stacks):
        raise NotLowered("its envs differ in their transforms")
    for transform in stacks[0]:
        if not transform.is_by_env:
            raise NotLowered(f"each env of the SerialEnv has its own {type(transform).__name__}")
    joined = [alike[0].side_by_side(alike) for alike in zip(*stacks, strict=True)]
    return _transformed(base, Compose(*joined))


def _lower_transformed(guest: Any) -> EnvBase:
    return _transformed(lower(guest.base_env), _lower_transforms(guest.transform))


def _transformed(base: EnvBase, transforms: Compose) -> TransformedEnv:
    try:
        return TransformedEnv(base, transforms)
    except (KeyError, RuntimeError, TypeError, ValueError) as reason:
        raise NotLowered(str(reason)) from reason


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
    try:
        return Compose(known(transform))
    except (RuntimeError, TypeError, ValueError) as reason:
        raise NotLowered(str(reason)) from reason


def _step_counter(theirs: Any) -> Transform:
    if theirs.truncated_key != "truncated" or not theirs.update_done:
        raise NotLowered("StepCounter does not say truncated and done")
    return StepCounter(theirs.max_steps, step_count_key=theirs.step_count_key)


def _reward_sum(theirs: Any) -> Transform:
    if list(theirs.reset_keys) != ["_reset"] or theirs.reward_spec:
        raise NotLowered("RewardSum has reset_keys or a reward_spec of its own")
    return RewardSum(list(theirs.in_keys), list(theirs.out_keys))


def _keys(theirs: Any) -> dict[str, Any]:
    return {name: list(getattr(theirs, name)) for name in ("in_keys", "out_keys")}


def _all_keys(theirs: Any) -> dict[str, Any]:
    inverse = {name: list(getattr(theirs, name)) for name in ("in_keys_inv", "out_keys_inv")}
    return {**_keys(theirs), **inverse}


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
    theirs._ensure_initialized()  # as it does itself before the first step
    keys = {"in_keys_inv": list(theirs.in_keys_inv), "out_keys_inv": list(theirs.out_keys_inv)}
    own = ActionScaling(**keys, loc=theirs.loc, scale=theirs.scale, standard_normal=theirs.standard_normal)
    return _with_tensors(own, theirs)


def _projection(theirs: Any) -> Transform:
    (action_key,) = theirs.in_keys_inv
    return DiscreteActionProjection(theirs.num_actions_effective, theirs.max_actions, action_key)


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
}
