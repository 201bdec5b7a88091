"""Compose: transforms one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from swath.envs.transforms.base import Transform
from swath.states import mismatch


class Compose(Transform):
    """Transforms one after the other; a list of them, by index.

    >>> from swath.envs import RewardSum, StepCounter
    >>> Compose(StepCounter(), RewardSum())[0]
    StepCounter(max_steps=None)
    """

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self._transforms: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """All of them; to change them, ``append``, ``insert``, ``pop``, and assign to and delete indices."""
        return tuple(self._transforms)

    def append(self, transform: Any) -> None:
        self.insert(len(self._transforms), transform)

    def insert(self, index: int, transform: Any) -> None:
        self[index:index] = transform

    def pop(self, index: int = -1) -> Transform:
        taken = self._transforms[index]
        del self[index]
        return taken

    def __setitem__(self, index: int | slice, transform: Any) -> None:
        transform = as_transform(transform)
        given = list(transform) if isinstance(transform, Compose) else [transform]
        changed = list(self._transforms)
        if isinstance(index, slice):
            changed[index] = given
        else:
            index = range(len(changed))[index]
            changed[index : index + 1] = given
        self._become(changed)

    def __delitem__(self, index: int | slice) -> None:
        changed = list(self._transforms)
        del changed[index]
        self._become(changed)

    def _become(self, transforms: list[Transform]) -> None:
        """Of an env: if it can be with these."""
        before, self._transforms = self._transforms, transforms
        if self.container is None:
            return
        try:
            self.container.refresh()
        except Exception:
            self._transforms = before
            leave(transforms, before)
            self.container.remind()
            raise
        leave(before, transforms)

    def __getattr__(self, name: str) -> Any:
        # Scripts say env.transform.loc where there is one transform only.
        own = self.__dict__.get("_transforms", ())
        if name.startswith("_") or len(own) != 1:
            raise AttributeError(f"Compose of {len(own)} transforms has no attribute {name!r}")
        return getattr(own[0], name)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): transform.state_dict() for i, transform in enumerate(self._transforms)}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Each by its index; one that is not there has an empty state."""
        for transform, state in self._each_with(state_dict, strict):
            transform.load_state_dict(state, strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        for transform, state in self._each_with(state_dict, strict):
            transform.check_state_dict(state, strict)

    def _each_with(self, state_dict: Any, strict: bool) -> Iterator[tuple[Transform, Any]]:
        names = [str(i) for i in range(len(self._transforms))]
        if not isinstance(state_dict, Mapping) or (strict and not set(state_dict) <= set(names)):
            raise mismatch("Compose", state_dict, f"the states of {len(names)} transforms, by their numbers")
        return ((each, state_dict.get(name, {})) for each, name in zip(self._transforms, names, strict=True))

    def __len__(self) -> int:
        return len(self._transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self._transforms)

    def __getitem__(self, index: int | slice) -> Any:
        return Compose(*self._transforms[index]) if isinstance(index, slice) else self._transforms[index]

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._transforms))})"


def leave(before: Iterable[Transform], now: Iterable[Transform]) -> None:
    """Those that are not among the others any more are part of no env."""
    for transform in before:
        if not any(transform is other for other in now):
            transform.container = None


def as_transform(thing: Any) -> Transform:
    if isinstance(thing, Transform):
        return thing
    instead = getattr(thing, "instead_of_env", None)
    if isinstance(instead, str):
        raise TypeError(f"{type(thing).__name__} is for batches of steps, and an env gives one: write {instead}")
    from swath.envs.transforms.foreign import as_own_transform

    return as_own_transform(thing)
