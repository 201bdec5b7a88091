"""Drawing: how samples are taken out of a buffer while others write to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.collating import collate, set_by_row
from swath.data.parts import BufferParts
from swath.data.prefetch import Drawn, Prefetcher
from swath.data.samplers import POSITIONS
from swath.data.sources import Sources
from swath.data.storages import TensorStorage
from swath.data.tracks import Tracks, Window

#: How long to sleep before all that is being written over is looked at again.
_SECONDS_BETWEEN_LOOKS = 0.0002
_MOST_TRIES = 1000


class Drawing:
    """Draws samples, and what was overwritten meanwhile once more.

    Args:
        adds_index: whether samples say where they are from.
        prefetch: how many to prepare ahead, in a thread.
    """

    def __init__(
        self,
        parts: BufferParts,
        sources: Sources,
        *,
        collate_fn: Callable[[Any], Any] | None,
        pin_memory: bool,
        adds_index: bool,
        prefetch: int | None,
    ) -> None:
        self._parts = parts
        self._sources = sources
        self._collate = collate if collate_fn is None else collate_fn
        self._is_collated = collate_fn is not None
        self._pin_memory = pin_memory
        self._adds_index = adds_index
        self._prefetcher = Prefetcher(int(prefetch)) if prefetch else None
        #: A sampler has a state, and the thread that prefetches uses it, too.
        self.lock = threading.Lock()
        self.rng = np.random.default_rng(0)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Random numbers follow from this generator's next one, or from torch's own."""
        self.drop_prepared()
        self.rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))

    def can_draw(self, size: int) -> bool:
        """Whether there is enough for a sample."""
        storage = self._parts.storage
        if not storage.is_laid_out:
            return False
        with self.lock:
            return self._parts.sampler.can_sample(storage, storage.tracks.window(), size)

    def take(self, size: int, is_prepared: bool) -> Drawn:
        """A sample; ``is_prepared``: of the size that is drawn ahead, if any is."""
        if self._prefetcher is not None and is_prepared:
            return self._prefetcher.take(lambda: self._draw(size), self._is_current, self._undo)
        if self._parts.sampler.in_passes:
            self.drop_prepared()
        return self._draw(size)

    def drop_prepared(self) -> None:
        """What was drawn ahead is not given out."""
        if self._prefetcher is not None:
            self._prefetcher.drop(self._undo)

    def _is_current(self, drawn: Drawn) -> bool:
        """Whether a sample that was prepared is one that could be drawn now."""
        storage = self._parts.storage
        if not storage.is_laid_out or storage.tracks is not drawn.tracks:
            return False
        if drawn.tracks.unchanged(drawn.window):
            return True
        return not self._parts.sampler.in_passes and bool(drawn.tracks.intact(drawn.window, drawn.slots).all())

    def _mark(self) -> Any:
        return (self._parts.sampler.mark(), self.rng.bit_generator.state) if self._parts.sampler.in_passes else None

    def _go_back(self, mark: Any) -> None:
        if mark is not None:
            with self.lock:
                of_sampler, self.rng.bit_generator.state = mark
                self._parts.sampler.go_back(of_sampler)

    def _undo(self, drawn: Drawn) -> None:
        self._go_back(drawn.before)

    def _draw(self, size: int) -> Drawn:
        storage, sampler = self._parts.storage, self._parts.sampler
        if not storage.is_laid_out:
            raise self._is_empty()
        tracks = storage.tracks
        window = self._readable(tracks)
        for _ in range(_MOST_TRIES):
            with self.lock:
                before = self._mark()
                sampler.ran_out = False
                slots, info = sampler.sample(storage, window, size, self.rng)
                ends_pass = sampler.ran_out
            data = storage.take(slots)
            intact = tracks.intact(window, slots)
            if intact.all():
                break
            window = self._readable(tracks)
            if sampler.is_rowwise and isinstance(storage, TensorStorage):
                window, slots, info, data = self._replace(window, slots, info, data, intact)
                break
            self._go_back(before)
        else:
            raise RuntimeError("frames are overwritten faster than they can be read; use a larger storage")
        try:
            data, info = self._finish(slots, info, data)
        except BaseException:
            self._go_back(before)  # what nobody got is still to come in this pass
            raise
        return Drawn(data, info, slots, tracks, window, ends_pass, before)

    def _is_empty(self) -> RuntimeError:
        self._sources.raise_failure()
        return RuntimeError("the buffer is empty; sample(wait=True) waits for a collector that was started to fill it")

    def _readable(self, tracks: Tracks) -> Window:
        """What can be read; for a moment, while all of it is written over, there may be nothing."""
        for _ in range(_MOST_TRIES):
            window = tracks.window()
            if window.total:
                return window
            if not tracks.committed.any():
                raise self._is_empty()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        raise RuntimeError("all frames of the buffer are being overwritten, and nobody finishes it; write it anew")

    def _replace(
        self, window: Window, slots: np.ndarray, info: dict[Any, Any], data: Any, intact: np.ndarray
    ) -> tuple[Window, np.ndarray, dict[Any, Any], Any]:
        """Draw others for frames that were overwritten while they were copied."""
        storage, sampler = self._parts.storage, self._parts.sampler
        for _ in range(_MOST_TRIES):
            bad = (~intact).nonzero()[0]
            with self.lock:
                others, their_info = sampler.sample(storage, window, len(bad), self.rng)
            taken = storage.take(others)
            good = storage.tracks.intact(window, others)
            where, bad = bad[: len(others)][good], torch.from_numpy(bad[: len(others)][good])
            slots[where] = others[good]
            data[bad] = taken[torch.from_numpy(good)]
            for key, values in info.items():
                values[bad if isinstance(values, torch.Tensor) else where] = their_info[key][good]
            intact[where] = True
            if intact.all():
                return window, slots, info, data
            window = self._readable(storage.tracks)
        raise RuntimeError("frames are overwritten faster than they can be read; use a larger storage")

    def _finish(self, slots: np.ndarray, info: dict[Any, Any], data: Any) -> tuple[Any, dict[str, Any]]:
        sampler, index = self._parts.sampler, torch.from_numpy(slots)
        positions = info.pop(POSITIONS, None)
        if positions is not None:
            sampler.remember(index, positions)
        if isinstance(data, list) or self._is_collated:
            data = self._collate(data)
        marks = [entry for entry in info.values() if hasattr(entry, "apply") and not isinstance(entry, torch.Tensor)]
        info = {key: entry for key, entry in info.items() if isinstance(key, str)}
        for mark in marks:
            mark.apply(data)
        if self._adds_index and isinstance(data, TensorDictBase):
            for key, entry in {"index": index, **info}.items():
                set_by_row(data, key, entry)
            if positions is not None:
                sampler.remember(data.get("index"), positions)
        if self._pin_memory and isinstance(data, (TensorDictBase, torch.Tensor)):
            data = data.pin_memory()
        return self._parts.transforms.apply(data), {"index": index, **info}

    def look_up(self, index: Any) -> Any:
        """Frames by their index, as samples have it; or a slice of all, env by env."""
        found = self._parts.storage.get(index)
        return self._collate(found) if isinstance(found, list) and not isinstance(index, int) else found
