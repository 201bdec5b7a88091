"""A served policy, captured for requests of one kind: these keys, this number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swath.keys import Key
from swath.rollout.capture.captured import Called, CapturedPolicy

#: The policy, on rows: what it writes.
CallOnRows = Callable[[dict[Key, torch.Tensor]], dict[Key, Any]]


class CapturedRows:
    """Calls the policy on rows that look like ``rows``, for which it gave ``outputs``.

    What it returns is memory that the next call writes to again.
    """

    def __init__(self, policy: Any, rows: dict[Key, torch.Tensor], outputs: dict[Key, Any], call: CallOnRows) -> None:
        self._call_on_rows = call
        self._keys, self._names = tuple(rows), tuple(outputs)
        self._inputs = [tensor.clone() for tensor in rows.values()]
        self._outputs = [value.clone() for value in outputs.values()]
        #: What it gave that looks different from what it gave at first; kept as it is.
        self._odd: dict[Key, Any] | None = None
        self._captured = CapturedPolicy(
            Called(
                roots={"policy": policy},
                inputs_at=lambda t: [tensor.clone() for tensor in self._inputs],
                call=self._call,
                write=self._write,
                input_rows=[[tensor] for tensor in self._inputs],
                output_rows=[[tensor] for tensor in self._outputs],
                remembered=(),
                act=lambda t: self._write(t, self._call([tensor.clone() for tensor in self._inputs])),
            )
        )
        self._act = self._captured.prepared()

    def look_again(self) -> None:
        """Something may have changed: see whether the program is still the policy's."""
        self._act = self._captured.prepared()

    def describe(self) -> str:
        return self._captured.describe()

    def __call__(self, rows: dict[Key, torch.Tensor]) -> dict[Key, Any]:
        for own, tensor in zip(self._inputs, rows.values(), strict=True):
            own.copy_(tensor)
        self._odd = None
        self._act(0)
        return dict(zip(self._names, self._outputs, strict=True)) if self._odd is None else self._odd

    def _call(self, inputs: list[torch.Tensor]) -> list[Any]:
        outputs = self._call_on_rows(dict(zip(self._keys, inputs, strict=True)))
        self._odd = outputs if not self._fits(outputs) else None
        return list(outputs.values())

    def _fits(self, outputs: dict[Key, Any]) -> bool:
        return tuple(outputs) == self._names and all(
            isinstance(value, torch.Tensor) and value.shape == own.shape and value.dtype is own.dtype
            for own, value in zip(self._outputs, outputs.values(), strict=True)
        )

    def _write(self, t: int, results: list[Any]) -> None:
        if self._odd is None:
            for own, value in zip(self._outputs, results, strict=True):
                own.copy_(value)
