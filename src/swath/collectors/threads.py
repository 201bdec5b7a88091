"""Threads of torch, where processes need the cores as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from swath.workers.layout import available_cores


def threads_left(num_processes: int) -> int | None:
    """How many threads are left for torch beside so many busy processes; None: as many as it has.

    >>> threads_left(0), threads_left(10_000)
    (None, 1)
    """
    return max(1, available_cores() - num_processes) if num_processes else None


@contextlib.contextmanager
def limited_threads(most: int | None) -> Iterator[None]:
    """Let torch have no more than ``most`` threads for a while. (Torch has one number for the whole process.)

    With two threads, a policy of a few kFLOP beside two busy workers on two cores was measured to be seven times slower
    than with one: threads of OpenMP that have nothing to do spin.
    """
    before = torch.get_num_threads()
    if most is None or before <= most:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)
