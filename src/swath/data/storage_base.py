"""Storage: what every storage of a replay buffer has: frames in tracks, and frames by their index."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, SupportsIndex

import numpy as np
import torch
from tensordict import is_tensor_collection

from swath.copying import NotCopied
from swath.data.frames import as_frames
from swath.data.indexing import choose, split_off_new
from swath.data.tracks import Tracks
from swath.hints import ExplainsGuesses
from swath.keys import Key

_MOST_TRIES = 1000
_SECONDS_BETWEEN_TRIES = 0.0002

#: Told which frames were replaced.
Tell = Callable[[np.ndarray], None]
#: Gives a turn to who changes frames in place.
Turn = Callable[[], AbstractContextManager[Tell]]


@contextmanager
def _nobodys_turn() -> Iterator[Tell]:
    yield lambda slots: None


class Storage(NotCopied, ExplainsGuesses):
    """What every storage has: ``max_size`` frames in tracks. Use one of its subclasses."""

    _inner = (
        *("by_env", "can_be_shared", "change_tracks", "column"),
        *("contains", "end", "end_others", "is_laid_out"),
        *("items", "keep", "laid_out", "lay_out"),
        *("lay_out_fields", "leaves", "memory", "of_tensors"),
        *("one_step", "overwrite", "replace", "set_keys", "take"),
        *("take_turns", "time_dim", "tracks", "write"),
        *("write_mixed", "write_rows"),
    )

    _owns = "frames that others may be writing"
    _instead_of_a_copy = "make another one with the same arguments, and give its buffer this one's state_dict()"

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        if isinstance(max_size, bool) or max_size != int(max_size) or max_size < 1:
            raise ValueError(f"max_size is a number of frames, at least 1; got {max_size!r}")
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        self.max_size = int(max_size)
        self.ndim = int(ndim)

    tracks: Tracks

    @property
    def is_laid_out(self) -> bool:
        raise NotImplementedError

    def lay_out(self, rows: Any, num_tracks: int) -> None:
        """Prepare for data like this."""
        raise NotImplementedError

    def write(self, rows: Any, first_track: int) -> np.ndarray:
        """Add frames ``[k, steps]`` to the tracks from ``first_track`` on; their slots."""
        raise NotImplementedError

    def write_mixed(self, frames: Any, track_of_frame: np.ndarray) -> None:
        """Add frames ``[n]`` of many tracks, of each in order."""
        for track in np.unique(track_of_frame):
            chosen = torch.from_numpy((track_of_frame == track).nonzero()[0])
            self.write(frames[chosen].unsqueeze(0), int(track))

    def take(self, slots: np.ndarray) -> Any:
        """Copies of frames; while others write, ``tracks.intact`` says whether they are whole."""
        raise NotImplementedError

    # -- by index --------------------------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Copies of frames: of an int or a slice of all, or by the indices that ``sample`` and ``extend`` give."""
        if not self.is_laid_out:
            raise IndexError("the buffer is empty")
        for _ in range(_MOST_TRIES):
            window = self.tracks.window()
            slots, is_one = choose(index, window)
            taken = self.take(slots)
            if (window.positions(slots) >= 0).all() and self.tracks.intact(window, slots).all():
                return taken[0] if is_one else taken
            time.sleep(_SECONDS_BETWEEN_TRIES)
        raise RuntimeError("these frames are being overwritten, and nobody finishes it; sample others")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __iter__(self) -> Iterator[Any]:
        """One frame after the other."""
        return (self.get(number) for number in range(len(self)))

    def contains(self, index: Any) -> Any:
        """Whether there is a frame: of an int, or of each of many."""
        there = (np.asarray(index) >= 0) & (np.asarray(index) < len(self))
        return bool(there) if there.ndim == 0 else torch.from_numpy(there)

    __contains__ = contains

    def set(self, index: Any, data: Any) -> None:
        """Replace frames; those right behind the last are added.

        >>> from tensordict import TensorDict
        >>> from swath.data import LazyTensorStorage
        >>> storage = LazyTensorStorage(10)
        >>> storage.set(range(3), TensorDict(x=torch.arange(3), batch_size=3))
        >>> storage[1] = {"x": torch.tensor(10)}
        >>> storage[:]["x"]
        tensor([ 0, 10,  2])
        """
        with self._turn()() as tell:
            old, new = split_off_new(index, data, len(self), self._num_tracks, self.max_size)
            if old is not None:
                tell(self._replace(*old))
            if new is not None:
                rows = [new] if isinstance(new, list) else new.unsqueeze(0)
                if not self.is_laid_out:
                    self.lay_out(rows, 1)
                self.write(rows, 0)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, data)

    def replace(self, index: Any, data: Any) -> None:
        """As ``set``, of frames that are there."""
        with self._turn()() as tell:
            tell(self._replace(index, data))

    def set_keys(self, index: Any, values: Mapping[Key, Any]) -> None:
        """Change some keys of frames that are there."""
        with self._turn()():
            slots, _ = self._chosen(index)
            self._change_keys(slots, values)

    def _chosen(self, index: Any) -> Any:
        if not self.is_laid_out:
            raise IndexError("the buffer is empty: there is nothing to change")
        return choose(index, self.tracks.window())

    def _replace(self, index: Any, data: Any) -> np.ndarray:
        slots, is_one = self._chosen(index)
        data = as_frames(data, () if is_one else (len(slots),))
        if is_one:
            data = [data] if not _is_tensors(data) else data.unsqueeze(0)
        if len(data) != len(slots):
            given = f"data of shape {tuple(data.shape)} was" if _is_tensors(data) else f"{len(data):,} entries were"
            raise ValueError(f"{given} given for {len(slots):,} frames; give one for each")
        _, from_behind = np.unique(slots[::-1], return_index=True)
        if len(from_behind) < len(slots):  # of a frame that is there twice, the last counts
            last = np.sort(len(slots) - 1 - from_behind)
            slots, data = (
                slots[last],
                [data[i] for i in last] if isinstance(data, list) else data[torch.from_numpy(last)],
            )
        if len(slots):
            self._change(slots, data)
        return slots

    def _change(self, slots: np.ndarray, data: Any) -> None:
        """Put frames, or what is given of them, in place of others."""
        raise NotImplementedError

    def _change_keys(self, slots: np.ndarray, values: Mapping[Key, Any]) -> None:
        raise NotImplementedError

    @property
    def _num_tracks(self) -> int:
        return self.tracks.num_tracks if self.is_laid_out else 1

    _turns: Any = None

    def take_turns(self, turn: Turn) -> None:
        """A buffer has this storage: who changes frames has to wait for its turn there. A method, held weakly."""
        self._turns = weakref.WeakMethod(turn)  # type: ignore[arg-type]

    def _turn(self) -> Turn:
        return (None if self._turns is None else self._turns()) or _nobodys_turn

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_turns"}

    @property
    def shape(self) -> torch.Size:
        """How many frames there are."""
        return torch.Size([len(self)])

    def column(self, key: Key, slots: np.ndarray) -> np.ndarray:
        """One number of each of these frames that has this key."""
        raise NotImplementedError

    def overwrite(self, slot: int, rows: Any) -> None:
        """Replace a frame by one, ``[1, 1]``."""
        raise NotImplementedError

    def change_tracks(self, num_tracks: int, shared: bool = False) -> None:
        """Lay out anew, for so many envs; what is there is kept."""
        raise NotImplementedError

    def end(self, tracks: Sequence[int]) -> None:
        """Episodes under way in these tracks will not go on: their last frame becomes their end, truncated."""
        raise NotImplementedError

    def end_others(self, tracks: Sequence[int], traj_ids: Sequence[int]) -> None:
        """As ``end``, where what will be written next to each track is of another trajectory than its last frame."""
        raise NotImplementedError

    def time_dim(self, data: Any, dim_extend: int | None) -> int:
        """Which dimension of data that ``extend`` is given is time: by default the last of those that are stored."""
        shape = _shape_of(data)
        if len(shape) < self.ndim:
            raise ValueError(
                f"a storage with ndim={self.ndim} takes data with {self.ndim} dimensions, got {tuple(shape)}"
            )
        if dim_extend is not None and dim_extend >= len(shape):
            raise ValueError(
                f"dim_extend={dim_extend}, counted from 0, is not among the dimensions of data of shape {tuple(shape)}"
            )
        return self.ndim - 1 if dim_extend is None else dim_extend

    def by_env(self, data: Any, dim_extend: int | None) -> Any:
        """``[envs, time]`` of data with as many dimensions as the storage; with one, ``[1, time]``."""
        time_dim, last = self.time_dim(data, dim_extend), self.ndim - 1
        if time_dim != last:
            data = data.transpose(time_dim, last)
        return data.reshape(-1, *data.shape[last:]) if last else data.unsqueeze(0)

    def one_step(self, data: Any, dim_extend: int | None) -> Any:
        """What ``extend`` takes, of a single step: with ``ndim=2``, of all envs."""
        if not _is_tensors(data):
            return [data]
        time_dim, shape = self.ndim - 1 if dim_extend is None else dim_extend, _shape_of(data)
        if len(shape) < time_dim:
            raise ValueError(
                f"add takes one step, of {time_dim} or more dimensions here (ndim={self.ndim}, "
                f"dim_extend={dim_extend}); got data of shape {tuple(shape)}"
            )
        return data.unsqueeze(time_dim)

    def __len__(self) -> int:
        return len(self.tracks) if self.is_laid_out else 0

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Without data it is no more than its arguments.
        return super().__reduce_ex__(protocol) if self.is_laid_out else object.__reduce_ex__(self, protocol)

    def _track_length(self, num_tracks: int) -> int:
        return max(1, self.max_size // num_tracks)

    def clear(self) -> None:
        if self.is_laid_out:
            self.tracks.clear()


def _shape_of(data: Any) -> torch.Size:
    return data.batch_size if is_tensor_collection(data) else data.shape


def _is_tensors(data: Any) -> bool:
    return is_tensor_collection(data) or isinstance(data, torch.Tensor)
