"""Frames written to files as batches arrive; in the end each env's frames are in one piece.

What is written counts once its batch is committed: until then it is as if it were not there. So whatever ends the
program, and wherever, the folder can be opened; and a disk that is full is an exception, because nothing is written
through a mapped file.
"""

from __future__ import annotations

import io
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.cli.episodes import EpisodeLog
from swath.dataset_files import Piece, are_in_order, merged, moves
from swath.dataset_format import COMMITS, EPISODES, FRAMES
from swath.disk import disk_full, is_full, write_all

Key = str | tuple[str, ...]
#: Which env a frame is from.
_ENV: Key = ("collector", "env")
#: Bytes that are copied at a time.
_CHUNK = 8_000_000


@dataclass(frozen=True)
class _File:
    """The frames of a key."""

    path: Path
    opened: io.FileIO
    bytes_per_frame: int


class DatasetWriter:
    """Writes batches into one TensorDict ``[frames]``.

    A subclass says where a batch goes, and afterwards which pieces there are; ``put_together`` moves them together
    where they are not in order already.

    Args:
        begin: called with a frame, to see its keys, before the first is written.
    """

    def __init__(
        self, folder: Path, num_frames: int, offsets: np.ndarray, begin: Callable[[TensorDictBase], None]
    ) -> None:
        self._folder = folder
        self._num_frames = num_frames
        self._written = np.zeros(len(offsets), dtype=np.int64)
        self._begin = begin
        #: One frame ``[1]``, from the first batch on, and its files, with room for all.
        self._example: TensorDictBase | None = None
        self._files: dict[Key, _File] = {}
        self.episodes = EpisodeLog(folder / EPISODES, offsets)
        self._commits = _CommitLog(folder / COMMITS, offsets)

    @property
    def frames(self) -> int:
        return int(self._written.sum())

    @property
    def frames_per_env(self) -> list[int]:
        return self._written.tolist()

    @property
    def num_bytes(self) -> int:
        """Of the frames."""
        return self.frames * sum(file.bytes_per_frame for file in self._files.values())

    def add(self, batch: TensorDictBase) -> None:
        """Write a batch, and commit it."""
        raise NotImplementedError

    def _pieces(self) -> Iterable[Piece]:
        """Env, place and length of each piece, those of an env in the order of time."""
        raise NotImplementedError

    def _write(self, batch: TensorDictBase, first_env: int, places: Sequence[int]) -> None:
        """The next steps ``[envs, steps]`` of some envs that follow each other, each to its place."""
        try:
            if self._example is None:
                self._prepare(batch)
            for key, file in self._files.items():
                size, data = file.bytes_per_frame, _as_bytes(batch.get(key))
                length = size * batch.shape[1]
                for row, at in enumerate(places):
                    write_all(file.opened, data[row * length : (row + 1) * length], at * size)
            news = self.episodes.look(batch, first_env)
            num_bytes = self.episodes.write(news)
            pieces = [(first_env + row, at, batch.shape[1]) for row, at in enumerate(places)]
            self._commits.add(pieces, num_bytes)
        except OSError as error:
            if not is_full(error):
                raise
            advice = "make room, or choose another disk"
            raise disk_full("the next frames need", batch.bytes(), self._folder, advice, error) from error
        self.episodes.accept(news, num_bytes)
        self._written[first_env : first_env + len(places)] += batch.shape[1]

    def _prepare(self, batch: TensorDictBase) -> None:
        example = batch.reshape(-1)[:1].detach().clone()
        example.names = None
        self._begin(example)
        for key, path in _new_files(example, self._num_frames, self._folder / FRAMES).items():
            self._files[key] = _File(path, io.FileIO(path, "r+"), example.get(key).nbytes)
        self._example = example

    def close(self) -> None:
        """No batch comes any more."""
        self.episodes.close()
        self._commits.close()
        for file in self._files.values():
            file.opened.close()

    def put_together(self, folder: Path) -> None:
        """The dataset, in another folder of the same disk. Where frames are in order already, nothing is copied."""
        assert self._example is not None
        pieces = merged(self._pieces())
        in_order = are_in_order(pieces)
        if in_order:  # what was written and does not count makes room
            for file in self._files.values():
                os.truncate(file.path, self.frames * file.bytes_per_frame)
        folder.mkdir()
        for key, path in _new_files(self._example, self.frames, folder / FRAMES).items():
            if not (in_order and _link(self._files[key].path, path)):
                self._copy(self._files[key], path, pieces)
        self.episodes.put_together(folder / EPISODES, _offsets(self._written))

    def _copy(self, file: _File, path: Path, pieces: Sequence[Piece]) -> None:
        size = file.bytes_per_frame
        with io.FileIO(file.path) as source, io.FileIO(path, "r+") as target:
            for at, to, count in moves(pieces, self.frames_per_env):
                for done in range(0, count * size, _CHUNK):
                    source.seek(at * size + done)
                    part = source.read(min(_CHUNK, count * size - done))
                    write_all(target, part, to * size + done)


