"""Figures of a program, a line for each: how far it is, how fast, episodes, the age of frames, the buffer, memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from swath.disk import show_bytes
from swath.insight.history import History
from swath.insight.quantities import count, duration, mean, percent, quantile, short, sparkline, whole
from swath.insight.reading import Program, Reading, lag_quantile

#: What is said of a program in Python, in other words.
Reword = Callable[[str], str]

_LABEL_WIDTH = 12
_CURVE_WIDTH = 28
_INDENT = 2


def title(reading: Reading, width: int) -> Any:
    """What it is, and since when."""
    from rich.text import Text

    program = reading.program
    what = Text().append(in_words(program), "bold")
    since = duration(reading.age_s)
    right = f"pid {program.pid} · {since}"
    if what.cell_len + 2 + len(right) > width:
        right = since
    return _with_right(what, Text(right, "dim"), width)


def in_words(program: Program) -> str:
    """Collector, env, and where the envs are."""
    env = program.env
    where = program.layout or count(program.num_envs, "env")
    return " · ".join(part for part in (program.collector, env, where) if part)


def progress(history: History, width: int) -> Any:
    """A bar, the share, frames, and how long it will take; of what never ends, frames."""
    from rich.text import Text

    assert history.latest is not None
    total = history.latest.program.total_frames
    if not total:
        return Text(f"{history.frames:,} frames", "cyan")
    every = f"{total:,}"
    # Of one width, so that the bar stays as long as it is.
    said = f"  {100 * history.frames // total:3.0f} %  {history.frames:>{len(every)},} / {every} frames"
    if not history.latest.is_closed:
        said += f"  {eta(history):>9}"
    cells = max(0, width - len(said))
    done = cells * history.frames // total
    return Text().append("━" * done, "cyan").append("─" * (cells - done), "bright_black").append(said)


def eta(history: History) -> str:
    return "ETA --:--" if history.seconds_left is None else f"ETA {duration(history.seconds_left)}"


def figures(history: History, width: int, reword: Reword = str) -> list[Any]:
    """Only what there is."""
    reading = history.latest
    assert reading is not None
    speed = f"{whole(history.frames_per_s_now)} frames/s now, {whole(history.frames_per_s)} overall"
    lines = [_line("speed", speed, width, history.rates), *_episodes(reading, width)]
    if time := _time(history):
        lines.append(_line("time", reword(time), width))
    if reading.policy_version:
        lines.append(_line("policy lag", _lag(history), width))
    buffer = reading.buffer
    if buffer is not None:
        full = percent(buffer.size / buffer.capacity) if buffer.capacity else "-"
        said = f"{whole(buffer.size)} / {whole(buffer.capacity)} frames ({full})"
        lines.append(_line("buffer", f"{said}, {buffer.samples_per_insert:,.2f} samples per insert", width))
    elsewhere = [f"{show_bytes(reading.shared_bytes)} shared"] if reading.shared_bytes else []
    elsewhere += [f"restarts {reading.restarts:,}"] if reading.restarts else []
    if elsewhere:
        lines.append(_line("memory" if reading.shared_bytes else "", ", ".join(elsewhere), width))
    return lines


def words(history: History, width: int, reword: Reword = str) -> list[Any]:
    """What limits it, and the next thing to try; and how it ended."""
    reading, found = history.latest, history.verdict
    assert reading is not None
    lines = []
    if reading.failure is not None:
        lines += _folded("failed: " + reading.failure, "bold red", width)
    elif reading.is_closed:
        lines += _folded(f"closed after {duration(reading.age_s)}", "green", width)
    if found is not None:
        lines += _folded(reword(found.says), "bold yellow", width)
        lines += _folded(f"→ {reword(found.advice)}", "", width) if found.advice else []
    return lines


def mean_of_recent(reading: Reading) -> str:
    """Of episodes, in a few words."""
    episodes = reading.episodes
    if not episodes.count:
        return _no_episodes(reading)
    means = f"return {short(mean(episodes.returns))}, length {short(mean(episodes.lengths))}"
    recent = len(episodes.returns)
    of = f"the last {recent:,}" if recent < episodes.count else "these"
    return f"{count(episodes.count, 'episode')}, mean of {of}: {means}"


def _no_episodes(reading: Reading) -> str:
    return "no episode has ended yet" if reading.frames else "episodes are counted with each batch"


def _episodes(reading: Reading, width: int) -> list[Any]:
    episodes = reading.episodes
    if not episodes.count or not episodes.returns:
        return [_line("episodes", _no_episodes(reading), width)]
    recent = len(episodes.returns)
    ended = f"{episodes.count:,} ended" + (f", of the last {recent:,}:" if recent < episodes.count else ", of these:")
    return [
        _line("episodes", ended, width),
        _line("  return", _spread(episodes.returns), width, episodes.returns),
        _line("  length", _spread(episodes.lengths), width, episodes.lengths),
    ]


def _spread(values: Sequence[float]) -> str:
    low, high = quantile(values, 0.1), quantile(values, 0.9)
    return f"mean {short(mean(values))}, p10 {short(low)}, p90 {short(high)}"


def _time(history: History) -> str:
    facts, reading = history.facts, history.latest
    assert reading is not None
    if facts is None or facts.seconds <= 0 or not history.frames:
        return ""
    held_back = f"held back by samples_per_insert {percent(facts.held_back)}" if facts.held_back > 0.005 else ""
    if facts.in_background:
        return held_back
    return ", ".join(filter(None, [f"yours {percent(facts.yours)}, collecting {percent(1 - facts.yours)}", held_back]))


def _lag(history: History) -> str:
    assert history.latest is not None
    version = f"weights were updated {count(history.latest.policy_version, 'time')}"
    lags = history.lags
    if not any(lags):
        return version

    p50, p95, most = (lag_quantile(lags, share) for share in (0.5, 0.95, 1.0))
    return f"p50 {p50}, p95 {p95}, max {most} updates; {version}"


def _line(label: str, said: str, width: int, curve: Sequence[float] = ()) -> Any:
    """A label, what is said, and at the right end a curve, if there is room for one."""
    from rich.text import Text

    line = Text().append(f"{label:<{_LABEL_WIDTH}}", "cyan").append(said)
    room = min(_CURVE_WIDTH, width - line.cell_len - 2)
    drawn = sparkline(curve, room) if room >= 8 else ""
    return _with_right(line, Text(drawn, "green"), width)


def _with_right(left: Any, right: Any, width: int) -> Any:
    """Both in a line; of the left one, as much as there is room for."""
    if not right.cell_len:
        return left
    left.truncate(max(0, width - right.cell_len - 2), overflow="ellipsis", pad=True)
    return left.append("  ").append_text(right)


def _folded(said: str, style: str, width: int) -> list[Any]:
    """A sentence, in as many lines as it needs."""
    from rich.text import Text

    lines = textwrap.wrap(said, width, subsequent_indent=" " * _INDENT)
    return [Text(line, style) for line in lines]
