"""What the control groups of this process allow it: cores, memory, processes; both versions of them.

A group is as narrow as the narrowest above it. In a container a process usually sees its own group as the root; under
Slurm or systemd it does not, and its limits are further down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
#: The first version says this, and less, where there is no limit.
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class CgroupLimits:
    """None where there is no limit."""

    cores: float | None = None
    memory: int | None = None
    #: What is left of it: pages of files that can be given back count as free.
    memory_left: int | None = None
    processes: int | None = None
    #: Processes and threads that may still be started.
    processes_left: int | None = None


def read_limits(root: Path = ROOT, own: Path = OWN) -> CgroupLimits:
    """What is said of the groups that ``own`` names, and of those above them, under ``root``."""
    paths = _own_paths(own)
    memory = [pair for folder in _folders(root, "memory", paths) if (pair := _memory(folder)) is not None]
    processes = [pair for folder in _folders(root, "pids", paths) if (pair := _processes(folder)) is not None]
    return CgroupLimits(
        cores=min(_known(_cores, _folders(root, "cpu", paths)), default=None),
        memory=min((most for most, _ in memory), default=None),
        memory_left=min((left for _, left in memory), default=None),
        processes=min((most for most, _ in processes), default=None),
        processes_left=min((left for _, left in processes), default=None),
    )


def _known(ask: Callable[[Path], float | None], folders: Iterable[Path]) -> Iterator[float]:
    return (said for folder in folders if (said := ask(folder)) is not None)


def _own_paths(own: Path) -> dict[str, str]:
    """Controllers (\"\" for those of the second version) and the group that this process is in."""
    paths: dict[str, str] = {}
    with suppress(OSError, UnicodeDecodeError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _folders(root: Path, controller: str, paths: dict[str, str]) -> list[Path]:
    """Where limits of a controller may stand: of the second version, of both side by side, and of the first."""
    bases = [(root, ""), (root / "unified", ""), (root / controller, controller)]
    return [folder for base, name in bases for folder in _upwards(base, paths.get(name, "/"))]


def _upwards(base: Path, path: str) -> list[Path]:
    parts = PurePosixPath(path.lstrip("/"))
    if ".." in parts.parts:  # a group outside of what this process sees
        return [base]
    return [base / part for part in (parts, *parts.parents)] if parts.parts else [base]


def _cores(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = _read(folder / "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _memory(folder: Path) -> tuple[int, int] | None:
    for most, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            limit = int(_read(folder / most))
            if limit < _NO_LIMIT:
                taken = int(_read(folder / used)) - _line(folder / "memory.stat", cached)
                return limit, max(0, limit - max(0, taken))
    return None


def _processes(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        limit = int(_read(folder / "pids.max"))
        return limit, max(0, limit - int(_read(folder / "pids.current")))
    return None


def _line(path: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in _read(path).splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    # Not pathlib's: a Ctrl-C in there is shown with an AttributeError that pathlib handles inside.
    with open(path) as file:
        return file.read().strip()
