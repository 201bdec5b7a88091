"""Blocks: batches in shared memory.

A worker writes its part of a block; the owner hands the whole of it to the consumer, without a copy. The block is
used again once the consumer has let go of every tensor in it, and not before: what was delivered never changes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from swath.keys import Key
from swath.process.memory import SharedMemory
from swath.rollout.layout import Field
from swath.rollout.placement import ALIGNMENT, offsets_of

#: A consumer may keep as many batches as it likes; beyond this, a block is given away for good, and with it its
#: descriptor, of which a process can have only so many.
_MOST_LENT = 16
_MOST_FREE = 3


@dataclass(frozen=True)
class BlockLayout:
    """Which bytes of a block belong to which key, member and step.

    Members lie in rows, ``[members * envs, steps]``, or behind each other in time, ``[envs, all members' steps]``.
    """

    fields: tuple[Field, ...]
    #: The batch size of one member's env.
    env_size: torch.Size
    #: Of each member, in a full batch.
    steps: tuple[int, ...]
    along_time: bool = False

    @property
    def envs_per_member(self) -> int:
        return self.env_size.numel()

    @property
    def num_members(self) -> int:
        return len(self.steps)

    @property
    def num_envs(self) -> int:
        return self.num_members * self.envs_per_member

    @property
    def frames_per_batch(self) -> int:
        return sum(self.steps) * self.envs_per_member

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return offsets_of(self.fields, self.frames_per_batch)

    @property
    def num_bytes(self) -> int:
        return max(self._offsets[-1], ALIGNMENT)

    def leaves(self, memory: torch.Tensor | np.ndarray, steps: Sequence[int]) -> dict[Key, torch.Tensor]:
        """All keys of a batch with so many steps of each member: ``[envs, steps, *shape]``."""
        if self.along_time:
            size = (self.envs_per_member, sum(steps))
        else:
            size = (self.num_envs, steps[0])
        frames = size[0] * size[1]
        array = memory.numpy() if isinstance(memory, torch.Tensor) else memory
        return {
            # A storage for each key, so that ``torch.save`` takes them, and does not save the whole block for one.
            field.key: torch.from_numpy(array[offset : offset + frames * field.num_bytes])
            .view(field.dtype)
            .view(*size, *field.shape)
            for field, offset in zip(self.fields, self._offsets[:-1], strict=True)
        }

    def part(
        self, leaves: dict[Key, torch.Tensor], members: range, steps: Sequence[int], first_step: int = 0
    ) -> dict[Key, torch.Tensor]:
        """What some members write, from a step on: ``[their envs, steps, *shape]``.

        Several members in time have one env each and the same number of steps.
        """
        num_envs = self.envs_per_member
        if not self.along_time:
            rows = slice(members.start * num_envs, members.stop * num_envs)
            return {key: leaf[rows, first_step:] for key, leaf in leaves.items()}
        start = sum(steps[: members.start])
        length = steps[members.start]
        part = {}
        for key, leaf in leaves.items():
            mine = leaf[:, start : start + length * len(members)]
            if len(members) > 1:
                mine = mine.reshape(len(members), length, *leaf.shape[2:])
            part[key] = mine[:, first_step:]
        return part


class Block:
    """Memory for one batch."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.memory = SharedMemory(num_bytes)
        #: Workers (by number and incarnation) that have mapped it.
        self.known_to: set[tuple[int, int]] = set()


class BlockPool:
    """Blocks of one layout: free, being written, or lent to the consumer."""

    def __init__(self, layout: BlockLayout, first_number: int = 0, stride: int = 1) -> None:
        self.layout = layout
        self._next_number = first_number
        self._stride = stride
        self._free: list[Block] = []
        self._all: dict[int, Block] = {}
        #: What the consumer has: a reference to its view of a block, under the reference's id, and the block.
        self._lent: dict[int, tuple[weakref.ref[Any], Block]] = {}
        #: References that have died, in any thread and at any time.
        self._returned: deque[weakref.ref[Any]] = deque()
        #: Numbers of blocks that are gone, for workers to unmap.
        self.gone: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Of all blocks: free, being written, or lent."""
        return len(self._all) * self.layout.num_bytes

    def take(self) -> Block:
        """A block to be written."""
        while self._returned:
            _, block = self._lent.pop(id(self._returned.popleft()))
            self.give_back(block)
        if self._free:
            return self._free.pop()
        block = self._all[self._next_number] = Block(self._next_number, self.layout.num_bytes)
        self._next_number += self._stride
        return block

    def give_back(self, block: Block) -> None:
        """A block that nobody looks at any more."""
        if block.memory.descriptor is None or len(self._free) >= _MOST_FREE:
            self.forget(block)
        else:
            self._free.append(block)

    def forget(self, block: Block) -> None:
        """A block that is not to be used again."""
        self.gone.append(block.number)
        self._all.pop(block.number, None)
        block.memory.close_descriptor()

    def lend(self, block: Block, steps: Sequence[int]) -> dict[Key, torch.Tensor]:
        """The leaves of a block for the consumer; when the last tensor on it is gone, it can be taken again."""
        if len(self._lent) >= _MOST_LENT:
            block.memory.close_descriptor()
        array = block.memory.bytes_.numpy()
        # Not a function of ours, which Ctrl-C could come in: Python ignores what is raised there.
        lent = weakref.ref(array, self._returned.append)
        self._lent[id(lent)] = lent, block
        return self.layout.leaves(array, steps)

    def close(self) -> None:
        """No block is needed any more; the consumer keeps those that it has."""
        for block in self._all.values():
            block.memory.close_descriptor()
        self._all.clear()
        self._lent.clear()
        self._returned.clear()
        self._free.clear()
