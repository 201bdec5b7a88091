"""Transform: what is done to an env's data between its step and whoever reads it.

A transform says what it makes of the specs, and is then bound to rows: memory of one entry per env for each key, always
the same, so that a step only runs functions whose arguments were found once.

Each key is read where the transform before has left it and written elsewhere, so a stage without memory of its own may
be run over all envs again at any time: that is what a reset of some of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from swath.envs.specs import Composite, NestedKey, Spec, Unbounded
from swath.rollout.layout import CPU, Key, as_key, show

#: Of a spec's leaves, which are for whom.
KINDS = ("observation", "action", "state", "reward", "done")


@dataclass
class Specs:
    """The specs of an env, as the transforms before have left them; ``batch_size`` is in front of every shape."""

    batch_size: torch.Size
    observation: Composite
    action: Composite
    state: Composite
    reward: Composite
    done: Composite

    @classmethod
    def of(cls, full_specs: dict[str, Composite], batch_size: torch.Size) -> Specs:
        return cls(batch_size, **{kind: full_specs[kind].clone() for kind in KINDS})

    def kind_of(self, key: Key) -> str | None:
        """In which of them a key is that an env writes: ``"observation"`` or ``"reward"``."""
        for kind in ("observation", "reward", "state"):
            if key in map(as_key, getattr(self, kind).keys(True, True)):
                return kind
        return None

    def find(self, key: Key, who: Transform) -> Spec:
        kind = self.kind_of(key)
        if kind is None:
            known = [show(as_key(k)) for k in (*self.observation.keys(True, True), *self.reward.keys(True, True))]
            raise KeyError(f"{who}: the env gives no {show(key)}; it gives {', '.join(known)}")
        return getattr(self, kind)[key]

    def put(self, key: Key, spec: Spec, kind: str) -> None:
        getattr(self, kind)[key] = spec


class Slot:
    """One key's memory: ``tensor`` is ``[num_envs, *shape]``, ``array`` the same, ``row`` ``[*batch_size, *shape]``."""

    __slots__ = ("array", "row", "tensor")

    def __init__(self, tensor: torch.Tensor, batch_size: torch.Size) -> None:
        self.tensor = tensor
        self.array: np.ndarray = tensor.numpy()
        self.row = tensor.view((*batch_size, *tensor.shape[1:]))


