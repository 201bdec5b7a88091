"""Whose state a state dict is: ``load_state_dict`` asks before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swath.errors import StateMismatch

_NUMBERED = re.compile(r"(node|worker|lane|env)\d+")
#: What a ``Collector`` saves besides its env and its policy.
COUNTERS = ("frames", "iter", "policy_version", "random_frames_left")
_MOST_KEYS = 5


@dataclass(frozen=True)
class Origin:
    """What a state was taken from, in words, and where it can be loaded, if anywhere."""

    what: str
    instead: str = ""


def numbered(state: Any, kind: str) -> list[str]:
    """Its keys ``kind0``, ``kind1``, …, in the order of their numbers; none of what is no mapping.

    >>> numbered({"worker10": 0, "worker2": 0, "frames": 0}, "worker")
    ['worker2', 'worker10']
    """
    keys = state if isinstance(state, Mapping) else ()
    names = [key for key in keys if isinstance(key, str) and _NUMBERED.fullmatch(key) and key.startswith(kind)]
    return sorted(names, key=lambda name: int(name.removeprefix(kind)))


def count(number: int, what: str) -> str:
    """
    >>> count(1, "node"), count(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def origin_of(state: Any) -> Origin:
    """What its keys tell.

    >>> origin_of({"storage": None, "about": {}}).what
    'the state of a replay buffer'
    >>> origin_of(None).what, origin_of({}).what, origin_of({"a": 1}).what
    ('None', 'an empty dict', "a dict with 'a'")
    """
    if not isinstance(state, Mapping):
        return Origin("None" if state is None else f"a {type(state).__name__}")
    if not state:
        return Origin("an empty dict")
    return _of_collector(state) or _of_others(state) or Origin(f"a dict with {_show_keys(state)}")


def _of_collector(state: Mapping[Any, Any]) -> Origin | None:
    nodes, workers = numbered(state, "node"), numbered(state, "worker")
    if not ({"frames", "iter"} <= state.keys() and (nodes or workers or "env_state_dict" in state)):
        return None
    if "policy_version" not in state:
        policy = "state['worker0']['policy_state_dict']" if workers else "state['policy_state_dict']"
        return Origin("the state of a collector of TorchRL", f"load its weights into the policy, from {policy}")
    if nodes:
        return Origin(
            f"the state of a collector of {count(len(nodes), 'node')}", "load it into one of nodes, of as many"
        )
    if workers:
        what = f"the state of a MultiCollector of {count(len(workers), 'worker')}"
        return Origin(what, f"load it into one with num_workers={len(workers)}")
    envs = state["env_state_dict"]
    inside = numbered(envs, "worker") if isinstance(envs, Mapping) else []
    of_envs = f" whose envs are in {count(len(inside), 'worker')}" if inside else ""
    return Origin(
        f"the state of a single Collector{of_envs}",
        f"load it into a Collector{' (or AsyncBatchedCollector)' if inside else ''} with the same envs",
    )


def _of_others(state: Mapping[Any, Any]) -> Origin | None:
    keys = state.keys()
    if {"storage", "about"} <= keys:
        return Origin("the state of a replay buffer", "load it into one")
    if {"state", "param_groups"} <= keys:
        return Origin("the state of an optimizer", "load it into one")
    if keys == {"step"}:
        return Origin("the state of an Evaluator", "load it into one")
    if workers := numbered(state, "worker"):
        return Origin(f"the state of envs in {count(len(workers), 'worker')}", "load it into envs in as many")
    if envs := numbered(state, "env"):
        return Origin(f"the state of a SerialEnv of {count(len(envs), 'env')}", "load it into one of as many")
    if "np_random" in keys:
        return Origin(f"the state of {count(len(state['np_random']), 'Gymnasium env')}", "load it into as many")
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        return Origin("the state dict of a module", "load it into the module: module.load_state_dict(state)")
    return None


def _show_keys(state: Mapping[Any, Any]) -> str:
    shown = ", ".join(repr(key) for key in list(state)[:_MOST_KEYS])
    return shown + (f" and {len(state) - _MOST_KEYS} more" if len(state) > _MOST_KEYS else "")


def mismatch(who: str, state: Any, expected: str) -> StateMismatch:
    """``expected``: what it should have been."""
    origin = origin_of(state)
    instead = origin.instead or f"take it with state_dict() of a {who} like this one"
    return StateMismatch(f"{who}.load_state_dict was given {origin.what}; it takes {expected}. Next: {instead}")


def require_empty(who: str, state: Any, strict: bool) -> None:
    """Raise unless it is the state of what keeps none."""
    if not isinstance(state, Mapping) or (strict and state):
        raise mismatch(who, state, "an empty dict, since it keeps none (strict=False goes on)")


def check_by_loading(holder: Any, state: Any, strict: bool) -> None:
    """Raise what loading would raise; the holder has its own state afterwards."""
    before = holder.state_dict()
    try:
        holder.load_state_dict(state, strict)
    finally:
        holder.load_state_dict(before, False)


def require_counters(who: str, state: Any, expected: str, names: Iterable[str] = COUNTERS) -> None:
    """Raise unless these are numbers in the state."""
    if not isinstance(state, Mapping) or any(name not in state for name in names):
        raise mismatch(who, state, expected)
    for name in names:
        value = state[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StateMismatch(
                f"{who}.load_state_dict: {name!r} of the state is {value!r}, and should be a number of at least 0; "
                "take the state anew, with state_dict()"
            )


class Stateful:
    """What can be saved and loaded: nothing, unless a subclass says otherwise."""

    def state_dict(self) -> dict[str, Any]:
        """What can be saved: nothing, unless a subclass says otherwise."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        require_empty(type(self).__name__, state_dict, strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Raise what ``load_state_dict`` would raise, and change nothing."""
        check_by_loading(self, state_dict, strict)
