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

#: How often a session looks at its collector.
SECONDS_BETWEEN_LOOKS = 0.05


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
        self._require_unrecorded()
        file = Path(path)
        require_writable("trace", file)
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

    def _require_unrecorded(self) -> None:
        if isinstance(self._trace, Filed):
            self._trace.refuse_another()
        elif self._trace is not None:
            raise RuntimeError("this collector is being traced already: stop that one first")

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


class Filed(Session):
    """A session that becomes a file: at ``stop()``, at the end of a ``with`` block, or when the collector closes.

    Args:
        collector: what is recorded.
        path: the file.
    """

    #: What the file is to the user, and how its name ends.
    _called = "trace"
    _suffix = ".json"

    def __init__(self, collector: Traceable, path: Path) -> None:
        super().__init__(collector)
        self.path = path
        self._written = False
        self._over = threading.Event()
        #: Since when whoever iterates has the turn, or the collector.
        self._turn_since: float | None = None
        companions.begin_recording()
        self._gauge(collector)  # what is shorter than the time between two looks has a beginning and an end
        self._looking = threading.Thread(target=self._keep_looking, name="swath-trace", daemon=True)
        self._looking.start()

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _look(self, collector: Traceable) -> None:
        """Again and again, while it lasts."""
        self._gauge(collector)

    def _look_last(self, collector: Traceable) -> None:
        """Before nothing is recorded any more."""

    def _write_to(self, path: Path) -> None:
        """Write what was recorded; raises OSError."""
        raise NotImplementedError

    def refuse_another(self) -> None:
        raise RuntimeError(f"this collector is being traced already, to {self.path}: stop that one first")

    # -- while it lasts --------------------------------------------------------------------------------------------

    def _gauge(self, collector: Traceable) -> None:
        for what, value in collector.gauges().items():
            self.recorder.gauge(what, value)

    def _keep_looking(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            collector = self._collector()
            if collector is None:
                return
            self._look(collector)
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
        if self._looking is not threading.current_thread():
            self._looking.join()
        if self.recordings is None:
            collector = self._collector() if collector is None else collector
            if collector is not None:
                with suppress(Exception):  # a buffer on Ray that is gone cannot be asked
                    self._gauge(collector)
                self._look_last(collector)
            if self._turn_since is not None:
                self.next_begins(collector is None or not collector.is_running())
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
            raise RuntimeError(f"the {self._called} is still being recorded: call stop() first")
        try:
            self._write_to(Path(path))
        except OSError as error:
            remove_part(Path(path))
            raise type(error)(
                error.errno,
                f"the {self._called} could not be written to {path}: {error.strerror}. It is kept: "
                f"{self._called}.write('another/path{self._suffix}') writes it elsewhere",
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


class Trace(Filed):
    """What a collector and all its processes do, from now until ``stop()``, or the end of a ``with`` block.

    Args:
        collector: what is traced.
        path: the file that it becomes.
        about: what is told of the program in the file.
    """

    def __init__(self, collector: Traceable, path: Path, about: Mapping[str, Any]) -> None:
        self._about = about
        super().__init__(collector, path)

    def _write_to(self, path: Path) -> None:
        assert self.recordings is not None
        write_trace(path, self.recordings, self._about)


def require_writable(what: str, path: Path) -> None:
    """Before anything is recorded."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"{what}: {path} cannot be written: {error.strerror}", str(path)) from None


def remove_part(path: Path) -> None:
    """What there is of a file that could not be written."""
    with suppress(OSError):
        if path.is_file():
            path.unlink()


def about_program(collector: Any) -> dict[str, Any]:
    """What ran."""
    return {"collector": repr(collector), "command": " ".join(sys.argv), "python": sys.version.split()[0]}
