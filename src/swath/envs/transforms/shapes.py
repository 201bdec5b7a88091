"""The same values in another shape: dimensions added, taken away, put together, exchanged; several keys in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.transforms.base import Apply, Keys, Transform, key_list
from swath.envs.transforms.rows import NOTHING, Rows, Slot, Stage, Stateless
from swath.envs.transforms.specs import Specs, bounds_of
from swath.keys import as_key, show
from swath.specs import Bounded, NestedKey, Spec, Unbounded


class _Reshape(Transform):
    """Another shape for each env's entry; dimensions are counted in that entry, without those of the batch."""

    def _reshaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that becomes of an entry's."""
        raise NotImplementedError

    def _made_spec(self, spec: Spec) -> Spec:
        shape = (*spec.shape[: self._lead], *self._reshaped(tuple(spec.shape[self._lead :])))
        if isinstance(spec, Bounded):
            low, high = (bound.reshape(shape).numpy() for bound in bounds_of(spec))
            return Bounded(low, high, shape, spec.dtype, spec.device)
        made = spec.clone()
        made.shape = torch.Size(shape)
        return made

    _made_action_spec = _made_spec

    def transform_specs(self, specs: Specs) -> None:
        self._lead = len(specs.batch_size)
        self._action_shapes = {}
        for key in map(as_key, self.in_keys_inv):
            self._action_shapes[key] = tuple(specs.find_action(key, self).shape[self._lead :])
        super().transform_specs(specs)

    def bind(self, rows: Rows) -> Stage:
        for in_key, out_key in self._pairs:
            tensor = rows[in_key].tensor
            rows.put(out_key, tensor.view(len(tensor), *self._reshaped(tuple(tensor.shape[1:]))))
        return NOTHING

    def bind_inverse(self, rows: Rows) -> None:
        for in_key, out_key in self._inverse_pairs:
            tensor = rows[out_key].tensor
            rows.put(in_key, tensor.view(len(tensor), *self._action_shapes[as_key(in_key)]))

    def _dim(self, dim: int, num_dims: int) -> int:
        """A dimension counted from the front."""
        found = dim if dim >= 0 else dim + num_dims
        if not 0 <= found < num_dims:
            raise ValueError(f"{self}: there is no dimension {dim} among {num_dims}, those of the batch not counted")
        return found


def _require_negative(who: str, dims: Sequence[int], allow_positive_dim: bool) -> None:
    for dim in dims:
        if not isinstance(dim, int):
            raise TypeError(f"{who}: a dimension is an integer, got {dim!r}")
        if dim >= 0 and not allow_positive_dim:
            raise ValueError(
                f"{who}: dimension {dim}: count from the end (-1 is the last one); with allow_positive_dim=True they "
                "are counted behind the batch's"
            )


class UnsqueezeTransform(_Reshape):
    """Adds a dimension of size one; of actions (``in_keys_inv``), the env is given them without it.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), UnsqueezeTransform(-2, in_keys=["observation"]))
    >>> env.rollout(3)["observation"].shape
    torch.Size([3, 1, 4])
    """

    _needs_keys = True
    _shown = ("dim",)

    def __init__(
        self,
        dim: int,
        *,
        allow_positive_dim: bool = False,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        _require_negative(type(self).__name__, [dim], allow_positive_dim)
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dim = dim

    def _reshaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = self._dim(self.dim, len(shape) + 1)
        return (*shape[:dim], 1, *shape[dim:])


class SqueezeTransform(UnsqueezeTransform):
    """Takes a dimension of size one away; of actions (``in_keys_inv``), the env is given them with it.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), SqueezeTransform(-1, in_keys=["reward"]))
    >>> env.rollout(3)["next", "reward"].shape
    torch.Size([3])
    """

    def _reshaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = self._dim(self.dim, len(shape))
        return (*shape[:dim], *shape[dim + 1 :]) if shape[dim] == 1 else shape


class FlattenObservation(_Reshape):
    """Makes one dimension of those from ``first_dim`` to ``last_dim``.

    >>> from swath.envs import Compose, GymEnv, TransformedEnv
    >>> twice = Compose(UnsqueezeTransform(-1, in_keys=["observation"]), FlattenObservation(-2, -1, ["observation"]))
    >>> TransformedEnv(GymEnv("CartPole-v1"), twice).rollout(3)["observation"].shape
    torch.Size([3, 4])
    """

    _shown = ("first_dim", "last_dim")

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
    ) -> None:
        _require_negative("FlattenObservation", [first_dim, last_dim], allow_positive_dim)
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        self.first_dim = first_dim
        self.last_dim = last_dim

    def _reshaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        first, last = (self._dim(dim, len(shape)) for dim in (self.first_dim, self.last_dim))
        if first > last:
            raise ValueError(f"{self}: first_dim comes behind last_dim")
        return (*shape[:first], int(np.prod(shape[first : last + 1])), *shape[last + 1 :])


