"""The machine: system, cores, memory, descriptors, processes, folders."""

from __future__ import annotations

import errno
import multiprocessing
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swath import platforms
from swath.cli.doctor.findings import Finding, Probe
from swath.disk import show_bytes
from swath.process.cgroups import CgroupLimits, read_limits
from swath.process.owner import descriptor_of

_GB = 1_000_000_000
#: A worker's own memory: what it does not share with the process that it was forked from. (Measured: 15 MB and up.)
_WORKER_BYTES = 20_000_000
#: Descriptors of a program with a collector, without and for each worker. (Measured: 19 + 4 a worker.)
_DESCRIPTORS, _DESCRIPTORS_OF_WORKER = 19, 4
#: Processes and threads of a worker, and of its owner beside those of torch.
_THREADS_OF_WORKER, _THREADS = 3, 8
_LONGEST_SOCKET_PATH = 107


#: So many processes for each core want to compute.
_BUSY = 2.0
_MORE_CORES = ("taskset -c 0-1 …, docker run --cpus=2 …, or Slurm's --cpus-per-task=2",)


# -- the system --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    name: str
    release: str
    processor: str
    python: str
    container: str | None
    start_method: str
    #: What workers need, and what those that only step need beyond; empty where all is there.
    lacks: tuple[str, ...]
    lacks_for_stepping: tuple[str, ...]
    has_pidfd: bool


def gather_system() -> System:
    pidfd = descriptor_of(os.getpid())
    if pidfd is not None:
        os.close(pidfd)
    return System(
        name=platform.system(),
        release=platform.release(),
        processor=platform.machine(),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        container=_container(),
        start_method=multiprocessing.get_all_start_methods()[0],
        lacks=tuple(need.what for need in platforms.WORKERS if not need.is_met()),
        lacks_for_stepping=tuple(
            need.what for need in platforms.STEPPING_WORKERS if need not in platforms.WORKERS and not need.is_met()
        ),
        has_pidfd=pidfd is not None,
    )


def _container() -> str | None:
    if os.environ.get("SLURM_JOB_ID"):
        return "Slurm"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    return "WSL" if "microsoft" in platform.release().lower() else None


def conclude_system(facts: System) -> list[Finding]:
    where = f"{facts.name} {facts.release} on {facts.processor}"
    value = f"{where}, in {facts.container}" if facts.container else where
    findings = []
    if facts.lacks:
        findings.append(
            Finding(
                "system",
                value,
                "error",
                f"No worker processes here: they need {' and '.join(facts.lacks)}. Only Collector, which stays in your "
                "process, works.",
                ("run it on Linux on x86-64 (WSL2 or a container will do)",),
            )
        )
    elif facts.lacks_for_stepping:
        findings.append(
            Finding(
                "system",
                value,
                "warning",
                "No ParallelEnv and no AsyncBatchedCollector here: they need "
                f"{' and '.join(facts.lacks_for_stepping)}. All other collectors work.",
                ("use a MultiSyncCollector or a MultiAsyncCollector",),
            )
        )
    else:
        findings.append(Finding("system", value))
    if not facts.has_pidfd and not facts.lacks:
        findings.append(
            Finding(
                "process descriptors",
                "none (pidfd_open)",
                "warning",
                "The kernel is older than 5.3, or the container forbids it: workers find out by other means that their "
                "owner was killed, and where a process was forked from it, too late.",
                ("docker run --security-opt seccomp=unconfined …, or a newer Docker",),
            )
        )
    findings.append(Finding("python", facts.python))
    findings.append(
        Finding("start method", f"forkserver, of swath's own (multiprocessing's own default: {facts.start_method})")
    )
    return findings


# -- cores -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    machine: int
    affinity: int
    quota: float | None
    load: float | None


def gather_cores() -> Cores:
    load = None
    with suppress(OSError, AttributeError):
        load = round(os.getloadavg()[0], 1)
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, affinity, read_limits().cores, load)


def conclude_cores(facts: Cores) -> list[Finding]:
    usable = facts.affinity if facts.quota is None else min(facts.affinity, facts.quota)
    value = f"{usable:g} of {facts.machine}" if usable < facts.machine else f"{usable:g}"
    if facts.affinity < facts.machine:
        value += f"; affinity: {facts.affinity}"
    if facts.quota is not None:
        value += f"; quota of the control group: {facts.quota:g}"
    if facts.load is not None:
        value += f"; load: {facts.load:g}"
    if usable < 2:
        follows = "The policy and all workers take turns: more than one worker makes nothing faster, unless envs wait."
        mend = _MORE_CORES if facts.machine >= 2 else ("num_workers=1, or a Collector",)
        return [Finding("cores", value, "warning", follows, mend)]
    if facts.load is not None and facts.load > _BUSY * facts.machine:
        follows = "Others compute on this machine, too: what is measured here means little, and steps take longer."
        return [Finding("cores", value, "warning", follows, ("top  # who it is",))]
    return [Finding("cores", value)]


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    total: int | None
    available: int | None
    limit: int | None
    limit_left: int | None


