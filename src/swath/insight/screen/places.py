"""Workers, nodes, or the process itself: a line for each, with how it spends its time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swath.insight.facts import Place
from swath.insight.history import History
from swath.insight.quantities import whole
from swath.insight.reading import PlaceReading

#: How time is spent: the name, the colour, and the sign for terminals without colours.
_SHARES = (("env", "green", "█"), ("policy", "magenta", "▓"), ("waiting", "bright_black", "░"))
_LEAST_CELLS, _MOST_CELLS = 10, 40
_GAP = "  "
_NUMBER_WIDTH = 5
_NUMBERS_WIDTH = _NUMBER_WIDTH * len(_SHARES)


@dataclass(frozen=True)
class _Column:
    """A column of a table; the first that are left out where there is no room have the highest ``spare``."""

    header: Any
    cells: Sequence[Any]
    to_the_right: bool = True
    spare: int = 0

    @property
    def width(self) -> int:
        return max(cell.cell_len for cell in (self.header, *self.cells))


def places(history: History, width: int, room: int) -> list[Any]:
    """In ``room`` lines at the most: all, or how it is on average and who is slowest."""
    reading, facts = history.latest, history.facts
    if reading is None or facts is None or not reading.places or room < 2:
        return []
    lately = {place.name: place for place in facts.places}
    shown, rest = list(reading.places), 0
    if len(shown) > room - 1:
        shown.sort(key=lambda place: _cost(lately.get(place.name)), reverse=True)
        rest = len(shown) - max(0, room - 3)
        shown = shown[: len(shown) - rest]
    rows = [_row(place, lately.get(place.name), facts.seconds) for place in shown]
    if rest:
        rows.insert(0, _summary(reading.places, facts.places, facts.seconds))
    lines = _table(rows, width)
    return [*lines, _more(reading.places, rest)] if rest else lines


@dataclass(frozen=True)
class _Row:
    name: str
    pid: str
    envs: str
    frames: str
    frames_per_s: str
    #: How its time was spent; None of one that has ended.
    place: Place | None
    restarts: int


def _row(reading: PlaceReading, lately: Place | None, seconds: float) -> _Row:
    return _Row(
        reading.name,
        "-" if reading.pid is None else str(reading.pid),
        whole(reading.num_envs),
        whole(reading.frames),
        "-" if lately is None or seconds <= 0 else whole(lately.frames / seconds),
        lately,
        reading.restarts,
    )


def _summary(readings: Sequence[PlaceReading], lately: Sequence[Place], seconds: float) -> _Row:
    """All of them, as one."""
    frames = sum(place.frames for place in lately)
    among = max(1, len(lately))
    shares = [sum(getattr(place, name) for place in lately) / among for name, _, _ in _SHARES]
    envs = sum(reading.num_envs for reading in readings)
    return _Row(
        f"all {len(readings):,}",
        "",
        whole(envs),
        whole(sum(reading.frames for reading in readings)),
        whole(frames / seconds) if seconds > 0 else "-",
        Place("all", envs, shares[0], shares[1], shares[2], frames) if lately else None,
        sum(reading.restarts for reading in readings),
    )


def _more(readings: Sequence[PlaceReading], rest: int) -> Any:
    from rich.text import Text

    ended = sum(not reading.alive for reading in readings)
    said = f"… and {rest:,} more, not so slow" if rest < len(readings) else ""
    return Text(", ".join(filter(None, [said, f"{ended:,} of all have ended" if ended else ""])), "dim")


def _cost(place: Place | None) -> float:
    """Time that it is busy for a frame of an env. The slowest come first, and those that have ended before them."""
    if place is None:
        return math.inf
    return place.busy * place.num_envs / max(place.frames, 0.5)


def _table(rows: Sequence[_Row], width: int) -> list[Any]:
    """A header and the rows. The bars get what room there is."""
    from rich.text import Text

    def column(header: str, cells: Sequence[str], spare: int = 0, style: str = "default") -> _Column:
        return _Column(Text(header, "dim"), [Text(cell, style) for cell in cells], bool(header), spare)

    columns = [
        column("", [row.name for row in rows]),
        column("pid", [row.pid for row in rows], spare=3, style="dim"),
        column("envs", [row.envs for row in rows], spare=2),
        column("frames", [row.frames for row in rows], spare=1),
        column("frames/s", [row.frames_per_s for row in rows]),
    ]
    if any(row.restarts for row in rows):
        columns.append(column("restarts", [str(row.restarts or "") for row in rows], style="yellow"))
    legend = (
        Text().append("time in ", "dim").append(Text(" / ").join(Text(name, colour) for name, colour, _ in _SHARES))
    )
    least = max(legend.cell_len, _LEAST_CELLS + _NUMBERS_WIDTH)

    def room() -> int:
        return width - sum(column.width + len(_GAP) for column in columns)

    while room() < least and (spare := max(columns, key=lambda column: column.spare)).spare:
        columns.remove(spare)
    cells = min(_MOST_CELLS, max(_LEAST_CELLS, room() - _NUMBERS_WIDTH))
    columns.append(_Column(legend, [_time(row.place, cells) for row in rows], to_the_right=False))
    return [_joined(columns, number) for number in range(-1, len(rows))]


def _joined(columns: Sequence[_Column], number: int) -> Any:
    """A row of the table; -1 is the header."""
    from rich.text import Text

    line = Text()
    for column in columns:
        cell = column.header if number < 0 else column.cells[number]
        padding = " " * (column.width - cell.cell_len)
        line.append(padding if column.to_the_right else "").append_text(cell)
        line.append("" if column.to_the_right else padding).append(_GAP)
    line.rstrip()
    return line


def _time(place: Place | None, cells: int) -> Any:
    """A bar and its numbers."""
    from rich.text import Text

    if place is None:
        return Text("ended", "red")
    bar = Text()
    for length, (_, colour, sign) in zip(_lengths(place, cells), _SHARES, strict=True):
        bar.append(sign * length, colour)
    return bar.append("".join(f"{getattr(place, name):{_NUMBER_WIDTH}.0%}" for name, _, _ in _SHARES))


def _lengths(place: Place, cells: int) -> list[int]:
    """The cells of the bar that each share gets; always the same number in all."""
    ends, total = [0], 0.0
    for name, _, _ in _SHARES:
        total += getattr(place, name)
        ends.append(min(cells, round(total * cells)))
    ends[-1] = cells
    return [end - start for start, end in itertools.pairwise(ends)]
