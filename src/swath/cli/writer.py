"""Frames written to memory-mapped files as batches arrive; in the end each env's frames are in one piece."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.cli.episodes import EpisodeLog
from swath.dataset import EPISODES, FRAMES

Key = str | tuple[str, ...]
#: Which env a frame is from.
_ENV: Key = ("collector", "env")


class DatasetWriter:
    """Writes batches into one TensorDict ``[frames]``.

    A subclass says where a batch goes, and afterwards which pieces there are; ``finish`` moves them together where
    they are not in order already.
    """

    def __init__(self, folder: Path, num_frames: int, offsets: np.ndarray) -> None:
        self._folder = folder
        self._num_frames = num_frames
        self._written = np.zeros(len(offsets), dtype=np.int64)
        #: Room for all frames, from the first batch on; and its tensors, to write into.
        self._memory: TensorDict | None = None
        self._leaves: dict[Key, torch.Tensor] = {}
        #: One frame, to see its keys.
        self.example: TensorDictBase | None = None
        self.episodes = EpisodeLog(folder / EPISODES, offsets)

    @property
    def frames(self) -> int:
        return int(self._written.sum())

    @property
    def frames_per_env(self) -> list[int]:
        return self._written.tolist()

    def add(self, batch: TensorDictBase) -> None:
        """Write a batch."""
        raise NotImplementedError

    def _pieces(self) -> Iterable[tuple[int, int, int]]:
        """Env, place and length of each piece, those of an env in the order of time."""
        raise NotImplementedError

    @property
    def _in_order(self) -> bool:
        raise NotImplementedError

    def _allocate(self, frames: TensorDictBase) -> None:
        if self._memory is None:
            self.example = frames[0]
            self._memory = _memory_like(frames, self._num_frames, self._folder / FRAMES)
            self._leaves = _tensors(self._memory)

    def finish(self) -> None:
        """Close what was written."""
        self.episodes.finish(_offsets(self._written))
        if self._memory is not None and not self._in_order:
            self._move_together(self._memory)
        self._leaves = {}
        self._memory = None

    def _move_together(self, memory: TensorDict) -> None:
        folder = self._folder / f"{FRAMES}-in-order"
        ordered = _tensors(_memory_like(memory, self.frames, folder))
        for key, target in ordered.items():
            source = self._leaves[key]
            to = _offsets(self._written)
            for env, at, count in self._pieces():
                target[to[env] : to[env] + count] = source[at : at + count]
                to[env] += count
        shutil.rmtree(self._folder / FRAMES)
        folder.rename(self._folder / FRAMES)


class EvenWriter(DatasetWriter):
    """Of batches ``[*envs, steps]``: all envs advance together.

    How many frames an env will have is known from the start, so each batch goes to its final place; only a collection
    that ends early is moved together. Where frames do not divide over the envs, the first few have one more.
    """

    def __init__(self, folder: Path, num_frames: int, num_envs: int) -> None:
        steps, self._num_longer = divmod(num_frames, num_envs)
        self._planned = np.full(num_envs, steps, dtype=np.int64)
        self._planned[: self._num_longer] += 1
        #: For every key, the planned frames ``[envs, steps]`` of the envs with one frame more, and of the others.
        self._targets: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        super().__init__(folder, num_frames, _offsets(self._planned))

    def add(self, batch: TensorDictBase) -> None:
        """One of fewer envs is of the first ones."""
        batch = batch.reshape(-1, batch.shape[-1])
        num_envs, num_steps = batch.shape
        self._allocate(batch.reshape(-1))
        at = int(self._written[0])
        longer = min(self._num_longer, num_envs)
        for key, (first, rest) in self._targets.items():
            value = batch.get(key)
            if longer:
                first[:longer, at : at + num_steps] = value[:longer]
            if num_envs > longer:
                rest[: num_envs - longer, at : at + num_steps] = value[longer:]
        self.episodes.add(batch)
        self._written[:num_envs] += num_steps

    def _allocate(self, frames: TensorDictBase) -> None:
        super()._allocate(frames)
        if self._targets:
            return
        split = int(self._planned[: self._num_longer].sum())
        for key, flat in self._leaves.items():
            first = flat[:split].unflatten(0, (self._num_longer, int(self._planned[0]))) if split else flat[:0]
            rest = flat[split:].unflatten(0, (len(self._planned) - self._num_longer, int(self._planned[-1])))
            self._targets[key] = first, rest

    @property
    def _in_order(self) -> bool:
        return self.frames == self._num_frames

    def _pieces(self) -> Iterable[tuple[int, int, int]]:
        places = zip(_offsets(self._planned).tolist(), self._written.tolist(), strict=True)
        return ((env, at, count) for env, (at, count) in enumerate(places))

    def finish(self) -> None:
        self._targets.clear()
        super().finish()


class ArrivalWriter(DatasetWriter):
    """Of batches ``[steps]`` that name their envs: each env advances at its own pace.

    Who will have how many frames is known at the end, so frames are written as they arrive and put in order then, which
    takes their space on the disk once more.
    """

    def __init__(self, folder: Path, num_frames: int, num_envs: int) -> None:
        super().__init__(folder, num_frames, np.zeros(num_envs, dtype=np.int64))
        # Of the pieces, in the order in which they arrived; arrays, because there may be millions:
        self._envs = array("q")
        self._lengths = array("q")

    def add(self, batch: TensorDictBase) -> None:
        """Frames of several envs may follow each other."""
        batch = batch.reshape(-1)
        envs, lengths = batch.get(_ENV).unique_consecutive(return_counts=True)
        batch = batch.exclude(_ENV)  # where a frame is in the dataset says it
        self._allocate(batch)
        at = self.frames
        for key, leaf in self._leaves.items():
            leaf[at : at + len(batch)] = batch.get(key)
        for env, piece in zip(envs.tolist(), batch.split(lengths.tolist()), strict=True):
            self.episodes.add(piece.unsqueeze(0), env)
            self._envs.append(env)
            self._lengths.append(len(piece))
            self._written[env] += len(piece)

    @property
    def _in_order(self) -> bool:
        return self.frames == self._num_frames and bool((np.diff(np.asarray(self._envs)) >= 0).all())

    def _pieces(self) -> Iterable[tuple[int, int, int]]:
        at = 0
        for env, length in zip(self._envs, self._lengths, strict=True):
            yield env, at, length
            at += length


def _memory_like(frames: TensorDictBase, count: int, folder: Path) -> TensorDict:
    """Memory-mapped zeros ``[count]`` with the keys of ``frames``. Files take space on disk as they are written."""
    example = frames[:1].detach()
    example.names = None
    return example.expand(count).memmap_like(str(folder))


def _tensors(memory: TensorDict) -> dict[Key, torch.Tensor]:
    """By key, without MemoryMappedTensor's overhead on every index."""
    return {key: leaf.as_subclass(torch.Tensor) for key, leaf in memory.items(include_nested=True, leaves_only=True)}


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Where each env's frames start."""
    return np.cumsum(counts) - counts