class PermuteTransform(Transform):
    """Exchanges the last dimensions: ``dims`` are those from ``-len(dims)`` to -1, in their new order.

    >>> from swath.envs import Compose, GymEnv, TransformedEnv
    >>> turned = Compose(UnsqueezeTransform(-2, in_keys=["observation"]), PermuteTransform((-1, -2), ["observation"]))
    >>> TransformedEnv(GymEnv("CartPole-v1"), turned).rollout(3)["observation"].shape
    torch.Size([3, 4, 1])
    """

    _needs_keys = True
    _shown = ("dims",)

    def __init__(
        self,
        dims: Sequence[int],
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        if sorted(dims) != list(range(-len(dims), 0)):
            raise ValueError(f"PermuteTransform: dims={dims} are not those from {-len(dims)} to -1 in another order")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dims = tuple(dims)

    def _permuted(self, value: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        return value.permute(*range(value.ndim - len(dims)), *dims)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._permuted(value, self.dims)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._permuted(value, [self.dims.index(dim) - len(self.dims) for dim in range(-len(self.dims), 0)])

    def transform_specs(self, specs: Specs) -> None:
        lead = len(specs.batch_size)
        found = [specs.find(as_key(key), self) for key in self.in_keys]
        found += [specs.find_action(as_key(key), self) for key in self.in_keys_inv]
        for spec in found:
            if len(spec.shape) - lead < len(self.dims):
                raise ValueError(f"{self}: an entry of shape {tuple(spec.shape[lead:])} has fewer dimensions")
        super().transform_specs(specs)

    def _made_spec(self, spec: Spec) -> Spec:
        shape = self._apply_transform(spec.zero()).shape
        if isinstance(spec, Bounded):
            low, high = (self._apply_transform(bound).numpy() for bound in bounds_of(spec))
            return Bounded(low, high, shape, spec.dtype, spec.device)
        return Unbounded(shape, spec.dtype, spec.device)

    _made_action_spec = _made_spec

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        # A copy, not a view: those behind it may count on entries that lie side by side.
        source, target = apply(read.row).numpy(), write.row.numpy()
        return lambda: np.copyto(target, source)


class CatTensors(Transform):
    """Several observations as one, side by side along ``dim``; without ``in_keys``, all that are vectors.

    With ``del_keys`` they are not delivered any more; ``sort`` puts them in the order of their names.

    >>> from swath.envs import GymEnv, StepCounter, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), CatTensors(["observation", "observation"], "twice", del_keys=False))
    >>> env.rollout(3)["twice"].shape
    torch.Size([3, 8])
    """

    _keys_are_pairs = False
    _shown = ("dim", "del_keys", "unsqueeze_if_oor")

    def __init__(
        self,
        in_keys: Keys = None,
        out_key: NestedKey = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ) -> None:
        if not isinstance(out_key, (str, tuple)):
            raise TypeError(f"CatTensors: out_key must be a key, got {out_key!r}")
        if in_keys is None and dim != -1:
            raise ValueError(f"CatTensors: dim={dim} needs in_keys; without them, vectors are put together")
        if in_keys is not None and not key_list(in_keys):
            raise ValueError("CatTensors: in_keys are none at all")
        super().__init__(in_keys, [out_key])
        self._finds_keys = in_keys is None
        if sort:
            self.in_keys.sort(key=_name)
        self.dim = dim
        self.del_keys = del_keys
        self.unsqueeze_if_oor = unsqueeze_if_oor

    def _dropped(self) -> list[NestedKey]:
        if not self.del_keys:
            return []
        own = {as_key(key): key for key in self.in_keys}
        return [key for flat, key in own.items() if flat != as_key(self.out_keys[0])]

    def touched_keys(self) -> list:
        return [as_key(key) for key in (*self.out_keys, *self._dropped())]

    def transform_specs(self, specs: Specs) -> None:
        lead = len(specs.batch_size)
        if self._finds_keys:
            vectors = [key for key, spec in specs.observation.items(True, True) if len(spec.shape) - lead == 1]
            self.in_keys = sorted(vectors, key=_name)
            if not vectors:
                raise ValueError("CatTensors: the env gives no vector; give in_keys")
        found = []
        for key in map(as_key, self.in_keys):
            spec = specs.find(key, self)
            if specs.kind_of(key) == "reward":
                raise ValueError(f"CatTensors: {show(key)} is a reward, which an episode does not start with")
            found.append(spec.zero())
        self._dim = self._own_dim([len(value.shape) - lead for value in found], lead)
        made = torch.cat([self._unsqueezed(value, lead) for value in found], lead + self._dim)
        for key in self._dropped():
            specs.drop(as_key(key), self)
        specs.put(as_key(self.out_keys[0]), Unbounded(made.shape, made.dtype, made.device), "observation")

    def _own_dim(self, num_dims: list[int], lead: int) -> int:
        """``dim`` counted from the front of an entry, without the batch's."""
        most = max(num_dims)
        if self.unsqueeze_if_oor:
            most = max(most, -self.dim if self.dim < 0 else self.dim - lead + 1)
        dim = self.dim + most if self.dim < 0 else self.dim - lead
        if not 0 <= dim < most:
            raise ValueError(f"{self}: there is no dimension {self.dim} in entries of {most} dimensions")
        self._num_dims = most
        return dim

    def _unsqueezed(self, value: torch.Tensor, lead: int) -> torch.Tensor:
        if self.unsqueeze_if_oor:
            while value.ndim - lead < self._num_dims:
                value = value.unsqueeze(lead if self.dim < 0 else -1)
        return value

    def bind(self, rows: Rows) -> Stage:
        read = [self._unsqueezed(rows[key].tensor, 1) for key in self.in_keys]
        made = torch.cat(read, 1 + self._dim)
        for key in self._dropped():
            rows.drop(key)
        write = rows.new(self.out_keys[0], made.shape[1:], made.dtype).array
        arrays, axis = [value.numpy() for value in read], 1 + self._dim
        return Stateless(lambda: np.concatenate(arrays, axis, write))


def _name(key: NestedKey) -> str:
    """What keys are sorted by; as in TorchRL, also those that are nested."""
    return key if isinstance(key, str) else "_-|-_".join(as_key(key))
