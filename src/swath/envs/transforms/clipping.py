"""Bounds and signs: ClipTransform, RewardClipping and SignTransform.

The operations are PyTorch's, as in TorchRL, so that the results are the same to the last bit, also for what is not
finite; each writes into memory that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from swath.envs.transforms.base import Apply, Keys, Transform
from swath.envs.transforms.own_tensors import OfRewards, Tensors, TensorTransform
from swath.envs.transforms.rows import Slot
from swath.specs import Bounded, Spec


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
        self.require_fit(self._clip(tensors, read), write)
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

    _needs_keys = True
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
        self._keep_bounds(low, high, as_float=True)


class RewardClipping(OfRewards, _Clip):
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

    _needs_keys = True

    def _made_spec(self, spec: Spec) -> Spec:
        return Bounded(-1.0, 1.0, spec.shape, spec.dtype, spec.device)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.sign()

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.sign()

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        source, target = read.row, write.row
        return lambda: torch.sign(source, out=target)
