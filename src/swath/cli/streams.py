"""Where a command's output goes, and who may stop to read it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def reader_may_leave(stream: TextIO | None) -> Iterator[None]:
    """Whoever reads our output may stop (``swath collect … | head -1``): nobody need be told."""
    try:
        yield
        if stream is not None:  # Python has none where it was closed before
            stream.flush()
    except BrokenPipeError:
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python complains when it flushes at exit
