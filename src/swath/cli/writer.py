"""Frames written to memory-mapped files as batches arrive."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.cli.episodes import EpisodeLog
from swath.dataset import EPISODES, FRAMES


class DatasetWriter:
    """Writes batches ``[envs, steps]`` into one TensorDict ``[frames]``, each env's frames in one piece.

    How many frames an env will have is known from the start, so each batch goes to its final place; a collection that
    ends early is moved together at the end. Where frames do not divide over the envs, the first few have one more.
    """

    def __init__(self, folder: Path, num_frames: int, num_envs: int) -> None:
        self._folder = folder
        steps, self._num_longer = divmod(num_frames, num_envs)
        self._planned = np.full(num_envs, steps, dtype=np.int64)
        self._planned[: self._num_longer] += 1
        self._written = np.zeros(num_envs, dtype=np.int64)
        #: All planned frames, from the first batch on.
        self._memory: TensorDict | None = None
        #: One frame, to see its keys.
        self.example: TensorDictBase | None = None
        #: For every key, the planned frames ``[envs, steps]`` of the envs with one frame more, and of the others.
        self._targets: dict[str | tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.episodes = EpisodeLog(folder / EPISODES, _offsets(self._planned))

    @property
    def frames(self) -> int:
        return int(self._written.sum())

    @property
    def frames_per_env(self) -> list[int]:
        return self._written.tolist()

    def add(self, batch: TensorDictBase) -> None:
        """Write a batch ``[*envs, steps]``; one of fewer envs is of the first ones."""
        batch = batch.reshape(-1, batch.shape[-1])
        num_envs, num_steps = batch.shape
        if self._memory is None:
            self.example = batch[0, 0]
            self._allocate(batch)
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

    def _allocate(self, batch: TensorDictBase) -> None:
        self._memory = _memory_like(batch.reshape(-1), int(self._planned.sum()), self._folder / FRAMES)
        split = int(self._planned[: self._num_longer].sum())
        for key, leaf in self._memory.items(include_nested=True, leaves_only=True):
            flat = leaf.as_subclass(torch.Tensor)  # without MemoryMappedTensor's overhead on every index
            first = flat[:split].unflatten(0, (self._num_longer, int(self._planned[0]))) if split else flat[:0]
            rest = flat[split:].unflatten(0, (len(self._planned) - self._num_longer, int(self._planned[-1])))
            self._targets[key] = first, rest

    def finish(self) -> None:
        """Close what was written."""
        self.episodes.finish(_offsets(self._written))
        self._targets.clear()
        if self._memory is not None and self.frames < len(self._memory):
            self._move_together(self._memory)
        self._memory = None

    def _move_together(self, planned: TensorDict) -> None:
        folder = self._folder / f"{FRAMES}-kept"
        kept = _memory_like(planned, self.frames, folder)
        for key, leaf in kept.items(include_nested=True, leaves_only=True):
            target, source = leaf.as_subclass(torch.Tensor), planned.get(key).as_subclass(torch.Tensor)
            for to, at, count in zip(_offsets(self._written), _offsets(self._planned), self._written, strict=True):
                target[to : to + count] = source[at : at + count]
        shutil.rmtree(self._folder / FRAMES)
        folder.rename(self._folder / FRAMES)


def _memory_like(frames: TensorDictBase, count: int, folder: Path) -> TensorDict:
    """Memory-mapped zeros ``[count]`` with the keys of ``frames``. Files take space on disk as they are written."""
    example = frames[:1].detach()
    example.names = None
    return example.expand(count).memmap_like(str(folder))


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Where each env's frames start."""
    return np.cumsum(counts) - counts
