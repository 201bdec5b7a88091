"""What people see of a program that collects, in a terminal: pure functions of its history.

``live_view`` is for what is drawn in place, ``plain_line`` for a log.
"""

from __future__ import annotations

from typing import Any

from swath.insight.history import History
from swath.insight.quantities import duration, whole
from swath.insight.screen.figures import Reword, eta, figures, in_words, mean_of_recent, progress, title, words
from swath.insight.screen.places import places

__all__ = ["Reword", "in_words", "live_view", "plain_line"]

#: From here on, figures and workers stand beside each other.
_WIDE = 120
_FIGURES_WIDTH = 72
_GAP = 3
_LEAST_WIDTH = 40
#: Of workers, unless the height says otherwise.
_PLACES, _PLACES_BESIDE = 8, 16


def live_view(
    history: History, width: int, height: int | None = None, *, titled: bool = True, reword: Reword = str
) -> Any:
    """All that is known, for rich: lines of ``width`` cells at the most, and of ``height`` lines, if it is given.

    Args:
        titled: whether it begins with what the program is.
        reword: what is said of whose turn it is, and as advice, in the words of who does not write Python.

    >>> live_view(History(), 80).plain
    'nothing is known of it yet'
    """
    from rich.text import Text

    width = max(width, _LEAST_WIDTH)
    lines: list[Any] = []
    if history.latest is None:
        lines = [Text("nothing is known of it yet", "dim")]
    else:
        lines = [title(history.latest, width)] if titled else []
        lines.append(progress(history, width))
        if width < _WIDE:
            lines += [*figures(history, width, reword), *words(history, width, reword)]
            room = _PLACES if height is None else max(3, height - len(lines))
            lines += places(history, width, room)
        else:
            said = words(history, width, reword)
            left = figures(history, _FIGURES_WIDTH, reword)
            room = (
                _PLACES_BESIDE if height is None else min(_PLACES_BESIDE, max(3, height - len(lines) - len(said) - 2))
            )
            right = places(history, width - _FIGURES_WIDTH - _GAP, room)
            lines += [Text(), *_beside(left, right), Text(), *said]
    if height is not None:
        lines = lines[: max(1, height)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def plain_line(history: History, reword: Reword = str) -> str:
    """The most important of it, in a line of a log.

    >>> plain_line(History())
    'nothing is known of it yet'
    """
    reading = history.latest
    if reading is None:
        return "nothing is known of it yet"
    total = reading.program.total_frames
    frames = f"{history.frames:,} frames"
    if total:
        frames = f"{history.frames:,} / {total:,} frames ({100 * history.frames // total} %)"
    parts = [frames, f"{whole(history.frames_per_s_now)} frames/s, {whole(history.frames_per_s)} overall"]
    if total and not reading.is_closed:
        parts.append(eta(history))
    parts.append(mean_of_recent(reading))
    if reading.buffer is not None and reading.buffer.num_sampled:
        parts.append(f"{reading.buffer.samples_per_insert:,.2f} samples per insert")
    if reading.restarts:
        parts.append(f"restarts {reading.restarts}")
    if reading.failure is not None:
        parts.append(f"failed: {' '.join(reading.failure.split())}")
    elif reading.is_closed:
        parts.append(f"closed after {duration(reading.age_s)}")
    if (found := history.verdict) is not None:
        parts.append(reword(str(found)))
    return " · ".join(parts)


def _beside(left: list[Any], right: list[Any]) -> list[Any]:
    """Lines of two columns."""
    from rich.text import Text

    lines = []
    for number in range(max(len(left), len(right))):
        line = left[number].copy() if number < len(left) else Text()
        line.truncate(_FIGURES_WIDTH, overflow="ellipsis", pad=True)
        lines.append(line.append(" " * _GAP).append_text(right[number] if number < len(right) else Text()))
    return lines
