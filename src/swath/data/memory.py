"""Where a buffer's frames are: private, in memory that processes share, or in a file.

In the latter two it is one block: the tracks' counters, then a stretch for each key. So whoever gets one descriptor
(or opens one file) has all of it, and what was committed is there after a kill.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swath.copying import NotCopied
from swath.data.folder import no_buffer, numbered, open_regular, read_text, write_text
from swath.data.tracks import NUM_COUNTERS, Tracks
from swath.disk import disk_full, is_full, reserve, show_bytes
from swath.errors import OutOfSharedMemory
from swath.keys import Key
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.memory import free_bytes, map_descriptor
from swath.process.memory_files import new_descriptor
from swath.rollout.layout import Field
from swath.rollout.placement import ALIGNMENT, offsets_of, views_of

#: A petabyte of them is an error or a trap.
_MOST_ELEMENTS = 2**50


Sizes = tuple[tuple[Key, torch.Size], ...]
#: Frames ``[rows, steps, *shape]`` by key.
Rows = Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class FrameLayout:
    """Which bytes belong to which key, track and position."""

    fields: tuple[Field, ...]
    num_tracks: int
    #: Frames of a track.
    length: int
    #: Batch dimensions of a frame (a row), by the key of the TensorDict that has them; ``()`` is the frame itself.
    sizes: Sizes = ()

    @property
    def capacity(self) -> int:
        return self.num_tracks * self.length

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return offsets_of(self.fields, self.capacity, start=NUM_COUNTERS * 8 * self.num_tracks)

    @property
    def num_bytes(self) -> int:
        return max(self._offsets[-1], ALIGNMENT)

    def tracks(self, memory: torch.Tensor) -> Tracks:
        counters = memory.numpy()[: NUM_COUNTERS * 8 * self.num_tracks].view(np.int64)
        return Tracks(counters.reshape(NUM_COUNTERS, self.num_tracks), self.length)

    def leaves(self, memory: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Every key, ``[capacity, *shape]``."""
        return views_of(memory, self.fields, self._offsets, self.capacity)

    def to_json(self) -> str:
        fields = [
            {"key": f.key, "shape": list(f.shape), "dtype": str(f.dtype).removeprefix("torch.")} for f in self.fields
        ]
        sizes = [{"key": key, "size": list(size)} for key, size in self.sizes]
        content = {"num_tracks": self.num_tracks, "length": self.length, "fields": fields, "sizes": sizes}
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> FrameLayout:
        """Anybody may have written it: what is no layout is an error."""
        try:
            content = json.loads(text)
            fields = tuple(Field(_key(f["key"]), _size(f["shape"]), _dtype(f["dtype"])) for f in content["fields"])
            sizes = tuple((_key(each["key"]), _size(each["size"])) for each in content["sizes"])
            layout = cls(fields, _count(content["num_tracks"]), _count(content["length"]), sizes)
            layout.require_sense()
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is no layout of a replay buffer: {type(error).__name__}: {error}") from None
        return layout

    def require_sense(self) -> None:
        """That keys, batch sizes and lengths can be those of frames, whoever wrote them."""
        keys, sizes = {field.key for field in self.fields}, dict(self.sizes)
        if not keys or len(keys) != len(self.fields) or any(key[:n] in keys for key in keys for n in range(len(key))):
            raise ValueError("its keys are not those of nested tensors")
        for field in self.fields:
            size = next((sizes[node] for n in range(len(field.key)) if (node := field.key[: -n - 1]) in sizes), ())
            if field.shape[: len(size)] != torch.Size(size):
                raise ValueError(f"{field.key} has no batch size {tuple(size)}")
        elements = max(math.prod(field.shape) for field in self.fields) * self.length * self.num_tracks
        if elements > _MOST_ELEMENTS:
            raise ValueError(f"it is for {elements:,} numbers under a key, which no memory has")


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no number of frames or tracks")
    return value


def _key(value: Any) -> Key:
    if type(value) is not list or not all(type(part) is str for part in value):
        raise ValueError(f"{value!r} is no key")
    return tuple(value)


def _size(value: Any) -> torch.Size:
    if type(value) is not list or not all(type(dim) is int and 0 <= dim <= _MOST_ELEMENTS for dim in value):
        raise ValueError(f"{value!r} is no shape")
    return torch.Size(value)


