"""What is shown while collecting: a live display in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swath.cli.options import CollectOptions
from swath.cli.worker_table import Worker, busy_share, worker_table

_FIRST_LINE_AFTER = 0.5
_LINE_EVERY = 2.0
_LOOK_EVERY = 0.1
_REFRESHES_PER_SECOND = 8
_STOPPING = "stopping after this step; Ctrl-C again leaves at once"
#: "now" is over so many seconds.
_WINDOW = 2.0


class Statistics(Protocol):
    """Of episodes; see ``EpisodeStatistics``."""

    @property
    def count(self) -> int: ...
    @property
    def frames(self) -> int: ...
    def recent_means(self) -> tuple[float, float] | None: ...


@dataclass(frozen=True)
class Moment:
    """How a collection stands."""

    frames: int
    fps_now: float
    fps_overall: float
    seconds_left: float | None
    #: Frames among which episodes were counted: those of whole batches.
    frames_in_batches: int
    episodes: int
    #: Mean return and length of recent episodes.
    recent: tuple[float, float] | None
    stopping: bool
    workers: Sequence[Worker] = ()


class Meter:
    """Measures a collection. Read by the thread that shows it, at its own pace."""

    def __init__(
        self, total: int, count_frames: Callable[[], int], is_stopping: Callable[[], bool], episodes: Statistics
    ) -> None:
        self._total = total
        self._count_frames = count_frames
        self.is_stopping = is_stopping
        self._episodes = episodes
        self._started = time.perf_counter()
        self._samples = deque([(self._started, 0)])

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def read(self) -> Moment:
        now = time.perf_counter()
        samples = self._samples
        frames = max(min(self._count_frames(), self._total), samples[-1][1])  # never less than was shown
        samples.append((now, frames))
        while len(samples) > 2 and samples[1][0] < now - _WINDOW:
            samples.popleft()
        then, frames_then = samples[0]
        fps_now = (frames - frames_then) / max(now - then, 1e-9)
        fps_overall = frames / max(now - self._started, 1e-9)
        return Moment(
            frames,
            fps_now,
            fps_overall,
            (self._total - frames) / fps_now if fps_now > 0 else None,
            self._episodes.frames,
            self._episodes.count,
            self._episodes.recent_means(),
            self.is_stopping(),
        )


class WorkersMeter(Meter):
    """Measures a collection in worker processes: they know best how many frames there are, and how they spend time."""

    def __init__(
        self,
        total: int,
        look_at_workers: Callable[[], Sequence[Worker]],
        is_stopping: Callable[[], bool],
        episodes: Statistics,
    ) -> None:
        super().__init__(total, lambda: sum(worker["frames"] for worker in self._workers), is_stopping, episodes)
        self._look_at_workers = look_at_workers
        self._workers: Sequence[Worker] = ()

    def read(self) -> Moment:
        self._workers = self._look_at_workers()
        return replace(super().read(), workers=self._workers)


class Screen:
    """Shows nothing: ``--quiet``."""

    def __init__(self, options: CollectOptions) -> None:
        self._options = options
        self._meter: Meter | None = None

    def open(self) -> None:
        """From the start, while torch is imported."""

    def begin(self, meter: Meter) -> None:
        """Frames are coming."""
        self._meter = meter

    def close(self) -> None:
        """Leave the terminal as it was; harmless when called again."""

    def title(self) -> str:
        options = self._options
        envs = "1 env" if options.envs == 1 else f"{options.envs:,} envs"
        if options.workers is not None:
            envs += " in 1 worker" if options.workers == 1 else f" in {options.workers:,} workers"
            envs += " (sync)" if options.sync else ""
        policy = f"policy {options.policy}" if options.policy else "random actions"
        return f"{options.env_id} · {envs} · {policy} · seed {options.seed}"


class PlainScreen(Screen):
    """Lines, for logs."""

    def __init__(self, options: CollectOptions) -> None:
        super().__init__(options)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, meter: Meter) -> None:
        super().begin(meter)
        self._print(f"collecting {self._options.frames:,} frames: {self.title()}")
        self._thread = threading.Thread(target=self._show, args=(meter,), name="swath-progress", daemon=True)
        self._thread.start()

    def _show(self, meter: Meter) -> None:
        due = _FIRST_LINE_AFTER
        told = False
        while not self._closed.wait(_LOOK_EVERY):
            if meter.is_stopping() and not told:
                self._print(_STOPPING)
                told = True
            if meter.seconds < due:
                continue
            moment = meter.read()
            words = [f"{moment.frames:,} / {self._options.frames:,} frames ({percent(moment, self._options):.0f} %)"]
            words.append(f"{moment.fps_now:,.0f} frames/s, {moment.fps_overall:,.0f} overall")
            words += [show_eta(moment), show_episodes(moment)]
            if moment.workers:
                words.append(f"workers busy {busy_share(moment.workers):.0%}")
            self._print(" · ".join(words))
            due = meter.seconds + _LINE_EVERY

    def _print(self, line: str) -> None:
        print(f"swath: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


class LiveScreen(Screen):
    """A few lines that stay in place, drawn by rich."""

    def __init__(self, options: CollectOptions) -> None:
        super().__init__(options)
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        workers = "" if options.workers is None else ", starting the workers"
        self._spinner = Spinner("dots", f"loading PyTorch and the env{workers}")
        self._live = Live(
            console=Console(stderr=True, highlight=False),
            get_renderable=self._draw,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )

    def open(self) -> None:
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        def line(text: str, style: str = "") -> Text:
            return Text(text, style, no_wrap=True, overflow="ellipsis")

        title = [line(self.title(), "bold"), Text(f"→ {self._options.out}", "bold", overflow="fold")]
        if self._meter is None:
            return Group(*title, self._spinner)
        moment = self._meter.read()
        total = f"{self._options.frames:,}"
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        for _ in range(3):
            bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            ProgressBar(total=self._options.frames, completed=moment.frames, complete_style="cyan"),
            f"{percent(moment, self._options):3.0f} %",
            f"{moment.frames:>{len(total)},} / {total} frames",  # of one width, so that the bar stays as long as it is
            f"{show_eta(moment):>9}",
        )
        rate = f"{moment.fps_now:,.0f} frames/s now, {moment.fps_overall:,.0f} overall"
        lines = [*title, bar, line(rate), line(show_episodes(moment))]
        if moment.workers:
            lines.append(worker_table(moment.workers))
        if moment.stopping:
            lines.append(line(_STOPPING, "yellow"))
        return Group(*lines)


def make_screen(options: CollectOptions) -> Screen:
    if options.quiet:
        return Screen(options)
    can_redraw = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return LiveScreen(options) if can_redraw else PlainScreen(options)


def percent(moment: Moment, options: CollectOptions) -> float:
    return 100 * moment.frames // options.frames


def show_eta(moment: Moment) -> str:
    return "ETA --:--" if moment.seconds_left is None else f"ETA {show_duration(moment.seconds_left)}"


def show_duration(seconds: float) -> str:
    """
    >>> show_duration(75), show_duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def show_episodes(moment: Moment) -> str:
    if not moment.frames_in_batches:
        return "episodes are counted with each batch"
    if moment.recent is None:
        return "no episode has ended yet"
    mean_return, mean_length = moment.recent
    recent = min(moment.episodes, 100)
    of = f"the last {recent}" if recent < moment.episodes else "these"
    count = "1 episode" if moment.episodes == 1 else f"{moment.episodes:,} episodes"
    return f"{count} · mean of {of}: return {short(mean_return)}, length {short(mean_length)}"


def short(value: float) -> str:
    """A number as short as it says enough.

    >>> short(22.0), short(22.345), short(-1234.5), short(0.00123)
    ('22', '22.34', '-1,234', '0.00123')
    """
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
