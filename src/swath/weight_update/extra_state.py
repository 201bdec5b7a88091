"""Extra state: what a module's ``get_extra_state`` gives besides tensors, on its way with the weights.

It travels as bytes that ``torch.load(weights_only=True)`` reads: whoever receives it runs no code of the sender's.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: Where a state dict has it, and where weights that are sent have it.
PLAIN, ENCODED = "_extra_state", "_encoded_extra_state"


def has_extra_state(module: Any) -> bool:
    """Whether a module has more in its state than tensors: statistics of TorchRL's transforms, say.

    >>> has_extra_state(nn.Linear(1, 1))
    False
    """
    return isinstance(module, nn.Module) and any(True for _ in _with_state(module))


def _with_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}." if name else "", each


def is_extra(name: str) -> bool:
    """Whether a weight of this name is none, but a part of extra state.

    >>> is_extra("norm._extra_state.loc"), is_extra("norm.weight")
    (True, False)
    """
    return any(part in (PLAIN, ENCODED) for part in name.split("."))


def encoded_states(module: nn.Module) -> dict[str, torch.Tensor]:
    """The extra state of a module and those in it, as tensors of bytes, by name.

    Raises:
        TypeError: there is something in it that cannot be sent.
    """
    return {
        f"{name}{ENCODED}": encode_state(type(each).__name__, each.get_extra_state())
        for name, each in _with_state(module)
    }


def encode_state(whose: str, state: Any) -> torch.Tensor:
    """Extra state as a tensor of bytes.

    Raises:
        TypeError: there is something in it that cannot be sent.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        encoded = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        decode_state(encoded)
    except Exception as error:
        raise TypeError(
            f"the extra state of {whose} (get_extra_state) cannot travel with its weights: {error}. "
            "Tensors, numbers, strings, and lists and dicts of them can"
        ) from error
    return encoded


def decode_state(encoded: torch.Tensor) -> Any:
    """What was encoded.

    >>> decode_state(encode_state("mine", {"count": 3}))
    {'count': 3}
    """
    return torch.load(io.BytesIO(encoded.cpu().numpy().tobytes()), weights_only=True)


def set_extra_states(module: Any, weights: Mapping[str, Any]) -> None:
    """Give a module, and those in it, what there is of extra state among these weights, which are flat.

    Raises:
        KeyError: it has no extra state there.
    """
    states: dict[str, Any] = {}
    for name, value in weights.items():
        if not is_extra(name):
            continue
        which = ENCODED if ENCODED in name.split(".") else PLAIN
        owner, _, behind = name.partition(which)
        if which == ENCODED:
            states[owner] = decode_state(value)
        elif behind:  # a dict, whose own names may have dots
            states.setdefault(owner, {})[behind.removeprefix(".")] = _own(value)
        else:
            states[owner] = _own(value)
    if not states:
        return
    owners = dict(_with_state(module)) if isinstance(module, nn.Module) else {}
    for owner, state in states.items():
        if owner not in owners:
            raise KeyError(f"these weights do not fit: they have {owner}{PLAIN}, and {type(module).__name__} has not")
        owners[owner].set_extra_state(state)


def _own(value: Any) -> Any:
    """What it was sent in is written again."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
