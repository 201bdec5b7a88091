"""Normalising by statistics of what was seen: what ``VecNorm`` (``vec_norm.py``) and ``VecNormV2`` have in common.

Both are of all envs at once, and a reset counts as well as a step. Where only some envs are reset, the others' rows are
what their episodes began with, once more: that is how TorchRL's batched envs do it, and so the results are the same.

The statistics are in an object, the *source*: the transform itself, or TorchRL's where its env was lowered; they are
looked up there in each step, since loading a state may put other tensors in their place. Those that several processes
share are in ``shared_statistics.py``.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose
from swath.envs.transforms.scaling import ObservationNorm
from swath.envs.transforms.shared_norms import Normal
from swath.envs.transforms.shared_statistics import SharedStatistics, Statistic
from swath.envs.transforms.specs import Specs
from swath.keys import Key, as_key, show
from swath.specs import NestedKey, Unbounded
from swath.states import mismatch
from swath.warn import warn_user


class Normalizing(Transform):
    """What both have in common."""

    is_by_env = False
    #: Between the parts of a key, in what TorchRL's ``get_extra_state`` gives.
    SEP: ClassVar[str]

    _shown = ("decay", "eps")

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
        #: Whose statistics these are: its own, or those of the one of TorchRL that it stands for.
        self.source: Any = self
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
        for in_key, out_key in self._pairs:
            own = loc.get(in_key).clone(), scale.get(in_key).clone()
            norms.append(ObservationNorm(*own, [in_key], [out_key], standard_normal=True, eps=self._eps_of_copies))
        return norms[0] if len(norms) == 1 else Compose(*norms)

    #: What an ``ObservationNorm`` made of this is given; None for its own.
    _eps_of_copies: float | None = None
    #: As ``ObservationNorm`` has it: values are ``(value - loc) / scale``.
    standard_normal = True

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if state["source"] is self:
            del state["source"]  # a copy has its own
        if not self._goes_on_elsewhere:
            state["lock"] = None  # nobody else has the statistics of a copy
        return {**state, "_is_bound": False, "_expected": {}}  # which its own env will say

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"source": self, **state})

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
        for in_key, out_key in self._pairs:
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
                self.require_fit(in_key, *self._expected[as_key(in_key)])

    def _shape_for(self, key: NestedKey, shape: torch.Size, batch_size: torch.Size) -> torch.Size:
        """Of the statistics of values of this shape."""
        raise NotImplementedError

    def require_fit(self, key: NestedKey, wanted: torch.Size, dtype: torch.dtype) -> None:
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
                warn_user(
                    f"{self._nothing_seen(key)}, and it is frozen, so all values are NaN; load statistics, or let it "
                    "see some before freeze()"
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
        for in_key, out_key in self._pairs:
            value = tensordict.get(out_key, None)
            if value is not None:
                tensordict.set(in_key, value * scale.get(in_key) + loc.get(in_key))
        return tensordict


class NormalizingStage:
    """Each key by itself, under the lock."""

    def __init__(self, source: Any, entries: Sequence[Any], in_resets: Sequence[Any]) -> None:
        self.source = source
        self._entries = entries
        self._in_resets = in_resets
        #: Whether it was looked, while frozen, that there are statistics.
        self._was_looked = False

    def step(self, env_ids: Sequence[int] | None) -> None:
        if self.source.frozen and not self._was_looked:
            self._was_looked = True
            if isinstance(self.source, Normalizing):
                self.source.warn_if_nothing_seen()
        self._run(self._entries, env_ids)

    def reset(self, env_ids: Sequence[int]) -> None:
        self._run(self._in_resets, None)

    def _run(self, entries: Sequence[Any], env_ids: Sequence[int] | None) -> None:
        lock = self.source.lock
        with contextlib.nullcontext() if lock is None else lock, np.errstate(all="ignore"):
            for entry in entries:
                entry.run(env_ids)


def load_into(own: Any, state: TensorDict) -> Any:
    """In place, for those who look at the same memory; anew where that is of other shapes, which no env has yet."""
    if own is None:
        return state.clone()
    for key, value in state.items(True, True):
        found = own.get(key, None)
        if found is not None and (found.shape, found.dtype) != (value.shape, value.dtype):
            return own.clone().update(state.clone())
    return own.update(state, inplace=True)
