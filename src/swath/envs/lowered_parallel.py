"""TorchRL's ``ParallelEnv``, lowered: its own processes step their envs on rows, in memory that this process sees.

Nothing is moved: the envs stay in the processes that TorchRL started, and beside each is a host (``lowered_host.py``)
that is asked through TorchRL's pipes. While hosts serve, steps are ordered through shared memory; when anybody uses the
``ParallelEnv`` itself (its seeds, attributes, steps), the processes are given back to it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch

from swath import platforms
from swath.envs.lowered_hosts import TheirHosts
from swath.envs.parallel import ParallelStepper
from swath.envs.recognising import NotLowered
from swath.envs.rows import RowEnv, specs_of_all
from swath.envs.torchrl_internals import gives_other_than_tensors, has_buffers, owns_processes, require_known_processes
from swath.errors import EnvError
from swath.keys import Key
from swath.rollout.layout import Layout
from swath.rollout.strip import Strip
from swath.stepping.env_crew import EnvCrew
from swath.stepping.shared_steps import FAILED, RESET, STEP
from swath.workers.layout import WorkerLayout

#: Of each ParallelEnv that was started.
_HOSTS: weakref.WeakKeyDictionary[Any, TheirHosts] = weakref.WeakKeyDictionary()


def _close_at_exit(of: weakref.ref[Any]) -> None:
    """When the process ends, Python waits for those it has started, and these wait for a command: for ever."""
    guest = of()
    if guest is not None and not guest.is_closed:
        with suppress(Exception):
            guest.close()


def lower_parallel(guest: Any) -> LoweredParallelEnv:
    """Have hosts in the processes of a ParallelEnv, which is started if it was not; raises ``NotLowered``."""
    if not platforms.are_met(*platforms.STEPPING_WORKERS):
        raise NotLowered("envs in processes are not stepped on rows on this system")
    require_known_processes(guest)
    if not owns_processes(guest):
        raise NotLowered("it is a part of another ParallelEnv")
    if not has_buffers(guest):
        raise NotLowered("it has no buffers (use_buffers=False)")
    if guest.share_individual_td:
        raise NotLowered("each of its envs has a TensorDict of its own (share_individual_td)")
    if guest.is_closed:
        guest.start()
    if gives_other_than_tensors(guest):
        raise NotLowered("it gives what is no tensor")
    hosts = _HOSTS.get(guest)
    if hosts is None or not hosts.are_of(guest):
        hosts = _HOSTS[guest] = TheirHosts(guest)
        hosts.buffers = Buffers(guest)
        Finalize(guest, _close_at_exit, args=(weakref.ref(guest),), exitpriority=0)
    return LoweredParallelEnv(hosts)


class LoweredParallelEnv(RowEnv):
    """The envs of a ParallelEnv of TorchRL, stepped on rows in its processes."""

    is_given_actions_only = True
    #: Beside the envs that were reset, transforms see where the others are.
    shows_first_rows = False

    def __init__(self, hosts: TheirHosts) -> None:
        self.hosts = hosts
        descriptions = hosts.describe()
        about = self.about = descriptions[0]
        try:
            self._crew = EnvCrew.around(hosts, WorkerLayout.spread(hosts.num_workers, hosts.num_workers))
        except EnvError as error:
            raise NotLowered("its envs differ in their keys, shapes or dtypes") from error
        self.counted: dict[Key, str] = {key: who for each in descriptions for key, who in each.counted.items()}
        self.changes_actions = any(each.changes_actions for each in descriptions)
        self._plans = [each.plan for each in descriptions]
        super().__init__(batch_size=(hosts.num_workers,), device=about.device)
        self.full_specs = specs_of_all(about.specs, hosts.num_workers)
        #: Where another one of these has left the envs.
        self._left_at = hosts.last_row

    def plan(self) -> str:
        plans = self._plans
        same = all(plan == plans[0] for plan in plans)
        return f"in {len(plans)} processes of ParallelEnv, each: {plans[0] if same else '; '.join(plans)}"

    def row_layout(self) -> Layout:
        return self.layout_around(self.about.layout)

    @property
    def num_busy_processes(self) -> int:  # type: ignore[override]
        return self.hosts.num_workers

    def has_changed(self) -> bool:
        """Whether its user has changed what is in the processes."""
        return not self.hosts.enter()

    def bind_rows(self, strip: Strip) -> LoweredParallelStepper:
        stepper = LoweredParallelStepper(self, self._crew, strip, None)
        if self._left_at is not None:
            stepper.take(self._left_at)
            self.hosts.call("resume")
            self._left_at = None
        self.hold(stepper)
        return stepper

    def hold(self, stepper: LoweredParallelStepper) -> None:
        """Have the processes step these rows from now on."""
        hosts = self.hosts
        hosts.holder = self
        hosts.when_left = lambda: hosts.buffers.write(stepper)

    def _close(self) -> None:
        self.hosts.shutdown()


class Buffers:
    """The shared TensorDict of a ParallelEnv, from which its processes go on."""

    def __init__(self, guest: Any) -> None:
        parent = guest.shared_tensordict_parent
        self._roots: Mapping[Any, torch.Tensor] = dict(parent.exclude("next").items(True, True))
        self._nexts: Mapping[Any, torch.Tensor] = dict(parent.get("next").items(True, True))

    def write(self, stepper: LoweredParallelStepper) -> dict[Key, torch.Tensor]:
        """What they would have if TorchRL had made the steps; the row that the envs are at."""
        row = stepper.root()
        for leaves, values in ((self._roots, row), (self._nexts, stepper.outcome())):
            for key, value in values.items():
                leaf = leaves.get(key[0] if len(key) == 1 else key)
                if leaf is not None:
                    leaf.copy_(value.view_as(leaf))
        return row


class LoweredParallelStepper(ParallelStepper):
    """One env a process: some are stepped, or reset, by ordering it of those processes only."""

    _env: LoweredParallelEnv

    def __init__(self, env: LoweredParallelEnv, crew: EnvCrew, strip: Strip, envs_per_group: int | None) -> None:
        super().__init__(env, crew, strip, envs_per_group)  # type: ignore[arg-type]
        self._hosts = env.hosts
        self._has_stepped = False
        #: The envs that ended with the last step, with what it gave and said of them.
        self._ended: list[int] = []
        self._last: dict[Key, torch.Tensor] = {}

    def _enter(self) -> None:
        if self._hosts.holder is not self._env:
            self._take_over()
        if not self._hosts.enter():
            raise EnvError(
                "what is in the processes of TorchRL's ParallelEnv was changed in the middle of a batch; change it"
                " between two batches"
            )

    def _take_over(self) -> None:
        """Somebody else had the envs stepped since; where an episode is counted, it goes on from our rows."""
        self._crew.forget_stages()
        self._bind()
        self.take({key: column.tensor[1].clone() for key, column in self._strip.carried.items()})
        self._hosts.call("resume")
        self._env.hold(self)

    def prepare(self) -> None:
        """Before a batch: until it is settled, TorchRL's buffers are behind."""
        self._hosts.collecting.add(self)

    def settle(self) -> None:
        """After a batch: whoever uses the ParallelEnv itself finds it where it is."""
        self._hosts.collecting.discard(self)
        self._hosts.settle()

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        hosts = self._hosts
        with hosts.lock:
            if not hosts.is_serving or hosts.holder is not self._env:
                self._enter()
            hosts.is_ahead = True
            ended = super().step(t, env_ids)
            self._note(t, ended)  # before another thread, which asks the env something, has it written to its buffers
        if self not in hosts.collecting:
            hosts.settle()
        return ended

    def _note(self, t: int, ended: list[int] | None) -> None:
        self._has_stepped = True
        self._ended = ended or []
        if ended:
            strip = self._strip
            self._last = {key: column.tensor[t + 1, ended] for key, column in strip.carried.items()}
            for name, rows in (("terminated", strip.terminated), ("truncated", strip.truncated)):
                self._last[(name,)] = torch.from_numpy(rows[t, ended]).unsqueeze(-1)
            self._last[("done",)] = torch.ones(len(ended), 1, dtype=torch.bool)

    def reset(self, row: int, env_ids: list[int], *, list_of_kwargs: Any = None, **kwargs: Any) -> None:
        hosts = self._hosts
        with hosts.lock:
            if not hosts.is_serving or hosts.holder is not self._env:
                self._enter()
            hosts.is_ahead = True
            if len(env_ids) == self._strip.num_envs:
                self._forget_ends()
            super().reset(row, env_ids, list_of_kwargs=list_of_kwargs, **kwargs)
        if self not in hosts.collecting:
            hosts.settle()

    def _order(self, env_ids: Sequence[int], operation: int) -> None:
        for env_id in env_ids:
            self._crew.order(env_id, operation, 0)
        for _ in env_ids:
            self._crew.wait()
        if any(self._crew.outcomes[env_id] == FAILED for env_id in env_ids):
            self._fail()

    def _step_some(self, t: int, env_ids: list[int]) -> list[int] | None:
        self._let_finish()
        parts = [self._parts[env_id] for env_id in env_ids]
        for part in parts:
            for ours, theirs in part.actions:
                theirs[...] = ours[t, part.first : part.stop]
        self._order(env_ids, STEP)
        ended: list[int] = []
        for part in parts:
            for ours, _, theirs in part.carried:
                ours[t + 1, part.first : part.stop] = theirs
            for ours, theirs in part.outcomes:
                ours[t, part.first : part.stop] = theirs
            ended += self._end_some(part.own, t, part.first, [0])
        return ended or None

    def _reset_some(self, row: int, env_ids: list[int], list_of_kwargs: Any, kwargs: dict[str, Any]) -> None:
        if kwargs or list_of_kwargs is not None:
            for env_id in env_ids:
                own = {**kwargs, **(list_of_kwargs[env_id] if list_of_kwargs is not None else {})}
                self._hosts.call("reset", 0, [0], own, workers=[env_id])
        else:
            self._order(env_ids, RESET)
        self._copy(row, env_ids, theirs=0)

    # -- what TorchRL's buffers have ---------------------------------------------------------------------------------

    def root(self) -> dict[Key, torch.Tensor]:
        """Where the envs are, and the last actions."""
        strip = self._strip
        values = {key: column.tensor[1].clone() for key, column in strip.carried.items()}
        if self._has_stepped:
            values |= {key: column.tensor[0] for key, column in strip.outputs.items()}
        return values | self._no_flags()

    def outcome(self) -> dict[Key, torch.Tensor]:
        """What the last step gave, before any reset."""
        if not self._has_stepped:
            return {}
        strip = self._strip
        values = {key: column.tensor[1].clone() for key, column in strip.carried.items()} | self._no_flags()
        if self._ended:
            for key, last in self._last.items():
                values[key][self._ended] = last
        return values | {key: column.tensor[0] for key, column in strip.outcomes.items()}

    def _no_flags(self) -> dict[Key, torch.Tensor]:
        size = self._strip.num_envs, 1
        return {(name,): torch.zeros(size, dtype=torch.bool) for name in ("done", "terminated", "truncated")}

    def take(self, row: Mapping[Key, torch.Tensor]) -> None:
        """Go on from here; the processes find it in their stages."""
        for key, column in self._strip.carried.items():
            column.tensor[:] = row[key].view_as(column.tensor[0])
        for part in self._parts:
            for key, column in part.own.carried.items():
                column.tensor[0] = row[key][part.first : part.stop].view_as(column.tensor[0])
