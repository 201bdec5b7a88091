"""Numbers and flags that users write, checked: whole, positive, or none."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """``value`` as an integer, whatever number it is written as."""
    if not _is_number(value) or value != int(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def positive_int(name: str, value: Any) -> int:
    return whole_number(name, value, least=1)


def positive_number(name: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def seed_number(value: Any) -> int:
    """A seed, whatever number it is written as."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"set_seed takes a whole number, got {value!r}; without set_seed every run is another one"
        ) from None


def flag(name: str, value: Any) -> bool:
    """``value`` as True or False; "false", as a command line or a file has it, would be True."""
    if isinstance(value, str):
        raise TypeError(f"{name} must be True or False, got the string {value!r}")
    return bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))


def count_or_none(name: str, value: Any, none_means: str) -> int | None:
    """``value`` as a whole number of at least 0; None where it says so: None, -1, infinity."""
    if value is None or value == float("inf"):
        return None
    if not _is_number(value) or value != int(value):
        raise TypeError(f"{name} must be an integer, or -1 ({none_means}); got {value!r}")
    if value < -1:
        raise ValueError(f"{name} must be at least 0, or -1 ({none_means}); got {value}")
    return None if value == -1 else int(value)
