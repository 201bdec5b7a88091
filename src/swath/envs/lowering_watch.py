"""Whether a user has changed anything of an env since it was lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from tensordict import TensorDictBase

from swath.envs.recognising import name_of
from swath.envs.torchrl_internals import CACHES, MEMORY, envs_inside


class Watch:
    """All that lowering may have read of a guest, to see whether its user has changed any of it since.

    By identity: of the attributes of each object, of what is in their lists and dicts, and of their classes.
    """

    def __init__(self, guest: Any, gym_envs: Sequence[gymnasium.Env], elsewhere: Any = None) -> None:
        things = {id(part): part for root in _parts(guest) for part in root.modules()}
        self._things = list(things.values())
        self._classes = list(
            dict.fromkeys(
                kind for thing in self._things for kind in type(thing).__mro__ if kind.__module__.startswith("torchrl.")
            )
        )
        self._guest = guest
        self._gym_envs = gym_envs
        #: What is in other processes is watched there.
        self._elsewhere = elsewhere
        self._kept: list[Any] = []
        self._seen = self._look(self._kept)

    def again(self) -> Watch:
        """As it is now: what was lowered changes some of it itself, when it is bound and reset for the first time."""
        return Watch(self._guest, self._gym_envs, self._elsewhere)

    def has_changed(self) -> bool:
        return self._look([]) != self._seen or (self._elsewhere is not None and self._elsewhere.has_changed())

    def _look(self, kept: list[Any]) -> list[Any]:
        # What is compared by its id must be kept, or another object may get the same one.
        seen: list[Any] = [env.step for env in self._gym_envs]
        for thing in self._things:
            memory = MEMORY.get(name_of(thing))
            for name, value in vars(thing).items():
                if name in CACHES or name == memory:
                    continue
                kept.append(value)
                kind = type(value)
                if kind is list or kind is tuple:
                    kept += value
                elif isinstance(value, dict):
                    kept += value.values()
                elif name == "default_value" and isinstance(value, TensorDictBase):  # others are statistics
                    kept += value.values(True, True)
        for owner in self._classes:
            kept += vars(owner).values()
        seen += map(id, kept)
        return seen


def _parts(guest: Any) -> Iterator[Any]:
    """The guest, and envs in it that are not modules of its own."""
    yield guest
    for part in list(guest.modules()):
        for child in envs_inside(part):
            yield from _parts(child)
