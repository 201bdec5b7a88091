"""Normalising by statistics of what was seen: ``VecNorm`` and ``VecNormV2``.

Both are of all envs at once, and a reset counts as well as a step. Where only some envs are reset, the others' rows are
what their episodes began with, once more: that is how TorchRL's batched envs do it, and so the results are the same.

The statistics are in an object, the *source*: the transform itself, or TorchRL's where its env was lowered; they are
looked up there in each step, since loading a state may put other tensors in their place.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.specs import NestedKey, Unbounded
from swath.envs.transforms.base import Rows, Slot, Specs, Stage, Transform
from swath.rollout.layout import Key, as_key, show
from swath.states import mismatch


class Normalizing(Transform):
    """What both have in common."""

    is_by_env = False

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | NestedKey | None,
        out_keys: Sequence[NestedKey] | NestedKey | None,
        lock: Any,
        decay: float,
        eps: float,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if not self.in_keys:
            raise ValueError(f"{type(self).__name__}: in_keys names nothing to normalise")
        if not 0 < decay <= 1:
            raise ValueError(f"{type(self).__name__}: decay must be in (0, 1], got {decay}")
        if eps <= 0:
            raise ValueError(f"{type(self).__name__}: eps must be positive, got {eps}")
        #: Held while statistics are changed; None where no other process has them.
        self.lock = lock
        self.decay = decay
        self.eps = eps
        self.frozen = False
        self._source: Any = self
        self._in_resets: list[NestedKey] = []

    def freeze(self) -> Self:
        """Normalise by what was seen so far, from now on."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        self.frozen = False
        return self

    def transform_specs(self, specs: Specs) -> None:
        self._in_resets = []
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            key = as_key(in_key)
            spec = specs.find(key, self)
            own_shape = spec.shape[len(specs.batch_size) :]
            if spec.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{type(self).__name__}: {show(key)} is {spec.dtype}; cast it to float32 before")
            self._check_shape(in_key, own_shape, specs.batch_size, spec.dtype)
            kind = specs.kind_of(key) or "observation"
            if kind != "reward":  # a reset gives none
                self._in_resets.append(in_key)
            specs.put(as_key(out_key), Unbounded(spec.shape, spec.dtype, spec.device), kind)

    def _check_shape(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size, dtype: torch.dtype) -> None:
        """Whether the statistics that there are fit."""

    def _loc_and_scale(self) -> tuple[TensorDict, TensorDict]:
        raise NotImplementedError

    @property
    def loc(self) -> TensorDict:
        """What is subtracted, by ``in_keys``."""
        return self._loc_and_scale()[0]

    @property
    def scale(self) -> TensorDict:
        """What is divided by, by ``in_keys``."""
        return self._loc_and_scale()[1]

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A copy with the values before normalising under ``in_keys``."""
        loc, scale = self._loc_and_scale()
        tensordict = tensordict.copy()
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = tensordict.get(out_key, None)
            if value is not None:
                tensordict.set(in_key, value * scale.get(in_key) + loc.get(in_key))
        return tensordict

    def __repr__(self) -> str:
        keys = f"in_keys={self.in_keys}, out_keys={self.out_keys}"
        return f"{type(self).__name__}({keys}, decay={self.decay}, eps={self.eps})"


class _NormalizingStage:
    """Each key by itself, under the lock."""

    def __init__(self, source: Any, entries: Sequence[Any], in_resets: Sequence[Any]) -> None:
        self._source = source
        self._entries = entries
        self._in_resets = in_resets

    def step(self, env_ids: Sequence[int] | None) -> None:
        self._run(self._entries, env_ids)

    def reset(self, env_ids: Sequence[int]) -> None:
        self._run(self._in_resets, None)

    def _run(self, entries: Sequence[Any], env_ids: Sequence[int] | None) -> None:
        lock = self._source.lock
        with contextlib.nullcontext() if lock is None else lock, np.errstate(all="ignore"):
            for entry in entries:
                entry.run(env_ids)


def _named(key: NestedKey, suffix: str) -> NestedKey:
    *path, name = as_key(key)
    return (*path, name + suffix) if path else name + suffix


class VecNorm(Normalizing):
    """Normalises by the mean and the deviation of what was seen, of all envs and steps together.

    Sums are multiplied by ``decay`` in each step, so that old data counts less. ``new_api=True`` makes a ``VecNormV2``.

    Args:
        shared_td: statistics in shared memory, which several processes use; ``lock`` keeps them apart.
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
        shared_td: TensorDictBase | None = None,
        lock: Any = None,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shapes: Sequence[Sequence[int]] | None = None,
        new_api: bool | None = None,
    ) -> None:
        if new_api:  # by position, where it is not seen before there is an object
            raise TypeError("VecNorm: new_api must be given by its name")
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys, lock, decay, eps)
        if shapes is not None and (len(shapes) != len(self.in_keys) or any(len(tuple(s)) == 0 for s in shapes)):
            raise ValueError(f"VecNorm: shapes must have one of at least one dimension for each of {self.in_keys}")
        if shared_td is not None:
            if not (shared_td.is_shared() or shared_td.is_memmap()):
                raise RuntimeError("VecNorm: shared_td is not in shared memory; call its share_memory_()")
            missing = [key for key in self.in_keys if _named(key, "_sum") not in shared_td.keys(True)]
            if missing:
                raise KeyError(f"VecNorm: shared_td has no statistics of {missing}")
        self.shapes = shapes
        self._td: Any = shared_td

    def _check_shape(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size, dtype: torch.dtype) -> None:
        if len(shape) == 0:
            raise ValueError(f"VecNorm: {show(as_key(key))} is a number without a dimension; unsqueeze it before")
        found = None if self._source._td is None else self._source._td.get(_named(key, "_sum"), None)
        wanted = shape if self.shapes is None else torch.Size(self.shapes[self.in_keys.index(key)])
        if shape[len(shape) - len(wanted) :] != wanted:
            raise ValueError(f"VecNorm: {show(as_key(key))} is {tuple(shape)}, which does not end in {tuple(wanted)}")
        if found is not None and (found.shape != wanted or found.dtype != dtype):
            raise ValueError(
                f"VecNorm: its statistics of {show(as_key(key))} are {tuple(found.shape)}, {found.dtype}; the env "
                f"gives {tuple(wanted)}, {dtype}"
            )

    def bind(self, rows: Rows) -> Stage:
        source = self._source
        entries = {}
        for number, (in_key, out_key) in enumerate(zip(self.in_keys, self.out_keys, strict=True)):
            read = rows[in_key]
            shape = read.tensor.shape[1:]
            own = shape if self.shapes is None else torch.Size(self.shapes[number])
            write = rows.new(out_key, shape, read.tensor.dtype)
            entries[as_key(in_key)] = _Sums(source, in_key, read, write, own, len(rows.batch_size))
        return _NormalizingStage(source, list(entries.values()), [entries[as_key(key)] for key in self._in_resets])

    def _loc_and_scale(self) -> tuple[TensorDict, TensorDict]:
        if self._td is None:
            raise RuntimeError("VecNorm: nothing was seen yet")
        loc, scale = TensorDict(), TensorDict()
        for key in self.in_keys:
            total, squares, count = (self._td.get(_named(key, suffix)) for suffix in ("_sum", "_ssq", "_count"))
            loc.set(key, total / count)
            scale.set(key, (squares / count - loc.get(key).pow(2)).clamp_min(self.eps).sqrt())
        return loc, scale

    def frozen_copy(self) -> VecNorm:
        """Another one with a copy of the statistics, which stay as they are."""
        if self._td is None:
            raise RuntimeError("VecNorm: nothing was seen yet")
        other = copy.copy(self)
        other._source, other.lock, other._td = other, None, self._td.clone()
        return other.freeze()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._td is None else self._td.clone().to_dict()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        if not state_dict:
            if strict and self._td is not None:
                raise mismatch("VecNorm", state_dict, "sums, squares and counts")
            return
        _require_names(
            self, state_dict, [_named(k, s) for k in self.in_keys for s in ("_sum", "_ssq", "_count")], strict
        )
        if self._td is None:
            self._td = TensorDict(state_dict).clone()
        else:
            self._td.update(TensorDict(state_dict), inplace=True)


