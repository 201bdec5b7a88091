"""The process that imports torch and starts a worker, and tells line by line how far it is.

``python -c "…; tell(descriptor)"``: what crashes or hangs here is a line of the doctor's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

_IMPORTS = ("numpy", "torch", "tensordict", "gymnasium")
_FRAMES = 64


def tell(descriptor: int) -> None:
    """Run all stages; a line of JSON when one begins, and one when it has ended."""
    threading.Thread(target=_leave_with_doctor, daemon=True).start()
    with open(descriptor, "w", encoding="utf-8") as stream:

        def say(**message: Any) -> None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()

        for name, stage in STAGES.items():
            say(begins=name)
            begin = time.monotonic()
            try:
                facts = stage()
            except Exception as error:
                say(ended=name, error=_told(error))
                if name == "torch":
                    break  # nothing else can be found out
            else:
                say(ended=name, facts={**facts, "seconds": round(time.monotonic() - begin, 3)})


def _leave_with_doctor() -> None:
    sys.stdin.read()
    os._exit(1)


def _told(error: Exception) -> str:
    from swath.cli.doctor.findings import tidy
    from swath.errors import notes_of

    return tidy(f"{type(error).__name__}: {error}") + "".join(f"; {tidy(note)}" for note in notes_of(error)[:3])


def torch_facts() -> dict[str, Any]:
    """Imports what swath needs, and asks torch about itself."""
    took, cpu = {}, time.process_time()
    with suppress(Exception):
        from swath.process.start import server

        server().ensure_running()  # it imports the same meanwhile
    for name in _IMPORTS:
        begin = time.monotonic()
        try:
            import_module(name)
        except Exception as error:
            error.add_note(f"while {name} was imported")
            raise
        took[name] = round(time.monotonic() - begin, 2)
    torch: Any = import_module("torch")
    from swath.workers.layout import available_cores

    torch.from_numpy(import_module("numpy").zeros(1))  # fails where the two were built for different NumPys
    return {
        "seconds_to_import": took,
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cores": available_cores(),
        "openmp": torch.backends.openmp.is_available(),
        "mkl": torch.backends.mkl.is_available(),
        "built_for": torch.version.cuda or (getattr(torch.version, "hip", None) and "ROCm") or None,
        "start_method_set": multiprocessing.get_start_method(allow_none=True),
    }


def gpu_facts() -> dict[str, Any]:
    """CUDA is started only where there is some: it takes seconds and memory."""
    import torch

    devices = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if is_available else 0):
        torch.zeros(1, device=f"cuda:{index}").item()
        free, total = torch.cuda.mem_get_info(index)
        devices.append({"name": torch.cuda.get_device_name(index), "free": free, "total": total})
    return {
        "devices": devices,
        "why_not": str(said[0].message) if said else None,
        "driver": os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "built_for": torch.version.cuda,
    }


def worker_facts() -> dict[str, Any]:
    """A collector with a worker, from the constructor to the end."""
    import torch

    from swath.collectors import MultiSyncCollector

    torch.set_num_threads(1)
    times = [time.monotonic()]
    collector = MultiSyncCollector([make_env], frames_per_batch=_FRAMES, num_workers=1)
    try:
        batches = iter(collector)
        next(batches)
        times.append(time.monotonic())
        next(batches)
        times.append(time.monotonic())
        own = _own_bytes(collector.stats()["workers"][0]["pid"])
    finally:
        collector.shutdown()
    start, batch, end = times[1] - times[0], times[2] - times[1], time.monotonic() - times[-1]
    return {
        "seconds_to_start": round(start, 3),
        "seconds_of_batch": round(batch, 4),
        "seconds_to_end": round(end, 3),
        "own_bytes": own,
    }


def make_env() -> Any:
    """The smallest: it is about the worker."""
    import gymnasium
    import numpy as np

    class Tiny(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), 0.0, False, False, {}

    return Tiny()


def _own_bytes(pid: int) -> int | None:
    """Memory that the worker shares with nobody."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    return None


STAGES: dict[str, Callable[[], dict[str, Any]]] = {"torch": torch_facts, "gpu": gpu_facts, "worker": worker_facts}
