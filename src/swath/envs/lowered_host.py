"""What runs in a process of TorchRL's ``ParallelEnv`` whose env is lowered: a host beside the env that is there.

The process stays TorchRL's. The host is called through its command loop, steps the env on rows while it serves, and
gives the process back when its owner wants to use it otherwise.
"""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from swath.envs.guest import is_guest
from swath.envs.lowering import changes_actions, counted_in, lowered
from swath.envs.lowering_watch import Watch
from swath.envs.recognising import NotLowered
from swath.process.channel import pack
from swath.process.memory import map_of_process
from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore
from swath.process.semaphores import Watch as Lookout
from swath.stepping.env_worker import EnvHost
from swath.stepping.shared_steps import RESET, SharedStepsPlan
from swath.stepping.spec import EnvDescription

#: Under which the env in a process has its host.
NAME = "swath_host"
#: What a host says when it begins to serve: that the env is what it was, or that its user has changed it.
SERVING, CHANGED = 1, 2

#: How often a host looks for the next order before it sleeps; how long it sleeps before it looks for its owner.
_TRIES = 200
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class HostSignalsPlan:
    """Where the words are that an owner and all its hosts share."""

    pid: int
    descriptor: int
    num_workers: int

    @staticmethod
    def num_bytes(num_workers: int) -> int:
        return SEMAPHORE_BYTES * (1 + 2 * num_workers)

    def open(self) -> torch.Tensor:
        return map_of_process(self.pid, self.descriptor, self.num_bytes(self.num_workers))


class HostSignals:
    """Those words: a semaphore that hosts raise when they begin to serve, and for each host what is below."""

    def __init__(self, memory: torch.Tensor, num_workers: int, initial: int | None = None) -> None:
        def piece(number: int) -> torch.Tensor:
            return memory[number * SEMAPHORE_BYTES : (number + 1) * SEMAPHORE_BYTES]

        self.begun = Semaphore(piece(0), initial)
        #: Raised when there is an order.
        self.go = [Semaphore(piece(1 + 2 * worker), initial) for worker in range(num_workers)]
        words = [memoryview(piece(2 + 2 * worker).numpy()) for worker in range(num_workers)]  # type: ignore[arg-type]
        #: What the host said when it began to serve.
        self.states = [word[:1] for word in words]
        #: Whether it is to stop.
        self.leaves = [word[1:2] for word in words]


@dataclass(frozen=True)
class LoweredDescription(EnvDescription):
    """What a host says of its env."""

    plan: str = ""
    #: Keys with which an episode is counted, and by whom.
    counted: Any = None
    changes_actions: bool = False


class Installer:
    """Given to an env's ``apply`` in its process: puts a host beside it."""

    def __init__(self, plan: HostSignalsPlan, worker: int) -> None:
        self._plan = plan
        self._worker = worker
        self._last: Any = None

    def __call__(self, module: Any) -> None:
        if not is_guest(module):
            return
        if self._last is not None:  # an env in this one, which comes later
            del vars(self._last)[NAME]
        self._last = module
        vars(module)[NAME] = LoweredHost(module, self._plan, self._worker)
        # The env is what ``apply`` returns, and would be sent.
        ForkingPickler.register(type(module), _without_the_env_once)


def _without_the_env_once(env: Any) -> Any:
    host = vars(env).get(NAME)
    if isinstance(host, LoweredHost) and host.is_new:
        host.is_new = False
        return bool, ()
    return env.__reduce_ex__(4)


class LoweredHost(EnvHost):
    """Steps an env of TorchRL on rows, in the process and the thread where it is."""

    def __init__(self, guest: Any, plan: HostSignalsPlan, worker: int) -> None:
        super().__init__(None)  # type: ignore[arg-type]  (the env was made already)
        self.is_new = True
        self._guest = guest
        self._plan = plan
        self._worker = worker
        self._signals: HostSignals | None = None
        self._watch: Watch | None = None
        self._was_bound = False
        self._was_reset = False

    def __reduce__(self) -> Any:
        return bool, ()  # a copy of the env has no host

    def __call__(self, name: str, *args: Any) -> tuple[bool, Any]:
        """Call a method; whether it returned, and what, or what it raised: that must not end the process."""
        try:
            return True, getattr(self, name)(*args)
        except BaseException as error:
            return False, pack(error)

    # -- calls -----------------------------------------------------------------------------------------------------

    def describe(self) -> LoweredDescription | str:
        """Lower the env, as it is now; or why not."""
        try:
            if self._signals is None:
                self._signals = HostSignals(self._plan.open(), self._plan.num_workers)
            if self._guest.batch_size:
                raise NotLowered("its envs are batches")
            if self._watch is None or self._watch.has_changed():
                own, self._watch = lowered(self._guest)
                self._whole = own
                self._env = own if own.transform else own.base_env
                self._was_bound = self._was_reset = False
        except NotLowered as reason:
            return str(reason)
        whole, env = self._whole, self._env
        return LoweredDescription(
            env_size=env.batch_size,
            device=env.device,
            specs=env.full_specs,
            layout=env.row_layout(),
            env=repr(env),
            resets_single_envs=True,
            plan=env.plan(),
            counted=counted_in(whole),
            changes_actions=changes_actions(whole),
        )

    def open_stage(self, pid: int, descriptor: int, num_bytes: int, plan: SharedStepsPlan) -> None:
        memory = map_of_process(pid, descriptor, num_bytes)
        self.set_shared_steps(memory, plan, Semaphore(memory[:SEMAPHORE_BYTES]))
        if not self._was_bound:
            self._was_bound = True
            self._look_again()

    def reset(self, row: int, env_ids: list[int], kwargs: dict[str, Any]) -> None:
        super().reset(row, env_ids, kwargs)
        self._note_reset()

    def resume(self) -> None:
        """Go on from the first row of the stage, which others have written."""
        if hasattr(self._stepper, "resume"):
            self._stepper.resume(0)  # type: ignore[attr-defined]

    def _note_reset(self) -> None:
        if not self._was_reset:
            self._was_reset = True
            self._look_again()

    def _look_again(self) -> None:
        """What was lowered changes some of what is watched itself, when it is bound and reset for the first time."""
        assert self._watch is not None
        self._watch = self._watch.again()

    def _follow(self, number: int, rows: range, env_ids: list[int] | None, operation: int, row: int) -> int:
        outcome = super()._follow(number, rows, env_ids, operation, row)
        if operation == RESET:
            self._note_reset()
        return outcome

    # -- orders ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Follow orders until told to leave."""
        assert self._signals is not None
        assert self._watch is not None
        signals, worker = self._signals, self._worker
        ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the owner
        try:
            signals.states[worker][0] = CHANGED if self._watch.has_changed() else SERVING
            signals.begun.release()
            lookout, leave = Lookout(signals.go[worker], _TRIES), signals.leaves[worker]
            owner = multiprocessing.parent_process()
            while not leave[0]:
                if lookout.wait(_SECONDS_BETWEEN_LOOKS):
                    self.follow_orders()
                elif owner is not None and not owner.is_alive():
                    break
            self.follow_orders()  # one that was given while it was told to leave
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler if ctrl_c is None else ctrl_c)
