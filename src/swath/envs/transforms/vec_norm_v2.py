"""``VecNormV2``: statistics as running averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.transforms.normalizing import Normalizing, NormalizingStage, load_into
from swath.envs.transforms.rows import Rows, Slot, Stage
from swath.envs.transforms.shared_norms import (
    Normal,
    SharedAverages,
    SharedAveragesByEnv,
    averages_as_normal,
    averages_of,
)
from swath.envs.transforms.shared_statistics import SharedStatistics
from swath.keys import Key, as_key
from swath.specs import NestedKey


class VecNormV2(Normalizing):
    """Normalises by running averages of values and of their squares.

    Of several envs, each has averages of its own, unless ``reduce_batch_dims=True``: then there is one of all.

    Args:
        decay: how much of the averages a step keeps; with 1 all that was seen counts the same.
        shared_data: statistics that several processes share: a ``SharedStatistics``. Or, within one process, what to
            begin and to go on with: a TensorDict of ``loc``, ``var`` and ``count``.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> norm = VecNormV2(in_keys=["observation"])
    >>> step = TransformedEnv(GymEnv("CartPole-v1"), norm).rollout(5)
    >>> int(norm.state_dict()["count"]["observation"])  # the reset and five steps
    6
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] | None = None,
        *,
        lock: Any = None,
        stateful: bool = True,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shared_data: SharedStatistics | TensorDictBase | None = None,
        reduce_batch_dims: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, lock, decay, eps, shared_data)
        if not stateful:
            raise ValueError("VecNormV2: stateful=False is not supported: statistics are in the transform")
        self.stateful = True
        self.reduce_batch_dims = reduce_batch_dims
        self._loc: Any = None
        self._var: Any = None
        self._count: Any = None
        if shared_data is not None and not isinstance(shared_data, SharedStatistics):
            self._loc, self._var, self._count = (shared_data[name] for name in ("loc", "var", "count"))

    SEP = ".-|-."

    def _shape_for(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size) -> torch.Size:
        return shape if self.reduce_batch_dims else torch.Size((*batch_size, *shape))

    def require_fit(self, key: NestedKey, wanted: torch.Size, dtype: torch.dtype) -> None:
        source = self.source
        if source._loc is None:
            source._loc, source._var, source._count = TensorDict(), TensorDict(), TensorDict()
        found = source._loc.get(key, None)
        if found is None:
            source._loc.set(key, torch.zeros(wanted, dtype=dtype))
            source._var.set(key, torch.zeros(wanted, dtype=dtype))
            source._count.set(key, torch.zeros((), dtype=torch.int64))
        elif found.shape != wanted or found.dtype != dtype:
            raise self._do_not_fit(key, found, wanted, dtype)

    def bind(self, rows: Rows) -> Stage:
        self._is_bound = True
        entries: dict[Key, Any] = {}
        is_by_env = bool(rows.batch_size) and not self.reduce_batch_dims
        for number, (in_key, out_key) in enumerate(self._pairs):
            read = rows[in_key]
            write = rows.new(out_key, read.tensor.shape[1:], read.tensor.dtype)
            if self._shared is not None:
                kind = SharedAveragesByEnv if is_by_env else SharedAverages
                entries[as_key(in_key)] = kind(self, self._shared, number, read, write)
            else:
                entries[as_key(in_key)] = _Averages(self, as_key(in_key), read, write, rows.batch_size)
        in_resets = [entries[as_key(key)] for key in self._in_resets]
        return NormalizingStage(self.source, list(entries.values()), in_resets)

    @staticmethod
    def _num_sums(num: int) -> int:
        return 2 * num

    @property
    def _eps_of_copies(self) -> float:  # type: ignore[override]
        return self.eps

    def _now(self) -> Any:
        """``loc``, ``var`` and ``count``, wherever they are; None where there are none."""
        if self._shared is None:
            return None if self._loc is None else (self._loc, self._var, self._count)
        parts = TensorDict(), TensorDict(), TensorDict()
        for key, sums, added, shape, dtype in self._read_shared():
            averages = averages_of(sums, max(added, 1), self.decay)
            for part, average in zip(parts, averages, strict=False):
                part.set(key, torch.from_numpy(average).view(shape).to(dtype))
            parts[2].set(key, torch.tensor(int(added)))
        return None if parts[0].is_empty() else parts

    def _own_normal(self, key: NestedKey) -> tuple[torch.Tensor, torch.Tensor]:
        if self._loc is None:
            raise self._nothing_seen(key)
        mean, square, count = (part.get(key) for part in (self._loc, self._var, self._count))
        variance = square - mean.pow(2)
        if self.decay < 1:
            bias = _bias(count, self.decay).to(mean.dtype)
            mean, variance = mean / bias, variance / bias
        return mean, variance.sqrt().clamp_min(self.eps)

    def _normal_by(self, sums: np.ndarray, added: float) -> Normal:
        return averages_as_normal(sums, added, self.decay, self.eps)

    def _forget(self) -> None:
        self._loc = self._var = self._count = None

    def _names_of(self, key: NestedKey) -> list[NestedKey]:
        return [(part, *as_key(key)) for part in ("loc", "var", "count")]

    def state_dict(self) -> dict[str, Any]:
        now = self._now()
        names = ("loc", "var", "count")
        return {} if now is None else {name: part.clone().to_dict() for name, part in zip(names, now, strict=True)}

    def _load(self, state: TensorDict) -> None:
        loaded = [state.get(name, TensorDict()) for name in ("loc", "var", "count")]
        own = (self._loc, self._var, self._count)
        self._loc, self._var, self._count = map(load_into, own, loaded)

    def _sums_of(self, state: TensorDict, key: NestedKey) -> tuple[int, np.ndarray]:
        loc, var, count = (state.get(name, None) for name in self._names_of(key))
        if loc is None:
            return 0, np.zeros(self._num_sums(self._expected[as_key(key)][0].numel()))
        sums = torch.cat([loc.reshape(-1), var.reshape(-1)]).double().numpy()
        return int(count), sums * int(count) if self.decay == 1 else sums


