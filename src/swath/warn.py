"""Warnings at the line of the user's program that led to them, however deep in swath they are given."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_SWATH = str(Path(__file__).parent)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest caller that is not swath."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_SWATH):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
