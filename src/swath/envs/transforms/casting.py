"""Casts: other dtypes for the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swath.envs.transforms.base import Apply, Keys, Transform
from swath.envs.transforms.rows import Slot
from swath.envs.transforms.specs import Specs
from swath.specs import Spec


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
