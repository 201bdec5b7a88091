"""All workers of a collector: started, asked, watched, and ended.

Every wait here also waits for the end of the processes, so that a worker's death is noticed when it happens.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

from swath.errors import CollectorClosed, WorkerDied, WorkerError
from swath.process import ctrl_c
from swath.process.channel import new_pipe, unpack
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.in_use import InUse
from swath.process.memory import SharedMemory, require_descriptors
from swath.process.start import StartMethod
from swath.process.supervise import EndedAtExit, Process, end_processes
from swath.timeline.recording import Recording
from swath.workers.handle import WorkerHandle, dump_spec
from swath.workers.process import main
from swath.workers.recordings import WorkerRecordings
from swath.workers.spec import EnvsOfWorker, Incarnation
from swath.workers.status_page import LEFT_BEHIND, PAGE_BYTES, StatusPage

#: How long the others may take to stop when one worker failed.
_SECONDS_TO_SALVAGE = 0.6
#: And how long a message to one that does not read, and a thread that was waiting for them.
_SECONDS_TO_SEND = 0.2
_SECONDS_FOR_OTHERS = 1.0
#: How often to look whether a step takes too long.
_SECONDS_BETWEEN_LOOKS = 0.2
_DESCRIPTORS_TO_START = 12


class _LostAgain(Exception):
    """A worker was lost while it was being started again."""

    def __init__(self, handle: WorkerHandle, error: BaseException) -> None:
        self.handle = handle
        self.error = error


class WorkerPool:
    """Worker processes, one for each spec.

    Args:
        receivers: the worker's half of the weight schemes, by model id.
        restarts: how often each worker may be started again.
        step_timeout_s: how long a step may take; None for ever.
        on_restart: called with a worker that was started again, before it gets an order.
        on_wake: called when a worker has to look at its messages, which waits for something else than those.
        closed: what is raised where one waits for workers that another thread shuts down.
        lock: held while messages are sorted in and workers are started again. A trainer may send weights from another
            thread, and so notice a death: schemes hold the same one.
    """

    def __init__(
        self,
        specs: Sequence[EnvsOfWorker],
        *,
        method: StartMethod,
        receivers: Callable[[int], Mapping[str, Any]],
        started: Callable[[int], None],
        restarts: int = 0,
        step_timeout_s: float | None = None,
        on_restart: Callable[[WorkerHandle, BaseException], None] | None = None,
        on_wake: Callable[[WorkerHandle], None] | None = None,
        closed: Callable[[], Exception] = lambda: CollectorClosed("shut down by another thread"),
        lock: Any = None,
    ) -> None:
        self._method: StartMethod = method
        self._receivers = receivers
        self._started = started
        self._restarts = restarts
        self._step_timeout_s = step_timeout_s
        self._on_restart = on_restart
        self._on_wake = on_wake
        self._closed_error = closed
        #: From the beginning of its end: whoever waits is to leave, and no worker is started any more.
        self._ends = threading.Event()
        self._ending = threading.RLock()
        self._use = InUse()
        self._pages = SharedMemory(PAGE_BYTES * len(specs))
        self._num_calls = 0
        self._lock = threading.RLock() if lock is None else lock
        self._reviving: set[int] = set()
        self._next_look_at = 0.0
        #: Batches that are there and were not taken yet, in the order in which they came.
        self.arrived: deque[tuple[WorkerHandle, Any]] = deque()
        #: A forked copy of this process has a copy of this object; the workers are not its children.
        self.owner_pid = os.getpid()
        #: While somebody wants to know what workers do when.
        self.recordings: WorkerRecordings | None = None
        self.handles: list[WorkerHandle] = []
        for spec in specs:
            self.handles.append(
                WorkerHandle(spec, StatusPage(self._pages.bytes_, spec.worker), payload=dump_spec(spec))
            )
        _pools.add(self)
        try:
            for handle in self.handles:
                self._start(handle)
            for handle in self.handles:
                self._hand_over(handle)
            for handle in self.handles:
                self._await_hello(handle)
        except BaseException:
            self.shutdown(timeout_s=1.0)
            raise

    # -- starting --------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def _start(self, handle: WorkerHandle) -> None:
        # A server that is left in the middle of a request ends, and with it what we know of other workers.
        require_descriptors(_DESCRIPTORS_TO_START, f"start worker {handle.number}")
        try:
            with new_pipe() as (handle.channel, theirs):
                args = theirs, self._receivers(handle.number), handle.number, handle.incarnation, self._pages.num_bytes
                handle.process = Process(self._method, main, args, f"swath-worker-{handle.number}")
        except EOFError as error:
            raise WorkerDied(
                f"worker {handle.number} could not be started: the server that forks workers is gone (was it killed?)",
                handle.number,
            ) from error
        handle.pid = handle.process.pid
        handle.hung_up = handle.handed_over = False
        self._started(handle.number)
        if self._ends.is_set():  # by another thread, that did not know of this one
            handle.kill()
            self._let_go(handle)
            raise self._closed_error()

    def _require_open(self) -> None:
        if self._ends.is_set():
            raise self._closed_error()

    def require_owner(self) -> None:
        """Raise in a copy of its owner: workers would do what both say, and neither would know of the other."""
        if self.owner_pid != os.getpid():
            raise RuntimeError(
                f"these workers belong to process {self.owner_pid}, and this is {os.getpid()}, which was forked from "
                "it; make the envs, or the collector, in the process that uses them (a DataLoader: num_workers=0)"
            )

    def _hand_over(self, handle: WorkerHandle) -> None:
        """Give a worker its status page and its spec."""
        with contextlib.suppress(OSError):  # it died: found out below
            assert self._pages.descriptor is not None
            handle.channel.send_descriptor(self._pages.descriptor)
            handle.channel.send_pickled(handle.payload)
            handle.handed_over = True

    def _await_hello(self, handle: WorkerHandle) -> None:
        while handle.description is None:
            for lost in self._wait_for([handle], None) or ([handle] if handle.failure is not None else []):
                self._raise_loss(lost)

    # -- talking ---------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def send(self, handle: WorkerHandle, *message: Any, wake: bool = False) -> None:
        """A message; with ``wake`` also in the middle of a batch. To a dead worker it is lost: the next wait tells."""
        if message[0] in ("collect", "weights"):
            self._now_due(handle)
        elif message[0] == "void":
            handle.due = 0
        with contextlib.suppress(OSError):
            handle.channel.send(*message)
        if wake:
            self._wake(handle)

    def _wake(self, handle: WorkerHandle) -> None:
        handle.page.waiting[0] = 1
        if self._on_wake is not None:
            self._on_wake(handle)

    @ctrl_c_waits
    def send_block(self, handle: WorkerHandle, block: Any, layout: Any) -> None:
        """Map a block in a worker that does not have it yet."""
        key = handle.number, handle.incarnation.number
        if key not in block.known_to:
            with contextlib.suppress(OSError):
                handle.channel.send_descriptor(block.memory.descriptor, "map", block.number, layout)
            block.known_to.add(key)

    def send_descriptor(self, handle: WorkerHandle, descriptor: int, *announcement: Any) -> None:
        with contextlib.suppress(OSError):
            handle.channel.send_descriptor(descriptor, *announcement)

    @ctrl_c_waits
    def call(self, name: str, *args: Any, handles: Iterable[WorkerHandle] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of workers (all by default), at the same time; what they returned."""
        self.require_owner()
        chosen = self.handles if handles is None else list(handles)
        asked = {handle.number: self._ask(handle, name, args, kwargs) for handle in chosen}
        results = []
        for handle in chosen:
            number, incarnation = asked[handle.number]
            while number not in handle.replies:
                # Another thread may take its answer out of the pipe: looked at again after a moment.
                self.wait([handle], _SECONDS_BETWEEN_LOOKS)
                if handle.incarnation != incarnation:  # it was started again meanwhile, maybe by another thread
                    number, incarnation = self._ask(handle, name, args, kwargs)
            succeeded, value = handle.replies.pop(number)
            if not succeeded:
                raise unpack(value, handle.number, handle.who)
            results.append(value)
        return results

    def _now_due(self, handle: WorkerHandle) -> None:
        if not handle.due:
            handle.beat_seen_at = time.monotonic()
        handle.due += 1

    def _ask(
        self, handle: WorkerHandle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Incarnation]:
        """The number of the question, and who was asked."""
        with self._lock:  # another thread may be starting it again
            self._num_calls += 1
            self._now_due(handle)
            with contextlib.suppress(OSError):
                handle.channel.send_anything("call", self._num_calls, name, args, kwargs)
            self._wake(handle)
            return self._num_calls, handle.incarnation

    @ctrl_c_waits
    def wait(self, handles: Sequence[WorkerHandle] | None = None, timeout_s: float | None = None) -> None:
        """Wait for a message of any of these workers, and sort it in.

        Raises, or starts a worker again, when one died, raised or hangs.
        """
        handles = self.handles if handles is None else handles
        gone = self._wait_for(handles, timeout_s)
        with self._lock:
            for handle in handles:
                if handle.failure is not None or (handle in gone and not handle.is_alive):
                    self.handle_loss(handle)

    @ctrl_c_waits
    def handle_end(self, handle: WorkerHandle) -> None:
        """A worker's process has ended, or is about to; another thread may have noticed already."""
        with self._use, self._lock:
            self._drain(handle)
            if handle.failure is not None or not handle.is_alive or self._leaves(handle):
                self.handle_loss(handle)

    def _leaves(self, handle: WorkerHandle) -> bool:
        """Wait a moment for a worker that closed a connection to end, or to say why it will."""
        wait([handle.sentinel, handle.channel.connection], timeout=1.0)
        self._drain(handle)
        return True

    def _wait_for(self, handles: Sequence[WorkerHandle], timeout_s: float | None) -> list[WorkerHandle]:
        """For a moment at most. Workers that died meanwhile, and left no exception, are returned.

        Another thread may sort in what this one waits for, or start a worker again: it is looked at anew each time.
        """
        with self._use:
            return self._wait_in_use(handles, timeout_s)

    def _wait_in_use(self, handles: Sequence[WorkerHandle], timeout_s: float | None) -> list[WorkerHandle]:
        self._require_open()
        limit = _SECONDS_BETWEEN_LOOKS if timeout_s is None else min(timeout_s, _SECONDS_BETWEEN_LOOKS)
        with self._lock:
            channels = {handle.channel.connection: handle for handle in handles}
            sentinels = {handle.sentinel: handle for handle in handles}
        try:
            ready = ctrl_c.wait([*channels, *sentinels], timeout=limit)
        except (OSError, ValueError):  # closed meanwhile; or for good
            ready = []
        self.look_for_hangs(handles)
        gone = []
        with self._lock:
            for entry in ready:
                if entry in channels:
                    self._drain(channels[entry])  # type: ignore[index]
            for handle in handles:
                ended = handle.sentinel in (*ready, -1) or handle.hung_up
                if ended and handle.channel.connection in channels:  # else another thread has started it again
                    self._drain(handle)  # what it said before it died
                    if handle.failure is None:
                        gone.append(handle)
        return gone

    def wait_for_rest(self, busy: Callable[[], Iterable[WorkerHandle]]) -> None:
        """After a loss: until none of the others is busy any more, or it takes too long. Other losses raise nothing."""
        deadline = time.monotonic() + _SECONDS_TO_SALVAGE
        with contextlib.suppress(WorkerError, CollectorClosed):
            while waiting := [handle for handle in busy() if handle.failure is None and handle.is_alive]:
                if (left := deadline - time.monotonic()) <= 0:
                    return
                self._wait_for(waiting, left)

    def _drain(self, handle: WorkerHandle) -> None:
        try:
            while not handle.hung_up and handle.channel.has_message():
                kind, *arguments = handle.channel.receive()
                handle.due -= kind in ("ready", "reply")
                if kind == "ready":
                    self.arrived.append((handle, handle.spec.result(*arguments)))
                elif kind == "reply":
                    number, *answer = arguments
                    handle.replies[number] = tuple(answer)  # type: ignore[assignment]
                elif kind == "hello":
                    handle.description = arguments[0]
                else:  # failed
                    order, packed, steps = arguments
                    handle.failure = unpack(packed, handle.number, handle.who), order, steps
        except (EOFError, OSError):
            handle.hung_up = True

    # -- losses ----------------------------------------------------------------------------------------------------

    def look_after(self, handles: Sequence[WorkerHandle]) -> None:
        """While something else than messages is waited for: sort them in, lest a full pipe keeps a worker from it."""
        self.look_for_hangs(handles)
        with self._lock:
            for handle in handles:
                self._drain(handle)

    def look_for_hangs(self, handles: Sequence[WorkerHandle]) -> None:
        """Kill workers that owe something and do not get on."""
        now = time.monotonic()
        if self._step_timeout_s is None or now < self._next_look_at:
            return
        self._next_look_at = now + _SECONDS_BETWEEN_LOOKS
        for handle in handles:
            error = handle.hangs(now, self._step_timeout_s)
            if error is not None:
                handle.failure = error, -1, []
                handle.kill()

    def _raise_loss(self, handle: WorkerHandle) -> NoReturn:
        if handle.failure is None:
            self._require_open()  # one that was told to leave was not lost
        error = handle.failure[0] if handle.failure is not None else handle.obituary(self._restarts)
        if handle.number in self._reviving:
            raise _LostAgain(handle, error)
        raise error

    def handle_loss(self, handle: WorkerHandle) -> None:
        """A worker is gone, or about to leave with an exception: start it again, or raise."""
        cut_short = handle.restart_cut_short
        may_restart = handle.incarnation.number < self._restarts and not self._ends.is_set()
        if handle.number in self._reviving or (cut_short is None and not may_restart):
            self._raise_loss(handle)
        error = cut_short or (handle.failure[0] if handle.failure is not None else handle.obituary(self._restarts))
        self._reviving.add(handle.number)
        try:
            while True:
                try:
                    with self._use:
                        self._restart(handle, error)
                    return
                except _LostAgain as again:
                    if again.handle is not handle:
                        self._cut_short(handle, error)
                        raise
                    error = again.error
                    if handle.incarnation.number >= self._restarts:
                        raise error from None
                except BaseException:
                    self._cut_short(handle, error)
                    raise
        finally:
            self._reviving.discard(handle.number)

    def _cut_short(self, handle: WorkerHandle, error: BaseException) -> None:
        """It may lack its weights, its seed, its orders: the next wait starts another one."""
        handle.kill()
        handle.restart_cut_short = error

    def begin_ids_at(self, first: int) -> None:
        """No worker draws a trajectory id below this any more, also if it is started again."""
        for handle in self.handles:
            handle.incarnation = handle.incarnation._replace(first_traj_id=max(handle.incarnation.first_traj_id, first))

    def _restart(self, handle: WorkerHandle, error: BaseException) -> None:
        handle.kill()
        if back_off_s := handle.back_off_s():
            ctrl_c.interruptible(self._ends.wait, back_off_s)
        self._require_open()
        page = handle.page
        handle.frames_before += page.integer("frames")
        handle.incarnation = Incarnation(
            handle.incarnation.number + 1, max(page.integer("next_traj_id"), handle.incarnation.first_traj_id)
        )
        page.clear(but=LEFT_BEHIND)
        self._let_go(handle)
        handle.description, handle.failure, handle.due = None, None, 0
        handle.replies.clear()
        self._start(handle)
        self._hand_over(handle)
        self._await_hello(handle)
        if self.recordings is not None:
            self.recordings.begin(handle)
        if self._on_restart is not None:
            self._on_restart(handle, error)
        handle.restart_cut_short = None

    def _let_go(self, handle: WorkerHandle) -> None:
        """Of a process that has ended: nothing that belongs to it stays open."""
        process, handle.process, handle.hung_up = handle.process, None, True
        if process is not None:
            process.close()
        if handle.channel is not None:
            handle.channel.close()

    # -- looking ---------------------------------------------------------------------------------------------------

    def record(self, recordings: WorkerRecordings) -> None:
        """From now on workers tell what they do when."""
        with self._lock:
            self.recordings = recordings
            for handle in self.handles:
                recordings.begin(handle)
                self._wake(handle)

    def stop_recording(self) -> list[Recording]:
        """What they did."""
        with self._lock:
            found = [] if self.recordings is None else self.recordings.read(self.handles)
            self.recordings = None
            for handle in self.handles:
                self.send(handle, "untrace", wake=True)
        return found

    def describe(self) -> list[dict[str, Any]]:
        """A line for each worker; reads status pages only."""
        now = time.monotonic()
        return [handle.describe(now) for handle in self.handles]

    # -- ending ----------------------------------------------------------------------------------------------------

    def ask_to_leave(self) -> None:
        for handle in self.handles:
            if handle.process is None or self.owner_pid != os.getpid():
                continue
            if handle.handed_over:
                handle.channel.send_in_time(_SECONDS_TO_SEND, "close")
                self._wake(handle)
            else:  # Ctrl-C came before: it waits for something else than messages
                handle.channel.close()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ask workers to leave, then tell them, then kill them; in ``timeout_s`` (5 by default) at most.

        Whoever waits for them in another thread is told, and gone before anything that it uses is closed.
        """
        if self.owner_pid != os.getpid():
            return
        # Whoever shuts down because Ctrl-C was pressed does not need to be told of a second one.
        is_second = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        self._ends.set()
        pressed = None
        with self._ending:
            _pools.discard(self)
            processes = [handle.process for handle in self.handles if handle.process is not None]
            try:
                end_processes(processes, 5.0 if timeout_s is None else max(0.0, timeout_s), self.ask_to_leave)
            except KeyboardInterrupt as error:
                pressed = error
            self._use.wait_for_others(_SECONDS_FOR_OTHERS)
            for handle in self.handles:
                self._let_go(handle)
                handle.pid = None
            self._pages.close_descriptor()
        if pressed is not None and not is_second:
            raise pressed


def _shut_down_all(pools: list[WorkerPool]) -> None:
    try:
        for pool in pools:
            pool.ask_to_leave()  # all at the same time
        # Whoever pressed Ctrl-C wants to leave; a second one may come before anything here can see it.
        interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
        for pool in pools:
            pool.shutdown(timeout_s=0.5 if interrupted else 2.0)
    except KeyboardInterrupt:
        for pool in pools:
            pool.shutdown(timeout_s=0.0)


#: Those that were not shut down.
_pools = EndedAtExit(_shut_down_all)