def gather_memory() -> Memory:
    said: dict[str, int] = {}
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            name, _, amount = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                said[name] = int(amount.split()[0]) * 1024
    limits = read_limits()
    return Memory(said.get("MemTotal"), said.get("MemAvailable"), limits.memory, limits.memory_left)


def conclude_memory(facts: Memory) -> list[Finding]:
    free = min((known for known in (facts.available, facts.limit_left) if known is not None), default=None)
    if free is None:
        return [Finding("memory", "the system does not say")]
    value = f"{show_bytes(free)} free"
    if facts.total is not None:
        value += f" of {show_bytes(facts.total)}"
    if facts.limit is not None:
        value += f"; limit of the control group: {show_bytes(facts.limit)}"
    if free < _GB:
        follows = (
            f"A worker takes {show_bytes(_WORKER_BYTES)} or more besides its envs and batches. What does not fit is "
            "OutOfSharedMemory, or a worker that the kernel kills (WorkerDied, SIGKILL)."
        )
        mend = ("docker run --memory=8g …, or Slurm's --mem=8G, or fewer workers",)
        return [Finding("memory", value, "warning", follows, mend)]
    return [Finding("memory", value)]


@dataclass(frozen=True)
class SharedMemory:
    #: Of /dev/shm; None where there is none.
    total: int | None
    free: int | None
    #: Whether memory without a name can be made, and opened again; else why not.
    memfd: bool
    why_not: str | None = None


def gather_shared_memory() -> SharedMemory:
    total = free = None
    with suppress(OSError, AttributeError):
        about = os.statvfs("/dev/shm")
        total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    try:
        _try_memfd()
    except Exception as error:
        return SharedMemory(total, free, False, f"{type(error).__name__}: {error}")
    return SharedMemory(total, free, True)


def _try_memfd() -> None:
    library = platforms.libc()
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("swath-doctor")
    elif library is not None and hasattr(library, "memfd_create"):  # as process/memory.py, which imports torch
        descriptor = library.memfd_create(b"swath-doctor", 1)
    else:
        raise OSError(errno.ENOSYS, "no memfd_create")
    try:
        os.posix_fallocate(descriptor, 0, 4096)
        with open(f"/proc/self/fd/{descriptor}", "r+b"):
            pass
    finally:
        os.close(descriptor)


def conclude_shared_memory(facts: SharedMemory) -> list[Finding]:
    if not facts.memfd:
        follows = f"Workers share batches and weights through it ({facts.why_not}): only Collector works."
        mend = ("mount -t proc proc /proc, or a container that allows memfd_create (seccomp)",)
        return [Finding("shared memory", "no memfd", "error", follows, mend)]
    if facts.total is None or facts.free is None:
        return [Finding("shared memory", "memfd; there is no /dev/shm, and swath needs none")]
    value = f"memfd; /dev/shm: {show_bytes(facts.free)} free of {show_bytes(facts.total)}"
    if facts.free < _GB:
        follows = (
            "No limit for swath, which does not use /dev/shm. Torch's share_memory_(), DataLoader workers and Ray's "
            "object store do: they may end with a bus error."
        )
        mend = ("docker run --shm-size=2g …, or mount -o remount,size=2g /dev/shm",)
        return [Finding("shared memory", value, "warning", follows, mend)]
    return [Finding("shared memory", value)]


# -- descriptors and processes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Descriptors:
    soft: int | None
    hard: int | None
    cores: int


def gather_descriptors() -> Descriptors:
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Descriptors(_finite(soft), _finite(hard), _cores())


