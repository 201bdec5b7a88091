"""What is on the page, one section each. A section about which nothing is known is None."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from swath.insight.facts import Facts, Place
from swath.insight.reading import Reading
from swath.insight.report.charts import (
    Series,
    bars,
    chart,
    percent,
    prose,
    show_number,
    show_seconds,
    stack,
    table,
)
from swath.insight.report.html import Html, el, joined
from swath.insight.report.lanes import Slow
from swath.insight.report.run import EpisodeSeries, Run
from swath.insight.verdict import verdict

_MOST_PLACES = 24
_MOST_EVENTS = 50
_MOST_ENVS = 6
#: Of so many episodes is the mean that is drawn as a line.
_RUNNING = 50
_MOST_BARS = 24
_FEW_RATES = 10
_RATE_BEGINS_US = 250_000


def section(title: str, name: str, *content: object) -> Html:
    return el("section", el("h2", title), *content, id=name)


def headline(run: Run) -> Html | None:
    """The numbers that one wants first."""
    numbers: list[tuple[str, str]] = []
    if run.readings:
        last = run.readings[-1]
        of = last.program.total_frames
        numbers.append((f"{last.frames:,}", "frames" if of is None or of == last.frames else f"frames of {of:,}"))
        numbers.append((show_number(last.frames / last.age_s) if last.age_s > 0 else "–", "frames/s, overall"))
        numbers.append((show_seconds(last.age_s), "since it was made"))
    if run.episodes is not None and len(run.episodes):
        count = run.readings[-1].episodes.count if run.readings else len(run.episodes)
        numbers.append((f"{max(count, len(run.episodes)):,}", "episodes"))
        recent = run.episodes.returns[-100:]
        recent = recent[np.isfinite(recent)]
        if len(recent):
            numbers.append((show_number(float(recent.mean())), f"mean return of the last {len(recent)}"))
    if run.readings and run.readings[-1].restarts:
        numbers.append((str(run.readings[-1].restarts), "restarts"))
    if not numbers:
        return None
    tiles = [el("div", el("b", number), el("span", what), class_="tile") for number, what in numbers]
    return el("div", *tiles, class_="tiles")


def judgement(run: Run) -> Html | None:
    facts = run.facts()
    if facts is None:
        return None
    found = verdict(facts)
    return el(
        "section",
        el("h2", "Verdict"),
        el("p", found.says[:1].upper() + found.says[1:] + ".", class_="says"),
        el("p", el("b", "Next to try: "), found.advice + ".") if found.advice else None,
        id="verdict",
        class_=f"verdict {found.limit.name.lower().replace('_', '-')}",
    )


def speed(run: Run) -> Html | None:
    times, rates = run.rates()
    unit = "seconds since the collector was made"
    if len(rates) < _FEW_RATES and run.lanes is not None and "frames/s" in run.lanes.counters:  # of a short run
        known = list(zip(*run.lanes.counters["frames/s"], strict=True))
        # At first the rate is that of a few frames: not of half a second, as later.
        known = [point for point in known if point[0] > _RATE_BEGINS_US] or known
        times, rates = [time / 1e6 for time, _ in known], [rate for _, rate in known]
        unit = "seconds of the timeline"
    if not rates:
        return None
    series = [Series("frames/s", "env-line", times, rates)]
    content = [chart("Frames per second", series, x_unit=unit, y_unit="frames/s", show_x=show_number)]
    for title, name, y_unit in (
        ("Frames in the replay buffer", "frames in the buffer", "frames"),
        ("Shared memory", "shared memory, MB", "MB"),
    ):
        if run.lanes is not None and any(run.lanes.counters.get(name, ((), ()))[1]):
            found, values = run.lanes.counters[name]
            series = [Series(name, "policy-line", [time / 1e6 for time in found], values)]
            content.append(chart(title, series, x_unit="seconds of the timeline", y_unit=y_unit, show_x=show_number))
    return section("Over time", "speed", el("div", *content, class_="pair three"))


# -- shares of time ----------------------------------------------------------------------------------------------------


def shares(run: Run) -> Html | None:
    facts = run.facts()
    if facts is None or not facts.places:
        return None
    last = run.readings[-1]
    known = {place.name: place for place in last.places}
    places = _most_telling(facts.places)
    rows = []
    if len(facts.places) > 1:
        mean = {share: facts.mean(share) for share in ("env", "policy", "waiting")}
        rows.append(["mean of all", _bar(mean), *map(percent, mean.values()), _rate(facts.frames, facts), ""])
    for place in places:
        parts = {"env": place.env, "policy": place.policy, "waiting": place.waiting}
        reading = known.get(place.name)
        restarts = str(reading.restarts) if reading is not None and reading.restarts else ""
        rows.append(
            [_named(place.name, run), _bar(parts), *map(percent, parts.values()), _rate(place.frames, facts), restarts]
        )
    legend = [
        el("span", el("i", class_=f"key fill {name}"), says, class_="entry")
        for name, says in (("env", "in envs, resets included"), ("policy", "in the policy"), ("waiting", "waiting"))
    ]
    others = len(facts.places) - len(places)
    return section(
        "Shares of time",
        "shares",
        el("p", *legend, class_="legend"),
        table(["", "share of its time", "env", "policy", "waiting", "frames/s", "restarts"], rows, numbers_from=2),
        el("p", f"Those that take longest for a frame; {others:,} more are not shown.", class_="note")
        if others
        else None,
        _your_turn(facts),
    )


def _your_turn(facts: Facts) -> Html | None:
    if facts.in_background and not facts.held_back:
        return None  # nobody takes turns
    parts = [("yours", facts.yours), ("held", facts.held_back)]
    rest = max(0.0, 1 - facts.yours - facts.held_back)
    said = [f"Of {show_seconds(facts.seconds)}, you had the turn {percent(facts.yours)}"]
    if facts.held_back:
        said.append(f", and samples_per_insert held collecting back {percent(facts.held_back)}")
    return el("div", prose(*said, "."), stack([*parts, ("waiting", rest)]), class_="turns")


def _bar(parts: dict[str, float]) -> Html:
    return stack(list(parts.items()))


def _rate(frames: float, facts: Facts) -> str:
    return show_number(frames / facts.seconds) if facts.seconds > 0 else "–"


def _most_telling(places: Sequence[Place]) -> Sequence[Place]:
    if len(places) <= _MOST_PLACES:
        return places
    cost = {id(place): place.busy * place.num_envs / place.frames if place.frames else math.inf for place in places}
    chosen = {id(place) for place in sorted(places, key=lambda place: -cost[id(place)])[:_MOST_PLACES]}
    return [place for place in places if id(place) in chosen]


def _named(place: str, run: Run) -> str:
    """A place, and which envs it has."""
    envs = run.envs.get(place)
    if not envs:
        return place
    numbers = _spans(sorted(envs))
    return f"{place} (env{'' if len(envs) == 1 else 's'} {numbers})"


def _spans(numbers: Sequence[int]) -> str:
    """Numbers that follow each other, in short."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    words = ["–".join(map(str, span)) for span in spans]
    return ", ".join(words[:_MOST_ENVS]) + (", …" if len(words) > _MOST_ENVS else "")