@dataclass
class Rows:
    """Where each key's entry of the current step is, as the transforms before have left it."""

    batch_size: torch.Size
    slots: dict[Key, Slot]
    #: ``[num_envs]``, of the current step.
    terminated: np.ndarray
    truncated: np.ndarray
    num_envs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_envs = self.batch_size.numel()

    def __getitem__(self, key: NestedKey) -> Slot:
        return self.slots[as_key(key)]

    def new(self, key: NestedKey, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """Memory for what this transform makes of a key; those behind it read it here."""
        slot = Slot(torch.zeros((self.num_envs, *shape), dtype=dtype, device=CPU), self.batch_size)
        self.slots[as_key(key)] = slot
        return slot


class Stage(Protocol):
    """A transform bound to rows."""

    def step(self, env_ids: Sequence[int] | None) -> Sequence[int] | None:
        """These envs (None: all) have stepped. Returns those whose episode ends by it, besides those that have."""
        ...

    def reset(self, env_ids: Sequence[int]) -> None:
        """These envs have been reset."""
        ...


class Stateless:
    """A stage that has no memory: one function for a step and for a reset, which runs over all envs."""

    def __init__(self, *functions: Any) -> None:
        self._functions = functions
        if len(functions) == 1:
            self._only = functions[0]
            self.step = self._step_one  # type: ignore[method-assign]

    def _step_one(self, env_ids: Sequence[int] | None) -> None:
        self._only()

    def step(self, env_ids: Sequence[int] | None) -> None:
        for function in self._functions:
            function()

    def reset(self, env_ids: Sequence[int]) -> None:
        self.step(None)


class Transform:
    """Changes what an env gives (``in_keys`` to ``out_keys``) or is given (``in_keys_inv`` to ``out_keys_inv``).

    The short way to write one is ``_apply_transform``, from the value of all envs to another one; its shape and dtype
    are found by calling it once:

    >>> class Halve(Transform):
    ...     def _apply_transform(self, value):
    ...         return value / 2
    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Halve(in_keys=["observation"], out_keys=["half"]))
    >>> step = env.rollout(3)
    >>> bool((step["half"] == step["observation"] / 2).all())
    True
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | NestedKey | None = None,
        out_keys: Sequence[NestedKey] | NestedKey | None = None,
        in_keys_inv: Sequence[NestedKey] | NestedKey | None = None,
        out_keys_inv: Sequence[NestedKey] | NestedKey | None = None,
    ) -> None:
        self.in_keys = key_list(in_keys)
        self.out_keys = key_list(in_keys if out_keys is None else out_keys)
        self.in_keys_inv = key_list(in_keys_inv)
        self.out_keys_inv = key_list(in_keys_inv if out_keys_inv is None else out_keys_inv)
        for mine, theirs, names in (
            (self.in_keys, self.out_keys, "in_keys and out_keys"),
            (self.in_keys_inv, self.out_keys_inv, "in_keys_inv and out_keys_inv"),
        ):
            if len(mine) != len(theirs) and self._keys_are_pairs:
                raise ValueError(f"{type(self).__name__}: {names} differ in length: {mine} and {theirs}")

    #: Whether each of ``in_keys`` becomes one of ``out_keys``.
    _keys_are_pairs = True
    #: Whether what it does to an env's data depends on that env's data alone.
    is_by_env = True

    # -- to be written by a subclass -------------------------------------------------------------------------------

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        """Another value for that of one key, ``[*batch_size, *shape]``."""
        raise NotImplementedError(f"{type(self).__name__} does not define _apply_transform")

    def transform_specs(self, specs: Specs) -> None:
        """Change the specs as the data will be changed; of actions, as who acts will see them."""
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            spec = specs.find(as_key(in_key), self)
            made = self._apply_transform(spec.zero())
            kind = specs.kind_of(as_key(in_key)) or "observation"
            specs.put(as_key(out_key), Unbounded(made.shape, made.dtype, spec.device), kind)

    def bind(self, rows: Rows) -> Stage:
        """This transform on rows; by default what ``_apply_transform`` says, in each step."""
        return Stateless(*[self._bound(rows, i, o) for i, o in zip(self.in_keys, self.out_keys, strict=True)])

    def _bound(self, rows: Rows, in_key: NestedKey, out_key: NestedKey) -> Any:
        read = rows[in_key].row
        made = self._apply_transform(read.clone())
        write = rows.new(out_key, made.shape[len(rows.batch_size) :], made.dtype).row
        apply = self._apply_transform
        return lambda: write.copy_(apply(read))

    def bind_inverse(self, rows: Rows) -> Callable[[], Any] | None:
        """On the way to the env, as ``bind``: what is in ``rows`` are the actions. None where nothing is to be done."""
        return None

    # -- what is kept ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        pass

    def _check_batched_worker_compat(self) -> None:  # what TorchRL's SerialEnv and ParallelEnv ask first
        raise TypeError(
            "torchrl.envs.SerialEnv and ParallelEnv are for TorchRL's envs, and this TransformedEnv is of swath: write "
            "swath.envs.SerialEnv(num_workers, create_env_fn) or swath.envs.ParallelEnv(num_workers, create_env_fn)"
        )

    def __repr__(self) -> str:
        keys = f"in_keys={self.in_keys}, out_keys={self.out_keys}" if self.in_keys or self.out_keys else ""
        return f"{type(self).__name__}({keys})"


def key_list(keys: Sequence[NestedKey] | NestedKey | None) -> list[NestedKey]:
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    return list(keys)


class Compose(Transform):
    """Transforms one after the other; a list of them, by index.

    >>> from swath.envs import RewardSum, StepCounter
    >>> Compose(StepCounter(), RewardSum())[0]
    StepCounter(max_steps=None)
    """

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self.transforms: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Any) -> None:
        self.insert(len(self.transforms), transform)

    def insert(self, index: int, transform: Any) -> None:
        transform = as_transform(transform)
        self.transforms[index:index] = transform.transforms if isinstance(transform, Compose) else [transform]

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __getitem__(self, index: int | slice) -> Any:
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


def as_transform(thing: Any) -> Transform:
    if isinstance(thing, Transform):
        return thing
    raise TypeError(
        f"a transform is a swath.envs.Transform, not {type(thing).__module__}.{type(thing).__name__}; TorchRL's go "
        "with TorchRL's own TransformedEnv, which collectors take as it is"
    )