def _bias(count: torch.Tensor, decay: float) -> torch.Tensor:
    """How much of an average is of what was seen, not of the zero that it began with."""
    return 1 - (count * math.log(decay)).exp()


class _Averages:
    """``VecNormV2`` of one key."""

    def __init__(self, transform: VecNormV2, key: Key, read: Slot, write: Slot, batch_size: torch.Size) -> None:
        self.source = transform.source
        self._key = key
        self._read, self._write = read, write
        self._batch_dims = tuple(range(len(batch_size)))
        self._num = batch_size.numel()
        self._square = torch.empty_like(read.row)
        self._reduces = transform.reduce_batch_dims and bool(batch_size)
        self._of: Any = None

    def _find(self) -> None:
        source = self.source
        self._of = source._loc
        self._loc, self._var, self._count = (part.get(self._key) for part in (source._loc, source._var, source._count))
        # One row for each env, or one for all of them.
        rows = (-1, *self._read.tensor.shape[1:])
        self._loc_rows, self._var_rows = self._loc.view(rows), self._var.view(rows)
        self._mean, self._std = np.empty_like(self._loc_rows.numpy()), torch.empty_like(self._loc_rows)

    def run(self, env_ids: Sequence[int] | None) -> None:
        source = self.source
        if source._loc is not self._of:
            self._find()
        if env_ids is None:
            read, write = self._read, self._write
            if not source.frozen:
                torch.mul(read.row, read.row, out=self._square)
                self._update(read.row, self._square, self._loc, self._var, self._num, self._batch_dims)
            loc, var = self._loc_rows.numpy(), self._var_rows.numpy()
            self._normalize(read.array, loc, var, self._mean, self._std, write.array)
            return
        chosen = list(env_ids)
        row = self._read.tensor[chosen]
        loc, var = self._loc_rows, self._var_rows
        if not self._reduces and self._batch_dims:
            loc, var = loc[chosen], var[chosen]
        if not source.frozen:
            own_shape = (loc[0], var[0]) if self._reduces or not self._batch_dims else (loc, var)
            value = row if self._batch_dims else row[0]
            self._update(value, value * value, *own_shape, len(chosen), (0,))
            if not self._reduces and self._batch_dims:
                self._loc_rows[chosen], self._var_rows[chosen] = loc, var
        mean, std = np.empty_like(loc.numpy()), torch.empty_like(loc)
        made = np.empty_like(row.numpy())
        self._normalize(row.numpy(), loc.numpy(), var.numpy(), mean, std, made)
        self._write.array[chosen] = made

    def _update(
        self,
        value: torch.Tensor,
        square: torch.Tensor,
        loc: torch.Tensor,
        var: torch.Tensor,
        num: int,
        dims: tuple[int, ...],
    ) -> None:
        decay, count = self.source.decay, self._count
        weight: Any
        if self._reduces:
            count += num
            value, square = value.mean(dim=dims), square.mean(dim=dims)
            weight = 1 - decay**num if decay != 1 else (count.reciprocal() * num).to(loc.dtype)
        else:
            count += 1
            weight = 1 - decay if decay != 1 else count.reciprocal().to(loc.dtype)
        # Torch's own, which adds and multiplies in one rounding.
        loc.lerp_(value, weight)
        var.lerp_(square, weight)

    def _normalize(
        self, value: np.ndarray, loc: np.ndarray, var: np.ndarray, mean: np.ndarray, deviation: torch.Tensor, out: Any
    ) -> None:
        source = self.source
        std = deviation.numpy()
        np.multiply(loc, loc, std)
        np.subtract(var, std, std)
        if source.decay < 1:
            bias = _bias(self._count, source.decay).to(self._read.tensor.dtype).numpy()
            loc = np.divide(loc, bias, mean)
            np.divide(std, bias, std)
        deviation.sqrt_()  # NumPy's is another one in the last bit
        np.maximum(std, source.eps, out=std)
        np.subtract(value, loc, out)
        np.divide(out, std, out)
