"""Samplers: which frames of a buffer are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from swath.data.tracks import Window

#: What a sampler may say of a sample besides what is given out: the position of each frame.
POSITIONS = "_positions"


class Sampler:
    """Chooses frames of a window. Use one of its subclasses."""

    #: Whether frames are drawn one by one, so that one that was overwritten can be replaced by another.
    is_rowwise = True
    #: Whether samples are parts of passes over all frames.
    in_passes = False
    #: Whether a pass over the data is complete with the last sample, which ends an iteration.
    ran_out = False
    drop_last = False

    def sample(
        self, storage: Any, window: Window, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[Any, Any]]:
        """Slots, and what else is to be in the sample, by key."""
        raise NotImplementedError

    def can_sample(self, storage: Any, window: Window, batch_size: int) -> bool:
        """Whether there is enough for a batch, for whoever waits for it."""
        return window.total >= batch_size

    def remember(self, index: Any, positions: np.ndarray) -> None:
        """``index`` is given out, for frames at these positions; see ``POSITIONS``."""

    def mark(self) -> Any:
        """Where in a pass this is."""

    def go_back(self, mark: Any) -> None:
        """What was drawn since then was not given out: draw it again."""

    def mark_update(self, window: Window, slots: np.ndarray) -> None:
        """These frames were replaced by others, in place."""

    def empty(self) -> None:
        """The buffer was emptied."""

    def state_dict(self, window: Window) -> dict[str, Any]:
        """What there is to save; of frames, in the order of ``window``."""
        return {}

    def load_state_dict(self, state: dict[str, Any], window: Window) -> None:
        """``window`` has the same frames, in the same order."""


class RandomSampler(Sampler):
    """Uniformly, with replacement."""

    def sample(
        self, storage: Any, window: Window, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[Any, Any]]:
        return window.random_slots(rng.integers(window.total, size=batch_size)), {}


class SamplerWithoutReplacement(Sampler):
    """Every frame once before any comes again; anew when the buffer has grown.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: False for the order in which frames lie in the buffer.
    """

    in_passes = True
    # A sample that is partly overwritten is of a pass that is over, so it is drawn again as a whole.
    is_rowwise = False

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._order = np.zeros(0, dtype=np.int64)
        self._next = 0
        self._of: tuple[int, ...] = ()

    def sample(
        self, storage: Any, window: Window, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[Any, Any]]:
        if self.drop_last and window.total < batch_size:
            raise ValueError(f"drop_last: a batch of {batch_size} from {window.total} frames is never full")
        of = (window.total, *window.end.tolist())
        left = len(self._order) - self._next
        if of != self._of or not left or (self.drop_last and left < batch_size):
            self._of = of
            self._order = rng.permutation(window.total) if self.shuffle else np.arange(window.total)
            self._next = 0
        chosen = self._order[self._next : self._next + batch_size]
        self._next += len(chosen)
        left = len(self._order) - self._next
        self.ran_out = left < batch_size if self.drop_last else left == 0
        return window.slots(chosen), {}

    def mark(self) -> Any:
        return self._order, self._next, self._of

    def go_back(self, mark: Any) -> None:
        self._order, self._next, self._of = mark

    def empty(self) -> None:
        self._of = ()

    def state_dict(self, window: Window) -> dict[str, Any]:
        is_current = self._of == (window.total, *window.end.tolist())
        return {"order": self._order[self._next :] if is_current else np.zeros(0, dtype=np.int64)}

    def load_state_dict(self, state: dict[str, Any], window: Window) -> None:
        order = np.asarray(state["order"])
        if (
            order.ndim != 1
            or order.dtype.kind != "i"
            or (len(order) and not 0 <= order.min() <= order.max() < window.total)
        ):
            raise ValueError(f"what was saved is no order of {window.total:,} frames")
        self._order, self._next = order, 0
        self._of = (window.total, *window.end.tolist())
