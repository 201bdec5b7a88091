"""A guest's step, with only what it does itself, without what TorchRL does around it.

``EnvBase.step_and_maybe_reset`` checks shapes, looks up specs and copies TensorDicts around ``_step``. Where an env and
its transforms leave those methods as TorchRL wrote them, this does the same to the same TensorDicts. Their own methods
(``_step``, ``_reset``, those of transforms that nobody knows) are called as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
from tensordict import TensorDict

from swath.envs import torchrl_internals as internals
from swath.envs.gym_rows import GymRowEnv
from swath.envs.lowering import lower
from swath.envs.lowering_watch import Watch
from swath.envs.recognising import NotLowered, is_written_by_torchrl, name_of, require_unchanged
from swath.keys import as_key
from swath.rollout.strip import Strip
from swath.rollout.tensordict_internals import entries_of, new_unchecked, put

_Step = Callable[[TensorDict], TensorDict]


class _NotQuick(Exception):
    """Something is not as TorchRL wrote it."""


class QuickSteps:
    """Makes quick steps of a guest; keeps what can be kept from batch to batch."""

    def __init__(self, guest: Any, strip: Strip) -> None:
        self._guest = guest
        self._strip = strip
        self._rows: tuple[Any, Watch, _Step] | None = None

    def find(self) -> QuickStep | None:
        """As the guest is now; None where it must be stepped by its own method."""
        try:
            return self._find()
        except (_NotQuick, NotLowered):
            return None

    def _find(self) -> QuickStep:
        guest, layout = self._guest, self._strip.layout
        common = sys.modules.get("torchrl.envs.common")
        if common is None or not isinstance(guest, common.EnvBase) or layout.primed or layout.structure is not None:
            raise _NotQuick
        keys = [*self._strip.carried, *self._strip.outputs, *self._strip.outcomes]
        if any(len(key) > 1 for key in keys) or layout.root_only:
            raise _NotQuick
        _require_frame(guest, common.EnvBase)
        return QuickStep(guest, self._step_of(guest))

    def _step_of(self, env: Any) -> _Step:
        """What ``_step`` gives, with all flags."""
        if name_of(env) != "TransformedEnv":
            return self._step_on_rows(env) or _completing(env)
        require_unchanged(env)
        inner = self._step_of(env.base_env)
        transforms = internals.flat(env.transform)
        if not internals.has_plain_inverse(env.transform):
            raise _NotQuick
        inverses = [inverse for inverse in map(internals.inverse_of, reversed(transforms)) if inverse is not None]
        changes = [internals.step_of(transform) for transform in transforms]

        def step(root: TensorDict) -> TensorDict:
            given = _shallow(root)
            for inverse in inverses:
                given = inverse(given)
            data = inner(given)
            for change in changes:
                data = change(given, data)
            return data

        return step

    def _step_on_rows(self, env: Any) -> _Step | None:
        """A plain Gymnasium env's step, or several one's."""
        if self._rows is None or self._rows[0] is not env or self._rows[1].has_changed():
            try:
                rows = lower(env)
                if not isinstance(rows, GymRowEnv):
                    return None
                self._rows = (env, Watch(env, rows.gym_envs), _row_step(env, rows))
            except NotLowered:
                return None
        return self._rows[2]


def _require_frame(guest: Any, base: type) -> None:
    kind, own = type(guest), vars(guest)
    for name in internals.FRAME:
        method = vars(base)[name]
        if name in own or getattr_static(kind, name) is not method or not is_written_by_torchrl(method):
            raise _NotQuick
    if not internals.has_plain_frame(guest) or internals.has_hooks(guest):
        raise _NotQuick


def _shallow(data: TensorDict) -> TensorDict:
    return new_unchecked(source=dict(entries_of(data)), batch_size=data.batch_size, device=data.device)


def _completing(env: Any) -> _Step:
    """Its own ``_step``; it may leave out flags that follow from others."""
    flags = [(key, spec.shape) for key, spec in env.full_done_spec.items()]
    own_step, complete = internals.step_of(env), internals.completing_done(env)

    def step(root: TensorDict) -> TensorDict:
        data = own_step(root)
        own = entries_of(data) if type(data) is TensorDict else {}
        for key, shape in flags:
            value = own.get(key)
            if value is None or value.shape != shape:
                return complete(env.full_done_spec, data)
        return data

    return step


def _row_step(env: Any, rows: GymRowEnv) -> _Step:
    """The same data as from ``env._step``; raises ``NotLowered`` where it would not be."""
    for ours, theirs in (
        (rows.full_observation_spec, env.full_observation_spec),
        (rows.full_reward_spec, env.full_reward_spec),
        (rows.full_action_spec, env.full_action_spec),
        (rows.full_done_spec, env.full_done_spec),
    ):
        mine, other = ({as_key(k): (s.shape, s.dtype) for k, s in spec.items(True, True)} for spec in (ours, theirs))
        if mine != other or any(len(key) > 1 for key in mine):
            raise NotLowered("its keys would come out differently")
    own, stepper = rows.single_step()
    actions = [(key[0], column.rows[0]) for key, column in own.outputs.items()]
    given = [(key[0], column.rows[1]) for key, column in own.carried.items()]
    given += [(key[0], column.rows[0]) for key, column in own.outcomes.items()]
    other_step = _completing(env)
    size, device, shape = env.batch_size, env.device, (*env.batch_size, 1)
    terminated, truncated = (torch.from_numpy(flags[0]).view(shape) for flags in (own.terminated, own.truncated))

    def step(root: TensorDict) -> TensorDict:
        for key, row in actions:
            action = root.get(key)
            if action.shape != row.shape or action.dtype != row.dtype:
                return other_step(root)
            row.copy_(action)
        own.terminated.fill(False)
        own.truncated.fill(False)
        stepper.step(0)
        source = {key: row.clone() for key, row in given}
        source["terminated"] = terminated.clone()
        source["truncated"] = truncated.clone()
        source["done"] = terminated | truncated
        return new_unchecked(source=source, batch_size=size, device=device)

    return step


class QuickStep:
    """``step_and_maybe_reset``, of which only the data after the step and the next root are needed."""

    def __init__(self, guest: Any, step: _Step) -> None:
        self._guest = guest
        self._step = step
        moved = internals.moved_keys(guest)
        if moved is None:
            raise _NotQuick
        self._excluded, self._from_next = moved
        self._complete = internals.completing_data(guest)
        self._expected = [(key, guest.full_reward_spec[key].shape) for key in guest.reward_keys]
        self._expected += [(key, guest.full_done_spec[key].shape) for key in guest.done_keys]
        if any(length <= 0 for _, shape in self._expected for length in shape):
            raise _NotQuick

    def __call__(self, root: TensorDict) -> tuple[dict[str, Any], Any] | None:
        """The data after the step by key, and the following root; None, before anything is done, if it cannot."""
        if type(root) is not TensorDict:
            return None
        before = entries_of(root)
        for value in before.values():
            if not isinstance(value, torch.Tensor):
                return None
        after = self._step(root)
        if type(after) is not TensorDict or not self._is_complete(entries_of(after)):
            after = self._complete(after)
        values: dict[str, Any] = entries_of(after) if type(after) is TensorDict else dict(after.items())
        excluded = self._excluded
        source = {key: value for key, value in before.items() if key not in excluded}
        for key in self._from_next:
            value = values.get(key)
            if value is not None:
                source[key] = value
        following: Any = new_unchecked(source=source, batch_size=root.batch_size, device=root.device)
        done = source["done"]
        if bool(done) if done.numel() == 1 else bool(done.any()):
            put(following, "_reset", done.clone())
            following = self._guest.reset(following, select_reset_only=True)
        return values, following

    def _is_complete(self, values: dict[str, Any]) -> bool:
        for key, shape in self._expected:
            value = values.get(key)
            if value is None or value.shape != shape:
                return False
        return True
