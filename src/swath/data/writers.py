"""Writers: where ``extend`` puts what it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.storage_base import Storage
from swath.errors import require_one_of
from swath.keys import as_key, show

_REDUCTIONS = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "median": torch.median}


class Writer:
    """Puts frames ``[k, steps]`` into a storage. Use one of its subclasses."""

    #: Whether workers may write to their tracks by themselves.
    appends = False

    def write(self, storage: Storage, rows: Any, first_track: int) -> np.ndarray:
        """Slots of what was written, -1 for what was not."""
        raise NotImplementedError

    def empty(self) -> None:
        """The buffer was emptied."""

    def require_changes(self) -> None:
        """That frames may be changed in place."""

    def mark_update(self) -> None:
        """Some were."""


class RoundRobinWriter(Writer):
    """Behind what is there; the oldest is overwritten when the buffer is full."""

    appends = True

    def __init__(self, compilable: bool = False) -> None: ...

    def write(self, storage: Storage, rows: Any, first_track: int) -> np.ndarray:
        return storage.write(rows, first_track)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """As ``RoundRobinWriter``. Every sample of a ``TensorDictReplayBuffer`` has its ``index``, so none is stored."""


class TensorDictMaxValueWriter(Writer):
    """Keeps the frames with the highest value of ``rank_key``.

    Args:
        rank_key: what to compare; ``("next", "reward")`` by default.
        reduction: of more than one entry a frame: "sum", "mean", "max", "min" or "median".
    """

    def __init__(self, rank_key: Any = None, reduction: str = "sum", **unused: Any) -> None:
        self.rank_key = as_key(("next", "reward") if rank_key is None else rank_key)
        require_one_of("reduction", reduction, _REDUCTIONS)
        self.reduction = reduction
        self.empty()

    def empty(self) -> None:
        #: The value of each slot that is used.
        self._ranks: np.ndarray = np.zeros(0)

    def mark_update(self) -> None:
        self.empty()  # what is there is ranked anew with the next write

    def _rank(self, frame: TensorDictBase) -> float:
        value = frame.get(self.rank_key, None)  # type: ignore[arg-type]
        if value is None:
            raise KeyError(f"TensorDictMaxValueWriter: there is no {show(self.rank_key)} in what is to be written")
        flat = value.reshape(-1).float()
        return float(_REDUCTIONS[self.reduction](flat, dim=0)) if self.reduction != "median" else float(flat.median())

    def write(self, storage: Storage, rows: Any, first_track: int) -> np.ndarray:
        if not isinstance(rows, TensorDictBase):
            raise TypeError(f"TensorDictMaxValueWriter needs TensorDicts, got {type(rows).__name__}")
        capacity = storage.tracks.capacity
        if len(self._ranks) != len(storage):  # others wrote it: an earlier program, say
            stored = storage.take(np.arange(len(storage)))
            self._ranks = np.array([self._rank(frame) for frame in stored])
        flat = rows.reshape(-1, *rows.shape[2:])
        slots = np.full(len(flat), -1)
        for number in range(len(flat)):
            frame = flat[number : number + 1].unsqueeze(0)
            rank = self._rank(flat[number])
            if len(self._ranks) < capacity:
                slots[number] = storage.write(frame, 0)[0, 0]
                self._ranks = np.append(self._ranks, rank)
            elif rank > self._ranks.min():
                slots[number] = lowest = int(self._ranks.argmin())
                storage.overwrite(lowest, frame)
                self._ranks[lowest] = rank
        return slots.reshape(tuple(rows.shape[:2]))


class ImmutableDatasetWriter(Writer):
    """For a buffer that is only read."""

    def write(self, storage: Storage, rows: Any, first_track: int) -> np.ndarray:
        raise RuntimeError("this buffer is only read (ImmutableDatasetWriter)")

    def require_changes(self) -> None:
        raise RuntimeError("this buffer is only read (ImmutableDatasetWriter)")
