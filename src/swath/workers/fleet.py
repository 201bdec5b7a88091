"""All workers of a collector: started, asked, watched, and ended.

Every wait here also waits for the end of the processes, so that a worker's death is noticed when it happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, NoReturn

from swath.errors import CollectorClosed, WorkerDied, WorkerError, WorkerHangs
from swath.process import ctrl_c
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.start import StartMethod
from swath.process.supervise import EndedAtExit, Process, end_processes, how_it_ended
from swath.workers import pickling
from swath.workers.board import LEFT_BEHIND, PAGE_BYTES, Page, Shares
from swath.workers.channel import Channel, new_pipe, unpack
from swath.workers.memory import SharedMemory, require_descriptors
from swath.workers.orders import Blueprint, Description, EnvBlueprint, EnvDescription, Life, Ready
from swath.workers.process import main

#: How long the others may take to stop when one worker failed.
_SECONDS_TO_SALVAGE = 0.6
#: And how long a message to one that does not read, and a thread that was waiting for them.
_SECONDS_TO_SEND = 0.2
_SECONDS_FOR_OTHERS = 1.0
#: How often to look whether a step takes too long.
_SECONDS_BETWEEN_LOOKS = 0.2
_DESCRIPTORS_TO_START = 12
#: A worker that dies again and again is started again later and later.
_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 5.0


@dataclass
class Member:
    """One worker, as its owner sees it."""

    blueprint: Blueprint | EnvBlueprint
    page: Page
    payload: bytes
    process: Process = None  # type: ignore[assignment]
    #: Of the last process, also while there is no other yet.
    pid: int | None = None
    channel: Channel = None  # type: ignore[assignment]
    #: It has its board and its blueprint, and reads messages.
    handed_over: bool = False
    #: There is nobody at the other end of the channel.
    hung_up: bool = False
    life: Life = field(default_factory=Life)
    description: Description | EnvDescription | None = None
    replies: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    #: The exception that the worker left with, the order it was following, and the steps it completed of it.
    failure: tuple[BaseException, int, list[int]] | None = None
    frames_before: int = 0
    #: It was being started again when Ctrl-C came: what stopped its predecessor.
    restart_cut_short: BaseException | None = None
    #: Orders and questions that it has not answered.
    due: int = 0
    #: Its last sign of life, and when it was seen.
    beat: tuple[int, int] = (-1, -1)
    beat_seen_at: float = 0.0

    @property
    def number(self) -> int:
        return self.blueprint.worker

    @property
    def frames(self) -> int:
        return self.frames_before + self.page.integer("frames")

    @property
    def frames_under_way(self) -> int:
        """Of the batch that it collects; 0 where envs of a batch size of their own take turns."""
        about = self.description
        if about is None or not (about.merged or len(self.blueprint.members) == 1):
            return 0
        return self.page.integer("beat") * len(self.blueprint.members) * about.env_size.numel()

    @property
    def sentinel(self) -> int:
        """Ready when the process has ended; -1 when nothing is left of it."""
        process = self.process  # another thread may let go of it
        return -1 if process is None else process.sentinel

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        process = self.process
        return process is None or process.has_ended(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Asked from any thread, also while another one shuts down."""
        return not self.hung_up and not self.has_ended()

    @property
    def who(self) -> str:
        members = self.blueprint.members
        envs = f"env {members.start}" if len(members) == 1 else f"envs {members.start} to {members.stop - 1}"
        return f"worker {self.number} (pid {self.pid or 'not started'}, {envs})"


class _LostAgain(Exception):
    """A worker was lost while it was being started again."""

    def __init__(self, member: Member, error: BaseException) -> None:
        self.member = member
        self.error = error


