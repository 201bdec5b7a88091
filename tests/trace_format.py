"""A reader of traces that knows the Trace Event Format, and nothing of who writes them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

#: Times are in microseconds with three digits.
_ROUNDING_US = 0.01


class TraceFile:
    """A trace, opened as a viewer would, and everything checked that the format says."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text())
        self.events: list[dict[str, Any]] = whole["traceEvents"]
        self.about: dict[str, str] = whole.get("otherData", {})
        self.processes: dict[int, str] = {}
        self.tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self.counters: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in self.events:
            self._sort_in(event)
        self._check_names()
        for track in self.tracks.values():
            _check_nesting(track)
        self.arrows = self._checked_arrows()

    def _sort_in(self, event: dict[str, Any]) -> None:
        kind = event["ph"]
        assert kind in "XCMsf", f"no such phase: {kind}"
        if kind == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in self.processes
                self.processes[event["pid"]] = event["args"]["name"]
            return
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if kind == "X":
            assert event["dur"] >= 0
            self.tracks[event["pid"], event["tid"]].append(event)
        elif kind == "C":
            (value,) = event["args"].values()
            self.counters[event["name"]].append((event["ts"], value))

    def _check_names(self) -> None:
        assert {pid for pid, _ in self.tracks} <= set(self.processes)

    def _checked_arrows(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """An arrow has one beginning and one end, each within a slice of its thread, and points forward."""
        ends: dict[tuple[str, str], dict[str, Any]] = {}
        starts: dict[tuple[str, str], dict[str, Any]] = {}
        for event in self.events:
            if event["ph"] in "sf":
                which = starts if event["ph"] == "s" else ends
                assert (event["cat"], event["id"]) not in which
                which[event["cat"], event["id"]] = event
        assert set(starts) == set(ends)
        for event in (*starts.values(), *ends.values()):
            assert self.slices_at(event["pid"], event["tid"], event["ts"]), event
        pairs = [(starts[name], ends[name]) for name in starts]
        assert all(start["ts"] <= end["ts"] for start, end in pairs)
        assert all(end["bp"] == "e" for _, end in pairs)
        return pairs

    def slices_at(self, pid: int, tid: int, ts: float) -> list[dict[str, Any]]:
        return [each for each in self.tracks[pid, tid] if each["ts"] <= ts <= each["ts"] + each["dur"]]

    def pids(self, name: str) -> list[int]:
        """Processes of this name."""
        return [pid for pid, called in self.processes.items() if called.startswith(name)]

    def slices(self, pid: int, name: str | None = None) -> list[dict[str, Any]]:
        return [
            each for (p, _), track in self.tracks.items() if p == pid for each in track if name in (None, each["name"])
        ]

    def covered(self, pid: int) -> float:
        """Which share of the time between a process's first and last slice is in slices."""
        end = covered = 0.0
        slices = sorted(self.slices(pid), key=lambda each: each["ts"])
        first = end = slices[0]["ts"]
        for each in slices:
            covered += max(0.0, each["ts"] + each["dur"] - max(end, each["ts"]))
            end = max(end, each["ts"] + each["dur"])
        return covered / (end - first)


def _check_nesting(track: list[dict[str, Any]]) -> None:
    """Of two slices of a thread, one contains the other, or they do not touch."""
    open_slices: list[dict[str, Any]] = []
    for each in sorted(track, key=lambda each: (each["ts"], -each["dur"])):
        start, end = each["ts"], each["ts"] + each["dur"]
        while open_slices and open_slices[-1]["ts"] + open_slices[-1]["dur"] <= start + _ROUNDING_US:
            open_slices.pop()
        if open_slices:
            around = open_slices[-1]
            assert end <= around["ts"] + around["dur"] + _ROUNDING_US, (around, each)
        open_slices.append(each)
