"""A trace in the format that ui.perfetto.dev and chrome://tracing open.

(Trace Event Format: slices are ``X``, counters ``C``, arrows ``s`` and ``f``, names ``M``; times are microseconds.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swath.timeline.recorder import Gauge, Kind, Record
from swath.timeline.recording import Recording
from swath.timeline.slices import NAMES, Slice, slices_of

#: What gauges are called, and what their values are divided by.
_GAUGES: Mapping[Gauge, tuple[str, float]] = {
    Gauge.BUFFER_FRAMES: ("frames in the buffer", 1),
    Gauge.POLICY_LAG: ("policy lag", 1),
    Gauge.SHARED_BYTES: ("shared memory, MB", 1e6),
}
#: The rate at a moment is that of the gauge's last values, over so long.
_SECONDS_OF_RATE = 0.5


def write_trace(path: Path, recordings: Sequence[Recording], about: Mapping[str, Any]) -> int:
    """Write what was recorded; how many events that is. The first recording is the owner's.

    Raises:
        OSError: it cannot be written.
    """
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        json.dump({key: str(value) for key, value in about.items()}, file)
        file.write(', "traceEvents": [\n')
        for event in trace_events(recordings):
            file.write(",\n" if count else "")
            json.dump(event, file, separators=(",", ":"))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    """All events; of each thread in the order of their beginnings."""
    starts = [record.start_s for recording in recordings for record in recording.records]
    if not starts:
        return
    zero = min(starts)
    steps: list[list[Slice]] = []
    for place, recording in enumerate(recordings, start=1):
        yield from _names(place, recording)
        threads = _numbered_threads(recording)
        slices = slices_of(recording)
        steps.append([each for each in slices if each.kind in (Kind.STEPS, Kind.TURNS) and each.args])
        for each in slices:
            yield {
                "ph": "X",
                "name": each.name,
                "cat": each.kind.name.lower(),
                "pid": place,
                "tid": threads[each.thread],
                "ts": _us(each.start_s - zero),
                "dur": max(0.0, round(_us(each.end_s - zero) - _us(each.start_s - zero), 3)),
                **({"args": each.args} if each.args else {}),
            }
        yield from _counters(place, recording.records, zero)
    yield from _arrows(recordings, steps, zero)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _numbered_threads(recording: Recording) -> dict[int, int]:
    """Threads as they appear in slices, by the number that is written for them."""
    threads: dict[int, int] = {}
    for record in recording.records:
        if record.kind in NAMES:
            threads.setdefault(record.thread, len(threads) + 1)
    return threads


def _thread_names(recording: Recording) -> dict[int, str]:
    """By the number that is written: who takes steps is told from who sends weights, in a thread of its own."""
    numbers = _numbered_threads(recording)
    others = [record.thread for record in recording.records if record.kind in NAMES and record.kind != Kind.UPDATE]
    called = {thread: f"thread {number}" for thread, number in numbers.items()}
    called |= {others[0]: "steps"} if others else {}
    return {numbers[thread]: recording.threads.get(thread, name) for thread, name in called.items()}


def _names(place: int, recording: Recording) -> Iterator[dict[str, Any]]:
    again = f", started again {recording.restarts} ×" if recording.restarts else ""
    name = f"{recording.name} (pid {recording.pid}{again})"
    yield {"ph": "M", "name": "process_name", "pid": place, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": place, "args": {"sort_index": place}}
    for number, called in _thread_names(recording).items():
        yield {"ph": "M", "name": "thread_name", "pid": place, "tid": number, "args": {"name": called}}


def _counters(place: int, records: Sequence[Record], zero: float) -> Iterator[dict[str, Any]]:
    frames: list[tuple[float, float]] = []
    for record in records:
        if record.kind != Kind.GAUGE:
            continue
        gauge, at = Gauge(int(record.count)), record.start_s
        if gauge == Gauge.FRAMES:
            frames.append((at, record.x))
            while at - frames[0][0] > _SECONDS_OF_RATE and len(frames) > 2:
                frames.pop(0)
            name, value = "frames/s", _rate(frames)
        else:
            name, unit = _GAUGES[gauge]
            value = record.x / unit
        yield {"ph": "C", "name": name, "pid": place, "ts": _us(at - zero), "args": {"value": round(value, 3)}}


def _rate(frames: Sequence[tuple[float, float]]) -> float:
    (first, before), (last, now) = frames[0], frames[-1]
    return (now - before) / (last - first) if last > first else 0.0


def _arrows(recordings: Sequence[Recording], steps: Sequence[list[Slice]], zero: float) -> Iterator[dict[str, Any]]:
    """From each update of the weights to the first step of each place that was taken with them."""
    owner = recordings[0]
    sender = _numbered_threads(owner)
    sent = {
        int(record.count): (sender[record.thread], record.start_s)
        for record in owner.records
        if record.kind == Kind.UPDATE
    }
    for place, recording in enumerate(recordings, start=1):
        threads = _numbered_threads(recording)
        own = steps[place - 1]
        at = 0
        for record in recording.records:
            version = int(record.count)
            if record.kind != Kind.VERSION or version not in sent:
                continue
            while at < len(own) and own[at].start_s < record.start_s:
                at += 1
            if at == len(own):
                break
            from_thread, from_s = sent[version]
            if from_s > own[at].start_s:  # an update that changed nothing: it had this version before
                continue
            arrow = {"name": "weights", "cat": "weights", "id": f"{version}.{place}"}
            yield {"ph": "s", **arrow, "pid": 1, "tid": from_thread, "ts": _us(from_s - zero)}
            to = own[at]
            yield {
                "ph": "f", "bp": "e", **arrow,
                "pid": place, "tid": threads[to.thread], "ts": _us(to.start_s - zero), "args": {"version": version},
            }  # fmt: skip
