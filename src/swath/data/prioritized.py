"""PrioritizedSampler: frames in proportion to what is still to be learned from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from swath.copying import NotCopied
from swath.data.priority_tree import PriorityTree
from swath.data.samplers import POSITIONS, Sampler
from swath.data.tracks import Window
from swath.errors import require_one_of
from swath.hints import explains_unknown

_REDUCTIONS = {"max": np.max, "min": np.min, "mean": np.mean, "median": np.median}
_MOST_TRIES = 100


class PrioritizedSampler(NotCopied, Sampler):
    """Draws a frame with probability ``p / sum of all p``, where ``p = (priority + eps) ** alpha``.

    A sample has ``priority_weight``: ``(p / smallest p) ** -beta``. New frames have the highest priority so far. The
    learner's own process has the priorities: workers may write meanwhile, and nothing waits for anything. A priority
    that is set with a sample's own ``index`` is not given to a frame that has overwritten the one that was sampled.

    Args:
        max_capacity: of the storage.
        alpha, beta: how much priorities matter, and how much of that the weights take back.
        reduction: of a priority with more than one entry a frame: "max", "min", "mean" or "median".
        max_priority_within_buffer: new frames get the highest priority that is in the buffer now.
    """

    _owns = "the priorities of a buffer's frames, which are of the process that samples"

    @explains_unknown
    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
    ) -> None:
        if alpha < 0 or beta < 0:
            raise ValueError(f"alpha and beta must not be negative, got {alpha} and {beta}")
        require_one_of("reduction", reduction, _REDUCTIONS)
        self.max_capacity = int(max_capacity)
        self.alpha, self.beta, self.eps = float(alpha), float(beta), float(eps)
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self._max_priority = 1.0
        self._drawn = WeakIdKeyDictionary()
        self.empty()

    def empty(self) -> None:
        self._tree: PriorityTree | None = None

    def _begin(self, window: Window) -> None:
        capacity = len(window.first) * window.length
        if capacity > self.max_capacity:
            raise ValueError(
                f"PrioritizedSampler has max_capacity={self.max_capacity:,}, and the storage room for {capacity:,} "
                "frames"
            )
        self._tree = PriorityTree(capacity)
        self._synced = np.zeros_like(window.end)
        #: Of the frame that a slot's priority is of.
        self._positions = np.full(capacity, -1)
        #: How often a slot's frame was replaced in place.
        self._replaced = np.zeros(capacity, dtype=np.int64)

    def _sync(self, window: Window) -> PriorityTree:
        """Give what was written since the last time its priority."""
        if self._tree is None or len(self._positions) != len(window.first) * window.length:
            self._begin(window)
        tree = self._tree
        assert tree is not None
        if (window.end < self._synced).any():  # emptied
            self._begin(window)
            return self._sync(window)
        behind = (window.end > self._synced).nonzero()[0]
        if len(behind):
            slots = []
            for track in behind.tolist():
                start = max(int(self._synced[track]), int(window.end[track]) - window.length)
                new = np.arange(start, int(window.end[track]))
                here = track * window.length + new % window.length
                self._positions[here] = new
                slots.append(here)
            tree.set(np.concatenate(slots), self._as_stored(self._priority_of_new()))
            self._synced = window.end.copy()
        return tree

    def _as_stored(self, priority: Any) -> Any:
        return (priority + self.eps) ** self.alpha

    def _priority_of_new(self) -> float:
        if self.max_priority_within_buffer and self._tree is not None and self.alpha:
            highest = float(self._tree.leaves.max())
            return highest ** (1 / self.alpha) - self.eps if highest else 1.0
        return self._max_priority

    @property
    def default_priority(self) -> float:
        return self._as_stored(self._priority_of_new())

    def sample(
        self, storage: Any, window: Window, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[Any, Any]]:
        tree = self._sync(window)
        total = tree.total
        slots = tree.find(rng.random(batch_size) * total)
        positions = window.positions(slots)
        for _ in range(_MOST_TRIES):
            # Being overwritten now; or a rounding error away from the end of all priorities.
            bad = ((positions < 0) | (tree.leaves[slots] == 0)).nonzero()[0]
            if not len(bad):
                break
            slots[bad] = tree.find(rng.random(len(bad)) * total)
            positions = window.positions(slots)
        else:
            raise RuntimeError("no frame with a priority of more than 0 can be read")
        weights = (tree.leaves[slots] / tree.smallest) ** -self.beta
        drawn = np.stack([positions, self._replaced[slots]], 1)
        return slots, {"priority_weight": torch.from_numpy(weights).to(self.dtype), POSITIONS: drawn}

    def remember(self, index: torch.Tensor, positions: np.ndarray) -> None:
        """Which frames an index is of, as long as it lives: what is in its slots may be another one by then."""
        self._drawn[index] = positions

    def update_priority(self, window: Window, index: Any, priority: Any) -> None:
        """Set the priorities of frames by their slots."""
        slots = np.asarray(index, dtype=np.int64)
        while slots.ndim > 1 and (slots == slots[..., :1]).all():  # the same for all steps of a row
            slots = slots[..., 0]
        slots = slots.reshape(-1)
        values = np.asarray(priority.detach().cpu() if isinstance(priority, torch.Tensor) else priority, dtype=float)
        if values.ndim > 1 or (values.ndim == 1 and values.size not in (1, slots.size)):
            values = _REDUCTIONS[self.reduction](values.reshape(len(slots), -1), axis=1)
        values = np.broadcast_to(values.reshape(-1), slots.shape)
        if (values < 0).any() or not np.isfinite(values).all():
            raise ValueError("priorities must be finite and not negative")
        tree = self._sync(window)
        if len(slots) and (slots.min() < 0 or slots.max() >= len(self._positions)):
            raise IndexError(f"index {slots.max()} of a buffer with room for {len(self._positions):,} frames")
        if not len(slots):
            return
        self._max_priority = max(self._max_priority, float(values.max()))
        now = self._positions[slots]
        valid = now >= 0
        if isinstance(index, torch.Tensor) and index in self._drawn:
            valid &= (self._drawn[index] == np.stack([now, self._replaced[slots]], 1)).all(1)
        tree.set(slots[valid], self._as_stored(values[valid]))

    def mark_update(self, window: Window, slots: np.ndarray) -> None:
        """They are new frames: with the highest priority, and none of what was drawn before is of them."""
        tree = self._sync(window)
        tree.set(slots, self._as_stored(self._priority_of_new()))
        self._replaced[slots] += 1

    def state_dict(self, window: Window) -> dict[str, Any]:
        tree = self._sync(window)
        return {
            "max_priority": self._max_priority,
            "alpha": self.alpha,
            "beta": self.beta,
            "priorities": tree.leaves[window.all_slots()],
        }

    def load_state_dict(self, state: dict[str, Any], window: Window) -> None:
        priorities = np.asarray(state["priorities"], dtype=float)
        highest, alpha, beta = (float(state[name]) for name in ("max_priority", "alpha", "beta"))
        numbers = np.append(priorities, (highest, alpha, beta))
        if priorities.ndim != 1 or not np.isfinite(numbers).all() or numbers.min() < 0:
            raise ValueError("what was saved are no priorities: they must be finite and not negative")
        self._max_priority, self.alpha, self.beta = highest, alpha, beta
        self.empty()
        if len(priorities) == window.total and window.total:
            self._sync(window).set(window.all_slots(), priorities)
