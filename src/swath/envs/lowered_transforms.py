"""TorchRL's transforms as ours, with the very tensors and statistics of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swath.envs import torchrl_internals as internals
from swath.envs import transforms as own
from swath.envs.recognising import NotLowered, name_of, require_unchanged
from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose
from swath.envs.transforms.own_tensors import TensorTransform
from swath.envs.transforms.stepper import FLAG_KEYS
from swath.keys import Key, as_key, show
from swath.specs import Spec, Unbounded


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
    return own.StepCounter(theirs.max_steps, step_count_key=theirs.step_count_key)


def _reward_sum(theirs: Any) -> Transform:
    if theirs.parent is None:  # what it was given; it would ask that env for the rest, as ours does
        return own.RewardSum(*internals.given_keys(theirs), reward_spec=theirs.reward_spec)
    if list(theirs.reset_keys) != ["_reset"] or theirs.reward_spec:
        raise NotLowered("RewardSum has reset_keys or a reward_spec of its own")
    return own.RewardSum(list(theirs.in_keys), list(theirs.out_keys))


def _keys(theirs: Any, names: Sequence[str] = ("in_keys", "out_keys")) -> dict[str, Any]:
    """None for those that it would find out from its env, if it has none."""
    keys = {name: getattr(theirs, name) for name in names}
    return {name: None if given is None else list(given) for name, given in keys.items()}


def _given(theirs: Any, *names: str) -> dict[str, Any]:
    """What theirs was made with, for ours, whose arguments have the same names."""
    return {name: getattr(theirs, name) for name in names}


def _all_keys(theirs: Any) -> dict[str, Any]:
    return _keys(theirs, ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"))


def _with_tensors(transform: TensorTransform, theirs: Any) -> Transform:
    """One that reads the very tensors of theirs, also after they were changed or exchanged."""
    tensors = internals.tensors_of(theirs)
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
    return _with_tensors(own.ObservationNorm(theirs.loc, theirs.scale, **_all_keys(theirs)), theirs)


def _reward_scaling(theirs: Any) -> Transform:
    return _with_tensors(own.RewardScaling(theirs.loc, theirs.scale, **_keys(theirs)), theirs)


def _clip(theirs: Any) -> Transform:
    _require_same_inverse(theirs)
    return _with_tensors(own.ClipTransform(**_all_keys(theirs), low=theirs.low, high=theirs.high), theirs)


def _reward_clipping(theirs: Any) -> Transform:
    return _with_tensors(own.RewardClipping(theirs.clamp_min, theirs.clamp_max, **_keys(theirs)), theirs)


def _sign(theirs: Any) -> Transform:
    _require_same_inverse(theirs)
    return own.SignTransform(**_all_keys(theirs))


def _unsqueeze(kind: type[own.UnsqueezeTransform]) -> Callable[[Any], Transform]:
    return lambda theirs: kind(internals.dim_of(theirs), allow_positive_dim=True, **_all_keys(theirs))


def _flatten(theirs: Any) -> Transform:
    return own.FlattenObservation(*internals.flattened_dims(theirs), **_keys(theirs), allow_positive_dim=True)


def _permute(theirs: Any) -> Transform:
    if theirs.in_keys_inv:
        raise NotLowered("PermuteTransform of actions")
    return own.PermuteTransform(theirs.dims, **_keys(theirs))


def _cat_tensors(theirs: Any) -> Transform:
    if theirs.dim >= 0 or theirs.unsqueeze_if_oor:
        raise NotLowered("CatTensors counts its dimension from the front, or adds one")
    (out_key,) = theirs.out_keys
    keys, deletes = internals.read_keys(theirs), internals.deletes_keys(theirs)
    return own.CatTensors(keys, out_key, theirs.dim, del_keys=deletes, sort=False)


def _exclude(theirs: Any) -> Transform:
    _require_no_flags(theirs, theirs.excluded_keys)
    return own.ExcludeTransform(*theirs.excluded_keys, inverse=theirs.inverse)


def _select(theirs: Any) -> Transform:
    if not theirs.keep_done_keys:
        raise NotLowered("SelectTransform leaves flags out")
    return own.SelectTransform(*theirs.selected_keys, keep_rewards=theirs.keep_reward_keys)


def _rename(theirs: Any) -> Transform:
    _require_no_flags(theirs, [*theirs.in_keys, *theirs.out_keys])
    return own.RenameTransform(**_all_keys(theirs), create_copy=theirs.create_copy)


def _require_no_flags(theirs: Any, keys: Any) -> None:
    if any(as_key(key) in FLAG_KEYS for key in keys):
        raise NotLowered(f"{type(theirs).__name__} changes which flags there are")


def _action_scaling(theirs: Any) -> Transform:
    if not theirs.in_keys_inv:
        raise NotLowered("ActionScaling has no action")
    keys: dict[str, Any] = {"in_keys_inv": list(theirs.in_keys_inv), "out_keys_inv": list(theirs.out_keys_inv)}
    if theirs.parent is None and not theirs.initialized:
        return own.ActionScaling(**keys, standard_normal=theirs.standard_normal)
    internals.initialize_scaling(theirs)
    ours = own.ActionScaling(**keys, loc=theirs.loc, scale=theirs.scale, standard_normal=theirs.standard_normal)
    return _with_tensors(ours, theirs)


def _projection(theirs: Any) -> Transform:
    (action_key,) = theirs.in_keys_inv
    ours = own.DiscreteActionProjection(theirs.num_actions_effective, theirs.max_actions, action_key)
    ours.truncates = True
    return ours


def _discretizer(theirs: Any) -> Transform:
    if theirs.out_action_key != theirs.action_key:
        raise NotLowered("ActionDiscretizer has the env's action in the data, too")
    if theirs.sampling == theirs.SamplingStrategy.RANDOM:
        raise NotLowered("ActionDiscretizer draws the same point for all envs")
    several = isinstance(theirs.num_intervals, torch.Tensor) and theirs.num_intervals.numel() > 1
    if several and theirs.parent is not None and theirs.parent.batch_size:
        raise NotLowered("ActionDiscretizer has a num_intervals for each element, which TorchRL has for single envs")
    sampling = own.ActionDiscretizer.SamplingStrategy(int(theirs.sampling))
    ours = own.ActionDiscretizer(theirs.num_intervals, theirs.action_key, None, sampling, theirs.categorical)
    intervals = getattr(theirs, "intervals", None)
    if intervals is not None:  # the very tensors, which its user may change
        is_single = isinstance(intervals, torch.Tensor) and intervals.ndim == 1
        ours.given_intervals = [intervals] if is_single else list(intervals)
    return ours


def _primer(theirs: Any) -> Transform:
    if theirs.random or theirs.single_default_value or theirs.call_before_env_reset:
        raise NotLowered("TensorDictPrimer draws its values, asks for them, or is there before a reset")
    if internals.reset_key_of(theirs) not in (None, "_reset"):
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
    return own.TensorDictPrimer(primers, default_value=values, expand_specs=True)


def _vec_norm(theirs: Any) -> Transform:
    if theirs.shapes is not None and any(len(tuple(shape)) == 0 for shape in theirs.shapes):
        raise NotLowered("VecNorm has a shape without a dimension")
    ours = own.VecNorm(theirs.in_keys, theirs.out_keys, decay=theirs.decay, eps=theirs.eps, shapes=theirs.shapes)
    ours.source = theirs
    return ours


def _vec_norm_v2(theirs: Any) -> Transform:
    if not theirs.stateful:
        raise NotLowered("VecNormV2 has its statistics in the data")
    dtypes = {leaf.dtype for leaf in internals.averages_of(theirs).values(True, True)}
    if theirs.decay == 1 and dtypes != {torch.get_default_dtype()}:
        raise NotLowered(f"VecNormV2 with decay=1 averages {dtypes}")
    ours = own.VecNormV2(theirs.in_keys, theirs.out_keys, **_given(theirs, "decay", "eps", "reduce_batch_dims"))
    ours.source = theirs
    return ours


def _cat_frames(theirs: Any) -> Transform:
    names = (
        "N",
        "dim",
        "in_keys",
        "out_keys",
        "padding",
        "padding_value",
        "as_inverse",
        "done_key",
        "future",
        "mask_key",
    )
    ours = own.CatFrames(**_given(theirs, *names), reset_key=internals.reset_key_of(theirs))
    ours.owners = [theirs]
    return ours


def _time_max_pool(theirs: Any) -> Transform:
    ours = own.TimeMaxPool(theirs.in_keys, theirs.out_keys, theirs.buffer_size, internals.reset_key_of(theirs))
    ours.owners = [theirs]
    return ours


def _to_tensor_image(theirs: Any) -> Transform:
    names = ("from_int", "unsqueeze", "dtype", "in_keys", "out_keys", "shape_tolerant")
    return own.ToTensorImage(**_given(theirs, *names))


def _noop_reset(theirs: Any) -> Transform:
    ours = own.NoopResetEnv(theirs.noops, theirs.random)
    parent = theirs.parent
    if parent is not None:
        ours.draw = lambda: parent.rand_action()
    return ours


def _random_truncation(theirs: Any) -> Transform:
    names = ("min_horizon", "max_horizon", "prob", "first_episode_prob", "step_count_key", "truncated_key", "done_key")
    ours = own.RandomTruncationTransform(**_given(theirs, *names))
    ours.source = theirs
    return ours


def _end_of_life(theirs: Any) -> Transform:
    ours = own.EndOfLifeTransform(theirs.eol_key, theirs.lives_key, theirs.done_key, ".".join(theirs.eol_attribute))
    ours.ask_lives = internals.lives_of(theirs)
    return ours


class _AsTheirs(Transform):
    """What TorchRL's does to a value, by calling it: torchvision does the work."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs.in_keys, theirs.out_keys)
        self._theirs = theirs
        self._function = internals.value_function_of(theirs)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._function(value)

    def __repr__(self) -> str:
        return f"{self._theirs!r} from {self.in_keys} to {self.out_keys}"


