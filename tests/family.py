"""The processes below one, all the way down. (Without torch: also for programs that are to start quickly.)"""

from __future__ import annotations

import os
from collections.abc import Iterator


def family(pid: int) -> Iterator[int]:
    """It and all that are below it."""
    yield pid
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = file.read().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))
