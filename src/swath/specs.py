"""Specs: what a leaf looks like (shape, dtype, device) and which values it may take.

A spec's ``shape`` starts with the env's batch size. ``Composite`` maps keys to specs.

>>> spec = Composite(observation=Bounded(-1.0, 1.0, (3,)), action=OneHot(4))
>>> spec["action"].rand().sum().item()
1
>>> sorted(spec.rand((2,)).keys())
['action', 'observation']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.hints import ExplainsGuesses
from swath.keys import as_key

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "Spec",
    "Unbounded",
]

NestedKey = str | tuple[str, ...]


def _size(shape: int | Sequence[int] | torch.Size) -> torch.Size:
    return torch.Size([shape] if isinstance(shape, int) else shape)


class Spec(ExplainsGuesses):
    """One leaf: ``shape``, ``dtype``, ``device``, and how to draw a valid value."""

    def __init__(
        self, shape: int | Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        self.shape = _size(shape)
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """A random valid value with ``shape`` in front."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to draw a value")

    def is_in(self, value: torch.Tensor) -> bool:
        """Whether ``value`` has this spec's dtype, its trailing shape, and valid values."""
        return (
            value.dtype == self.dtype
            and value.shape[value.ndim - len(self.shape) :] == self.shape
            and self._values_ok(value)
        )

    def _values_ok(self, value: torch.Tensor) -> bool:
        return True

    def zero(self, shape: Sequence[int] = ()) -> torch.Tensor:
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    zeros = zero

    def clone(self) -> Spec:
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        return new

    def to(self, device: torch.device | str | None) -> Spec:
        new = self.clone()
        new.device = None if device is None else torch.device(device)
        return new

    def expand(self, *shape: int | Sequence[int]) -> Spec:
        """The same leaf with batch dimensions in front."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        new = self.clone()
        new.shape = _size(sizes)  # type: ignore[arg-type]
        if new.shape[len(new.shape) - len(self.shape) :] != self.shape:
            raise ValueError(
                f"cannot expand a spec of shape {tuple(self.shape)} to {tuple(new.shape)}: "
                "dimensions are added in front"
            )
        return new

    def _values(self) -> tuple[Any, ...]:
        return ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        same = (self.shape, self.dtype, self.device) == (other.shape, other.dtype, other.device)  # type: ignore[attr-defined]
        return same and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self._values(), other._values(), strict=True)  # type: ignore[attr-defined]
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = "".join(f", {v}" for v in self._values() if np.size(v) <= 4)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}{values})"


class Unbounded(Spec):
    """Any value of the dtype; random floats are drawn from a standard normal."""

    def __init__(
        self,
        shape: int | Sequence[int] = (1,),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(shape, dtype, device)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        size = (*shape, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(size, dtype=self.dtype, device=self.device)
        if self.dtype == torch.bool:
            return torch.rand(size, device=self.device) < 0.5
        info = torch.iinfo(self.dtype)
        return torch.randint(max(info.min, -(2**31)), min(info.max, 2**31 - 1), size, device=self.device).to(self.dtype)


class Bounded(Spec):
    """Values in ``[low, high]``; a side that is infinite is drawn from a shifted exponential or a normal."""

    def __init__(
        self,
        low: float | np.ndarray | torch.Tensor,
        high: float | np.ndarray | torch.Tensor,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if shape is None:
            shape = tuple(np.broadcast_shapes(np.shape(low), np.shape(high)))
        super().__init__(shape, dtype, device)
        self.low = np.asarray(low)
        self.high = np.asarray(high)

    def _values(self) -> tuple[Any, ...]:
        return (self.low, self.high)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        size = (*shape, *self.shape)
        if self.dtype == torch.bool:
            return torch.rand(size, device=self.device) < 0.5
        low = torch.as_tensor(self.low, dtype=torch.float64)
        high = torch.as_tensor(self.high, dtype=torch.float64)
        # Bounds so wide that float64 cannot subtract them count as unbounded.
        bounded_below, bounded_above = low > -1e300, high < 1e300
        unit = torch.rand(size, dtype=torch.float64)
        if not self.dtype.is_floating_point:
            draw = torch.floor(low + unit * (high - low + 1)).clamp(low, high)
            return draw.to(self.dtype).to(self.device)
        if bool((bounded_below & bounded_above).all()):
            return (low + unit * (high - low)).to(self.dtype).to(self.device)
        normal = torch.randn(size, dtype=torch.float64)
        tail = -torch.log1p(-unit)
        draw = torch.where(
            bounded_below & bounded_above,
            low.clamp(min=-1e300) + unit * (high.clamp(max=1e300) - low.clamp(min=-1e300)),
            torch.where(bounded_below, low + tail, torch.where(bounded_above, high - tail, normal)),
        )
        return draw.to(self.dtype).to(self.device)

    def _values_ok(self, value: torch.Tensor) -> bool:
        array = value.detach().cpu().numpy()
        return bool((array >= self.low).all() and (array <= self.high).all())


class _Choice(Spec):
    """One or several choices; in the encoding that they have already, they stay as they are."""

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        return _as_asked(self, val, safe)

    def to_one_hot_spec(self) -> _Choice:
        return self

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        return _as_asked(self, val, safe)

    def to_categorical_spec(self) -> _Choice:
        return self


class Categorical(_Choice):
    """An integer in ``[0, n)``; with ``n=2`` and ``dtype=torch.bool``, a flag."""

    def __init__(
        self,
        n: int,
        shape: int | Sequence[int] = (),
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(shape, dtype, device)
        self.n = int(n)

    def _values(self) -> tuple[Any, ...]:
        return (self.n,)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        return torch.randint(self.n, (*shape, *self.shape), device=self.device).to(self.dtype)

    def _values_ok(self, value: torch.Tensor) -> bool:
        return self.dtype == torch.bool or bool(((value >= 0) & (value < self.n)).all())

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """The choice as a vector of flags; with ``safe``, of a valid value only.

        >>> Categorical(3).to_one_hot(torch.tensor(2))
        tensor([False, False,  True])
        """
        return torch.nn.functional.one_hot(_as_asked(self, val, safe).long(), self.n).bool()

    def to_one_hot_spec(self) -> OneHot:
        return OneHot(self.n, (*self.shape, self.n), torch.bool, self.device)


class Binary(Categorical):
    """A vector of zeros and ones."""

    def __init__(
        self,
        n: int,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.int8,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(2, (n,) if shape is None else shape, dtype, device)


class OneHot(_Choice):
    """A choice among ``n`` as a vector with a single one."""

    def __init__(
        self,
        n: int,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__((n,) if shape is None else shape, dtype, device)
        self.n = int(n)

    def _values(self) -> tuple[Any, ...]:
        return (self.n,)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        choice = torch.randint(self.n, (*shape, *self.shape[:-1]), device=self.device)
        return self.encode(choice)

    def encode(self, choice: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(choice, self.n).to(self.dtype)

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """The number of the choice; with ``safe``, of a valid value only.

        >>> OneHot(3).to_categorical(torch.tensor([0, 0, 1]))
        tensor(2)
        """
        return _as_asked(self, val, safe).long().argmax(-1)

    def to_categorical_spec(self) -> Categorical:
        return Categorical(self.n, self.shape[:-1], torch.int64, self.device)

    def _values_ok(self, value: torch.Tensor) -> bool:
        return bool((value.sum(-1) == 1).all() and ((value == 0) | (value == 1)).all())


def masked_rand(spec: OneHot | Categorical, mask: torch.Tensor) -> torch.Tensor:
    """A random choice among those that ``mask`` (``[..., n]``) allows, as ``spec`` encodes it.

    >>> masked_rand(OneHot(3), torch.tensor([False, True, False]))
    tensor([0, 1, 0])
    """
    weights = mask.reshape(-1, spec.n).to(torch.float32)
    choice = torch.multinomial(weights, 1).reshape(mask.shape[:-1])
    return spec.encode(choice) if isinstance(spec, OneHot) else choice.to(spec.dtype)


class _SeveralChoices(_Choice):
    """Several, the i-th among ``nvec[i]``."""

    def __init__(
        self,
        nvec: Sequence[int] | np.ndarray,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        self.nvec = np.asarray(nvec, dtype=np.int64)
        super().__init__(self._size_of_one() if shape is None else shape, dtype, device)

    def _values(self) -> tuple[Any, ...]:
        return (self.nvec,)

    def _size_of_one(self) -> Sequence[int]:
        raise NotImplementedError


class MultiCategorical(_SeveralChoices):
    """Several integers, the i-th in ``[0, nvec[i])``."""

    def _size_of_one(self) -> Sequence[int]:
        return self.nvec.shape

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        nvec = torch.as_tensor(self.nvec)
        unit = torch.rand((*shape, *self.shape), dtype=torch.float64)
        return (unit * nvec).floor().to(self.dtype).to(self.device)

    def _values_ok(self, value: torch.Tensor) -> bool:
        return bool(((value >= 0) & (value < torch.as_tensor(self.nvec, device=value.device))).all())

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        choices = _as_asked(self, val, safe).long().unbind(-1)
        parts = [torch.nn.functional.one_hot(c, int(n)) for c, n in zip(choices, self.nvec.reshape(-1), strict=True)]
        return torch.cat(parts, -1).bool()

    def to_one_hot_spec(self) -> MultiOneHot:
        return MultiOneHot(self.nvec, (*self.shape[:-1], int(self.nvec.sum())), torch.bool, self.device)


class MultiOneHot(_SeveralChoices):
    """Several choices, each one-hot, one after the other in the last dimension."""

    def _size_of_one(self) -> Sequence[int]:
        return (int(self.nvec.sum()),)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        lead = (*shape, *self.shape[:-1])
        parts = [OneHot(int(n), (*lead, int(n)), self.dtype, self.device).rand() for n in self.nvec]
        return torch.cat(parts, -1)

    def _values_ok(self, value: torch.Tensor) -> bool:
        return all(OneHot(part.shape[-1])._values_ok(part) for part in value.split(self.nvec.tolist(), -1))

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        parts = _as_asked(self, val, safe).split(self.nvec.tolist(), -1)
        return torch.stack([part.long().argmax(-1) for part in parts], -1)

    def to_categorical_spec(self) -> MultiCategorical:
        return MultiCategorical(self.nvec, (*self.shape[:-1], len(self.nvec)), torch.int64, self.device)


def _as_asked(spec: Spec, value: torch.Tensor, safe: bool | None) -> torch.Tensor:
    """The value, if it is one of the spec's or nobody asks."""
    if safe and not spec.is_in(value):
        raise ValueError(f"{value} is not in {spec}")
    return value


