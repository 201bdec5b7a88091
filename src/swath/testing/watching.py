"""A transform that is watched while it works: what it reads, what it writes, and what it must not touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.transforms.base import Transform
from swath.envs.transforms.rows import Rows, Slot
from swath.envs.transforms.specs import Specs
from swath.keys import Key, as_key, show
from swath.specs import MultiOneHot, OneHot, Spec

#: What an env gives, of the kinds of specs.
GIVEN = ("observation", "state", "reward")


class Watch:
    """Puts itself between a transform and the env that it is bound to.

    Args:
        transform: of which this is the only user.
        fill: what new memory has in it before the transform writes there.
        is_apart: whether a call for some envs must leave the others as they are.
    """

    def __init__(self, transform: Transform, fill: int = 0, is_apart: bool = False) -> None:
        self.transform = transform
        self.is_apart = is_apart
        self.fill = fill
        #: When something happens, for errors.
        self.where = "bind"
        #: Of what the env gives, the keys that ``bind`` read, and those that it made.
        self.read: set[Key] = set()
        self.made: set[Key] = set()
        self._specs_before: dict[Key, Spec] = {}
        self._specs_after: dict[Key, Spec] = {}
        self._actions_before: dict[Key, Spec] = {}
        self._actions_after: dict[Key, Spec] = {}
        self._transform_specs = transform.transform_specs
        self._bind = transform.bind
        self._bind_inverse = transform.bind_inverse
        # On this very object, so that it stays the one that an env finds among its transforms.
        transform.transform_specs = self.transform_specs  # type: ignore[method-assign]
        transform.bind = self.bind  # type: ignore[method-assign]
        transform.bind_inverse = self.bind_inverse  # type: ignore[method-assign]

    def fail(self, rule: str) -> None:
        raise AssertionError(f"check_transform: {self.transform!r}: {rule}")

    def require(self, condition: bool, rule: Callable[[], str]) -> None:
        if not condition:
            self.fail(rule())

    # -- specs -----------------------------------------------------------------------------------------------------

    def transform_specs(self, specs: Specs) -> None:
        self._specs_before, self._actions_before = _leaves(specs, *GIVEN), _leaves(specs, "action")
        self._transform_specs(specs)
        self._specs_after, self._actions_after = _leaves(specs, *GIVEN), _leaves(specs, "action")

    def _check_made(self, rows: Rows) -> None:
        """That there is memory of the specs' shape and dtype for all that is new."""
        lead = len(rows.batch_size)
        for key, spec in self._specs_after.items():
            slot = rows.slots.get(key)
            if slot is None:
                self.fail(f"transform_specs says that there is {show(key)}, but bind makes no memory for it (rows.new)")
                return
            got, said = (tuple(slot.tensor.shape[1:]), slot.tensor.dtype), (tuple(spec.shape[lead:]), spec.dtype)
            self.require(
                got == said,
                lambda key=key, got=got, said=said: (
                    f"bind makes {show(key)} of shape {got[0]} and dtype {got[1]} for each env, its spec says "
                    f"{said[0]} and {said[1]}"
                ),
            )
        for key in self.made:
            self.require(
                key in self._specs_after,
                lambda key=key: (
                    f"bind makes {show(key)}, which is in no spec, so nobody gets it; say specs.put(...) in "
                    "transform_specs"
                ),
            )

    # -- what the env gives ----------------------------------------------------------------------------------------

    def bind(self, rows: Rows) -> Any:
        inputs = dict(rows.slots)
        memory = {slot.tensor.untyped_storage().data_ptr() for slot in inputs.values()}
        slots = _SlotsSeen(inputs, memory, self.fill)
        rows.slots = slots
        try:
            stage = self._bind(rows)
        finally:
            rows.slots = dict(slots)
        self.read, self.made = slots.read & inputs.keys(), slots.written
        for name in ("step", "reset"):
            self.require(
                callable(getattr(stage, name, None)),
                lambda name=name: f"bind gives {stage!r}, which has no {name}(env_ids)",
            )
        self._check_made(rows)
        return WatchedStage(self, stage, rows, inputs)

    def require_in_specs(self, values: dict[Key, torch.Tensor], inputs: dict[Key, torch.Tensor]) -> None:
        """That what was made is as its spec says, where what it was made of is."""
        if not all(spec.is_in(inputs[key]) for key, spec in self._specs_before.items() if key in inputs):
            return
        for key in self.made & values.keys():
            spec, value = self._specs_after[key], values[key]
            self.require(
                spec.is_in(value),
                lambda key=key, spec=spec, value=value: (
                    f"after {self.where}, {show(key)} is {_shown(value)}, which is not in its spec {spec}"
                ),
            )

    # -- what the env is given -------------------------------------------------------------------------------------

    def bind_inverse(self, rows: Rows) -> Callable[[], Any] | None:
        given = {key: slot for key, slot in rows.slots.items() if key in self._actions_after}
        function = self._bind_inverse(rows)
        lead = len(rows.batch_size)
        for key, spec in self._actions_before.items():
            slot = rows.slots.get(key)
            if slot is None:
                self.fail(f"the env takes {show(key)}, but bind_inverse makes none; it leaves {_names(rows.slots)}")
                return None
            is_same = slot.tensor.shape[1:] == spec.shape[lead:] and (
                slot.tensor.dtype == spec.dtype or isinstance(spec, (OneHot, MultiOneHot))
            )
            self.require(
                is_same,
                lambda key=key, slot=slot, spec=spec: (
                    f"bind_inverse makes {show(key)} of shape {tuple(slot.tensor.shape[1:])} and dtype "
                    f"{slot.tensor.dtype} for each env, the env takes {tuple(spec.shape[lead:])} and {spec.dtype}"
                ),
            )
        if function is None:
            return None
        taken = {key: rows.slots[key] for key in self._actions_before}
        return lambda: self._run_inverse(function, given, taken)

    def _run_inverse(self, function: Callable[[], Any], given: dict[Key, Slot], taken: dict[Key, Slot]) -> None:
        before = {key: slot.array.copy() for key, slot in given.items()}
        function()
        for key, was in before.items():
            self.require(
                _same(given[key].array, was),
                lambda key=key: f"at {self.where}, it writes to the memory of {show(key)}, which it is given; make new",
            )
        if not all(self._actions_after[key].is_in(slot.row) for key, slot in given.items()):
            return
        for key, slot in taken.items():
            spec = self._actions_before[key]
            self.require(
                isinstance(spec, (OneHot, MultiOneHot)) or spec.is_in(slot.row),
                lambda key=key, slot=slot, spec=spec: (
                    f"at {self.where}, the env gets {show(key)} {_shown(slot.row)}, which is not in its spec {spec}, "
                    "for an action that is"
                ),
            )


