"""Launchers: how the process of a node comes to be.

``mp``: a process of this machine. ``submitit``: a job of a Slurm cluster, or of this machine where that is asked for.
``submitit_delayed`` and ``folder``: nobody starts it from here; it waits for its ticket in a folder that all share.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from swath import platforms
from swath.collectors.distributed.folders import OwnFolder, make_own
from swath.errors import NodeLost, require_one_of
from swath.process import pickling
from swath.process.owner import leave_with_owner
from swath.process.start import StartMethod, check_start_method
from swath.process.supervise import Process, end_processes, exit_text

#: What a Slurm job asks for by default; give ``slurm_kwargs`` for more.
DEFAULT_SLURM_CONF: dict[str, Any] = {"timeout_min": 60, "slurm_cpus_per_task": 4}
#: A submitted collector and its nodes find each other in the folder that this names.
FOLDER_VARIABLE = "SWATH_NODES_FOLDER"
#: … and the collector's backend, unless it says otherwise, is this.
BACKEND_VARIABLE = "SWATH_NODES_BACKEND"
BACKENDS = ("gloo", "nccl")
LAUNCHERS = ("mp", "submitit", "submitit_delayed", "folder")

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_LEAVE = 3.0
_SECONDS_TO_SAY_WHY = 1.0


@dataclass(frozen=True)
class Ticket:
    """What a process needs in order to become a node."""

    node: int
    incarnation: int
    #: ``serve(ticket)`` of this module makes the node.
    engine: str
    #: The plan, by cloudpickle: over a pipe, or in a folder, of the user's own.
    plan: bytes
    #: How the engine is reached.
    where: Mapping[str, Any]

    def run(self) -> None:
        importlib.import_module(self.engine).serve(self)

    def make_plan(self) -> Any:
        return pickling.loads_with_path(self.plan)


class NodeProcess(Protocol):
    """A process that was launched."""

    def has_ended(self) -> str | None:
        """How, in words; None if it runs, or cannot be known."""
        ...

    def end(self, timeout_s: float) -> None:
        """See to it that it ends, by itself if it does so in time."""
        ...


def how_it_ended(process: NodeProcess) -> str | None:
    """Of one that is probably about to: its link is broken, and that comes first."""
    deadline = time.monotonic() + _SECONDS_TO_SAY_WHY
    while (how := process.has_ended()) is None and time.monotonic() < deadline:
        time.sleep(_SECONDS_TO_SAY_WHY / 50)
    return how


class Launcher(Protocol):
    #: Whether nodes may be on other machines.
    leaves_machine: bool
    #: Whether a node can be started again.
    restarts: bool

    def start(self, ticket: Ticket) -> NodeProcess: ...

    def close(self) -> None: ...


# -- mp ----------------------------------------------------------------------------------------------------------------


def _run_in_process(ticket: Ticket) -> None:
    leave_with_owner(seconds=_SECONDS_TO_LEAVE)  # the link to the driver is broken, too: mostly, it has left by then
    try:
        ticket.run()
    except NodeLost as lost:  # nothing is wrong here, and nobody asked for a traceback
        print(f"swath: {lost}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # threads of the engine, or of an env, must not keep the process


class _LocalProcess:
    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    def has_ended(self) -> str | None:
        code = self._process.exit_code()
        return None if code is None else exit_text(code)

    def end(self, timeout_s: float) -> None:
        try:
            end_processes([self._process], timeout_s, terminates=False, seconds_to_die=5.0)
        finally:
            self._process.close()


class MpLauncher:
    """Processes of this machine."""

    leaves_machine = False
    restarts = True

    def __init__(self, start_method: str | None = None) -> None:
        platforms.require("launcher='mp'", (platforms.PROCESSES,), "start nodes elsewhere (launcher='folder')")
        self._method: StartMethod = check_start_method(start_method)

    def start(self, ticket: Ticket) -> _LocalProcess:
        name = f"swath-node-{ticket.node}"
        return _LocalProcess(Process(self._method, _run_in_process, (ticket,), name))

    def close(self) -> None: ...


# -- submitit ----------------------------------------------------------------------------------------------------------


def _import_submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ImportError(
            "the launchers submitit and submitit_delayed need submitit: pip install 'swath[submitit]'"
        ) from None
    return submitit


class _Job:
    def __init__(self, job: Any) -> None:
        self.job = job

    def has_ended(self) -> str | None:
        if not self.job.done(force_check=False):
            return None
        error = self.job.exception()
        ended = f"job {self.job.job_id} {self.job.state}" + (f": {error}" if error else "")
        return f"{ended}. What it printed is in {self.job.paths.stderr} and {self.job.paths.stdout.name}"

    def end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.job.done(force_check=True) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if not self.job.done(force_check=True):
            self.job.cancel(check=False)
        process = getattr(self.job, "_process", None)  # of the local executor; else it would stay as a zombie
        if process is not None:
            with suppress(Exception):
                process.wait(5.0)


def make_executor(folder: Any, slurm_kwargs: Mapping[str, Any] | None) -> Any:
    """``slurm_kwargs`` are submitit's; ``cluster="local"`` among them makes jobs of this machine."""
    submitit = _import_submitit()
    options = {**DEFAULT_SLURM_CONF, **(slurm_kwargs or {})}
    cluster = options.pop("cluster", None)
    if cluster == "debug":
        raise ValueError("cluster='debug' of submitit runs a job when its result is asked for; 'local' runs it at once")
    if cluster is None and submitit.AutoExecutor.which() == "local":
        raise RuntimeError(
            "there is no Slurm here (no `srun`), and slurm_kwargs would have no effect: run this where jobs can be "
            "submitted; or give slurm_kwargs={'cluster': 'local'} to try it with jobs of this machine, launcher='mp' "
            "for processes of this machine"
        )
    make_own(folder)  # jobs are pickles, with secrets in them
    executor = submitit.AutoExecutor(folder=str(folder), cluster=cluster)
    executor.update_parameters(**options)
    return executor


