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
from swath.process.memory import SharedMemory
from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore, ThreadSemaphore, semaphore_of_threads
from swath.process.start import StartMethod
from swath.stepping.shared_steps import SharedStepsPlan
from swath.stepping.spec import EnvDescription, EnvWorkerSpec
from swath.workers.handle import WorkerHandle
from swath.workers.pool import WorkerPool

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_CLOSE = 3.0


#: The memory, and what is raised in it when an order was followed.
NewSharedSteps = tuple[torch.Tensor, Semaphore | ThreadSemaphore]


class Hosts(Protocol):
    """All hosts of an owner; ``go[worker]`` is raised when there is an order for it."""

    descriptions: list[EnvDescription]
    go: Sequence[Semaphore | ThreadSemaphore]

    def set_shared_steps(self, plans: Sequence[SharedStepsPlan], num_bytes: int) -> NewSharedSteps:
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

    def __init__(self, specs: Sequence[EnvWorkerSpec], method: StartMethod) -> None:
        self.go: Sequence[Semaphore | ThreadSemaphore] = []
        self._memory: SharedMemory | None = None
        self.workers = WorkerPool(
            specs,
            method=method,
            receivers=lambda worker: {},
            started=lambda worker: None,
            on_wake=self._wake,
            closed=lambda: EnvClosed("the envs were closed while they were used; make new ones"),
        )
        self.descriptions: list[EnvDescription] = [handle.description for handle in self.workers.handles]  # type: ignore[misc]
        self.go = [Semaphore(handle.page.semaphore_memory) for handle in self.workers.handles]

    def _wake(self, handle: WorkerHandle) -> None:
        if self.go:
            self.go[handle.number].release()

    def set_shared_steps(self, plans: Sequence[SharedStepsPlan], num_bytes: int) -> NewSharedSteps:
        memory = SharedMemory(num_bytes)
        ready = Semaphore(memory.bytes_[:SEMAPHORE_BYTES], initial=0)
        for handle, plan in zip(self.workers.handles, plans, strict=True):
            with suppress(OSError):  # it died: found out by the next wait
                handle.channel.send_descriptor(memory.descriptor, "shared_steps", plan, num_bytes)  # type: ignore[arg-type]
            handle.page.waiting[0] = 1
            self._wake(handle)
        self.call("ping")  # all have it: the descriptor is needed no more
        memory.close_descriptor()
        self._memory = memory
        return memory.bytes_, ready

    def call(self, name: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        handles = None if workers is None else [self.workers.handles[worker] for worker in workers]
        return self.workers.call(name, *args, handles=handles)

    def check(self) -> None:
        for handle in self.workers.handles:
            if not handle.is_alive:
                self.workers.handle_end(handle)

    def end(self, worker: int) -> None:
        self.workers.handles[worker].kill()

    def who(self, worker: int) -> str:
        return self.workers.handles[worker].who

    def shutdown(self, timeout_s: float | None = None) -> None:
        self.workers.shutdown(timeout_s)


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

    def __init__(self, spec: EnvWorkerSpec) -> None:
        self.spec = spec
        self.go = semaphore_of_threads()
        self.questions: deque[_Question] = deque()
        self.host = spec.make_host()
        self.leaving = False
        self.thread = threading.Thread(target=self._run, name=f"swath-env-thread-{spec.worker}", daemon=True)

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

    def __init__(self, specs: Sequence[EnvWorkerSpec]) -> None:
        self._threads = [_HostThread(spec) for spec in specs]
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

    def set_shared_steps(self, plans: Sequence[SharedStepsPlan], num_bytes: int) -> NewSharedSteps:
        memory, ready = torch.zeros(num_bytes, dtype=torch.uint8), semaphore_of_threads()
        asked = [
            each.ask("set_shared_steps", memory, plan, ready) for each, plan in zip(self._threads, plans, strict=True)
        ]
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
                raise WorkerDied(f"{self.who(each.spec.worker)} has ended", each.spec.worker)

    def end(self, worker: int) -> None:
        """A thread cannot be ended from outside: it stays where it is until its env returns."""
        self._threads[worker].leaving = True

    def who(self, worker: int) -> str:
        return f"thread {worker} ({self._threads[worker].spec.shown})"

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
