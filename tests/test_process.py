"""The supervisor of processes: how one has ended, who is asked, told and killed, and what is ended at exit."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import pytest

from followers import follow
from swath.modules import ProcessInferenceServer
from swath.process.supervise import Process, end_processes

pytestmark = pytest.mark.processes


class Started:
    def __init__(self, obeys: bool = True) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = Process("forkserver", follow, (theirs, obeys), "test")
        assert self.pipe.recv() == "ready"


@pytest.fixture
def started() -> Iterator[Any]:
    all_of_them: list[Started] = []

    def start(obeys: bool = True) -> Started:
        all_of_them.append(Started(obeys))
        return all_of_them[-1]

    yield start
    for each in all_of_them:
        each.process.kill()
        each.process.has_ended(10.0)
        each.process.close()
        each.pipe.close()


@pytest.mark.parametrize("without_pidfd", [False, True])
def test_asked_then_told_then_killed(started: Any, without_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    leaves, obeys, stays = started(), started(), started(obeys=False)
    processes = [each.process for each in (leaves, obeys, stays)]
    assert [each.exit_code() for each in processes] == [None] * 3
    begun = time.monotonic()
    end_processes(processes, 1.0, lambda: leaves.pipe.send(7))
    took_s = time.monotonic() - begun
    assert [each.exit_code() for each in processes] == [7, -signal.SIGTERM, -signal.SIGKILL]
    assert took_s >= 0.7, "the last two were not given their time"


def test_without_sigterm(started: Any) -> None:
    each = started()
    end_processes([each.process], 0.05, terminates=False)
    assert each.process.exit_code() == -signal.SIGKILL


def test_ctrl_c_kills_at_once_and_comes_afterwards(started: Any) -> None:
    each = started(obeys=False)
    with pytest.raises(KeyboardInterrupt):
        end_processes([each.process], 100.0, lambda: signal.raise_signal(signal.SIGINT))
    assert each.process.exit_code() == -signal.SIGKILL


def test_a_closed_one_is_known_to_have_ended(started: Any) -> None:
    each = started()
    each.pipe.send(5)
    assert each.process.has_ended(30.0)
    for _ in range(2):
        each.process.close()
        assert (each.process.has_ended(), each.process.is_closed, each.process.exit_code()) == (True, True, 5)
    each.process.kill()  # nobody, whoever has its number now


def test_threads_take_no_exit_code_away_from_each_other(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes through a pipe: whoever reads it second, before the first has noted it, takes the end for code 255."""
    each, codes, both = started(), [], threading.Barrier(2)
    each.pipe.send(5)
    assert each.process.has_ended(30.0)
    read = multiprocessing.forkserver.read_signed  # type: ignore[attr-defined]

    def read_slowly(descriptor: int) -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other one, if it gets here
        return read(descriptor)

    monkeypatch.setattr(multiprocessing.forkserver, "read_signed", read_slowly)
    threads = [threading.Thread(target=lambda: codes.append(each.process.exit_code())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [5, 5]
    assert both.broken


def test_at_exit_the_last_kind_is_ended_first_and_what_was_ended_is_not() -> None:
    script = """
from swath.process.supervise import EndedAtExit
class Thing:
    def __init__(self, name): self.name = name
first = EndedAtExit(lambda things: print("first:", sorted(each.name for each in things)))
second = EndedAtExit(lambda things: print("second:", sorted(each.name for each in things)))
kept = [Thing("a"), Thing("b"), Thing("c")]
first.add(kept[0]); second.add(kept[1]); first.add(kept[2]); first.add(Thing("garbage")); first.discard(kept[2])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "second: ['b']\nfirst: ['a']\n"


def test_a_forked_copy_of_an_inference_servers_owner_is_told_so() -> None:
    with ProcessInferenceServer(lambda: lambda observation: observation) as server:
        ours, theirs = Pipe(duplex=False)
        with ours, theirs:
            if not (pid := os.fork()):
                try:
                    server.stats()
                except BaseException as error:
                    theirs.send(f"{type(error).__name__}: {error}")
                finally:
                    os._exit(0)
            assert ours.recv() == (
                "ServerClosed: the inference server belongs to the process that this was forked from; ask a client()"
            )
            os.waitpid(pid, 0)
        assert server.stats()["requests"] == 0
