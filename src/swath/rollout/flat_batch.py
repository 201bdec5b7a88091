"""Flat batches: so many frames of whoever had them first."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from swath.keys import Key, nested
from swath.rollout.layout import CPU, Field

#: Of a frame that is not delivered yet: whether its action was drawn at random.
IS_RANDOM: Key = ("is_random",)


class FlatBatch:
    """A batch ``[num_frames]`` that is being put together, and what was left over from the one before."""

    def __init__(self, fields: list[Field], device: torch.device | None) -> None:
        self._fields = [*fields, Field(IS_RANDOM, torch.Size(), torch.bool, CPU)]
        self._device = device
        self.leaves: dict[Key, torch.Tensor] = {}
        self.num_frames = 0
        self.filled = 0
        self._spilled: list[dict[Key, torch.Tensor]] = []

    def open(self, num_frames: int) -> None:
        """Begin one, in new memory, with what was left over."""
        self.num_frames, self.filled = num_frames, 0
        self.leaves = {f.key: torch.empty((num_frames, *f.shape), dtype=f.dtype, device=f.device) for f in self._fields}
        spilled, self._spilled = self._spilled, []
        for piece in spilled:
            self.add(piece)

    def add(self, piece: dict[Key, torch.Tensor]) -> None:
        """Some frames; what there is no room for is kept for the next batch."""
        count = len(next(iter(piece.values())))
        room = min(count, self.num_frames - self.filled)
        if room:
            for key, values in piece.items():
                self.leaves[key][self.filled : self.filled + room].copy_(values[:room])
            self.filled += room
        if room < count:
            self._spilled.append({key: values[room:].clone() for key, values in piece.items()})

    @property
    def num_random(self) -> int:
        """Frames of this batch, so far, with random actions."""
        return int(self.leaves[IS_RANDOM][: self.filled].sum())

    def drop(self, key: Key, values: set[int]) -> int:
        """Forget the frames that have one of these values there, also of what is left over; how many were random."""
        if not (self.filled or self._spilled):
            return 0
        so_far = {name: leaf[: self.filled] for name, leaf in self.leaves.items()}
        num_random, kept = 0, []
        for piece in [so_far, *self._spilled]:
            gone = torch.isin(piece[key].cpu(), torch.tensor(sorted(values)))
            num_random += int(piece[IS_RANDOM][gone].sum())
            kept.append({name: leaf[~gone] for name, leaf in piece.items()})
        self._spilled = kept
        self.open(self.num_frames)
        return num_random

    def first_left_over(self, key: Key, by: Key) -> dict[int, int]:
        """Of what was left over: ``key`` of the first frame for each value of ``by``."""
        found: dict[int, int] = {}
        for piece in self._spilled:
            for owner, value in zip(piece[by].tolist(), piece[key].tolist(), strict=True):
                found.setdefault(owner, value)
        return found

    def forget(self) -> None:
        """Also what was left over."""
        self._spilled.clear()
        self.filled = 0

    def close(self) -> TensorDict:
        """What is in it, which is the consumer's from now on."""
        leaves, self.leaves = self.leaves, {}
        leaves.pop(IS_RANDOM, None)
        if self.filled < self.num_frames:
            leaves = {key: leaf[: self.filled].clone() for key, leaf in leaves.items()}
        return TensorDict(nested(leaves), batch_size=(self.filled,), device=self._device)
