"""ActionDiscretizer: a choice among some values for an action that is continuous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from swath.envs.transforms.base import Apply, Transform
from swath.envs.transforms.rows import Rows, Slot
from swath.envs.transforms.specs import bounds_of
from swath.errors import EnvDataError
from swath.keys import as_key, show
from swath.specs import Bounded, Categorical, MultiCategorical, MultiOneHot, NestedKey, OneHot, Spec


class ActionDiscretizer(Transform):
    """Integers (or, with ``categorical=False``, one-hot vectors) for an env whose action is continuous and bounded.

    Each element's interval is cut into ``num_intervals`` parts (a tensor: one number for each element); the env gets
    the middle of the part that was chosen, its lower or upper end, or a random point in it (``sampling``).

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("Pendulum-v1"), ActionDiscretizer(5))
    >>> env.action_spec
    MultiCategorical(shape=(1,), dtype=torch.int64, [5])
    """

    class SamplingStrategy(IntEnum):
        """Which point of a part the env gets."""

        MEDIAN = 0
        LOW = 1
        HIGH = 2
        RANDOM = 3

    _shown = ("num_intervals", "sampling", "categorical")

    def __init__(
        self,
        num_intervals: int | torch.Tensor,
        action_key: NestedKey = "action",
        out_action_key: NestedKey | None = None,
        sampling: SamplingStrategy | int | None = None,
        categorical: bool = True,
    ) -> None:
        if out_action_key is not None and as_key(out_action_key) != as_key(action_key):
            raise ValueError(
                f"ActionDiscretizer: out_action_key={out_action_key!r}: the action that the env gets is not part of "
                "the data, so there is one key; leave it out, or put a RenameTransform behind"
            )
        numbers = torch.as_tensor(num_intervals)
        if numbers.is_floating_point() or numbers.ndim > 1 or numbers.numel() == 0 or bool((numbers < 1).any()):
            raise ValueError(f"ActionDiscretizer: num_intervals must be one or more positive integers: {num_intervals}")
        super().__init__(in_keys_inv=[action_key])
        self.num_intervals = num_intervals
        self.action_key = action_key
        self.sampling = self.SamplingStrategy.MEDIAN if sampling is None else self.SamplingStrategy(sampling)
        self.categorical = categorical
        #: By element of the action: the values that it can have.
        self.intervals: Any = None
        #: Those of somebody else, which are used as they are.
        self.given_intervals: list[torch.Tensor] = []
        self._nvec: list[int] = []
        self._widths: torch.Tensor | None = None

    @property
    def is_by_env(self) -> bool:  # type: ignore[override]
        """Not where points are drawn."""
        return self.sampling is not self.SamplingStrategy.RANDOM

    def custom_arange(self, nint: int, device: torch.device | None = None) -> torch.Tensor:
        """Where in ``[0, 1]`` the values of ``nint`` parts are; for a subclass that wants others."""
        lows = torch.arange(nint, dtype=self._dtype, device=device) / nint
        highs = (1 - lows).flip(0)
        if self.sampling is self.SamplingStrategy.MEDIAN:
            return (lows + highs) / 2
        return highs if self.sampling is self.SamplingStrategy.HIGH else lows

    def _made_action_spec(self, spec: Spec) -> Spec:
        name = show(as_key(self.action_key))
        if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
            raise TypeError(f"ActionDiscretizer: the env's {name} is {spec}, not continuous with bounds")
        lead = len(self._batch_size)
        low, high = (bound[(0,) * lead] for bound in bounds_of(spec))
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            raise ValueError(
                f"ActionDiscretizer: the env's {name} is {spec}, without an end; put a ClipTransform before"
            )
        if low.ndim > 1:
            raise ValueError(f"ActionDiscretizer: the env's {name} has shape {tuple(low.shape)}; one dimension at most")
        self._dtype = spec.dtype
        num, numbers = max(1, low.numel()), torch.as_tensor(self.num_intervals).reshape(-1).tolist()
        if len(numbers) not in (1, num):
            raise ValueError(f"ActionDiscretizer: {len(numbers)} num_intervals for {num} elements of {name}")
        self._nvec = numbers * num if len(numbers) == 1 else numbers
        parts = zip(self._nvec, low.reshape(-1), (high - low).reshape(-1), strict=True)
        self.intervals = self.given_intervals or [start + self.custom_arange(n) * width for n, start, width in parts]
        self._widths = (high - low).reshape(-1) / torch.tensor(self._nvec)
        front = self._batch_size
        if low.ndim == 0:
            (n,) = self._nvec
            return Categorical(n, front) if self.categorical else OneHot(n, (*front, n), torch.bool)
        nvec = np.array(self._nvec)
        if self.categorical:
            return MultiCategorical(nvec, (*front, len(nvec)))
        return MultiOneHot(nvec, (*front, int(nvec.sum())), torch.bool)

    def transform_specs(self, specs: Any) -> None:
        self._batch_size = specs.batch_size
        self._is_single = specs.find_action(as_key(self.action_key), self).shape == specs.batch_size
        super().transform_specs(specs)

    def bind_inverse(self, rows: Rows) -> Callable[[], Any] | None:
        if self.intervals is None:
            raise RuntimeError("ActionDiscretizer is not part of an env")
        return super().bind_inverse(rows)

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        widths = self._widths if self.sampling is self.SamplingStrategy.RANDOM else None
        parts = None if self.categorical else np.split(read.array, np.cumsum(self._nvec)[:-1], -1)
        return _Choosing(self, read.array, parts, self.intervals, widths, write.array)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        if not self.categorical:
            choices = [part.argmax(-1) for part in value.to(torch.float64).split(self._nvec, -1)]
        else:
            choices = [value] if self._is_single else list(value.unbind(-1))
        chosen = [values[choice.long()] for values, choice in zip(self.intervals, choices, strict=True)]
        if self.sampling is self.SamplingStrategy.RANDOM:
            assert self._widths is not None
            chosen = [point + torch.rand_like(point) * width for point, width in zip(chosen, self._widths, strict=True)]
        return chosen[0] if self._is_single else torch.stack(chosen, -1)


class _Choosing:
    """The values of choices, without allocating; elements of the action first, then envs."""

    def __init__(
        self,
        who: ActionDiscretizer,
        given: np.ndarray,
        parts: Sequence[np.ndarray] | None,
        intervals: Sequence[torch.Tensor],
        widths: torch.Tensor | None,
        target: np.ndarray,
    ) -> None:
        self._who = who
        #: One-hot vectors, by element; or the numbers of the choices.
        self._parts = parts
        num = len(intervals)
        self._numbers = given.reshape(len(given), -1).T
        #: What can be chosen, which somebody may change, and the same in a row.
        self._sources = [values.numpy() for values in intervals]
        self._table = np.concatenate(self._sources)
        lengths = np.array([[len(values)] for values in intervals])
        self._lengths = lengths.astype(np.uint64)
        self._offsets = np.cumsum(lengths, 0) - lengths
        self._choice = np.zeros((num, len(given)), np.int64)
        self._unsigned = self._choice.view(np.uint64)  # in which what is negative is too large
        self._is_valid = np.empty(self._choice.shape, bool)
        self._values = np.empty(self._choice.shape, self._table.dtype)
        self._target = target.reshape(len(target), -1).T
        self._widths = None if widths is None else widths.numpy()[:, None]
        self._noise = torch.empty(self._values.shape, dtype=intervals[0].dtype)
        self._noise_array = self._noise.numpy()

    def __call__(self) -> None:
        choice = self._choice
        if self._parts is None:
            np.copyto(choice, self._numbers, casting="unsafe")
            if not np.less(self._unsigned, self._lengths, self._is_valid).all():
                sizes = self._lengths.ravel().tolist()
                raise EnvDataError(f"{self._who}: the choices {choice.T.tolist()} are not all among the {sizes} parts")
        else:
            for number, part in enumerate(self._parts):
                np.argmax(part, -1, choice[number])
        np.concatenate(self._sources, 0, self._table)
        np.add(choice, self._offsets, choice)
        np.take(self._table, choice, None, self._values, "clip")  # with another mode it makes an array first
        if self._widths is not None:
            for noise in self._noise:
                torch.rand(noise.shape, out=noise)
            np.multiply(self._noise_array, self._widths, self._noise_array)
            np.add(self._values, self._noise_array, self._values)
        self._target[...] = self._values
