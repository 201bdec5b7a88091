"""Strip: the memory that a rollout writes step by step.

Time-major, so that all envs of a step lie side by side: envs write row ``t + 1`` of a carried key and row ``t``
of the others, the policy reads row ``t``. Carried keys have one row more than there are steps: what is "next" at
step t is "root" at step t + 1, so it is written once. (The one exception, an episode's end, is kept by
``boundaries``.) Rows are handed out as views that are made once; the step makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from swath.keys import Key
from swath.rollout.layout import CPU, Field, Layout

#: A strip is at most this long; a longer batch is delivered strip by strip, which keeps the working memory in cache.
MAX_STEPS = 512
MAX_BYTES = 32 * 2**20


#: Zeroed memory: ``allocate(size, dtype=…, device=…)``. Elsewhere than in private memory, see ``workers/stage.py``.
Allocate = Callable[..., torch.Tensor]


class Column:
    """One key's memory: ``tensor`` is ``[rows, num_envs, *shape]``, ``rows[t]`` is ``[*batch_size, *shape]``."""

    __slots__ = ("array", "field", "rows", "tensor")

    def __init__(self, field: Field, num_rows: int, batch_size: torch.Size, allocate: Allocate = torch.zeros) -> None:
        size = (num_rows, batch_size.numel(), *field.shape)
        self.field = field
        self.tensor = allocate(size, dtype=field.dtype, device=field.device)
        self.rows: Sequence[torch.Tensor] = self.tensor.view(num_rows, *batch_size, *field.shape).unbind(0)
        #: The same memory as NumPy sees it; None where NumPy cannot (another device, bfloat16).
        self.array: np.ndarray | None = None
        if field.device.type == "cpu" and field.dtype is not torch.bfloat16:
            self.array = self.tensor.numpy()

    def part(self, envs: range) -> Column:
        """Only some envs of it: another view of the same memory, to be read and written as a whole."""
        part = object.__new__(Column)
        part.field = self.field
        part.tensor = self.tensor[:, envs.start : envs.stop]
        part.rows = part.tensor.unbind(0)
        part.array = None if self.array is None else self.array[:, envs.start : envs.stop]
        return part

    @property
    def flat(self) -> memoryview:
        """The whole column as a one-dimensional buffer.

        Assigning to a slice of it is faster than NumPy's assignment and refuses another dtype or length.
        """
        return memoryview(self.in_numpy.reshape(-1))  # type: ignore[arg-type]

    @property
    def in_numpy(self) -> np.ndarray:
        """``array``, where there must be one."""
        if self.array is None:
            raise TypeError(f"{self.field.key} on {self.field.device} as {self.field.dtype} cannot be seen by NumPy")
        return self.array

    def take(self, row: int, env_ids: list[int]) -> np.ndarray | torch.Tensor:
        """A copy of some envs' entries of a row."""
        if self.array is None:
            return self.tensor[row, env_ids]
        if len(env_ids) == 1:  # several times faster than an index list
            return self.array[row, env_ids[0] : env_ids[0] + 1].copy()
        return self.array[row, env_ids]


class Strip:
    """Columns for ``num_steps`` steps of all envs of a layout."""

    def __init__(self, layout: Layout, num_steps: int, allocate: Allocate = torch.zeros) -> None:
        self.layout = layout
        self.num_steps = num_steps
        self.num_envs = layout.num_envs

        def columns(fields: Sequence[Field], num_rows: int) -> dict[Key, Column]:
            return {f.key: Column(f, num_rows, layout.batch_size, allocate) for f in fields}

        self.carried = columns(layout.carried, num_steps + 1)
        self.outputs = columns(layout.outputs, num_steps)
        self.outcomes = columns(layout.outcomes, num_steps)
        flags = (num_steps, self.num_envs)
        self.terminated: np.ndarray = allocate(flags, dtype=torch.bool, device=CPU).numpy()
        self.truncated: np.ndarray = allocate(flags, dtype=torch.bool, device=CPU).numpy()

    def part(self, envs: range, layout: Layout) -> Strip:
        """Only some envs, on the same memory; keys of ``layout`` that are not here get memory of their own."""
        part = Strip(layout, self.num_steps)
        for own, whole in (
            (part.carried, self.carried),
            (part.outputs, self.outputs),
            (part.outcomes, self.outcomes),
        ):
            own.update({key: column.part(envs) for key, column in whole.items()})
        part.terminated = self.terminated[:, envs.start : envs.stop]
        part.truncated = self.truncated[:, envs.start : envs.stop]
        return part

    @staticmethod
    def fitting(layout: Layout, num_steps: int) -> Strip:
        """A strip for up to ``num_steps``, shorter where that would take too much memory."""
        affordable = max(1, MAX_BYTES // max(1, layout.bytes_per_step))
        return Strip(layout, min(num_steps, MAX_STEPS, affordable))

    def rewind(self, num_steps: int) -> None:
        """After ``num_steps`` steps were delivered: what came last becomes what comes first."""
        for column in self.carried.values():
            column.tensor[0].copy_(column.tensor[num_steps])
        self.terminated[:num_steps] = False
        self.truncated[:num_steps] = False
