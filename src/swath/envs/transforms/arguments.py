"""Checks of arguments that several transforms take."""

from __future__ import annotations

from typing import Any


def require_positive(who: str, name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{who}: {name} must be a positive integer, got {value!r}")


def require_one_episode(who: str, name: str, value: Any, *same: Any) -> None:
    """Keys of resets and ends can only be those that every env of swath has."""
    if value not in same:
        raise ValueError(f"{who}: {name}={value!r}: an env has one episode per row")
