"""TransformedEnv: an env and the transforms of its data, as one env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from swath.envs.base import FLAGS, EnvBase
from swath.envs.guest import GuestEnv
from swath.envs.gym_rows import GymRowEnv
from swath.envs.making import make_env
from swath.envs.rows import RowEnv
from swath.envs.transforms.base import KINDS, NOTHING, Compose, Rows, Slot, Specs, Transform, as_transform, leave
from swath.envs.transforms.foreign import is_of_torchrl
from swath.errors import EnvDataError, EnvError
from swath.keys import Key, as_key, show
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, Layout
from swath.rollout.strip import Strip

FLAG_KEYS = tuple((flag,) for flag in FLAGS)


class TransformedEnv(RowEnv):
    """``env`` with its data changed by ``transform``.

    Args:
        auto_unwrap: of an env that is transformed already, the transforms become this one's.

    >>> from swath.envs import Compose, GymEnv, RewardSum, StepCounter
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
    >>> sorted(env.rollout(2)["next"].keys())
    ['done', 'episode_reward', 'observation', 'reward', 'step_count', 'terminated', 'truncated']
    """

    def __init__(
        self,
        env: Any = None,
        transform: Any = None,
        cache_specs: bool = True,
        *,
        base_env: Any = None,
        auto_unwrap: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if (env is None) == (base_env is None):
            raise TypeError("TransformedEnv: give one env: TransformedEnv(env, transform)")
        if not cache_specs:
            raise ValueError("TransformedEnv: cache_specs=False: specs are found when transforms change; leave it out")
        base: EnvBase = make_env(env if base_env is None else base_env)
        if auto_unwrap and isinstance(base, TransformedEnv):
            base, transform = base.base_env, Compose(*base.transform, *(() if transform is None else (transform,)))
        if isinstance(base, GuestEnv) and is_of_torchrl(transform):  # both are TorchRL's
            base, transform = base.transformed(transform), None
        if getattr(base, "has_fillers", False):
            raise EnvError(
                "TransformedEnv: a vector env in NEXT_STEP mode has steps that are none; make it with "
                "AutoresetMode.DISABLED or SAME_STEP"
            )
        self.base_env = base
        super().__init__(batch_size=base.batch_size, device=base.device if device is None else device)
        self._pipeline: Pipeline | None = None
        self._transform = _own_compose(transform)
        self._read_specs()

    @property
    def transform(self) -> Compose:
        """All transforms, in their order; what is appended, exchanged or deleted there has its effect at once."""
        return self._transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        before, self._transform = self._transform, _own_compose(transform)
        try:
            self._read_specs()
        except Exception:
            refused, self._transform = self._transform, before
            self._let_go(refused)
            self.remind()
            raise
        self._let_go(before)

    def _let_go(self, transforms: Compose) -> None:
        transforms.container = None
        leave(transforms, self.transform)

    def append_transform(self, transform: Any) -> TransformedEnv:
        """Add one behind the others."""
        return self.insert_transform(len(self.transform), transform)

    def insert_transform(self, index: int, transform: Any) -> TransformedEnv:
        self.transform.insert(index, transform)
        return self

    def env_before(self, transform: Transform) -> TransformedEnv:
        """The same env with the transforms before this one only."""
        before = [other is transform for other in self.transform].index(True)
        env = TransformedEnv(self.base_env, self.transform[:before], device=self.device)
        self._adopt()
        return env

    def _adopt(self) -> None:
        self.transform.container = self
        for transform in self.transform:
            transform.container = self

    def refresh(self) -> None:
        """Learn the specs again, after a transform was changed so that its results look different."""
        self._read_specs()

    def remind(self) -> None:
        """Let transforms learn the specs again, after they were told others that came to nothing."""
        self._told_specs()

    def _read_specs(self) -> None:
        specs, self._primable = self._told_specs()
        self.full_specs = {kind: getattr(specs, kind) for kind in KINDS}
        self._single_steps.clear()
        self._pipeline = None

    def _told_specs(self) -> tuple[Specs, frozenset[Key]]:
        """The specs behind all transforms, and what a policy may write under "next" (of primers: what they keep)."""
        self._adopt()
        specs = Specs.of(self.base_env.full_specs, self.batch_size)
        theirs = self.base_env.row_layout()
        primable = theirs.primable
        kept = set(theirs.primable if theirs.has_flags else ())
        for transform in self.transform:
            if transform.ends_episodes and not self.base_env.resets_single_envs:
                raise EnvError(
                    f"{transform} needs an env whose parts can be reset one by one; {self.base_env} resets by itself. "
                    "Make it with AutoresetMode.DISABLED, or wrap its envs in a TimeLimit"
                )
            if transform.repeats_steps and not self.base_env.steps_stay_in_episodes:
                raise EnvError(
                    f"{transform} steps also envs whose episode ended, and {self.base_env} would go on with another "
                    "episode, or refuse; let each of its envs repeat actions, in a gymnasium.Wrapper or with "
                    "GymEnv(..., frame_skip=n)"
                )
            transform.transform_specs(specs)
            touched = set(transform.touched_keys()) - set(transform.primed_keys)
            if touched & kept:
                raise ValueError(
                    f"{transform}: {show(min(touched & kept))} is what a TensorDictPrimer keeps for the policy, which "
                    "nobody changes on the way; give the result another key"
                )
            kept |= set(transform.primed_keys)
            primable = (primable - touched) | frozenset(transform.primed_keys)
        return specs, primable

    def row_layout(self) -> Layout:
        own, theirs = super().row_layout(), self.base_env.row_layout()
        names = ("batch_size", "carried", "outputs", "outcomes", "has_truncated")
        return replace(theirs, **{name: getattr(own, name) for name in names}, primable=self._primable)

    @property
    def resets_single_envs(self) -> bool:  # type: ignore[override]
        return self.base_env.resets_single_envs

    @property
    def steps_stay_in_episodes(self) -> bool:  # type: ignore[override]
        return self.base_env.steps_stay_in_episodes

    @property
    def num_busy_processes(self) -> int:  # type: ignore[override]
        return self.base_env.num_busy_processes

    def plan(self) -> str:
        names = ", ".join(type(transform).__name__ for transform in self.transform)
        return self.base_env.plan() + (f", then {names}" if names else "")

    def bind_rows(self, strip: Strip) -> Stepper:
        self._remind_of_this_env()
        return TransformedStepper(self.pipeline, strip, is_current=self._is_current)

    def _remind_of_this_env(self) -> None:
        """A transform that is part of other envs as well may have been told theirs since."""
        if any(transform.container is not self for transform in self.transform):
            self.remind()

    def _is_current(self, pipeline: Pipeline) -> bool:
        """Whether the transforms are those that it was made of."""
        return self._pipeline is pipeline

    @property
    def pipeline(self) -> Pipeline:
        """What is between the base env and whoever steps this one."""
        if self._pipeline is None:
            self._remind_of_this_env()
            pipeline = Pipeline(self.base_env, self.transform, [as_key(key) for key in self.action_keys])
            self._require_memory(pipeline)
            self._pipeline = pipeline
        return self._pipeline

    def _require_memory(self, pipeline: Pipeline) -> None:
        """That what transforms make is what they say: rows of another shape or dtype would be cast, or be zero."""
        layout = self.row_layout()
        for field in (*layout.carried, *layout.outcomes):
            slot = pipeline.rows.slots.get(field.key)
            made = None if slot is None else (slot.tensor.shape[1:], slot.tensor.dtype)
            if made != (field.shape, field.dtype):
                got = "is not made" if made is None else f"is made with shape {tuple(made[0])} and dtype {made[1]}"
                raise EnvDataError(
                    f"{show(field.key)} {got} by {self.transform!r}; their specs say shape {tuple(field.shape)} and "
                    f"dtype {field.dtype}. swath.testing.check_transform(transform) tells which rule is broken"
                )

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        return self.base_env.set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        return {"base_env": self.base_env.state_dict(), "transforms": self.transform.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.base_env.load_state_dict(state_dict.get("base_env", {}), strict)
        self.transform.load_state_dict(state_dict.get("transforms", {}), strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.base_env.check_state_dict(state_dict.get("base_env", {}), strict)
        self.transform.check_state_dict(state_dict.get("transforms", {}), strict)

    def _single_step(self, actions: Any = None, primed: frozenset[Key] = frozenset()) -> tuple[Strip, Stepper]:
        if actions is not None and self._pipeline is None:
            raise EnvError(
                "TransformedEnv.step: its transforms have not seen this episode's start, since they were changed, or "
                "copied with the env, or no episode has begun; call reset() first"
            )
        return super()._single_step(actions, primed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pipeline": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt()

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


def _own_compose(transform: Any) -> Compose:
    """What an env has of what was given: the same object, unless another env has it."""
    if transform is None:
        return Compose()
    transform = as_transform(transform)
    return transform if type(transform) is Compose and transform.container is None else Compose(transform)


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


class _RowWriter:
    """Copies what stages have left into a row of each column: as bytes, in a third of the time that NumPy takes."""

    __slots__ = ("_as_arrays", "_as_bytes")

    def __init__(self, columns: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._as_bytes: list[tuple[memoryview, memoryview, int]] = []
        self._as_arrays: list[tuple[np.ndarray, np.ndarray]] = []
        for column, value in columns:
            if column.flags.c_contiguous and value.flags.c_contiguous and column.dtype == value.dtype:
                self._as_bytes.append((_bytes_of(column), _bytes_of(value), value.nbytes))
            else:  # some envs of a strip, or a view with its dimensions in another order
                self._as_arrays.append((column, value))

    def __call__(self, row: int) -> None:
        for column, value, size in self._as_bytes:
            column[row * size : (row + 1) * size] = value
        for column, value in self._as_arrays:
            column[row] = value


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class TransformedStepper:
    """The base env steps on a strip of one step; stages make of it what goes into the rows of the real one."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(
        self,
        pipeline: Pipeline,
        strip: Strip,
        casts: bool = False,
        is_current: Callable[[Pipeline], bool] | None = None,
    ) -> None:
        self._strip = strip
        self._pipeline = pipeline
        self._is_current = is_current
        self._rows = rows = pipeline.rows
        self._base, self._actions, entries = pipeline.bind(strip, casts)
        self._drivers = [(driver, entries[number]) for number, driver in pipeline.drivers.items()]
        self._kept, self._steps, self._resets = pipeline.kept, pipeline.busy_steps, pipeline.busy_resets
        self._firsts, self._told = pipeline.firsts, pipeline.told
        self._stages = pipeline.stages
        # Of a guest, flags are data like any other.
        named = {("terminated",): rows.terminated, ("truncated",): rows.truncated}
        as_data = () if strip.layout.has_flags else FLAG_KEYS
        flags = {key: strip.carried[key].in_numpy for key in as_data if key in strip.carried}
        self._flags = list(flags.values())
        self._end_flags = [(flags[key], named[key]) for key in named if key in flags]
        self._done = flags.get(("done",))
        #: Rows in which flags may be set: all others are left alone.
        self._flagged: set[int] = set()
        own = [key for key in strip.carried if key in rows.slots]
        self._carried = [(strip.carried[key].in_numpy, rows.slots[key].array) for key in own]
        #: What the policy has written for the following row, and where the env, or its primer, looks for it.
        self._primed = [(strip.carried[key].in_numpy, rows.slots[key].array) for key in strip.layout.primed]
        self._outcomes = [(strip.outcomes[key].in_numpy, rows.slots[key].array) for key in strip.outcomes]
        self._write_carried = _RowWriter(self._carried)
        self._write_outcomes = _RowWriter(self._outcomes)

    def prepare(self) -> None:
        """Before a batch."""
        if self._is_current is not None and not self._is_current(self._pipeline):
            raise EnvError(
                "the transforms of this env were changed after the collector was made, whose batches have the keys of "
                "before; make another collector of it"
            )
        if hasattr(self._base, "prepare"):
            self._base.prepare()

    def settle(self) -> None:
        """After a batch."""
        if hasattr(self._base, "settle"):
            self._base.settle()

    def expect_resets(self) -> None:
        """Whoever steps will always reset the envs that are done. Transforms that drive the env may go on, though."""
        if hasattr(self._base, "expect_resets") and not self._drivers:
            self._base.expect_resets()

    def resume(self, row: int) -> None:
        """Go on from a row that was written by others: what was counted over an episode is in it."""
        shared = {id(array) for stage in self._stages for array in getattr(stage, "shared_rows", ())}
        for rows, value in self._carried:
            if id(value) not in shared:
                value[:] = rows[row]
        for flags in self._flags:
            flags[row + 1 :] = False
        for stage in self._stages:
            if hasattr(stage, "resume"):
                stage.resume()
        for memory in self._kept:
            memory[0] = memory[1]
        if hasattr(self._base, "resume"):  # what is counted further in
            self._base.resume(1)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        for action in self._actions:
            action.target[:] = action.rows[t]
            for function in action.functions:
                function()
        for written, value in self._primed:
            which: Any = slice(None) if env_ids is None else env_ids
            value[which] = written[t + 1, which]
        ended = self._base.step(0, env_ids)
        for driver, entry in self._drivers:
            driver.take(self._base, entry)
        for stage in self._steps:
            more = stage(env_ids)
            if self._drivers and self._rows.is_repeated:  # what ended before was repeated
                ended = np.flatnonzero(self._rows.terminated | self._rows.truncated).tolist() or None
                self._rows.is_repeated = False
            if more:
                ended = sorted({*(ended or ()), *more})
        if env_ids is None:
            self._write_carried(t + 1)
            self._write_outcomes(t)
        else:
            for target, value in self._carried:
                target[t + 1, env_ids] = value[env_ids]
            for target, value in self._outcomes:
                target[t, env_ids] = value[env_ids]
        for memory in self._kept:
            memory[0] = memory[1]
        if t + 1 in self._flagged:
            for flags in self._flags:
                flags[t + 1, slice(None) if env_ids is None else env_ids] = False
        if ended:
            self._end(t, ended)
        return ended

    def _end(self, t: int, ended: list[int]) -> None:
        self._flagged.add(t + 1)
        for flags, said in self._end_flags:
            flags[t + 1, ended, 0] = said[ended]
        if self._done is not None:
            self._done[t + 1, ended] = True
        self._strip.terminated[t, ended] = self._rows.terminated[ended]
        self._strip.truncated[t, ended] = self._rows.truncated[ended]
        self._rows.terminated[:] = False
        self._rows.truncated[:] = False
        self._rows.ended = True

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        self._base.reset(1, env_ids, **kwargs)
        for target, value in self._told:
            target[env_ids] = value[env_ids]
        for memory in self._kept:
            memory[0] = memory[1]
        for driver, entry in self._drivers:
            driver.take(self._base, entry)
        if self._firsts:
            self._reset_among_firsts(env_ids)
        else:
            for stage in self._resets:
                stage(env_ids)
        self._rows.ended = False
        for target, value in self._carried:
            target[row, env_ids] = value[env_ids]
        for flags in self._flags:
            flags[row, env_ids] = False

    def _reset_among_firsts(self, env_ids: list[int]) -> None:
        """A transform over all envs sees, beside those that were reset, what the others' episodes began with."""
        current = [value.copy() for value, _ in self._firsts]
        for value, first in self._firsts:
            first[env_ids] = value[env_ids]
            value[:] = first
        for stage in self._resets:
            stage(env_ids)
        for (value, _), was in zip(self._firsts, current, strict=True):
            value[:] = was
