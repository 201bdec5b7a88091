"""TransformedStepper: a pipeline on the rows of a strip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swath.envs.base import FLAGS
from swath.envs.transforms.pipeline import Pipeline
from swath.errors import EnvError
from swath.rollout.strip import Strip

FLAG_KEYS = tuple((flag,) for flag in FLAGS)


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
