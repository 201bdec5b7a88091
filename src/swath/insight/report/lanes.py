"""The events of a trace as lanes that can be drawn: what each thread did when, in bursts, however long the run was.

Where one slice lies in another, what counts is the inner one; so a lane has one thing at a time.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np

#: About so many, of all lanes together; what is shorter than these allow becomes part of a burst.
_MOST_BURSTS = 32_000
_MOST_LANES = 40
_MOST_ARROWS = 300
_MOST_SAMPLES = 400
_MOST_SLOW = 10
#: Steps of env workers that take longer than this are slow ones. (Others say so themselves.)
_SLOW_US = 2000.0
#: Times in a trace are rounded: so far one slice may reach into the next.
_ROUNDING_US = 0.01
_PROCESS = re.compile(r"(?P<name>.*) \(pid (?P<pid>\d+)(?:, started again (?P<restarts>\d+) ×)?\)")


class NoTrace(ValueError):
    """What was read is no trace."""


@dataclass(frozen=True)
class Burst:
    """What a thread did for a while, in microseconds since the beginning: shares by name, or one that is all of it."""

    start_us: float
    end_us: float
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Mark:
    """Something that happened in a moment."""

    at_us: float
    says: str


@dataclass
class Lane:
    """A thread of a process; also of the processes that came after it, when it was started again."""

    place: str
    thread: str
    bursts: list[Burst] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    #: Seconds by name, before anything was merged.
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Slow:
    """A step, or a reset, that took long. Of a step, ``parts`` says what of it was what, in milliseconds."""

    what: str
    place: str
    at_us: float
    took_us: float
    num_envs: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrow:
    """Weights on their way: from a lane at a time to a lane at a time."""

    from_lane: int
    from_us: float
    to_lane: int
    to_us: float
    says: str


@dataclass(frozen=True)
class Lanes:
    """Everything of a trace that is drawn.

    Args:
        finest_us: what is shorter is only seen as part of a burst; 0 if everything is there.
        left_out: how many lanes there were beside these.
        counters: by name, times in microseconds and values.
    """

    span_us: float
    lanes: list[Lane]
    arrows: list[Arrow]
    slow_steps: list[Slow]
    slow_resets: list[Slow]
    counters: Mapping[str, tuple[list[float], list[float]]]
    finest_us: float = 0.0
    left_out: int = 0

    @classmethod
    def of_events(cls, events: Iterable[Mapping[str, Any]]) -> Lanes:
        """Of the events that a trace has (``timeline/chrome.py``), each of which is looked at once.

        Raises:
            NoTrace: something is not an event of a trace.
        """
        reader = _Reader()
        for number, event in enumerate(events):
            try:
                reader.add(event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise NoTrace(f"its event {number:,} is none of a trace ({type(error).__name__}: {error})") from None
        return reader.lanes()


@dataclass
class _Thread:
    """The slices of a thread, as they come."""

    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("i"))


class _Reader:
    """Sorts events in; names of processes and threads may come behind what they did."""

    def __init__(self) -> None:
        self._processes: dict[Any, str] = {}
        self._thread_names: dict[tuple[Any, Any], str] = {}
        self._threads: dict[tuple[Any, Any], _Thread] = defaultdict(_Thread)
        self._names: dict[str, int] = defaultdict(count().__next__)
        self._counters: dict[str, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
        self._arrow_ends: dict[Any, list[tuple[tuple[Any, Any], float, str]]] = defaultdict(list)
        self._slow: dict[str, list[tuple[float, float, Any, Mapping[str, Any]]]] = {"step": [], "reset": []}

    def add(self, event: Mapping[str, Any]) -> None:
        kind, pid, tid = event["ph"], event.get("pid"), event.get("tid")
        if kind == "M":
            if event["name"] == "process_name":
                self._processes[pid] = str(event["args"]["name"])
            elif event["name"] == "thread_name":
                self._thread_names[pid, tid] = str(event["args"]["name"])
        elif kind == "X":
            self._add_slice(str(event["name"]), event, (pid, tid))
        elif kind == "C":
            for name, value in event["args"].items():
                times, values = self._counters[event["name"] if name == "value" else f"{event['name']}, {name}"]
                times.append(_finite(event["ts"]))
                values.append(float(value))
        elif kind in "sf":
            says = f"weights of version {event['args']['version']}" if kind == "f" and event.get("args") else ""
            self._arrow_ends[event.get("cat"), event["id"]].append(((pid, tid), _finite(event["ts"]), says))

    def _add_slice(self, name: str, event: Mapping[str, Any], thread: tuple[Any, Any]) -> None:
        start, took = _finite(event["ts"]), _finite(event["dur"])
        slices, args = self._threads[thread], event.get("args") or {}
        slices.starts.append(start)
        slices.ends.append(start + max(0.0, took))
        slices.names.append(self._names[name])
        if took > _SLOW_US:
            if name == "slow step" or (name == "steps" and args.get("orders") == 1):
                self._note_slow("step", took, start, thread, args)
            elif name == "reset":
                self._note_slow("reset", took, start, thread, args)

    def _note_slow(self, what: str, took: float, start: float, thread: Any, args: Mapping[str, Any]) -> None:
        slow = self._slow[what]
        slow.append((took, start, thread, args))
        if len(slow) > 50 * _MOST_SLOW:
            slow.sort(key=lambda each: -each[0])
            del slow[_MOST_SLOW:]

    # -- the end ---------------------------------------------------------------------------------------------------

    def lanes(self) -> Lanes:
        beginnings = [min(thread.starts) for thread in self._threads.values()]
        beginnings += [times[0] for times, _ in self._counters.values()]
        zero = min(beginnings, default=0.0)
        span = max((max(thread.ends) for thread in self._threads.values()), default=zero) - zero
        sources = self._by_place()
        chosen = self._most_telling(sources)
        names = list(self._names)
        parts = {
            key: [_flat(self._threads[thread], zero) for thread in sources[key] if thread in self._threads]
            for key in chosen
        }
        total = sum(len(part[0]) for flat in parts.values() for part in flat)
        finest = 0.0 if total <= _MOST_BURSTS else span * len(chosen) / _MOST_BURSTS
        lanes = [self._lane(key, sources[key], parts[key], names, finest, zero) for key in chosen]
        number = {thread: at for at, key in enumerate(chosen) for thread in sources[key]}
        return Lanes(
            span_us=span,
            lanes=lanes,
            arrows=self._arrows(number, zero),
            slow_steps=self._slowest("step", zero),
            slow_resets=self._slowest("reset", zero),
            counters={name: _thinned(times, values, zero) for name, (times, values) in self._counters.items()},
            finest_us=finest,
            left_out=len(sources) - len(chosen),
        )

    def _place_of(self, pid: Any) -> tuple[str, int]:
        """What a process is to the user, and how often it had been started again."""
        called = self._processes.get(pid, f"process {pid}")
        found = _PROCESS.fullmatch(called)
        return (called, 0) if found is None else (found["name"], int(found["restarts"] or 0))

    def _by_place(self) -> dict[tuple[str, str], list[tuple[Any, Any]]]:
        """Threads by place and name, those that came later behind."""
        found: dict[tuple[str, str], list[tuple[Any, Any]]] = defaultdict(list)
        for pid, tid in sorted(self._threads, key=lambda thread: (_order(thread[0]), _order(thread[1]))):
            place, _ = self._place_of(pid)
            found[place, self._thread_names.get((pid, tid), f"thread {tid}")].append((pid, tid))
        return found

    def _most_telling(self, sources: Mapping[tuple[str, str], list[Any]]) -> list[tuple[str, str]]:
        """The owner, those that were started again, and the first others; in their order."""
        keys = list(sources)
        if len(keys) <= _MOST_LANES:
            return keys
        first = (
            set(keys[:1])
            | {key for key in keys if len(sources[key]) > 1}
            | {(s.place, "steps") for s in self._all_slow()}
        )
        chosen = [key for key in keys if key in first][:_MOST_LANES]
        chosen += [key for key in keys if key not in first][: _MOST_LANES - len(chosen)]
        return [key for key in keys if key in set(chosen)]

    def _all_slow(self) -> list[Slow]:
        return self._slowest("step", 0.0) + self._slowest("reset", 0.0)

    def _lane(
        self, key: tuple[str, str], threads: list[Any], parts: list[Any], names: list[str], finest: float, zero: float
    ) -> Lane:
        lane = Lane(*key)
        seconds: dict[str, float] = defaultdict(float)
        for flat in parts:
            lane.bursts += _bursts(flat, names, finest)
            for name, took in zip(flat[2], flat[1] - flat[0], strict=True):
                seconds[names[name]] += took / 1e6
        lane.bursts.sort(key=lambda burst: burst.start_us)
        for pid, tid in threads:
            _, restarts = self._place_of(pid)
            if restarts:
                at = min(self._threads[pid, tid].starts) - zero
                lane.marks.append(
                    Mark(at, f"{key[0]} was started again" + (f" ({restarts} ×)" if restarts > 1 else ""))
                )
        lane.seconds = dict(seconds)
        return lane

    def _arrows(self, number: Mapping[Any, int], zero: float) -> list[Arrow]:
        found = []
        for ends in self._arrow_ends.values():
            if len(ends) == 2 and all(thread in number for thread, _, _ in ends):
                (start, at, _), (end, then, says) = ends
                found.append(Arrow(number[start], at - zero, number[end], then - zero, says))
        return found[:: max(1, math.ceil(len(found) / _MOST_ARROWS))]

    def _slowest(self, what: str, zero: float) -> list[Slow]:
        found = []
        for took, start, (pid, _), args in sorted(self._slow[what], key=lambda each: -each[0])[:_MOST_SLOW]:
            parts = {key.removesuffix("_ms"): value for key, value in args.items() if key.endswith("_ms")}
            num_envs = args.get("envs")
            found.append(Slow(what, self._place_of(pid)[0], start - zero, took, num_envs, parts))
        return found


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no time")
    return number


def _order(value: Any) -> tuple[bool, Any]:
    return (False, value) if isinstance(value, int | float) else (True, str(value))


def _flat(thread: _Thread, zero: float) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Starts, ends and names of what lies innermost, one behind the other."""
    starts, ends = np.asarray(thread.starts) - zero, np.asarray(thread.ends) - zero
    order = np.lexsort((-ends, starts))
    found: list[tuple[float, float, int]] = []
    stack: list[tuple[float, int]] = []
    at = -math.inf

    def until(time: float) -> None:
        """What is innermost lasts until then."""
        nonlocal at
        if stack and time > at:
            found.append((at, time, stack[-1][1]))
        at = max(at, time)

    for start, end, name in zip(
        starts[order].tolist(), ends[order].tolist(), np.asarray(thread.names)[order].tolist(), strict=True
    ):
        while stack and (stack[-1][0] <= start + _ROUNDING_US or stack[-1][0] < end - _ROUNDING_US):
            until(min(stack[-1][0], start))  # (one that reaches beyond what it began in follows it)
            stack.pop()
        until(start)
        stack.append((end, name))
    while stack:
        until(stack[-1][0])
        stack.pop()
    columns = np.array([row[:2] for row in found]).reshape(-1, 2)
    return columns[:, 0], columns[:, 1], [row[2] for row in found]


