"""Transforms that look back: the last frames side by side, or their maximum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.transforms.arguments import require_one_episode, require_positive
from swath.envs.transforms.base import Transform
from swath.envs.transforms.rows import Rows, Slot, Stage
from swath.envs.transforms.specs import Specs
from swath.keys import as_key, show
from swath.specs import NestedKey, Unbounded


class History(Transform):
    """Remembers what it saw of an episode. The memory may be that of objects of TorchRL's, its *owners*.

    One owner has that of all envs, several have that of one env each.
    """

    def __init__(self, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey] | None, reset_key: Any) -> None:
        super().__init__(in_keys, out_keys)
        if not self.in_keys:
            raise ValueError(f"{type(self).__name__}: in_keys names nothing")
        require_one_episode(type(self).__name__, "reset_key", reset_key, None, "_reset")
        self.owners: list[Any] = []

    def _history_spec(self, specs: Specs, in_key: NestedKey) -> tuple[Any, int]:
        """A key's spec, and how many of its dimensions are not the batch's."""
        key = as_key(in_key)
        spec = specs.find(key, self)
        if specs.kind_of(key) == "reward":
            raise ValueError(f"{type(self).__name__}: {show(key)} is a reward, which a reset does not give")
        return spec, len(spec.shape) - len(specs.batch_size)

    def bind(self, rows: Rows) -> Stage:
        return _EachKey([self._bind_key(rows, in_key, out_key) for in_key, out_key in self._pairs])

    def _bind_key(self, rows: Rows, in_key: NestedKey, out_key: NestedKey) -> Any:
        raise NotImplementedError


def lend(owners: Sequence[Any], name: str, memory: torch.Tensor, env_dim: int, row: torch.Tensor) -> list[Any]:
    """Make ``memory`` the buffer of these objects of TorchRL's, with what is in theirs: (object, name, its part)."""
    parts = [row] if len(owners) == 1 else memory.unbind(env_dim)
    lent = list(zip(owners, [name] * len(owners), parts, strict=bool(owners))) if owners else []
    for each in lent:
        take_over(*each)
    return lent


def take_over(owner: Any, name: str, part: torch.Tensor) -> None:
    """Also after somebody put another buffer in its place."""
    found = getattr(owner, name)
    if found is part:
        return
    if not torch.nn.parameter.is_lazy(found) and found.shape == part.shape:
        part.copy_(found)
    setattr(owner, name, part)


class CatFrames(History):
    """The last ``N`` observations, one behind the other along ``dim``, which is negative: counted from the last.

    An episode begins with ``N`` times its first observation, or with ``padding_value`` (``padding="constant"``).

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), CatFrames(N=3, dim=-1, in_keys=["observation"]))
    >>> step = env.rollout(4)["observation"]
    >>> step.shape, bool((step[3, :8] == step[2, 4:]).all())
    (torch.Size([4, 12]), True)
    """

    _shown = ("N", "dim", "padding", "padding_value")

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        reset_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        future: bool = False,
        mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__(["pixels"] if in_keys is None else in_keys, out_keys, reset_key)
        require_positive("CatFrames", "N", N)
        if dim >= 0:
            raise ValueError(f"CatFrames: dim must be negative, counted from the last dimension, got {dim}")
        if padding not in ("same", "constant"):
            raise ValueError(f"CatFrames: padding must be 'same' or 'constant', got {padding!r}")
        for name, given in (("as_inverse", as_inverse), ("future", future), ("mask_key", mask_key)):
            if given:
                raise ValueError(f"CatFrames: {name} is for data that was stored, which an env's is not")
        require_one_episode("CatFrames", "done_key", done_key, None, "done")
        self.N = N
        self.dim = dim
        self.padding = padding
        self.padding_value = padding_value

    def transform_specs(self, specs: Specs) -> None:
        for in_key, out_key in self._pairs:
            spec, own_dims = self._history_spec(specs, in_key)
            if -self.dim > own_dims:
                raise ValueError(f"CatFrames: {show(as_key(in_key))} has {own_dims} dimensions, dim is {self.dim}")
            shape = list(spec.shape)
            shape[self.dim] *= self.N
            specs.put(as_key(out_key), Unbounded(shape, spec.dtype, spec.device), "observation")

    def _bind_key(self, rows: Rows, in_key: NestedKey, out_key: NestedKey) -> _Frames:
        read = rows[in_key]
        shape = list(read.tensor.shape[1:])
        shape[self.dim] *= self.N
        write = rows.new(out_key, shape, read.tensor.dtype)
        write.tensor.fill_(self.padding_value)
        lent = lend(self.owners, f"_cat_buffers_{in_key}", write.tensor, 0, write.row)
        return _Frames(read, write, self.N, self.dim, None if self.padding == "same" else self.padding_value, lent)


class _EachKey:
    def __init__(self, keys: Sequence[Any]) -> None:
        self._keys = keys
        #: Rows that are an owner's memory, too, which may have been written since.
        self.shared_rows = [row for key in keys for row in key.shared_rows]

    def step(self, env_ids: Sequence[int] | None) -> None:
        for key in self._keys:
            key.step(env_ids)

    def reset(self, env_ids: Sequence[int]) -> None:
        for key in self._keys:
            key.reset(env_ids)


