"""Rows: where each key's entry of the current step is; and what a transform becomes when it is bound to them.

Each key is read where the transform before has left it and written elsewhere, so a stage without memory of its own may
be run over all envs again at any time: that is what a reset of some of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from swath.keys import Key, as_key, show
from swath.rollout.layout import CPU
from swath.specs import NestedKey


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
    #: The env that is transformed.
    base: Any = None
    #: For a transform that ``drives``: the env as it sees it.
    driver: Driver | None = None
    #: Whether an episode ended in the last step, and no env was reset since.
    ended: bool = False
    #: Whether the step under way was taken again, by a transform that drives.
    is_repeated: bool = False
    num_envs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_envs = self.batch_size.numel()

    def __getitem__(self, key: NestedKey) -> Slot:
        try:
            return self.slots[as_key(key)]
        except KeyError:
            known = ", ".join(map(show, self.slots))
            raise KeyError(f"a transform asks for {show(as_key(key))}, which nobody gives; there is {known}") from None

    def new(self, key: NestedKey, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """Memory for what this transform makes of a key; those behind it read it here."""
        slot = Slot(torch.zeros((self.num_envs, *shape), dtype=dtype, device=CPU), self.batch_size)
        self.slots[as_key(key)] = slot
        return slot

    def put(self, key: NestedKey, tensor: torch.Tensor) -> None:
        """What is already there in another form: a view of it, ``[num_envs, *shape]``."""
        self.slots[as_key(key)] = Slot(tensor, self.batch_size)

    def drop(self, key: NestedKey) -> Slot:
        return self.slots.pop(as_key(key))


class Driver(Protocol):
    """The env with the transforms before one, for that one to step by itself."""

    #: Whether there are no transforms before.
    is_first: bool
    reward_key: Key

    def act(self, actions: Any) -> None:
        """The actions of the next ``step``: a TensorDict."""
        ...

    def step(self, env_ids: list[int]) -> bool:
        """Step, besides the steps of whoever collects; whether an episode ended."""
        ...

    def reset(self, env_ids: list[int]) -> None: ...

    def again(self, env_ids: Sequence[int] | None) -> None:
        """Repeat the step that is under way: what ends is what ends by this one."""
        ...


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

    def run(self) -> None:
        for function in self._functions:
            function()

    def step(self, env_ids: Sequence[int] | None) -> None:
        self.run()

    def reset(self, env_ids: Sequence[int]) -> None:
        self.step(None)


#: The stage of a transform that is done with when it is bound.
NOTHING = Stateless()
