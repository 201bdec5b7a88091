"""What users ask of a collector by its path: with which arguments, and of what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def arguments_of_calls(
    list_of_args: Sequence[Any] | None, list_of_kwargs: Sequence[Any] | None, count: int | None = None, who: str = ""
) -> list[tuple[Sequence[Any], dict[str, Any]]]:
    """Of ``map_fn``: the arguments of each call; of so many, or of as many as there are.

    >>> arguments_of_calls([(1,), (2,)], None)
    [((1,), {}), ((2,), {})]
    """
    given = {"list_of_args": list_of_args, "list_of_kwargs": list_of_kwargs}
    for name, each in given.items():
        if each is not None and (isinstance(each, (str, dict)) or not isinstance(each, Sequence)):
            raise TypeError(f"map_fn: {name} must be a list with an entry for each call; got {type(each).__name__}")
        if each is not None and count is not None and len(each) != count:
            raise ValueError(f"map_fn: {name} has {len(each)} entries for {count} {who}{'s' * (count != 1)}")
    args, kwargs = list_of_args, list_of_kwargs
    if args is not None and kwargs is not None and len(args) != len(kwargs):
        raise ValueError(f"map_fn: list_of_args has {len(args)} entries, list_of_kwargs {len(kwargs)}")
    if count is None:
        count = next((len(each) for each in (args, kwargs) if each is not None), 1)
    of_args, of_kwargs = [()] * count if args is None else args, [{}] * count if kwargs is None else kwargs
    for each in of_args:
        if isinstance(each, str) or not isinstance(each, Sequence):
            raise TypeError(f"map_fn: an entry of list_of_args is a tuple of arguments: ({each!r},)")
    return list(zip(of_args, of_kwargs, strict=True))


def chosen_envs(index: Any, num_envs: int) -> list[int]:
    """The envs of an index, a slice, indices or a mask.

    >>> chosen_envs(slice(1, None), 3), chosen_envs([True, False, True], 3)
    ([1, 2], [0, 2])
    """
    chosen = torch.arange(num_envs)[index] if isinstance(index, slice) else torch.as_tensor(index)
    if chosen.dtype == torch.bool:
        if chosen.numel() != num_envs:
            raise IndexError(f"a mask of {chosen.numel()} entries for {num_envs} envs")
        chosen = chosen.reshape(-1).nonzero()
    return chosen.reshape(-1).tolist()


def call_found(found: Any, path: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call what a path leads to, in each of several envs; what is no function is the answer itself."""
    if isinstance(found, list):
        return [call_found(each, path, args, kwargs) for each in found]
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise TypeError(f"{path} is a {type(found).__name__}, which cannot be called with arguments")
    return found
