"""The memory of a program: like that of the recorded call, and nobody else's.

The policy may have kept what it was given, or what it computed: a program must not write there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from swath.rollout.capture.recording import Node
from swath.rollout.torch_internals import storage_of


class OwnMemory:
    """Tensors that share memory with each other as the recorded ones do; ``own(tree)`` puts them in their place."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        #: Kept, so that no other tensor gets the identity of one of these.
        self._recorded: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Give a recorded tensor, and all that share its memory, a place."""
        if storage_of(tensor) not in self._storages:
            self._storages[storage_of(tensor)] = tensor.untyped_storage().clone()
        self._place(tensor)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        own = self._tensors.get(id(tensor))
        if own is None:
            own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            own.set_(self._storages[storage_of(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride())
            self._tensors[id(tensor)] = own
            self._recorded.append(tensor)
        return own

    def __call__(self, tree: Any) -> Any:
        return tree_map(self._now, tree)

    def _now(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or storage_of(value) not in self._storages:
            return value
        return self._place(value)

    def moved(self, node: Node) -> Node:
        return replace(node, args=self(node.args), kwargs=self(node.kwargs), result=self(node.result))
