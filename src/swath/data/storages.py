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
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, is_tensor_collection

from swath import platforms
from swath.copying import NotCopied
from swath.data.memory import LAYOUT_FILE, FrameLayout, FrameMemory, Sizes
from swath.data.tracks import NUM_COUNTERS, Tracks
from swath.keys import Key, as_key, nested, show
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import CPU, Field

#: Frames ``[rows, steps, *shape]`` by key.
Rows = Mapping[Key, torch.Tensor]
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
        return write_rows(self.laid_out(), frames, first_track)

    def write_rows(self, rows: Rows, first_track: int) -> np.ndarray:
        memory = self.laid_out()
        check_rows(memory.layout.fields, rows)
        return write_rows(memory, rows, first_track)

    def end(self, tracks: Sequence[int]) -> None:
        mark_ends(self.laid_out(), tracks)

    def end_others(self, tracks: Sequence[int], traj_ids: Sequence[int]) -> None:
        end_others(self.laid_out(), tracks, traj_ids)

    def write_mixed(self, frames: Any, track_of_frame: np.ndarray) -> None:
        memory, leaves = self.laid_out(), self._as_rows(frames.unsqueeze(0))
        check_rows(memory.layout.fields, leaves)
        tracks = memory.tracks
        order = np.argsort(track_of_frame, kind="stable")
        counts = np.bincount(track_of_frame, minlength=tracks.num_tracks)
        if counts.max() > tracks.length:
            super().write_mixed(frames, track_of_frame)
            return
        # Of each frame: how many of its track come before it.
        rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        of_frame = track_of_frame[order]
        slots = of_frame * tracks.length + (tracks.committed[of_frame] + rank) % tracks.length
        tracks.begin(slice(None), counts)
        index, source = torch.from_numpy(slots), torch.from_numpy(order)
        for key, leaf in leaves.items():
            memory.leaves[key].index_copy_(0, index, leaf[0].index_select(0, source))
        tracks.commit(slice(None), counts)

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


