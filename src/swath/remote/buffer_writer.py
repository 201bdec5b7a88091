"""A worker's side of a replay buffer: what it collects is made into what is stored, and written to its tracks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from swath.collectors.base import Postprocessing
from swath.data.memory import FrameMemory
from swath.data.storages import as_rows, check_rows, end_others, write_rows
from swath.data.trajectories import TrajectoryAssembler
from swath.keys import Key, nested
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field
from swath.workers.status_page import Ledger


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
        tracks: this worker's.
        by_env: whether there is one for each env; else, where batches do not keep their shape, there is one for all.
        ledger: where frames are counted, with each commit.
        env_size: the batch size of each env.
    """

    def __init__(
        self,
        memory: FrameMemory,
        tracks: range,
        by_env: bool,
        ledger: Ledger,
        env_size: torch.Size,
        processing: Processing | None,
    ) -> None:
        self._memory = memory
        self._tracks = tracks
        self._by_env = by_env
        self._ledger = ledger
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
        num_rows, num_steps = next(iter(leaves.values())).shape[:2]
        if self._processing is None:
            self._commit([(leaves, self._track_of(first_row))], num_rows * num_steps)
            return
        each = self._env_size.numel()
        for row in range(0, num_rows, each):
            part = {key: leaf[row : row + each] for key, leaf in leaves.items()}
            whole = min(each, num_rows - row) == each
            batch = _as_batch(part, self._env_size if whole else (num_rows - row,))
            self._write_batch(batch, first_row + row)

    def _write_batch(self, raw: TensorDictBase, first_row: int) -> None:
        assert self._processing is not None
        post, track = self._processing.post, self._track_of(first_row)
        raw = post.check(raw)
        if self._assembler is None:
            made = post.apply(raw)
            keeps_shape = self._by_env and made.shape == raw.shape
            rows = made.reshape(-1, made.shape[-1]) if keeps_shape else _flat(made)
            self._commit([(self._checked(rows), track)], raw.batch_size.numel())
            return
        self._assembler.add(raw)
        episodes = []
        while (episode := self._assembler.pop()) is not None:
            episodes.append((self._checked(_flat(post.apply(episode))), track))
        self._commit(episodes, raw.batch_size.numel())

    def _checked(self, batch: TensorDictBase) -> Mapping[Key, torch.Tensor]:
        rows = as_rows(batch)
        check_rows(self._memory.layout.fields, rows)
        return rows

    def _track_of(self, row: int) -> int:
        """Where frames of this worker's ``row``-th env go; what one batch becomes may never be in another's."""
        return self._tracks.start + (row if self._by_env else 0)

    def _commit(self, parts: Sequence[tuple[Mapping[Key, torch.Tensor], int]], num_frames: int) -> None:
        """Write what became of so many frames: rows, and the track of the first."""
        memory = self._memory
        sizes = [next(iter(rows.values())).shape[:2].numel() for rows, _ in parts]
        committed = memory.tracks.committed[self._tracks.start : self._tracks.stop]
        self._ledger.begin(num_frames, int(committed.sum()), sum(sizes))
        for (rows, track), size in zip(parts, sizes, strict=True):
            if size:
                ids = rows.get(TRAJ_IDS)
                if self._by_env and ids is not None:
                    end_others(memory, range(track, track + len(ids)), ids[:, 0].tolist())
                write_rows(memory, rows, track)

    def drop(self, traj_ids: Iterable[int] | None = None) -> None:
        """Episodes under way (all by default) will not go on."""
        if self._assembler is None:
            return
        if traj_ids is None:
            self._assembler.drop_all()
        else:
            self._assembler.drop(traj_ids)


def _as_batch(leaves: Mapping[Key, torch.Tensor], lead: Sequence[int]) -> TensorDict:
    """A copy: what is collected next is written over it."""
    steps = next(iter(leaves.values())).shape[1]
    tree = nested({key: leaf.reshape(*lead, steps, *leaf.shape[2:]).clone() for key, leaf in leaves.items()})
    return TensorDict(tree, batch_size=(*lead, steps))


def _flat(batch: TensorDictBase) -> TensorDictBase:
    """``[1, frames]``, without what only fills up."""
    mask: Any = batch.get(("collector", "mask"), None)
    frames = batch.reshape(batch.batch_size.numel())  # not -1: of nothing, TensorDict makes one
    return (frames if mask is None else frames[mask.reshape(-1)]).unsqueeze(0)
