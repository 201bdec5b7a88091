"""What is kept of how a collection went: readings, and with ``--trace`` or ``--report`` a trace; a page of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swath.cli.errors import UsageError, without_paths
from swath.cli.metadata import command
from swath.cli.options import CollectOptions
from swath.cli.streams import say
from swath.collectors.tracing import Trace, Traceable
from swath.dataset_format import READINGS, REPORT, TRACE
from swath.errors import told
from swath.insight.report import report_page
from swath.insight.report.opening import run_of_dataset, write_readings
from swath.insight.report.run import Thinned, without_episodes

if TYPE_CHECKING:
    from swath.collectors import BaseCollector

_SECONDS_BETWEEN_READINGS = 0.5


class _OwnTrace(Trace):
    """Whoever keeps it says where it went, and what became of that."""

    def collector_closes(self, collector: Traceable) -> None:
        self.gather(collector)


class Keeper:
    """Reads where a collector stands, from now until ``end()``; and lets it be recorded, if that was asked for.

    A dataset is in order without any of this: what cannot be written is said, and left out.

    Args:
        beside: the folder where unfinished files are.
    """

    def __init__(self, collector: BaseCollector, options: CollectOptions, beside: Path) -> None:
        self._collector = collector
        self._options = options
        self._readings = Thinned()
        self._envs = collector.about_run()["envs"]
        self._trace: Trace | None = None
        #: Where it goes: the first that takes it.
        self._places = [Path(options.trace).absolute()] if options.trace else []
        self._places.append((beside / TRACE).absolute())
        self._written: Path | None = None
        if options.keeps_trace:
            about = {"collector": type(collector).__name__, "env": options.env_id, "command": command(options)}
            self._trace = _OwnTrace(collector, self._places[0], about)
            collector.record(self._trace)
        self._read()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="swath-readings", daemon=True)
        self._thread.start()

    def _keep_reading(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_READINGS):
            self._read()

    def _read(self) -> None:
        self._readings.add(without_episodes(self._collector.reading()))

    def end(self) -> None:
        """Nothing more is collected."""
        self._over.set()
        self._thread.join()
        self._read()
        if self._trace is not None:
            self._trace.gather()
            self._written = self._write(self._trace)

    def _write(self, trace: Trace) -> Path | None:
        """Where it was written; None if there is no room for it."""
        for number, path in enumerate(self._places, start=1):
            try:
                trace.write(path)
                return path
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else told(error)
                instead = f"; it goes to {TRACE} in the dataset's folder" if number < len(self._places) else ""
                named = self._options.trace if instead else TRACE
                say(f"the trace could not be written to {named}: {why}{instead}")
        return None

    def save(self, folder: Path) -> None:
        """Put it beside a dataset's frames."""
        with self._told("what is known of its course"):
            readings = folder / READINGS
            try:
                write_readings(readings, self._readings.all(), self._envs)
            except OSError:
                readings.unlink(missing_ok=True)
                raise
        trace = self._written
        if trace is not None and trace == self._places[-1]:
            with self._told("the trace"):
                os.replace(trace, folder / TRACE)
                trace = folder / TRACE
        if self._options.report:
            with self._told("the report"):
                write_report(report_page(run_of_dataset(folder, trace)), folder / REPORT)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            say(f"{what} could not be written, the frames are: {without_paths(_why(error))}")


def write_report(page: str, path: Path) -> None:
    """In place of an earlier one; raises OSError, and then what was there before is still there."""
    new = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        new.write_text(page, encoding="utf-8", errors="backslashreplace")  # arguments may be no text
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def check_trace(path: str) -> None:
    """Before anything is collected."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--trace {path}: cannot be written: {error.strerror}") from None


def _why(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
