"""``VecNorm``: statistics as sums of values and squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.transforms.normalizing import Normalizing, NormalizingStage, load_into
from swath.envs.transforms.rows import Rows, Slot, Stage
from swath.envs.transforms.shared_norms import Normal, SharedSums, sums_as_normal
from swath.envs.transforms.shared_statistics import SharedStatistics
from swath.envs.transforms.vec_norm_v2 import VecNormV2
from swath.keys import Key, as_key, show
from swath.specs import NestedKey


def _named(key: NestedKey, suffix: str) -> NestedKey:
    *path, name = as_key(key)
    return (*path, name + suffix) if path else name + suffix


class VecNorm(Normalizing):
    """Normalises by the mean and the deviation of what was seen, of all envs and steps together.

    Sums are multiplied by ``decay`` in each step, so that old data counts less. ``new_api=True`` makes a ``VecNormV2``.

    Args:
        shared_td: statistics that several processes share: a ``SharedStatistics``. Or, within one process, a TensorDict
            in shared memory that goes on changing; ``lock`` is held then.
        shapes: the shape of each key's statistics, where that is only the last dimensions of its values.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> norm = VecNorm(in_keys=["observation"], decay=0.9)
    >>> step = TransformedEnv(GymEnv("CartPole-v1"), norm).rollout(5)
    >>> norm.loc["observation"].shape
    torch.Size([4])
    """

    def __new__(cls, *args: Any, new_api: bool | None = None, **kwargs: Any) -> Any:
        return VecNormV2(*args, **kwargs) if new_api else super().__new__(cls)

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        shared_td: SharedStatistics | TensorDictBase | None = None,
        lock: Any = None,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shapes: Sequence[Sequence[int]] | None = None,
        new_api: bool | None = None,
    ) -> None:
        if new_api:  # by position, where it is not seen before there is an object
            raise TypeError("VecNorm: new_api must be given by its name")
        keys = ["observation", "reward"] if in_keys is None else in_keys
        super().__init__(keys, out_keys, lock, decay, eps, shared_td)
        if shapes is not None and (len(shapes) != len(self.in_keys) or any(len(tuple(s)) == 0 for s in shapes)):
            raise ValueError(f"VecNorm: shapes must have one of at least one dimension for each of {self.in_keys}")
        self.shapes = shapes
        self._td: Any = None
        if shared_td is not None and not isinstance(shared_td, SharedStatistics):
            if not (shared_td.is_shared() or shared_td.is_memmap()):
                raise RuntimeError("VecNorm: shared_td is not in shared memory; call its share_memory_()")
            missing = [key for key in self.in_keys if _named(key, "_sum") not in shared_td.keys(True)]
            if missing:
                raise KeyError(f"VecNorm: shared_td has no statistics of {missing}")
            self._td = shared_td

    SEP = "-<.>-"

    def _shape_for(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size) -> torch.Size:
        if len(shape) == 0:
            raise ValueError(f"VecNorm: {show(as_key(key))} is a number without a dimension; unsqueeze it before")
        wanted = shape if self.shapes is None else torch.Size(self.shapes[self.in_keys.index(key)])
        if shape[len(shape) - len(wanted) :] != wanted:
            raise ValueError(f"VecNorm: {show(as_key(key))} is {tuple(shape)}, which does not end in {tuple(wanted)}")
        return wanted

    def require_fit(self, key: NestedKey, wanted: torch.Size, dtype: torch.dtype) -> None:
        found = None if self.source._td is None else self.source._td.get(_named(key, "_sum"), None)
        if found is not None and (found.shape != wanted or found.dtype != dtype):
            raise self._do_not_fit(key, found, wanted, dtype)

    def bind(self, rows: Rows) -> Stage:
        self._is_bound = True
        source = self.source
        entries: dict[Key, Any] = {}
        for number, (in_key, out_key) in enumerate(self._pairs):
            read = rows[in_key]
            shape = read.tensor.shape[1:]
            own = shape if self.shapes is None else torch.Size(self.shapes[number])
            write = rows.new(out_key, shape, read.tensor.dtype)
            if self._shared is not None:
                entries[as_key(in_key)] = SharedSums(self, self._shared, number, read, write)
            else:
                entries[as_key(in_key)] = _Sums(source, in_key, read, write, own)
        return NormalizingStage(source, list(entries.values()), [entries[as_key(key)] for key in self._in_resets])

    @staticmethod
    def _num_sums(num: int) -> int:
        return 2 * num + 1

    def _now(self) -> Any:
        """The statistics, wherever they are; None where nothing was seen."""
        if self._shared is None:
            return self._td
        td = TensorDict()
        for key, sums, _, shape, dtype in self._read_shared():
            if sums[-1]:
                num = shape.numel()
                for name, part in zip(self._names_of(key), (sums[:num], sums[num:-1]), strict=False):
                    td.set(name, torch.from_numpy(part).view(shape).to(dtype))
                td.set(_named(key, "_count"), torch.tensor(sums[-1:], dtype=torch.float32))
        return None if td.is_empty() else td

    def _own_normal(self, key: NestedKey) -> tuple[torch.Tensor, torch.Tensor]:
        total, squares, count = (None if self._td is None else self._td.get(name, None) for name in self._names_of(key))
        if total is None or squares is None:
            raise self._nothing_seen(key)
        mean = total / count
        return mean, (squares / count - mean.pow(2)).clamp_min(self.eps).sqrt()

    def _normal_by(self, sums: np.ndarray, added: float) -> Normal:
        return sums_as_normal(sums, self.eps)

    def _forget(self) -> None:
        self._td = None

    def _names_of(self, key: NestedKey) -> list[NestedKey]:
        return [_named(key, suffix) for suffix in ("_sum", "_ssq", "_count")]

    def state_dict(self) -> dict[str, Any]:
        td = self._now()
        return {} if td is None else td.clone().to_dict()

    def _load(self, state: TensorDict) -> None:
        self._td = load_into(self._td, state)

    def _sums_of(self, state: TensorDict, key: NestedKey) -> tuple[int, np.ndarray]:
        parts = [state.get(name, None) for name in self._names_of(key)]
        if parts[0] is None:
            return 0, np.zeros(self._num_sums(self._expected[as_key(key)][0].numel()))
        return 0, torch.cat([part.reshape(-1).double() for part in parts]).numpy()


def _partial_sums(row: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """Memory for sums over one dimension after the other, until there are as many as statistics have."""
    return [torch.empty(row.shape[dim:], dtype=row.dtype) for dim in range(1, row.ndim - len(shape) + 1)]


class _Sums:
    """``VecNorm`` of one key."""

    def __init__(self, source: Any, key: NestedKey, read: Slot, write: Slot, shape: torch.Size) -> None:
        self.source = source
        self._key = key
        self._names = [_named(key, suffix) for suffix in ("_sum", "_ssq", "_count")]
        self._read, self._write = read, write
        self._shape = shape
        self._num = read.tensor.shape[0]
        self._square = torch.empty_like(read.row)
        self._partials = _partial_sums(read.row, shape)
        # As wide as the statistics, which a count of one entry divides.
        self._mean = np.empty(tuple(shape), read.array.dtype)
        self._scratch = np.empty_like(self._mean)
        self._std_tensor = torch.empty(shape, dtype=read.tensor.dtype)
        self._std = self._std_tensor.numpy()
        self._td: Any = None
        self._tensors: Sequence[torch.Tensor] = ()
        self._arrays: Sequence[np.ndarray] = ()

    def _find(self) -> None:
        """Where the statistics are; they are made when the key is first met."""
        td = self.source._td
        if td is None or self._names[0] not in td.keys(True):
            dtype = self._read.tensor.dtype
            fresh = TensorDict()
            for name in self._names[:2]:
                fresh.set(name, torch.zeros(self._shape, dtype=dtype))
            fresh.set(self._names[2], torch.zeros(1, dtype=torch.float))
            if td is None:
                self.source._td = td = fresh
            else:
                td.update(fresh)
        self._td = td
        self._tensors = [td.get(name) for name in self._names]
        self._arrays = [tensor.numpy() for tensor in self._tensors]

    def run(self, env_ids: Sequence[int] | None) -> None:
        source = self.source
        if self._td is None or source._td is not self._td:
            self._find()
        read, write, num = self._read, self._write.array, self._num
        row, square, partials = read.row, self._square, self._partials
        if env_ids is not None:
            row, num = read.tensor[list(env_ids)], len(env_ids)
            square, partials = torch.empty_like(row), _partial_sums(row, self._shape)
        total, squares, count = self._arrays
        if not source.frozen:
            decay = float(source.decay)
            torch.mul(row, row, out=square)
            for statistic, value in ((total, row), (squares, square)):
                for partial in partials:
                    value = torch.sum(value, 0, out=partial)
                np.multiply(statistic, decay, statistic)
                np.add(statistic, value.numpy(), statistic)
            np.multiply(count, decay, count)
            np.add(count, num, count)
        mean, std, eps = self._mean, self._std, float(source.eps)
        np.divide(total, count, mean)
        np.divide(squares, count, std)
        np.multiply(mean, mean, self._scratch)
        np.subtract(std, self._scratch, std)
        np.maximum(std, eps, out=std)
        self._std_tensor.sqrt_()  # NumPy's is another one in the last bit
        np.maximum(std, eps, out=std)
        if env_ids is None:
            np.subtract(read.array, mean, write)
            np.divide(write, std, write)
        else:
            write[env_ids] = (row.numpy() - mean) / std
