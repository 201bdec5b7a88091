"""Programs in a process of their own that has torch imported already: they start in milliseconds, not in seconds."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from swath.process.start import start_process


def _run(script: str, arguments: list[str], folder: str, out: Connection, err: Connection) -> None:
    """In the process: as ``python -c`` does it, in a session of its own."""
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, folder)
    for number, name, pipe in ((1, "stdout", out), (2, "stderr", err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
        setattr(sys, name, os.fdopen(number, "w", 1, closefd=False))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})


class WarmProgram:
    """What ``subprocess.Popen`` offers, of a script in a process that was forked from the server of workers.

    For what happens while it runs: the start and the end of an interpreter are not in it.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        ends = [Pipe(duplex=False) for _ in range(2)]
        (ours_out, theirs_out), (ours_err, theirs_err) = ends
        args = script, list(arguments), os.getcwd(), theirs_out, theirs_err
        self._process: Any = start_process("forkserver", _run, args, "program")
        self.pid: int = self._process.pid
        for _, theirs in ends:
            theirs.close()
        self.stdout, self.stderr = _as_file(ours_out), _as_file(ours_err)
        self.returncode: int | None = None

    def __enter__(self) -> WarmProgram:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._process.exitcode

    def wait(self, timeout: float | None = 30) -> int:
        if self.returncode is None:
            self._process.join(timeout)
            self.returncode = self._process.exitcode
            assert self.returncode is not None, f"process {self.pid} did not end within {timeout} s"
            self._process.close()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self.stderr.read()))
        reader.start()
        out = self.stdout.read()
        reader.join()
        self.wait()
        return out, said[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _as_file(pipe: Connection) -> IO[str]:
    file = os.fdopen(os.dup(pipe.fileno()))
    pipe.close()
    return file
