"""What only torch knows, and a real worker: asked of a process of its own, which may crash or hang."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from swath.cli.doctor.findings import Finding, Result, tidy
from swath.cli.doctor.findings import told as told_error
from swath.disk import show_bytes
from swath.process.supervise import how_it_ended

#: How long a stage may take, and what is said meanwhile.
STAGES = {
    "torch": (120.0, "importing torch"),
    "gpu": (60.0, "asking for GPUs"),
    "worker": (120.0, "starting a worker"),
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SLOW_IMPORT_S, _SLOW_START_S = 15.0, 30.0
_LOCAL_DISK = ("python -m venv /tmp/venv  # and install there",)
_CODE = (
    "import sys; sys.path[:] = sys.argv[2].split({separator!r}); "
    "from swath.cli.doctor.trial_child import tell; tell(int(sys.argv[1]))"
)


class Trial:
    """Starts at once; ``results`` waits. ``limits`` are in place of the times above."""

    def __init__(self, limits: Mapping[str, float] | None = None, code: str = _CODE) -> None:
        self._limits = {name: seconds for name, (seconds, _) in STAGES.items()} | dict(limits or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._why_not: str | None = None
        self._report, self._complaints = b"", b""
        #: The report has ended: all was told, or the process is gone.
        self._ended = False
        try:
            self._start(code)
        except (OSError, ValueError) as error:
            self._why_not = told_error(error)

    def _start(self, code: str) -> None:
        if not sys.executable:
            raise ValueError("this Python does not know its own executable")
        self._pipe, theirs = os.pipe()
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c"]
        command += [code.format(separator=os.pathsep), str(theirs), os.pathsep.join(sys.path)]
        pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, pass_fds=[theirs], stdin=pipe, stdout=devnull, stderr=pipe)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)

    def results(self, say: Callable[[str], Any] = lambda text: None) -> Iterator[tuple[str, Result]]:
        """What each stage found; ``say`` is told what is waited for."""
        if self._process is None:
            failed = Finding("trial", f"no process can be started: {self._why_not}", "error", *_NO_PROCESS)
            yield "trial", Result((failed,))
            return
        for name, (_, doing) in STAGES.items():
            say(doing)
            ended = self._wait_for(name, self._limits[name])
            if ended is None:
                yield name, Result((self._gave_up(name, doing),))
                return
            yield name, _result(name, ended)
            if name == "torch" and "error" in ended:
                return

    def _wait_for(self, stage: str, seconds: float) -> dict[str, Any] | None:
        """What was said at the end of a stage; None when nothing more comes."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self._lines(deadline):
                if line.get("ended") == stage:
                    return line
            if self._ended or time.monotonic() >= deadline:
                return None

    def _lines(self, deadline: float) -> Iterator[dict[str, Any]]:
        while b"\n" not in self._report and not self._ended:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                return
        while b"\n" in self._report:
            line, _, self._report = self._report.partition(b"\n")
            with suppress(ValueError):
                yield json.loads(line)

    def _read(self, seconds: float) -> bool:
        """More of what it says, and of what it writes to stderr, which must not fill its pipe."""
        assert self._process is not None
        assert self._process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            complaints = self._process.stderr.fileno()
            with suppress(ValueError):
                selector.register(complaints, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(seconds)}
            if complaints in ready:
                part = os.read(complaints, 65536)
                self._complaints = (self._complaints + part)[-10_000:]
                if not part and self._pipe not in ready:
                    time.sleep(0.01)  # it closed its stderr, and goes on
            if self._pipe in ready:
                part = os.read(self._pipe, 65536)
                self._report += part
                self._ended = not part
        return bool(ready)

    def _gave_up(self, name: str, doing: str) -> Finding:
        assert self._process is not None
        follows, mend = _FOLLOWS[name]
        if not self._ended:
            return Finding(name, f"no answer within {self._limits[name]:.0f} s, while {doing}", "error", follows, mend)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        last = tidy("\n".join(reversed(self._complaints.decode(errors="replace").splitlines())))
        value = f"the process {how_it_ended(self._process.poll())}, while {doing}"
        return Finding(name, f"{value}: {last}" if last else value, "error", follows, mend)

    def close(self) -> None:
        """Its workers leave when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stderr):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            os.close(self._pipe)
            self._process = None


_NO_PROCESS = ("No worker can be started either.", ("mend what is wrong above: open files, processes, memory",))
_ABOVE = "mend what is wrong above; if nothing is:"
_IF_NOTHING_ABOVE = "mend what is wrong above; if nothing is, report it together with this page"
_FOLLOWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": (
        "swath cannot be imported.",
        (
            _ABOVE,
            "pip install --force-reinstall torch tensordict gymnasium numpy",
        ),
    ),
    "gpu": ("device='cuda' fails, or hangs, in the same way.", ("nvidia-smi", "export CUDA_VISIBLE_DEVICES=  # none")),
    "worker": ("Every collector with workers fails in the same way.", (_IF_NOTHING_ABOVE,)),
}


def _result(name: str, ended: Mapping[str, Any]) -> Result:
    if "error" in ended:
        return Result((Finding(name, f"failed: {ended['error']}", "error", *_FOLLOWS[name]),))
    facts = dict(ended["facts"])
    if name == "torch":
        facts["variables"] = thread_variables()
    return Result(tuple(_CONCLUDE[name](facts)), facts)


def thread_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}


def conclude_torch(facts: Mapping[str, Any]) -> Sequence[Finding]:
    seconds = facts["seconds_to_import"]
    slowest = max(seconds, key=seconds.get)
    value = f"{sum(seconds.values()):.1f} s, of which computing {facts['cpu_seconds']:.1f} s; longest: {slowest}"
    imports = Finding("imports", value)
    if sum(seconds.values()) > _SLOW_IMPORT_S:
        follows = (
            "Every program, and the first worker of each, waits for it. After a cold start the next is quicker. On a "
            "busy machine it takes as long as others compute. Else the disk is slow, of the network perhaps."
        )
        imports = Finding("imports", value, "warning", follows, _LOCAL_DISK)
    return [imports, _threads(facts)]


def _threads(facts: Mapping[str, Any]) -> Finding:
    cores, variables = facts["cores"], facts["variables"]
    libraries = " and ".join(name for name, key in (("OpenMP", "openmp"), ("MKL", "mkl")) if facts[key])
    value = f"torch: {facts['threads']}" + (f" ({libraries})" if libraries else "")
    value += "".join(f"; {name}={text}" for name, text in variables.items())
    many = [name for name, text in variables.items() if _first_number(text) > cores]
    odd = [name for name, text in variables.items() if _first_number(text) < 1]
    if odd:
        follows = "No number of threads: OpenMP says so in every process, and takes as many as it likes."
        return Finding("threads", value, "warning", follows, tuple(f"export {name}={cores}" for name in odd))
    if many or facts["threads"] > cores:
        follows = (
            f"More threads than cores ({cores}) wait for each other by spinning: small policies were measured to be "
            "several times slower. Workers of swath have one thread of torch each; other libraries in them obey these "
            "variables."
        )
        mend = tuple(f"export {name}={cores}" for name in many or ["OMP_NUM_THREADS"])
        return Finding("threads", value, "warning", follows, mend)
    return Finding("threads", value)


def _first_number(text: str) -> int:
    """``OMP_NUM_THREADS`` may be a list, for each level."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def conclude_gpu(facts: Mapping[str, Any]) -> Sequence[Finding]:
    devices, built_for = facts["devices"], facts["built_for"]
    if devices:
        shown = [
            f"{device['name']} ({show_bytes(device['free'])} free of {show_bytes(device['total'])})"
            for device in devices
        ]
        return [Finding("gpu", f"CUDA {built_for}: " + ", ".join(shown))]
    if not facts["driver"]:
        return [Finding("gpu", "none" if built_for else "none; torch is built for CPUs")]
    if facts["visible"] in ("", "-1"):
        return [Finding("gpu", f"hidden by CUDA_VISIBLE_DEVICES={facts['visible']}")]
    if not built_for:
        follows = "There is a GPU, but torch is built for CPUs: device='cuda' is refused."
        return [
            Finding("gpu", "not used", "warning", follows, ("https://pytorch.org/get-started says which to install",))
        ]
    why_not = f" ({tidy(facts['why_not'])})" if facts["why_not"] else ""
    follows = (
        f"There is a driver, and torch for CUDA {built_for}, but torch sees no GPU{why_not}: device='cuda' is refused."
    )
    return [Finding("gpu", "not available", "warning", follows, ("nvidia-smi", "docker run --gpus all …"))]


def conclude_worker(facts: Mapping[str, Any]) -> Sequence[Finding]:
    start = facts["seconds_to_start"]
    value = f"started in {start:.1f} s, a batch in {1e3 * facts['seconds_of_batch']:.0f} ms"
    value += f", ended in {facts['seconds_to_end']:.1f} s"
    if facts["own_bytes"] is not None:
        value += f"; {show_bytes(facts['own_bytes'])} of its own"
    if start > _SLOW_START_S:
        follows = (
            "Imports in the server that workers are forked from take most of it; further workers take milliseconds."
        )
        return [Finding("worker", value, "warning", follows, _LOCAL_DISK)]
    return [Finding("worker", value)]


_CONCLUDE: dict[str, Callable[[Mapping[str, Any]], Sequence[Finding]]] = {
    "torch": conclude_torch,
    "gpu": conclude_gpu,
    "worker": conclude_worker,
}
