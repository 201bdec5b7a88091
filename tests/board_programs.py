"""Programs that collect until they are told to end, for those who look at them from outside."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from leaks import wait_until
from programs import WarmProgram
from swath.insight.programs import Program, Programs

#: Before the collecting itself; afterwards, it goes on until a signal comes.
ONE = """
from swath.collectors import Collector
collector = Collector("CartPole-v1", frames_per_batch=50, total_frames=-1)
"""
COLLECT = """
import time
for batch in collector:
    time.sleep(0.005)
"""


@contextlib.contextmanager
def a_program(script: str = ONE + COLLECT) -> Iterator[WarmProgram]:
    """Of which others know; it is killed in the end."""
    with WarmProgram(script) as program:
        try:
            assert wait_until(lambda: bool(boards_of(program.pid)) or program.poll() is not None, 30)
            assert program.poll() is None, program.stderr.read()
            yield program
        finally:
            program.send_signal(signal.SIGCONT)  # or it could not be killed in order


def boards_of(pid: int) -> list[int]:
    """The pids that are found when this one is looked at."""
    programs = Programs(only=pid)
    try:
        return [program.pid for program in programs.find()]
    finally:
        programs.close()


@contextlib.contextmanager
def looking_at(pid: int | None = None) -> Iterator[Program]:
    """The one program that is found there; this process by default."""
    programs = Programs(only=os.getpid() if pid is None else pid)
    try:
        (program,) = programs.find()
        yield program
    finally:
        programs.close()
