"""Flat batches: so many frames of whoever had them first."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from swath.rollout.layout import Field, Key, nested


class FlatBatch:
    """A batch ``[num_frames]`` that is being put together, and what was left over from the one before."""

    def __init__(self, fields: list[Field], device: torch.device | None) -> None:
        self._fields = fields
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

    def forget(self) -> None:
        """Also what was left over."""
        self._spilled.clear()
        self.filled = 0

    def close(self) -> TensorDict:
        """What is in it, which is the consumer's from now on."""
        leaves, self.leaves = self.leaves, {}
        if self.filled < self.num_frames:
            leaves = {key: leaf[: self.filled].clone() for key, leaf in leaves.items()}
        return TensorDict(nested(leaves), batch_size=(self.filled,), device=self._device)
