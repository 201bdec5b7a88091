"""Samplers: which frames of a buffer are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from swath.data.tracks import Window
from swath.hints import explains_unknown

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


class Pass:
    """Numbers, each once before any comes again; anew when there are others."""

    def __init__(self, drop_last: bool, shuffle: bool) -> None:
        self._drop_last = drop_last
        self._shuffle = shuffle
        self._order = np.zeros(0, dtype=np.int64)
        self._next = 0
        self._of: tuple[int, ...] = ()

    @staticmethod
    def _identity(total: int, window: Window) -> tuple[int, ...]:
        return (total, *window.end.tolist())

    def take(self, count: int, total: int, window: Window, rng: np.random.Generator) -> np.ndarray:
        """So many of ``range(total)``; less at the end, unless that is to be dropped."""
        of = self._identity(total, window)
        left = len(self._order) - self._next
        if of != self._of or not left or (self._drop_last and left < count):
            self._of = of
            self._order = rng.permutation(total) if self._shuffle else np.arange(total)
            self._next = 0
        chosen = self._order[self._next : self._next + count]
        self._next += len(chosen)
        return chosen

    def is_over(self, count: int) -> bool:
        """Whether there are no more; or not so many, where what is less is dropped."""
        left = len(self._order) - self._next
        return left < count if self._drop_last else left == 0

    def mark(self) -> Any:
        return self._order, self._next, self._of

    def go_back(self, mark: Any) -> None:
        self._order, self._next, self._of = mark

    def empty(self) -> None:
        self._of = ()

    def state_dict(self, total: int, window: Window) -> dict[str, Any]:
        is_current = self._of == self._identity(total, window)
        return {"order": self._order[self._next :] if is_current else np.zeros(0, dtype=np.int64)}

    def load_state_dict(self, state: dict[str, Any], total: int, window: Window, what: str) -> None:
        order = np.asarray(state["order"])
        if order.ndim != 1 or order.dtype.kind != "i" or (len(order) and not 0 <= order.min() <= order.max() < total):
            raise ValueError(f"what was saved is no order of {total:,} {what}")
        self._order, self._next = order, 0
        self._of = self._identity(total, window)


class InPasses(Sampler):
    """What samplers have of which each sample is a part of a pass over all that there is."""

    in_passes = True

    def _begin_passes(self, drop_last: bool, shuffle: bool) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._pass = Pass(drop_last, shuffle)

    def _take(self, count: int, total: int, window: Window, rng: np.random.Generator, shown: str) -> np.ndarray:
        """Numbers of the pass; ``shown`` is what so many of so many are."""
        if self.drop_last and total < count:
            raise ValueError(f"drop_last: a batch of {shown} is never full")
        chosen = self._pass.take(count, total, window, rng)
        self.ran_out = self._pass.is_over(count)
        return chosen

    def mark(self) -> Any:
        return self._pass.mark()

    def go_back(self, mark: Any) -> None:
        self._pass.go_back(mark)

    def empty(self) -> None:
        super().empty()
        self._pass.empty()


class SamplerWithoutReplacement(InPasses):
    """Every frame once before any comes again; anew when the buffer has grown.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: False for the order in which frames lie in the buffer.
    """

    # A sample that is partly overwritten is of a pass that is over, so it is drawn again as a whole.
    is_rowwise = False

    @explains_unknown
    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self._begin_passes(drop_last, shuffle)

    def sample(
        self, storage: Any, window: Window, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[Any, Any]]:
        shown = f"{batch_size} from {window.total} frames"
        return window.slots(self._take(batch_size, window.total, window, rng, shown)), {}

    def state_dict(self, window: Window) -> dict[str, Any]:
        return self._pass.state_dict(window.total, window)

    def load_state_dict(self, state: dict[str, Any], window: Window) -> None:
        self._pass.load_state_dict(state, window.total, window, "frames")
