"""What is read of a Gymnasium env's ``info``: ``info_keys``, as leaves with a spec each.

Where an env's info has no such entry, it is zero: after a reset and, of entries that come now and then, in steps.
Which of those are real is known from what they come with: of ``episode``, ``("next", "done")``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import RecordEpisodeStatistics

from swath.envs.gym_spaces import torch_dtype
from swath.errors import EnvDataError
from swath.keys import Key, as_key, show
from swath.specs import Composite, Spec, Unbounded


@dataclass(frozen=True)
class InfoLeaf:
    """One entry of an env's info: where it stands in it, and in the data."""

    key: Key
    spec: Spec
    #: Whether each step has it.
    is_always_there: bool

    def pick(self, info: Any) -> Any:
        """None where it is not there."""
        for part in self.key:
            if not isinstance(info, Mapping) or part not in info:
                return None
            info = info[part]
        return info

    def write(self, array: np.ndarray, row: int, env: int, info: Any, is_step: bool) -> None:
        """Into ``array[row, env]``."""
        found = self.pick(info)
        if found is None:
            if is_step and self.is_always_there:
                raise EnvDataError(
                    f"info has no {show(self.key)}, which info_keys asks for; {_how_to_say(self.key[0])}"
                )
            array[row, env] = 0
            return
        value = np.asarray(found)
        if value.shape != tuple(self.spec.shape):
            raise EnvDataError(f"info[{show(self.key)}] has shape {value.shape}, expected {tuple(self.spec.shape)}")
        if not np.can_cast(value.dtype, array.dtype, "same_kind"):
            raise EnvDataError(
                f"info[{show(self.key)}] is {value.dtype}, on its first step it was {array.dtype}; say its dtype: "
                f"info_keys={{{self.key[0]!r}: Unbounded({tuple(self.spec.shape)}, torch.float32)}}"
            )
        array[row, env] = value


InfoKeys = Sequence[str] | Mapping[str, Any] | Sequence[InfoLeaf]


def info_leaves(env: gymnasium.Env, info_keys: InfoKeys) -> tuple[InfoLeaf, ...]:
    """What ``info_keys`` asks for: names that its first steps have, or specs of what may come at any time."""
    if isinstance(info_keys, Mapping):
        return tuple(leaf for name, spec in info_keys.items() for leaf in _specified((name,), spec))
    names: list[Any] = [info_keys] if isinstance(info_keys, str) else list(info_keys)
    found = [name for name in names if isinstance(name, InfoLeaf)]
    if found or not names:
        return tuple(found)
    # Most envs fill their info on a step only: take one, to see real values.
    _, info = env.reset()
    if not set(names) <= set(info):
        info = {**info, **env.step(env.action_space.sample())[4]}
    leaves: list[InfoLeaf] = []
    for name in names:
        if name in info:
            leaves += _seen((name,), info[name])
        elif name == "episode" and _records_episodes(env):
            leaves += _specified((name,), _EPISODE)
        else:
            known = ", ".join(map(repr, sorted(info))) or "none"
            raise KeyError(f"{describe(env)}: its info has no {name!r} (it has: {known}); {_how_to_say(name)}")
    return tuple(leaves)


#: What ``gymnasium.wrappers.RecordEpisodeStatistics`` gives at an episode's end: return, length, seconds.
_EPISODE = {"r": Unbounded(()), "l": Unbounded((), torch.int64), "t": Unbounded(())}


def _records_episodes(env: Any) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, RecordEpisodeStatistics):
            return True
        env = env.env
    return False


def _how_to_say(name: str) -> str:
    return (
        f"if it comes later in an episode, say its shape: info_keys={{{name!r}: Unbounded(())}}, or, of a dictionary, "
        f"info_keys={{{name!r}: Composite(a=Unbounded(()))}}; steps without it get zeros"
    )


def _specified(key: Key, spec: Any) -> list[InfoLeaf]:
    if isinstance(spec, (Composite, Mapping)):
        entries = spec.items(True, True) if isinstance(spec, Composite) else spec.items()
        return [leaf for name, own in entries for leaf in _specified((*key, *as_key(name)), own)]
    if not isinstance(spec, Spec):
        raise TypeError(f"info_keys[{show(key)}] must be a spec, got {type(spec).__name__}; {_how_to_say(key[0])}")
    return [InfoLeaf(key, spec, is_always_there=False)]


def _seen(key: Key, value: Any) -> list[InfoLeaf]:
    if isinstance(value, Mapping):
        return [leaf for name, own in value.items() for leaf in _seen((*key, str(name)), own)]
    array = np.asarray(value)
    return [InfoLeaf(key, Unbounded(array.shape, torch_dtype(array.dtype, f"info[{show(key)}]")), True)]


def describe(env: gymnasium.Env) -> str:
    """An env's id, or its class where it has none."""
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(env.unwrapped).__name__
