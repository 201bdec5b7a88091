"""SliceSamplerWithoutReplacement: stretches of trajectories, of each once before any comes again."""

from __future__ import annotations

from typing import Any

import numpy as np

from swath.data.samplers import InPasses
from swath.data.slices import SliceSampler
from swath.data.tracks import Window


class SliceSamplerWithoutReplacement(InPasses, SliceSampler):
    """As ``SliceSampler``; one slice of every trajectory before any comes again, anew when the buffer has grown.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: False for trajectories in the order in which they lie in the buffer.
        kwargs: as ``SliceSampler`` takes them.
    """

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **kwargs: Any) -> None:
        self._begin_passes(drop_last, shuffle)
        self._total = 0  # trajectories, when the last slice was drawn
        super().__init__(**kwargs)

    def _trajectories(self, storage: Any, window: Window, at_least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # In an order that does not depend on when they were looked at: what is left of a pass can be saved.
        tracks, firsts, stops = super()._trajectories(storage, window, at_least)
        order = np.lexsort((firsts, tracks))
        return tracks[order], firsts[order], stops[order]

    def _choose(self, num_slices: int, total: int, window: Window, rng: np.random.Generator) -> np.ndarray:
        chosen = self._take(num_slices, total, window, rng, f"{num_slices} slices from {total} trajectories")
        self._total = total
        return chosen

    def state_dict(self, window: Window) -> dict[str, Any]:
        return {**self._pass.state_dict(self._total, window), "trajectories": self._total}

    def load_state_dict(self, state: dict[str, Any], window: Window) -> None:
        self._total = int(state["trajectories"])
        self._pass.load_state_dict(state, self._total, window, "trajectories")
