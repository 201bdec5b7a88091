"""Which frames an index means: of a buffer, or of its storage."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from swath.data.frames import as_frames
from swath.data.tracks import Window


class Chosen(NamedTuple):
    """Frames that were asked for."""

    slots: np.ndarray
    #: Whether one frame was asked for, not a batch of one.
    is_one: bool


def choose(index: Any, window: Window) -> Chosen:
    """Of what can be read now.

    An int, a slice and a mask count frames env by env, the oldest first, as ``rb[:]`` gives them. Integers in a tensor,
    an array or a list are slots: what ``sample`` and ``extend`` call ``index``.
    """
    if isinstance(index, (slice, int)) and not isinstance(index, bool):
        return Chosen(window.slots(np.atleast_1d(_counted(index, window.total))), isinstance(index, int))
    if index is Ellipsis or index is None or isinstance(index, (tuple, bool, float)):
        raise TypeError(
            f"a buffer has one dimension, frames; {index!r} is no index of it. Give an int, a slice, or a tensor of "
            "the indices that sample and extend give"
        )
    array = np.asarray(index.detach().cpu() if isinstance(index, torch.Tensor) else index)
    if array.dtype == bool:
        if array.shape != (window.total,):
            raise IndexError(f"a mask of shape {array.shape} for {window.total:,} frames; it must have one entry each")
        return Chosen(window.slots(array.nonzero()[0]), False)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"indices are integers, not {array.dtype}")
    slots = array.reshape(-1).astype(np.int64)
    _require_written(slots, window)
    return Chosen(slots, array.ndim == 0)


def _counted(index: int | slice, total: int) -> Any:
    try:
        return np.arange(total)[index]
    except IndexError:
        raise IndexError(f"there is no frame {index}: the buffer has {total:,}") from None


def _require_written(slots: np.ndarray, window: Window) -> None:
    """That there is, or was, a frame; one that is being overwritten is another matter."""
    if not len(slots):
        return
    if slots.min() < 0:
        raise IndexError(
            f"there is no frame {slots.min()}: tensors have indices as sample and extend give them, from 0 on; rb[-1] "
            "is the last one"
        )
    tracks, places = np.divmod(slots, window.length)
    missing = tracks >= len(window.end)
    missing[~missing] = places[~missing] >= window.end[tracks[~missing]]
    if missing.any():
        raise IndexError(f"there is no frame {slots[missing][0]}: {window.total:,} are in the buffer")


def split_off_new(index: Any, data: Any, count: int, num_tracks: int, max_size: int) -> tuple[Any, Any]:
    """Of data for these indices: index and data for frames that are there, and data for those behind the last.

    Either may be None. Only where frames lie in one row is there a place behind the last.
    """
    is_one = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.ndim)
    if isinstance(index, slice) and index.stop is not None and index.stop > count:
        index = range(*index.indices(max_size))
    if isinstance(index, (slice, bool)) or (isinstance(index, int) and index < count):
        return (index, data), None
    numbers = np.atleast_1d(np.asarray(index))
    if num_tracks != 1 or numbers.dtype.kind not in "iu" or not numbers.size or numbers.max() < count:
        return (index, data), None
    is_new = numbers >= count
    new = numbers[is_new]
    if (new != np.arange(count, count + len(new))).any() or count + len(new) > max_size:
        raise IndexError(
            f"there is no place {new[-1]}: {count:,} of {max_size:,} frames are in the storage, and new ones go right "
            f"behind them, from {count:,} on"
        )
    data = as_frames(data, () if is_one else (len(numbers),))
    if is_one:
        data = data.unsqueeze(0) if hasattr(data, "unsqueeze") else [data]
    if len(data) != len(numbers):
        raise ValueError(f"{len(data):,} frames were given for {len(numbers):,} indices")
    old, own = (~is_new).nonzero()[0], is_new.nonzero()[0]
    if isinstance(data, list):
        return ((numbers[old], [data[i] for i in old]) if len(old) else None), [data[i] for i in own]
    return ((numbers[old], data[torch.from_numpy(old)]) if len(old) else None), data[torch.from_numpy(own)]


def is_key(index: Any) -> bool:
    """Whether a key is meant, not frames."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, str) for part in parts)
