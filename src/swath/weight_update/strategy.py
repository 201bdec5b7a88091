"""WeightStrategy: weights taken out of a model, and put into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from swath.keys import nested
from swath.weight_update.extra_state import ENCODED, PLAIN, decode_state, has_extra_state, is_extra, set_extra_states
from swath.weight_update.weights import apply_weights, flat_weights, has_state, has_weights, require_exact


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

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Into a module, a transform, or a TensorDict or mapping of the same structure.

        ``inplace=False`` exchanges a module's, or TensorDict's, tensors for copies of these, whatever shapes they have.

        Raises:
            KeyError, ValueError: structures, shapes or dtypes do not fit.
        """
        if not inplace:
            _exchange(destination, weights)
            return
        if has_state(destination) and not isinstance(destination, (TensorDictBase, Mapping)):
            destination.load_state_dict(_as_state(weights, lambda name: tuple(name.split("."))))
            return
        if has_extra_state(destination) and _is_whole_state(destination, weights):
            destination.load_state_dict(_as_state(weights, _around_extra))
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


def _exchange(destination: Any, weights: Any) -> None:
    flat = flat_weights(weights)
    if isinstance(destination, TensorDictBase):
        paths = {tuple(name.split(".")): value.detach().clone() for name, value in flat.items()}
        destination.update(TensorDict(nested(paths), batch_size=destination.batch_size))
        return
    if not isinstance(destination, torch.nn.Module):
        raise ValueError(f"inplace=False is for modules and TensorDicts, not for {type(destination).__name__}")
    tensors = {name: value for name, value in flat.items() if not is_extra(name)}
    own = {**dict(destination.named_parameters()), **dict(destination.named_buffers())}
    unknown = [name for name in tensors if name not in own]
    if unknown:
        raise KeyError(f"these weights do not fit: {type(destination).__name__} has no {unknown[0]!r}")
    for name, value in tensors.items():
        owner, _, attribute = name.rpartition(".")
        new = value.detach().clone()
        if isinstance(own[name], torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=own[name].requires_grad)
        setattr(destination.get_submodule(owner), attribute, new)
    set_extra_states(destination, flat)


def _is_whole_state(module: torch.nn.Module, weights: Any) -> bool:
    """Whether weights are all that a module's state dict has, its extra state among it."""
    names = list(flat_weights(weights))
    own = {name for name in module.state_dict() if not is_extra(name)}
    return any(map(is_extra, names)) and own == {name for name in names if not is_extra(name)}


def _as_state(weights: Any, path_of: Callable[[str], tuple[str, ...]]) -> Any:
    """By path, as dicts in dicts; whoever loads them may keep them, and what they were sent in is written again."""
    state: dict[tuple[str, ...], Any] = {}
    for name, value in flat_weights(weights).items():
        if name.rpartition(".")[2] == ENCODED:
            state[path_of(name.removesuffix(ENCODED) + PLAIN)] = decode_state(value)
        else:
            state[path_of(name)] = value.detach().clone()
    return nested(state)


def _around_extra(name: str) -> tuple[str, ...]:
    """A module's own names have dots, and so may those that it has in its extra state.

    >>> _around_extra("norm._extra_state.loc.-|-.observation"), _around_extra("net.0.weight")
    (('norm._extra_state', 'loc.-|-.observation'), ('net.0.weight',))
    """
    before, found, behind = name.partition(f"{PLAIN}.")
    return (before + PLAIN, behind) if found else (name,)


def apply_to_all(models: Iterable[Any], weights: Any) -> None:
    """The same weights into each of several models, transforms and so on."""
    for model in models:
        WeightStrategy().apply_weights(model, weights)
