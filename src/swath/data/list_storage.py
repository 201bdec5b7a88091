"""ListStorage: a replay buffer's entries in a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import is_tensor_collection

from swath.data.episode_ends import mark_frames
from swath.data.storage_base import Storage
from swath.data.tracks import NUM_COUNTERS, Tracks
from swath.hints import explains_unknown
from swath.keys import Key, as_key, show
from swath.rollout.delivery import TRAJ_IDS


class ListStorage(Storage):
    """Anything, in a list. Slow, and of one process; sampled entries are put together by ``collate_fn``."""

    @explains_unknown
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
        kept = [self.items[slot] for slot in window.all_slots()]
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
                self.items[slot] = _copied(frame)
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
        entries = (item.get(key, None) for item in self.take(slots) if is_tensor_collection(item))
        return np.array([int(entry.reshape(-1)[-1]) for entry in entries if entry is not None])

    def overwrite(self, slot: int, rows: Any) -> None:
        frame = rows[0][0]
        with self.tracks.editing(slot // self.tracks.length):
            self.items[slot] = _copied(frame)

    def _change(self, slots: np.ndarray, data: Any) -> None:
        for number, slot in enumerate(slots.tolist()):
            self.overwrite(slot, [data[number : number + 1]])

    def _change_keys(self, slots: np.ndarray, values: Mapping[Key, Any]) -> None:
        if not all(is_tensor_collection(item) for item in self.take(slots)):
            raise TypeError("only TensorDicts have keys; this ListStorage has other entries, too: rb[i] = entry")
        for key, value in values.items():
            if any(item.get(key, None) is None for item in self.take(slots)):
                raise KeyError(f"{show(key)} is not among the keys of all entries")
            if len(value) != len(slots):
                raise ValueError(f"{show(key)}: {len(value):,} for {len(slots):,} entries")
        for number, slot in enumerate(slots.tolist()):
            changed = self.items[slot].clone()
            for key, value in values.items():
                changed.set_(key, value[number])
            self.overwrite(slot, [[changed]])

    def get(self, index: Any) -> Any:
        found = super().get(index)
        if isinstance(found, list) and not isinstance(index, int):
            return [_copied(item) for item in found]
        return _copied(found)

    def take(self, slots: np.ndarray) -> list[Any]:
        return [self.items[slot] for slot in slots]


def _copied(item: Any) -> Any:
    return item.clone() if hasattr(item, "clone") else item