def _dtype(value: Any) -> torch.dtype:
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value!r} is no dtype")
    return dtype


@dataclass
class FrameMemory(NotCopied):
    """A layout with memory: ``leaves`` by key, ``[capacity, *shape]``, and the counters."""

    _owns = "memory that others may see, and a descriptor of it"

    layout: FrameLayout
    tracks: Tracks
    leaves: dict[Key, torch.Tensor]
    #: What to give to another process, if it can be given; open as long as this lives.
    descriptor: int | None = None
    #: The file that it is in.
    path: Path | None = None

    def __post_init__(self) -> None:
        length = self.layout.length
        #: The same, track by track: ``[num_tracks, length, *shape]``.
        self.rows = {
            key: leaf.view(self.layout.num_tracks, length, *leaf.shape[1:]) for key, leaf in self.leaves.items()
        }
        #: The same as arrays, where NumPy has the dtype and the memory: it takes rows out in half of torch's time.
        self._arrays = {key: as_array(leaf) for key, leaf in self.leaves.items()}

    def take(self, slots: np.ndarray) -> dict[Key, torch.Tensor]:
        """A copy of these frames."""
        taken, index = {}, None
        for key, array in self._arrays.items():
            if array is not None:
                taken[key] = torch.from_numpy(array.take(slots, 0))
            else:
                leaf = self.leaves[key]
                index = torch.from_numpy(slots).to(leaf.device) if index is None else index
                taken[key] = leaf.index_select(0, index)
        return taken

    def write(self, rows: Rows, first_track: int) -> np.ndarray:
        """Add frames to tracks, and commit them. ``[k, steps]`` slots."""
        tracks, length = self.tracks, self.tracks.length
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
                    self.rows[key][here, at : at + count].copy_(leaf[row:stop, done : done + count])
                done += count
            tracks.commit(here, num_steps)
            row = stop
        return slots

    def write_mixed(self, rows: Rows, track_of_frame: np.ndarray) -> None:
        """Add frames ``[1, n]`` of many tracks, of each in order, and of none more than it is long."""
        tracks = self.tracks
        order = np.argsort(track_of_frame, kind="stable")
        counts = np.bincount(track_of_frame, minlength=tracks.num_tracks)
        # Of each frame: how many of its track come before it.
        rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        of_frame = track_of_frame[order]
        slots = of_frame * tracks.length + (tracks.committed[of_frame] + rank) % tracks.length
        tracks.begin(slice(None), counts)
        index, source = torch.from_numpy(slots), torch.from_numpy(order)
        for key, leaf in rows.items():
            self.leaves[key].index_copy_(0, index, leaf[0].index_select(0, source))
        tracks.commit(slice(None), counts)

    @ctrl_c_waits
    def change(self, slots: np.ndarray, values: Rows) -> None:
        """Put ``[n, *shape]`` in place of what these keys of frames are; whoever copies them meanwhile copies again."""
        tracks = self.tracks
        for track in np.unique(slots // tracks.length).tolist():
            chosen = (slots // tracks.length == track).nonzero()[0]
            source = torch.from_numpy(chosen)
            with tracks.editing(track):
                for key, value in values.items():
                    leaf = self.leaves[key]
                    index = torch.from_numpy(slots[chosen]).to(leaf.device)
                    leaf.index_copy_(0, index, value.detach().cpu()[source].to(leaf.device))

    def mend(self) -> None:
        """After an edit that was broken off: what is half one frame and half another is no frame any more."""
        tracks = self.tracks
        tracks.end_edits()
        for track in tracks.rewritten.nonzero()[0].tolist():
            with tracks.editing(track):
                newest = track * tracks.length + (int(tracks.committed[track]) - 1) % tracks.length
                for leaf in self.leaves.values():
                    leaf[int(tracks.rewritten[track]) - 1] = leaf[newest].clone()
                tracks.take_back(track)

    @classmethod
    def private(cls, layout: FrameLayout, device: torch.device) -> FrameMemory:
        """Of this process; the only one that may be on a device."""
        tracks = Tracks(np.zeros((NUM_COUNTERS, layout.num_tracks), dtype=np.int64), layout.length)
        _require(layout.num_bytes if device.type == "cpu" else 0, free_bytes())
        leaves = {f.key: torch.zeros((layout.capacity, *f.shape), dtype=f.dtype, device=device) for f in layout.fields}
        return cls(layout, tracks, leaves)

    @classmethod
    def shared(cls, layout: FrameLayout) -> FrameMemory:
        """Without a name: it goes when the last process lets go of it."""
        _require(layout.num_bytes, free_bytes())
        descriptor = new_descriptor("swath-buffer")
        os.ftruncate(descriptor, layout.num_bytes)
        return cls.of_descriptor(layout, descriptor)

    @classmethod
    def of_descriptor(cls, layout: FrameLayout, descriptor: int) -> FrameMemory:
        """Memory that exists. The descriptor is closed when this goes."""
        memory = map_descriptor(descriptor, layout.num_bytes)
        return cls(layout, layout.tracks(memory), layout.leaves(memory), descriptor)

    @classmethod
    def in_folder(cls, layout: FrameLayout, folder: Path) -> FrameMemory:
        """A new file. It counts once ``keep_in`` was called: until then, what was there before does."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_FRAMES}{max(_frame_files(folder), default=0) + 1}.bin"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            return cls._of_file(layout, descriptor, path)
        except BaseException:
            path.unlink()  # it may have taken what was left of the disk
            raise

    @classmethod
    def _of_file(cls, layout: FrameLayout, descriptor: int, path: Path) -> FrameMemory:
        try:
            # All of it, now: else it is a SIGBUS when the disk is full, whoever filled it.
            reserve(descriptor, layout.num_bytes)
        except OSError as error:
            os.close(descriptor)
            if not is_full(error):
                raise
            raise disk_full("the replay buffer needs", layout.num_bytes, path.parent, _ADVICE, error) from error
        made = cls.of_descriptor(layout, descriptor)
        made.path = path
        return made

    def keep_in(self, folder: Path) -> None:
        """From now on this is the buffer of the folder."""
        assert self.path is not None
        written = folder / (LAYOUT_FILE + ".new")
        write_text(written, json.dumps({"file": self.path.name, "layout": self.layout.to_json()}, indent=1))
        os.replace(written, folder / LAYOUT_FILE)
        for path in _frame_files(folder).values():
            if path != self.path:
                path.unlink()

    @classmethod
    def from_folder(cls, folder: Path) -> FrameMemory:
        """What an earlier program left there, however it ended."""
        try:
            content = json.loads(read_text(folder / LAYOUT_FILE))
            layout = FrameLayout.from_json(content["layout"])
            path = {path.name: path for path in _frame_files(folder).values()}.get(content["file"])
            if path is None:
                raise ValueError(f"there is no {content['file']!r} in it")
            descriptor = open_regular(path, os.O_RDWR)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise no_buffer(folder, str(error)) from error
        found = os.fstat(descriptor).st_size
        if found != layout.num_bytes:
            os.close(descriptor)
            raise no_buffer(folder, f"{path.name} has {found:,} bytes and should have {layout.num_bytes:,}")
        made = cls._of_file(layout, descriptor, path)
        if not made.tracks.are_possible:
            raise no_buffer(folder, f"{path.name} counts frames that cannot be there")
        made.mend()
        return made

    def __del__(self) -> None:
        if self.__dict__.get("descriptor") is not None:
            os.close(self.descriptor)  # type: ignore[arg-type]
            self.descriptor = None


def as_array(leaf: torch.Tensor) -> np.ndarray | None:
    try:
        return leaf.numpy()
    except (TypeError, RuntimeError):  # on a GPU; bfloat16 and others
        return None


LAYOUT_FILE = "layout.json"
_FRAMES = "frames-"
_ADVICE = (
    "lower its max_size, leave the observations out of 'next' (the collector's compact_obs=True), or use a "
    "LazyMemmapStorage on a larger disk"
)


def _frame_files(folder: Path) -> dict[int, Path]:
    return numbered(folder, _FRAMES, ".bin")


def _require(num_bytes: int, free: int | None) -> None:
    if free is not None and num_bytes > free:
        raise OutOfSharedMemory(
            f"the replay buffer needs {show_bytes(num_bytes)} of memory, and {show_bytes(free)} are free; {_ADVICE}"
        )
