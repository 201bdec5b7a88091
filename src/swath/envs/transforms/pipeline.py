"""Pipeline: the base env's rows, one step long, and the stages of all transforms that are bound to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from swath.envs.base import EnvBase
from swath.envs.gym_rows import GymRowEnv
from swath.envs.transforms.compose import Compose
from swath.envs.transforms.rows import NOTHING, Rows, Slot
from swath.keys import Key, as_key
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field
from swath.rollout.strip import Strip


class Pipeline:
    """The base env's rows, one step long, and the stages that are bound to them.

    It outlives the strips that are filled from it: what stages remember is an env's own, as what its simulator does.
    """

    def __init__(self, base: EnvBase, transforms: Compose, action_keys: Sequence[Key]) -> None:
        self._base = base
        self._action_keys = action_keys
        self._transforms = transforms
        self._layout = layout = base.row_layout()
        self._inner = inner = Strip(replace(layout, outputs=()), 1)
        # Envs on TensorDicts read what they last gave.
        self.kept = [] if isinstance(base, GymRowEnv) else [column.tensor for column in inner.carried.values()]
        size = layout.batch_size
        slots = {key: Slot(column.tensor[1], size) for key, column in inner.carried.items()}
        slots |= {key: Slot(column.tensor[0], size) for key, column in inner.outcomes.items()}
        self.rows = rows = Rows(size, slots, inner.terminated[0], inner.truncated[0], base)
        #: Of transforms over all envs: what each env's episode began with, beside where it is read.
        self.firsts: list[tuple[np.ndarray, np.ndarray]] = []
        sees_firsts = base.shows_first_rows and not all(transform.is_by_env for transform in transforms)
        if rows.num_envs > 1 and sees_firsts:
            told = base.first_rows_told  # theirs where there is some: who uses the env meanwhile writes it, too
            arrays = {key: slots[key].array for key in inner.carried}
            self.firsts = [(array, told[key] if key in told else array.copy()) for key, array in arrays.items()]
        #: What each env's episode began with, for others who go on from it, beside where it is read.
        self.told = [(memory, slots[key].array) for key, memory in base.first_rows_told.items()]
        #: By the number of the transform that drives it.
        self.drivers: dict[int, _Driver] = {}
        self.stages: list[Any] = []
        self.steps: list[Any] = []
        self.resets: list[Any] = []
        for number, transform in enumerate(transforms):
            if transform.drives:
                rows.driver = self.drivers[number] = _Driver(self, number, base)
            stage = transform.bind(rows)
            self.stages.append(stage)
            self.steps.append(stage.step)
            self.resets.append(stage.reset)
        #: Those that do something.
        self.busy_steps = [step for step in self.steps if step != NOTHING.step]
        self.busy_resets = [reset for reset in self.resets if reset != NOTHING.reset]

    def bind(self, strip: Strip, casts: bool = False) -> tuple[Stepper, list[_Action], dict[int, _Entry]]:
        """The base env on these rows, how actions of ``strip`` get to it, and how those of each driver do.

        ``casts``: as the dtypes that the base env says.
        """
        size = self._layout.batch_size
        given = {key: Slot(torch.zeros_like(strip.outputs[key].tensor[0]), size) for key in self._action_keys}
        rows = Rows(size, dict(given), self.rows.terminated, self.rows.truncated)
        functions: list[Callable[[], Any]] = []
        entries: dict[int, tuple[dict[Any, Slot], int]] = {}
        for number in reversed(range(len(self._transforms))):
            entries[number] = (dict(rows.slots), len(functions))
            function = self._transforms[number].bind_inverse(rows)
            if function is not None:
                functions.append(function)
        fields = []
        for field in self._layout.outputs:
            slot = rows.slots[field.key]
            fields.append(Field(field.key, slot.tensor.shape[1:], field.dtype if casts else slot.tensor.dtype))
        primed = strip.layout.primed & self._layout.primable
        inner = Strip(replace(self._layout, carried=(), outcomes=(), outputs=tuple(fields), primed=primed), 1)
        inner.carried, inner.outcomes = self._inner.carried, self._inner.outcomes
        inner.terminated, inner.truncated = self._inner.terminated, self._inner.truncated
        targets = {field.key: inner.outputs[field.key].in_numpy[0] for field in fields}
        names = {id(slot): key for key, slot in given.items()}
        sources = {key: names.get(id(rows.slots[key])) for key in targets}
        if not functions and None not in sources.values():  # as they are, perhaps under another name
            actions = [_Action(list(strip.outputs[sources[key]].in_numpy), targets[key]) for key in targets]  # type: ignore[index]
            return self._base.bind(inner), actions, dict.fromkeys(self.drivers, (targets, ()))
        actions = [_Action(list(strip.outputs[key].in_numpy), slot.array) for key, slot in given.items()]
        functions += [_copying(rows.slots[key].array, targets[key]) for key in targets]
        actions[-1].functions = functions
        driven = {}
        for number in self.drivers:
            written, first = entries[number]
            driven[number] = ({key: slot.array for key, slot in written.items()}, functions[first:])
        return self._base.bind(inner), actions, driven


#: Where a driver's actions are written, and what is done to them then.
_Entry = tuple[dict[Any, np.ndarray], Sequence[Callable[[], Any]]]


class _Driver:
    """A pipeline up to one of its transforms. It steps what the stepper is bound to that is resetting or stepping."""

    def __init__(self, pipeline: Pipeline, number: int, base: EnvBase) -> None:
        self._pipeline = pipeline
        self._number = number
        self.is_first = number == 0
        self.reward_key = as_key(next(iter(base.full_specs["reward"].keys(True, True))))
        self._base: Any = None
        self._entry: _Entry = ({}, ())

    def take(self, base: Stepper, entry: _Entry) -> None:
        self._base, self._entry = base, entry

    def act(self, actions: Any) -> None:
        for key, target in self._entry[0].items():
            value = actions.get(key)
            target[:] = value.reshape(target.shape).numpy()
        for function in self._entry[1]:
            function()

    def step(self, env_ids: list[int]) -> bool:
        pipeline = self._pipeline
        ended = bool(self._base.step(0, env_ids))
        for stage in pipeline.steps[: self._number]:
            ended = bool(stage(env_ids)) or ended
        self._keep()
        return ended

    def reset(self, env_ids: list[int]) -> None:
        pipeline = self._pipeline
        pipeline.rows.terminated[env_ids] = False
        pipeline.rows.truncated[env_ids] = False
        self._base.reset(1, env_ids)
        self._keep()
        for stage in pipeline.resets[: self._number]:
            stage(env_ids)

    def again(self, env_ids: Sequence[int] | None) -> None:
        rows = self._pipeline.rows
        which: Any = slice(None) if env_ids is None else env_ids
        rows.terminated[which] = False
        rows.truncated[which] = False
        self._keep()
        self._base.step(0, env_ids)
        rows.is_repeated = True

    def _keep(self) -> None:
        for memory in self._pipeline.kept:
            memory[0] = memory[1]


def _copying(value: np.ndarray, target: np.ndarray) -> Callable[[], None]:
    return lambda: np.copyto(target, value, casting="unsafe")


class _Action:
    """An action's rows, where it is read, and what is done to it then."""

    __slots__ = ("functions", "rows", "target")

    def __init__(self, rows: Sequence[np.ndarray], target: np.ndarray) -> None:
        self.rows = rows
        self.target = target
        self.functions: Sequence[Callable[[], Any]] = ()
