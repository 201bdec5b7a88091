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

from swath.envs.base import EnvBase
from swath.envs.gym_rows import GymRowEnv
from swath.envs.lowered_gym import rows_of
from swath.envs.lowered_transforms import lower_transforms
from swath.envs.lowering_watch import Watch
from swath.envs.recognising import NotLowered, name_of, require_unchanged
from swath.envs.serial import SerialRowEnv
from swath.envs.torchrl_internals import envs_of, has_buffers
from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.driving import (
    EndOfLifeTransform,
    NoopResetEnv,
    RandomTruncationTransform,
)
from swath.envs.transforms.env import TransformedEnv
from swath.envs.transforms.frames import History, TimeMaxPool
from swath.envs.transforms.images import GrayScale, ToTensorImage
from swath.envs.transforms.normalizing import Normalizing
from swath.envs.transforms.stepper import FLAG_KEYS, TransformedStepper
from swath.keys import Key, as_key, show
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field
from swath.rollout.strip import Strip
from swath.specs import OneHot


def lowered(guest: Any) -> tuple[TransformedEnv, Watch]:
    """An env of ours that steps the guest's own envs, and what was read of it; ``NotLowered`` has the reason."""
    env = lower(guest)
    env = env if isinstance(env, TransformedEnv) else TransformedEnv(env)
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
    try:
        return lowering(guest)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # which theirs may take
        raise NotLowered(str(error)) from error


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
    if unknown := [show(field.key) for field in own.outputs if field.key not in strip.outputs]:
        raise NotLowered(f"its actions would be named differently: {', '.join(unknown)}")
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


def _lower_gym(guest: Any) -> GymRowEnv:
    return rows_of([guest], ())


def _lower_serial(guest: Any) -> EnvBase:
    if guest.is_closed:
        guest.start()
    env = _lower_children(envs_of(guest))
    if _finds_first_rows(guest):
        roots = guest.shared_tensordict_parent.exclude("next").items(True, True)
        leaves = {as_key(key): leaf.numpy() for key, leaf in roots}
        env.first_rows_told = {f.key: leaves[f.key] for f in env.row_layout().carried if f.key in leaves}
    return env


def _finds_first_rows(guest: Any) -> bool:
    """Whether a SerialEnv has, for transforms around it, those envs that are not reset while others are."""
    return has_buffers(guest) and not guest.share_individual_td


def _lower_children(children: list[Any]) -> EnvBase:
    if all(name_of(child) in ("GymEnv", "GymWrapper") for child in children):
        return rows_of(children, (len(children),))
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
    base = rows_of(list(bases), (len(children),))
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
        is_serial = name_of(base) == "SerialEnv"
        if is_serial and not _finds_first_rows(base) and not all(transform.is_by_env for transform in stack):
            raise NotLowered("SerialEnv has use_buffers=False or share_individual_td=True, and statistics of all envs")
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


_ENVS: dict[str | None, Callable[[Any], EnvBase]] = {
    "GymEnv": _lower_gym,
    "GymWrapper": _lower_gym,
    "SerialEnv": _lower_serial,
    "ParallelEnv": _lower_parallel,
    "TransformedEnv": _lower_transformed,
}
