"""Programs for rich: the whole view of one, or a line each of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swath.cli.top.watched import Watched
from swath.insight.history import History
from swath.insight.quantities import duration, percent, whole
from swath.insight.screen import live_view

#: What is raised by numbers that no collector would tell: of a program that tells them, nothing more is shown.
ABSURD = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, MemoryError)
MAKES_NO_SENSE = "what it tells of itself makes no sense"
NOTHING_YET = "has not told anything yet"


def views(watched: Sequence[Watched], notes: Sequence[str], width: int, height: int | None = None) -> Any:
    """One: all that is known of it. Several: a line each. And what else there is to say."""
    from rich.text import Text

    said = [Text(note, "dim") for note in notes]
    room = None if height is None else max(4, height - len(said))
    lines = _whole(watched[0], width, room) if len(watched) == 1 else _table(watched, room)
    for line in (lines := [*lines, *said]):
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _whole(watched: Watched, width: int, height: int | None) -> list[Any]:
    from rich.text import Text

    lines = [Text(f"{watched.pid} · {watched.command}", "dim")]
    silence = watched.silence
    if silence is not None:
        lines.append(Text(f"{watched.pid} {silence}", "bold yellow"))
    lines += [Text(error, "bold red") for error in watched.errors]
    each = None if height is None else max(4, (height - len(lines)) // max(1, len(watched.histories)))
    for history in watched.histories.values():
        try:
            lines += live_view(history, width, each).split("\n")
        except ABSURD:
            lines.append(Text(MAKES_NO_SENSE, "bold red"))
    if not watched.histories and silence is None and not watched.errors:
        lines.append(Text(NOTHING_YET, "dim"))
    return lines


def _table(watched: Sequence[Watched], height: int | None) -> list[Any]:
    from rich.text import Text

    rows = [row for each in watched for row in _rows(each)]
    room = len(rows) if height is None else max(1, height - 3)
    lines = [_columns("PID", "FRAMES", "FRAMES/S", "LEFT", "LIMIT", "PROGRAM", "bold"), *rows[:room]]
    if len(rows) > room:
        lines.append(Text(f"… and {len(rows) - room} more", "dim"))
    lines.append(Text("swath top PID shows all that is known of one", "dim"))
    return lines


def _columns(pid: str, frames: str, rate: str, left: str, limit: str, program: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(f"{pid:>7} {frames:>14} {rate:>9} {left:>8}  {limit:<13} {program}", style)


def _rows(watched: Watched) -> Iterator[Any]:
    """A line for each of its collectors; or what is wrong with it."""
    from rich.text import Text

    silence = watched.silence
    for said in [*([silence] if silence else []), *watched.errors]:
        yield Text(f"{watched.pid:>7} {said} · {_called(watched.command)}", "yellow")
    if silence:
        return
    if not watched.histories and not watched.errors:
        yield Text(f"{watched.pid:>7} {NOTHING_YET} · {_called(watched.command)}", "dim")
    for history in watched.histories.values():
        try:
            yield _columns(str(watched.pid), *_row(history))
        except ABSURD:
            yield Text(f"{watched.pid:>7} {MAKES_NO_SENSE} · {_called(watched.command)}", "red")


def _row(history: History) -> tuple[str, str, str, str, str]:
    reading = history.latest
    assert reading is not None
    program, seconds_left, found = reading.program, history.seconds_left, history.verdict
    done = f" {percent(history.frames / program.total_frames):>5}" if program.total_frames else ""
    left = "" if seconds_left is None else duration(seconds_left)
    limit = "failed" if reading.failure else str(found.limit) if found is not None else ""
    what = f"{_called(program.command)} · {program.collector} · {program.env}"
    return f"{whole(history.frames)}{done}", whole(history.frames_per_s_now), left, limit, what


def _called(command: str) -> str:
    """A command without the folders of its program.

    >>> _called("/home/me/train.py --lr 3")
    'train.py --lr 3'
    """
    name, space, arguments = command.partition(" ")
    return name.rpartition("/")[2] + space + arguments
