"""Envs in several hosts, as their owner sees them: groups that get orders and become ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from swath.errors import EnvClosed, EnvError, WorkerHangs
from swath.process.channel import unpack
from swath.process.seeding import draw_base_seed
from swath.process.semaphores import Semaphore, ThreadSemaphore, Watch
from swath.process.start import StartMethod
from swath.rollout.layout import Field, Layout
from swath.stepping.env_hosts import Hosts, ProcessHosts, ThreadHosts
from swath.stepping.shared_steps import BUSY, FAILED, IDLE, SharedSteps, SharedStepsPlan, encode
from swath.stepping.spec import EnvDescription, EnvWorkerSpec
from swath.workers.layout import WorkerLayout

if TYPE_CHECKING:
    from swath.envs.base import EnvBase

#: How often to look whether all hosts are alive while waiting for them.
_SECONDS_BETWEEN_LOOKS = 0.2
#: How often to look whether a step is done before going to sleep: for a millisecond at most.
_TRIES = 1000


@dataclass(frozen=True)
class Group:
    """Envs that are stepped together."""

    number: int
    worker: int
    #: Among the rows of all envs.
    rows: range
    #: Among the rows of its worker.
    local: range


class EnvCrew:
    """Hosts, and the stages on which their envs are stepped.

    Args:
        factories, env_kwargs: of each env.
        layout: which env is in which host.
        make_env: makes one of a factory and its keywords, beside those that are there.
        join: several envs as one, stepped together.
        threads: whether hosts are threads, not processes.
        max_steps: truncate episodes after so many steps.
        step_timeout_s: how long a step may take; None for ever.
        num_threads: for torch, in each process.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        env_kwargs: Sequence[Mapping[str, Any]],
        layout: WorkerLayout,
        *,
        make_env: Callable[[Any, Mapping[str, Any], Sequence[EnvBase]], EnvBase],
        join: Callable[[Sequence[EnvBase]], EnvBase],
        threads: bool = False,
        method: StartMethod = "forkserver",
        max_steps: int | None = None,
        step_timeout_s: float | None = None,
        num_threads: int = 1,
    ) -> None:
        base_seed = draw_base_seed()
        specs = [
            EnvWorkerSpec(
                worker=worker,
                members=members,
                factories=[factories[i] for i in members],
                env_kwargs=[env_kwargs[i] for i in members],
                make_env=make_env,
                join=join,
                max_steps=max_steps,
                base_seed=base_seed,
                num_threads=num_threads,
            )
            for worker, members in enumerate(layout.members)
        ]
        if step_timeout_s is not None and not step_timeout_s > 0:
            raise ValueError(f"step_timeout_s must be a number above 0, got {step_timeout_s!r}")
        hosts: Hosts = ThreadHosts(specs) if threads else ProcessHosts(specs, method)
        # Threads of this process cannot run while it looks.
        self._take(hosts, layout, step_timeout_s, 0 if threads else _TRIES)

    @classmethod
    def around(cls, hosts: Hosts, layout: WorkerLayout) -> EnvCrew:
        """Of hosts that were made already."""
        crew = cls.__new__(cls)
        crew._take(hosts, layout, None, _TRIES)
        return crew

    def _take(self, hosts: Hosts, layout: WorkerLayout, step_timeout_s: float | None, tries: int) -> None:
        self.worker_layout = layout
        self._closed = False
        self._step_timeout_s = step_timeout_s
        self._tries = tries
        self.hosts = hosts
        try:
            self.about = self._agree(self.hosts.descriptions)
        except BaseException:
            self.shutdown()
            raise
        self.rows_per_env = self.about.env_size.numel()
        self.num_rows = layout.num_members * self.rows_per_env
        #: Counts the memories that there were: who has views of an old one has to make new ones.
        self.generation = 0
        #: Envs that their worker has reset already, and that nobody has asked to reset yet.
        self.reset_ahead: set[int] = set()
        self._laid_out: tuple[Any, ...] | None = None
        self._ordered_at: dict[int, float] = {}
        self._next_look_at = 0.0
        self.groups: list[Group] = []
        self.stages: list[SharedSteps] = []
        self.ready: Semaphore | ThreadSemaphore
        self.orders: Any
        self.outcomes: Any

    def _agree(self, descriptions: Sequence[EnvDescription]) -> EnvDescription:
        first = descriptions[0]
        for worker, other in enumerate(descriptions):
            if other.env_size != first.env_size or _of_one_env(other) != _of_one_env(first):
                raise EnvError(
                    f"the envs of {self.hosts.who(worker)} have another layout than those of {self.hosts.who(0)}: "
                    f"{other.env} against {first.env}; envs of one batch must have the same keys, shapes and dtypes"
                )
        return first

    # -- stages ----------------------------------------------------------------------------------------------------

    def is_laid_out(self, num_steps: int, actions: Mapping[Any, Field], envs_per_group: int | None) -> bool:
        return self._laid_out == (num_steps, tuple(actions.items()), envs_per_group)

    def lay_out(self, num_steps: int, actions: Mapping[Any, Field], envs_per_group: int | None = None) -> None:
        """Have stages for so many steps, with actions of these dtypes; the same ones again, if they fit."""
        if self.is_laid_out(num_steps, actions, envs_per_group):
            return
        self._laid_out = None
        layouts = [description.layout.in_main_memory() for description in self.hosts.descriptions]
        layouts = [
            replace(layout, outputs=tuple(replace(actions[f.key], device=f.device) for f in layout.outputs))
            for layout in layouts
        ]
        self.groups = self._make_groups(envs_per_group)
        plans: list[SharedStepsPlan] = []
        offset = SharedStepsPlan.header_bytes(len(self.groups))
        for worker, layout in enumerate(layouts):
            own = [group for group in self.groups if group.worker == worker]
            plans.append(
                SharedStepsPlan(layout, num_steps, tuple(g.local for g in own), own[0].number, len(self.groups), offset)
            )
            offset = plans[-1].end
        memory, self.ready = self.hosts.set_shared_steps(plans, offset)
        self.stages = [SharedSteps(memory, plan, self.ready) for plan in plans]
        first = self.stages[0]
        self.orders, self.outcomes = first.orders, first.outcomes
        self._watch = Watch(self.ready, self._tries)
        self._go = self.hosts.go
        self._worker_of = [group.worker for group in self.groups]
        self.generation += 1
        self._laid_out = num_steps, tuple(actions.items()), envs_per_group

    def forget_stages(self) -> None:
        """Hosts have another memory since: the next ``lay_out`` gives them a new one."""
        self._laid_out = None

    def _make_groups(self, envs_per_group: int | None) -> list[Group]:
        groups: list[Group] = []
        each = self.rows_per_env
        for worker, members in enumerate(self.worker_layout.members):
            size = len(members) if envs_per_group is None else envs_per_group
            for start in range(members.start, members.stop, size):
                stop = min(start + size, members.stop)
                local = range((start - members.start) * each, (stop - members.start) * each)
                groups.append(Group(len(groups), worker, range(start * each, stop * each), local))
        return groups

    # -- orders ----------------------------------------------------------------------------------------------------

    def order(self, group: int, operation: int, row: int) -> None:
        self.outcomes[group] = BUSY
        self.orders[group] = encode(operation, row)
        if self._step_timeout_s is not None:
            self._ordered_at[group] = time.monotonic()
        self._go[self._worker_of[group]].release()

    def wait(self) -> None:
        """Wait until one more order was followed, or something has happened."""
        while not self._watch.wait(_SECONDS_BETWEEN_LOOKS):
            self._look()

    def take_posts(self, count: int) -> None:
        """Lower the semaphore for what was found to be ready without waiting for it, so that posts do not pile up."""
        for _ in range(count):
            self.ready.is_up()

    def watch(self) -> None:
        """Now and then, look whether all are alive and get on: for who is always busy with those that are."""
        if time.monotonic() >= self._next_look_at:
            self._look()

    def _look(self) -> None:
        self._next_look_at = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        if self._closed:  # by another thread
            raise EnvClosed("the envs were closed while they were stepped; make new ones")
        self.hosts.check()
        self._look_for_hangs()

    def wait_until(self, deadline: float) -> bool:
        """As ``wait``, but not longer than until then; whether an order was followed."""
        while True:
            left = deadline - time.monotonic()
            if self.ready.acquire(min(max(left, 0.0), _SECONDS_BETWEEN_LOOKS)):
                return True
            if left <= 0:
                return False
            self._look()

    def _look_for_hangs(self) -> None:
        if self._step_timeout_s is None:
            return
        now = time.monotonic()
        for group in self.groups:
            took_s = now - self._ordered_at.get(group.number, now)
            if self.outcomes[group.number] == BUSY and took_s > self._step_timeout_s:
                who = self.hosts.who(group.worker)
                self.hosts.end(group.worker)
                raise WorkerHangs(
                    f"{who} is in one step for {took_s:.1f} s, longer than step_timeout_s={self._step_timeout_s:g}; it "
                    "was ended. If the env needs longer, raise step_timeout_s",
                    group.worker,
                )

    def raise_failures(self, groups: Sequence[Group] | None = None) -> None:
        """Raise what an env raised, if one did."""
        for group in self.groups if groups is None else groups:
            if self.outcomes[group.number] == FAILED:
                self._raise_failure(group)

    def _raise_failure(self, group: Group) -> NoReturn:
        self.outcomes[group.number] = IDLE
        (packed,) = self.hosts.call("take_error", group.number, workers=[group.worker])
        raise unpack(packed, group.worker, self.hosts.who(group.worker))

    def drain(self) -> None:
        """Wait for every order that was given, whatever came of it."""
        while any(outcome == BUSY for outcome in self.outcomes):
            self.wait()

    def shutdown(self, timeout_s: float | None = None) -> None:
        self._closed = True
        self.hosts.shutdown(timeout_s)


def _of_one_env(about: EnvDescription) -> Layout:
    """A host's layout without its number of envs."""
    return replace(about.layout, batch_size=torch.Size())
