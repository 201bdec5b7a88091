"""Recycling: large memory is used again once nobody looks at what is in it; new pages cost more than what is copied."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch

from swath.keys import Key
from swath.rollout.layout import Field

#: Smaller memory is not worth it: the allocator has it at hand.
MIN_BYTES = 256 * 2**10
#: The one that the consumer still has, and the one that is written meanwhile.
_MOST_KEPT = 2
_ALIGNMENT = 64


class RecycledMemory:
    """Memory for the leaves of one batch after another.

    What was given out is its consumer's for as long as any tensor or array on it lives.
    """

    def __init__(self) -> None:
        #: Of each leaf: memory, and a reference that dies with the last look at it.
        self._kept: dict[Key, list[tuple[np.ndarray, weakref.ref[np.ndarray]]]] = {}

    def empty(self, size: tuple[int, ...], field: Field) -> torch.Tensor:
        """As ``torch.empty``, for a leaf of this field."""
        num_bytes = math.prod((*size, *field.shape)) * field.dtype.itemsize
        if num_bytes < MIN_BYTES or field.device.type != "cpu":
            return torch.empty((*size, *field.shape), dtype=field.dtype, device=field.device)
        view = self._view(field.key, num_bytes)
        return torch.from_numpy(view).view(field.dtype).view(*size, *field.shape)

    def _view(self, key: Key, num_bytes: int) -> np.ndarray:
        kept = [entry for entry in self._kept.get(key, ()) if len(entry[0]) == num_bytes]
        free = [i for i, (_, user) in enumerate(kept) if user() is None]
        memory = kept.pop(free[-1])[0] if free else _aligned(num_bytes)  # the last one: caches may still have it
        view = memory[:]
        self._kept[key] = [*kept, (memory, weakref.ref(view))][-_MOST_KEPT:]
        return view


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
