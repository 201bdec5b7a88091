"""The stage: memory in which envs are stepped for somebody else.

A worker writes what its envs do into a strip that its owner sees; the owner, who has the policy, writes the actions.
Envs that are stepped together are a group. Each group has two words: its owner writes an order into the one, the
worker writes what came of it into the other, and raises a semaphore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore, ThreadSemaphore
from swath.rollout.layout import CPU, Field, Layout
from swath.rollout.placement import aligned
from swath.rollout.strip import Column, Strip

#: Orders: an operation, and the row to do it on; see ``encode``. 0 is none.
STEP, STEP_AND_RESET, RESET = 1, 2, 3
#: What came of an order: nothing yet, all envs go on, some ended an episode, one raised.
IDLE, BUSY, READY, ENDED, FAILED = 0, 1, 2, 3, 4


def encode(operation: int, row: int) -> int:
    """An order as one word, so that it is there as a whole or not at all."""
    return row * 8 + operation


class Arena:
    """Hands out pieces of one memory, always the same to whoever asks for the same."""

    def __init__(self, memory: torch.Tensor, offset: int = 0) -> None:
        self._memory = memory
        self.offset = offset

    def take(self, size: Sequence[int], *, dtype: torch.dtype, device: Any = CPU) -> torch.Tensor:
        end = self.offset + torch.Size(size).numel() * dtype.itemsize
        piece = self._memory[self.offset : end].view(dtype).view(*size)
        self.offset = aligned(end)
        return piece


@dataclass(frozen=True)
class SharedStepsPlan:
    """Where in the memory of all workers a worker's stage is, and what it looks like."""

    layout: Layout
    num_steps: int
    #: The worker's envs (rows) in each of its groups.
    groups: tuple[range, ...]
    #: Groups are counted over all workers.
    first_group: int
    num_groups: int
    offset: int

    @staticmethod
    def header_bytes(num_groups: int) -> int:
        return aligned(SEMAPHORE_BYTES + 16 * num_groups)

    @property
    def end(self) -> int:
        """The first byte behind this stage."""
        layout, steps, num_envs = self.layout, self.num_steps, self.layout.num_envs

        def size(fields: Sequence[Field], rows: int) -> int:
            return sum(aligned(rows * num_envs * f.num_bytes) for f in fields)

        flags = 2 * aligned(steps * num_envs)
        carried = size(layout.carried, steps + 1) + size(layout.carried, steps)
        return self.offset + carried + size(layout.outputs, steps) + size(layout.outcomes, steps) + flags


class SharedSteps:
    """One worker's part of the memory, as either side sees it."""

    def __init__(self, memory: torch.Tensor, plan: SharedStepsPlan, ready: Semaphore | ThreadSemaphore) -> None:
        self.plan = plan
        self.ready = ready
        words = memory[SEMAPHORE_BYTES : SEMAPHORE_BYTES + 16 * plan.num_groups].numpy().view(np.int64)
        #: By the number of a group.
        self.orders: Any = memoryview(words[: plan.num_groups])  # type: ignore[arg-type]
        self.outcomes: Any = memoryview(words[plan.num_groups :])  # type: ignore[arg-type]
        arena = Arena(memory, plan.offset)
        self.strip = Strip(plan.layout, plan.num_steps, arena.take)
        #: At an episode's end: what was in the carried row t + 1 before the reset.
        self.last = [Column(f, plan.num_steps, plan.layout.batch_size, arena.take) for f in plan.layout.carried]
        assert arena.offset == plan.end