class EvenWriter(DatasetWriter):
    """Of batches ``[*envs, steps]``: all envs advance together.

    How many frames an env will have is known from the start, so each batch goes to its final place; only a collection
    that ends early is moved together. Where frames do not divide over the envs, the first few have one more.
    """

    def __init__(self, folder: Path, num_frames: int, num_envs: int, begin: Callable[[TensorDictBase], None]) -> None:
        planned = np.full(num_envs, num_frames // num_envs, dtype=np.int64)
        planned[: num_frames % num_envs] += 1
        self._starts = _offsets(planned)
        super().__init__(folder, num_frames, self._starts, begin)

    def add(self, batch: TensorDictBase) -> None:
        """One of fewer envs is of the first ones."""
        batch = batch.reshape(-1, batch.shape[-1])
        self._write(batch, 0, (self._starts + self._written)[: len(batch)].tolist())

    def _pieces(self) -> Iterable[Piece]:
        places = zip(self._starts.tolist(), self.frames_per_env, strict=True)
        return ((env, at, count) for env, (at, count) in enumerate(places) if count)


class ArrivalWriter(DatasetWriter):
    """Of batches ``[steps]`` that name their envs: each env advances at its own pace.

    Who will have how many frames is known at the end, so frames are written as they arrive and put in order then, which
    takes their space on the disk once more.
    """

    def __init__(self, folder: Path, num_frames: int, num_envs: int, begin: Callable[[TensorDictBase], None]) -> None:
        super().__init__(folder, num_frames, np.zeros(num_envs, dtype=np.int64), begin)
        # Of the pieces, in the order in which they arrived; arrays, because there may be millions:
        self._envs = array("q")
        self._lengths = array("q")

    def add(self, batch: TensorDictBase) -> None:
        """Frames of several envs may follow each other."""
        batch = batch.reshape(-1)
        envs, lengths = batch.get(_ENV).unique_consecutive(return_counts=True)
        batch = batch.exclude(_ENV)  # where a frame is in the dataset says it
        for env, piece in zip(envs.tolist(), batch.split(lengths.tolist()), strict=True):
            self._write(piece.unsqueeze(0), env, [self.frames])
            self._envs.append(env)
            self._lengths.append(len(piece))

    def _pieces(self) -> Iterable[Piece]:
        at = 0
        for env, length in zip(self._envs, self._lengths, strict=True):
            yield env, at, length
            at += length


class _CommitLog:
    """A line for each batch that counts, written after everything else of it: see ``swath.dataset``."""

    def __init__(self, path: Path, offsets: np.ndarray) -> None:
        self._file = io.FileIO(path, "w")
        self._num_bytes = 0
        self._add({"offsets": offsets.tolist()})

    def add(self, pieces: Sequence[Piece], episodes: int) -> None:
        self._add({"pieces": pieces, "episodes": episodes})

    def _add(self, entry: dict[str, object]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._num_bytes += write_all(self._file, line, self._num_bytes)

    def close(self) -> None:
        self._file.close()


def _new_files(example: TensorDictBase, count: int, folder: Path) -> dict[Key, Path]:
    """A memory-mapped TensorDict ``[count]``: its files, by key. They take space on disk as they are written."""
    try:
        memory = example.expand(count).memmap_like(str(folder))
    except RuntimeError as error:  # torch's, for what the system says; its number is at the end
        number = re.search(r"\((\d+)\)\s*$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    leaves = memory.items(include_nested=True, leaves_only=True)
    return {key: Path(leaf.filename) for key, leaf in leaves if leaf.numel()}


def _link(old: Path, new: Path) -> bool:
    """Let a file have a second name, in place of another one; not all disks can do that."""
    beside = new.with_name(new.name + ".link")
    try:
        os.link(old, beside)
    except OSError:
        return False
    os.replace(beside, new)
    return True


def _as_bytes(value: torch.Tensor) -> memoryview:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Where each env's frames start."""
    return np.cumsum(counts) - counts
