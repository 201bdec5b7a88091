"""A report of a collector: what it does is recorded, and becomes a page of HTML."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from swath.collectors.tracing import (
    SECONDS_BETWEEN_LOOKS,
    Filed,
    Traceable,
    about_program,
    remove_part,
    require_writable,
)
from swath.errors import told
from swath.insight.reading import Reading
from swath.insight.report import EpisodeSeries, Run, report_page
from swath.insight.report.lanes import Lanes
from swath.insight.report.run import Thinned, without_episodes
from swath.insight.report.sections import about_reading
from swath.timeline.chrome import trace_events, write_trace
from swath.timeline.companions import companions

_SECONDS_BETWEEN_READINGS = 0.5
#: Of the history that a collector has: as many as it keeps.
_MOST_EPISODES = 10_000
_TOO_LATE = (
    "This report was asked for when the collector had been closed: nothing was recorded, so there is no timeline, and "
    "no curve over time. Call collector.report(path) before the first batch to have them."
)


class Reportable(Traceable):
    """A collector that can write a report of itself."""

    _inner = ("about_run",)

    #: What ``set_seed()`` was called with.
    _seed: int | None = None
    _closed: bool

    def report(self, path: str | os.PathLike[str], trace: str | os.PathLike[str] | None = None) -> Report:
        """From now on record what a report tells; a page of HTML that needs no network: ``run.html``.

        It is written at the end of the ``with`` block, at ``stop()``, or when the collector closes. ``trace`` is for
        the file that ``trace()`` would write, of the same time. Of a collector that is closed already, the page is
        written at once, with what is known of it: totals and episodes, but no timeline.

        >>> import tempfile
        >>> from swath.collectors import Collector
        >>> collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=300)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with collector.report(f"{folder}/run.html") as report:
        ...         for batch in collector:
        ...             pass
        ...     page = report.path.read_text()
        >>> "<h2>Timeline</h2>" in page, "<h2>Episodes</h2>" in page
        (True, True)
        """
        self._require_unrecorded()
        page, trace_path = Path(path), None if trace is None else Path(trace)
        if trace_path is not None and trace_path.absolute() == page.absolute() and not page.is_char_device():
            raise ValueError(f"report: trace= is {page}, too, which the page goes to; give the trace a file of its own")
        if trace_path is not None and self._closed:
            raise RuntimeError("report: this collector is closed, so there is nothing to trace: leave trace= out")
        require_writable("report", page)
        if trace_path is not None:
            require_writable("report: trace=", trace_path)
        report = Report(self, page, trace_path)
        if self._closed:
            report.stop()
        else:
            self.record(report)
        return report

    def about_run(self) -> dict[str, Any]:
        """What a report tells beside readings: the seed, which envs places have, and episodes."""
        about = self.stats()
        envs = {f"worker {line['worker']}": line["envs"] for line in about.get("workers", ()) if "envs" in line}
        try:
            episodes = self.episodes(last=_MOST_EPISODES)
        except RuntimeError:  # they are not counted here
            episodes = None
        return {"seed": self._seed, "envs": envs, "episodes": episodes}

    def reading(self) -> Reading:
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def episodes(self, last: int | None = None) -> Any:
        raise NotImplementedError


class Report(Filed):
    """What a collector and all its processes do, from now until ``stop()``, or the end of a ``with`` block.

    Args:
        collector: whom it is of.
        path: the page.
        trace: a trace of the same, if one is to be written.
    """

    _called = "report"
    _suffix = ".html"

    def __init__(self, collector: Reportable, path: Path, trace: Path | None) -> None:
        self.trace_path = None if trace is None else trace.absolute()
        self._readings = Thinned()
        self._next_at = 0.0
        self._about_program = about_program(collector)
        self._about_run: Mapping[str, Any] = {}
        #: What has ended it, if anything.
        self._failure: str | None = None
        self._is_late = collector.reading().is_closed
        self._note(collector)
        super().__init__(collector, path)
        if self._is_late:
            self._about_run = collector.about_run()
            self.recordings = []  # and nobody who works beside it goes on recording
            companions.end_recording()

    def refuse_another(self) -> None:
        raise RuntimeError(
            f"this collector is being recorded already, for a report to {self.path}: stop that one first. A trace of "
            "the same time is written by collector.report(path, trace='run.json')"
        )

    def _look(self, collector: Traceable) -> None:
        super()._look(collector)
        if time.monotonic() >= self._next_at:
            self._note(collector)

    def collector_closes(self, collector: Traceable) -> None:
        self._note_failure(sys.exc_info()[1])  # it closes because of what is being handled
        super().collector_closes(collector)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._note_failure(error)
        super().__exit__(kind, error, traceback)

    def _note_failure(self, error: BaseException | None) -> None:
        if error is not None and self._failure is None:
            self._failure = told(error)

    def _look_last(self, collector: Traceable) -> None:
        self._note(collector)
        assert isinstance(collector, Reportable)
        self._about_run = collector.about_run()

    def _note(self, collector: Traceable) -> None:
        assert isinstance(collector, Reportable)
        # (The thread looks in steps of its own: half a step early is nearer than half a step late.)
        self._next_at = time.monotonic() + _SECONDS_BETWEEN_READINGS - SECONDS_BETWEEN_LOOKS / 2
        self._readings.add(without_episodes(collector.reading()))

    def _write_to(self, path: Path) -> None:
        assert self.recordings is not None
        readings, episodes = self._readings.all(), self._about_run.get("episodes")
        if self._failure is not None:
            readings = [*readings[:-1], replace(readings[-1], failure=self._failure)]
        run = Run(
            about=about_reading(readings[-1], self._about_run.get("seed")),
            readings=readings[-1:] if self._is_late else readings,
            lanes=None if self._is_late else Lanes.of_events(trace_events(self.recordings)),
            episodes=None if episodes is None else EpisodeSeries.of(episodes),
            envs=self._about_run.get("envs", {}),
            notes=[_TOO_LATE] if self._is_late else [],
        )
        path.write_text(report_page(run), encoding="utf-8", errors="backslashreplace")  # arguments may be no text

    def stop(self) -> Path:
        """End it, and write the page, and the trace if there is to be one.

        Raises:
            OSError: one cannot be written. What was recorded is kept: ``write`` and ``write_trace`` take other paths.
        """
        with self._ending:
            is_new = not self._written and not self._is_copy
            super().stop()
            if is_new and self.trace_path is not None:
                self.write_trace(self.trace_path)
        return self.path

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of what was recorded, once it is over."""
        if self.recordings is None:
            raise RuntimeError("the report is still being recorded: call stop() first")
        try:
            write_trace(Path(path), self.recordings, self._about_program)
        except OSError as error:
            remove_part(Path(path))
            raise type(error)(
                error.errno,
                f"the report is in {self.path}, but its trace could not be written to {path}: {error.strerror}. It is "
                "kept: report.write_trace('another/path.json') writes it elsewhere",
            ) from error
