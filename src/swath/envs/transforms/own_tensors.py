"""Transforms with tensors of their own, which may be changed while they are in use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from swath.envs.transforms.base import Apply, Transform
from swath.envs.transforms.rows import Slot
from swath.envs.transforms.specs import Specs
from swath.keys import as_key, show
from swath.specs import Spec

Tensors = Mapping[str, torch.Tensor | None]


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

    def require_fit(self, made: torch.Tensor, write: torch.Tensor) -> None:
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


class OfRewards(TensorTransform):
    """Only of rewards: at the start of an episode there is none."""

    def transform_specs(self, specs: Specs) -> None:
        for key in map(as_key, self.in_keys):
            specs.find(key, self)
            if specs.kind_of(key) != "reward":
                raise ValueError(
                    f"{type(self).__name__}: {show(key)} is no reward; ObservationNorm and ClipTransform take any key"
                )
        super().transform_specs(specs)
