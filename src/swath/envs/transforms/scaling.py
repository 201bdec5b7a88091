"""Scaling and shifting: ObservationNorm and RewardScaling.

The operations are PyTorch's, as in TorchRL, so that the results are the same to the last bit, also for what is not
finite; each writes into memory that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swath.envs.transforms.base import Apply, Keys
from swath.envs.transforms.own_tensors import OfRewards, Tensors, TensorTransform
from swath.envs.transforms.rows import Rows
from swath.envs.transforms.specs import bounds_through
from swath.specs import Bounded, NestedKey, Spec, Unbounded


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
            low, high = bounds_through(self._apply_transform, spec)
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
        self._who.require_fit(made, self._write)

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


class RewardScaling(OfRewards, _Affine):
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
