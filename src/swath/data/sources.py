"""Sources: the collectors that fill a replay buffer in the background."""

from __future__ import annotations

from typing import Any, Protocol

from swath.warn import warn_user

#: Who has waited so long for frames is told that nobody was started to bring any.
_PATIENCE_S = 10.0


class Source(Protocol):
    """A collector that was started, as the buffer sees it."""

    @property
    def writes_elsewhere(self) -> bool:
        """Whether its workers write to the buffer's memory by themselves."""
        ...

    def is_running(self) -> bool: ...

    def raise_failure(self) -> None:
        """Raise what has ended it, if something has."""
        ...


class Sources:
    """Who fills a buffer: one collector at a time."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._has_warned = False

    def attach(self, source: Source) -> None:
        """A collector writes from now on."""
        if self.is_running:
            raise RuntimeError("another collector is writing to this buffer; give each its own")
        self._known = [source]

    def warn_who_waits(self, waited_s: float) -> None:
        """Frames may come from another thread; but most who wait for long have forgotten to start somebody."""
        if self._known or self._has_warned or waited_s < _PATIENCE_S:
            return
        self._has_warned = True
        warn_user(
            f"sample(wait=True) has been waiting for {waited_s:.0f} s, and no collector was started to fill this "
            "buffer: give it to one as replay_buffer=, and call that one's start()"
        )

    def __bool__(self) -> bool:
        """Whether there ever was one."""
        return bool(self._known)

    @property
    def is_running(self) -> bool:
        return any(source.is_running() for source in self._known)

    @property
    def writes_elsewhere(self) -> bool:
        """Whether tracks are workers' own, running or paused."""
        return any(source.writes_elsewhere for source in self._known)

    @property
    def is_writing_elsewhere(self) -> bool:
        return any(source.writes_elsewhere and source.is_running() for source in self._known)

    def raise_failure(self) -> None:
        for source in self._known:
            source.raise_failure()
