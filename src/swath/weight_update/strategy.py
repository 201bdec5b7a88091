"""WeightStrategy: weights taken out of a model, and put into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from swath.keys import nested
from swath.weight_update.weights import (
    apply_weights,
    flat_weights,
    has_extra_state,
    has_state,
    has_weights,
    require_exact,
)

#: Where a module's state dict has what is no tensor of it.
_EXTRA = "_extra_state"


class WeightStrategy:
    """How weights look on their way: a TensorDict, or a state dict.

    >>> sorted(WeightStrategy("state_dict").extract_weights(torch.nn.Linear(1, 1)))
    ['bias', 'weight']
    """

    def __init__(self, extract_as: Literal["tensordict", "state_dict"] = "tensordict") -> None:
        if extract_as not in ("tensordict", "state_dict"):
            raise ValueError(f"extract_as must be 'tensordict' or 'state_dict', got {extract_as!r}")
        self.extract_as = extract_as

    def extract_weights(self, source: Any) -> Any:
        """A copy of a module's, TensorDict's or mapping's weights, buffers included."""
        flat = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in flat_weights(source).items()
        }
        if self.extract_as == "state_dict":
            return flat
        tensors = {tuple(name.split(".")): value for name, value in flat.items()}
        return TensorDict(nested(tensors), batch_size=[])

    def apply_weights(self, destination: Any, weights: Any) -> None:
        """Into a module, a transform, or a TensorDict or mapping of the same structure; in place.

        Raises:
            KeyError, ValueError: structures, shapes or dtypes do not fit.
        """
        if has_state(destination) and not isinstance(destination, (TensorDictBase, Mapping)):
            destination.load_state_dict(_copied({tuple(n.split(".")): t for n, t in flat_weights(weights).items()}))
            return
        if has_extra_state(destination) and any(_EXTRA in name.split(".") for name in flat_weights(weights)):
            extra: Any = _copied({_around_extra(n): t for n, t in flat_weights(weights).items()})
            destination.load_state_dict(extra)
            return
        if has_weights(destination) and not isinstance(destination, (TensorDictBase, Mapping)):
            apply_weights(destination, weights)
            return
        if not isinstance(destination, (TensorDictBase, Mapping)):
            raise TypeError(f"weights go into a module or a TensorDict, not into {type(destination).__name__}")
        own, given = flat_weights(destination), flat_weights(weights)
        if own.keys() != given.keys():
            name = next(iter(own.keys() ^ given.keys()))
            raise KeyError(f"these weights do not fit: only one of the two has {name!r}")
        for name, value in given.items():
            if value.shape != own[name].shape:  # copy_ would expand it
                raise ValueError(
                    f"these weights do not fit: {name!r} has shape {tuple(value.shape)}, and {tuple(own[name].shape)} "
                    "where it goes"
                )
            require_exact(name, value.dtype, own[name].dtype)
        with torch.no_grad():
            for name, value in given.items():
                own[name].copy_(value)


def apply_to_all(models: Iterable[Any], weights: Any) -> None:
    """The same weights into each of several models, transforms and so on."""
    for model in models:
        WeightStrategy().apply_weights(model, weights)


def _copied(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> dict[str, Any]:
    """By path, as dicts in dicts; whoever loads them may keep them, and what they were sent in is written again."""
    return nested({path: tensor.detach().clone() for path, tensor in tensors.items()})


def _around_extra(name: str) -> tuple[str, ...]:
    """A module's own names have dots, and so may those that it has in its extra state.

    >>> _around_extra("norm._extra_state.loc.-|-.observation"), _around_extra("net.0.weight")
    (('norm._extra_state', 'loc.-|-.observation'), ('net.0.weight',))
    """
    before, found, behind = name.partition(f"{_EXTRA}.")
    return (before + _EXTRA, behind) if found else (name,)
