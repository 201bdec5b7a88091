"""Scheduler: what is still to be collected, what is under way, and who gets the next request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from swath.collectors.budget import Progress


class UnderWay(Protocol):
    """A request that was not completed."""

    @property
    def num_frames(self) -> int:
        """How many frames of it will be delivered."""
        ...

    @property
    def random_frames(self) -> int:
        """How many of them are random."""
        ...


R = TypeVar("R", bound=UnderWay)


class Scheduler(Generic[R]):
    """The books of a collector whose rollouts run elsewhere, whatever they run on and however they are told.

    A place is a worker or a node, by its number. Totals and random frames are exact over all places, since they are
    handed out with the requests, and taken back for what is discarded.

    Args:
        total_frames: None for ever.
        random_frames: how many of the first frames get random actions.
        progress: what was delivered; counted by the collector.
        requests_each: how many a place has at a time. With two it goes straight on with the second.
    """

    def __init__(
        self, total_frames: int | None, random_frames: int, progress: Progress, num_places: int, requests_each: int = 2
    ) -> None:
        self._total_frames = total_frames
        self._progress = progress
        self._requests_each = requests_each
        self._numbers = itertools.count(1)
        self.random_frames_left = random_frames
        #: By place, and number.
        self.pending: list[dict[int, R]] = [{} for _ in range(num_places)]

    def next_number(self) -> int:
        """Of a request; none has it twice."""
        return next(self._numbers)

    def add_places(self, count: int) -> None:
        self.pending += [{} for _ in range(count)]

    # -- what is left ----------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> list[R]:
        return [request for requests in self.pending for request in requests.values()]

    @property
    def numbers_under_way(self) -> list[tuple[int, int]]:
        """Of each request its place, and its number."""
        return [(place, number) for place, requests in enumerate(self.pending) for number in requests]

    @property
    def is_idle(self) -> bool:
        return not any(self.pending)

    def frames_left(self, waiting: int = 0) -> int | None:
        """That no request was made for; None: without end. ``waiting``: frames that came and were not delivered."""
        if self._total_frames is None:
            return None
        return self._total_frames - self._progress.frames - waiting - sum(each.num_frames for each in self.under_way)

    @property
    def random_under_way(self) -> int:
        return sum(each.random_frames for each in self.under_way)

    def take_random(self, most: int) -> int:
        """Random frames for a request."""
        taken = min(self.random_frames_left, most)
        self.random_frames_left -= taken
        return taken

    # -- requests --------------------------------------------------------------------------------------------------

    def turns(self, places: Iterable[int]) -> Iterator[int]:
        """Places that can have one more request: who has none comes first, so that at the beginning and at the end all
        have something to do."""
        places = list(places)
        for rank in range(self._requests_each):
            for place in places:
                if len(self.pending[place]) == rank:
                    yield place

    def begin(self, place: int, number: int, request: R) -> None:
        self.pending[place][number] = request

    def end(self, place: int, number: int) -> R | None:
        """It was completed; None if nobody waits for it any more."""
        return self.pending[place].pop(number, None)

    def take_back(self, place: int) -> list[R]:
        """Nothing will come of what this place had: its random frames are due again."""
        requests = list(self.pending[place].values())
        self.pending[place].clear()
        self.random_frames_left += sum(each.random_frames for each in requests)
        return requests
