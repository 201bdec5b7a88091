"""A trace of a collector: recording is switched on everywhere, and what was recorded becomes a file."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from swath.errors import told
from swath.process.ctrl_c import ctrl_c_waits
from swath.timeline.chrome import write_trace
from swath.timeline.companions import companions
from swath.timeline.recorder import Gauge, Kind, Record, Recorder, new_memory, read
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
        try:
            self._begin_recording(session.recorder)
        except BaseException:  # a node is gone, no descriptor is left: nothing is recorded, and it may be tried again
            session.give_up(self)
            raise

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
            elsewhere = [] if collector is None else self._elsewhere(collector)
            own = Recording("you and the collector", os.getpid(), read(self.recorder.memory), self._threads)
            self.recordings = [own, *elsewhere]
        return self.recordings

    def _elsewhere(self, collector: Traceable) -> list[Recording]:
        return collector.end_recording()

    def collector_closes(self, collector: Traceable) -> None:
        self.gather(collector)

    def give_up(self, collector: Traceable) -> None:
        """It could not begin."""
        with suppress(Exception):  # what failed first is what the user must see
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
        self.path = path.absolute()  # the program, or an env of it, may change its folder meanwhile
        self._written = False
        self._over = threading.Event()
        #: Of several threads that end it (one stops it while another closes the collector), one does.
        self._ending = threading.RLock()
        #: Why what other processes did is missing, if it is.
        self._lacks: str | None = None
        #: Who has the turn, whoever iterates or the collector; since when, and in which thread that is.
        self._turn: tuple[Kind, float, int] | None = None
        #: At the end of the program, before what it uses is taken away; and before what it is of is ended.
        self._at_exit = partial(_stop_at_exit, weakref.ref(self))
        self._owner_pid = os.getpid()
        atexit.register(self._at_exit)
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
            with suppress(Exception):  # a buffer on Ray may not answer just now: a curve has no value there
                self._look(collector)
            del collector  # not kept while this waits

    def next_begins(self, by_consumer: bool = True) -> None:
        """The next batch is asked for: the consumer's turn is over. In the background there is none."""
        self._turn_ends(Kind.CONSUMER if by_consumer else Kind.BETWEEN, Kind.NEXT)

    def next_ends(self) -> None:
        """It was handed over; or it failed, and there is none."""
        self._turn_ends(Kind.NEXT, Kind.CONSUMER)

    def _turn_ends(self, kind: Kind, following: Kind) -> None:
        now, thread = perf_counter(), threading.get_ident()
        if self._turn is not None:
            self.recorder.add(kind, self._turn[1], now)
        else:  # this is who iterates, whoever has begun the trace
            self._threads.clear()
        self._threads[thread] = "collector"
        self._turn = following, now, thread

    def _last_turn(self, ended_s: float, in_background: bool, own: Recording) -> list[Record]:
        """Whose turn it was when all ended; in the middle of a batch, it is the collector's."""
        if self._turn is None:
            return []
        kind, since, thread = self._turn
        if kind == Kind.CONSUMER and in_background:
            kind = Kind.BETWEEN
        ends = [record.end_s for record in own.records if record.thread == thread and record.kind < Kind.VERSION]
        # (The step under way was told of a moment later than that all was over.)
        return [Record(kind, since, max([ended_s, *ends]), 0.0, 0.0, 0.0, thread)]

    # -- the end ---------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def gather(self, collector: Traceable | None = None) -> list[Recording]:
        self._over.set()
        if self._looking is not threading.current_thread():
            self._looking.join()
        with self._ending:
            if self.recordings is None:
                collector = self._collector() if collector is None else collector
                self._look_once_more(collector)
                in_background = collector is not None and collector.is_running()
                ended_s = perf_counter()
                own, *others = super().gather(collector)
                last = self._last_turn(ended_s, in_background, own)
                own = replace(own, records=[*own.records, *last])
                self.recordings = [own, *others, *companions.end_recording()]
                atexit.unregister(self._at_exit)
                if self._lacks is not None:
                    warn_user(f"the {self._called} to {self.path} has this process only: {self._lacks}")
            return self.recordings

    def _elsewhere(self, collector: Traceable) -> list[Recording]:
        try:
            return super()._elsewhere(collector)
        except Exception as error:  # what is known here must not be lost with it
            self._lacks = told(error)
            return []

    @property
    def _is_copy(self) -> bool:
        """In a process that was forked: the file is its parent's to write."""
        return os.getpid() != self._owner_pid

    def _look_once_more(self, collector: Traceable | None) -> None:
        if collector is None:
            return
        with suppress(Exception):  # a buffer on Ray that is gone cannot be asked
            self._gauge(collector)
        self._look_last(collector)

    def stop(self) -> Path:
        """End it, and write the file.

        Raises:
            OSError: it cannot be written. What was recorded is not lost: call ``write`` with another path.
        """
        self.gather()
        with self._ending:
            if not self._written and not self._is_copy:
                self.write(self.path)
        return self.path

    @ctrl_c_waits
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
        except BaseException:  # Ctrl-C, say: half a file is none
            remove_part(Path(path))
            raise
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


def _stop_at_exit(reference: weakref.ref[Filed]) -> None:
    session = reference()
    if session is None:
        return
    try:
        session.stop()
    except OSError as error:
        warn_user(told(error))


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
