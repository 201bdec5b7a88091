"""What runs in a worker that only steps envs: no policy, and no torch code in the step of a Gymnasium env.

``EnvHost`` has the envs and follows orders, in whatever thread. ``EnvWorker`` is a host in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swath.paths import Parts, follow
from swath.process.channel import Channel, Packed, pack
from swath.process.memory import map_and_close
from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore, ThreadSemaphore, Watch
from swath.process.spent import Spent
from swath.rollout.boundaries import Stepper
from swath.stepping.shared_steps import ENDED, FAILED, READY, RESET, STEP_AND_RESET, SharedSteps, SharedStepsPlan
from swath.stepping.spec import EnvDescription, EnvWorkerSpec
from swath.timeline.recorder import Kind, Recorder, Stretch
from swath.workers.status_page import StatusPage

if TYPE_CHECKING:
    from swath.envs.base import EnvBase

#: How long a worker sleeps at most before it looks whether it is to leave.
_SECONDS_BETWEEN_LOOKS = 0.5
#: A turn is timed after so many.
_TURNS_BETWEEN_TIMED = 61
#: How often it looks for the next order before it sleeps: about as long as a small policy takes.
_TRIES = 200


class _StepLimit:
    """Counts the steps of each episode."""

    def __init__(self, num_envs: int, max_steps: int) -> None:
        self._max_steps = max_steps
        self._counts = np.zeros(num_envs, dtype=np.int64)

    def count(self, rows: range) -> list[int]:
        """A step was taken; the envs whose episode has become too long."""
        counts = self._counts[rows.start : rows.stop]
        counts += 1
        return [rows.start + int(late) for late in np.flatnonzero(counts >= self._max_steps)]

    def restart(self, env_ids: Sequence[int]) -> None:
        self._counts[list(env_ids)] = 0


class EnvHost:
    """Several envs, and the stage on which they are stepped."""

    def __init__(self, spec: EnvWorkerSpec, frames: Any = None) -> None:
        self._spec = spec
        #: A cell in which frames are counted.
        self._frames = [0] if frames is None else frames
        self._made: list[EnvBase] = []
        self.stage: SharedSteps | None = None
        self._stepper: Stepper
        self._limit: _StepLimit | None = None
        self._errors: dict[int, BaseException] = {}

    def build(self) -> EnvDescription:
        plan = self._spec
        plan.make_envs(self._made)
        first = self._made[0]
        max_steps = plan.max_steps
        limits = [max_steps is not None and env.limit_episodes(max_steps) for env in self._made]
        if all(limits):
            max_steps = None
        if max_steps is not None:
            for env in self._made:
                if "truncated" not in env.done_keys:
                    env.add_truncated_keys()
        self._env = plan.join(self._made)
        self._env.first_index = plan.members.start
        if max_steps is not None:
            self._limit = _StepLimit(self._env.batch_size.numel(), max_steps)
        layout = self._env.row_layout()
        return EnvDescription(
            env_size=first.batch_size,
            device=first.device,
            specs=first.full_specs,
            layout=layout,
            env=str(first),
            resets_single_envs=all(env.resets_single_envs for env in self._made),
            steps_stay_in_episodes=all(env.steps_stay_in_episodes for env in self._made),
        )

    def set_shared_steps(self, memory: torch.Tensor, plan: SharedStepsPlan, ready: Semaphore | ThreadSemaphore) -> None:
        before = self.stage
        self.stage = stage = SharedSteps(memory, plan, ready)
        if before is not None:  # where the envs are
            for key, column in stage.strip.carried.items():
                column.tensor[0].copy_(before.strip.carried[key].tensor[0])
        self._stepper = self._env.bind(stage.strip)
        self._columns = list(zip(stage.strip.carried.values(), stage.last, strict=True))
        everything = range(plan.layout.num_envs)
        # (number, its envs, what the stepper is given for them)
        self._groups = [
            (plan.first_group + i, rows, None if rows == everything else list(rows))
            for i, rows in enumerate(plan.groups)
        ]
        self._keeps_one_step = plan.num_steps == 1
        self._notice_changes()

    # -- orders ----------------------------------------------------------------------------------------------------

    def follow_orders(self) -> None:
        """Do what is ordered of any group."""
        stage = self.stage
        if stage is None:
            return
        orders = stage.orders
        for number, rows, env_ids in self._groups:
            order = orders[number]
            if order:
                orders[number] = 0
                stage.outcomes[number] = self._follow(number, rows, env_ids, order & 7, order >> 3)
                stage.ready.release()

    def _follow(self, number: int, rows: range, env_ids: list[int] | None, operation: int, row: int) -> int:
        try:
            if operation == RESET:
                self._stepper.reset(row, list(rows))
                if self._limit is not None:
                    self._limit.restart(rows)
                return READY
            ended = self._stepper.step(row, env_ids)
            self._frames[0] += len(rows)
            if self._limit is not None and (late := self._limit.count(rows)):
                self.stage.strip.truncated[row, late] = True  # type: ignore[union-attr]
                ended = sorted({*late, *(ended or ())})
            if ended is not None and operation == STEP_AND_RESET:
                self._put_aside(row, ended)
                self._stepper.reset(row + 1, ended)
                if self._limit is not None:
                    self._limit.restart(ended)
            if self._keeps_one_step and self._env.reads_roots:
                for column, _ in self._columns:
                    column.tensor[0, rows.start : rows.stop] = column.tensor[1, rows.start : rows.stop]
            return READY if ended is None else ENDED
        except BaseException as error:  # an env may call sys.exit
            self._errors[number] = error
            return FAILED

    def _put_aside(self, row: int, ended: list[int]) -> None:
        for column, last in self._columns:
            for env in ended:
                if column.array is not None and last.array is not None:
                    last.array[row, env] = column.array[row + 1, env]
                else:
                    last.tensor[row, env] = column.tensor[row + 1, env]

    # -- calls -----------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Answered when everything before it was done."""

    def take_error(self, number: int) -> Packed:
        """What went wrong in a group."""
        return pack(self._errors.pop(number))

    def reset(self, row: int, env_ids: list[int], kwargs: dict[str, Any]) -> None:
        self._stepper.reset(row, env_ids, **kwargs)
        if self._limit is not None:
            self._limit.restart(env_ids)

    def step(self, row: int, env_ids: list[int]) -> list[int] | None:
        """Step only some envs of a group."""
        return self._stepper.step(row, env_ids)

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        return self._env.set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        return self._env.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> None:
        self._env.load_state_dict(state, strict)
        self._notice_changes()

    def check_state_dict(self, state: dict[str, Any], strict: bool) -> None:
        self._env.check_state_dict(state, strict)

    def child_attributes(self, parts: Parts, path: str) -> tuple[bool, list[Any]]:
        """Whether a path leads to a method, and else to what in each env."""
        values = [follow(env, parts, path) for env in self._made]
        is_method = all(callable(value) and not isinstance(value, torch.nn.Module) for value in values)
        return (True, []) if is_method else (False, values)

    def call_children(self, parts: Parts, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        results = [follow(env, parts, path)(*args, **kwargs) for env in self._made]
        self._notice_changes()
        return results

    def _notice_changes(self) -> None:
        if self.stage is not None and hasattr(self._stepper, "prepare"):
            self._stepper.prepare()  # type: ignore[attr-defined]
            if hasattr(self._stepper, "settle"):  # here are no batches
                self._stepper.settle()  # type: ignore[attr-defined]

    def close(self) -> None:
        for env in self._made:
            with suppress(Exception):
                env.close(raise_if_closed=False)


class EnvWorker:
    """A host in a process: it sleeps until its semaphore is raised."""

    def __init__(self, channel: Channel, page: StatusPage, spec: EnvWorkerSpec) -> None:
        self._channel = channel
        self._page = page
        self.leaving = False
        #: Where to write who takes how long, while somebody wants to know.
        self._recorder: Recorder | None = None
        self._host = EnvHost(spec, page.cell("frames"))
        self._spent, self._waited_s = Spent(), 0.0

    def build(self) -> EnvDescription:
        description = self._host.build()
        self._go = Semaphore(self._page.semaphore_memory, initial=0)
        return description

    def connect(self, receivers: Any) -> None:
        """There is no policy here, so there are no weights."""

    def serve(self) -> None:
        host, page, go = self._host, self._page, Watch(self._go, _TRIES)
        turn = 0
        while not self.leaving:
            turn += 1
            if self._recorder is not None:
                self._serve_recorded(self._recorder, go)
            elif turn >= _TURNS_BETWEEN_TIMED:
                turn = 0
                self._serve_timed(go)
            elif go.wait(_SECONDS_BETWEEN_LOOKS):
                if page.waiting[0]:
                    self._read_messages()
                host.follow_orders()

    def _serve_timed(self, go: Watch) -> None:
        """A turn, with a clock: by some of them it is known how a worker spends its time."""
        started = time.monotonic()
        raised = go.wait(_SECONDS_BETWEEN_LOOKS)
        woken = time.monotonic()
        if raised and self._page.waiting[0]:
            self._read_messages()
        self._follow_timed(raised, woken - started)

    def _follow_timed(self, raised: bool, waited_s: float) -> None:
        spent = self._spent
        spent.begin()
        if raised:
            self._host.follow_orders()
        spent.end()
        self._waited_s += waited_s
        self._page.write(env_s=spent.busy_s, busy_s=spent.busy_s + self._waited_s, on_core=spent.on_core or 0.0)

    def _serve_recorded(self, recorder: Recorder, go: Watch) -> None:
        """As ``serve``, with a clock: how long orders are waited for, in stretches."""
        host, page = self._host, self._page
        stretch, before = Stretch(recorder, Kind.ORDERS), perf_counter()
        turn = 0
        while not self.leaving and self._recorder is recorder:
            raised = go.wait(_SECONDS_BETWEEN_LOOKS)
            woken = perf_counter()
            if raised and page.waiting[0]:
                self._read_messages()
            turn += 1
            if turn >= _TURNS_BETWEEN_TIMED:
                turn = 0
                self._follow_timed(raised, woken - before)
            elif raised:
                host.follow_orders()
            now = perf_counter()
            stretch.add(now, int(raised), x=woken - before)
            before = now
        stretch.end()

    def _on_trace(self, num_bytes: int) -> None:
        """Record what is done, in memory of the owner's."""
        self._recorder = Recorder(map_and_close(self._channel.receive_descriptor(), num_bytes))

    def _on_untrace(self) -> None:
        self._recorder = None

    def _read_messages(self) -> None:
        self._page.waiting[0] = 0  # before reading, so that nothing is missed
        while self._channel.has_message():
            kind, *arguments = self._channel.receive()
            getattr(self, f"_on_{kind}")(*arguments)

    def _on_shared_steps(self, plan: SharedStepsPlan, num_bytes: int) -> None:
        memory = map_and_close(self._channel.receive_descriptor(), num_bytes)
        self._host.set_shared_steps(memory, plan, Semaphore(memory[:SEMAPHORE_BYTES]))

    def _on_close(self) -> None:
        self.leaving = True

    def _on_call(self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._channel.answer(number, lambda: getattr(self._host, name)(*args, **kwargs))

    def leave(self) -> None:
        """After the step that is being taken; from another thread."""
        self.leaving = True
        self._page.waiting[0] = 1

    def close(self) -> None:
        self._host.close()
