"""Workers on the screen: a line for each, with how it spends its time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

#: A worker as ``collector.stats()["workers"]`` describes it.
Worker = Mapping[str, Any]

#: More workers than this are only counted.
MOST_LINES = 8
_BAR_CELLS = 12
#: How a worker spends its time: the name, the colour, and the sign for terminals without colours.
_SHARES = (("env", "green", "█"), ("policy", "magenta", "▓"), ("waiting", "bright_black", "░"))


def busy_share(workers: Sequence[Worker]) -> float:
    """How much of their time workers do not wait."""
    return 1 - sum(worker["waiting"] for worker in workers) / len(workers)


def worker_table(workers: Sequence[Worker]) -> Any:
    """The first few workers, for rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "right", "left", "right", "right", "left"):
        table.add_column(no_wrap=True, justify=justify)
    table.add_row("worker", "pid", "envs", "frames", "frames/s", _legend(), style="dim")
    for worker in workers[:MOST_LINES]:
        table.add_row(
            str(worker["worker"]),
            "-" if worker["pid"] is None else str(worker["pid"]),
            show_range(worker["envs"]),
            f"{worker['frames']:,}",
            f"{worker['fps']:,.0f}",
            _time(worker) if worker["alive"] else Text("ended", "dim"),
        )
    more = len(workers) - MOST_LINES
    return Group(table, Text(f"     … and {more:,} more", "dim")) if more > 0 else table


def _legend() -> Any:
    from rich.text import Text

    names = [Text(name, colour) for name, colour, _ in _SHARES]
    return Text("time in ").append(Text(" / ").join(names))


def _time(worker: Worker) -> Any:
    """A bar and its numbers."""
    from rich.text import Text

    bar = Text(no_wrap=True)
    for cells, (_, colour, sign) in zip(_cells(worker), _SHARES, strict=True):
        bar.append(sign * cells, colour)
    bar.append("".join(f" {worker[name]:4.0%}" for name, _, _ in _SHARES))
    return bar.append(f"  restarts {worker['restarts']}", "yellow") if worker["restarts"] else bar


def _cells(worker: Worker) -> list[int]:
    """The cells of the bar that each share gets; always the same number in all."""
    ends, total = [0], 0.0
    for name, _, _ in _SHARES:
        total += worker[name]
        ends.append(min(_BAR_CELLS, round(total * _BAR_CELLS)))
    ends[-1] = _BAR_CELLS
    return [end - start for start, end in itertools.pairwise(ends)]


def show_range(numbers: Sequence[int]) -> str:
    """
    >>> show_range([3]), show_range(range(4, 8))
    ('3', '4–7')
    """
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