class Resize(_AsTheirs):
    """TorchRL's, under its name."""


class CenterCrop(_AsTheirs):
    """TorchRL's, under its name."""


_TRANSFORMS: dict[str, Callable[[Any], Transform]] = {
    "StepCounter": _step_counter,
    "RewardSum": _reward_sum,
    "InitTracker": lambda theirs: own.InitTracker(theirs.init_key),
    "DoubleToFloat": lambda theirs: own.DoubleToFloat(**_all_keys(theirs)),
    "DTypeCastTransform": lambda theirs: own.DTypeCastTransform(theirs.dtype_in, theirs.dtype_out, **_all_keys(theirs)),
    "ObservationNorm": _observation_norm,
    "RewardScaling": _reward_scaling,
    "ClipTransform": _clip,
    "RewardClipping": _reward_clipping,
    "SignTransform": _sign,
    "UnsqueezeTransform": _unsqueeze(own.UnsqueezeTransform),
    "SqueezeTransform": _unsqueeze(own.SqueezeTransform),
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
    "GrayScale": lambda theirs: own.GrayScale(theirs.in_keys, theirs.out_keys),
    "NoopResetEnv": _noop_reset,
    "RandomTruncationTransform": _random_truncation,
    "EndOfLifeTransform": _end_of_life,
    "FrameSkipTransform": lambda theirs: own.FrameSkipTransform(theirs.frame_skip),
    "Resize": Resize,
    "CenterCrop": CenterCrop,
}