class SubmititLauncher:
    """Jobs."""

    restarts = True

    def __init__(self, folder: Any, slurm_kwargs: Mapping[str, Any] | None) -> None:
        self._executor = make_executor(folder, slurm_kwargs)
        self.leaves_machine = self._executor.cluster == "slurm"

    def start(self, ticket: Ticket) -> _Job:
        return _Job(self._executor.submit(ticket.run))

    def close(self) -> None: ...


# -- by a folder -------------------------------------------------------------------------------------------------------


class _Elsewhere:
    def has_ended(self) -> str | None:
        return None

    def end(self, timeout_s: float) -> None: ...


class FolderLauncher:
    """Tickets are put into a folder; whoever runs ``serve_from_folder`` there becomes the node."""

    leaves_machine = True
    restarts = False

    def __init__(self, folder: Any) -> None:
        folder = folder or os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            raise ValueError(
                "launcher='submitit_delayed' is for a function that submitit_delayed_launcher decorates; for nodes "
                "that are started by hand give launcher='folder' and folder=, and run `swath node FOLDER NUMBER` there"
            )
        self._folder = make_own(folder)

    def start(self, ticket: Ticket) -> _Elsewhere:
        path = ticket_path(self._folder, ticket.node)
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(pickling.dumps_with_path(ticket))
        os.replace(part, path)
        return _Elsewhere()

    def close(self) -> None:
        for path in self._folder.glob("node-*.ticket"):
            path.unlink(missing_ok=True)


def ticket_path(folder: Path, node: int) -> Path:
    return folder / f"node-{node}.ticket"


def serve_from_folder(folder: Any, node: int, timeout_s: float | None = None) -> None:
    """Become a node as soon as its ticket is in the folder; return when the driver is done with it.

    The ticket is a pickle, so the folder must be this user's own.

    Raises:
        PermissionError: somebody else can write to the folder, or to the ticket.
    """
    name = ticket_path(Path(folder), node).name
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            with OwnFolder(folder) as own:
                if "finished" in own and name not in own:
                    return
                data = own.take(name)
            break
        except FileNotFoundError:  # the ticket, or the folder
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no driver has put a ticket for node {node} into {folder}") from None
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    pickling.loads_with_path(data).run()


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | str | None = None,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
    folder: Any = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that makes a collector with ``launcher="submitit_delayed"``: calling it submits the function
    as a job, and ``num_jobs`` more for the collector's nodes; it returns what the function does.

    Args:
        num_jobs: how many nodes the collector has.
        framework: "distributed" or "rpc"; what the nodes become is for the collector in the function to say.
        backend: for a ``DistributedCollector``, if it is not given there.
        tcpport: for the collector, if it is not given there.
        submitit_main_conf, submitit_collection_conf: submitit's parameters for the job of the function, and of nodes;
            ``cluster="local"`` in them makes jobs of this machine.
        folder: where jobs keep their files and meet; all machines must see it.
    """
    if framework not in ("distributed", "rpc"):
        raise NotImplementedError(f"framework must be 'distributed' or 'rpc', got {framework!r}")
    check_backend(backend)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def submit(*args: Any, **kwargs: Any) -> Any:
            base = Path("swath_jobs" if folder is None else folder).absolute()
            meeting = base / f"nodes-{uuid.uuid4().hex[:12]}"
            main = make_executor(base, submitit_main_conf)
            nodes = make_executor(base, submitit_collection_conf)
            meeting.mkdir(mode=0o700)
            work = pickling.dumps_with_path((function, args, kwargs))
            job = main.submit(_run_main, work, str(meeting), tcpport, backend)
            others = [_Job(nodes.submit(serve_from_folder, str(meeting), node)) for node in range(num_jobs)]
            try:
                return job.result()
            finally:
                (meeting / "finished").touch()
                for other in others:
                    other.end(10.0)
                with suppress(OSError):
                    (meeting / "finished").unlink()
                    meeting.rmdir()

        return submit

    return decorate


def _run_main(work: bytes, meeting: str, tcpport: int | str | None, backend: str) -> Any:
    os.environ[FOLDER_VARIABLE] = meeting
    os.environ[BACKEND_VARIABLE] = backend
    if tcpport is not None:
        os.environ["TCP_PORT"] = str(tcpport)
    function, args, kwargs = pickling.loads_with_path(work)
    return function(*args, **kwargs)


#: Which launchers an argument is for.
_WHOSE = {
    "slurm_kwargs": ("submitit",),
    "folder": ("submitit", "submitit_delayed", "folder"),
    "mp_start_method": ("mp",),
}


def make_launcher(
    name: str, *, folder: Any, slurm_kwargs: Mapping[str, Any] | None, start_method: str | None
) -> Launcher:
    require_one_of("launcher", name, LAUNCHERS)
    given = {"slurm_kwargs": slurm_kwargs, "folder": folder, "mp_start_method": start_method}
    for argument, launchers in _WHOSE.items():
        if given[argument] is not None and name not in launchers:
            known = " or ".join(map(repr, launchers))
            raise ValueError(f"{argument} is for launcher={known}, and this is {name!r}: it would have no effect")
    if name == "mp":
        return MpLauncher(start_method)
    if name == "submitit":
        return SubmititLauncher("swath_jobs" if folder is None else folder, slurm_kwargs)
    return FolderLauncher(folder)


def check_backend(backend: str) -> None:
    require_one_of("backend", backend, BACKENDS)
