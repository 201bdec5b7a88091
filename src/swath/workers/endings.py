"""How a process that was started here has ended."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

#: The server of a forked process tells its exit code a little later: on a busy machine, after seconds.
_SECONDS_TO_BE_TOLD = 10.0


def exit_code_of(process: Any) -> int | None:
    """Of a process that has ended; None if nobody tells, or it was closed."""
    deadline = time.monotonic() + _SECONDS_TO_BE_TOLD
    with contextlib.suppress(
        ValueError, AssertionError, AttributeError
    ):  # closed; or asked in a forked copy of its owner
        while process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return process.exitcode
    return None


def let_go(process: Any) -> None:
    """Of a process that has ended: nothing that belongs to it stays open."""
    exit_code_of(process)
    with contextlib.suppress(OSError, ValueError, AssertionError):
        process.close()


def how_it_ended(code: int | None) -> str:
    """
    >>> how_it_ended(1), how_it_ended(-9), how_it_ended(-77)
    ('left with exit code 1', 'was killed by SIGKILL', 'was killed by signal 77')
    """
    if code is None or code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
