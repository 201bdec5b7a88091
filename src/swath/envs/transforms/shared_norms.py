"""``VecNorm`` and ``VecNormV2`` of one key, where several processes share the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swath.envs.transforms.rows import Slot
from swath.envs.transforms.shared_statistics import SharedStatistics
from swath.errors import EnvError
from swath.keys import Key, show

#: Loc and scale of sums: see ``sums_as_normal`` and ``averages_as_normal``.
Normal = tuple[np.ndarray, np.ndarray]


def sums_as_normal(sums: np.ndarray, eps: float) -> Normal:
    """Of ``VecNorm``: values, their squares, and how many there are."""
    num = len(sums) // 2
    count = sums[-1]
    mean = sums[:num] / count
    variance = sums[num:-1] / count - mean * mean
    return mean, np.maximum(np.sqrt(np.maximum(variance, eps)), eps)


def averages_as_normal(sums: np.ndarray, added: float, decay: float, eps: float) -> Normal:
    """Of ``VecNormV2``: values and their squares, by weights that add up to one or, with a decay, will some day."""
    mean, squares = averages_of(sums, added, decay)
    variance = squares - mean * mean
    if decay < 1:
        bias = 1 - decay**added
        mean, variance = mean / bias, variance / bias
    return mean, np.maximum(np.sqrt(np.maximum(variance, 0)), eps)  # which rounding may have made less than nothing


def averages_of(sums: np.ndarray, added: float, decay: float) -> Normal:
    """Averages of values and of their squares."""
    if decay == 1:
        sums = sums / added
    num = len(sums) // 2
    return sums[:num], sums[num:]


class SharedNorm:
    """One key's rows, and what they are normalised by."""

    #: Whether each env has statistics of its own.
    is_by_env = False

    def __init__(self, source: Any, shared: SharedStatistics, number: int, read: Slot, write: Slot) -> None:
        statistic = shared.statistics[number]
        self.source = source
        self._shared = shared
        self._sums = shared.sums[number]
        self._key: Key = statistic.key
        self._array, self._out = read.array, write.array
        self._shape = statistic.shape
        self._num = num = int(np.prod(self._shape, dtype=int))
        self._values = np.zeros(statistic.num_sums)
        self._sum_of, self._squares_of = self._values[:num], self._values[num : 2 * num]
        self._flat = read.array.reshape(-1, num)
        self._square = np.zeros(self._flat.shape)
        self._normal = np.zeros((2, *self._shape), read.array.dtype)
        # Rows as wide as the statistics, which broadcast over all envs unless they are of each.
        rows = self._shape if self.is_by_env else read.array.shape
        self._array_rows, self._out_rows = read.array.reshape(rows), write.array.reshape(rows)

    def run(self, env_ids: Sequence[int] | None) -> None:
        decay = float(self.source.decay)
        if env_ids is None:
            self._find_normal(self._flat, self._square, len(self._array), decay)
            loc, scale = self._normal
            np.subtract(self._array_rows, loc, out=self._out_rows)
            np.divide(self._out_rows, scale, out=self._out_rows)
            return
        if self.is_by_env:
            raise EnvError(
                f"VecNormV2: some envs stepped and others did not, and each has statistics of {show(self._key)} that "
                "other processes share: they would not be of the same time. Give reduce_batch_dims=True"
            )
        chosen = self._array[list(env_ids)]
        flat = chosen.reshape(-1, self._num)
        self._find_normal(flat, np.zeros(flat.shape), len(chosen), decay)
        self._out[list(env_ids)] = (chosen - self._normal[0]) / self._normal[1]

    def _find_normal(self, flat: np.ndarray, square: np.ndarray, num_envs: int, decay: float) -> None:
        """Count these values, unless frozen; then by what they are normalised."""
        source = self.source
        if source.frozen:
            sums, added = self._sums.read(decay)
        else:
            np.add.reduce(flat, axis=0, dtype=np.float64, out=self._sum_of)
            np.multiply(flat, flat, out=square, dtype=np.float64)
            np.add.reduce(square, axis=0, out=self._squares_of)
            sums, added = self._sums.add(self._values, self._weigh(num_envs, decay), decay)
        loc, scale = self._as_normal(sums, added, decay, float(source.eps))
        self._normal[0], self._normal[1] = loc.reshape(self._shape), scale.reshape(self._shape)

    def _weigh(self, num_envs: int, decay: float) -> int:
        """Make of the values what is added; by how much the time goes on."""
        raise NotImplementedError

    def _as_normal(self, sums: np.ndarray, added: float, decay: float, eps: float) -> Normal:
        raise NotImplementedError


class SharedSums(SharedNorm):
    """``VecNorm``."""

    def _weigh(self, num_envs: int, decay: float) -> int:
        self._values[-1] = num_envs
        return 1

    def _as_normal(self, sums: np.ndarray, added: float, decay: float, eps: float) -> Normal:
        return sums_as_normal(sums, eps)


class SharedAverages(SharedNorm):
    """``VecNormV2``, of all envs together."""

    def _weigh(self, num_envs: int, decay: float) -> int:
        amount = 1 if self.is_by_env else num_envs
        if decay != 1:
            self._values *= (1 - decay**amount) / amount
        return amount

    def _as_normal(self, sums: np.ndarray, added: float, decay: float, eps: float) -> Normal:
        return averages_as_normal(sums, added, decay, eps)


class SharedAveragesByEnv(SharedAverages):
    """``VecNormV2``, of each env."""

    is_by_env = True