class _Frames:
    """``CatFrames`` of one key. What is written is the memory: the row after is this one, moved by a frame."""

    def __init__(self, read: Slot, write: Slot, num: int, dim: int, padding: float | None, lent: list[Any]) -> None:
        axis = read.array.ndim + dim
        self._size = size = read.array.shape[axis]
        self._num = num
        self._padding = padding
        self._lent = lent
        self.shared_rows = [write.array] if lent else []
        #: With the frames' dimension behind the envs'.
        self._frame = np.moveaxis(read.array, axis, 1)
        self._stack = stack = np.moveaxis(write.array, axis, 1)
        self._last = stack[:, -size:]
        if axis == 1:
            # Each env's stack is one piece of memory: NumPy moves it in place.
            flat = write.array.reshape(len(stack), -1)
            step = flat.shape[1] // num
            self._moves = [(row[:-step], row[step:]) for row in flat] if num > 1 else []
            self._scratch = None
        else:
            self._moves = []
            self._scratch = np.empty(stack[:, size:].shape, stack.dtype)

    def step(self, env_ids: Sequence[int] | None) -> None:
        if env_ids is not None:
            self._step_some(list(env_ids))
            return
        if self._scratch is None:
            for older, newer in self._moves:
                older[:] = newer
        else:
            self._scratch[:] = self._stack[:, self._size :]
            self._stack[:, : -self._size] = self._scratch
        self._last[:] = self._frame

    def _step_some(self, env_ids: list[int]) -> None:
        for env in env_ids:
            self._stack[env, : -self._size] = self._stack[env, self._size :].copy()
        self._last[env_ids] = self._frame[env_ids]

    def reset(self, env_ids: Sequence[int]) -> None:
        for lent in self._lent:
            take_over(*lent)
        env_ids = list(env_ids)
        if self._padding is None:
            frame = self._frame[env_ids]
            for number in range(self._num):
                self._stack[env_ids, number * self._size : (number + 1) * self._size] = frame
        else:
            self._stack[env_ids] = self._padding
            self._last[env_ids] = self._frame[env_ids]


class TimeMaxPool(History):
    """The maximum, entry by entry, over the last ``T`` observations; before an episode's first they count as zeros.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), TimeMaxPool(in_keys=["observation"], out_keys=["most"], T=2))
    >>> step = env.rollout(4)
    >>> bool((step["most"][1] == step["observation"][:2].amax(0)).all())
    True
    """

    _shown = ("buffer_size",)

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        T: int = 1,
        reset_key: NestedKey | None = None,
    ) -> None:
        super().__init__(["observation"] if in_keys is None else in_keys, out_keys, reset_key)
        require_positive("TimeMaxPool", "T", T)
        self.buffer_size = T

    def transform_specs(self, specs: Specs) -> None:
        for in_key, out_key in self._pairs:
            spec, _ = self._history_spec(specs, in_key)
            specs.put(as_key(out_key), Unbounded(spec.shape, spec.dtype, spec.device), "observation")

    def _bind_key(self, rows: Rows, in_key: NestedKey, out_key: NestedKey) -> _Maximum:
        read = rows[in_key]
        write = rows.new(out_key, read.tensor.shape[1:], read.tensor.dtype)
        memory = torch.zeros((self.buffer_size, *read.tensor.shape), dtype=read.tensor.dtype)
        name = f"_maxpool_buffer_{'_'.join(as_key(in_key))}"
        whole = memory.view(self.buffer_size, *read.row.shape)
        return _Maximum(read, write, memory, lend(self.owners, name, memory, 1, whole))


class _Maximum:
    """``TimeMaxPool`` of one key: ``[T, num_envs, *shape]``, the newest first."""

    shared_rows: Sequence[np.ndarray] = ()

    def __init__(self, read: Slot, write: Slot, memory: torch.Tensor, lent: list[Any]) -> None:
        self._read, self._write = read, write
        self._memory = memory
        self._array = memory.numpy()
        flat, size = self._array.reshape(-1), read.array.size
        self._older, self._newer = flat[size:], flat[: flat.size - size]
        self._out = (write.tensor, torch.empty(write.tensor.shape, dtype=torch.int64))
        self._lent = lent

    def step(self, env_ids: Sequence[int] | None) -> None:
        if env_ids is None:
            self._older[:] = self._newer  # in one dimension NumPy minds that they overlap
            self._array[0] = self._read.array
            torch.max(self._memory, 0, out=self._out)
            return
        env_ids = list(env_ids)
        self._array[1:, env_ids] = self._array[:-1, env_ids]
        self._take(env_ids)

    def reset(self, env_ids: Sequence[int]) -> None:
        for lent in self._lent:
            take_over(*lent)
        env_ids = list(env_ids)
        self._array[:, env_ids] = 0
        self._take(env_ids)

    def _take(self, env_ids: list[int]) -> None:
        self._array[0, env_ids] = self._read.array[env_ids]
        self._write.tensor[env_ids] = self._memory[:, env_ids].max(dim=0).values
