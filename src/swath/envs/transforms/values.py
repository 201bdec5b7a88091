"""Other values for the same entries: casts, scaling, normalising, clipping, signs.

The operations are PyTorch's, as in TorchRL, so that the results are the same to the last bit, also for what is not
finite; each writes into memory that is there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.transforms.base import Apply, Rows, Slot, Specs, Transform, key_list
from swath.keys import as_key, show
from swath.specs import Bounded, NestedKey, Spec, Unbounded

Tensors = Mapping[str, torch.Tensor | None]
Keys = Sequence[NestedKey] | NestedKey | None


def bounds_of(spec: Bounded) -> tuple[torch.Tensor, torch.Tensor]:
    """Both bounds as tensors of the spec's shape and dtype."""
    low, high = (torch.from_numpy(np.array(bound)).to(spec.dtype) for bound in (spec.low, spec.high))
    return low.expand(spec.shape), high.expand(spec.shape)


# -- casts -------------------------------------------------------------------------------------------------------------


class DTypeCastTransform(Transform):
    """Casts from ``dtype_in``, which the env gives and takes, to ``dtype_out``, which everybody else sees.

    Without ``in_keys``, all observations and rewards of that dtype are cast; without both, actions as well.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), DTypeCastTransform(torch.float32, torch.float64))
    >>> env.rollout(2)["observation"].dtype
    torch.float64
    """

    _shown = ("dtype_in", "dtype_out")

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        for dtype in (dtype_in, dtype_out):
            if not isinstance(dtype, torch.dtype) or dtype is torch.bfloat16:
                raise TypeError(f"{type(self).__name__}: {dtype!r} is not a dtype that rows can have")
        if in_keys is None and out_keys is not None:
            raise ValueError(f"{type(self).__name__}: out_keys={out_keys} of which in_keys? Give them as well")
        if in_keys_inv is None and out_keys_inv is not None:
            raise ValueError(f"{type(self).__name__}: out_keys_inv={out_keys_inv} of which in_keys_inv?")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dtype_in = dtype_in
        self.dtype_out = dtype_out
        self._finds_keys = in_keys is None
        self._finds_keys_inv = in_keys is None and in_keys_inv is None

    def transform_specs(self, specs: Specs) -> None:
        if self._finds_keys:
            given = [*specs.observation.items(True, True), *specs.reward.items(True, True)]
            self.in_keys = [key for key, spec in given if spec.dtype == self.dtype_in]
            self.out_keys = list(self.in_keys)
        if self._finds_keys_inv:
            taken = specs.action.items(True, True)
            self.in_keys_inv = [key for key, spec in taken if spec.dtype == self.dtype_in]
            self.out_keys_inv = list(self.in_keys_inv)
        super().transform_specs(specs)

    def _made_spec(self, spec: Spec) -> Spec:
        if spec.dtype != self.dtype_in:
            raise TypeError(f"{self}: the env has {spec.dtype} there, not {self.dtype_in}")
        made = spec.clone()
        made.dtype = self.dtype_out
        return made

    _made_action_spec = _made_spec

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype_out)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype_in)

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        if write.tensor.dtype not in (torch.float32, torch.float64) or read.tensor.is_complex():
            source, copy_to = read.row, write.row.copy_
            return lambda: copy_to(source)
        # NumPy rounds to these as PyTorch does, in a third of the time; to integers, what is not finite differs.
        array, target = read.array, write.array

        def cast() -> None:
            target[...] = array

        return cast


class DoubleToFloat(DTypeCastTransform):
    """Casts what the env gives as float64 to float32, and actions that it takes as float64 from float32.

    Without ``in_keys``, all that is float64.

    >>> import gymnasium
    >>> from swath.envs import GymWrapper, TransformedEnv
    >>> base = gymnasium.wrappers.DtypeObservation(gymnasium.make("CartPole-v1"), "float64")
    >>> TransformedEnv(GymWrapper(base), DoubleToFloat()).rollout(2)["observation"].dtype
    torch.float32
    """

    _shown = ()

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)


# -- with tensors of their own -----------------------------------------------------------------------------------------


