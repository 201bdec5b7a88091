"""Normalising by statistics of what was seen: ``VecNorm`` and ``VecNormV2``.

Both are of all envs at once, and a reset counts as well as a step. Where only some envs are reset, the others' rows are
what their episodes began with, once more: that is how TorchRL's batched envs do it, and so the results are the same.

The statistics are in an object, the *source*: the transform itself, or TorchRL's where its env was lowered; they are
looked up there in each step, since loading a state may put other tensors in their place. Those that several processes
share are in ``shared_statistics.py``.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.specs import NestedKey, Unbounded
from swath.envs.transforms.base import Compose, Rows, Slot, Specs, Stage, Transform
from swath.envs.transforms.shared_norms import (
    Normal,
    SharedAverages,
    SharedAveragesByEnv,
    SharedSums,
    averages_as_normal,
    averages_of,
    sums_as_normal,
)
from swath.envs.transforms.shared_statistics import SharedStatistics, Statistic
from swath.envs.transforms.values import ObservationNorm
from swath.rollout.layout import Key, as_key, show
from swath.states import mismatch


class Normalizing(Transform):
    """What both have in common."""

    is_by_env = False
    #: Between the parts of a key, in what TorchRL's ``get_extra_state`` gives.
    SEP: ClassVar[str]

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | NestedKey | None,
        out_keys: Sequence[NestedKey] | NestedKey | None,
        lock: Any,
        decay: float,
        eps: float,
        shared: Any,
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
        #: What statistics the env's data needs, by key: shape and dtype. Nothing before there is an env.
        self._expected: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._is_bound = False
        #: Statistics that were given as a TensorDict go on changing there.
        self._goes_on_elsewhere = isinstance(shared, TensorDictBase)
        self._shared = shared if isinstance(shared, SharedStatistics) else None
        if self._shared is not None and lock is not None:
            raise ValueError(f"{type(self).__name__}: SharedStatistics need no lock; leave it out")
        self._refuse_lost_sharing()

    # -- frozen, copied --------------------------------------------------------------------------------------------

    def freeze(self) -> Self:
        """Normalise by what was seen so far, from now on; of statistics that are shared, by what all have seen."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        self.frozen = False
        return self

    def frozen_copy(self) -> Self:
        """Another one with a copy of the statistics, which stay as they are; no other process has them."""
        if not self.state_dict():
            raise self._nothing_seen()
        return self.clone().freeze()

    def clone(self) -> Self:
        """Another one with a copy of the statistics; no other process has them."""
        state = self.state_dict()
        other = copy.copy(self)
        other.lock, other._shared, other._goes_on_elsewhere = None, None, False
        other._forget()
        other.load_state_dict(state)
        return other

    def to_observation_norm(self) -> Any:
        """An ``ObservationNorm`` with what it normalises by now; a ``Compose`` of such, for several keys."""
        loc, scale = self._loc_and_scale()
        norms = []
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            own = loc.get(in_key).clone(), scale.get(in_key).clone()
            norms.append(ObservationNorm(*own, [in_key], [out_key], standard_normal=True, eps=self._eps_of_copies))
        return norms[0] if len(norms) == 1 else Compose(*norms)

    #: What an ``ObservationNorm`` made of this is given; None for its own.
    _eps_of_copies: float | None = None
    #: As ``ObservationNorm`` has it: values are ``(value - loc) / scale``.
    standard_normal = True

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if state["_source"] is self:
            del state["_source"]  # a copy has its own
        if not self._goes_on_elsewhere:
            state["lock"] = None  # nobody else has the statistics of a copy
        return {**state, "_is_bound": False, "_expected": {}}  # which its own env will say

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_source": self, **state})

    # -- shared ----------------------------------------------------------------------------------------------------

    def share_memory(self) -> Self:
        """Share the statistics with every copy of it that gets to another process, as with the functions for workers.

        To be called before an env steps with it.
        """
        if self._shared is not None:
            return self
        if self._goes_on_elsewhere:
            raise RuntimeError(f"{type(self).__name__}.share_memory: its statistics were given as a TensorDict already")
        if self._is_bound:
            raise RuntimeError(f"{type(self).__name__}.share_memory: an env steps with it; call this before")
        state = self.state_dict()
        self._shared = SharedStatistics()
        self._forget()
        if self._expected:
            self._attach()
        self.load_state_dict(state)
        return self

    def is_shared(self) -> bool:
        """Whether other processes may add to the statistics."""
        return self._shared is not None or self._goes_on_elsewhere

    def _refuse_lost_sharing(self) -> None:
        if self._goes_on_elsewhere and self.lock is None and multiprocessing.parent_process() is not None:
            raise RuntimeError(
                f"{type(self).__name__}: statistics that are given as a TensorDict are not shared in a process like "
                "this: it has a copy, or others write to them at the same time. Give a SharedStatistics() instead, or "
                "call share_memory() of the transform, where the workers are started"
            )

    def _attach(self) -> None:
        assert self._shared is not None
        statistics = []
        for key in map(as_key, self.in_keys):
            shape, dtype = self._expected[key]
            name = str(dtype).removeprefix("torch.")
            statistics.append(Statistic(key, tuple(shape), name, self._num_sums(shape.numel())))
        self._shared.attach(statistics, kind=type(self).__name__, decay=self.decay)

    def _read_shared(self) -> list[tuple[NestedKey, np.ndarray, float, torch.Size, torch.dtype]]:
        """Of each key: sums of all processes, how much was added, and the shape and dtype of its statistics."""
        assert self._shared is not None
        found = []
        for key, statistic, sums in zip(self.in_keys, self._shared.statistics, self._shared.sums, strict=False):
            values, added = sums.read(self.decay)
            found.append((key, values.copy(), added, torch.Size(statistic.shape), getattr(torch, statistic.dtype)))
        return found

    @staticmethod
    def _num_sums(num: int) -> int:
        """That are kept for so many values."""
        raise NotImplementedError

    # -- specs -----------------------------------------------------------------------------------------------------

    def transform_specs(self, specs: Specs) -> None:
        self._refuse_lost_sharing()
        self._in_resets = []
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            key = as_key(in_key)
            spec = specs.find(key, self)
            own_shape = spec.shape[len(specs.batch_size) :]
            if spec.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{type(self).__name__}: {show(key)} is {spec.dtype}; cast it to float32 before")
            self._expected[key] = self._shape_for(in_key, own_shape, specs.batch_size), spec.dtype
            kind = specs.kind_of(key) or "observation"
            if kind != "reward":  # a reset gives none
                self._in_resets.append(in_key)
            specs.put(as_key(out_key), Unbounded(spec.shape, spec.dtype, spec.device), kind)
        if self._shared is not None:
            self._attach()
        else:
            for in_key in self.in_keys:
                self._require_fit(in_key, *self._expected[as_key(in_key)])

    def _shape_for(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size) -> torch.Size:
        """Of the statistics of values of this shape."""
        raise NotImplementedError

    def _require_fit(self, key: NestedKey, wanted: torch.Size, dtype: torch.dtype) -> None:
        """Whether the statistics that there are fit."""
        raise NotImplementedError

    def _do_not_fit(self, key: NestedKey, found: torch.Tensor, wanted: torch.Size, dtype: torch.dtype) -> ValueError:
        return ValueError(
            f"{type(self).__name__}: its statistics of {show(as_key(key))} are {tuple(found.shape)}, {found.dtype}; "
            f"the env gives {tuple(wanted)}, {dtype}"
        )

    def _nothing_seen(self, key: NestedKey | None = None) -> RuntimeError:
        of = "" if key is None else f" of {show(as_key(key))}"
        return RuntimeError(f"{type(self).__name__}: nothing was seen yet{of}")

    def warn_if_nothing_seen(self) -> None:
        """Of one that is frozen: statistics may still be loaded, or sent."""
        state = TensorDict(self.state_dict())
        for key in self.in_keys:
            count = state.get(self._names_of(key)[2], None)
            if count is None or not bool(count.any()):
                warnings.warn(
                    f"{self._nothing_seen(key)}, and it is frozen, so all values are NaN; load statistics, or let it "
                    "see some before freeze()",
                    stacklevel=2,
                )

    # -- state -----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Have no statistics."""
        raise NotImplementedError

    def _names_of(self, key: NestedKey) -> list[NestedKey]:
        """Where a state has the statistics of a key: values, squares, how many."""
        raise NotImplementedError

    def get_extra_state(self) -> dict[str, Any] | None:
        """The statistics as TorchRL's transform of this name gives them."""
        state = self.state_dict()
        return TensorDict(state).flatten_keys(self.SEP).to_dict() if state else None

    def set_extra_state(self, state: Mapping[str, Any] | None) -> None:
        self.load_state_dict({"_extra_state": state or {}})

    def _own_form(self, state_dict: Any) -> Any:
        """Of a state that is TorchRL's, what this one would have given."""
        if isinstance(state_dict, Mapping) and "_extra_state" in state_dict:
            theirs = state_dict["_extra_state"]
            return TensorDict(dict(theirs)).unflatten_keys(self.SEP).to_dict() if theirs else {}
        return state_dict

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        state_dict = self._own_form(state_dict)
        who, wanted = type(self).__name__, f"statistics of {self.in_keys}"
        if isinstance(state_dict, Mapping) and not state_dict:
            if strict and self.state_dict():
                raise mismatch(who, state_dict, wanted)
            return
        if not isinstance(state_dict, Mapping):
            raise mismatch(who, state_dict, wanted)
        names = {as_key(name) for key in self.in_keys for name in self._names_of(key)}
        state = TensorDict(dict(state_dict))
        found = set(map(as_key, state.keys(True, True)))
        if not found & names or (strict and not found <= names):
            raise mismatch(who, state_dict, wanted)
        for key in self.in_keys:  # some may not have been met yet
            parts = [state.get(name, None) for name in self._names_of(key)]
            if any(part is not None for part in parts):
                self._check_parts(key, parts, state_dict)

    def _check_parts(self, key: NestedKey, parts: Sequence[Any], state_dict: Any) -> None:
        who = type(self).__name__
        if any(part is None for part in parts) or parts[2].numel() != 1:
            raise mismatch(who, state_dict, f"values, squares and a count of {show(as_key(key))}")
        shape, dtype = self._expected.get(as_key(key), (parts[0].shape, parts[0].dtype))
        if any((part.shape, part.dtype) != (shape, dtype) for part in parts[:2]):
            expected = f"statistics of {show(as_key(key))} of shape {tuple(shape)} and {dtype}"
            raise mismatch(who, state_dict, f"{expected}, not {tuple(parts[0].shape)} and {parts[0].dtype}")

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from these statistics; where they are shared, all processes do."""
        self.check_state_dict(state_dict, strict)
        names = [name for key in self.in_keys for name in self._names_of(key)]
        state = TensorDict(dict(self._own_form(state_dict))).select(*names, strict=False)
        if state.is_empty():
            return
        if self._shared is None:
            self._load(state)
            return
        for key in self.in_keys:
            values = state.get(self._names_of(key)[0], None)
            if values is not None:
                self._expected.setdefault(as_key(key), (values.shape, values.dtype))
        missing = [key for key in self.in_keys if as_key(key) not in self._expected]
        if missing:
            raise RuntimeError(f"{type(self).__name__}: the state has nothing of {missing}; make the env first")
        self._attach()
        self._shared.load([self._sums_of(state, key) for key in self.in_keys])

    def _load(self, state: TensorDict) -> None:
        raise NotImplementedError

    def _sums_of(self, state: TensorDict, key: NestedKey) -> tuple[int, np.ndarray]:
        """As shared statistics have it: how much was added, and the sums."""
        raise NotImplementedError

    def _loc_and_scale(self) -> tuple[TensorDict, TensorDict]:
        loc, scale = TensorDict(), TensorDict()
        for key in self.in_keys:
            own_loc, own_scale = self._normal_of(key)
            loc.set(key, own_loc)
            scale.set(key, own_scale)
        return loc, scale

    def _normal_of(self, key: NestedKey) -> tuple[torch.Tensor, torch.Tensor]:
        """What values of a key are normalised by."""
        if self._shared is None:
            return self._own_normal(key)
        for name, sums, added, shape, dtype in self._read_shared():
            if name == key and (added or sums.any()):
                loc, scale = (torch.from_numpy(part).view(shape).to(dtype) for part in self._normal_by(sums, added))
                return loc, scale
        raise self._nothing_seen(key)

    def _own_normal(self, key: NestedKey) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _normal_by(self, sums: np.ndarray, added: float) -> Normal:
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
        #: Whether it was looked, while frozen, that there are statistics.
        self._was_looked = False

    def step(self, env_ids: Sequence[int] | None) -> None:
        if self._source.frozen and not self._was_looked:
            self._was_looked = True
            if isinstance(self._source, Normalizing):
                self._source.warn_if_nothing_seen()
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

    def _require_fit(self, key: NestedKey, wanted: torch.Size, dtype: torch.dtype) -> None:
        found = None if self._source._td is None else self._source._td.get(_named(key, "_sum"), None)
        if found is not None and (found.shape != wanted or found.dtype != dtype):
            raise self._do_not_fit(key, found, wanted, dtype)

    def bind(self, rows: Rows) -> Stage:
        self._is_bound = True
        source = self._source
        entries: dict[Key, Any] = {}
        for number, (in_key, out_key) in enumerate(zip(self.in_keys, self.out_keys, strict=True)):
            read = rows[in_key]
            shape = read.tensor.shape[1:]
            own = shape if self.shapes is None else torch.Size(self.shapes[number])
            write = rows.new(out_key, shape, read.tensor.dtype)
            if self._shared is not None:
                entries[as_key(in_key)] = SharedSums(self, self._shared, number, read, write)
            else:
                entries[as_key(in_key)] = _Sums(source, in_key, read, write, own, len(rows.batch_size))
        return _NormalizingStage(source, list(entries.values()), [entries[as_key(key)] for key in self._in_resets])

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
        self._td = _loaded(self._td, state)

    def _sums_of(self, state: TensorDict, key: NestedKey) -> tuple[int, np.ndarray]:
        parts = [state.get(name, None) for name in self._names_of(key)]
        if parts[0] is None:
            return 0, np.zeros(self._num_sums(self._expected[as_key(key)][0].numel()))
        return 0, torch.cat([part.reshape(-1).double() for part in parts]).numpy()


def _loaded(own: Any, state: TensorDict) -> Any:
    """In place, for those who look at the same memory; anew where that is of other shapes, which no env has yet."""
    if own is None:
        return state.clone()
    for key, value in state.items(True, True):
        found = own.get(key, None)
        if found is not None and (found.shape, found.dtype) != (value.shape, value.dtype):
            return own.clone().update(state.clone())
    return own.update(state, inplace=True)


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

    def _require_fit(self, key: NestedKey, wanted: torch.Size, dtype: torch.dtype) -> None:
        source = self._source
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
        for number, (in_key, out_key) in enumerate(zip(self.in_keys, self.out_keys, strict=True)):
            read = rows[in_key]
            write = rows.new(out_key, read.tensor.shape[1:], read.tensor.dtype)
            if self._shared is not None:
                kind = SharedAveragesByEnv if is_by_env else SharedAverages
                entries[as_key(in_key)] = kind(self, self._shared, number, read, write)
            else:
                entries[as_key(in_key)] = _Averages(self, as_key(in_key), read, write, rows.batch_size)
        in_resets = [entries[as_key(key)] for key in self._in_resets]
        return _NormalizingStage(self._source, list(entries.values()), in_resets)

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
        self._loc, self._var, self._count = map(_loaded, own, loaded)

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
