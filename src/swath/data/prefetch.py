"""Samples that are prepared before they are asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from swath.data.tracks import Tracks, Window


@dataclass(slots=True)
class Drawn:
    """A sample, and what is to be known of it until it is given out."""

    data: Any
    info: dict[str, Any]
    slots: np.ndarray
    #: The frames that it was drawn from.
    tracks: Tracks
    window: Window
    #: Whether a pass over the data ended with it.
    ends_pass: bool
    #: What drawing goes back to if this one is not given out; see ``Sampler.mark``.
    before: Any


Undo = Callable[[Drawn], None]


class Prefetcher:
    """Draws up to ``count`` samples ahead, in a thread; they are given out in the order in which they were drawn.

    It does not draw beyond the end of a pass, since what the next one consists of is not known yet. How many were drawn
    when some are dropped does not depend on how fast it is: the random numbers that follow are the same every time.
    """

    def __init__(self, count: int) -> None:
        # By twos, where they come out even: to ask the thread costs a third of drawing.
        self._at_once = 1 if count % 2 else 2
        self._most = count // self._at_once
        # One thread: with several, who draws first would be up to chance.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="swath-prefetch")
        #: What was asked for. Samples are taken out of the first of them until it has none.
        self._prepared: deque[Future[deque[Drawn]]] = deque()
        #: Whether nothing more is to be drawn: a pass is over, or it failed, which whoever draws it again gets to know.
        self._is_at_end = False
        self._giving = threading.Lock()

    def _prepare(self, draw: Callable[[], Drawn]) -> deque[Drawn]:
        prepared: deque[Drawn] = deque()
        try:
            while len(prepared) < self._at_once and not self._is_at_end:
                prepared.append(draw())
                self._is_at_end = prepared[-1].ends_pass
        except BaseException:
            self._is_at_end = True
        return prepared

    def take(self, draw: Callable[[], Drawn], is_current: Callable[[Drawn], bool], undo: Undo) -> Drawn:
        """The next sample. If the buffer has changed so that it is not ``is_current`` any more, it is drawn again."""
        with self._giving:
            drawn = self._first()
            if drawn is None or not is_current(drawn):
                self._drop(drawn, undo)
                drawn = draw()
                self._is_at_end = drawn.ends_pass
            while len(self._prepared) < self._most:
                self._prepared.append(self._executor.submit(self._prepare, draw))
            return drawn

    def drop(self, undo: Undo) -> None:
        """Nothing that was prepared is given out: ``undo`` goes back to before the first of it."""
        with self._giving:
            self._drop(None, undo)

    def _drop(self, first: Drawn | None, undo: Undo) -> None:
        while (drawn := self._first()) is not None:
            first = drawn if first is None else first
        if first is not None:
            undo(first)
        self._is_at_end = False

    def _first(self) -> Drawn | None:
        """None where there was nothing to prepare, or it could not be."""
        while self._prepared:
            prepared = self._prepared[0].result()
            if prepared:
                drawn = prepared.popleft()
                if not prepared:
                    self._prepared.popleft()
                return drawn
            self._prepared.popleft()  # not before: an interrupt while waiting must lose nothing
        return None
