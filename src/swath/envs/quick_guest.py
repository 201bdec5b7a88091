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

from swath.envs.gym_rows import GymRowEnv
from swath.envs.lowering import lower
from swath.envs.lowering_watch import Watch
from swath.envs.recognising import NotLowered, is_written_by_torchrl, name_of, require_unchanged
from swath.keys import as_key
from swath.rollout.strip import Strip

#: What this stands for: those who override one of them have it called.
_FRAME = (
    "step",
    "step_and_maybe_reset",
    "_step_and_maybe_reset",
    "_step_proc_data",
    "maybe_reset",
    "any_done",
    "step_mdp",
    "_step_mdp",
    "_assert_tensordict_shape",
)

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
        _require_no_hooks(guest)
        return QuickStep(guest, self._step_of(guest))

    def _step_of(self, env: Any) -> _Step:
        """What ``_step`` gives, with all flags."""
        if name_of(env) != "TransformedEnv":
            return self._step_on_rows(env) or _completing(env)
        require_unchanged(env)
        inner = self._step_of(env.base_env)
        transforms = list(_flat(env.transform))
        inverses = _inverses(env.transform, transforms)

        def step(root: TensorDict) -> TensorDict:
            given = _shallow(root)
            for inverse in inverses:
                given = inverse._inv_call(given)
            data = inner(given)
            for transform in transforms:
                data = transform._step(given, data)
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
    for name in _FRAME:
        method = vars(base)[name]
        if name in own or getattr_static(kind, name) is not method or not is_written_by_torchrl(method):
            raise _NotQuick
    if own.get("_compiled_step_and_maybe_reset") is not None or own.get("_torchrl_native_autoreset"):
        raise _NotQuick
    if guest.run_type_checks or not guest._simple_done:
        raise _NotQuick


def _require_no_hooks(env: Any) -> None:
    """Nothing is done between a step and a reset."""
    while name_of(env) == "TransformedEnv":
        base_of_all = sys.modules["torchrl.envs.transforms._base"].Transform
        for transform in _flat(env.transform):
            method = type(transform)._post_step_mdp_hooks
            if method is not base_of_all._post_step_mdp_hooks or "_post_step_mdp_hooks" in vars(transform):
                raise _NotQuick
        env = env.base_env
    if env._post_step_mdp_hooks is not None:
        raise _NotQuick


def _flat(transform: Any) -> Any:
    """The transforms of a Compose, one after the other."""
    if name_of(transform) != "Compose":
        yield transform
        return
    require_unchanged(transform)
    for each in transform.transforms:
        yield from _flat(each)


def _inverses(whole: Any, transforms: list[Any]) -> list[Any]:
    """Those that change what is given to the env, in their order."""
    module = sys.modules["torchrl.envs.transforms._base"]
    if type(whole).inv is not module.Transform.inv or "inv" in vars(whole):
        raise _NotQuick
    inverses = []
    for transform in reversed(transforms):
        own = type(transform)._inv_call
        if own is module._CallableTransform._inv_call and "_inv_call" not in vars(transform):
            continue  # it does nothing
        if own is not module.Transform._inv_call or "_inv_call" in vars(transform):
            raise _NotQuick  # it might leave steps out
        if transform.in_keys_inv:
            inverses.append(transform)
    return inverses


def _shallow(data: TensorDict) -> TensorDict:
    return TensorDict._new_unsafe(source=dict(data._tensordict), batch_size=data.batch_size, device=data.device)


def _completing(env: Any) -> _Step:
    """Its own ``_step``; it may leave out flags that follow from others."""
    flags = [(key, spec.shape) for key, spec in env.full_done_spec.items()]

    def step(root: TensorDict) -> TensorDict:
        data = env._step(root)
        own = data._tensordict if type(data) is TensorDict else {}
        for key, shape in flags:
            value = own.get(key)
            if value is None or value.shape != shape:
                return env._complete_done(env.full_done_spec, data)
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
        return TensorDict._new_unsafe(source=source, batch_size=size, device=device)

    return step


class QuickStep:
    """``step_and_maybe_reset``, of which only the data after the step and the next root are needed."""

    def __init__(self, guest: Any, step: _Step) -> None:
        self._guest = guest
        self._step = step
        mdp = guest._step_mdp
        trees = (mdp.exclude_from_root, mdp.keys_from_next)
        if not mdp.keep_other or any(below is not None for tree in trees for below in tree.values()):
            raise _NotQuick
        self._excluded = frozenset(mdp.exclude_from_root)
        self._from_next = list(mdp.keys_from_next)
        self._expected = [(key, guest.full_reward_spec[key].shape) for key in guest.reward_keys]
        self._expected += [(key, guest.full_done_spec[key].shape) for key in guest.done_keys]
        if any(length <= 0 for _, shape in self._expected for length in shape):
            raise _NotQuick

    def __call__(self, root: TensorDict) -> tuple[dict[str, Any], Any] | None:
        """The data after the step by key, and the following root; None, before anything is done, if it cannot."""
        if type(root) is not TensorDict:
            return None
        before = root._tensordict
        for value in before.values():
            if not isinstance(value, torch.Tensor):
                return None
        after = self._step(root)
        if type(after) is not TensorDict or not self._is_complete(after._tensordict):
            after = self._guest._step_proc_data(after)
        values: dict[str, Any] = after._tensordict if type(after) is TensorDict else dict(after.items())
        excluded = self._excluded
        source = {key: value for key, value in before.items() if key not in excluded}
        for key in self._from_next:
            value = values.get(key)
            if value is not None:
                source[key] = value
        following: Any = TensorDict._new_unsafe(source=source, batch_size=root.batch_size, device=root.device)
        done = source["done"]
        if bool(done) if done.numel() == 1 else bool(done.any()):
            following._set_str("_reset", done.clone(), validated=True, inplace=False, non_blocking=False)
            following = self._guest.reset(following, select_reset_only=True)
        return values, following

    def _is_complete(self, values: dict[str, Any]) -> bool:
        for key, shape in self._expected:
            value = values.get(key)
            if value is None or value.shape != shape:
                return False
        return True
