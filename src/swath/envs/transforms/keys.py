"""Keys that are left out, or get another name."""

from __future__ import annotations

from typing import Any

from swath.envs.base import FLAGS
from swath.envs.transforms.base import Keys, Transform, key_list
from swath.envs.transforms.rows import NOTHING, Rows, Stage
from swath.envs.transforms.specs import Specs
from swath.keys import Key, as_key, show
from swath.specs import NestedKey


def _as_keys(who: str, keys: tuple[Any, ...]) -> list[Key]:
    for key in keys:
        if not isinstance(key, (str, tuple)):
            raise TypeError(f"{who}: a key is a string or a tuple of strings, got {key!r}")
    return [as_key(key) for key in keys]


class _Dropping(Transform):
    """Takes keys out, which are found in the specs."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped: list[Key] = []

    def touched_keys(self) -> list[Key]:
        return self._dropped

    def _drop(self, specs: Specs, keys: list[Key]) -> None:
        self._dropped = []
        for key in keys:
            if key == ("truncated",) and "truncated" in specs.done:
                del specs.done["truncated"]
            elif key in [(flag,) for flag in FLAGS]:
                raise ValueError(f"{type(self).__name__}: {show(key)} is what tells episodes apart; it stays")
            else:
                specs.drop(key, self)
                self._dropped.append(key)

    def bind(self, rows: Rows) -> Stage:
        for key in self._dropped:
            rows.drop(key)
        return NOTHING


class ExcludeTransform(_Dropping):
    """Leaves keys out of the data.

    >>> from swath.envs import GymEnv, StepCounter, TransformedEnv, Compose
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), ExcludeTransform("observation")))
    >>> sorted(env.reset().keys())
    ['done', 'step_count', 'terminated', 'truncated']
    """

    _shown = ("excluded_keys",)

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        if inverse:
            raise ValueError("ExcludeTransform: inverse=True: an env is given its actions only, and needs them")
        super().__init__()
        self.excluded_keys = _as_keys("ExcludeTransform", excluded_keys)
        if not excluded_keys:
            raise ValueError("ExcludeTransform: which keys?")

    def transform_specs(self, specs: Specs) -> None:
        known = [as_key(key) for kind in _KINDS for key in getattr(specs, kind).keys(True, True)]
        self._drop(specs, [key for named in self.excluded_keys for key in _leaves_of(named, known) or [named]])


class SelectTransform(_Dropping):
    """Leaves out all observations but these; rewards and flags stay unless ``keep_rewards``, ``keep_dones`` say no.

    >>> from swath.envs import GymEnv, StepCounter, TransformedEnv, Compose
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), SelectTransform("step_count")))
    >>> sorted(env.reset().keys())
    ['done', 'step_count', 'terminated', 'truncated']
    """

    _shown = ("selected_keys", "keep_rewards", "keep_dones")

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = _as_keys("SelectTransform", selected_keys)
        self.keep_rewards = keep_rewards
        self.keep_dones = keep_dones

    def transform_specs(self, specs: Specs) -> None:
        kinds = {kind: list(map(as_key, getattr(specs, kind).keys(True, True))) for kind in _KINDS}
        known = [key for keys in kinds.values() for key in keys]
        for key in self.selected_keys:
            if not _leaves_of(key, known):
                raise KeyError(f"{self}: the env has no {show(key)}; it has {', '.join(map(show, known))}")
        may_go = list(kinds["observation"])
        may_go += [] if self.keep_rewards else kinds["reward"]
        may_go += [] if self.keep_dones else kinds["done"]
        stays = [key for named in self.selected_keys for key in _leaves_of(named, known)]
        self._drop(specs, [key for key in may_go if key not in stays])


def _leaves_of(named: Key, known: list[Key]) -> list[Key]:
    """A key itself, or those of a group."""
    return [key for key in known if key[: len(named)] == named]


_KINDS = ("observation", "reward", "done", "action")


class RenameTransform(Transform):
    """Another name for what the env gives (``in_keys``) or is given (``in_keys_inv``); with ``create_copy``, one more.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), RenameTransform(["observation"], ["state_vector"]))
    >>> "observation" in env.rollout(3), env.rollout(3)["state_vector"].shape
    (False, torch.Size([3, 4]))
    """

    _needs_keys = True
    _shown = ("create_copy",)

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if both := set(map(as_key, self.in_keys)) & set(map(as_key, self.out_keys)):
            raise ValueError(f"RenameTransform: {show(min(both))} is an old and a new name; use two transforms")
        if create_copy and key_list(in_keys_inv):
            raise ValueError("RenameTransform: create_copy=True with in_keys_inv: an env takes an action from one key")
        self.create_copy = create_copy

    def touched_keys(self) -> list[Key]:
        return [as_key(key) for key in (*self.out_keys, *(() if self.create_copy else self.in_keys))]

    def transform_specs(self, specs: Specs) -> None:
        for in_key, out_key in zip(map(as_key, self.in_keys), map(as_key, self.out_keys), strict=True):
            spec, kind = specs.find(in_key, self), specs.kind_of(in_key) or "observation"
            if not self.create_copy:
                specs.drop(in_key, self)
            specs.put(out_key, spec.clone(), kind)
        for in_key, out_key in zip(map(as_key, self.in_keys_inv), map(as_key, self.out_keys_inv), strict=True):
            spec = specs.find_action(in_key, self)
            del specs.action[in_key]
            specs.put(out_key, spec, "action")

    def bind(self, rows: Rows) -> Stage:
        for in_key, out_key in self._pairs:
            rows.slots[as_key(out_key)] = rows[in_key] if self.create_copy else rows.drop(in_key)
        return NOTHING

    def bind_inverse(self, rows: Rows) -> None:
        for in_key, out_key in self._inverse_pairs:
            rows.slots[as_key(in_key)] = rows.drop(out_key)
