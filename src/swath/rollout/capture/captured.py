"""Captured: when a policy is recorded, when its program is trusted, and when it is called as it is.

==============  =======================================================================================
warming up      called as it is; nothing is known yet. The last of these calls is looked at: can it be recorded?
recording       one real call, which is also the step's
on probation    program and call, on the same rows: the call counts, and both must be equal to the last bit
captured        the program; now and then both again, on one row
called          what cannot be captured, with the reason
==============  =======================================================================================

Each call of the policy is a step's call: none is made besides, so what it changes of itself is changed once a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from tensordict.nn.probabilistic import interaction_type

from swath.errors import CaptureError
from swath.rollout.capture.program import Program, Rows, program_of, random_states, restore
from swath.rollout.capture.recording import NotCapturable, record, scouted
from swath.rollout.capture.watch import Watch, watch
from swath.rollout.torch_internals import GLOBAL_HOOKS, modes, validates_arguments

#: Calls before the first recording: by then caches are filled, and what a first call alone does is done.
FIRST_WAIT = 4
LAST_WAIT = 4096
#: Rows on which program and call must agree before the program is trusted.
PROBATION = 3
#: The share of the time that goes to checking a trusted program.
CHECKING = 0.005
#: The share of the time that may go to looking whether anything has changed; judged after so many looks.
LOOKING = 0.25
MIN_LOOKS = 64
#: Ways through the policy's code that are recorded, one after the other.
MAX_PATHS = 4
#: A path that is left so many times, and for most of the time, is dropped.
MAX_TRIES = 16
MOST = 0.8


#: Hooks on every module.


@dataclass(frozen=True)
class Called:
    """A policy's call, to be captured."""

    #: What to watch, by the names that reasons use.
    roots: dict[str, Any]
    #: Row t of each input, as the policy is given it.
    inputs_at: Callable[[int], list[torch.Tensor]]
    #: The policy, on these: its outputs.
    call: Callable[[list[torch.Tensor]], list[Any]]
    #: Puts outputs into row t, and raises if they do not fit.
    write: Callable[[int, list[Any]], None]
    input_rows: Sequence[Rows]
    output_rows: Sequence[Rows]
    #: Those among both that the policy writes for its own next call.
    remembered: Sequence[Any]
    #: The quickest way that is known without a program.
    act: Callable[[int], None]

    def plainly(self, t: int) -> None:
        self.write(t, self.call(self.inputs_at(t)))


@dataclass(eq=False)
class _Path:
    """One way through the policy's code: what the values that it looks at make it do."""

    program: Program
    watch: Watch
    act: Callable[[int], None] = field(init=False)
    #: Rows on which program and call agreed.
    agreed: int = 0
    tried: int = 0

    @property
    def is_trusted(self) -> bool:
        return self.agreed >= PROBATION


