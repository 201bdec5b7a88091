"""Frames that transforms hold back, in a buffer's folder: numbers and arrays of bytes, as its other frames are."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.frames import as_rows, as_tensordict, sizes_of
from swath.data.memory import FrameLayout
from swath.rollout.layout import Field

#: By the place of a transform: what its ``state_dict`` says.
Held = Mapping[int, Mapping[str, Any]]


def as_data(held: Held) -> dict[str, Any]:
    """Mappings with texts for keys, lists, numbers, and arrays."""
    return {str(number): _state_as_data(state) for number, state in held.items()}


def from_data(data: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What was given to ``as_data``. Anybody may have written it: what it cannot be is an error."""
    return {int(number): _state_from_data(state) for number, state in data.items()}


def _state_as_data(state: Mapping[str, Any]) -> dict[str, Any]:
    rows = enumerate(state["held"].items())
    held = {str(number): {"of": _name(of), **_frames_as_data(frames)} for number, (of, frames) in rows}
    return {"held": held, "ended": [_name(of) for of in state["ended"]]}


def _state_from_data(data: Mapping[str, Any]) -> dict[str, Any]:
    held = {_owner(row["of"]): _frames_from_data(row) for row in data["held"].values()}
    return {"held": held, "ended": [_owner(name) for name in data["ended"]]}


def _name(owner: Hashable) -> Any:
    """An env's number, or ``("row", number)``, as JSON has it."""
    return list(owner) if isinstance(owner, tuple) else owner


def _owner(name: Any) -> Hashable:
    number = name[1] if isinstance(name, list) and len(name) == 2 and name[0] == "row" else name
    if type(number) is not int:
        raise ValueError(f"{name!r} is no env whose frames could be held back")
    return ("row", number) if isinstance(name, list) else number


def _frames_as_data(frames: TensorDictBase) -> dict[str, Any]:
    rows = frames.unsqueeze(0)
    leaves = as_rows(rows)
    fields = tuple(Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in leaves.items())
    layout = FrameLayout(fields, 1, len(frames), sizes_of(rows))
    content = {str(number): _bytes_of(leaf) for number, leaf in enumerate(leaves.values())}
    return {"layout": layout.to_json(), "bytes": content}


def _bytes_of(leaf: torch.Tensor) -> np.ndarray:
    return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def _frames_from_data(data: Mapping[str, Any]) -> TensorDictBase:
    layout = FrameLayout.from_json(data["layout"])
    leaves = {}
    for number, field in enumerate(layout.fields):
        content = data["bytes"][str(number)]
        expected = layout.length * math.prod(field.shape) * field.dtype.itemsize
        if content.dtype != np.uint8 or content.shape != (expected,):
            raise ValueError(
                f"{field.key} of frames that were held back has {content.nbytes:,} bytes, not {expected:,}"
            )
        leaf = leaves[field.key] = torch.empty((layout.length, *field.shape), dtype=field.dtype)
        if expected:
            leaf.view(-1).view(torch.uint8).copy_(torch.from_numpy(content))
    return as_tensordict(leaves, torch.Size([layout.length]), None, layout.sizes)