class _SlotsSeen(dict):
    """Notes what is read and written, and fills memory that is new."""

    def __init__(self, slots: dict[Key, Slot], memory: set[int], fill: int) -> None:
        super().__init__(slots)
        self._memory, self._fill = memory, fill
        self.read: set[Key] = set()
        self.written: set[Key] = set()

    def __getitem__(self, key: Key) -> Slot:
        self.read.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Key, slot: Slot) -> None:
        self.written.add(key)
        if slot.tensor.untyped_storage().data_ptr() not in self._memory:
            slot.tensor.fill_(self._fill)
        super().__setitem__(key, slot)


class WatchedStage:
    """A stage, and what is looked at around each of its calls."""

    def __init__(self, watch: Watch, stage: Any, rows: Rows, inputs: dict[Key, Slot]) -> None:
        self._watch = watch
        self._stage = stage
        self._rows = rows
        self._inputs = inputs
        self._outputs = {key: rows.slots[key] for key in watch.made}
        self._everyone = set(range(rows.num_envs))
        if hasattr(stage, "resume"):
            self.resume = stage.resume

    def step(self, env_ids: Sequence[int] | None) -> Any:
        flags = self._rows.terminated | self._rows.truncated
        ended = self._call("step", env_ids)
        self._check_ends(flags, ended)
        return ended

    def reset(self, env_ids: Sequence[int]) -> None:
        self._call("reset", env_ids)

    def _call(self, name: str, env_ids: Sequence[int] | None) -> Any:
        watch, drives = self._watch, self._watch.transform.drives
        before = {key: slot.array.copy() for key, slot in self._inputs.items()}
        others = [] if env_ids is None else sorted(self._everyone - set(env_ids))
        kept = {key: slot.array[others].copy() for key, slot in self._outputs.items()}
        result = getattr(self._stage, name)(env_ids)
        for key, was in before.items():
            watch.require(
                drives or _same(self._inputs[key].array, was),
                lambda key=key: (
                    f"at {watch.where}, {name} writes to the memory of {show(key)}, which it only reads; write to what "
                    "rows.new(...) gives, and do not change the value that _apply_transform is given"
                ),
            )
        for key, was in kept.items():
            watch.require(
                not watch.is_apart or _same(self._outputs[key].array[others], was),
                lambda key=key: (
                    f"at {watch.where}, {name}(env_ids={list(env_ids or ())}) changes {show(key)} of envs that are not "
                    f"among them: {others}. If it is meant to mix envs (statistics, draws), say is_by_env = False"
                ),
            )
        watch.require_in_specs(
            {key: slot.row for key, slot in self._outputs.items()}, {key: s.row for key, s in self._inputs.items()}
        )
        return result

    def _check_ends(self, before: np.ndarray, ended: Any) -> None:
        watch = self._watch
        said = set() if ended is None else set(ended)
        flags = self._rows.terminated | self._rows.truncated
        watch.require(
            said <= self._everyone,
            lambda: f"at {watch.where}, step ends the episodes of envs {sorted(said)}; there are {len(self._everyone)}",
        )
        watch.require(
            watch.transform.ends_episodes or all(before[env] for env in said),
            lambda: (
                f"at {watch.where}, step ends the episodes of envs {sorted(said)}, but its property ends_episodes is "
                "False: envs that reset by themselves would go on"
            ),
        )
        without = sorted(env for env in said if not flags[env])
        watch.require(
            not without,
            lambda: (
                f"at {watch.where}, step ends the episodes of envs {without}, but sets neither rows.truncated nor "
                "rows.terminated for them"
            ),
        )
        silent = [int(env) for env in np.flatnonzero(flags & ~before) if int(env) not in said]
        watch.require(
            not silent or watch.transform.drives,
            lambda: (
                f"at {watch.where}, step sets rows.truncated or rows.terminated of envs {silent}, but does not return "
                "their numbers, so that their episodes go on"
            ),
        )


def _leaves(specs: Specs, *kinds: str) -> dict[Key, Spec]:
    return {as_key(key): leaf.clone() for kind in kinds for key, leaf in getattr(specs, kind).items(True, True)}


def _same(value: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(value, other, equal_nan=value.dtype.kind in "fc")


def _shown(value: torch.Tensor) -> str:
    return str(value.tolist()) if value.numel() <= 12 else f"{value.flatten()[:12].tolist()} ..."


def _names(keys: Any) -> str:
    return ", ".join(map(show, keys)) or "nothing"
