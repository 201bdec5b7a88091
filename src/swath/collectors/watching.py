"""``swath.watch``: shows a collector while it collects."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TextIO

from swath.collectors.base import BaseCollector
from swath.collectors.numbers import positive_number
from swath.insight.reading import Reading
from swath.insight.watching import Watcher, outlet_for


def watch(collector: BaseCollector, every_s: float | None = None, file: TextIO | None = None) -> Watch:
    """Show a collector while it collects: how far it is and how fast, episodes, workers, what limits it, what to try.

    Iterate over what is returned, use it as a context, or leave it alone (where the collector runs in the background):

    >>> import io, swath
    >>> collector = swath.Collector("CartPole-v1", frames_per_batch=100, total_frames=300)
    >>> file = io.StringIO()
    >>> for batch in swath.watch(collector, file=file):
    ...     pass
    >>> first, *_, last = file.getvalue().splitlines()
    >>> first
    'swath: watching Collector · GymEnv(CartPole-v1) · 1 env'
    >>> last[:31]
    'swath: 300 / 300 frames (100 %)'

    In a terminal these are lines that stay in place, below what the program prints; in a notebook an output that is
    updated; elsewhere (in a log) a line now and then. It ends with the loop, the block, ``stop()``, or the collector.

    Args:
        collector: any. It is only read, by a thread, and never waits for that.
        every_s: so often it is read and shown (default: every 0.5 s; in a log after 2 s, later less and less often).
        file: where it is shown (default: stderr, or the notebook).
    """
    _require_collector(collector)
    if every_s is not None:
        every_s = positive_number("every_s", every_s)
    if file is not None and not callable(getattr(file, "write", None)):
        raise TypeError(f"file must be an open text file, such as sys.stdout, got {file!r}; open(path, 'w') opens one")
    return Watch(collector, every_s, file)


class Watch:
    """What ``swath.watch`` returns: shows the collector from now on. Iterates over its batches."""

    def __init__(self, collector: BaseCollector, every_s: float | None, file: TextIO | None) -> None:
        self._collector: BaseCollector | None = collector
        self._every_s, self._file = every_s, file
        self._watcher = self._started()

    def _started(self) -> Watcher:
        collector = self._require_collector()
        reference = weakref.ref(collector)

        def read() -> Reading | None:
            collector = reference()
            return None if collector is None else collector.reading()

        watcher = Watcher(read, outlet_for(self._file, reference, self._every_s))
        collector.when_closed(watcher)
        watcher.start()
        return watcher

    def _require_collector(self) -> BaseCollector:
        if self._collector is None:
            raise RuntimeError("this watch is over: swath.watch(collector) begins another one")
        return self._collector

    def __iter__(self) -> Iterator[Any]:
        """The collector's batches. A ``break`` leaves both open, to go on later."""
        collector = self._require_collector()
        if not self._watcher.is_running:
            self._watcher = self._started()
        try:
            yield from collector
        finally:
            self._watcher.stop()

    def stop(self) -> None:
        """Show how it stands now, for the last time; harmless when called again. The collector goes on."""
        self._watcher.stop()
        self._collector = None

    def __enter__(self) -> Self:
        self._require_collector()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _require_collector(given: Any) -> None:
    if isinstance(given, BaseCollector):
        return
    if inspect.isclass(given):
        who, instead = f"the class {given.__name__}", "make one, and give that"
    else:
        name = type(given).__name__
        who, instead = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}", _instead(given)
    raise TypeError(f"watch() shows a collector (Collector, MultiCollector, ...), not {who}: {instead}")


def _instead(given: Any) -> str:
    if hasattr(given, "step") and hasattr(given, "reset"):
        return "an env is seen in its collector, watch(Collector(env, policy, frames_per_batch=...))"
    if hasattr(given, "sample") and hasattr(given, "extend"):
        return "a replay buffer is seen with the collector that fills it"
    if callable(getattr(given, "stats", None)):
        return f"what {type(given).__name__} tells of itself is in its stats()"
    if isinstance(given, Iterator):
        return "give it the collector itself, for number, batch in enumerate(swath.watch(collector))"
    return "make a collector, and give that"
