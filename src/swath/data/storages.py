"""Storages: where a replay buffer keeps its frames.

A tensor storage is laid out by the first data that it gets: its keys, shapes and dtypes, and how many envs it comes
from (a track for each, see ``tracks.py``). Later data that differs is an error that names the key.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from tensordict import is_tensor_collection

from swath import platforms
from swath.copying import NotCopied
from swath.data.episode_ends import end_others, mark_ends
from swath.data.frames import as_rows, as_tensordict, check_rows, check_sizes, sizes_of
from swath.data.memory import LAYOUT_FILE, FrameLayout, FrameMemory, Rows, Sizes
from swath.data.tracks import Tracks
from swath.keys import Key
from swath.rollout.layout import CPU, Field

#: The key that a plain tensor is stored under.
_TENSOR: Key = ("_tensor",)


class Storage(NotCopied):
    """What every storage has: ``max_size`` frames in tracks. Use one of its subclasses."""

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

    def get(self, slots: np.ndarray) -> Any:
        raise NotImplementedError

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
        shape = data.batch_size if is_tensor_collection(data) else data.shape
        if len(shape) < self.ndim:
            raise ValueError(
                f"a storage with ndim={self.ndim} takes data with {self.ndim} dimensions, got {tuple(shape)}"
            )
        return self.ndim - 1 if dim_extend is None else dim_extend

    def by_env(self, data: Any, dim_extend: int | None) -> Any:
        """``[envs, time]`` of data with as many dimensions as the storage."""
        time_dim, last = self.time_dim(data, dim_extend), self.ndim - 1
        if time_dim != last:
            data = data.transpose(time_dim, last)
        return data.reshape(-1, *data.shape[last:])

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


class TensorStorage(Storage):
    """Frames as tensors, in memory that is laid out from the first of them."""

    memory: FrameMemory | None = None
    #: Whether what is stored are plain tensors.
    of_tensors = False

    @property
    def is_laid_out(self) -> bool:
        return self.memory is not None

    @property
    def can_be_shared(self) -> bool:
        """Whether other processes can write to it."""
        return True

    @property
    def tracks(self) -> Tracks:  # type: ignore[override]
        return self.laid_out().tracks

    @property
    def leaves(self) -> dict[Key, torch.Tensor]:
        """Every key, ``[capacity, *shape]``; which of it are frames, ``tracks`` knows."""
        return self.laid_out().leaves

    def laid_out(self) -> FrameMemory:
        if self.memory is None:
            raise RuntimeError("this storage has no data yet, and so no layout")
        return self.memory

    def lay_out(self, rows: Any, num_tracks: int) -> None:
        frames = self._as_rows(rows)
        fields = tuple(Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in frames.items())
        self.lay_out_fields(fields, num_tracks, sizes_of(rows))
        self.keep()

    def lay_out_fields(
        self, fields: Sequence[Field], num_tracks: int, sizes: Sizes = (), *, shared: bool = False
    ) -> None:
        layout = FrameLayout(tuple(fields), num_tracks, self._track_length(num_tracks), sizes)
        self.memory = self._allocate(layout, shared)

    def _allocate(self, layout: FrameLayout, shared: bool) -> FrameMemory:
        raise NotImplementedError

    def share(self, who: str) -> None:
        """Lay out in memory that other processes can see, as ``who`` asks for. (A file is.)"""

    def keep(self) -> None:
        """What was laid out is complete: from now on it is what a later program finds."""

    def change_tracks(self, num_tracks: int, shared: bool = False) -> None:
        """Lay out anew, for so many envs; what is there is kept, the newest where not all of it fits."""
        old = self.laid_out()
        window = old.tracks.window()
        slots = window.slots(np.arange(window.total))
        kept = {key: leaf[torch.from_numpy(slots)] for key, leaf in old.leaves.items()}
        self.lay_out_fields(old.layout.fields, num_tracks, old.layout.sizes, shared=shared)
        each = -(-len(slots) // num_tracks)
        sizes = window.sizes.tolist() if len(window.sizes) == num_tracks else [each] * num_tracks
        first = 0
        for track, size in enumerate(sizes):
            part = {key: leaf[first : first + size].unsqueeze(0) for key, leaf in kept.items()}
            first += size
            if next(iter(part.values())).shape[1]:
                self.write_rows(part, track)
        self.keep()

    def _as_rows(self, rows: Any) -> Rows:
        if isinstance(rows, torch.Tensor):
            self.of_tensors = True
            return {_TENSOR: rows}
        if not is_tensor_collection(rows):
            raise TypeError(
                f"{type(self).__name__} stores tensors and TensorDicts, got {type(rows).__name__}; use a ListStorage"
            )
        return as_rows(rows)

    def write(self, rows: Any, first_track: int) -> np.ndarray:
        frames = self._as_rows(rows)
        check_rows(self.laid_out().layout.fields, frames)
        check_sizes(self.laid_out().layout.sizes, sizes_of(rows))
        return self.laid_out().write(frames, first_track)

    def write_rows(self, rows: Rows, first_track: int) -> np.ndarray:
        memory = self.laid_out()
        check_rows(memory.layout.fields, rows)
        return memory.write(rows, first_track)

    def end(self, tracks: Sequence[int]) -> None:
        mark_ends(self.laid_out(), tracks)

    def end_others(self, tracks: Sequence[int], traj_ids: Sequence[int]) -> None:
        end_others(self.laid_out(), tracks, traj_ids)

    def write_mixed(self, frames: Any, track_of_frame: np.ndarray) -> None:
        memory, leaves = self.laid_out(), self._as_rows(frames.unsqueeze(0))
        check_rows(memory.layout.fields, leaves)
        if np.bincount(track_of_frame, minlength=1).max() > memory.tracks.length:
            super().write_mixed(frames, track_of_frame)
        else:
            memory.write_mixed(leaves, track_of_frame)

    def column(self, key: Key, slots: np.ndarray) -> np.ndarray:
        leaf = self.laid_out().leaves.get(key)
        if leaf is None:
            return np.zeros(0)
        return leaf.reshape(len(leaf), -1)[:, -1].cpu().numpy()[slots]

    def overwrite(self, slot: int, rows: Any) -> None:
        memory, frames = self.laid_out(), self._as_rows(rows)
        check_rows(memory.layout.fields, frames)
        try:
            with memory.tracks.editing(slot // memory.tracks.length, slot):
                for key, leaf in frames.items():
                    memory.leaves[key][slot] = leaf[0, 0]
        except BaseException:
            memory.mend()
            raise

    def get(self, slots: np.ndarray) -> Any:
        memory = self.laid_out()
        taken = memory.take(slots)
        if self.of_tensors:
            return taken[_TENSOR]
        return as_tensordict(taken, torch.Size([len(slots)]), self._told_device, memory.layout.sizes)

    #: What ``TensorDict.device`` says.
    _told_device: torch.device | None = None


class LazyTensorStorage(TensorStorage):
    """Frames in memory.

    Args:
        max_size: most frames. It is divided evenly over the envs that they come from, each of which overwrites its own
            oldest; where some are slower, fewer are there until their share is full, too.
        device: where frames are kept.
        ndim: 2 lets ``extend`` take ``[envs, time]`` and store frames; 1, rows.
        shared_init: put it into memory that other processes can see; where a collector's workers write to the buffer,
            that is done without being asked for.

    >>> storage = LazyTensorStorage(1000)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: Any = "cpu",
        ndim: int = 1,
        shared_init: bool = False,
        compilable: bool = False,
        consolidated: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        super().__init__(max_size, ndim)
        self._is_auto = device == "auto"
        self.device = CPU if self._is_auto else torch.device(device)
        self._told_device = self.device
        self._is_shared = False
        if shared_init:
            self.share("LazyTensorStorage(shared_init=True)")

    def share(self, who: str) -> None:
        platforms.require(who, (platforms.SHARED_MEMORY,), "leave that out: in one process nobody needs it")
        self._is_shared = True

    @property
    def can_be_shared(self) -> bool:
        return self.device.type == "cpu"

    def _as_rows(self, rows: Any) -> Rows:
        frames = super()._as_rows(rows)
        if self._is_auto:
            self._is_auto = False
            self.device = self._told_device = next(iter(frames.values())).device
        return frames

    def _allocate(self, layout: FrameLayout, shared: bool) -> FrameMemory:
        if shared or self._is_shared:
            return FrameMemory.shared(layout)
        return FrameMemory.private(layout, self.device)