class TensorTransform(Transform):
    """A transform with tensors of its own, by name, which may be changed while it is in use.

    There is one mapping for all envs; or one for each, where each env had a transform of its own.
    """

    tensors: list[Tensors]

    def _keep(self, **tensors: torch.Tensor | None) -> None:
        self.tensors = [{name: None if tensor is None else tensor.detach() for name, tensor in tensors.items()}]

    def tensor(self, name: str) -> torch.Tensor:
        found = self.tensors[0][name]
        if found is None:
            raise RuntimeError(f"{self}: {name} is not known yet")
        return found

    def side_by_side(self, others: Sequence[Transform]) -> Transform:
        joined = copy.copy(self)
        joined.tensors = [other.tensors[0] for other in others if isinstance(other, TensorTransform)]
        return joined

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        is_inverse = apply == self._inv_apply_transform
        if len(self.tensors) == 1:
            parts = [(self.tensors[0], read.row, write.row)]
        else:
            parts = list(zip(self.tensors, read.tensor, write.tensor, strict=True))
        functions = [self._part(tensors, source, target, is_inverse) for tensors, source, target in parts]
        if len(functions) == 1:
            return functions[0]

        def run() -> None:
            for function in functions:
                function()

        return run

    def _part(self, tensors: Tensors, read: torch.Tensor, write: torch.Tensor, is_inverse: bool) -> Callable[[], Any]:
        raise NotImplementedError

    def _require_fit(self, made: torch.Tensor, write: torch.Tensor) -> None:
        """That what comes out is what the rows were made for."""
        if made.shape != write.shape or made.dtype != write.dtype:
            raise ValueError(
                f"{self}: the result has shape {tuple(made.shape)} and dtype {made.dtype}, the rows have "
                f"{tuple(write.shape)} and {write.dtype}; give tensors that keep both"
            )

    def _require_same_shape(self, spec: Spec) -> None:
        """That the tensors fit values of this shape, and leave it as it is."""
        for name, tensor in self.tensors[0].items():
            try:
                fits = tensor is None or torch.broadcast_shapes(tensor.shape, spec.shape) == spec.shape
            except RuntimeError:
                fits = False
            if tensor is not None and not fits:
                raise ValueError(f"{self}: {name} has shape {tuple(tensor.shape)}, the values {tuple(spec.shape)}")

    def state_dict(self) -> dict[str, Any]:
        return {name: None if tensor is None else tensor.clone() for name, tensor in self.tensors[0].items()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        own = self.tensors[0]
        if set(state_dict) != set(own):
            if strict:
                raise ValueError(f"{self}: a state has {sorted(own)}, this one {sorted(state_dict)}")
            return
        for name, tensor in state_dict.items():
            here = own[name]
            if here is not None and tensor is not None and here.shape == tensor.shape and here.dtype == tensor.dtype:
                here.copy_(tensor)
            else:
                own[name] = None if tensor is None else tensor.clone()  # type: ignore[index]


class _Affine(TensorTransform):
    """``value * scale + loc``; with ``standard_normal``, ``(value - loc) / scale``. The inverse is the other one."""

    loc = property(lambda self: self.tensors[0]["loc"])
    scale = property(lambda self: self.tensors[0]["scale"])
    standard_normal = property(lambda self: self.tensors[0]["standard_normal"])

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return _affine(value, self.tensor("loc"), self.tensor("scale"), bool(self.tensor("standard_normal")))

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return _affine(value, self.tensor("loc"), self.tensor("scale"), not self.tensor("standard_normal"))

    def _part(self, tensors: Tensors, read: torch.Tensor, write: torch.Tensor, is_inverse: bool) -> Callable[[], Any]:
        return _AffinePart(self, tensors, read, write, is_inverse)

    def _made_spec(self, spec: Spec) -> Spec:
        self._require_same_shape(spec)
        made = self._apply_transform(spec.zero())
        if isinstance(spec, Bounded):
            ends = [self._apply_transform(bound) for bound in bounds_of(spec)]
            low, high = torch.minimum(*ends).numpy(), torch.maximum(*ends).numpy()
            return Bounded(low, high, made.shape, made.dtype, spec.device)
        return Unbounded(made.shape, made.dtype, spec.device)

    _made_action_spec = _made_spec


def _affine(value: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor, standardises: bool) -> torch.Tensor:
    return (value - loc) / scale if standardises else value * scale + loc


class _AffinePart:
    """The same without allocating; the tensors are looked up again when they were exchanged."""

    def __init__(
        self, who: _Affine, tensors: Tensors, read: torch.Tensor, write: torch.Tensor, is_inverse: bool
    ) -> None:
        self._who = who
        self._tensors = tensors
        self._read = read
        self._write = write
        self._is_inverse = is_inverse
        self._find()

    def _find(self) -> None:
        found = [self._tensors.get(name) for name in ("loc", "scale", "standard_normal")]
        if any(tensor is None for tensor in found):
            raise RuntimeError(f"{self._who}: loc and scale were taken away")
        self._loc, self._scale, self._standard_tensor = found
        assert self._loc is not None
        assert self._scale is not None
        assert self._standard_tensor is not None
        #: The same memory: whether it is set can change.
        self._standard = self._standard_tensor.numpy()
        made = _affine(self._read, self._loc, self._scale, bool(self._standard) != self._is_inverse)
        self._who._require_fit(made, self._write)

    def __call__(self) -> None:
        tensors = self._tensors
        if (
            tensors.get("loc") is not self._loc
            or tensors.get("scale") is not self._scale
            or tensors.get("standard_normal") is not self._standard_tensor
        ):
            self._find()
        write = self._write
        if bool(self._standard) != self._is_inverse:
            torch.sub(self._read, self._loc, out=write)  # type: ignore[arg-type]
            torch.div(write, self._scale, out=write)  # type: ignore[arg-type]
        else:
            torch.mul(self._read, self._scale, out=write)  # type: ignore[arg-type]
            torch.add(write, self._loc, out=write)  # type: ignore[arg-type]


class ObservationNorm(_Affine):
    """``observation * scale + loc``; with ``standard_normal``, ``(observation - loc) / scale``.

    Where ``loc`` and ``scale`` are not given, ``init_stats`` finds them from random steps:

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), ObservationNorm(in_keys=["observation"], standard_normal=True))
    >>> env.transform[0].init_stats(100)
    >>> env.transform[0].loc.shape
    torch.Size([4])
    """

    def __init__(
        self,
        loc: float | torch.Tensor | None = None,
        scale: float | torch.Tensor | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool | torch.Tensor = False,
        eps: float | None = None,
    ) -> None:
        if in_keys is None:
            raise ValueError("ObservationNorm: in_keys says which observations are normalised; give them")
        if (loc is None) != (scale is None):
            raise ValueError("ObservationNorm: loc and scale are given together, or found together by init_stats")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if eps is None:
            eps = 1e-6
            if isinstance(scale, torch.Tensor) and scale.dtype.is_floating_point:
                eps = torch.finfo(scale.dtype).eps
        self.eps = eps
        if loc is not None and not isinstance(loc, torch.Tensor):
            loc = torch.tensor(loc, dtype=torch.get_default_dtype())
        if scale is not None and not isinstance(scale, torch.Tensor):
            scale = torch.tensor(scale, dtype=torch.get_default_dtype()).clamp_min(eps)
        self._keep(loc=loc, scale=scale, standard_normal=torch.as_tensor(standard_normal))

    @property
    def initialized(self) -> bool:
        return self.loc is not None

    def _made_spec(self, spec: Spec) -> Spec:
        return super()._made_spec(spec) if self.initialized else spec.clone()

    _made_action_spec = _made_spec

    def _bound(self, rows: Rows, read_key: NestedKey, write_key: NestedKey, apply: Apply) -> Callable[[], Any]:
        if not self.initialized:
            raise RuntimeError(f"{self}: loc and scale are not known; give them, or call init_stats before")
        return super()._bound(rows, read_key, write_key, apply)

    def init_stats(
        self,
        num_iter: int,
        reduce_dim: int | tuple[int, ...] = 0,
        cat_dim: int | None = None,
        key: NestedKey | None = None,
        keep_dims: Sequence[int] | None = None,
    ) -> None:
        """Find ``loc`` and ``scale`` from the first ``num_iter`` steps of random episodes.

        They are the mean and the deviation over ``reduce_dim`` of the rollouts ``[*batch_size, steps, *shape]``, which
        are put together along ``cat_dim``; ``keep_dims`` stay, of size one.
        """
        reduced = [reduce_dim] if isinstance(reduce_dim, int) else list(reduce_dim)
        if cat_dim is None:
            if not isinstance(reduce_dim, int):
                raise ValueError(f"ObservationNorm.init_stats: with reduce_dim={reduce_dim}, give cat_dim as well")
            cat_dim = reduce_dim
        if cat_dim not in reduced:
            raise ValueError(f"ObservationNorm.init_stats: cat_dim={cat_dim} must be in reduce_dim={reduce_dim}")
        if self.initialized:
            raise RuntimeError(f"ObservationNorm.init_stats: loc={self.loc} and scale={self.scale} are known already")
        if key is None:
            if len(self.in_keys) > 1:
                raise ValueError(f"ObservationNorm.init_stats: of which of {self.in_keys}? Give key")
            key = self.in_keys[0]
        parent = self.parent
        if parent is None:
            raise RuntimeError("ObservationNorm.init_stats: it belongs to no env yet; put it into a TransformedEnv")
        for before in parent.transform:
            if isinstance(before, ObservationNorm) and not before.initialized:
                raise RuntimeError(f"ObservationNorm.init_stats: first that of {before}, which stands before this one")
        parts, num_frames = [], 0
        while num_frames < num_iter:
            rollout = parent.rollout(max_steps=num_iter)
            num_frames += rollout.numel()
            parts.append(rollout.get(key))
        self._set_stats(torch.cat(parts, cat_dim), reduced, list(keep_dims or ()))
        try:
            self.container.refresh()
        except Exception:
            self._keep(loc=None, scale=None, standard_normal=self.standard_normal)
            self.container.refresh()
            raise

    def _set_stats(self, data: torch.Tensor, reduced: list[int], kept: list[int]) -> None:
        dims = sorted(dim if dim < 0 else dim - data.ndim for dim in reduced)
        kept = [dim if dim < 0 else dim - data.ndim for dim in kept]
        if not set(kept) <= set(dims):
            raise ValueError("ObservationNorm.init_stats: keep_dims must be some of reduce_dim")
        loc, scale = data.mean(dims, keepdim=True), data.std(dims, keepdim=True)
        for dim in dims:
            if dim not in kept:
                loc, scale = loc.squeeze(dim), scale.squeeze(dim)
        if not self.standard_normal:
            scale = 1 / scale.clamp_min(self.eps)
            loc = -loc * scale
        for name, found in (("loc", loc), ("scale", scale)):
            if not torch.isfinite(found).all():
                raise RuntimeError(f"ObservationNorm.init_stats: {name} would be {found}, which is not finite")
        self._keep(loc=loc, scale=scale.clamp_min(self.eps), standard_normal=self.standard_normal)


class _OfRewards(TensorTransform):
    """Only of rewards: at the start of an episode there is none."""

    def transform_specs(self, specs: Specs) -> None:
        for key in map(as_key, self.in_keys):
            specs.find(key, self)
            if specs.kind_of(key) != "reward":
                raise ValueError(
                    f"{type(self).__name__}: {show(key)} is no reward; ObservationNorm and ClipTransform take any key"
                )
        super().transform_specs(specs)


class RewardScaling(_OfRewards, _Affine):
    """``reward * scale + loc``; with ``standard_normal``, ``(reward - loc) / scale``.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardScaling(loc=1.0, scale=10.0))
    >>> env.rollout(2)["next", "reward"].squeeze(-1)
    tensor([11., 11.])
    """

    def __init__(
        self,
        loc: float | torch.Tensor,
        scale: float | torch.Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        standard_normal: bool | torch.Tensor = False,
    ) -> None:
        super().__init__("reward" if in_keys is None else in_keys, out_keys)
        loc, scale = (each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in (loc, scale))
        self._keep(loc=loc, scale=scale.clamp_min(1e-6), standard_normal=torch.as_tensor(standard_normal))


# -- bounds ------------------------------------------------------------------------------------------------------------


class _Clip(TensorTransform):
    """Between two tensors of one entry each; either may be None. ``_bounds`` are their names."""

    _bounds: tuple[str, str]

    def _clip(self, tensors: Tensors, value: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        low, high = (tensors.get(name) for name in self._bounds)
        if low is None:
            return torch.clamp_max(value, high, out=out)  # type: ignore[arg-type]
        if high is None:
            return torch.clamp_min(value, low, out=out)  # type: ignore[arg-type]
        return torch.clamp(value, low, high, out=out)  # type: ignore[arg-type]

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._clip(self.tensors[0], value)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._clip(self.tensors[0], value)

    def _part(self, tensors: Tensors, read: torch.Tensor, write: torch.Tensor, is_inverse: bool) -> Callable[[], Any]:
        self._require_fit(self._clip(tensors, read), write)
        clip = self._clip
        return lambda: clip(tensors, read, write)

    def _made_spec(self, spec: Spec) -> Spec:
        made = self._apply_transform(spec.zero())
        low, high = (self.tensors[0][name] for name in self._bounds)
        ends = (-math.inf if low is None else low.item(), math.inf if high is None else high.item())
        return Bounded(*ends, made.shape, made.dtype, spec.device)

    def _keep_bounds(self, low: Any, high: Any, as_float: bool) -> None:
        who, found = type(self).__name__, {}
        if low is None and high is None:
            raise ValueError(f"{who}: give {self._bounds[0]}, {self._bounds[1]}, or both")
        for name, bound in zip(self._bounds, (low, high), strict=True):
            bound = None if bound is None else torch.as_tensor(bound)
            if bound is not None and bound.numel() != 1:
                raise ValueError(f"{who}: {name} must be a number, got {bound.numel()} of them")
            found[name] = bound.float() if as_float and bound is not None and not bound.is_floating_point() else bound
        low, high = found.values()
        if low is not None and high is not None and low >= high:
            raise ValueError(f"{who}: {self._bounds[0]}={low.item()} must be below {self._bounds[1]}={high.item()}")
        self._keep(**found)


class ClipTransform(_Clip):
    """Clips what the env gives (``in_keys``) or is given (``in_keys_inv``) to ``low`` and ``high``.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), ClipTransform(in_keys=["observation"], low=-0.01, high=0.01))
    >>> bool((env.rollout(5)["observation"].abs() <= 0.01).all())
    True
    """

    _bounds = ("low", "high")
    low = property(lambda self: self.tensors[0]["low"])
    high = property(lambda self: self.tensors[0]["high"])

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        low: float | torch.Tensor | None = None,
        high: float | torch.Tensor | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        require_keys(self)
        self._keep_bounds(low, high, as_float=True)


class RewardClipping(_OfRewards, _Clip):
    """Clips rewards to ``clamp_min`` and ``clamp_max``.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> TransformedEnv(GymEnv("CartPole-v1"), RewardClipping(-0.5, 0.5)).rollout(2)["next", "reward"].squeeze(-1)
    tensor([0.5000, 0.5000])
    """

    _bounds = ("clamp_min", "clamp_max")
    clamp_min = property(lambda self: self.tensors[0]["clamp_min"])
    clamp_max = property(lambda self: self.tensors[0]["clamp_max"])

    def __init__(
        self,
        clamp_min: float | torch.Tensor | None = None,
        clamp_max: float | torch.Tensor | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
    ) -> None:
        super().__init__("reward" if in_keys is None else in_keys, out_keys)
        self._keep_bounds(clamp_min, clamp_max, as_float=False)


class SignTransform(Transform):
    """The sign of each entry: -1, 0 or 1.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), SignTransform(in_keys=["observation"]))
    >>> bool((env.rollout(5)["observation"].abs() == 1).all())
    True
    """

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        require_keys(self)

    def _made_spec(self, spec: Spec) -> Spec:
        return Bounded(-1.0, 1.0, spec.shape, spec.dtype, spec.device)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.sign()

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.sign()

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        source, target = read.row, write.row
        return lambda: torch.sign(source, out=target)


def require_keys(transform: Transform) -> None:
    """That it has any: else it would do nothing, in silence."""
    if not key_list(transform.in_keys) and not key_list(transform.in_keys_inv):
        raise ValueError(f"{type(transform).__name__}: give in_keys or in_keys_inv")
