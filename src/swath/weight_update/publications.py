"""What each worker was sent last: its successor, should it need one, gets the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Publications:
    """Weights that were published, by number; those that some worker has last are kept."""

    def __init__(self) -> None:
        #: The one that is published now.
        self.number = 0
        #: Which one each worker was sent last, with its version.
        self._last: dict[int, tuple[int, int | None]] = {}
        #: Those that some worker has last and that are not published any more.
        self._kept: dict[int, Any] = {}

    def begin(self, workers: Sequence[int], published: Callable[[], Any]) -> None:
        """Before something is published for these: copy what the others would need if they started again."""
        needed = {number for worker, (number, _) in self._last.items() if worker not in workers}
        if self.number in needed:
            self._kept[self.number] = published()
        self._kept = {number: weights for number, weights in self._kept.items() if number in needed}

    def end(self, workers: Sequence[int], version: int | None) -> None:
        """It is published."""
        self.number += 1
        for worker in workers:
            self._last[worker] = self.number, version

    def last_of(self, worker: int) -> tuple[int, int | None] | None:
        """The number and the version of what a worker was sent last; None: nothing."""
        return self._last.get(worker)

    def kept(self, number: int) -> Any:
        return self._kept[number]
