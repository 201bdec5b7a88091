"""The machine that is measured: what it is, whether it is busy, and waiting until it is not."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import swath

_PROC = Path("/proc")
#: Long enough that a busy process shows in counters of 10 ms.
_LOOK_S = 0.2


def machine_facts() -> dict[str, Any]:
    packages = ("torchrl", "stable-baselines3", "envpool", "torch", "tensordict", "gymnasium", "numpy")
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"swath": swath.__version__, **{package: _version(package) for package in packages}},
        "swath_commit": _commit(),
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], usable_cores()
    if load > 0.25 * cores:
        print(f"WARNING: load average {load:.2f} on {cores} cores: something else runs, numbers will be off\n")


def wait_until_idle(timeout_s: float = 60.0) -> None:
    """Until the processes that this one started rest.

    Collectors that work ahead go on after they were asked for the last time, until what they keep ready is full. Who
    is measured meanwhile would have only a part of the machine.
    """
    if not _PROC.is_dir():  # not Linux: nothing to look at
        time.sleep(2)
        return
    deadline = time.monotonic() + timeout_s
    used = _ticks_of_descendants()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        before, used = used, _ticks_of_descendants()
        if used - before <= 1:
            return
    raise RuntimeError(f"a contender that nobody asks is still at work after {timeout_s:g} s; nothing can be measured")


def _ticks_of_descendants() -> int:
    """CPU time that the children of this process, and theirs, have used; in clock ticks."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # The name, in brackets, may hold anything; behind it come the state, the parent, ..., user and system time.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(folder.name)
        ticks[pid] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(pid)
    total, waiting = 0, list(children.get(os.getpid(), ()))
    while waiting:
        pid = waiting.pop()
        total += ticks[pid]
        waiting += children.get(pid, ())
    return total
