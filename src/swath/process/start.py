"""How a worker process starts.

"forkserver" (the default): a server of our own, with torch, tensordict and gymnasium imported, from which workers are
forked in milliseconds. "spawn": a new interpreter each. "fork": a copy of this process, with whatever threads and
locks it happens to hold. The first two do not import the user's main module: what is needed of it travels by value, so
a script needs no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.popen_fork
import multiprocessing.popen_forkserver
import multiprocessing.popen_spawn_posix
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import sys
from collections.abc import Callable
from multiprocessing import context, reduction, spawn, util
from typing import Any, Literal, cast

from swath.errors import require_one_of
from swath.process.ctrl_c import ctrl_c_waits, interruptible
from swath.process.forkserver_internals import ServerAbove, was_forked_from_server
from swath.process.owner import Owner, descriptor_of

StartMethod = Literal["forkserver", "spawn", "fork"]
START_METHODS: tuple[StartMethod, ...] = ("forkserver", "spawn", "fork")

_PRELOAD = "swath.preload"
#: Set by the preloaded module where it matters, before libraries read them.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_server: tuple[multiprocessing.forkserver.ForkServer, int] | None = None


def server() -> multiprocessing.forkserver.ForkServer:
    """Not the one of ``multiprocessing``, whose preloaded modules are the program's own business.

    In a process that was forked from such a server, that one: it has the imports already, which take seconds.
    """
    global _server
    if _server is None or _server[1] != os.getpid():  # a forked child must not use its parent's
        _server = ServerAbove() if _was_forked_from_ours() else _new_server(), os.getpid()
    return _server[0]


def _new_server() -> multiprocessing.forkserver.ForkServer:
    own = multiprocessing.forkserver.ForkServer()
    own.set_forkserver_preload([_PRELOAD])
    return own


def _was_forked_from_ours() -> bool:
    return _PRELOAD in sys.modules and was_forked_from_server()


def _connect(fds: list[int]) -> tuple[int, int]:
    """Ask the server for a process; ``status_r`` and ``data_w`` of it."""
    global _server
    try:
        return server().connect_to_new_process(fds)  # type: ignore[return-value]
    except (ConnectionError, FileNotFoundError):
        if not isinstance(server(), ServerAbove):
            raise
        _server = _new_server(), os.getpid()  # the one above was killed
        return server().connect_to_new_process(fds)  # type: ignore[return-value]


def _preparation(name: str) -> dict[str, Any]:
    """What a new interpreter is told, without the user's main module."""
    data = spawn.get_preparation_data(name)
    for key in ("init_main_from_name", "init_main_from_path"):
        data.pop(key, None)
    return data


def _pickled(process: Any, popen: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump(_preparation(process.name), buffer)
        reduction.dump(process, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer


class _ForkServerPopen(multiprocessing.popen_forkserver.Popen):
    """As ``multiprocessing`` does it, from a server of our own."""

    def _launch(self, process_obj: Any) -> None:
        data = _pickled(process_obj, self)
        self.sentinel, to_child = _connect(self._fds)  # type: ignore[attr-defined]
        # The child leaves when this end is closed, be it by the death of this process.
        parent_end = os.dup(to_child)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_end, self.sentinel))
        with open(to_child, "wb", closefd=True) as file:
            file.write(data.getbuffer())
        # The first one waits here for the server's imports. A child that is given up finds its owner gone, and leaves.
        self.pid = interruptible(multiprocessing.forkserver.read_signed, self.sentinel)


class _SpawnPopen(multiprocessing.popen_spawn_posix.Popen):
    """As ``multiprocessing`` does it, without the user's main module."""

    def _launch(self, process_obj: Any) -> None:
        tracker = multiprocessing.resource_tracker.getfd()
        self._fds.append(tracker)  # type: ignore[attr-defined]
        data = _pickled(process_obj, self)
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_r)
            self._fds.extend([child_r, child_w])  # type: ignore[attr-defined]
            self.pid = util.spawnv_passfds(spawn.get_executable(), command, self._fds)  # type: ignore[attr-defined]
            self.sentinel = parent_r
            with open(parent_w, "wb", closefd=False) as file:
                file.write(data.getbuffer())
        finally:
            self.finalizer = util.Finalize(self, util.close_fds, (parent_r, parent_w))
            util.close_fds(child_r, child_w)


# (Not subclasses of those in ``multiprocessing.context``, of which Windows lacks two: there, too, this is imported.)
class _ForkServerProcess(multiprocessing.process.BaseProcess):
    _start_method = "forkserver"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _ForkServerPopen(process_obj)


class _SpawnProcess(multiprocessing.process.BaseProcess):
    _start_method = "spawn"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _SpawnPopen(process_obj)


class _ForkProcess(multiprocessing.process.BaseProcess):
    _start_method = "fork"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return multiprocessing.popen_fork.Popen(process_obj)


_KINDS: dict[str, Callable[..., Any]] = {
    "forkserver": _ForkServerProcess,
    "spawn": _SpawnProcess,
    "fork": _ForkProcess,
}


def check_start_method(method: Any) -> StartMethod:
    if method is None:
        return "forkserver"
    require_one_of("mp_start_method", method, START_METHODS)
    return cast(StartMethod, method)


def _run(owner: Owner, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In the process; ``owner`` is the first thing that arrives there."""
    owner.watch()
    return target(*args)


def _run_with_environment(variables: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In the process. The server has the variables of when it was started; the owner may have others by now."""
    for name in os.environ.keys() - variables.keys() - set(_THREADS):
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    return target(*args)


@ctrl_c_waits
def start_process(method: StartMethod, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """Start a process (not a daemon: it may have children of its own). It ends when this one does: see ``owner.py``."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "this process is a daemon (of a multiprocessing.Pool, or a DataLoader's worker), which may not have "
            "children; make the collector in the main process"
        )
    if method == "forkserver":
        target, args = _run_with_environment, (dict(os.environ), target, args)
    owner = Owner(descriptor_of(os.getpid()))
    try:
        process = _KINDS[method](target=_run, args=(owner, target, args), name=name, daemon=False)
        process.start()
    finally:
        owner.close()
    return process
