"""Numbers as people read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

#: Bars of a sparkline, from low to high.
_SPARKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700), duration(200_000)
    ('1:15', '1:01:40', '2 d 07:33')
    """
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def short(value: float) -> str:
    """A number as short as it says enough.

    >>> short(22.0), short(22.345), short(-1234.5), short(0.00123)
    ('22', '22.34', '-1,234', '0.00123')
    """
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def whole(number: float) -> str:
    """A count in nine characters at the most.

    >>> whole(12), whole(1_234_567), whole(12_345_678), whole(3.21e12)
    ('12', '1,234,567', '12.35 M', '3.21 T')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(number) >= max(size, 1e7):
            return f"{number / size:,.4g} {unit}" if number < 1e15 else f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def percent(share: float) -> str:
    """
    >>> percent(0.304)
    '30 %'
    """
    return f"{100 * share:.0f} %"


def count(number: int, what: str) -> str:
    """
    >>> count(1, "worker"), count(1000, "worker")
    ('1 worker', '1,000 workers')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them is. What is no number counts as the greatest.

    >>> quantile([3, 1, 2], 0.5), quantile([5], 0.9)
    (2, 5)
    """
    ordered = sorted(values, key=lambda value: (math.isnan(value), value))
    return ordered[int(share * (len(ordered) - 1) + 0.5)]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line, of the last values or of means of them; of what is not finite, nothing.

    >>> sparkline([1, 2, 3, 4, 8], 10), sparkline([1, 1, 9, 9], 2), sparkline([5, 5], 4)
    ('▁▂▃▄█', '▁█', '▄▄')
    """
    known = _pooled([value for value in values if math.isfinite(value)], width)
    if not known:
        return ""
    low, high = min(known), max(known)
    if not 0 < high - low < math.inf:
        return _SPARKS[3] * len(known)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in known)


def _pooled(values: Sequence[float], width: int) -> list[float]:
    """No more than ``width`` of them: means of neighbours."""
    if len(values) <= width:
        return list(values)
    ends = [len(values) * cell // width for cell in range(width + 1)]
    return [mean(values[start:end]) for start, end in itertools.pairwise(ends)]
