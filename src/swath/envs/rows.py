"""The row protocol, both ways: envs that write rows get the TensorDict API, TensorDict envs get rows.

The protocol itself is ``Stepper`` in ``rollout/boundaries.py``: ``reset(row, env_ids)`` and ``step(t)`` on the
columns of a strip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.base import EnvBase
from swath.errors import EnvDataError
from swath.hints import forwarded, wrapped
from swath.keys import Key, as_key, nested, show
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, Layout
from swath.rollout.strip import Strip
from swath.specs import Composite

_STEP_METHODS = ("reset", "step", "_reset", "_step")


class RowEnv(EnvBase):
    """An env that writes rows (``bind_rows``); its TensorDict API works on a strip of one step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # One strip for every combination of action dtypes that was met: a policy may give floats for a one-hot. And for
        # what it writes under "next".
        self._single_steps: dict[Any, tuple[Strip, Stepper]] = {}

    def plan(self) -> str:
        return super().plan() if self.has_steps_of_its_own else f"{type(self).__name__}, stepped on rows"

    def bind_rows(self, strip: Strip) -> Stepper:
        """This env's own stepper."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it steps on rows")

    @property
    def has_steps_of_its_own(self) -> bool:
        """Whether a subclass changed what a step or a reset is, by overriding a method on TensorDicts."""
        return any(getattr(type(self), name) is not getattr(RowEnv, name) for name in _STEP_METHODS)

    def bind(self, strip: Strip) -> Stepper:
        return TensorDictStepper(self, strip) if self.has_steps_of_its_own else self.bind_rows(strip)

    def row_layout(self) -> Layout:
        """As the specs say, but in main memory, which is where rows are written; ``device`` is where data goes."""
        return super().row_layout().in_main_memory()

    def layout_around(self, inner: Layout) -> Layout:
        """That of an env around others: what it says of the whole by itself, the rest as they say."""
        own = RowEnv.row_layout(self)  # in main memory, and with a flag that may have been added here
        names = ("batch_size", "carried", "outputs", "outcomes", "has_truncated")
        return replace(inner, **{name: getattr(own, name) for name in names})

    def single_step(
        self, actions: tuple[Field, ...] | None = None, primed: frozenset[Key] = frozenset()
    ) -> tuple[Strip, Stepper]:
        layout = replace(self.row_layout(), primed=primed)
        if actions is not None:
            layout = replace(layout, outputs=actions)
        signature = (tuple(f.dtype for f in layout.outputs), primed)
        if signature not in self._single_steps:
            strip = Strip(layout, num_steps=1)
            self._single_steps[signature] = (strip, self.bind_rows(strip))
        return self._single_steps[signature]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: not the rows that this one steps on."""
        return {**self.__dict__, "_single_steps": {}}

    def _row(self, columns: dict, row: int) -> dict[Key, torch.Tensor]:
        return {key: column.rows[row].clone() for key, column in columns.items()}

    def _flags(self, strip: Strip) -> dict[str, torch.Tensor]:
        shape = (*self.batch_size, 1)
        flags = {
            "terminated": torch.from_numpy(strip.terminated[0].copy()).view(shape),
            "truncated": torch.from_numpy(strip.truncated[0].copy()).view(shape),
        }
        return {"done": flags["terminated"] | flags["truncated"], **flags}

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        strip, stepper = self.single_step()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            env_ids = list(range(strip.num_envs))
        else:
            env_ids = mask.reshape(-1).nonzero().reshape(-1).tolist()
        stepper.reset(0, env_ids, **kwargs)
        return TensorDict(nested(self._row(strip.carried, 0)), batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        lead = len(self.batch_size)
        layout = self.row_layout()
        wanted, primed = layout.outputs, self._primed(layout, tensordict)
        actions = []
        for field in wanted:
            action = tensordict.get(field.key, None)
            if action is None:
                raise KeyError(f"{type(self).__name__}.step: the TensorDict has no {show(field.key)}")
            if field.shape not in (action.shape[lead:], (*action.shape[lead:], 1)):
                raise EnvDataError(
                    f"{type(self).__name__}.step: {show(field.key)} has shape {tuple(action.shape)}, expected "
                    f"{(*self.batch_size, *field.shape)}"
                )
            actions.append(replace(field, dtype=action.dtype))
        strip, stepper = self.single_step(tuple(actions), frozenset(primed))
        for field in wanted:
            row = strip.outputs[field.key].rows[0]
            row.copy_(tensordict.get(field.key).reshape(row.shape))
        for key, value in primed.items():
            strip.carried[key].rows[1].copy_(value)
        strip.terminated[:] = False
        strip.truncated[:] = False
        only = tensordict.get("_step", None)
        if only is None:
            stepper.step(0)
        else:
            self._step_some(strip, stepper, tensordict, only.reshape(-1))
        # Nested only when all are there: a reward may stand beside observations, as ("agent", "reward").
        outcome = nested({**self._row(strip.carried, 1), **self._row(strip.outcomes, 0)})
        flags = self._flags(strip) if layout.has_flags else {}
        return TensorDict({**outcome, **flags}, batch_size=self.batch_size, device=self.device)

    def _primed(self, layout: Layout, root: TensorDictBase) -> dict[Key, torch.Tensor]:
        """What is to stand at the following root: what is under "next"; of a primer, else what is at this root."""
        if not layout.primable:
            return {}
        written = root.get("next", None)
        found = {key: None if written is None else written.get(key, None) for key in layout.primable}
        if layout.has_flags:
            found = {key: root.get(key, None) if value is None else value for key, value in found.items()}
        return {key: value for key, value in found.items() if value is not None}

    def _step_some(self, strip: Strip, stepper: Stepper, root: TensorDictBase, mask: torch.Tensor) -> None:
        """Step only the envs of ``mask``; the others stay where they are, with a reward of zero."""
        for key, column in strip.carried.items():
            column.rows[1].copy_(root.get(key))
        for column in strip.outcomes.values():
            column.tensor[0] = 0
        for flag, memory in (("terminated", strip.terminated), ("truncated", strip.truncated)):
            memory[0] = root.get(flag).reshape(-1).cpu().numpy()
        active = mask.nonzero().reshape(-1).tolist()
        strip.terminated[0, active] = False
        strip.truncated[0, active] = False
        stepper.step(0, active)


class WrappingEnv(RowEnv):
    """Another library's env as a row env: what swath does not know of it is the env's own."""

    env: Any

    def _close(self) -> None:
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        return forwarded(self, wrapped(self, "env", name), name)


def specs_of_all(specs: Mapping[str, Composite], num_envs: int) -> dict[str, Composite]:
    """Those of a batch of envs that are alike, from one env's."""
    return {kind: spec.expand((num_envs, *spec.shape)) for kind, spec in specs.items()}


class TensorDictStepper:
    """An env that is written with TensorDicts, on the rows of a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: EnvBase, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._batch_size = env.batch_size
        self._all = list(range(strip.num_envs))
        self._flag_shape = (*env.batch_size, 1)
        self._has_stepped = False
        # Only what the env itself writes: a policy's state is not its business.
        own = {f.key for f in env.row_layout().carried}
        self._carried = {key: column for key, column in strip.carried.items() if key in own}
        self._actions = {as_key(key): strip.outputs[as_key(key)] for key in env.action_keys}
        # An env whose device is None gets, and gives, TensorDicts without one.
        self._no_flags = {
            flag: torch.zeros(self._flag_shape, dtype=torch.bool, device=env.device) for flag in env.done_keys
        }

    def _root(self, row: int) -> TensorDict:
        # Copies: an env may keep what it is given, or change it.
        leaves = {key: column.rows[row].clone() for key, column in self._carried.items()}
        return TensorDict({**nested(leaves), **self._no_flags}, batch_size=self._batch_size, device=self._env.device)

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        request = None
        if len(env_ids) < len(self._all):
            mask = torch.zeros(len(self._all), dtype=torch.bool, device=self._env.device)
            mask[env_ids] = True
            request = self._root(row).set("_reset", mask.view(self._flag_shape))
        fresh = self._env.reset(request, **kwargs)
        self._refuse_unknown(fresh.exclude("_reset", *self._strip.outputs), "reset")
        for key, column in self._carried.items():
            value = fresh.get(key)
            if column.rows[row].shape != value.shape or column.field.dtype != value.dtype:
                self._refuse(key, value, column.field, "reset")
            flat = value.reshape(column.tensor.shape[1:])
            column.tensor[row, env_ids] = flat[env_ids]

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        root = self._root(t)
        for key, column in self._actions.items():
            root.set(key, column.rows[t].clone())
        outcome = self._env.step(root).get("next")
        if not self._has_stepped:  # once: later steps are what the first was
            self._refuse_unknown(outcome, "step")
            self._has_stepped = True
        for key, column in self._carried.items():
            value = outcome.get(key)
            if column.rows[t + 1].shape != value.shape or column.field.dtype != value.dtype:
                self._refuse(key, value, column.field, f"step {t}")
            column.rows[t + 1].copy_(value)
        for key, column in self._strip.outcomes.items():
            column.rows[t].copy_(outcome.get(key))
        done = outcome.get("done").reshape(-1)
        if not bool(done.any()):
            return None
        terminated = outcome.get("terminated").reshape(-1)
        # Done without terminated is truncated, also where the env has no such key.
        truncated = outcome.get("truncated", done & ~terminated).reshape(-1)
        self._strip.terminated[t] = terminated.cpu().numpy()
        self._strip.truncated[t] = truncated.cpu().numpy()
        return done.nonzero().reshape(-1).tolist()

    def _refuse_unknown(self, data: TensorDictBase, where: str) -> None:
        known = {*self._carried, *self._strip.outcomes, ("done",), ("terminated",), ("truncated",)}
        for key in map(as_key, data.keys(True, True)):
            if key not in known:
                raise EnvDataError(
                    f"{type(self._env).__name__}: {where} gives {show(key)}, which is in none of its specs; add it to "
                    "observation_spec, or leave it out"
                )

    def _refuse(self, key: tuple[str, ...], value: torch.Tensor, field: Field, where: str) -> None:
        raise EnvDataError(
            f"{type(self._env).__name__}: {show(key)} at {where} has shape {tuple(value.shape)} and dtype "
            f"{value.dtype}; the layout says {(*self._batch_size, *field.shape)} and {field.dtype}"
        )
