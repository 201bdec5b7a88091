"""SliceSampler: stretches of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swath.data.multi_step import NONTERMINAL, STEPS
from swath.data.samplers import Sampler
from swath.data.sequences import MASK
from swath.data.tracks import Window
from swath.hints import explains_unknown
from swath.keys import Key, as_key, show
from swath.rollout.delivery import TRAJ_IDS

_FIRST_ROOM = 1024


class TrajectoryTable:
    """Which stretches of which tracks are one trajectory each; kept up to date by looking at new frames only.

    A trajectory ends where its id changes, or where a frame is marked as an end; never in another track.
    """

    def __init__(self, num_tracks: int) -> None:
        #: Rows: track, first position, position behind the last.
        self._rows = np.zeros((3, _FIRST_ROOM), dtype=np.int64)
        self._count = 0
        #: Of each track: up to which position it is in here, which row may go on, and that one's id.
        self._synced = np.zeros(num_tracks, dtype=np.int64)
        self._open = np.full(num_tracks, -1)
        self._ids: list[Any] = [None] * num_tracks

    def is_of_the_past(self, window: Window) -> bool:
        return len(window.end) != len(self._synced) or bool((window.end < self._synced).any())

    def sync(self, window: Window, ids: np.ndarray | None, ends: Sequence[np.ndarray]) -> bool:
        """Take in what was written since the last time; whether there was something."""
        behind = (window.end > self._synced).nonzero()[0].tolist()
        for track in behind:
            self._add(track, window, ids, ends)
        if self._count > 2 * _FIRST_ROOM:
            self._forget(window)
        return bool(behind)

    def _add(self, track: int, window: Window, ids: np.ndarray | None, ends: Sequence[np.ndarray]) -> None:
        start, stop = int(self._synced[track]), int(window.end[track])
        if start < window.first[track]:  # frames were overwritten that were never seen here
            start = int(window.first[track])
            self._open[track] = -1
        slots = track * window.length + np.arange(start, stop) % window.length
        # ``begins[i]``: a new trajectory at ``start + i``.
        begins = np.zeros(len(slots), dtype=bool)
        if ids is not None:
            own = ids[slots]
            begins[1:] = own[1:] != own[:-1]
            begins[0] = self._open[track] == -1 or own[0] != self._ids[track]
            self._ids[track] = own[-1]
        else:
            begins[0] = self._open[track] == -1
        is_over = False
        if ends:
            over = np.logical_or.reduce([column[slots] for column in ends])
            begins[1:] |= over[:-1]
            is_over = bool(over[-1])
        firsts = start + begins.nonzero()[0]
        if self._open[track] != -1:
            self._rows[2, self._open[track]] = firsts[0] if len(firsts) else stop
        if len(firsts):
            self._append(track, firsts, np.append(firsts[1:], stop))
            self._open[track] = self._count - 1
        if is_over:
            self._open[track] = -1
        self._synced[track] = stop

    def _append(self, track: int, firsts: np.ndarray, stops: np.ndarray) -> None:
        count = self._count + len(firsts)
        if count > self._rows.shape[1]:
            grown = np.zeros((3, 2 * count), dtype=np.int64)
            grown[:, : self._count] = self._rows[:, : self._count]
            self._rows = grown
        self._rows[:, self._count : count] = np.stack([np.full(len(firsts), track), firsts, stops])
        self._count = count

    def _forget(self, window: Window) -> None:
        """Leave out what was overwritten, once it is half of all."""
        tracks, _, stops = self._rows[:, : self._count]
        alive = stops > window.first[tracks]
        if 2 * alive.sum() > self._count:
            return
        numbers = np.cumsum(alive) - 1
        going_on = self._open >= 0
        self._open[going_on] = np.where(alive[self._open[going_on]], numbers[self._open[going_on]], -1)
        kept = self._rows[:, : self._count][:, alive]
        self._count = kept.shape[1]
        self._rows[:, : self._count] = kept

    def readable(self, window: Window, at_least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Track, first and stop of all trajectories of which so many frames can be read."""
        tracks, firsts, stops = self._rows[:, : self._count]
        firsts = np.maximum(firsts, window.first[tracks])
        stops = np.minimum(stops, window.end[tracks])
        chosen = stops - firsts >= at_least
        return tracks[chosen], firsts[chosen], stops[chosen]


