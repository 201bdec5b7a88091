"""Part `startup`: how long the first batch takes, from calling the constructor."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from report import markdown_table

LIBRARIES = ("swath", "torchrl")
REPEATS = 3
_PROBE = Path(__file__).with_name("startup_probe.py")


@dataclass
class StartUp:
    """Seconds of every repeat."""

    first: dict[str, list[float]] = field(default_factory=lambda: {library: [] for library in LIBRARIES})
    following: dict[str, list[float]] = field(default_factory=lambda: {library: [] for library in LIBRARIES})

    def rows(self) -> list[list[str]]:
        return [
            [title, *(f"{median(seconds[library]):.2f} s" for library in LIBRARIES), f"{self._ratio(seconds):.1f} ×"]
            for title, seconds in (("first in a program", self.first), ("the next one", self.following))
        ]

    @staticmethod
    def _ratio(seconds: dict[str, list[float]]) -> float:
        pairs = zip(seconds["swath"], seconds["torchrl"], strict=True)
        return median(theirs / ours for ours, theirs in pairs)

    def table(self) -> str:
        lines = [["collector", *LIBRARIES, "swath is"], *self.rows()]
        return "\n".join(f"  {title:<20}{ours:>11}{theirs:>11}{ratio:>11}" for title, ours, theirs, ratio in lines)

    def as_json(self) -> dict[str, Any]:
        return {"first_s": self.first, "next_s": self.following}


def heading(options: argparse.Namespace) -> str:
    return (
        "start-up of MultiSyncCollector with 4 workers, CartPole-v1: seconds from the constructor to the first batch\n"
        f"medians of {REPEATS} programs each, without what the program imports before"
    )


def run(options: argparse.Namespace) -> Iterator[StartUp]:
    result = StartUp()
    for _ in range(REPEATS):
        for library in LIBRARIES:
            command = [sys.executable, str(_PROBE), library]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
            first, following = json.loads(done.stdout.splitlines()[-1])
            result.first[library].append(first)
            result.following[library].append(following)
    yield result


def markdown(results: Sequence[StartUp]) -> str:
    return markdown_table(["start-up, 4 workers", *LIBRARIES, "swath is"], results[0].rows())