class LazyMemmapStorage(TensorStorage):
    """Frames in a file, for more than fits in memory, and for longer than the program runs.

    Args:
        max_size: most frames, divided evenly over the envs that they come from; each overwrites its own oldest.
        scratch_dir: the folder; by default a temporary one, which goes with the storage.
        existsok: go on with what an earlier program left in ``scratch_dir``; all that was committed is there, however
            it ended. False raises if there is something.

    >>> storage = LazyMemmapStorage(1000)
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: Any = None,
        device: Any = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
    ) -> None:
        super().__init__(max_size, ndim)
        platforms.require(type(self).__name__, (platforms.FILES_BY_DESCRIPTOR,), "use a LazyTensorStorage")
        if torch.device(device).type != "cpu":
            raise ValueError(f"LazyMemmapStorage keeps frames in a file, not on {device}; sampled ones can be moved")
        if scratch_dir is None:
            self.folder = Path(tempfile.mkdtemp(prefix="swath-buffer-"))
        else:
            self.folder = Path(scratch_dir).expanduser()
        if auto_cleanup or (auto_cleanup is None and scratch_dir is None):
            self._clean_up = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        if (self.folder / LAYOUT_FILE).exists():
            if not existsok:
                raise FileExistsError(
                    f"there is a buffer in {self.folder} already; existsok=True goes on with it, or give another "
                    "scratch_dir"
                )
            self.memory = FrameMemory.from_folder(self.folder)
            self.of_tensors = set(self.memory.leaves) == {_TENSOR}
            if self.memory.layout.capacity > self.max_size:
                raise ValueError(
                    f"the buffer in {self.folder} has room for {self.memory.layout.capacity:,} frames; max_size is "
                    f"{self.max_size:,}"
                )

    _told_device = CPU
    _owns = "a folder of its own"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        NotCopied.__reduce_ex__(self, protocol)

    def _allocate(self, layout: FrameLayout, shared: bool) -> FrameMemory:
        return FrameMemory.in_folder(layout, self.folder)

    def keep(self) -> None:
        self.laid_out().keep_in(self.folder)
