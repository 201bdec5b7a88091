"""TransformedEnv: an env and the transforms of its data, as one env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from swath.envs.base import FLAGS, EnvBase
from swath.envs.gym_rows import GymRowEnv
from swath.envs.making import make_env
from swath.envs.rows import RowEnv
from swath.envs.transforms.base import KINDS, Compose, Rows, Slot, Specs, as_transform
from swath.errors import EnvError
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, Layout
from swath.rollout.strip import Strip

FLAG_KEYS = tuple((flag,) for flag in FLAGS)


class TransformedEnv(RowEnv):
    """``env`` with its data changed by ``transform``.

    >>> from swath.envs import Compose, GymEnv, RewardSum, StepCounter
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
    >>> sorted(env.rollout(2)["next"].keys())
    ['done', 'episode_reward', 'observation', 'reward', 'step_count', 'terminated', 'truncated']
    """

    def __init__(self, env: Any, transform: Any = None, *, device: torch.device | str | None = None) -> None:
        base: EnvBase = make_env(env)
        if getattr(base, "has_fillers", False):
            raise EnvError(
                "TransformedEnv: a vector env in NEXT_STEP mode has steps that are none; make it with "
                "AutoresetMode.DISABLED or SAME_STEP"
            )
        self.base_env = base
        super().__init__(batch_size=base.batch_size, device=base.device if device is None else device)
        self.transform = Compose() if transform is None else Compose(as_transform(transform))
        self._read_specs()

    def append_transform(self, transform: Any) -> TransformedEnv:
        """Add one behind the others."""
        return self.insert_transform(len(self.transform), transform)

    def insert_transform(self, index: int, transform: Any) -> TransformedEnv:
        before = list(self.transform.transforms)
        self.transform.insert(index, transform)
        try:
            self._read_specs()
        except Exception:
            self.transform.transforms = before
            raise
        return self

    def _read_specs(self) -> None:
        specs = Specs.of(self.base_env._full_specs, self.batch_size)
        for transform in self.transform:
            transform.transform_specs(specs)
        self._full_specs = {kind: getattr(specs, kind) for kind in KINDS}
        self._single_steps.clear()
        self._pipeline: Pipeline | None = None

    def row_layout(self) -> Layout:
        own, theirs = super().row_layout(), self.base_env.row_layout()
        names = ("batch_size", "carried", "outputs", "outcomes", "has_truncated")
        return replace(theirs, **{name: getattr(own, name) for name in names})

    @property
    def resets_single_envs(self) -> bool:  # type: ignore[override]
        return self.base_env.resets_single_envs

    @property
    def num_busy_processes(self) -> int:  # type: ignore[override]
        return self.base_env.num_busy_processes

    def plan(self) -> str:
        names = ", ".join(type(transform).__name__ for transform in self.transform)
        return self.base_env.plan() + (f", then {names}" if names else "")

    def bind_rows(self, strip: Strip) -> Stepper:
        if self._pipeline is None:
            self._pipeline = Pipeline(self.base_env, self.transform)
        return TransformedStepper(self._pipeline, strip)

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        return self.base_env.set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        own = {str(i): transform.state_dict() for i, transform in enumerate(self.transform)}
        return {"base_env": self.base_env.state_dict(), "transforms": own}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.base_env.load_state_dict(state_dict.get("base_env", {}), strict)
        for i, transform in enumerate(self.transform):
            transform.load_state_dict(state_dict.get("transforms", {}).get(str(i), {}), strict)

    def complete_policy(self, policy: Any) -> None:
        self.base_env.complete_policy(policy)

    def _close(self) -> None:
        self.base_env.close(raise_if_closed=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "base_env" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.base_env, name)

    def __repr__(self) -> str:
        return f"TransformedEnv({self.base_env!r}, {self.transform!r})"


class Pipeline:
    """The base env's rows, one step long, and the stages that are bound to them.

    It outlives the strips that are filled from it: what stages remember is an env's own, as what its simulator does.
    """

    def __init__(self, base: EnvBase, transforms: Compose) -> None:
        self._base = base
        self._transforms = transforms
        self._layout = layout = base.row_layout()
        self._inner = inner = Strip(replace(layout, outputs=()), 1)
        # Envs on TensorDicts read what they last gave.
        self.kept = [] if isinstance(base, GymRowEnv) else [column.tensor for column in inner.carried.values()]
        size = layout.batch_size
        slots = {key: Slot(column.tensor[1], size) for key, column in inner.carried.items()}
        slots |= {key: Slot(column.tensor[0], size) for key, column in inner.outcomes.items()}
        self.rows = rows = Rows(size, slots, inner.terminated[0], inner.truncated[0])
        stages = [transform.bind(rows) for transform in transforms]
        self.stages = stages
        self.steps = [stage.step for stage in stages]
        self.resets = [stage.reset for stage in stages]

    def bind(self, strip: Strip) -> tuple[Stepper, list[_Action]]:
        """The base env on these rows, and how actions of ``strip`` get to it."""
        size = self._layout.batch_size
        given = {key: Slot(torch.zeros_like(column.tensor[0]), size) for key, column in strip.outputs.items()}
        rows = Rows(size, dict(given), self.rows.terminated, self.rows.truncated)
        functions = [transform.bind_inverse(rows) for transform in reversed(list(self._transforms))]
        functions = [function for function in functions if function is not None]
        fields = []
        for field in self._layout.outputs:
            slot = rows.slots[field.key]
            fields.append(Field(field.key, slot.tensor.shape[1:], slot.tensor.dtype))
        inner = Strip(replace(self._layout, carried=(), outcomes=(), outputs=tuple(fields)), 1)
        inner.carried, inner.outcomes = self._inner.carried, self._inner.outcomes
        inner.terminated, inner.truncated = self._inner.terminated, self._inner.truncated
        targets = {field.key: inner.outputs[field.key].in_numpy[0] for field in fields}
        if not functions:
            actions = [_Action(list(strip.outputs[key].in_numpy), target) for key, target in targets.items()]
            return self._base.bind(inner), actions
        actions = [_Action(list(strip.outputs[key].in_numpy), slot.array) for key, slot in given.items()]
        actions[-1].functions = [*functions, *[_copying(rows.slots[key].array, targets[key]) for key in targets]]
        return self._base.bind(inner), actions


def _copying(value: np.ndarray, target: np.ndarray) -> Callable[[], None]:
    return lambda: np.copyto(target, value)


class _Action:
    """An action's rows, where it is read, and what is done to it then."""

    __slots__ = ("functions", "rows", "target")

    def __init__(self, rows: Sequence[np.ndarray], target: np.ndarray) -> None:
        self.rows = rows
        self.target = target
        self.functions: Sequence[Callable[[], Any]] = ()