class Composite:
    """A tree of specs. Keys are strings or tuples of strings; ``None`` leaves are dropped."""

    def __init__(
        self,
        specs: Mapping[Any, Any] | None = None,
        *,
        shape: int | Sequence[int] = (),
        device: torch.device | str | None = None,
        **more: Any,
    ) -> None:
        self.shape = _size(shape)
        self.device = None if device is None else torch.device(device)
        self._specs: dict[str, Any] = {}
        for key, spec in {**(specs or {}), **more}.items():
            if spec is not None:
                self[key] = spec

    def __setitem__(self, key: NestedKey, spec: Any) -> None:
        first, *rest = as_key(key)
        if isinstance(spec, dict):
            spec = Composite(spec, shape=self.shape, device=self.device)
        if not rest:
            self._specs[first] = spec
            return
        inner = self._specs.setdefault(first, Composite(shape=self.shape, device=self.device))
        inner[tuple(rest)] = spec

    def __getitem__(self, key: NestedKey) -> Any:
        first, *rest = as_key(key)
        if not rest:
            return self._specs[first]
        return self._specs[first][tuple(rest)]

    def get(self, key: NestedKey, default: Any = None) -> Any:
        try:
            return self[key]
        except (KeyError, TypeError):
            return default

    def set(self, key: NestedKey, spec: Any) -> Composite:
        self[key] = spec
        return self

    def update(self, other: Composite) -> Composite:
        for key, spec in other.items():
            self[key] = spec
        return self

    def __delitem__(self, key: NestedKey) -> None:
        first, *rest = as_key(key)
        if not rest:
            del self._specs[first]
        else:
            del self._specs[first][tuple(rest)]

    def __contains__(self, key: NestedKey) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[NestedKey]:
        keys: list[NestedKey] = []
        for key, spec in self._specs.items():
            nested = isinstance(spec, Composite)
            if not (leaves_only and nested):
                keys.append(key)
            if nested and include_nested:
                keys += [(key, *(k if isinstance(k, tuple) else (k,))) for k in spec.keys(True, leaves_only)]
        return keys

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:
        return [self[key] for key in self.keys(include_nested, leaves_only)]

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> list[tuple[NestedKey, Any]]:
        return [(key, self[key]) for key in self.keys(include_nested, leaves_only)]

    def rand(self, shape: Sequence[int] = ()) -> TensorDict:
        return self._fill("rand", shape)

    def zero(self, shape: Sequence[int] = ()) -> TensorDict:
        return self._fill("zero", shape)

    zeros = zero

    def _fill(self, method: str, shape: Sequence[int]) -> TensorDict:
        leaves = {key: getattr(spec, method)(shape) for key, spec in self._specs.items()}
        return TensorDict(leaves, batch_size=(*shape, *self.shape), device=self.device)

    def is_in(self, value: TensorDict) -> bool:
        return all(key in value and spec.is_in(value.get(key)) for key, spec in self._specs.items())

    def _map(self, change: Any, shape: Sequence[int], device: torch.device | str | None) -> Composite:
        return Composite({k: change(s) for k, s in self._specs.items()}, shape=shape, device=device)

    def clone(self) -> Composite:
        return self._map(lambda s: s.clone(), self.shape, self.device)

    def to(self, device: torch.device | str | None) -> Composite:
        return self._map(lambda s: s.to(device), self.shape, device)

    def expand(self, *shape: int | Sequence[int]) -> Composite:
        sizes = _size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)  # type: ignore[arg-type]
        front = sizes[: len(sizes) - len(self.shape)]
        return self._map(lambda s: s.expand((*front, *s.shape)), sizes, self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and self.shape == other.shape and self._specs == other._specs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inner = ", ".join(f"{key}={spec!r}" for key, spec in self._specs.items())
        return f"Composite({inner}, shape={tuple(self.shape)})"
