"""Intake: the way of frames into a buffer, each env's behind its earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.episode_ends import marked_cuts
from swath.data.frames import check_fields, check_sizes
from swath.data.parts import BufferParts
from swath.data.sources import Sources
from swath.data.storages import TensorStorage
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field


class Intake:
    """Writes to the tracks of a buffer, and knows who wrote last and how much was ever written."""

    def __init__(self, parts: BufferParts, sources: Sources) -> None:
        self._parts = parts
        self._sources = sources
        #: One writer a track: threads of this process take turns. What a transform holds back and what is stored of the
        #: same frames are changed within one turn.
        self.lock = threading.RLock()
        #: Told of the slots whose frames were replaced by what a writer chose them for.
        self.were_replaced: Callable[[np.ndarray], None] = lambda slots: None
        #: Frames that were written and are counted by no track: of a buffer that was loaded, or laid out anew.
        self._written_before = 0
        #: The collector that wrote last, by a name of its own.
        self._last_writer: str | None = None
        #: How many tracks to make; see ``prepare_tracks``.
        self._planned_tracks = 1

    @property
    def write_count(self) -> int:
        """Frames that were ever written."""
        storage = self._parts.storage
        return self._written_before + (storage.tracks.write_count if storage.is_laid_out else 0)

    def count_from(self, write_count: int) -> None:
        """So many were written so far, whatever the tracks say."""
        self._written_before = 0
        self._written_before = write_count - self.write_count

    def is_nobodys(self) -> None:
        """Somebody else than a collector has written."""
        self._last_writer = None

    def write_rows(self, rows: Any, first_track: int | None = None) -> torch.Tensor:
        """Add frames ``[envs, steps]``; ``first_track``: which of the buffer's envs the first row is."""
        if not self._parts.transforms.changes_what_is_written:
            return self.store(rows, first_track)
        with self.lock:
            parts = self._parts.transforms.inverted_rows(rows, first_track)
            slots = [self.store(part, first) for first, part in parts if part.batch_size.numel()]
        if len(slots) == 1:
            return slots[0]
        return torch.cat([each.reshape(-1) for each in slots]) if slots else torch.zeros(0, dtype=torch.int64)

    def store(self, rows: Any, first_track: int | None = None) -> torch.Tensor:
        """As ``write_rows``, of what transforms have made of it. Slots, ``[envs, steps]``."""
        storage, writer = self._parts.storage, self._parts.writer
        if first_track is None and self._sources.writes_elsewhere:
            raise RuntimeError(
                "workers are writing to this buffer; extend it before start(), or within collector.pause()"
            )
        with self.lock:
            if not writer.appends:  # it chooses places by itself: nothing there follows on anything
                return self._place(rows)
            first = 0 if first_track is None else first_track
            if not storage.is_laid_out:
                storage.lay_out(rows, len(rows) if first_track is None else self._planned_tracks)
            if first_track is None and storage.tracks.num_tracks != len(rows):
                if len(rows) != 1:
                    raise ValueError(
                        f"this buffer has tracks for {storage.tracks.num_tracks} envs, and was given data of "
                        f"{len(rows)}"
                    )
                first = int(storage.tracks.committed.argmin())
            if first_track is not None and isinstance(rows, TensorDictBase):
                ids = rows.get(TRAJ_IDS, None)
                if ids is not None:
                    storage.end_others(range(first, first + len(rows)), ids[:, 0].tolist())
            slots = writer.write(storage, rows, first)
        return torch.from_numpy(slots)

    def _place(self, rows: Any) -> torch.Tensor:
        """Frames ``[envs, steps]``, where the writer wants them."""
        storage = self._parts.storage
        self._planned_tracks = 1
        if not storage.is_laid_out:
            storage.lay_out(rows, 1)
        before = len(storage)
        slots = self._parts.writer.write(storage, rows, 0)
        taken = np.unique(slots[(slots >= 0) & (slots < before)])
        if len(taken):  # samplers know by themselves of frames behind the others only
            self.were_replaced(taken)
        return torch.from_numpy(slots)

    def write_mixed(self, frames: TensorDictBase, env_index: np.ndarray) -> None:
        """Add frames ``[n]`` of many envs, of each in order; ``env_index`` says whose."""
        storage = self._parts.storage
        if not len(env_index):  # a batch that was stopped before its first frame
            return
        if self._parts.transforms.changes_what_is_written:  # what looks ahead needs each env's by themselves
            for env in np.unique(env_index).tolist():
                self.write_rows(frames[torch.from_numpy((env_index == env).nonzero()[0])].unsqueeze(0), env)
            return
        if not self._parts.writer.appends:
            self.store(frames.unsqueeze(0))
            return
        with self.lock:
            if not storage.is_laid_out:
                storage.lay_out(frames.unsqueeze(0), self._planned_tracks)
            ids = frames.get(TRAJ_IDS, None)
            if ids is not None:
                tracks, first = np.unique(env_index, return_index=True)
                storage.end_others(tracks.tolist(), ids[torch.from_numpy(first)].tolist())
            storage.write_mixed(marked_cuts(frames, env_index), env_index)

    # -- tracks ----------------------------------------------------------------------------------------------------

    def prepare_tracks(self, num_tracks: int) -> None:
        """For a collector of so many envs: give each a track of its own, and end what was under way in them."""
        storage = self._parts.storage
        self._planned_tracks = num_tracks
        if self._is_kept_by_env and storage.tracks.num_tracks != num_tracks:
            self._change_tracks(num_tracks)
            storage.end(range(num_tracks))  # what is held back follows on other frames then
        self._end(range(num_tracks))

    def share_tracks(self, fields: Sequence[Field], num_tracks: int) -> None:
        """As ``prepare_tracks``, in memory that a collector's workers can write to."""
        storage = self._parts.storage
        assert isinstance(storage, TensorStorage)
        if storage.memory is None:
            storage.lay_out_fields(fields, num_tracks, shared=True)
            storage.keep()
            return
        check_fields(storage.memory.layout.fields, fields)
        check_sizes(storage.memory.layout.sizes, ())
        self._planned_tracks = num_tracks
        if storage.memory.descriptor is None or storage.tracks.num_tracks != num_tracks:
            self._change_tracks(num_tracks, shared=True)
        storage.end(range(num_tracks))

    def _change_tracks(self, num_tracks: int, shared: bool = False) -> None:
        written = self.write_count
        self._parts.storage.change_tracks(num_tracks, shared)
        self.count_from(written)
        self._parts.sampler.empty()

    @property
    def _is_kept_by_env(self) -> bool:
        return self._parts.storage.is_laid_out and self._parts.writer.appends

    def _end(self, tracks: range) -> None:
        """Episodes under way in these tracks do not go on; where the last frames are held back, with those."""
        transforms = self._parts.transforms
        transforms.end(tracks)
        if self._is_kept_by_env:
            self._parts.storage.end([track for track in tracks if not transforms.holds(track)])

    def end_tracks(self, first_track: int, count: int, num_envs: int) -> None:
        """Whoever wrote to these will not go on with the trajectories that it was in.

        Not where ``num_envs`` envs share tracks: the last frame may be of another one, which goes on.
        """
        has_tracks = not self._is_kept_by_env or self._parts.storage.tracks.num_tracks >= num_envs
        if has_tracks:  # or none yet, but what is held back is kept by env
            with self.lock:
                self._end(range(first_track, first_track + count))

    def next_traj_id(self, writer: str) -> int:
        """From where on trajectory ids are free for a collector; 0 if it was the last that asked and nobody else wrote.

        An earlier program, or another collector, may have numbered its own from 0, too.
        """
        if writer == self._last_writer:
            return 0
        self._last_writer = writer
        first, storage = self._parts.transforms.next_traj_id, self._parts.storage
        if not storage.is_laid_out:
            return first
        window = storage.tracks.window()
        ids = storage.column(TRAJ_IDS, window.all_slots())
        return max(first, int(ids.max()) + 1) if len(ids) else first
