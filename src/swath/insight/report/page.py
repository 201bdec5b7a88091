"""The page: its sections, its looks, and the timeline's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swath.insight.report import sections
from swath.insight.report.html import Html, el, joined
from swath.insight.report.lanes import Lanes
from swath.insight.report.run import Run

#: What is drawn in which colour; everything else is the collector's own work.
_COLOURS: Mapping[str, str] = {
    "env": "env",
    "policy": "policy",
    "serve": "policy",
    "answer": "policy",
    "reset": "reset",
    "yours": "yours",
    "evaluate": "yours",
    "deliver": "deliver",
    "store": "deliver",
    "hand over": "deliver",
    "take weights": "weights",
    "update_policy_weights_": "weights",
    "between batches": "waiting",
}
_LONGEST_TITLE = 140
_LEGEND = (
    ("env", "env"),
    ("policy", "policy"),
    ("reset", "reset"),
    ("waiting", "waiting"),
    ("yours", "yours"),
    ("deliver", "deliver, store"),
    ("weights", "weights"),
    ("other", "the rest of collecting"),
)


def report_page(run: Run) -> str:
    """All of it as one HTML page, which fetches nothing.

    >>> page = report_page(Run({"env": "<b>CartPole</b>"}))
    >>> "<b>CartPole</b>" in page, "&lt;b&gt;CartPole" in page
    (False, True)
    """
    title = " · ".join(run.about[key] for key in ("env", "collector") if run.about.get(key)) or "a run"
    title = title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…"
    content = [
        el("header", el("p", "swath report", class_="kicker"), el("h1", title)),
        sections.headline(run),
        sections.notes(run),
        sections.judgement(run),
        _timeline(run.lanes),
        sections.speed(run),
        sections.shares(run),
        sections.lag(run),
        sections.episodes(run),
        sections.slowest(run),
        sections.faults(run),
        sections.efficiency(run),
        sections.what_ran(run),
    ]
    head = joined(
        Html('<meta charset="utf-8">'),
        Html('<meta name="generator" content="swath">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html('<link rel="icon" href="data:,">'),
        el("title", f"swath: {title}"),
        el("style", Html(_read("page.css"))),
    )
    script = el("script", Html(_read("timeline.js"))) if run.lanes is not None else None
    body = el("body", el("main", *content), script)
    return f"<!doctype html>\n{el('html', el('head', head), body, lang='en')}\n"


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _timeline(lanes: Lanes | None) -> Html | None:
    if lanes is None:
        return None
    if not lanes.lanes:
        return sections.section("Timeline", "timeline", el("p", "Nothing was recorded.", class_="nothing"))
    legend = [el("span", el("i", class_=f"key fill {name}"), says, class_="entry") for name, says in _LEGEND]
    buttons = [
        el("button", sign, type="button", data_do=do, aria_label=says, title=says)
        for sign, do, says in (("−", "out", "zoom out"), ("+", "in", "zoom in"), ("all", "all", "the whole time"))
    ]
    finest = None
    if lanes.finest_us:
        finest = (
            f"What took less than {lanes.finest_us / 1e3:.3g} ms is in bursts: each colour has its share of the height."
        )
    left_out = f"{lanes.left_out:,} more threads are not drawn." if lanes.left_out else None
    data = json.dumps(as_numbers(lanes), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return sections.section(
        "Timeline",
        "timeline",
        el("div", el("span", *legend, class_="legend"), el("span", *buttons, class_="buttons"), class_="tools"),
        el(
            "div",
            el("canvas", tabindex="0", role="img", aria_label=_spoken(lanes)),
            el("div", class_="tip", hidden="hidden"),
            class_="timeline",
        ),
        el("noscript", el("p", "The timeline is drawn by a script, which this browser does not run.")),
        el(
            "p",
            "Drag to move, + and − (or Ctrl and the wheel, or two fingers) to zoom; point at something to see what it "
            "is. Lines lead from an update of the weights to the first steps with them; ▾ is one of the slowest steps "
            "or resets. ",
            finest,
            " " if finest and left_out else None,
            left_out,
            class_="note",
        ),
        el("script", Html(data), type="application/json", id="timeline-data"),
    )


def _spoken(lanes: Lanes) -> str:
    said = []
    for lane in lanes.lanes[:12]:
        most = sorted(lane.seconds.items(), key=lambda item: -item[1])[:3]
        said.append(f"{lane.place}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in most))
    return f"Timeline of {lanes.span_us / 1e6:.2f} seconds. " + "; ".join(said)


def colour_of(name: str) -> str:
    """The class of what a slice is called."""
    return "waiting" if name.startswith("wait for") else _COLOURS.get(name, "other")


def as_numbers(lanes: Lanes) -> dict[str, Any]:
    """For the script: a burst is how long after the last one it begins, how long it lasts (µs), and which mix it is."""
    kinds: dict[str, int] = {}
    mixes: dict[tuple[tuple[int, int], ...], int] = {}
    rows = []
    for lane in lanes.lanes:
        bursts: list[int] = []
        at = 0
        for burst in lane.bursts:
            mix = []
            for name, share in burst.shares:
                percents = 4 * round(25 * share)  # no more than can be seen, so that mixes are few
                if percents:
                    mix.append((kinds.setdefault(name, len(kinds)), percents))
            start, end = round(burst.start_us), round(burst.end_us)
            bursts += [start - at, end - start, mixes.setdefault(tuple(mix), len(mixes))]
            at = end
        marks = [[round(mark.at_us), mark.says] for mark in lane.marks]
        rows.append({"place": lane.place, "thread": lane.thread, "bursts": bursts, "marks": marks})
    slow = [
        [round(each.at_us), round(each.took_us), each.place, f"slow {each.what}"]
        for each in (*lanes.slow_steps, *lanes.slow_resets)
    ]
    arrows = [[a.from_lane, round(a.from_us), a.to_lane, round(a.to_us), a.says] for a in lanes.arrows]
    return {
        "span": max(1, round(lanes.span_us)),
        "kinds": [[name, colour_of(name)] for name in kinds],
        "mixes": [list(map(list, mix)) for mix in mixes],
        "lanes": rows,
        "slow": slow,
        "arrows": arrows,
    }
