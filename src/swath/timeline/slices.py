"""Records as slices that nest: what can be drawn, and added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swath.timeline.recorder import STRETCH_S, Kind, Record
from swath.timeline.recording import Recording

#: What slices are called.
NAMES: Mapping[Kind, str] = {
    Kind.STEPS: "steps",
    Kind.ORDERS: "steps",
    Kind.TURNS: "policy for envs elsewhere",
    Kind.COLLECT: "collect",
    Kind.RESET: "reset",
    Kind.DELIVER: "deliver",
    Kind.WEIGHTS: "take weights",
    Kind.STORE: "store",
    Kind.WAIT_FOR_REQUEST: "wait for a request",
    Kind.CALL: "answer a call",
    Kind.WAIT_FOR_BATCH: "wait for workers",
    Kind.HAND_OVER: "hand over",
    Kind.CONSUMER: "yours",
    Kind.NEXT: "next batch",
    Kind.BETWEEN: "between batches",
    Kind.UPDATE: "update_policy_weights_",
    Kind.EVALUATE: "evaluate",
    Kind.SERVE: "serve",
}
#: What the parts of a stretch are called: x, y, the rest.
_PARTS: Mapping[Kind, tuple[str, str, str]] = {
    Kind.STEPS: ("policy", "reset", "env"),
    Kind.ORDERS: ("wait for a request", "", "env"),
    Kind.TURNS: ("policy", "wait for envs", "other"),
    Kind.SERVE: ("answer", "wait for requests", "other"),
}
#: What the count of a record is.
_COUNTS: Mapping[Kind, str] = {
    Kind.STEPS: "steps",
    Kind.ORDERS: "orders",
    Kind.TURNS: "rows",
    Kind.SERVE: "requests",
    Kind.RESET: "envs",
    Kind.UPDATE: "version",
}


@dataclass
class Slice:
    """Something that lasted, on one thread."""

    name: str
    start_s: float
    end_s: float
    thread: int
    kind: Kind
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def slices_of(recording: Recording) -> list[Slice]:
    """Those of each thread nest, parents before children: in the order of their beginnings."""
    found: list[Slice] = []
    for record in recording.records:
        if record.kind in NAMES:
            found += _of(record)
    return sorted(found, key=lambda each: (each.thread, each.start_s, -each.end_s))


def _of(record: Record) -> Iterator[Slice]:
    kind, args, parts = record.kind, {}, {}
    if kind in _COUNTS:
        args[_COUNTS[kind]] = int(record.count)
    name = NAMES[kind]
    if kind in _PARTS:
        if record.count == 1 and record.end_s - record.start_s > STRETCH_S and kind == Kind.STEPS:
            name = "slow step"
        parts = _parts(record)
        args |= {f"{part}_ms": round(1e3 * seconds, 4) for part, seconds in parts.items()}
    yield Slice(name, record.start_s, record.end_s, record.thread, kind, args)
    at = record.start_s
    for part, seconds in parts.items():
        if seconds > 0:
            end = min(at + seconds, record.end_s)
            yield Slice(part, at, end, record.thread, kind)
            at = end


def _parts(record: Record) -> dict[str, float]:
    """The policy acts first, and what was reset had ended: so it is drawn, also where there were many steps."""
    x, y, rest = _PARTS[record.kind]
    others = max(0.0, record.end_s - record.start_s - record.x - record.y)
    parts = {x: record.x, rest: others, y: record.y}
    return {name: seconds for name, seconds in parts.items() if name}


def seconds_by_name(slices: Iterable[Slice]) -> dict[str, float]:
    """What each name took by itself, without what is nested in it; of slices in the order of ``slices_of``."""
    own: dict[str, float] = defaultdict(float)
    stack: list[Slice] = []
    for each in slices:
        while stack and (stack[-1].thread != each.thread or stack[-1].end_s <= each.start_s):
            stack.pop()
        own[each.name] += each.seconds
        if stack:
            own[stack[-1].name] -= each.seconds
        stack.append(each)
    return {name: max(0.0, seconds) for name, seconds in own.items()}
