"""Sources: the collectors that fill a replay buffer in the background."""

from __future__ import annotations

from typing import Any, Protocol


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

    def attach(self, source: Source) -> None:
        """A collector writes from now on."""
        if self.is_running:
            raise RuntimeError("another collector is writing to this buffer; give each its own")
        self._known = [source]

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
