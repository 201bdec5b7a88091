"""Policies written with NumPy: they give arrays or numbers, or ``(action, state)`` as ``model.predict`` does.

Whether a function wants tensors or arrays cannot be told by looking at it. So it is given tensors first, which most of
NumPy takes; one that raises is given arrays, and what it gives then tells that it is written with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn

from swath.errors import PolicyOutputError

STATE_REFUSED = (
    "the policy returned (action, state), and its state is a {}: what goes from call to call must be in the data. "
    "Write lambda observation: model.predict(observation)[0] if it can do without its state; else give the collector a "
    'TensorDictModule whose in_keys have the state, and whose out_keys have ("next", state)'
)


class NumpyPolicy:
    """A function of arrays or tensors that gives arrays or numbers, as a function from tensors to tensors."""

    def __init__(self, function: Callable[..., Any], takes_arrays: bool) -> None:
        self._function = function
        self._takes_arrays = takes_arrays

    def __call__(self, *inputs: torch.Tensor) -> Any:
        given = [value.numpy(force=True) for value in inputs] if self._takes_arrays else inputs
        return as_tensors(self._function(*given))

    def __repr__(self) -> str:
        return repr(self._function)


def call_first(function: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[Callable[..., Any], Any, bool]:
    """Call a policy for the first time: how to call it from now on, what it gave, and whether it is NumPy's."""
    try:
        result = function(*inputs)
    except Exception:
        if isinstance(function, nn.Module):
            raise
        arrays = NumpyPolicy(function, takes_arrays=True)
        try:
            raw = function(*(value.numpy(force=True) for value in inputs))
        except Exception:
            raw = None
        if raw is None or not is_numpy(raw):
            raise
        return arrays, as_tensors(raw), True
    if is_numpy(result):
        return NumpyPolicy(function, takes_arrays=False), as_tensors(result), True
    return function, result, False


def is_numpy(result: Any) -> bool:
    """Whether this is an array or a number, or a tuple that begins with one."""
    first = result[0] if isinstance(result, tuple) and result else result
    return isinstance(first, (np.ndarray, np.generic, Number))


def as_tensors(result: Any) -> Any:
    """Arrays and numbers as tensors, in new memory; of ``(action, None)``, a policy without a state, the action."""
    if isinstance(result, tuple):
        if len(result) == 2 and result[1] is None:
            return _tensor(result[0])
        return tuple(map(_tensor, result))
    return _tensor(result)


def _tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list, dict)):
        raise PolicyOutputError(STATE_REFUSED.format(type(value).__name__))
    try:
        return torch.from_numpy(np.array(value))
    except TypeError:
        raise PolicyOutputError(
            f"the policy returned {type(value).__name__} {value!r}, which is no array of numbers; return its action"
        ) from None