# -- policy lag, episodes ----------------------------------------------------------------------------------------------


def lag(run: Run) -> Html | None:
    last = run.readings[-1] if run.readings else None
    if last is None or not sum(last.lags):
        return None
    lags = list(last.lags)
    whole = sum(lags)
    while not lags[-1]:
        lags.pop()
    values = [(str(at), frames / whole) for at, frames in enumerate(lags)]
    if len(values) > _MOST_BARS:
        beyond = sum(share for _, share in values[_MOST_BARS - 1 :])
        values = [*values[: _MOST_BARS - 1], (f"{_MOST_BARS - 1}+", beyond)]
    half, most = (last.lag_quantile(share) for share in (0.5, 0.95))
    return section(
        "Policy lag",
        "lag",
        prose(
            "How many updates old the policy was that collected a frame, when the frame was delivered. "
            f"Half of the frames: {half} or fewer; 95 %: {most} or fewer. There were {last.policy_version:,} updates."
        ),
        bars("Frames by policy lag", "share of frames, by updates", values, _small_percent)
        if len(values) > 1
        else None,
    )


def _small_percent(share: float) -> str:
    return "" if not share else f"{100 * share:.0f} %" if share >= 0.01 else "<1 %"


def episodes(run: Run) -> Html | None:
    known = run.episodes
    if known is None:
        return None
    if not len(known):
        return section("Episodes", "episodes", prose("No episode has ended."))

    def draw(title: str, values: np.ndarray, unit: str) -> Html:
        xs = known.frames
        series = [Series("an episode", "env-dot", xs.tolist(), values.tolist(), is_line=False)]
        if len(known) >= 2 * _RUNNING:
            means, at = _running_mean(known, values)
            series.append(Series(f"mean of {_RUNNING}", "policy-line", at, means))
        return chart(title, series, x_unit="frames", y_unit=unit, show_x=show_number, from_zero=False)

    count = run.readings[-1].episodes.count if run.readings else len(known)
    before = f"The last {len(known):,} of {count:,}." if count > len(known) else None
    return section(
        "Episodes",
        "episodes",
        prose(before) if before else None,
        el(
            "div",
            draw("Returns", known.returns.astype(np.float64), "sum of rewards"),
            draw("Lengths", known.lengths.astype(np.float64), "steps"),
            class_="pair",
        ),
    )