def _bursts(flat: tuple[np.ndarray, np.ndarray, list[int]], names: list[str], finest: float) -> list[Burst]:
    """What is shorter than the finest that is drawn is put together with what is beside it."""
    found: list[Burst] = []
    begun = ended = 0.0
    took: dict[int, float] = {}

    def close() -> None:
        if took:
            whole = sum(took.values())
            by_share = sorted(took.items(), key=lambda item: -item[1])
            found.append(Burst(begun, ended, tuple((names[name], part / whole) for name, part in by_share)))
        took.clear()

    for start, end, name in zip(flat[0].tolist(), flat[1].tolist(), flat[2], strict=True):
        stands_alone = end - start >= finest
        if took and (stands_alone or start - ended > finest / 4 or end - begun > finest):
            close()
        if not took:
            begun = start
        took[name] = took.get(name, 0.0) + end - start
        ended = end
        if stands_alone:
            close()
    close()
    return found


def _thinned(times: array[float], values: array[float], zero: float) -> tuple[list[float], list[float]]:
    """Means of as many neighbours as it takes."""
    edges = np.linspace(0, len(times), min(len(times), _MOST_SAMPLES) + 1).astype(int)
    pieces = [slice(first, last) for first, last in pairwise(edges.tolist())]
    return (
        [float(np.mean(times[piece])) - zero for piece in pieces],
        [float(np.mean(values[piece])) for piece in pieces],
    )