class ListStorage(Storage):
    """Anything, in a list. Slow, and of one process; sampled entries are put together by ``collate_fn``."""

    def __init__(self, max_size: int = 1000, *, ndim: int = 1, compilable: bool = False) -> None:
        super().__init__(max_size, ndim)
        self.items: list[Any] = []
        self._tracks: Tracks | None = None

    @property
    def is_laid_out(self) -> bool:
        return self._tracks is not None

    @property
    def tracks(self) -> Tracks:  # type: ignore[override]
        if self._tracks is None:
            raise RuntimeError("this storage has no data yet")
        return self._tracks

    def lay_out(self, rows: Any, num_tracks: int) -> None:
        length = self._track_length(num_tracks)
        self._tracks = Tracks(np.zeros((NUM_COUNTERS, num_tracks), dtype=np.int64), length)
        self.items = [None] * self._tracks.capacity

    def change_tracks(self, num_tracks: int, shared: bool = False) -> None:
        window = self.tracks.window()
        kept = [self.items[slot] for slot in window.slots(np.arange(window.total))]
        self.lay_out(None, num_tracks)
        each = -(-len(kept) // num_tracks)
        for track in range(num_tracks):
            if part := kept[track * each : (track + 1) * each]:
                self.write([part], track)

    def write(self, rows: Any, first_track: int) -> np.ndarray:
        """``rows``: a TensorDict or tensor ``[k, steps]``, or a list with a list of frames for each track."""
        tracks = self.tracks
        written = []
        for track, row in enumerate(rows.unbind(0) if hasattr(rows, "unbind") else rows, first_track):
            frames = list(row.unbind(0)) if hasattr(row, "unbind") else row
            here = slice(track, track + 1)
            slots = track * tracks.length + (tracks.committed[track] + np.arange(len(frames))) % tracks.length
            tracks.begin(here, len(frames))
            for slot, frame in zip(slots, frames, strict=True):
                self.items[slot] = frame.clone() if hasattr(frame, "clone") else frame
            tracks.commit(here, len(frames))
            written.append(slots)
        return np.stack(written)

    def _last(self, track: int) -> Any:
        """What was written last; None if nothing was, or it is no TensorDict."""
        tracks = self.tracks
        committed = int(tracks.committed[track])
        item = self.items[track * tracks.length + (committed - 1) % tracks.length] if committed else None
        return item if is_tensor_collection(item) else None

    def end(self, tracks: Sequence[int]) -> None:
        for track in tracks:
            if (frame := self._last(track)) is not None:
                mark_frames({as_key(key): frame.get(key) for key in frame.keys(True, True)}, ...)

    def end_others(self, tracks: Sequence[int], traj_ids: Sequence[int]) -> None:
        for track, traj_id in zip(tracks, traj_ids, strict=True):
            last = self._last(track)
            own = None if last is None else last.get(TRAJ_IDS, None)
            if own is not None and int(own) != traj_id:
                self.end([track])

    def column(self, key: Key, slots: np.ndarray) -> np.ndarray:
        entries = (item.get(key, None) for item in self.get(slots) if is_tensor_collection(item))
        return np.array([int(entry.reshape(-1)[-1]) for entry in entries if entry is not None])

    def overwrite(self, slot: int, rows: Any) -> None:
        frame = rows[0][0]
        with self.tracks.editing(slot // self.tracks.length):
            self.items[slot] = frame.clone() if hasattr(frame, "clone") else frame

    def get(self, slots: np.ndarray) -> list[Any]:
        return [self.items[slot] for slot in slots]


def as_tensordict(
    leaves: dict[Key, torch.Tensor], lead: torch.Size, device: torch.device | None, sizes: Sizes
) -> TensorDict:
    """A TensorDict of leaves, with the batch dimensions that were noted of it (``sizes_of``)."""
    if not sizes:
        return _as_tensordict(nested(leaves), lead, device)
    return _sized(nested(leaves), lead, device, dict(sizes))


def _as_tensordict(tree: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    """A TensorDict of what is known to fit: with its checks, a sample of 256 took 377 µs, without them 253."""
    make = getattr(TensorDict, "_new_unsafe", None)
    if make is None:
        return TensorDict(tree, batch_size=batch_size, device=device)  # type: ignore[arg-type]
    source = {
        key: _as_tensordict(entry, batch_size, device) if isinstance(entry, dict) else entry
        for key, entry in tree.items()
    }
    return make(source, batch_size=batch_size, device=device)


def _sized(
    tree: dict[str, Any], lead: torch.Size, device: torch.device | None, sizes: Mapping[Key, torch.Size], key: Key = ()
) -> TensorDict:
    """As ``_as_tensordict``, with further batch dimensions behind ``lead``; a nested one has its parent's."""
    own = sizes.get(key, sizes.get(key[:-1], torch.Size()))
    sizes = {**sizes, key: own}
    source = {
        name: _sized(entry, lead, device, sizes, (*key, name)) if isinstance(entry, dict) else entry
        for name, entry in tree.items()
    }
    return TensorDict(source, batch_size=lead + own, device=device)  # type: ignore[arg-type]


def sizes_of(rows: Any) -> Sizes:
    """Batch dimensions of a TensorDict ``[rows, steps]`` and of those in it; behind these two, and its parent's."""
    if not is_tensor_collection(rows):
        return ()
    sizes: list[tuple[Key, torch.Size]] = []

    def look(node: Any, key: Key, inherited: torch.Size) -> None:
        own = node.batch_size[2:]
        if own != inherited:
            sizes.append((key, own))
        for name, entry in node.items():
            if is_tensor_collection(entry) and not is_leaf_nontensor(type(entry)):
                look(entry, (*key, name), own)

    look(rows, (), torch.Size())
    return tuple(sorted(sizes))


def check_sizes(known: Sizes, given: Sizes) -> None:
    """Rows must have the batch size of the first ones."""
    if known == given:
        return
    expected, found = dict(known), dict(given)
    key = next(key for key in sorted({*expected, *found}) if expected.get(key) != found.get(key))
    who = show(key) if key else "a row"
    sizes = [tuple(each.get(key, each.get(key[:-1], ()))) for each in (expected, found)]
    raise ValueError(f"{who}: the buffer was laid out for batch size {sizes[0]}, got {sizes[1]}")


def as_rows(rows: Any) -> Rows:
    """The leaves of a TensorDict ``[rows, steps]``."""
    frames = {}
    for key in rows.keys(True, True, is_leaf=is_leaf_nontensor):
        leaf = rows.get(key)
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{show(as_key(key))} is a {type(leaf).__name__}: a tensor storage stores tensors; use a ListStorage"
            )
        frames[as_key(key)] = leaf
    return frames


def check_rows(fields: Sequence[Field], rows: Rows) -> None:
    """Data must be what the storage was laid out for."""
    check_fields(fields, [Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in rows.items()])


def check_fields(fields: Sequence[Field], given: Sequence[Field]) -> None:
    known, found = ({field.key: field for field in each} for each in (fields, given))
    if extra := next((key for key in found if key not in known), None):
        raise KeyError(f"{show(extra)} is not among the keys that this buffer was laid out with: {_names(known)}")
    for key, field in known.items():
        if key not in found:
            raise KeyError(f"{show(key)} is missing: this buffer was laid out with {_names(known)}")
        other = found[key]
        if (other.dtype, other.shape) != (field.dtype, field.shape):
            raise ValueError(
                f"{show(key)}: the buffer was laid out for {field.dtype} {tuple(field.shape)}, got {other.dtype} "
                f"{tuple(other.shape)}"
            )


def _names(keys: Any) -> str:
    return ", ".join(show(key) for key in keys)


def write_rows(memory: FrameMemory, rows: Rows, first_track: int) -> np.ndarray:
    """Add frames to tracks, and commit them. ``[k, steps]`` slots."""
    tracks, length = memory.tracks, memory.tracks.length
    num_rows, num_steps = next(iter(rows.values())).shape[:2]
    starts = tracks.committed[first_track : first_track + num_rows].copy()
    numbers = np.arange(num_steps)
    slots = (np.arange(num_rows) + first_track)[:, None] * length + (starts[:, None] + numbers) % length
    # Tracks that are equally far, as those of one worker are, are written together.
    row = 0
    while row < num_rows:
        stop = row + 1
        while stop < num_rows and starts[stop] == starts[row]:
            stop += 1
        here = slice(first_track + row, first_track + stop)
        tracks.begin(here, num_steps)
        done = max(0, num_steps - length)  # of more than fits, only the last is kept
        while done < num_steps:
            at = int(starts[row] + done) % length
            count = min(length - at, num_steps - done)
            for key, leaf in rows.items():
                memory.rows[key][here, at : at + count].copy_(leaf[row:stop, done : done + count])
            done += count
        tracks.commit(here, num_steps)
        row = stop
    return slots


def mark_ends(memory: FrameMemory, tracks: Sequence[int]) -> None:
    """Episodes under way in these tracks will not go on: their last frame becomes their end, truncated."""
    flags = [leaf for key, leaf in memory.leaves.items() if key[0] == "next" and key[-1] == "done"]
    for track in tracks:
        committed = int(memory.tracks.committed[track])
        slot = track * memory.tracks.length + (committed - 1) % memory.tracks.length
        if committed and not all(bool(done[slot].all()) for done in flags):
            with memory.tracks.editing(track):
                mark_frames(memory.leaves, slot)


def mark_frames(leaves: Mapping[Key, torch.Tensor], where: Any) -> None:
    """Frames become the ends of their episodes, truncated where they were none."""
    for key, done in leaves.items():
        if key[0] == "next" and key[-1] == "done":
            truncated = leaves.get((*key[:-1], "truncated"))
            if truncated is not None:
                truncated[where] |= ~done[where]
            done[where] = True


def end_others(memory: FrameMemory, tracks: Sequence[int], traj_ids: Sequence[int]) -> None:
    """See ``Storage.end_others``. Without ids nobody can tell."""
    ids = memory.leaves.get(TRAJ_IDS)
    if ids is None:
        return
    of_track = np.asarray(tracks, dtype=np.int64)
    committed = memory.tracks.committed[of_track]
    slots = of_track * memory.tracks.length + (committed - 1) % memory.tracks.length
    differ = ids[torch.from_numpy(slots)].cpu().numpy() != np.asarray(traj_ids)
    mark_ends(memory, of_track[differ & (committed > 0)].tolist())


def marked_cuts(frames: TensorDictBase, track_of_frame: np.ndarray) -> TensorDictBase:
    """Frames ``[n]`` of many tracks: where a trajectory follows on another one that has no end, that one gets one."""
    ids = frames.get(TRAJ_IDS, None)
    if ids is None:
        return frames
    order = np.argsort(track_of_frame, kind="stable")
    tracks, own = track_of_frame[order], ids.reshape(-1).cpu().numpy()[order]
    cut = order[:-1][(tracks[1:] == tracks[:-1]) & (own[1:] != own[:-1])]
    keys = [as_key(key) for key in frames.keys(True, True) if as_key(key)[0] == "next"]
    flags = {key: frames.get(key) for key in keys if key[-1] in ("done", "truncated")}
    where = torch.from_numpy(cut)
    if all(bool(flag[where].all()) for key, flag in flags.items() if key[-1] == "done"):
        return frames
    frames = frames.copy()  # a hook may have what was collected
    flags = {key: flag.clone() for key, flag in flags.items()}
    mark_frames(flags, where)
    for key, flag in flags.items():
        frames.set(key, flag)
    return frames