def _running_mean(known: EpisodeSeries, values: np.ndarray) -> tuple[list[float], list[float]]:
    """Of those that are finite; no more points than can be seen."""
    is_sound = np.isfinite(values)
    values, frames = values[is_sound], known.frames[is_sound]
    if len(values) < _RUNNING:
        return [], []
    sums = np.cumsum(np.insert(values, 0, 0.0))
    means, at = (sums[_RUNNING:] - sums[:-_RUNNING]) / _RUNNING, frames[_RUNNING - 1 :]
    is_last = np.append(at[1:] != at[:-1], True)  # of those that came with one batch
    means, at = means[is_last], at[is_last]
    step = max(1, len(means) // 600)
    return means[::step].tolist(), at[::step].tolist()


# -- what took long, what went wrong -----------------------------------------------------------------------------------


def slowest(run: Run) -> Html | None:
    if run.lanes is None:
        return None
    steps, resets = run.lanes.slow_steps, run.lanes.slow_resets
    if not steps and not resets:
        return section("Slowest steps and resets", "slowest", prose("No step, and no reset, took longer than 2 ms."))

    def rows(slow: Sequence[Slow]) -> list[list[object]]:
        return [
            [_named(each.place, run), f"{each.at_us / 1e6:.2f}", f"{each.took_us / 1e3:.1f}", *_parts(each)]
            for each in slow
        ]

    of_resets = [[*row[:3], each.num_envs or ""] for row, each in zip(rows(resets), resets, strict=True)]
    head = ["where", "at, s", "took, ms", "env, ms", "policy, ms", "reset, ms"]
    return section(
        "Slowest steps and resets",
        "slowest",
        prose("Times are those of the timeline. A step is one of all envs that its place steps together."),
        el(
            "div",
            el("div", el("h3", "Steps"), table(head, rows(steps))) if steps else None,
            el("div", el("h3", "Resets"), table([*head[:3], "envs"], of_resets)) if resets else None,
            class_="pair",
        ),
    )


def _parts(slow: Slow) -> list[str]:
    return [f"{slow.parts[part]:.1f}" if part in slow.parts else "" for part in ("env", "policy", "reset")]


def faults(run: Run) -> Html | None:
    found = run.events()
    marks = []
    if run.lanes is not None and not found:
        marks = [(mark.at_us / 1e6, mark.says) for lane in run.lanes.lanes for mark in lane.marks]
    if not run.readings and not marks and run.lanes is None:
        return None
    if found:
        rows: Sequence[Sequence[object]]
        rows = [[f"{event.at_s:.1f}", _named(event.place, run), event.says] for event in found]
        head = ["after, s", "who", "what"]
    else:
        rows, head = [[f"{at:.2f}", says] for at, says in dict.fromkeys(marks)], ["at, s of the timeline", "what"]
    if not rows:
        return section("Faults and restarts", "faults", prose("None."))
    more = len(rows) - _MOST_EVENTS
    return section(
        "Faults and restarts",
        "faults",
        table(head, rows[:_MOST_EVENTS], numbers_from=99),
        el("p", f"{more:,} more are not shown.", class_="note") if more > 0 else None,
    )


def efficiency(run: Run) -> Html | None:
    found = run.ideal()
    if found is None:
        return None
    what = "steps sleep, so each place counts" if found.sleeps else "cores that places have"
    parts = [
        ["X", "frames/s that were reached while collecting had the turn", show_number(found.fps)],
        ["s", "a step of one env, its share of resets included", show_seconds(found.step_s)],
        ["f(b)/b", "the policy, for one frame", show_seconds(found.policy_s)],
        ["C", f"steps at a time: {what}", str(found.at_a_time)],
        ["X*", "C / (s + f(b)/b): frames/s if collecting cost nothing", show_number(found.ideal_fps)],
        ["η", "X / X*: the share of it that was reached", percent(found.efficiency)],
    ]
    return section(
        "η, against the ideal",
        "ideal",
        table(["", "what it is", "here"], parts, numbers_from=2),
        el(
            "p",
            "s and f(b)/b are what places measured of themselves during this run, with whatever else ran on their "
            "cores; the copy of a frame (c) is not measured, so X* is a little too high. The benchmarks measure all "
            "three alone.",
            class_="note",
        ),
    )


def what_ran(run: Run) -> Html:
    entries = [
        el("div", el("dt", name), el("dd", el("code", value) if name == "command" else value))
        for name, value in run.about.items()
    ]
    return section("What ran", "what-ran", el("dl", *entries))


def notes(run: Run) -> Html | None:
    if not run.notes:
        return None
    return el("aside", joined(*(el("p", note) for note in run.notes)), class_="notes")


def about_reading(reading: Reading, seed: object = None) -> dict[str, str]:
    """What ran, as of a reading."""
    import datetime

    program = reading.program
    at = datetime.datetime.fromtimestamp(program.started_at, datetime.UTC)
    about = {
        "collector": program.collector,
        "env": program.env,
        "envs": f"{program.num_envs:,}",
        "layout": program.layout or "in this process",
        "frames per batch": f"{program.frames_per_batch:,}",
        "frames in all": "endless" if program.total_frames is None else f"{program.total_frames:,}",
        "seed": "not set" if seed is None else str(seed),
        "command": program.command,
        "began": at.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "process": str(program.pid),
        "cores": str(program.cores),
    }
    if reading.buffer is not None:
        buffer = reading.buffer
        about["replay buffer"] = (
            f"{buffer.size:,} of {buffer.capacity:,} frames, {buffer.write_count:,} written, {buffer.num_sampled:,} "
            f"sampled: {buffer.samples_per_insert:.2f} samples per insert"
        )
    if program.versions:
        about["versions"] = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    return about
