"""A worker's side of a replay buffer: what it collects is made into what is stored, and written to its tracks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from swath.collectors.base import Postprocessing
from swath.collectors.trajectories import TrajectoryAssembler
from swath.data.memory import FrameMemory
from swath.data.storages import as_rows, check_rows, write_rows
from swath.rollout.layout import Field, Key, nested


@dataclass(frozen=True)
class Processing:
    """What is done to a batch before it is stored; by the worker that collected it."""

    post: Postprocessing
    #: Only whole episodes are stored.
    by_episode: bool

    @property
    def is_nothing(self) -> bool:
        post = self.post
        return not (self.by_episode or post.postproc or post.split_trajs or post.set_truncated or post.check_finite)


@dataclass(frozen=True)
class Stored:
    """What a batch becomes: keys, and whether it keeps its shape, so that every env can have a track of its own."""

    fields: tuple[Field, ...]
    by_env: bool


def stored(batch: TensorDictBase, processing: Processing) -> Stored:
    """Find out with a real batch, ``[*env_size, T]``."""
    example = batch.reshape(-1, batch.shape[-1])[0] if processing.by_episode else batch
    made = processing.post.apply(processing.post.check(example))
    if not is_tensor_collection(made):
        raise TypeError(f"with a replay buffer, postproc must return a TensorDict; got {type(made).__name__}")
    by_env = made.shape == example.shape and not processing.by_episode
    rows = as_rows(_flat(made))
    return Stored(tuple(Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in rows.items()), by_env)


class BufferWriter:
    """Writes what one worker collects.

    Args:
        memory: the buffer's.
        first_track: of this worker's tracks: one for each env, or, where a batch does not keep its shape, one for all.
        env_size: the batch size of each env.
    """

    def __init__(
        self,
        memory: FrameMemory,
        first_track: int,
        env_size: torch.Size,
        processing: Processing | None,
    ) -> None:
        self._memory = memory
        self._first_track = first_track
        self._env_size = env_size
        self._processing = processing
        self._assembler: TrajectoryAssembler | None = None
        if processing is not None and processing.by_episode:
            self._assembler = TrajectoryAssembler(1, "cat")

    def write(self, leaves: Mapping[Key, torch.Tensor], first_row: int, fragments: set[int]) -> None:
        """Frames ``[rows, steps]`` of envs of which the first is this worker's ``first_row``-th.

        ``fragments``: ids of trajectories that are not whole episodes.
        """
        if self._assembler is not None:
            self._assembler.fragments |= fragments
        if self._processing is None:
            write_rows(self._memory, leaves, self._first_track + first_row)
            return
        each = self._env_size.numel()
        num_rows = next(iter(leaves.values())).shape[0]
        for row in range(0, num_rows, each):
            part = {key: leaf[row : row + each] for key, leaf in leaves.items()}
            whole = min(each, num_rows - row) == each
            batch = _as_batch(part, self._env_size if whole else (num_rows - row,))
            self._write_batch(batch, first_row + row)

    def _write_batch(self, raw: TensorDictBase, first_row: int) -> None:
        assert self._processing is not None
        post = self._processing.post
        raw = post.check(raw)
        if self._assembler is None:
            self._store(post.apply(raw), raw, first_row)
            return
        self._assembler.add(raw)
        while (episode := self._assembler.pop()) is not None:
            self._store(post.apply(episode), None, first_row)

    def _store(self, batch: TensorDictBase, raw: TensorDictBase | None, first_row: int) -> None:
        memory = self._memory
        by_env = raw is not None and batch.shape == raw.shape
        rows = as_rows(batch.reshape(-1, batch.shape[-1]) if by_env else _flat(batch))
        check_rows(memory.layout.fields, rows)
        if next(iter(rows.values())).shape[1]:
            write_rows(memory, rows, self._first_track + (first_row if by_env else 0))

    def drop(self) -> None:
        """Episodes under way will not go on."""
        if self._assembler is not None:
            self._assembler.drop_all()


def _as_batch(leaves: Mapping[Key, torch.Tensor], lead: Sequence[int]) -> TensorDict:
    """A copy: what is collected next is written over it."""
    steps = next(iter(leaves.values())).shape[1]
    tree = nested({key: leaf.reshape(*lead, steps, *leaf.shape[2:]).clone() for key, leaf in leaves.items()})
    return TensorDict(tree, batch_size=(*lead, steps))


def _flat(batch: TensorDictBase) -> TensorDictBase:
    """``[1, frames]``, without what only fills up."""
    mask: Any = batch.get(("collector", "mask"), None)
    frames = batch.reshape(-1)
    return (frames if mask is None else frames[mask.reshape(-1)]).unsqueeze(0)
