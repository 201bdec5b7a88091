"""Programs as JSON, for scripts. The shape is documented (docs/cli.md); what a reading has is in ``Reading``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from swath import __version__
from swath.cli.top.drawing import ABSURD, MAKES_NO_SENSE
from swath.cli.top.watched import Everyone, Watched
from swath.insight.history import History
from swath.insight.reading import facts_between
from swath.insight.verdict import verdict


def as_json(everyone: Everyone, watched: Sequence[Watched]) -> dict[str, Any]:
    """For scripts; numbers that are not finite are null."""
    return _finite(
        {
            "swath": __version__,
            "programs": [_program(each) for each in watched],
            "unreadable": [{"pid": each.pid, "error": each.why} for each in everyone.unreadable],
        }
    )


def _program(watched: Watched) -> dict[str, Any]:
    return {
        "pid": watched.pid,
        "command": watched.command,
        "answers": watched.program.silent_s == 0.0,
        "stopped": watched.program.is_stopped,
        "age_s": watched.age_s,
        "errors": list(watched.errors),
        "collectors": [_collector(number, history) for number, history in watched.histories.items()],
    }


def _collector(number: int, history: History) -> dict[str, Any]:
    reading = history.latest
    assert reading is not None
    told: dict[str, Any] = {"number": number, "frames_per_s": None, "verdict": None, "reading": reading.as_json()}
    try:
        told |= {"frames_per_s": history.frames_per_s, "verdict": str(verdict(facts_between(None, reading)))}
    except ABSURD:
        told["error"] = MAKES_NO_SENSE
    return told


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