class Fleet:
    """Worker processes, one for each blueprint.

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
        blueprints: Sequence[Blueprint] | Sequence[EnvBlueprint],
        *,
        method: StartMethod,
        receivers: Callable[[int], Mapping[str, Any]],
        started: Callable[[int], None],
        restarts: int = 0,
        step_timeout_s: float | None = None,
        on_restart: Callable[[Member, BaseException], None] | None = None,
        on_wake: Callable[[Member], None] | None = None,
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
        self._use = _Use()
        self._board = SharedMemory(PAGE_BYTES * len(blueprints))
        self._num_calls = 0
        self._lock = threading.RLock() if lock is None else lock
        self._reviving: set[int] = set()
        self._next_look_at = 0.0
        #: Batches that are there and were not taken yet, in the order in which they came.
        self.arrived: deque[tuple[Member, Ready]] = deque()
        #: A forked copy of this process has a copy of this object; the workers are not its children.
        self.owner_pid = os.getpid()
        self.members: list[Member] = []
        for blueprint in blueprints:
            self.members.append(
                Member(blueprint, Page(self._board.bytes_, blueprint.worker), payload=dump_blueprint(blueprint))
            )
        _fleets.add(self)
        try:
            for member in self.members:
                self._start(member)
            for member in self.members:
                self._hand_over(member)
            for member in self.members:
                self._await_hello(member)
        except BaseException:
            self.shutdown(timeout_s=1.0)
            raise

    # -- starting --------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def _start(self, member: Member) -> None:
        # A server that is left in the middle of a request ends, and with it what we know of other workers.
        require_descriptors(_DESCRIPTORS_TO_START, f"start worker {member.number}")
        try:
            with new_pipe() as (member.channel, theirs):
                args = theirs, self._receivers(member.number), member.number, member.life, self._board.num_bytes
                member.process = Process(self._method, main, args, f"swath-worker-{member.number}")
        except EOFError as error:
            raise WorkerDied(
                f"worker {member.number} could not be started: the server that forks workers is gone (was it killed?)",
                member.number,
            ) from error
        member.pid = member.process.pid
        member.hung_up = member.handed_over = False
        self._started(member.number)
        if self._ends.is_set():  # by another thread, that did not know of this one
            self.kill(member)
            self._let_go(member)
            raise self._closed_error()

    def _require_open(self) -> None:
        if self._ends.is_set():
            raise self._closed_error()

    def _hand_over(self, member: Member) -> None:
        """Give a worker its board and its blueprint."""
        with contextlib.suppress(OSError):  # it died: found out below
            assert self._board.descriptor is not None
            member.channel.send_descriptor(self._board.descriptor)
            member.channel.send_pickled(member.payload)
            member.handed_over = True

    def _await_hello(self, member: Member) -> None:
        while member.description is None:
            for lost in self._wait_for([member], None) or ([member] if member.failure is not None else []):
                self._raise_loss(lost)

    # -- talking ---------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def send(self, member: Member, *message: Any, wake: bool = False) -> None:
        """A message; with ``wake`` also in the middle of a batch. To a dead worker it is lost: the next wait tells."""
        if message[0] in ("collect", "weights"):
            self._now_due(member)
        elif message[0] == "void":
            member.due = 0
        with contextlib.suppress(OSError):
            member.channel.send(*message)
        if wake:
            self._wake(member)

    def _wake(self, member: Member) -> None:
        member.page.waiting[0] = 1
        if self._on_wake is not None:
            self._on_wake(member)

    @ctrl_c_waits
    def send_block(self, member: Member, block: Any, layout: Any) -> None:
        """Map a block in a worker that does not have it yet."""
        key = member.number, member.life.number
        if key not in block.known_to:
            with contextlib.suppress(OSError):
                member.channel.send_descriptor(block.memory.descriptor, "map", block.number, layout)
            block.known_to.add(key)

    def send_descriptor(self, member: Member, descriptor: int, *announcement: Any) -> None:
        with contextlib.suppress(OSError):
            member.channel.send_descriptor(descriptor, *announcement)

    @ctrl_c_waits
    def call(self, name: str, *args: Any, members: Iterable[Member] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of workers (all by default), at the same time; what they returned."""
        chosen = self.members if members is None else list(members)
        asked = {member.number: self._ask(member, name, args, kwargs) for member in chosen}
        results = []
        for member in chosen:
            number, life = asked[member.number]
            while number not in member.replies:
                # Another thread may take its answer out of the pipe: looked at again after a moment.
                self.wait([member], _SECONDS_BETWEEN_LOOKS)
                if member.life != life:  # it was started again since it was asked, maybe by another thread
                    number, life = self._ask(member, name, args, kwargs)
            succeeded, value = member.replies.pop(number)
            if not succeeded:
                raise unpack(value, member.number, member.who)
            results.append(value)
        return results

    def _now_due(self, member: Member) -> None:
        if not member.due:
            member.beat_seen_at = time.monotonic()
        member.due += 1

    def _ask(self, member: Member, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Life]:
        """The number of the question, and who was asked."""
        with self._lock:  # another thread may be starting it again
            self._num_calls += 1
            self._now_due(member)
            with contextlib.suppress(OSError):
                member.channel.send_anything("call", self._num_calls, name, args, kwargs)
            self._wake(member)
            return self._num_calls, member.life

    @ctrl_c_waits
    def wait(self, members: Sequence[Member] | None = None, timeout_s: float | None = None) -> None:
        """Wait for a message of any of these workers, and sort it in.

        Raises, or starts a worker again, when one died, raised or hangs.
        """
        members = self.members if members is None else members
        gone = self._wait_for(members, timeout_s)
        with self._lock:
            for member in members:
                if member.failure is not None or (member in gone and has_ended(member)):
                    self.handle_loss(member)

    @ctrl_c_waits
    def handle_end(self, member: Member) -> None:
        """A worker's process has ended, or is about to; another thread may have noticed already."""
        with self._use, self._lock:
            self._drain(member)
            if member.failure is not None or has_ended(member) or self._leaves(member):
                self.handle_loss(member)

    def _leaves(self, member: Member) -> bool:
        """Wait a moment for a worker that closed a connection to end, or to say why it will."""
        wait([member.sentinel, member.channel.connection], timeout=1.0)
        self._drain(member)
        return True

    def _wait_for(self, members: Sequence[Member], timeout_s: float | None) -> list[Member]:
        """For a moment at most. Members that died meanwhile, and left no exception, are returned.

        Another thread may sort in what this one waits for, or start a worker again: it is looked at anew each time.
        """
        with self._use:
            return self._wait_in_use(members, timeout_s)

    def _wait_in_use(self, members: Sequence[Member], timeout_s: float | None) -> list[Member]:
        self._require_open()
        limit = _SECONDS_BETWEEN_LOOKS if timeout_s is None else min(timeout_s, _SECONDS_BETWEEN_LOOKS)
        with self._lock:
            channels = {member.channel.connection: member for member in members}
            sentinels = {member.sentinel: member for member in members}
        try:
            ready = ctrl_c.wait([*channels, *sentinels], timeout=limit)
        except (OSError, ValueError):  # closed meanwhile; or for good
            ready = []
        self.look_for_hangs(members)
        gone = []
        with self._lock:
            for entry in ready:
                if entry in channels:
                    self._drain(channels[entry])  # type: ignore[index]
            for member in members:
                ended = member.sentinel in (*ready, -1) or member.hung_up
                if ended and member.channel.connection in channels:  # else another thread has started it again
                    self._drain(member)  # what it said before it died
                    if member.failure is None:
                        gone.append(member)
        return gone

    def wait_for_rest(self, busy: Callable[[], Iterable[Member]]) -> None:
        """After a loss: until none of the others is busy any more, or it takes too long. Other losses raise nothing."""
        deadline = time.monotonic() + _SECONDS_TO_SALVAGE
        with contextlib.suppress(WorkerError, CollectorClosed):
            while waiting := [member for member in busy() if member.failure is None and not has_ended(member)]:
                if (left := deadline - time.monotonic()) <= 0:
                    return
                self._wait_for(waiting, left)

    def _drain(self, member: Member) -> None:
        try:
            while not member.hung_up and member.channel.has_message():
                kind, *arguments = member.channel.receive()
                member.due -= kind in ("ready", "reply")
                if kind == "ready":
                    self.arrived.append((member, Ready(*arguments)))
                elif kind == "reply":
                    number, *answer = arguments
                    member.replies[number] = tuple(answer)  # type: ignore[assignment]
                elif kind == "hello":
                    member.description = arguments[0]
                else:  # failed
                    order, packed, steps = arguments
                    member.failure = unpack(packed, member.number, member.who), order, steps
        except (EOFError, OSError):
            member.hung_up = True

    # -- losses ----------------------------------------------------------------------------------------------------

    def look_after(self, members: Sequence[Member]) -> None:
        """While something else than messages is waited for: sort them in, lest a full pipe keeps a worker from it."""
        self.look_for_hangs(members)
        with self._lock:
            for member in members:
                self._drain(member)

    def look_for_hangs(self, members: Sequence[Member]) -> None:
        """Kill workers that owe something and do not get on."""
        now = time.monotonic()
        if self._step_timeout_s is None or now < self._next_look_at:
            return
        self._next_look_at = now + _SECONDS_BETWEEN_LOOKS
        for member in members:
            beat = member.page.integer("beat"), member.page.integer("batches")
            if member.due <= 0 or beat != member.beat:
                member.beat, member.beat_seen_at = beat, now
            elif now - member.beat_seen_at > self._step_timeout_s and member.failure is None:
                error = WorkerHangs(
                    f"{member.who} is in one step for {now - member.beat_seen_at:.1f} s, longer than step_timeout_s="
                    f"{self._step_timeout_s:g}; it was killed. If the env needs longer, raise step_timeout_s",
                    member.number,
                )
                member.failure = error, -1, []
                self.kill(member)

    def kill(self, member: Member) -> None:
        """And wait a moment for its end."""
        if (process := member.process) is not None:
            process.kill()
            process.has_ended(2.0)

    def obituary(self, member: Member) -> WorkerDied:
        """Who died, how, and what to do."""
        code = self._exit_code(member)
        how = how_it_ended(code)
        if code == -signal.SIGKILL:
            how += " (by someone, or by the kernel because memory ran out)"
        when = f"after {member.frames:,} frames" if member.description is not None else "while it started"
        could = not self._restarts and isinstance(member.blueprint, Blueprint)
        advice = " With restart_workers=N it would be started again." if could else ""
        return WorkerDied(
            f"{member.who} {how} {when}; restarts {member.life.number}/{self._restarts}. What it printed may say "
            f"more.{advice}",
            member.number,
        )

    def _exit_code(self, member: Member) -> int | None:
        """Once the process has ended; one that only closed its connection gets a moment for it."""
        if not member.has_ended(1.0):
            self.kill(member)
        return None if member.process is None else member.process.exit_code()

    def _raise_loss(self, member: Member) -> NoReturn:
        if member.failure is None:
            self._require_open()  # one that was told to leave was not lost
        error = member.failure[0] if member.failure is not None else self.obituary(member)
        if member.number in self._reviving:
            raise _LostAgain(member, error)
        raise error

    def handle_loss(self, member: Member) -> None:
        """A worker is gone, or about to leave with an exception: start it again, or raise."""
        cut_short = member.restart_cut_short
        may_restart = member.life.number < self._restarts and not self._ends.is_set()
        if member.number in self._reviving or (cut_short is None and not may_restart):
            self._raise_loss(member)
        error = cut_short or (member.failure[0] if member.failure is not None else self.obituary(member))
        self._reviving.add(member.number)
        try:
            while True:
                try:
                    with self._use:
                        self._restart(member, error)
                    return
                except _LostAgain as again:
                    if again.member is not member:
                        self._cut_short(member, error)
                        raise
                    error = again.error
                    if member.life.number >= self._restarts:
                        raise error from None
                except BaseException:
                    self._cut_short(member, error)
                    raise
        finally:
            self._reviving.discard(member.number)

    def _cut_short(self, member: Member, error: BaseException) -> None:
        """It may lack its weights, its seed, its orders: the next wait starts another one."""
        self.kill(member)
        member.restart_cut_short = error

    def begin_ids_at(self, first: int) -> None:
        """No worker draws a trajectory id below this any more, also if it is started again."""
        for member in self.members:
            member.life = member.life._replace(first_traj_id=max(member.life.first_traj_id, first))

    def _restart(self, member: Member, error: BaseException) -> None:
        self.kill(member)
        if member.life.number:
            back_off_s = min(_FIRST_BACK_OFF_S * 2 ** (member.life.number - 1), _LONGEST_BACK_OFF_S)
            ctrl_c.interruptible(self._ends.wait, back_off_s)
        self._require_open()
        page = member.page
        member.frames_before += page.integer("frames")
        member.life = Life(member.life.number + 1, max(page.integer("next_traj_id"), member.life.first_traj_id))
        page.clear(but=LEFT_BEHIND)
        self._let_go(member)
        member.description, member.failure, member.due = None, None, 0
        member.replies.clear()
        self._start(member)
        self._hand_over(member)
        self._await_hello(member)
        if self._on_restart is not None:
            self._on_restart(member, error)
        member.restart_cut_short = None

    def _let_go(self, member: Member) -> None:
        """Of a process that has ended: nothing that belongs to it stays open."""
        process, member.process, member.hung_up = member.process, None, True
        if process is not None:
            process.close()
        if member.channel is not None:
            member.channel.close()

    # -- looking ---------------------------------------------------------------------------------------------------

    def describe(self, seconds: float) -> list[dict[str, Any]]:
        """A line for each worker; reads the board only."""
        now = time.monotonic()
        lines = []
        for member in self.members:
            shares = Shares.of(member.page, now)
            started = member.page.seconds("started_at")
            alive_s = max(now - started, 1e-9) if started else 0.0
            lines.append(
                {
                    "worker": member.number,
                    "pid": member.pid,
                    "alive": member.is_alive,
                    "envs": list(member.blueprint.members),
                    "frames": member.frames + member.frames_under_way,
                    "fps": (member.page.integer("frames") + member.frames_under_way) / alive_s if alive_s else 0.0,
                    "env": shares.env,
                    "policy": shares.policy,
                    "waiting": shares.waiting,
                    "policy_version": member.page.integer("policy_version"),
                    "restarts": member.life.number,
                }
            )
        return lines

    # -- ending ----------------------------------------------------------------------------------------------------

    def ask_to_leave(self) -> None:
        for member in self.members:
            if member.process is None or self.owner_pid != os.getpid():
                continue
            if member.handed_over:
                member.channel.send_in_time(_SECONDS_TO_SEND, "close")
                self._wake(member)
            else:  # Ctrl-C came before: it waits for something else than messages
                member.channel.close()

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
            _fleets.discard(self)
            processes = [member.process for member in self.members if member.process is not None]
            try:
                end_processes(processes, 5.0 if timeout_s is None else max(0.0, timeout_s), self.ask_to_leave)
            except KeyboardInterrupt as error:
                pressed = error
            self._use.wait_for_others(_SECONDS_FOR_OTHERS)
            for member in self.members:
                self._let_go(member)
                member.pid = None
            self._board.close_descriptor()
        if pressed is not None and not is_second:
            raise pressed


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of something that is not to be kept by it, and calls it only while it is there."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*args, **kwargs)

    return call


