"""A trace of a collector: recording is switched on everywhere, and what was recorded becomes a file."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from swath.errors import told
from swath.timeline.chrome import write_trace
from swath.timeline.companions import companions
from swath.timeline.recorder import Gauge, Kind, Recorder, new_memory, read
from swath.timeline.recording import Recording
from swath.warn import warn_user

_SECONDS_BETWEEN_GAUGES = 0.05


class Traceable:
    """A collector that can be traced: what it does is recorded only while somebody wants to know."""

    _inner = ("end_recording", "gauges", "record")

    _trace: Session | None = None
    #: What getting a batch is, for whoever waits for it.
    _gathering = Kind.WAIT_FOR_BATCH

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """From now on record what each process does when; a file for ui.perfetto.dev or chrome://tracing.

        Ends with the ``with`` block, with ``stop()``, or with the collector. The last minutes are kept.

        >>> import json, tempfile
        >>> from swath.collectors import Collector
        >>> collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=300)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with collector.trace(f"{folder}/run.json") as trace:
        ...         for batch in collector:
        ...             pass
        ...     events = json.loads(trace.path.read_text())["traceEvents"]
        >>> {"collect", "steps", "policy", "env", "reset", "yours"} <= {event["name"] for event in events}
        True
        """
        self._require_open_unless(False)
        if self._trace is not None:
            to = f", to {self._trace.path}" if isinstance(self._trace, Trace) else ""
            raise RuntimeError(f"this collector is being traced already{to}: stop that one first")
        file = Path(path)
        _require_writable(file)
        trace = Trace(self, file, about_program(self))
        self.record(trace)
        return trace

    def record(self, session: Session) -> None:
        """Let everything that this collector does be recorded, until ``end_recording()``."""
        self._trace = session
        self._begin_recording(session.recorder)

    def end_recording(self) -> list[Recording]:
        """What was recorded elsewhere than in this process."""
        self._trace = None
        return self._recordings_elsewhere()

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _require_open_unless(self, may_be_closed: bool) -> None:
        raise NotImplementedError

    def _begin_recording(self, recorder: Recorder) -> None:
        """What is done in this process is recorded with this; others have recorders of their own."""

    def _recordings_elsewhere(self) -> list[Recording]:
        """The end of it."""
        return []

    def gauges(self) -> dict[Gauge, float]:
        """What a trace measures again and again; never blocks."""
        return {}

    def _recorded(self, kind: Kind) -> AbstractContextManager[None]:
        trace = self._trace
        return nullcontext() if trace is None else trace.recorder.during(kind)

    @contextmanager
    def _recorded_update(self) -> Iterator[None]:
        """While weights are sent: the version that they have then is where arrows begin."""
        started = perf_counter()
        yield
        if self._trace is not None:
            self._trace.recorder.add(Kind.UPDATE, started, perf_counter(), self.get_policy_version())

    def get_policy_version(self) -> int:
        raise NotImplementedError

    def is_running(self) -> bool:
        raise NotImplementedError


class Session:
    """While a collector, and all its processes, record what they do. The collector is not kept by it."""

    def __init__(self, collector: Traceable) -> None:
        self.recorder = Recorder(new_memory())
        #: What was recorded, once it is over.
        self.recordings: list[Recording] | None = None
        self._collector = weakref.ref(collector)
        self._threads = {threading.get_ident(): "collector"}

    def next_begins(self, by_consumer: bool = True) -> None:
        """The next batch is asked for."""

    def next_ends(self) -> None:
        """It was handed over."""

    def gather(self, collector: Traceable | None = None) -> list[Recording]:
        """Nothing more is recorded; what was, first of all in this process."""
        if self.recordings is None:
            collector = self._collector() if collector is None else collector
            elsewhere = [] if collector is None else collector.end_recording()
            own = Recording("you and the collector", os.getpid(), read(self.recorder.memory), self._threads)
            self.recordings = [own, *elsewhere]
        return self.recordings

    def collector_closes(self, collector: Traceable) -> None:
        self.gather(collector)


class Trace(Session):
    """What a collector and all its processes do, from now until ``stop()``, or the end of a ``with`` block.

    Args:
        collector: what is traced.
        path: the file that it becomes.
        about: what is told of the program in the file.
    """

    def __init__(self, collector: Traceable, path: Path, about: Mapping[str, Any]) -> None:
        super().__init__(collector)
        self.path = path
        self._about = about
        self._written = False
        self._over = threading.Event()
        #: Since when whoever iterates has the turn, or the collector.
        self._turn_since: float | None = None
        companions.begin_recording()
        self._gauging = threading.Thread(target=self._gauge, name="swath-trace", daemon=True)
        self._gauging.start()

    # -- while it lasts --------------------------------------------------------------------------------------------

    def _gauge(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_GAUGES):
            collector = self._collector()
            if collector is None:
                return
            for what, value in collector.gauges().items():
                self.recorder.gauge(what, value)
            del collector  # not kept while this waits

    def next_begins(self, by_consumer: bool = True) -> None:
        """The next batch is asked for: the consumer's turn is over. In the background there is none."""
        self._turn(Kind.CONSUMER if by_consumer else Kind.BETWEEN)

    def next_ends(self) -> None:
        """It was handed over."""
        self._turn(Kind.NEXT)

    def _turn(self, kind: Kind) -> None:
        """What has lasted since the last turn is over."""
        now = perf_counter()
        if self._turn_since is not None:
            self.recorder.add(kind, self._turn_since, now)
        self._turn_since = now

    # -- the end ---------------------------------------------------------------------------------------------------

    def gather(self, collector: Traceable | None = None) -> list[Recording]:
        self._over.set()
        if self._gauging is not threading.current_thread():
            self._gauging.join()
        if self.recordings is None and self._turn_since is not None:
            collector = self._collector() if collector is None else collector
            self.next_begins(collector is None or not collector.is_running())
        if self.recordings is None:
            self.recordings = [*super().gather(collector), *companions.end_recording()]
        return self.recordings

    def stop(self) -> Path:
        """End it, and write the file.

        Raises:
            OSError: it cannot be written. What was recorded is not lost: call ``write`` with another path.
        """
        self.gather()
        if not self._written:
            self.write(self.path)
        return self.path

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded, once it is over."""
        if self.recordings is None:
            raise RuntimeError("the trace is still being recorded: call stop() first")
        try:
            write_trace(Path(path), self.recordings, self._about)
        except OSError as error:
            with suppress(OSError):
                if Path(path).is_file():  # half a trace
                    Path(path).unlink()
            raise type(error)(
                error.errno,
                f"the trace could not be written to {path}: {error.strerror}. It is kept: "
                "trace.write('another/path.json') writes it elsewhere",
            ) from error
        self._written = True

    def collector_closes(self, collector: Traceable) -> None:
        """Whoever forgets to stop it has its file all the same."""
        self.gather(collector)
        try:
            self.stop()
        except OSError as error:
            warn_user(told(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except OSError as failed:
            if error is None:
                raise
            warn_user(told(failed))  # what failed first is what the user must see


def _require_writable(path: Path) -> None:
    """Before anything is recorded."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"trace: {path} cannot be written: {error.strerror}", str(path)) from None


def about_program(collector: Any) -> dict[str, Any]:
    """What ran."""
    return {"collector": repr(collector), "command": " ".join(sys.argv), "python": sys.version.split()[0]}
