"""Where env hosts run: in processes, or in threads of this one. Both are asked and watched in the same way."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from swath.errors import EnvClosed, WorkerDied
from swath.process.start import StartMethod
from swath.workers.fleet import Fleet, Member, has_ended
from swath.workers.memory import SharedMemory
from swath.workers.orders import EnvBlueprint, EnvDescription
from swath.workers.signals import SEMAPHORE_BYTES, Semaphore, ThreadSemaphore, semaphore_of_threads
from swath.workers.stage import StagePlan

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_CLOSE = 3.0


#: The memory, and what is raised in it when an order was followed.
NewStage = tuple[torch.Tensor, Semaphore | ThreadSemaphore]


class Hosts(Protocol):
    """All hosts of an owner; ``go[worker]`` is raised when there is an order for it."""

    descriptions: list[EnvDescription]
    go: Sequence[Semaphore | ThreadSemaphore]

    def set_stage(self, plans: Sequence[StagePlan], num_bytes: int) -> NewStage:
        """Give all hosts a new memory to step their envs in."""
        ...

    def call(self, name: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        """Call a method of hosts (all by default), at the same time; what they returned."""
        ...

    def check(self) -> None:
        """Raise if one has died."""
        ...

    def end(self, worker: int) -> None:
        """One that hangs is ended."""
        ...

    def who(self, worker: int) -> str: ...

    def shutdown(self, timeout_s: float | None = None) -> None: ...


class ProcessHosts:
    """Hosts in worker processes."""

    def __init__(self, blueprints: Sequence[EnvBlueprint], method: StartMethod) -> None:
        self.go: Sequence[Semaphore | ThreadSemaphore] = []
        self._memory: SharedMemory | None = None
        self.fleet = Fleet(
            blueprints,
            method=method,
            receivers=lambda worker: {},
            started=lambda worker: None,
            on_wake=self._wake,
            closed=lambda: EnvClosed("the envs were closed while they were used; make new ones"),
        )
        self.descriptions: list[EnvDescription] = [member.description for member in self.fleet.members]  # type: ignore[misc]
        self.go = [Semaphore(member.page.semaphore_memory) for member in self.fleet.members]

    def _wake(self, member: Member) -> None:
        if self.go:
            self.go[member.number].release()

    def set_stage(self, plans: Sequence[StagePlan], num_bytes: int) -> NewStage:
        memory = SharedMemory(num_bytes)
        ready = Semaphore(memory.bytes_[:SEMAPHORE_BYTES], initial=0)
        for member, plan in zip(self.fleet.members, plans, strict=True):
            with suppress(OSError):  # it died: found out by the next wait
                member.channel.send_descriptor(memory.descriptor, "stage", plan, num_bytes)  # type: ignore[arg-type]
            member.page.waiting[0] = 1
            self._wake(member)
        self.call("ping")  # all have it: the descriptor is needed no more
        memory.close_descriptor()
        self._memory = memory
        return memory.bytes_, ready

    def call(self, name: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        members = None if workers is None else [self.fleet.members[worker] for worker in workers]
        return self.fleet.call(name, *args, members=members)

    def check(self) -> None:
        for member in self.fleet.members:
            if has_ended(member):
                self.fleet.handle_end(member)

    def end(self, worker: int) -> None:
        self.fleet.kill(self.fleet.members[worker])

    def who(self, worker: int) -> str:
        return self.fleet.members[worker].who

    def shutdown(self, timeout_s: float | None = None) -> None:
        self.fleet.shutdown(timeout_s)


class _Question:
    """A call on its way to a thread."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.answered = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class _HostThread:
    """A host in a thread, which also makes and closes the envs: some may only be used by who made them."""

    def __init__(self, blueprint: EnvBlueprint) -> None:
        self.blueprint = blueprint
        self.go = semaphore_of_threads()
        self.questions: deque[_Question] = deque()
        self.host = blueprint.make_host()
        self.leaving = False
        self.thread = threading.Thread(target=self._run, name=f"swath-env-thread-{blueprint.worker}", daemon=True)

    def ask(self, name: str, *args: Any) -> _Question:
        question = _Question(name, args)
        self.questions.append(question)
        self.go.release()
        return question

    def _run(self) -> None:
        try:
            while not self.leaving:
                if self.go.acquire(_SECONDS_BETWEEN_LOOKS):
                    while self.questions:
                        self._answer(self.questions.popleft())
                    self.host.follow_orders()
        finally:
            self.host.close()

    def _answer(self, question: _Question) -> None:
        try:
            question.result = getattr(self.host, question.name)(*question.args)
        except Exception as error:
            question.error = error
        question.answered.set()


class ThreadHosts:
    """Hosts in threads of this process: for envs that wait for something outside, and for those that cannot leave."""

    def __init__(self, blueprints: Sequence[EnvBlueprint]) -> None:
        self._threads = [_HostThread(blueprint) for blueprint in blueprints]
        self._owner_pid = os.getpid()
        self.go: Sequence[Semaphore | ThreadSemaphore] = [each.go for each in self._threads]
        for each in self._threads:
            each.thread.start()
        # Whoever forgets to close: threads must not be kept by what they work for.
        self._leave = weakref.finalize(self, _leave, self._threads)
        try:
            self.descriptions: list[EnvDescription] = self.call("build")
        except BaseException:
            self.shutdown()
            raise

    def set_stage(self, plans: Sequence[StagePlan], num_bytes: int) -> NewStage:
        memory, ready = torch.zeros(num_bytes, dtype=torch.uint8), semaphore_of_threads()
        asked = [each.ask("set_stage", memory, plan, ready) for each, plan in zip(self._threads, plans, strict=True)]
        for question in asked:
            self._result(question)
        return memory, ready

    def call(self, name: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        chosen = self._threads if workers is None else [self._threads[worker] for worker in workers]
        return [self._result(question) for question in [each.ask(name, *args) for each in chosen]]

    def _result(self, question: _Question) -> Any:
        while not question.answered.wait(_SECONDS_BETWEEN_LOOKS):
            self.check()
        if question.error is not None:
            raise question.error
        return question.result

    def check(self) -> None:
        for each in self._threads:
            if not each.thread.is_alive():
                raise WorkerDied(f"{self.who(each.blueprint.worker)} has ended", each.blueprint.worker)

    def end(self, worker: int) -> None:
        """A thread cannot be ended from outside: it stays where it is until its env returns."""
        self._threads[worker].leaving = True

    def who(self, worker: int) -> str:
        members = self._threads[worker].blueprint.members
        envs = f"env {members.start}" if len(members) == 1 else f"envs {members.start} to {members.stop - 1}"
        return f"thread {worker} ({envs})"

    def shutdown(self, timeout_s: float | None = None) -> None:
        if self._owner_pid != os.getpid():
            return
        self._leave()
        deadline = time.monotonic() + (_SECONDS_TO_CLOSE if timeout_s is None else timeout_s)
        for each in self._threads:
            each.thread.join(max(0.0, deadline - time.monotonic()))


def _leave(threads: Sequence[_HostThread]) -> None:
    for each in threads:
        each.leaving = True
        each.go.release()
