"""A collector's own random stream, apart from the program's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class RandomStream:
    """The torch generator state that policies and random actions draw from.

    Until it is seeded, it is the program's own: ``torch.manual_seed`` works as everywhere. Once seeded, the
    collector draws from a stream of its own, which nothing else in the program advances.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None

    def seed(self, seed: int) -> None:
        # The first child of the seed's tree; envs use the seed itself.
        child = np.random.SeedSequence(seed).spawn(1)[0]
        generator = torch.Generator().manual_seed(int(child.generate_state(1, np.uint64)[0] >> 1))
        self._state = generator.get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self._state is None:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state() if self._state is None else self._state.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict["torch"].clone()
