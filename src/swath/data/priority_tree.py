"""Priorities that can be drawn from in proportion, and changed, many at a time."""

from __future__ import annotations

import numpy as np
import torch

#: Children of a node. Every level costs some 100 µs in calls, nearly whatever its size; so nodes are wide, and the top
#: wider still, since it is added up in one go: a million priorities are two levels.
_WIDTH = 128
_WIDEST_TOP = 16_384


class PriorityTree:
    """``capacity`` priorities, 0 for what is not to be drawn; sums and minima of every 128, and so on.

    >>> tree = PriorityTree(100)
    >>> tree.set(np.array([3, 50]), np.array([1.0, 3.0]))
    >>> tree.total, tree.smallest, tree.find(np.array([0.5, 1.5, 3.9])).tolist()
    (4.0, 1.0, [3, 50, 50])
    """

    def __init__(self, capacity: int) -> None:
        #: From the leaves up; each a multiple of the width, but for the top.
        self._sums: list[np.ndarray] = []
        self._minima: list[np.ndarray] = []
        count = capacity
        while True:
            padded = -(-count // _WIDTH) * _WIDTH
            self._sums.append(np.zeros(padded))
            self._minima.append(np.full(padded, np.inf))
            if padded <= _WIDEST_TOP and len(self._sums) > 1:
                break
            count = padded // _WIDTH

    @property
    def leaves(self) -> np.ndarray:
        return self._sums[0]

    @property
    def total(self) -> float:
        return float(self._sums[-1].sum())

    @property
    def smallest(self) -> float:
        """Of those that are not 0; infinity without any."""
        return float(self._minima[-1].min())

    def set(self, indices: np.ndarray, priorities: np.ndarray | float) -> None:
        self._sums[0][indices] = priorities
        self._minima[0][indices] = np.where(np.equal(priorities, 0), np.inf, priorities)
        for level in range(1, len(self._sums)):
            # Some may be there twice; to sort that out takes longer, unless they are many.
            indices = indices // _WIDTH if len(indices) < 1024 else np.unique(indices // _WIDTH)
            children = self._sums[level - 1].reshape(-1, _WIDTH).take(indices, 0)
            smallest = self._minima[level - 1].reshape(-1, _WIDTH).take(indices, 0)
            # Sums over rows: NumPy's take 1.5 times as long as torch's, minima twice, cumulated sums 4 times.
            self._sums[level][indices] = torch.from_numpy(children).sum(1).numpy()
            self._minima[level][indices] = torch.from_numpy(smallest).amin(1).numpy()

    def find(self, masses: np.ndarray) -> np.ndarray:
        """The leaf at which the sum of all priorities up to it first exceeds each of ``masses``."""
        cumulated = self._sums[-1].cumsum()
        nodes = np.minimum(np.searchsorted(cumulated, masses, side="right"), len(cumulated) - 1)
        left = masses - (cumulated[nodes] - self._sums[-1][nodes])
        first_of_row = np.arange(len(masses)) * _WIDTH
        for level in range(len(self._sums) - 2, -1, -1):
            children = self._sums[level].reshape(-1, _WIDTH).take(nodes, 0)
            sums = torch.from_numpy(children).cumsum(1)
            chosen = torch.searchsorted(sums, torch.from_numpy(left).unsqueeze(1), right=True).numpy().reshape(-1)
            np.minimum(chosen, _WIDTH - 1, out=chosen)
            places = first_of_row + chosen
            left = left - (sums.numpy().reshape(-1).take(places) - children.reshape(-1).take(places))
            nodes = nodes * _WIDTH + chosen
        return nodes