class SliceSampler(Sampler):
    """Draws a trajectory uniformly, then a stretch of it; ``[num_slices * slice_len]`` in a row.

    No slice has frames of two trajectories. The last frame of each is marked ``truncated`` and ``done`` in the sample;
    ``is_init``, where it is stored, is True in the first.

    Args:
        num_slices, slice_len: one of them; the other follows from the batch size.
        traj_key: the key that tells trajectories apart; by default ``("collector", "traj_ids")``, if it is there.
        end_key: the key that says where they end; ``end_keys``: several, any of which says so. With ``traj_key``, too:
            where that is not in the buffer.
        init_key: the key that is set to True in the first frame of a slice, where it is stored.
        strict_length: False takes trajectories that are shorter than a slice, as a whole.
        pad_output: with ``strict_length=False`` or ``span``, repeat the last frame of shorter slices up to the length
            of a slice; ``("collector", "mask")`` in the sample is False for what is repeated.
        span: let slices begin before a trajectory, or end behind it, and have only what lies inside: as much as can
            be (True), or so many frames less than a slice. Then the first and last frames are drawn as often as those
            between. A pair for the two ends.
    """

    is_rowwise = False

    @explains_unknown
    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool = False,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise TypeError("SliceSampler needs num_slices or slice_len" + (", not both" if num_slices else ""))
        if ends is not None or trajectories is not None:
            raise TypeError("ends= and trajectories= are not needed: trajectories are found in what is stored")
        self.span = span if isinstance(span, tuple) else (span, span)
        self.num_slices, self.slice_len = num_slices, slice_len
        for name, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if end_key is not None and end_keys is not None:
            raise TypeError("give end_key, or end_keys of which any is an end; not both")
        if pad_output and strict_length and not any(self.span):
            raise ValueError(
                "pad_output=True is for slices that are shorter than others: give strict_length=False, or span, too"
            )
        self.end_keys: tuple[Key, ...] = tuple(map(as_key, end_keys or (end_key or ("next", "done"),)))
        self.traj_key: Key | None = None if traj_key is None else as_key(traj_key)
        self._given_end = end_key is not None or end_keys is not None
        self.init_key: Key | None = None if init_key is None else as_key(init_key)
        self.pad_output = pad_output
        self.truncated_key: Key | None = None if truncated_key is None else as_key(truncated_key)
        self.strict_length = strict_length
        self.empty()

    @property
    def end_key(self) -> Key:
        """The first of the keys that say where trajectories end."""
        return self.end_keys[0]

    def empty(self) -> None:
        self._table: TrajectoryTable | None = None
        self._edits = np.zeros(0, dtype=np.int64)
        self._found: tuple[Any, ...] | None = None

    def _shape(self, batch_size: int) -> tuple[int, int]:
        known = self.num_slices or self.slice_len
        assert known is not None
        other, rest = divmod(batch_size, known)
        if rest or not other:
            name = "num_slices" if self.num_slices else "slice_len"
            raise RuntimeError(f"a batch of {batch_size} frames is not a multiple of {name}={known}")
        return (known, other) if self.num_slices else (other, known)

    def _columns(self, storage: Any) -> tuple[np.ndarray | None, list[np.ndarray]]:
        """Trajectory ids, and flags of which any is an end, by slot."""
        leaves = getattr(storage, "leaves", None)
        if leaves is None:
            raise TypeError(f"SliceSampler needs a tensor storage, not {type(storage).__name__}")
        key = self.traj_key
        if key is None and not self._given_end:
            key = next((known for known in (TRAJ_IDS, ("episode",)) if known in leaves), None)
        if key is not None and key not in leaves:
            if not self._given_end or not any(end in leaves for end in self.end_keys):
                raise KeyError(f"SliceSampler: there is no {show(key)} in the buffer")
            key = None
        ids = None if key is None else _column(leaves[key])
        ends = [_column(leaves[key]) for key in self.end_keys if key in leaves]
        if all(key[0] == "next" for key in self.end_keys) and {STEPS, NONTERMINAL} <= leaves.keys():
            # n-step transitions: flags in next are those of several steps ahead.
            ends = [] if ids is not None else [_column(~leaves[NONTERMINAL])]
        if ids is None and not ends:
            raise KeyError(
                f"SliceSampler finds no trajectories: there is neither {show(TRAJ_IDS)} nor "
                f"{' or '.join(map(show, self.end_keys))} in the buffer; give traj_key or end_key"
            )
        return ids, ends

    def _trajectories(self, storage: Any, window: Window, at_least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table = self._table
        if table is None or table.is_of_the_past(window) or not np.array_equal(self._edits, window.edits):
            self._table = table = TrajectoryTable(len(window.end))
            self._edits, self._found = window.edits, None
        moved = table.sync(window, *self._columns(storage))
        key = at_least, window.first.tobytes()
        if moved or self._found is None or self._found[0] != key:
            self._found = key, table.readable(window, at_least)
        return self._found[1]

    def can_sample(self, storage: Any, window: Window, batch_size: int) -> bool:
        if not window.total:
            return False
        _, slice_len = self._shape(batch_size)
        return len(self._trajectories(storage, window, slice_len if self.strict_length else 1)[0]) > 0

    def _choose(self, num_slices: int, total: int, window: Window, rng: np.random.Generator) -> np.ndarray:
        """Which of so many trajectories slices are drawn from."""
        return rng.integers(total, size=num_slices)

    def _stretches(
        self, available: np.ndarray, slice_len: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where a slice begins in each of these trajectories, and how long it is."""
        lengths = np.minimum(available, slice_len)
        if any(each >= slice_len for each in self.span if each is not True):
            raise ValueError(f"span={self.span}: of a slice of {slice_len} frames at least one must be inside")
        before, behind = (lengths - 1 if each is True else np.minimum(each, lengths - 1) for each in self.span)
        starts = rng.integers(-before, available - lengths + behind + 1)
        stops = np.minimum(starts + lengths, available)
        starts = np.maximum(starts, 0)
        return starts, stops - starts

    def sample(
        self, storage: Any, window: Window, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[Any, Any]]:
        num_slices, slice_len = self._shape(batch_size)
        tracks, firsts, stops = self._trajectories(storage, window, slice_len if self.strict_length else 1)
        if not len(tracks):
            raise RuntimeError(
                f"no trajectory in the buffer has {slice_len} frames; lower slice_len, or give strict_length=False"
            )
        chosen = self._choose(num_slices, len(tracks), window, rng)
        num_slices = len(chosen)
        starts, lengths = self._stretches(stops[chosen] - firsts[chosen], slice_len, rng)
        starts += firsts[chosen]
        mask = None
        if self.pad_output:
            steps = np.arange(slice_len)
            mask = (steps < lengths[:, None]).reshape(-1)
            positions = (starts[:, None] + np.minimum(steps, lengths[:, None] - 1)).reshape(-1)
            of_slice = np.repeat(tracks[chosen], slice_len)
            first = np.arange(num_slices) * slice_len
            last = first + lengths - 1
        elif (lengths == slice_len).all():
            positions = (starts[:, None] + np.arange(slice_len)).reshape(-1)
            of_slice = np.repeat(tracks[chosen], slice_len)
            first = np.arange(num_slices) * slice_len
            last = first + slice_len - 1
        else:
            behind = np.cumsum(lengths)
            positions = np.arange(behind[-1]) + np.repeat(starts - (behind - lengths), lengths)
            of_slice = np.repeat(tracks[chosen], lengths)
            first, last = behind - lengths, behind - 1
        slots = of_slice * window.length + positions % window.length
        return slots, {_Marks: _Marks(first, last, mask, self.truncated_key, self.init_key)}


def _column(leaf: torch.Tensor) -> np.ndarray:
    """The first number of each frame; a view, where it can be one."""
    return leaf.reshape(len(leaf), -1)[:, 0].cpu().numpy()


class _Marks:
    """Where slices begin and end in a sample."""

    def __init__(
        self,
        first: np.ndarray,
        last: np.ndarray,
        mask: np.ndarray | None,
        truncated_key: Key | None,
        init_key: Key | None,
    ) -> None:
        self._first, self._last = torch.from_numpy(first), torch.from_numpy(last)
        self._mask = None if mask is None else torch.from_numpy(mask)
        self._truncated_key, self._init_key = truncated_key, init_key

    def apply(self, sample: Any) -> None:
        """To a sample, which nobody else has."""
        if self._truncated_key is not None:
            done_key = (*self._truncated_key[:-1], "done")
            done, truncated = sample.get(done_key, None), sample.get(self._truncated_key, None)
            if truncated is None:
                truncated = torch.zeros((*sample.batch_size, 1), dtype=torch.bool, device=sample.device)
                sample.set(self._truncated_key, truncated)
            if done is not None:
                done[self._last] = True
            truncated[self._last] = True
        is_init = None if self._init_key is None else sample.get(self._init_key, None)
        if is_init is not None:
            is_init[self._first] = True
        if self._mask is not None:
            if is_init is not None:
                is_init[~self._mask] = False
            sample.set(MASK, self._mask.to(sample.device) if sample.device is not None else self._mask)
