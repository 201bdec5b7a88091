"""Numbers for loggers: of whatever has ``stats()``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def scalars(of: Any, prefix: str = "") -> dict[str, float]:
    """The numbers in ``stats()`` of a collector, a replay buffer, an evaluator, an inference server: flat, by name.

    Each worker and each node has names of its own (``workers/0/fps``). What is no finite number is left out; true is 1.
    The names are listed in the documentation ("Monitoring").

    Args:
        of: the object, or what its ``stats()`` has returned.
        prefix: put before each name, with a slash.

    >>> scalars({"frames": 200, "running": True, "failure": None, "workers": [{"fps": 2.5}]}, "collector")
    {'collector/frames': 200, 'collector/running': 1, 'collector/workers/0/fps': 2.5}
    """
    if not isinstance(of, Mapping) and not callable(getattr(of, "stats", None)):
        raise TypeError(
            f"scalars() takes a collector, a replay buffer, an evaluator, an inference server, or what its stats() "
            f"returned; got {of!r}"
        )
    stats = of if isinstance(of, Mapping) else of.stats()
    return {f"{prefix}/{name}" if prefix else name: value for name, value in _numbers(stats)}


def _numbers(stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in stats.items():
        if isinstance(value, (list, tuple)) and all(isinstance(line, Mapping) for line in value):
            for index, line in enumerate(value):
                for own, number in _numbers(line):
                    yield f"{name}/{index}/{own}", number
        elif isinstance(value, bool):
            yield name, int(value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield name, value
