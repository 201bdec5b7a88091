"""Charts: shapes are SVG that is stretched to the width of the page, text is HTML, so that it is never stretched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swath.insight.report.html import Html, el, joined

_MOST_DOTS = 1500
_WIDTH, _HEIGHT = 1000, 300


@dataclass(frozen=True)
class Series:
    """Points of a chart. ``look`` is its class: how it is drawn is said in page.css."""

    name: str
    look: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_line: bool = True


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_unit: str,
    y_unit: str,
    show_x: Callable[[float], str],
    from_zero: bool = True,
) -> Html:
    """A figure of lines and dots over one x-axis. What is not finite is left out, and said."""
    found = [(each, *_finite(each)) for each in series]
    left_out = sum(len(each.xs) - len(xs) for each, xs, _ in found)
    found = [(each, xs, ys) for each, xs, ys in found if len(xs)]
    if not found:
        why = f" {left_out:,} values are not finite." if left_out else ""
        return el("p", f"{title}: nothing to draw.{why}", class_="nothing")
    x_low, x_high = _range(np.concatenate([xs for _, xs, _ in found]), 1.0)
    y_low, y_high = _range(np.concatenate([ys for _, _, ys in found]), 1.0, from_zero)
    y_ticks = ticks(y_low, y_high, 4)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def at(xs: np.ndarray, ys: np.ndarray) -> list[tuple[float, float]]:
        across = (xs - x_low) / (x_high - x_low) * _WIDTH
        down = (y_high - ys) / (y_high - y_low) * _HEIGHT
        return list(zip(across.round(1).tolist(), down.round(1).tolist(), strict=True))

    grid = [
        el("path", d=f"M0 {_down(tick, y_low, y_high) * _HEIGHT / 100:.1f}H{_WIDTH}", class_="grid") for tick in y_ticks
    ]
    shapes = [_line(each, at(xs, ys)) if each.is_line else _dots(each, at(xs, ys)) for each, xs, ys in found]
    says = "; ".join(
        f"{each.name}: {len(ys):,} values from {show_number(ys.min())} to {show_number(ys.max())}, "
        f"mean {show_number(ys.mean())}"
        for each, _, ys in found
    )
    svg = el(
        "svg", el("title", f"{title}, {y_unit}"), el("desc", says), *grid, *shapes, viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none", role="img", aria_label=f"{title}, {y_unit}. {says}",
    )  # fmt: skip
    labels_y = [el("span", show_number(tick), style=f"top:{_down(tick, y_low, y_high):.2f}%") for tick in y_ticks]
    labels_x = [
        el("span", show_x(tick), style=f"left:{100 * (tick - x_low) / (x_high - x_low):.2f}%")
        for tick in ticks(x_low, x_high, 5)
        if x_low <= tick <= x_high
    ]
    legend = None
    if len(found) > 1:
        entries = [el("span", el("i", class_=f"key {each.look}"), each.name, class_="entry") for each, _, _ in found]
        legend = el("span", *entries, class_="legend")
    note = el("p", f"{left_out:,} values are not finite, and not drawn.", class_="note") if left_out else None
    return el(
        "figure",
        el("figcaption", el("b", title), el("span", y_unit, class_="unit"), legend),
        el(
            "div",
            el("div", *labels_y, class_="ys", aria_hidden="true"),
            el("div", svg, class_="plot"),
            el("div", *labels_x, class_="xs", aria_hidden="true"),
            el("div", x_unit, class_="x-unit"),
            class_="chart",
        ),
        note,
    )


def bars(title: str, unit: str, values: Sequence[tuple[str, float]], show: Callable[[float], str]) -> Html:
    """A figure with a bar for each; its label is below it."""
    most = max((value for _, value in values), default=0.0) or 1.0
    columns = [
        el(
            "div",
            el("span", show(value), class_="value"),
            el("span", class_="bar", style=f"height:{100 * value / most:.2f}%"),
            class_="column",
            title=f"{label}: {show(value)}",
        )
        for label, value in values
    ]
    labels = [el("span", label) for label, _ in values]
    says = ", ".join(f"{label}: {show(value)}" for label, value in values)
    return el(
        "figure",
        el("figcaption", el("b", title), el("span", unit, class_="unit")),
        el("div", *columns, class_="columns", role="img", aria_label=f"{title}, {unit}. {says}"),
        el("div", *labels, class_="columns labels", aria_hidden="true"),
    )


def stack(shares: Sequence[tuple[str, float]]) -> Html:
    """One bar of several parts, each of a class of its own."""
    says = ", ".join(f"{name} {percent(share)}" for name, share in shares)
    parts = [el("i", class_=f"fill {name}", style=f"width:{100 * share:.2f}%") for name, share in shares if share > 0]
    return el("div", *parts, class_="stack", role="img", aria_label=says, title=says)


def _finite(series: Series) -> tuple[np.ndarray, np.ndarray]:
    xs, ys = np.asarray(series.xs, dtype=np.float64), np.asarray(series.ys, dtype=np.float64)
    is_sound = np.isfinite(xs) & np.isfinite(ys)
    return xs[is_sound], ys[is_sound]


def _range(values: np.ndarray, least: float, from_zero: bool = False) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = (low, low + least) if from_zero else (low - least / 2, high + least / 2)
    return low, high


def _down(value: float, low: float, high: float) -> float:
    """Where it is from above, in percent."""
    return 100 * (high - value) / (high - low)


def _line(series: Series, points: list[tuple[float, float]]) -> Html:
    if len(points) == 1:
        return _dots(series, points)
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return el("path", d=path, class_=f"line {series.look}")


def _dots(series: Series, points: list[tuple[float, float]]) -> Html:
    """Lines without a length: they stay round, however the picture is stretched."""
    step = max(1, math.ceil(len(points) / _MOST_DOTS))
    path = "".join(f"M{x:g} {y:g}h0" for x, y in points[::step])
    return el("path", d=path, class_=f"dots {series.look}")


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from below ``low`` to above ``high``.

    >>> ticks(0, 730, 4)
    [0.0, 200.0, 400.0, 600.0, 800.0]
    """
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 12) for number in range(first, last + 1)]


def show_number(value: float) -> str:
    """
    >>> [show_number(value) for value in (0, 0.0123, 12.5, 950, 12_340, 2_500_000)]
    ['0', '0.012', '12.5', '950', '12.3 k', '2.5 M']
    """
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g} {unit}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"


def show_seconds(seconds: float) -> str:
    """
    >>> [show_seconds(value) for value in (0.00002, 0.0042, 2.5, 75, 7300)]
    ['20 µs', '4.2 ms', '2.5 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(head: Sequence[object], rows: Sequence[Sequence[object]], numbers_from: int = 1) -> Html:
    """Scrolls by itself where it is too wide. Columns from ``numbers_from`` on are of numbers."""

    def cell(name: str, at: int, what: object) -> Html:
        return el(name, what, class_="number" if at >= numbers_from else None)

    return el(
        "div",
        el(
            "table",
            el("thead", el("tr", *(cell("th", at, what) for at, what in enumerate(head)))),
            el("tbody", *(el("tr", *(cell("td", at, what) for at, what in enumerate(row))) for row in rows)),
        ),
        class_="scroll",
        tabindex="0",
    )


def prose(*parts: object) -> Html:
    return el("p", joined(*parts))
