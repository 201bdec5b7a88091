"""Hosts (``lowered_host.py``) in the processes of a ``ParallelEnv`` of TorchRL, as their owner sees them."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from swath.envs.lowered_host import CHANGED, NAME, HostSignals, HostSignalsPlan, Installer, LoweredDescription
from swath.envs.recognising import NotLowered
from swath.envs.torchrl_internals import processes_of
from swath.errors import EnvError, WorkerDied, WorkerHangs
from swath.process.channel import unpack
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.memory import SharedMemory
from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore, ThreadSemaphore
from swath.process.supervise import how_it_ended
from swath.stepping.env_hosts import NewSharedSteps
from swath.stepping.shared_steps import SharedStepsPlan

#: What may be in a process; the rest is found out there.
_KINDS = ("GymEnv", "GymWrapper", "TransformedEnv")
#: Commands of TorchRL's whose arguments and results are in its buffers, to which it has written before it sends them.
_USE_BUFFERS = ("step", "step_and_maybe_reset", "reset")
#: After these, nothing comes back through the pipe.
_WITHOUT_ANSWER = (*_USE_BUFFERS, "load_state_dict", "init", "close")
#: How often to look whether all processes are alive while waiting for them.
_SECONDS_BETWEEN_LOOKS = 0.2
#: How long the step under way may take when a process is wanted back. Who closes the env goes on without it then.
_SECONDS_TO_LEAVE = 10.0


class _Origin:
    """Becomes, in the process that it is sent to, the file that swath would be imported from there."""

    def __reduce__(self) -> Any:
        return getattr, (_Found(), "origin", None)


class _Found:
    def __reduce__(self) -> Any:
        return importlib.util.find_spec, ("swath",)


class GuardedPipe(Connection):
    """The pipe to a process, for TorchRL: before it is used, hosts that serve give the processes back.

    What TorchRL's pipes are made to be, so that whoever got them before is guarded as well: parts of a ParallelEnv
    (``env[0]``) have the same ones.
    """

    hosts: TheirHosts

    @classmethod
    def guard(cls, pipe: Any, hosts: TheirHosts) -> None:
        pipe.__class__ = cls
        pipe.hosts = hosts

    def send(self, obj: Any) -> None:
        self.hosts.lend(obj[0])
        try:
            super().send(obj)
        except BaseException:
            self.hosts.take_back()
            raise

    def recv(self) -> Any:
        try:
            answer = super().recv()
        except BaseException:  # whoever is interrupted, or finds a process gone, reads no other answer
            self.hosts.take_back(everything=True)
            raise
        self.hosts.take_back()
        return answer

    def close(self) -> None:
        self.hosts.forget()
        super().close()


class TheirHosts:
    """Hosts in the processes of a ParallelEnv; see ``Hosts`` in ``workers/env_hosts.py``."""

    def __init__(self, guest: Any) -> None:
        self._processes: Sequence[Any] = processes_of(guest)
        self._pipes: Sequence[Any] = list(guest.parent_channels)
        self.num_workers = len(self._pipes)
        #: Of whoever uses the processes: steps, and TorchRL's own commands, from whichever thread.
        self.lock = threading.RLock()
        #: The thread that has asked something through TorchRL's pipes, and how many answers it waits for.
        self._asker: int | None = None
        self._num_asked = 0
        #: Who is in the middle of a batch: TorchRL's buffers are not up to date.
        self.collecting: set[Any] = set()
        self.is_ahead = False
        self.is_serving = False
        self._hangs: WorkerHangs | None = None
        #: TorchRL's, in which its processes find where they are.
        self.buffers: Any = None
        #: Called when they have left: TorchRL's buffers get what was done without them. Returns where the envs are.
        self.when_left: Callable[[], Any] | None = None
        self.last_row: Any = None
        self.descriptions: list[Any] = []
        self._memory = SharedMemory(HostSignalsPlan.num_bytes(self.num_workers))
        self._signals = HostSignals(self._memory.bytes_, self.num_workers, initial=0)
        self.go: Sequence[Semaphore | ThreadSemaphore] = self._signals.go
        self._stage: SharedMemory | None = None
        #: Whose rows are in the stage: the same envs may be given to several collectors.
        self.holder: Any = None
        self._move_in()
        for pipe in self._pipes:
            GuardedPipe.guard(pipe, self)

    def forget(self) -> None:
        """The env was closed: let go of its memory."""
        self.is_serving = False
        self.when_left = self.holder = self.buffers = self._stage = None
        self.collecting.clear()
        self._memory.close_descriptor()

    def are_of(self, guest: Any) -> bool:
        """Whether these are the processes that the env has now."""
        return not guest.is_closed and processes_of(guest) is self._processes

    def _move_in(self) -> None:
        names, modules = self._ask_all(("__class__", "__name__")), self._ask_all(("__class__", "__module__"))
        for name, module in zip(names, modules, strict=True):
            if name not in _KINDS or not module.startswith("torchrl.envs."):
                raise NotLowered(f"ParallelEnv of {name} is not known")
        origins = self._ask_all(("__dict__", "get"), f"{NAME}?", _Origin())
        if any(origin != sys.modules["swath"].__file__ for origin in origins):
            raise NotLowered("its processes cannot import this swath")
        assert self._memory.descriptor is not None
        plan = HostSignalsPlan(os.getpid(), self._memory.descriptor, self.num_workers)
        for worker in range(self.num_workers):
            self._send(worker, "apply", Installer(plan, worker))
        for worker in range(self.num_workers):
            self._receive(worker)

    # -- TorchRL's pipes -------------------------------------------------------------------------------------------

    def _send(self, worker: int, command: Any, *args: Any) -> None:
        try:
            Connection.send(self._pipes[worker], (command, (list(args), {})))
        except OSError:
            self.check()
            raise

    def _receive(self, worker: int, deadline: float = math.inf) -> Any:
        pipe = self._pipes[worker]
        try:
            while not pipe.poll(_SECONDS_BETWEEN_LOOKS):
                self.check()
                if time.monotonic() > deadline:
                    raise WorkerHangs(f"{self.who(worker)} is in a step that does not end; close the env", worker)
            return Connection.recv(pipe)[1]
        except (EOFError, OSError) as error:
            self._raise_end(worker, error)

    def _ask_all(self, command: Any, *args: Any) -> list[Any]:
        for worker in range(self.num_workers):
            self._send(worker, command, *args)
        return [self._receive(worker) for worker in range(self.num_workers)]

    def describe(self) -> list[LoweredDescription]:
        self.descriptions = self.call("describe")
        for description in self.descriptions:
            if isinstance(description, str):
                raise NotLowered(description)
        return self.descriptions

    # -- serving ---------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def enter(self) -> bool:
        """Let hosts serve; whether the envs are what they were."""
        with self.lock:
            if self.is_serving:
                return True
            if self._hangs is not None:
                raise self._hangs
            for worker in range(self.num_workers):
                self._signals.leaves[worker][0] = 0
                self._send(worker, NAME, "serve")
            for _ in range(self.num_workers):
                while not self._signals.begun.acquire(_SECONDS_BETWEEN_LOOKS):
                    self.check()
            self.is_serving = True
            if any(state[0] == CHANGED for state in self._signals.states):
                self.leave()
                return False
            return True

    @ctrl_c_waits
    def leave(self) -> None:
        """Give the processes back to TorchRL."""
        with self.lock:
            if not self.is_serving:
                return
            self.is_serving = False
            for worker in range(self.num_workers):
                self._signals.leaves[worker][0] = 1
                self.go[worker].release()
            deadline = time.monotonic() + _SECONDS_TO_LEAVE
            for worker in range(self.num_workers):
                try:
                    self._receive(worker, deadline)
                except WorkerDied:  # whoever wants it next finds out
                    pass
                except WorkerHangs as error:
                    self._hangs = error
            self.settle()

    def settle(self) -> None:
        """Have TorchRL's buffers say where the envs are."""
        with self.lock:
            if self.is_ahead and self.when_left is not None:
                self.last_row = self.when_left()
            self.is_ahead = False

    # -- TorchRL's own commands ------------------------------------------------------------------------------------

    def lend(self, command: Any) -> None:
        """Give the processes back for a command; if it has an answer, until ``take_back``."""
        if command in _USE_BUFFERS and self.collecting:
            raise EnvError(
                f"TorchRL's ParallelEnv was told to {command} in the middle of a batch that a collector steps it for;"
                " do it between two batches, or collect from GuestEnv(env, lower=False)"
            )
        self.lock.acquire()
        try:
            self.leave()
        except BaseException:
            self.lock.release()
            raise
        if command in _WITHOUT_ANSWER:
            self.lock.release()
        else:
            self._asker = threading.get_ident()
            self._num_asked += 1

    def take_back(self, everything: bool = False) -> None:
        """An answer was read, or there will be none."""
        if self._asker != threading.get_ident():
            return
        for _ in range(self._num_asked if everything else 1):
            self._num_asked -= 1
            if not self._num_asked:
                self._asker = None
            self.lock.release()

    # -- as any hosts ----------------------------------------------------------------------------------------------

    def set_shared_steps(self, plans: Sequence[SharedStepsPlan], num_bytes: int) -> NewSharedSteps:
        memory = SharedMemory(num_bytes)
        ready = Semaphore(memory.bytes_[:SEMAPHORE_BYTES], initial=0)
        with self.lock:
            self.leave()
            for worker, plan in enumerate(plans):
                self._send(worker, NAME, "open_stage", os.getpid(), memory.descriptor, num_bytes, plan)
            self._results(range(self.num_workers))
        memory.close_descriptor()
        self._stage = memory
        return memory.bytes_, ready

    def call(self, name: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        chosen = range(self.num_workers) if workers is None else workers
        with self.lock:
            self.leave()
            if self._hangs is not None:
                raise self._hangs
            for worker in chosen:
                self._send(worker, NAME, name, *args)
            return self._results(chosen)

    def _results(self, workers: Sequence[int]) -> list[Any]:
        answers = [self._receive(worker) for worker in workers]
        for worker, (returned, value) in zip(workers, answers, strict=True):
            if not returned:
                raise unpack(value, worker, self.who(worker))
        return [value for _, value in answers]

    def check(self) -> None:
        for worker, process in enumerate(self._processes):
            if not _is_alive(process):
                self._raise_end(worker, None)

    def _raise_end(self, worker: int, cause: BaseException | None) -> NoReturn:
        self.is_serving = False
        process = self._processes[worker]
        with suppress(ValueError):
            process.join(1.0)
        with suppress(ValueError):
            raise WorkerDied(
                f"{self.who(worker)} {how_it_ended(process.exitcode)}; its env is gone with it: make a new ParallelEnv",
                worker,
            ) from cause
        raise WorkerDied(f"{self.who(worker)} was closed while its env was stepped", worker) from cause

    def end(self, worker: int) -> None:
        self._processes[worker].kill()

    def who(self, worker: int) -> str:
        return f"env {worker} of TorchRL's ParallelEnv, in its process"

    def shutdown(self, timeout_s: float | None = None) -> None:
        """The processes are TorchRL's, and its ``close`` ends them."""
        self.leave()


def _is_alive(process: Any) -> bool:
    try:
        return process.is_alive()
    except ValueError:  # it was closed
        return False