def conclude_descriptors(facts: Descriptors) -> list[Finding]:
    if facts.soft is None:
        return [Finding("open files", "no limit")]
    hard = "none" if facts.hard is None else str(facts.hard)
    value = f"{facts.soft} at most (hard limit: {hard})"
    workers = max(0, (facts.soft - _DESCRIPTORS) // _DESCRIPTORS_OF_WORKER)
    wanted = max(1024, _DESCRIPTORS + 8 * _DESCRIPTORS_OF_WORKER * facts.cores)
    if facts.soft >= min(wanted, 1024) and workers >= facts.cores:
        return [Finding("open files", value)]
    if facts.hard is None or facts.hard >= wanted:
        mend = (f"ulimit -n {wanted}",)
    else:
        mend = (f"docker run --ulimit nofile={wanted} …, or nofile in /etc/security/limits.conf",)
    follows = (
        f"That is enough for {workers} worker{'s' * (workers != 1)}, and fewer where batches, sockets and datasets are "
        "open, too. More: OutOfSharedMemory, Too many open files."
    )
    return [Finding("open files", value, "warning", follows, mend)]


@dataclass(frozen=True)
class Processes:
    #: ulimit -u, and what the user runs already; None for root, whom it does not bind.
    limit: int | None
    running: int | None
    limits: CgroupLimits
    cores: int


def gather_processes() -> Processes:
    import resource

    limit = _finite(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    is_bound = os.geteuid() != 0 and limit is not None
    return Processes(limit if is_bound else None, _threads_of_user() if is_bound else None, read_limits(), _cores())


def _threads_of_user() -> int | None:
    me, count = os.geteuid(), 0
    with suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            with suppress(OSError):  # it may have ended
                if entry.name.isdigit() and entry.stat().st_uid == me:
                    count += len(os.listdir(f"{entry.path}/task"))
        return count
    return None


def conclude_processes(facts: Processes) -> list[Finding]:
    parts, room = [], []
    if facts.limit is not None:
        running = "" if facts.running is None else f", {facts.running} in use"
        parts.append(f"{facts.limit} of this user at most{running}")
        room.append((facts.limit - (facts.running or 0), f"ulimit -u {facts.limit + 1000}"))
    if facts.limits.processes is not None and facts.limits.processes_left is not None:
        parts.append(f"{facts.limits.processes} in the control group, {facts.limits.processes_left} left")
        room.append((facts.limits.processes_left, f"docker run --pids-limit={facts.limits.processes + 1000} …"))
    if not room:
        return [Finding("processes", "no limit")]
    left, mend = min(room)
    needed = _THREADS + facts.cores + _THREADS_OF_WORKER * facts.cores
    if left >= 2 * needed:
        return [Finding("processes", "; ".join(parts))]
    workers = max(0, (left - _THREADS - facts.cores) // _THREADS_OF_WORKER)
    follows = (
        f"Threads count, too: that is room for some {workers} workers. More: BlockingIOError, Resource temporarily "
        "unavailable; or can't start new thread."
    )
    return [Finding("processes", "; ".join(parts), "warning", follows, (mend,))]


def _finite(limit: int) -> int | None:
    import resource

    return None if limit == resource.RLIM_INFINITY else limit


def _cores() -> int:
    from swath.workers.layout import available_cores

    return available_cores()


# -- folders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """None where there is none, with the reason."""

    free: int | None
    writable: bool
    why_not: str | None = None
    #: Only of the temporary folder: how long its path is. (The path itself may have a user's name in it.)
    length: int = 0


def gather_here() -> Folder:
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return Folder(None, False, "it is not there any more")
    return Folder(shutil.disk_usage(here).free, _is_writable(here))


def _is_writable(folder: str) -> bool:
    """By a file that has no name where the system has such: what is said to be allowed need not be."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def conclude_here(facts: Folder) -> list[Finding]:
    name = "current folder"
    if facts.free is None:
        return [Finding(name, facts.why_not or "", "error", "Torch cannot be imported in it.", ("cd",))]
    value = f"{show_bytes(facts.free)} free"
    if not facts.writable:
        follows = "Relative paths of --out, of buffers in files and of logs cannot be written."
        return [Finding(name, f"{value}, read-only", "warning", follows, ("cd to a folder of your own",))]
    if facts.free < _GB:
        follows = (
            "Datasets and buffers in files need more, or end with DiskFull: 1 M frames of CartPole take 60 MB, of "
            "Atari 28 GB."
        )

        return [Finding(name, value, "warning", follows, ("df -h . ; du -sh * | sort -h",))]
    return [Finding(name, f"{value}, writable")]


def gather_temporary() -> Folder:
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return Folder(None, False, error.strerror or str(error))
    return Folder(shutil.disk_usage(folder).free, _is_writable(folder), length=len(folder))


def conclude_temporary(facts: Folder) -> list[Finding]:
    name = "temporary folder"
    if facts.free is None or not facts.writable:
        follows = "No worker can be started: multiprocessing keeps its socket there."
        return [Finding(name, facts.why_not or "read-only", "error", follows, ("export TMPDIR=/a/folder/of/yours",))]
    # pymp-xxxxxxxx/listener-xxxxxxxx, which multiprocessing makes in it
    if facts.length + len("/pymp-12345678/listener-12345678") > _LONGEST_SOCKET_PATH:
        follows = "No worker can be started: the path of multiprocessing's socket is too long (AF_UNIX path too long)."
        value = f"a path of {facts.length} characters"
        return [Finding(name, value, "error", follows, ("export TMPDIR=/tmp",))]
    if facts.free < 10_000_000:
        follows = "No room for multiprocessing's socket, and for what torch and Ray write there."
        return [Finding(name, f"{show_bytes(facts.free)} free", "warning", follows, ("export TMPDIR=/another/disk",))]
    return [Finding(name, f"{show_bytes(facts.free)} free, writable")]


PROBES: tuple[Probe, ...] = (
    Probe("system", gather_system, conclude_system),
    Probe("cores", gather_cores, conclude_cores),
    Probe("memory", gather_memory, conclude_memory),
    Probe("shared memory", gather_shared_memory, conclude_shared_memory),
    Probe("open files", gather_descriptors, conclude_descriptors),
    Probe("processes", gather_processes, conclude_processes),
    Probe("current folder", gather_here, conclude_here),
    Probe("temporary folder", gather_temporary, conclude_temporary),
)
