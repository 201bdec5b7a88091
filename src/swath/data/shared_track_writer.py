"""A worker's side of a replay buffer: what it collects is made into what is stored, and written to its tracks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from swath.data.episode_ends import end_others
from swath.data.frames import as_rows, check_rows
from swath.data.memory import FrameMemory, Rows
from swath.data.postprocessing import Processing, Processor, as_one_row
from swath.keys import Key, nested
from swath.rollout.delivery import TRAJ_IDS
from swath.workers.status_page import Ledger


class SharedTrackWriter:
    """Writes what one worker collects, to memory that the buffer's owner reads.

    Args:
        memory: the buffer's.
        tracks: this worker's.
        by_env: whether there is one for each env; else, where batches do not keep their shape, there is one for all.
        ledger: where frames are counted, with each commit.
        env_size: the batch size of each env.
        processing: what is done to them before; None for nothing.
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
        self._processor = None if processing is None else Processor(processing)

    def write(self, leaves: Mapping[Key, torch.Tensor], first_row: int, fragments: set[int]) -> None:
        """Frames ``[rows, steps]`` of envs of which the first is this worker's ``first_row``-th.

        ``fragments``: ids of trajectories that are not whole episodes.
        """
        num_rows, num_steps = next(iter(leaves.values())).shape[:2]
        if self._processor is None:
            self._commit([leaves], self._track_of(first_row), num_rows * num_steps)
            return
        each = self._env_size.numel()
        for row in range(0, num_rows, each):
            part = {key: leaf[row : row + each] for key, leaf in leaves.items()}
            whole = min(each, num_rows - row) == each
            raw = _as_batch(part, self._env_size if whole else (num_rows - row,))
            made = [self._as_stored(batch, raw) for batch in self._processor.process(raw, fragments)]
            self._commit(made, self._track_of(first_row + row), raw.batch_size.numel())

    def _as_stored(self, made: TensorDictBase, raw: TensorDictBase) -> Rows:
        keeps_shape = self._by_env and made.shape == raw.shape
        rows = as_rows(made.reshape(-1, made.shape[-1]) if keeps_shape else as_one_row(made))
        check_rows(self._memory.layout.fields, rows)
        return rows

    def _track_of(self, row: int) -> int:
        """Where frames of this worker's ``row``-th env go; what one batch becomes may never be in another's."""
        return self._tracks.start + (row if self._by_env else 0)

    def _commit(self, parts: Sequence[Rows], track: int, num_frames: int) -> None:
        """Write what became of so many frames, each part to the tracks from ``track`` on."""
        memory = self._memory
        sizes = [next(iter(rows.values())).shape[:2].numel() for rows in parts]
        committed = memory.tracks.committed[self._tracks.start : self._tracks.stop]
        self._ledger.begin(num_frames, int(committed.sum()), sum(sizes))
        for rows, size in zip(parts, sizes, strict=True):
            if size:
                ids = rows.get(TRAJ_IDS)
                if self._by_env and ids is not None:
                    end_others(memory, range(track, track + len(ids)), ids[:, 0].tolist())
                memory.write(rows, track)

    def drop(self, traj_ids: Iterable[int] | None = None) -> None:
        """Episodes under way (all by default) will not go on."""
        if self._processor is not None:
            self._processor.drop(traj_ids)


def _as_batch(leaves: Mapping[Key, torch.Tensor], lead: Sequence[int]) -> TensorDict:
    """A copy: what is collected next is written over it."""
    steps = next(iter(leaves.values())).shape[1]
    tree = nested({key: leaf.reshape(*lead, steps, *leaf.shape[2:]).clone() for key, leaf in leaves.items()})
    return TensorDict(tree, batch_size=(*lead, steps))
