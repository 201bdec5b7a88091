"""Storages: where a replay buffer keeps its frames.

A tensor storage is laid out by the first data that it gets: its keys, shapes and dtypes, and how many envs it comes
from (a track for each, see ``tracks.py``). Later data that differs is an error that names the key.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from tensordict import is_tensor_collection

from swath import platforms
from swath.copying import NotCopied
from swath.data.episode_ends import end_others, mark_ends
from swath.data.frames import as_many_frames, as_rows, as_tensordict, check_fields, check_rows, check_sizes, sizes_of
from swath.data.memory import LAYOUT_FILE, FrameLayout, FrameMemory, Rows, Sizes
from swath.data.storage_base import Storage
from swath.data.tracks import Tracks
from swath.hints import explains_unknown
from swath.keys import Key, show
from swath.rollout.layout import CPU, Field

#: The key that a plain tensor is stored under.
_TENSOR: Key = ("_tensor",)


class TensorStorage(Storage):
    """Frames as tensors, in memory that is laid out from the first of them.

    Args:
        storage: frames to begin with, which are copied; the storage is full with them.
        max_size: most frames, where there are none yet.
        device: where frames are kept; "auto" for where the first ones are.
        ndim: how many of the first dimensions count frames; with 2, ``[envs, time]``.

    >>> from tensordict import TensorDict
    >>> storage = TensorStorage(TensorDict(x=torch.arange(3), batch_size=3))
    >>> len(storage), storage[-1]["x"]
    (3, tensor(2))
    """

    memory: FrameMemory | None = None
    #: Whether what is stored are plain tensors.
    of_tensors = False

    @explains_unknown
    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: Any = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        storage = as_many_frames(storage, ndim)
        if (storage is None) == (max_size is None) and (storage is None or max_size != storage.shape[0]):
            raise ValueError("TensorStorage is given frames, which it is full with, or else max_size")
        count: Any = max_size if storage is None else storage.shape[:ndim].numel()
        super().__init__(count, ndim)
        self._is_auto = device == "auto"
        self.device = CPU if self._is_auto else torch.device(device)
        self._is_shared = False
        if storage is not None:
            rows = storage.unsqueeze(0) if ndim == 1 else self.by_env(storage, None)
            self.lay_out(rows, len(rows))
            self.write(rows, 0)

    @property
    def is_laid_out(self) -> bool:
        return self.memory is not None

    @property
    def can_be_shared(self) -> bool:
        """Whether other processes can write to it."""
        return self.device.type == "cpu"

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
        self._find_device(frames)
        self.of_tensors = isinstance(rows, torch.Tensor)
        fields = tuple(Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in frames.items())
        self.lay_out_fields(fields, num_tracks, sizes_of(rows))
        self.keep()

    def lay_out_fields(
        self, fields: Sequence[Field], num_tracks: int, sizes: Sizes = (), *, shared: bool = False
    ) -> None:
        layout = FrameLayout(tuple(fields), num_tracks, self._track_length(num_tracks), sizes)
        self.memory = self._allocate(layout, shared)

    def _allocate(self, layout: FrameLayout, shared: bool) -> FrameMemory:
        if shared or self._is_shared:
            return FrameMemory.shared(layout)
        return FrameMemory.private(layout, self.device)

    def share(self, who: str) -> None:
        """Lay out in memory that other processes can see, as ``who`` asks for."""
        platforms.require(who, (platforms.SHARED_MEMORY,), "leave that out: in one process nobody needs it")
        self._is_shared = True

    def keep(self) -> None:
        """What was laid out is complete: from now on it is what a later program finds."""

    def change_tracks(self, num_tracks: int, shared: bool = False) -> None:
        """Lay out anew, for so many envs; what is there is kept, the newest where not all of it fits."""
        old = self.laid_out()
        window = old.tracks.window()
        slots = window.all_slots()
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
            return {_TENSOR: rows}
        if not is_tensor_collection(rows):
            raise TypeError(
                f"{type(self).__name__} stores tensors and TensorDicts, got {type(rows).__name__}; use a ListStorage"
            )
        return as_rows(rows)

    def _find_device(self, frames: Rows) -> None:
        if self._is_auto:
            self._is_auto = False
            self.device = next(iter(frames.values())).device

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

    def _change(self, slots: np.ndarray, data: Any) -> None:
        memory, frames = self.laid_out(), self._as_rows(data.unsqueeze(0))
        given = [Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in frames.items()]
        check_fields(memory.layout.fields, given, partly=True)
        if memory.path is not None and len(frames) == len(memory.leaves):  # one that is torn must not outlive a kill
            for number, slot in enumerate(slots.tolist()):
                self.overwrite(slot, data[number : number + 1].unsqueeze(0))
        else:
            memory.change(slots, {key: leaf[0] for key, leaf in frames.items()})

    def _change_keys(self, slots: np.ndarray, values: Mapping[Key, Any]) -> None:
        memory = self.laid_out()
        leaves = {key: torch.as_tensor(value) for key, value in values.items()}
        for key, leaf in leaves.items():
            if leaf.shape[:1] != (len(slots),):
                raise ValueError(
                    f"{show(key)} has shape {tuple(leaf.shape)}; its first dimension must be the number of frames, "
                    f"{len(slots):,}"
                )
        given = [Field(key, leaf.shape[1:], leaf.dtype) for key, leaf in leaves.items()]
        check_fields(memory.layout.fields, given, partly=True)
        memory.change(slots, leaves)

    def take(self, slots: np.ndarray) -> Any:
        memory = self.laid_out()
        taken = memory.take(slots)
        if self.of_tensors:
            return taken[_TENSOR]
        return as_tensordict(taken, torch.Size([len(slots)]), self.device, memory.layout.sizes)


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

    @explains_unknown
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
        super().__init__(None, max_size, device=device, ndim=ndim)
        if shared_init:
            self.share("LazyTensorStorage(shared_init=True)")


class LazyMemmapStorage(TensorStorage):
    """Frames in a file, for more than fits in memory, and for longer than the program runs.

    Args:
        max_size: most frames, divided evenly over the envs that they come from; each overwrites its own oldest.
        scratch_dir: the folder; by default a temporary one, which goes with the storage.
        existsok: go on with what an earlier program left in ``scratch_dir``; all that was committed is there, however
            it ended. False raises if there is something.

    >>> storage = LazyMemmapStorage(1000)
    """

    @explains_unknown
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
        super().__init__(None, max_size, ndim=ndim)
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

    _owns = "a folder of its own"

    def share(self, who: str) -> None:
        """Nothing to do: a file is."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        NotCopied.__reduce_ex__(self, protocol)

    def _allocate(self, layout: FrameLayout, shared: bool) -> FrameMemory:
        return FrameMemory.in_folder(layout, self.folder)

    def keep(self) -> None:
        self.laid_out().keep_in(self.folder)