class TransformedStepper:
    """The base env steps on a strip of one step; stages make of it what goes into the rows of the real one."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, pipeline: Pipeline, strip: Strip) -> None:
        self._strip = strip
        self._rows = rows = pipeline.rows
        self._base, self._actions = pipeline.bind(strip)
        self._stages = pipeline.stages
        self._kept, self._steps, self._resets = pipeline.kept, pipeline.steps, pipeline.resets
        # Of a guest, flags are data like any other.
        named = {("terminated",): rows.terminated, ("truncated",): rows.truncated}
        as_data = () if strip.layout.has_flags else FLAG_KEYS
        flags = {key: strip.carried[key].in_numpy for key in as_data if key in strip.carried}
        self._flags = list(flags.values())
        self._end_flags = [(flags[key], named[key]) for key in named if key in flags]
        self._done = flags.get(("done",))
        own = [key for key in strip.carried if key in rows.slots]
        self._carried = [(strip.carried[key].in_numpy, rows.slots[key].array) for key in own]
        self._outcomes = [(strip.outcomes[key].in_numpy, rows.slots[key].array) for key in strip.outcomes]

    def prepare(self) -> None:
        """Before a batch."""
        if hasattr(self._base, "prepare"):
            self._base.prepare()

    def resume(self, row: int) -> None:
        """Go on from a row that was written by others: what was counted over an episode is in it."""
        for rows, value in self._carried:
            value[:] = rows[row]
        for stage in self._stages:
            if hasattr(stage, "resume"):
                stage.resume()

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        for action in self._actions:
            action.target[:] = action.rows[t]
            for function in action.functions:
                function()
        ended = self._base.step(0, env_ids)
        for stage in self._steps:
            more = stage(env_ids)
            if more:
                ended = sorted({*(ended or ()), *more})
        if env_ids is None:
            for target, value in self._carried:
                target[t + 1] = value
            for target, value in self._outcomes:
                target[t] = value
        else:
            for target, value in self._carried:
                target[t + 1, env_ids] = value[env_ids]
            for target, value in self._outcomes:
                target[t, env_ids] = value[env_ids]
        for memory in self._kept:
            memory[0] = memory[1]
        for flags in self._flags:
            flags[t + 1] = False
        if ended:
            self._end(t, ended)
        return ended

    def _end(self, t: int, ended: list[int]) -> None:
        for flags, said in self._end_flags:
            flags[t + 1, ended, 0] = said[ended]
        if self._done is not None:
            self._done[t + 1, ended] = True
        self._strip.terminated[t, ended] = self._rows.terminated[ended]
        self._strip.truncated[t, ended] = self._rows.truncated[ended]
        self._rows.terminated[:] = False
        self._rows.truncated[:] = False

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        self._base.reset(1, env_ids, **kwargs)
        for memory in self._kept:
            memory[0] = memory[1]
        for stage in self._resets:
            stage(env_ids)
        for target, value in self._carried:
            target[row, env_ids] = value[env_ids]
        for flags in self._flags:
            flags[row, env_ids] = False
