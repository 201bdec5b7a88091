"""Where a buffer's frames are: private, in memory that processes share, or in a file.

In the latter two it is one block: the tracks' counters, then a stretch for each key. So whoever gets one descriptor
(or opens one file) has all of it, and what was committed is there after a kill.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from swath.data.tracks import NUM_COUNTERS, Tracks
from swath.disk import disk_full, is_full, reserve, show_bytes
from swath.errors import OutOfSharedMemory
from swath.rollout.layout import Field, Key
from swath.workers.memory import free_bytes, map_descriptor, new_descriptor

_ALIGNMENT = 64


@dataclass(frozen=True)
class FrameLayout:
    """Which bytes belong to which key, track and position."""

    fields: tuple[Field, ...]
    num_tracks: int
    #: Frames of a track.
    length: int

    @property
    def capacity(self) -> int:
        return self.num_tracks * self.length

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        offsets = [_aligned(NUM_COUNTERS * 8 * self.num_tracks)]
        for field in self.fields:
            offsets.append(_aligned(offsets[-1] + self.capacity * field.num_bytes))
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        return max(self._offsets[-1], _ALIGNMENT)

    def tracks(self, memory: torch.Tensor) -> Tracks:
        counters = memory.numpy()[: NUM_COUNTERS * 8 * self.num_tracks].view(np.int64)
        return Tracks(counters.reshape(NUM_COUNTERS, self.num_tracks), self.length)

    def leaves(self, memory: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Every key, ``[capacity, *shape]``."""
        return {
            field.key: memory[offset : offset + self.capacity * field.num_bytes]
            .view(field.dtype)
            .view(self.capacity, *field.shape)
            for field, offset in zip(self.fields, self._offsets[:-1], strict=True)
        }

    def to_json(self) -> str:
        fields = [
            {"key": f.key, "shape": list(f.shape), "dtype": str(f.dtype).removeprefix("torch.")} for f in self.fields
        ]
        return json.dumps({"num_tracks": self.num_tracks, "length": self.length, "fields": fields}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> FrameLayout:
        """What a file says may be anything: a layout that cannot be is an error."""
        try:
            content = json.loads(text)
            fields = tuple(
                Field(tuple(map(str, f["key"])), torch.Size(map(_count, f["shape"])), _DTYPES[f["dtype"]])
                for f in content["fields"]
            )
            return cls(fields, _count(content["num_tracks"]), _count(content["length"]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is no layout of a replay buffer: {error!r}") from error


_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class FrameMemory:
    """A layout with memory: ``leaves`` by key, ``[capacity, *shape]``, and the counters."""

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
        self.rows = {key: leaf.view(-1, length, *leaf.shape[1:]) for key, leaf in self.leaves.items()}
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
        taken = [int(path.stem.removeprefix(_FRAMES)) for path in folder.glob(f"{_FRAMES}*.bin")]
        path = folder / f"{_FRAMES}{max(taken, default=0) + 1}.bin"
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
        written.write_text(json.dumps({"file": self.path.name, "layout": self.layout.to_json()}, indent=1))
        os.replace(written, folder / LAYOUT_FILE)
        for path in folder.glob(f"{_FRAMES}*.bin"):
            if path != self.path:
                path.unlink()

    @classmethod
    def from_folder(cls, folder: Path) -> FrameMemory:
        """What an earlier program left there."""
        try:
            content = json.loads((folder / LAYOUT_FILE).read_text())
            name, layout = str(content["file"]), FrameLayout.from_json(content["layout"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder} does not hold a buffer: {LAYOUT_FILE} is damaged ({error!r})") from error
        path = folder / name
        if not _FRAMES_FILE.fullmatch(name) or path.is_symlink():
            raise ValueError(f"{folder} does not hold a buffer: its frames would be elsewhere, in {name!r}")
        found = path.stat().st_size
        if found != layout.num_bytes:
            raise ValueError(
                f"{folder} does not hold a buffer: {path.name} has {found:,} bytes and should have {layout.num_bytes:,}"
            )
        return cls._of_file(layout, os.open(path, os.O_RDWR), path)

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
_FRAMES_FILE = re.compile(_FRAMES + r"[0-9]+\.bin")
_ADVICE = (
    "lower its max_size, leave the observations out of 'next' (the collector's compact_obs=True), or use a "
    "LazyMemmapStorage on a larger disk"
)


def _require(num_bytes: int, free: int | None) -> None:
    if free is not None and num_bytes > free:
        raise OutOfSharedMemory(
            f"the replay buffer needs {show_bytes(num_bytes)} of memory, and {show_bytes(free)} are free; {_ADVICE}"
        )