def _require_names(who: Transform, state_dict: Any, names: Sequence[NestedKey], strict: bool) -> None:
    """A state that has other names than these is another transform's; some may not have been met yet."""
    known = {as_key(name) for name in names}
    found = set(map(as_key, TensorDict(state_dict).keys(True, True))) if isinstance(state_dict, Mapping) else set()
    if not found or (strict and not found <= known):
        raise mismatch(type(who).__name__, state_dict, f"statistics of {who.in_keys}")


class _Sums:
    """``VecNorm`` of one key."""

    def __init__(
        self, source: Any, key: NestedKey, read: Slot, write: Slot, shape: torch.Size, num_batch_dims: int
    ) -> None:
        self._source = source
        self._key = key
        self._names = [_named(key, suffix) for suffix in ("_sum", "_ssq", "_count")]
        self._read, self._write = read, write
        self._shape = shape
        self._has_batch = num_batch_dims > 0
        self._num = read.tensor.shape[0]
        self._square = torch.empty_like(read.row)
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
        td = self._source._td
        if td is None or self._names[0] not in td.keys(True):
            dtype = self._read.tensor.dtype
            fresh = TensorDict()
            for name in self._names[:2]:
                fresh.set(name, torch.zeros(self._shape, dtype=dtype))
            fresh.set(self._names[2], torch.zeros(1, dtype=torch.float))
            if td is None:
                self._source._td = td = fresh
            else:
                td.update(fresh)
        self._td = td
        self._tensors = [td.get(name) for name in self._names]
        self._arrays = [tensor.numpy() for tensor in self._tensors]

    def run(self, env_ids: Sequence[int] | None) -> None:
        source = self._source
        if self._td is None or source._td is not self._td:
            self._find()
        read, write, square, num = self._read, self._write.array, self._square, self._num
        row = read.row
        if env_ids is not None:
            row, num = read.tensor[list(env_ids)], len(env_ids)
            square = torch.empty_like(row)
        total, squares, count = self._arrays
        if not source.frozen:
            decay = float(source.decay)
            torch.mul(row, row, out=square)
            for statistic, value in ((total, row), (squares, square)):
                while value.ndim > statistic.ndim:
                    value = value.sum(0)
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