class _Use:
    """Which threads are using something that another one wants to close."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []

    def __enter__(self) -> None:
        with self._changed:
            self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._threads.remove(threading.get_ident())
            self._changed.notify_all()

    def wait_for_others(self, timeout_s: float) -> bool:
        """This thread itself may be within, in a signal's handler, say."""
        me = threading.get_ident()
        with self._changed:
            return self._changed.wait_for(lambda: all(thread == me for thread in self._threads), timeout_s)


def has_ended(member: Member) -> bool:
    return member.hung_up or member.has_ended()


def dump_blueprint(blueprint: Blueprint | EnvBlueprint) -> bytes:
    """A blueprint on its way; what cannot be pickled is named before any process starts."""
    try:
        return pickling.dumps(blueprint)
    except Exception as error:
        for name, value in blueprint.pieces():
            try:
                pickling.dumps(value)
            except Exception as reason:
                raise TypeError(
                    f"{name} cannot be sent to a worker process: {type(reason).__name__}: {reason}. Make what cannot "
                    "be pickled (files, sockets, locks, generators) inside of the function that makes the env or the "
                    "policy"
                ) from error
        raise


def _shut_down_all(fleets: list[Fleet]) -> None:
    try:
        for fleet in fleets:
            fleet.ask_to_leave()  # all at the same time
        # Whoever pressed Ctrl-C wants to leave; a second one may come before anything here can see it.
        interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
        for fleet in fleets:
            fleet.shutdown(timeout_s=0.5 if interrupted else 2.0)
    except KeyboardInterrupt:
        for fleet in fleets:
            fleet.shutdown(timeout_s=0.0)


#: Fleets that were not shut down.
_fleets = EndedAtExit(_shut_down_all)
