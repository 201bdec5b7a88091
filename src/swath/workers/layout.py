"""Which env goes into which worker."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swath.process import cgroups

AUTO = "auto"


def available_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores()
    return max(1, cores if quota is None else min(cores, quota))


def cgroup_cores(folder: Path = cgroups.ROOT) -> int | None:
    """The quota of the control group in whole cores, rounded up; None if there is none."""
    quota = cgroups.read_limits(folder).cores
    return None if quota is None else max(1, math.ceil(quota))


@dataclass(frozen=True)
class WorkerLayout:
    """The members (envs as they were asked for, one for each factory) of every worker, in order."""

    members: tuple[range, ...]

    @property
    def num_workers(self) -> int:
        return len(self.members)

    @property
    def num_members(self) -> int:
        return self.members[-1].stop

    @classmethod
    def spread(cls, num_members: int, num_workers: int) -> WorkerLayout:
        """As evenly as it goes; the first workers have one more.

        >>> WorkerLayout.spread(5, 2).members
        (range(0, 3), range(3, 5))
        """
        each, rest = divmod(num_members, num_workers)
        ranges, start = [], 0
        for worker in range(num_workers):
            stop = start + each + (worker < rest)
            ranges.append(range(start, stop))
            start = stop
        return cls(tuple(ranges))

    @classmethod
    def resolve(
        cls, num_members: int, num_workers: int | None, envs_per_worker: int | None, kinds: Sequence[Any]
    ) -> WorkerLayout:
        """``kinds`` has an entry for each member; those that differ cannot share a worker."""
        alike = all(kind == kinds[0] for kind in kinds)
        if num_workers is None and envs_per_worker is not None:
            num_workers = -(-num_members // envs_per_worker)
        if num_workers is None:
            num_workers = min(num_members, available_cores()) if alike else num_members
        if num_workers > num_members:
            raise ValueError(
                f"num_workers={num_workers} is more than the {num_members} envs; give as many factories as workers, or "
                "one factory"
            )
        layout = cls.spread(num_members, num_workers)
        if not alike and any(kinds[i] != kinds[members[0]] for members in layout.members for i in members):
            raise ValueError(
                f"{num_members} envs cannot be packed into {num_workers} workers, because they differ in devices, "
                "policy_factory or frames_per_batch; leave num_workers out to give each its own"
            )
        return layout

    def worker_of(self, member: int) -> int:
        return next(worker for worker, members in enumerate(self.members) if member in members)

    def workers_of(self, members: np.ndarray) -> np.ndarray:
        """As ``worker_of``, of many."""
        return np.searchsorted([own.stop for own in self.members], members, side="right")

    def __str__(self) -> str:
        sizes = [len(members) for members in self.members]
        envs = f"{self.num_members} env{'s' if self.num_members > 1 else ''}"
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        each = f"{sizes[0]} each" if sizes[0] == sizes[-1] else f"{sizes[-1]} or {sizes[0]} each"
        return f"{envs} in {workers}, {each}"