class VecNormV2(Normalizing):
    """Normalises by running averages of values and of their squares.

    Of several envs, each has averages of its own, unless ``reduce_batch_dims=True``: then there is one of all.

    Args:
        decay: how much of the averages a step keeps; with 1 all that was seen counts the same.
        shared_data: statistics to begin with and to go on with: a TensorDict of ``loc``, ``var`` and ``count``.

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
        shared_data: TensorDictBase | None = None,
        reduce_batch_dims: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, lock, decay, eps)
        if not stateful:
            raise ValueError("VecNormV2: stateful=False is not supported: statistics are in the transform")
        self.stateful = True
        self.reduce_batch_dims = reduce_batch_dims
        self._loc: Any = None
        self._var: Any = None
        self._count: Any = None
        if shared_data is not None:
            self._loc, self._var, self._count = (shared_data[name] for name in ("loc", "var", "count"))

    def _check_shape(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size, dtype: torch.dtype) -> None:
        wanted = shape if self.reduce_batch_dims else torch.Size((*batch_size, *shape))
        source = self._source
        if source._loc is None:
            source._loc, source._var, source._count = TensorDict(), TensorDict(), TensorDict()
        found = source._loc.get(key, None)
        if found is None:
            source._loc.set(key, torch.zeros(wanted, dtype=dtype))
            source._var.set(key, torch.zeros(wanted, dtype=dtype))
            source._count.set(key, torch.zeros((), dtype=torch.int64))
        elif found.shape != wanted or found.dtype != dtype:
            raise ValueError(
                f"VecNormV2: its statistics of {show(as_key(key))} are {tuple(found.shape)}, {found.dtype}; the env "
                f"gives {tuple(wanted)}, {dtype}"
            )

    def bind(self, rows: Rows) -> Stage:
        entries = {}
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            read = rows[in_key]
            write = rows.new(out_key, read.tensor.shape[1:], read.tensor.dtype)
            entries[as_key(in_key)] = _Averages(self, as_key(in_key), read, write, rows.batch_size)
        in_resets = [entries[as_key(key)] for key in self._in_resets]
        return _NormalizingStage(self._source, list(entries.values()), in_resets)

    def _loc_and_scale(self) -> tuple[TensorDict, TensorDict]:
        if self._loc is None:
            raise RuntimeError("VecNormV2: nothing was seen yet")
        loc, scale = TensorDict(), TensorDict()
        for key in self.in_keys:
            mean, count = self._loc.get(key), self._count.get(key)
            variance = self._var.get(key) - mean.pow(2)
            if self.decay < 1:
                bias = _bias(count, self.decay).to(mean.dtype)
                mean, variance = mean / bias, variance / bias
            loc.set(key, mean)
            scale.set(key, variance.sqrt().clamp_min(self.eps))
        return loc, scale

    def frozen_copy(self) -> VecNormV2:
        """Another one with a copy of the statistics, which stay as they are."""
        if self._loc is None:
            raise RuntimeError("VecNormV2: nothing was seen yet")
        other = copy.copy(self)
        other._source, other.lock = other, None
        other._loc, other._var, other._count = self._loc.clone(), self._var.clone(), self._count.clone()
        return other.freeze()

    def state_dict(self) -> dict[str, Any]:
        if self._loc is None:
            return {}
        parts = {"loc": self._loc, "var": self._var, "count": self._count}
        return {name: part.clone().to_dict() for name, part in parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        if not state_dict:
            if strict and self._loc is not None:
                raise mismatch("VecNormV2", state_dict, "loc, var and count")
            return
        names = [(part, *as_key(key)) for part in ("loc", "var", "count") for key in self.in_keys]
        _require_names(self, state_dict, names, strict)
        loaded = [TensorDict(state_dict.get(name, {})) for name in ("loc", "var", "count")]
        if self._loc is None:
            self._loc, self._var, self._count = (part.clone() for part in loaded)
            return
        for own, part in zip((self._loc, self._var, self._count), loaded, strict=True):
            own.update(part, inplace=True)


def _bias(count: torch.Tensor, decay: float) -> torch.Tensor:
    """How much of an average is of what was seen, not of the zero that it began with."""
    return 1 - (count * math.log(decay)).exp()


class _Averages:
    """``VecNormV2`` of one key."""

    def __init__(self, transform: VecNormV2, key: Key, read: Slot, write: Slot, batch_size: torch.Size) -> None:
        self._source = transform._source
        self._key = key
        self._read, self._write = read, write
        self._batch_dims = tuple(range(len(batch_size)))
        self._num = batch_size.numel()
        self._square = torch.empty_like(read.row)
        self._reduces = transform.reduce_batch_dims and bool(batch_size)
        self._of: Any = None

    def _find(self) -> None:
        source = self._source
        self._of = source._loc
        self._loc, self._var, self._count = (part.get(self._key) for part in (source._loc, source._var, source._count))
        # One row for each env, or one for all of them.
        rows = (-1, *self._read.tensor.shape[1:])
        self._loc_rows, self._var_rows = self._loc.view(rows), self._var.view(rows)
        self._mean, self._std = np.empty_like(self._loc_rows.numpy()), torch.empty_like(self._loc_rows)

    def run(self, env_ids: Sequence[int] | None) -> None:
        source = self._source
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
        decay, count = self._source.decay, self._count
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
        source = self._source
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