class CapturedPolicy:
    """One policy on one strip; ``prepared()`` gives the function for the steps to come."""

    def __init__(self, called: Called) -> None:
        self._called = called
        #: In the order in which they are tried: a program that finds another value than it knows leaves the row to the
        #: next one, and the last one to the call.
        self._paths: list[_Path] = []
        self._max_paths = MAX_PATHS
        #: Emptied when the paths must not be taken any more, even by who has been given one for a batch.
        self._live = [True]
        self._ambient: tuple[Any, ...] = ()
        self._stage: Callable[[int], None] = self._warm_up
        self._wait = self._next_wait = FIRST_WAIT
        self._turn = 0
        #: The paths that are being compared with the call.
        self._compared: Sequence[_Path] = ()
        self._was_left = False
        #: Whether a call that no path fits was looked at: can it be recorded?
        self._is_scouted = False
        #: Calls since the last look, because no path fitted, and how long they took.
        self._bail_outs = 0
        self._bail_out_s = 0.0
        self._first_bail_out = 0.0
        self._since = self._checked = perf_counter()
        self._cost_s = 0.0
        self._num_looks, self._looking_s, self._looking_since = 0, 0.0, perf_counter()
        self.reason = "not captured yet"

    def prepared(self) -> Callable[[int], None]:
        """What to call in the steps to come: looks at all that may have changed since."""
        self._bail_outs, self._bail_out_s = 0, 0.0
        if self._paths:
            changed = self._what_changed()
            if changed is not None:
                self._drop(f"{changed} was changed")
            elif self._looking_is_all_it_does():
                self._give_up("to look before each batch at all that it may have read takes longer than it saves")
            elif self._stage == self._paths[0].act and perf_counter() - self._checked > self._cost_s / CHECKING:
                self._turn = (self._turn + 37) % 128
                self._wait = self._turn
                self._stage = self._until_checked
        is_settled = self._stage == self._called.act or (self._paths and self._stage == self._paths[0].act)
        return self._stage if is_settled else self._in_stages

    def describe(self) -> str:
        """How the policy is called, in words."""
        if not self._paths:
            return f"called as it is: {self.reason}"
        programs = [path.program for path in self._paths if path.is_trusted]
        if not programs:
            return "called as it is: what was captured is being compared with it"
        counts = " or ".join(str(program.num_operations) for program in programs)
        checks = max(len(program.statements) - program.num_operations for program in programs)
        return f"captured, {counts} operations" + (f", {checks} values looked at" if checks else "")

    def _in_stages(self, t: int) -> None:
        self._stage(t)

    def _what_changed(self) -> str | None:
        if self._ambient != ambient():
            return "the exploration type, autocast or another setting of torch"
        started = perf_counter()
        changed = next((changed for path in self._paths if (changed := path.watch.changed()) is not None), None)
        self._num_looks += 1
        self._looking_s += perf_counter() - started
        return changed

    def _looking_is_all_it_does(self) -> bool:
        """Whether a good part of the time goes to looking: many objects, and few steps between two looks."""
        if self._num_looks < MIN_LOOKS:
            return False
        now = perf_counter()
        is_most = self._looking_s > LOOKING * (now - self._looking_since)
        self._num_looks, self._looking_s, self._looking_since = 0, 0.0, now
        return is_most

    # -- stages -----------------------------------------------------------------------------------------------------

    def _warm_up(self, t: int) -> None:
        self._wait -= 1
        if self._wait > 0 or sys.getprofile() is not None:
            self._called.act(t)
            self._stage = self._warm_up if self._wait > 0 else self._first
            return
        refusals = scouted(functools.partial(self._called.plainly, t))
        self._stage = self._first
        if refusals:
            self._give_up(refusals[0])

    def _first(self, t: int) -> None:
        started = perf_counter()
        if sys.getprofile() is not None:  # there is one place for a profiler, and that of cProfile cannot be put back
            self.reason = "a profiler is active"
            self._called.act(t)
            return
        if not all(memory.is_there for memory in self._called.remembered):
            self._give_up("it does not always write what it reads at its next call")
            self._called.act(t)
            return
        try:
            self._record(t)
        except NotCapturable as error:
            self._give_up(str(error))
            return
        self._stage = self._on_trial
        self._cost_s = perf_counter() - started

    def _record(self, t: int) -> None:
        """The call of step t, as one more path."""
        called = self._called
        inputs = called.inputs_at(t)
        recording = record(functools.partial(called.call, inputs))
        called.write(t, recording.result)
        if recording.refusals:
            raise NotCapturable(recording.refusals[0])
        try:
            seen = watch(called.roots, recording)
            path = _Path(program_of(recording, inputs, recording.result, seen.tensor_ids), seen)
        except Exception as error:  # what was collected is right: it was called
            if isinstance(error, NotCapturable):
                raise
            raise NotCapturable(f"its operations cannot be repeated ({type(error).__name__}: {error})") from error
        self._ambient = ambient()
        leave = functools.partial(self._leave, path)
        path.act = path.program.bound(called.input_rows, called.output_rows, leave, self._live, seen.numbers)
        self._paths.append(path)

    def _on_trial(self, t: int) -> None:
        self._on_probation(self._paths[0], t)

    def _on_probation(self, path: _Path, t: int) -> None:
        path.tried += 1
        difference = self._compare(path.act, [path], t)
        if self._was_left:
            if path.tried > MAX_TRIES and path is self._paths[0]:
                self._give_up("what it does depends on values that are different in every step")
            self._beyond(path, t)
            return
        changed = self._what_changed()
        if changed is not None:
            self._give_up(f"its call changes {changed}")
        elif difference is not None:
            self._give_up(f"captured, it would give another {difference}")
        else:
            path.agreed += 1
            if path.is_trusted and not self._paths[0].is_trusted:
                self._paths.remove(path)
                self._paths.insert(0, path)
            if self._paths[0].is_trusted:
                self._since = self._checked = perf_counter()
                self._stage = self._paths[0].act

    def _until_checked(self, t: int) -> None:
        if self._wait > 0:
            self._wait -= 1
            self._paths[0].act(t)
            return
        started = perf_counter()
        self._stage = self._paths[0].act
        difference = self._compare(self._stage, self._paths, t)
        if self._was_left:
            self._beyond(self._paths[-1], t)
        elif difference is not None:
            ago = perf_counter() - self._checked
            raise CaptureError(
                f"the captured policy gives another {difference} than calling it does. Both were equal {ago:.0f} s "
                "ago; what was collected since may be wrong. The policy depends on something that cannot be seen in "
                "its code: collect with capture_policy=False"
            )
        self._checked = perf_counter()
        self._cost_s = self._checked - started

    # -- both ways --------------------------------------------------------------------------------------------------

    def _compare(self, act: Callable[[int], None], paths: Sequence[_Path], t: int) -> str | None:
        """Program and call on row t; the call's results stay. What is different, if anything is.

        If the program was left (``_was_left``), it is as if it had not run, and no call was made.
        """
        changes = [tensor for path in paths for tensor in path.program.changes]
        overwritten = [*changes, *(memory[t] for memory in self._called.remembered)]
        states, before = random_states(), [tensor.clone() for tensor in overwritten]
        self._was_left, self._compared = False, paths
        try:
            act(t)
        finally:
            self._compared = ()
        ours = [rows[t].clone() for rows in self._called.output_rows]
        ours += [tensor.clone() for tensor in changes]
        our_states = random_states()
        for tensor, value in zip(overwritten, before, strict=True):
            tensor.copy_(value)
        restore(states)
        if self._was_left:
            return None
        self._called.plainly(t)
        theirs = [*(rows[t] for rows in self._called.output_rows), *changes]
        if not all(map(_same_bits, ours, theirs)):
            return "result"
        return None if all(map(torch.equal, our_states, random_states())) else "random state"

    def _leave(self, path: _Path, t: int, where: str) -> None:
        """The path found another value than it knows."""
        following = self._after(path)
        is_next = following is not None and following.is_trusted and (not self._compared or following in self._compared)
        if following is not None and is_next:
            following.act(t)
        elif self._compared:
            self._was_left = True
        else:
            self._beyond(path, t, where)

    def _after(self, path: _Path) -> _Path | None:
        index = self._paths.index(path) + 1 if path in self._paths else len(self._paths)
        return self._paths[index] if index < len(self._paths) else None

    def _beyond(self, path: _Path, t: int, where: str = "") -> None:
        """A row that no path up to this one fits: the next one, a new one, or the call."""
        following = self._after(path)
        if following is not None:
            self._on_probation(following, t)
        elif 0 < len(self._paths) < self._max_paths and sys.getprofile() is None:
            self._one_more_path(t)
        else:
            self._call(t, where)
        changed = self._what_changed() if self._paths else None
        if changed is not None:  # on a way that it had not gone before
            self._drop(f"{changed} was changed")

    def _one_more_path(self, t: int) -> None:
        """As at first: a call is looked at, and the next one that is like it recorded."""
        if not self._is_scouted:
            self._is_scouted = True
            if scouted(functools.partial(self._called.plainly, t)):
                self._max_paths = len(self._paths)
            return
        self._is_scouted = False
        try:
            self._record(t)
        except NotCapturable:
            self._max_paths = len(self._paths)

    def _call(self, t: int, where: str) -> None:
        started = perf_counter()
        self._called.act(t)
        ended = perf_counter()
        if not self._bail_outs:
            self._first_bail_out = started
        self._bail_outs += 1
        self._bail_out_s += ended - started
        if self._bail_outs > MAX_TRIES and self._bail_out_s > MOST * (ended - self._first_bail_out) and self._paths:
            self._drop(f"it branches on a tensor's value ({where})")

    # -- ends -------------------------------------------------------------------------------------------------------

    def _drop(self, reason: str) -> None:
        """Call it as it is, and try again: soon if the program was used for long, later each time if not."""
        lasted = perf_counter() - self._since > 100 * self._cost_s
        self._next_wait = FIRST_WAIT if lasted else min(2 * self._next_wait, LAST_WAIT)
        self._wait = self._next_wait
        self._bail_outs, self._bail_out_s = 0, 0.0
        self._max_paths = MAX_PATHS
        self._leave_all()
        self._stage, self.reason = self._warm_up, reason

    def _give_up(self, reason: str) -> None:
        self._leave_all()
        self._stage, self.reason = self._called.act, reason

    def _leave_all(self) -> None:
        self._live.clear()
        self._paths, self._live = [], [True]
        self._is_scouted = False


def ambient() -> tuple[Any, ...]:
    """Settings of torch and tensordict that operations follow."""
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
        *modes(),
        interaction_type(),
        validates_arguments(),
        *map(tuple, GLOBAL_HOOKS),
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit: a NaN is equal to itself, and 0.0 is not -0.0."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))
