"""Where fields lie in one piece of memory: one behind the other, each from a multiple of 64 bytes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from swath.keys import Key
from swath.rollout.layout import Field

ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment.

    >>> aligned(64), aligned(65)
    (64, 128)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=64)
def offsets_of(fields: tuple[Field, ...], num_entries: int, start: int = 0) -> tuple[int, ...]:
    """Where each field begins, with so many entries of each, and then where all of it ends.

    >>> offsets_of((Field(("x",), torch.Size([2]), torch.float32), Field(("y",), torch.Size(), torch.bool)), 10)
    (0, 128, 192)
    """
    offsets = [aligned(start)]
    for field in fields:
        offsets.append(aligned(offsets[-1] + num_entries * field.num_bytes))
    return tuple(offsets)


def views_of(
    memory: torch.Tensor, fields: Sequence[Field], offsets: Sequence[int], num_entries: int
) -> dict[Key, torch.Tensor]:
    """Each field's entries, ``[num_entries, *shape]``."""
    return {
        field.key: memory[offset : offset + num_entries * field.num_bytes]
        .view(field.dtype)
        .view(num_entries, *field.shape)
        for field, offset in zip(fields, offsets, strict=False)
    }
