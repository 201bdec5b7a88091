"""What swath reads of TorchRL that TorchRL does not document: all of it is here, and known of TorchRL 0.14.

Everybody else asks this module. Where a name is not there any more, ``NotLowered`` says so, and the env is stepped as
it is, by its own ``step_and_maybe_reset``: slower, and right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from swath.envs.recognising import NotLowered, name_of, require_unchanged

#: Attributes that TorchRL writes by itself when it is asked for specs or is given to a collector.
CACHES = frozenset(
    ("_cache", "_input_spec", "_output_spec", "_cache_in_keys", "_collector", "_is_spec_locked", "_validated", "_seeds")
)
#: What transforms keep of an episode.
MEMORY: dict[str | None, str] = {"CatFrames": "_buffers", "TimeMaxPool": "_buffers"}
#: What is read of a ParallelEnv. Whoever asks one for a name that it does not have starts it.
_OF_PROCESSES = ("_owns_workers", "_use_buffers", "share_individual_td", "is_closed", "num_workers")


def _of(theirs: Any, name: str) -> Any:
    try:
        return getattr(theirs, name)
    except AttributeError:
        raise NotLowered(f"{type(theirs).__name__} of this version of TorchRL has no {name}") from None


# -- envs ------------------------------------------------------------------------------------------------------------


def has_dynamic_specs(env: Any) -> bool:
    """Whether a spec leaves a dimension open."""
    return bool(getattr(env, "_has_dynamic_specs", False))


def give_spec(module: Any, spec: Any) -> None:
    """To an exploration module that was made without one."""
    if module.__dict__.get("_spec", ()) is None:
        module._spec = spec


def gym_env_of(env: Any) -> Any:
    return _of(env, "_env")


def encodes_categorical(env: Any) -> bool:
    """Whether actions of a GymEnv are integers, not one-hot."""
    return _of(env, "_categorical_action_encoding")


def gives_actions_as_numpy(env: Any) -> bool:
    return _of(env, "_convert_actions_to_numpy")


def remembers_reading(env: Any) -> bool:
    """Whether it reads all observations as its first one (``fast_encoding``)."""
    return "read_obs" in vars(env) and env.read_obs == _of(env, "_read_obs_memo")


def resets_by_itself(env: Any) -> bool:
    return _of(env, "_torchrl_native_autoreset_requested")


def envs_of(serial: Any) -> list[Any]:
    """Those of a SerialEnv that was started."""
    return list(_of(serial, "_envs"))


def envs_inside(part: Any) -> list[Any]:
    """Those of a batch of envs, which are no modules of its own; none of anything else."""
    return list(vars(part).get("_envs", ()))


def has_buffers(batch: Any) -> bool:
    return _of(batch, "_use_buffers")


def require_known_processes(parallel: Any) -> None:
    """That a ParallelEnv has what is read of it, before it is asked for anything."""
    dispatcher = getattr(sys.modules[type(parallel).__module__], "_dispatch_caller_parallel", None)
    if not all(name in vars(parallel) for name in _OF_PROCESSES) or not hasattr(dispatcher, "__getattr__"):
        raise NotLowered("the processes of this version of TorchRL are not known")


def owns_processes(parallel: Any) -> bool:
    return _of(parallel, "_owns_workers")


def processes_of(parallel: Any) -> Any:
    return _of(parallel, "_workers")


def gives_other_than_tensors(parallel: Any) -> bool:
    return bool(_of(parallel, "_non_tensor_keys"))


# -- transforms ------------------------------------------------------------------------------------------------------


def given_keys(reward_sum: Any) -> tuple[Any, Any, Any]:
    """in_keys, out_keys and reset_keys of a RewardSum, as it was given them."""
    given = vars(reward_sum)
    return given.get("_in_keys"), given.get("_out_keys"), given.get("_reset_keys")


def tensors_of(transform: Any) -> Any:
    """Its own tensors by name: the very mapping."""
    return _of(transform, "_buffers")


def dim_of(unsqueeze: Any) -> int:
    return _of(unsqueeze, "_dim")


def flattened_dims(flatten: Any) -> tuple[int, int]:
    return _of(flatten, "_first_dim"), _of(flatten, "_last_dim")


def read_keys(cat_tensors: Any) -> list[Any]:
    """The keys that are put together; found from its env, as it does itself before the first step."""
    return list(cat_tensors.in_keys) if _of(cat_tensors, "_initialized") else _of(cat_tensors, "_find_in_keys")()


def deletes_keys(cat_tensors: Any) -> bool:
    return _of(cat_tensors, "_del_keys")


def initialize_scaling(action_scaling: Any) -> None:
    """As it does itself before the first step."""
    _of(action_scaling, "_ensure_initialized")()


def reset_key_of(transform: Any) -> Any:
    return _of(transform, "_reset_key")


def averages_of(vec_norm: Any) -> Any:
    """Of a VecNormV2; made as it makes them with its first data."""
    if _of(vec_norm, "_loc") is None:
        _of(vec_norm, "_maybe_stateful_init")(vec_norm.parent.fake_tensordict().get("next"))
    return vec_norm._loc


def lives_of(end_of_life: Any) -> Callable[[], Any]:
    return _of(end_of_life, "_get_lives")


def value_function_of(transform: Any) -> Callable[[Any], Any]:
    """What it does to a value."""
    return _of(transform, "_apply_transform")


# -- a step of an EnvBase ----------------------------------------------------------------------------------------------

#: The methods of EnvBase that are around ``_step``.
FRAME = (
    "step",
    "step_and_maybe_reset",
    "_step_and_maybe_reset",
    "_step_proc_data",
    "maybe_reset",
    "any_done",
    "step_mdp",
    "_step_mdp",
    "_assert_tensordict_shape",
)


def has_plain_frame(env: Any) -> bool:
    """Whether those methods do no more than they are known for."""
    own = vars(env)
    if own.get("_compiled_step_and_maybe_reset") is not None or own.get("_torchrl_native_autoreset"):
        return False
    return not env.run_type_checks and _of(env, "_simple_done")


def step_of(env_or_transform: Any) -> Callable[..., Any]:
    return _of(env_or_transform, "_step")


def completing_done(env: Any) -> Callable[[Any, Any], Any]:
    return _of(env, "_complete_done")


def completing_data(env: Any) -> Callable[[Any], Any]:
    return _of(env, "_step_proc_data")


def moved_keys(env: Any) -> tuple[frozenset[str], list[str]] | None:
    """Of ``step_mdp``: what the next root does not take from the root, and what it takes from "next"; None: nested."""
    mdp = _of(env, "_step_mdp")
    trees = (mdp.exclude_from_root, mdp.keys_from_next)
    if not mdp.keep_other or any(below is not None for tree in trees for below in tree.values()):
        return None
    return frozenset(mdp.exclude_from_root), list(mdp.keys_from_next)


def has_hooks(env: Any) -> bool:
    """Whether anything is done between a step and a reset, by the env or by one of the transforms around it."""
    while name_of(env) == "TransformedEnv":
        if any(map(_has_hook, flat(env.transform))):
            return True
        env = env.base_env
    return _of(env, "_post_step_mdp_hooks") is not None


def _has_hook(transform: Any) -> bool:
    name = "_post_step_mdp_hooks"
    return _of(type(transform), name) is not _of(_base().Transform, name) or name in vars(transform)


def flat(transform: Any) -> list[Any]:
    """The transforms of a Compose, one after the other."""
    if name_of(transform) != "Compose":
        return [transform]
    require_unchanged(transform)
    return [leaf for each in transform.transforms for leaf in flat(each)]


def inverse_of(transform: Any) -> Callable[[Any], Any] | None:
    """What a transform does to what is given to the env; None: nothing. ``NotLowered``: it might leave steps out."""
    own = _of(type(transform), "_inv_call")
    is_replaced = "_inv_call" in vars(transform)
    if own is _of(_of(_base(), "_CallableTransform"), "_inv_call") and not is_replaced:
        return None
    if own is not _of(_base().Transform, "_inv_call") or is_replaced:
        raise NotLowered(f"{type(transform).__name__} has an inverse of its own")
    return transform._inv_call if transform.in_keys_inv else None


def has_plain_inverse(transform: Any) -> bool:
    """Whether the whole of a TransformedEnv's transforms is inverted one by one."""
    return type(transform).inv is _base().Transform.inv and "inv" not in vars(transform)


def _base() -> Any:
    return sys.modules["torchrl.envs.transforms._base"]
