"""Status pages: one of shared memory for each worker, which its owner reads without asking.

A worker writes where it stands; its owner only ever writes the first byte, which says that a message waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swath.process.semaphores import SEMAPHORE_BYTES

PAGE_BYTES = 512
#: Where a worker that steps envs for its owner has the semaphore that it waits for.
_SEMAPHORE_AT = 384
#: Words of 8 bytes after the first.
_INTEGERS = (
    "beat",
    "batches",
    "order",
    "committed",
    "frames",
    "next_traj_id",
    "policy_version",
    "switches",
    "steps",
    "since",
    "until",
    "counted",
    "counting",
)
#: Of a worker that is gone, what its owner reads when another one has taken its place: how far it came with which order
#: (``order``, ``committed``), and its ``Ledger``.
LEFT_BEHIND = ("order", "committed", "since", "until", "counted", "counting")
_FLOATS = ("env_s", "policy_s", "busy_s", "cpu_s", "started_at", "busy_since", "on_core")


class StatusPage:
    """One worker's page: integers and seconds by name, and two views that the step uses."""

    def __init__(self, memory: torch.Tensor, worker: int) -> None:
        page = memory[worker * PAGE_BYTES : (worker + 1) * PAGE_BYTES].numpy()
        integers = page[8 : 8 + 8 * len(_INTEGERS)].view(np.int64)
        floats = page[256 : 256 + 8 * len(_FLOATS)].view(np.float64)
        self.waiting = _cell(page, 0)
        self.beat = _cell(integers, 0)
        self._integers = {name: _cell(integers, i) for i, name in enumerate(_INTEGERS)}
        self._floats = {name: _cell(floats, i) for i, name in enumerate(_FLOATS)}
        self._all = page
        self.semaphore_memory = memory[worker * PAGE_BYTES + _SEMAPHORE_AT :][:SEMAPHORE_BYTES]

    def clear(self, but: Sequence[str] = ()) -> None:
        """For another worker; integers ``but`` stay."""
        kept = {name: self.integer(name) for name in but}
        self._all[:] = 0
        self.write(**kept)

    def write(self, **values: float) -> None:
        for name, value in values.items():
            if name in self._integers:
                self._integers[name][0] = int(value)
            else:
                self._floats[name][0] = value

    def add(self, **values: float) -> None:
        for name, value in values.items():
            if name in self._integers:
                self._integers[name][0] += int(value)
            else:
                self._floats[name][0] += value

    def cell(self, name: str) -> Any:
        """An integer to be counted up in place."""
        return self._integers[name]

    def integer(self, name: str) -> int:
        return self._integers[name][0]

    def seconds(self, name: str) -> float:
        return self._floats[name][0]

    @property
    def on_core(self) -> float | None:
        """Of envs that wait: the share of a step in which they compute. None where they compute, as far as is known."""
        return self._floats["on_core"][0] or None


class Ledger:
    """How many of the frames that a worker has collected are in the replay buffer, as whatever they became there.

    Exact at any instant, also of a worker that was killed: before it commits, a worker says what the commit is of; what
    counts is seen in what is committed. Each entry is written as a whole, and what is read is right after each of them.
    """

    def __init__(self, page: StatusPage) -> None:
        self._page = page

    def clear(self) -> None:
        self._page.write(counting=0, counted=0, until=0, since=0)

    def begin(self, num_frames: int, committed: int, num_rows: int) -> None:
        """So many rows will be committed behind ``committed`` ones: what became of ``num_frames`` frames."""
        page = self._page
        counted = page.integer("counting")  # all before this is committed
        page.write(counted=counted, since=committed)
        page.write(until=committed + num_rows)
        page.write(counting=counted + num_frames)

    def frames(self, committed: int) -> int:
        """As of so many committed rows. Of rows that are frames, some may be committed and others not."""
        page = self._page
        counted, counting = page.integer("counted"), page.integer("counting")
        if committed >= page.integer("until"):
            return counting
        return counted + min(committed - page.integer("since"), counting - counted)


def _cell(array: np.ndarray, index: int) -> Any:
    """One entry; reading and writing a memoryview takes a third of the time that NumPy takes."""
    return memoryview(array[index : index + 1])  # type: ignore[arg-type]


def env_share(env_s: float, policy_s: float) -> float:
    """How much of a step envs take: of few steps the time is measured, so these seconds say nothing by themselves."""
    return env_s / (env_s + policy_s) if env_s + policy_s else 1.0


@dataclass(frozen=True)
class Shares:
    """How a worker spends its time; the three are 1 in all."""

    env: float
    policy: float
    waiting: float

    @classmethod
    def of(cls, page: StatusPage, now: float) -> Shares:
        started = page.seconds("started_at")
        if not started:
            return cls(0.0, 0.0, 1.0)
        since = page.seconds("busy_since")
        busy = page.seconds("busy_s") + (max(0.0, now - since) if since else 0.0)
        busy_share = min(1.0, busy / max(now - started, 1e-9))
        of_env = env_share(page.seconds("env_s"), page.seconds("policy_s"))
        return cls(busy_share * of_env, busy_share * (1 - of_env), 1 - busy_share)
