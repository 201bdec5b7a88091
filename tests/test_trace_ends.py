"""How traces begin and end where something else does at the same time: a failure, another thread, a batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from leaks import wait_until
from swath.collectors import Collector, MultiAsyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymWrapper
from swath.errors import WorkerDied
from swath.timeline.chrome import trace_events
from swath.timeline.companions import Companion, companions
from swath.timeline.recorder import Kind, Record, Recorder, read
from swath.timeline.recording import Recording
from trace_format import TraceFile


class Slow(gym.Wrapper):
    """Steps that a trace shows one by one; ``at`` is what is done in one of them."""

    def __init__(self, at: dict[int, Any] | None = None) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.at, self.count = at or {}, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        self.at.get(self.count, lambda: None)()
        time.sleep(0.005)
        return self.env.step(action)


def _is_within(inner: dict[str, Any], slices: list[dict[str, Any]]) -> bool:
    end = inner["ts"] + inner["dur"]
    return any(each["ts"] <= inner["ts"] + 0.01 and end <= each["ts"] + each["dur"] + 0.01 for each in slices)


def _fail() -> None:
    raise ZeroDivisionError


def _press_ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("what", "error"), [(_fail, ZeroDivisionError), (_press_ctrl_c, KeyboardInterrupt)])
def test_the_time_of_a_batch_that_failed_is_not_yours(what: Any, error: type[BaseException], tmp_path: Path) -> None:
    collector = Collector(GymWrapper(Slow({30: what})), frames_per_batch=20)
    with pytest.raises(error), collector.trace(tmp_path / "run.json"):
        for _ in collector:
            pass
    collector.shutdown()
    found = TraceFile(tmp_path / "run.json")
    steps, (yours, *_) = found.slices(1, "slow step"), found.slices(1, "yours")
    assert len(steps) == 29
    assert all(_is_within(step, found.slices(1, "next batch")) for step in steps)
    assert len(found.slices(1, "next batch")) == 2
    assert not any(_is_within(step, [yours]) for step in steps)


def test_a_trace_that_is_stopped_while_another_thread_collects(tmp_path: Path) -> None:
    stepping, go_on = threading.Event(), threading.Event()
    env = Slow({30: lambda: (stepping.set(), go_on.wait(30))})
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = Collector(GymWrapper(env), frames_per_batch=20, replay_buffer=buffer)
    trace = collector.trace(tmp_path / "run.json")
    collector.start()
    assert stepping.wait(30)
    trace.stop()
    go_on.set()
    collector.async_shutdown()
    found = TraceFile(tmp_path / "run.json")
    assert len({tid for _, tid in found.tracks}) == 1  # the thread that stops it has done nothing
    assert all(_is_within(step, found.slices(1, "next batch")) for step in found.slices(1, "slow step"))
    assert len(found.slices(1, "slow step")) == 29
    assert {event["args"]["name"] for event in found.events if event["name"] == "thread_name"} == {"collector"}


@pytest.mark.processes
def test_a_batch_that_had_begun_or_does_not_end(tmp_path: Path) -> None:
    collector = MultiAsyncCollector([lambda: GymWrapper(Slow())] * 2, frames_per_batch=50, num_workers=2)
    batches = iter(collector)
    next(batches)  # workers are in the middle of their next ones
    with collector.trace(tmp_path / "run.json") as trace:
        for _ in range(4):  # so that one worker at least has begun another
            next(batches)
    collector.shutdown()
    found = TraceFile(trace.path)
    assert any(found.slices(pid, "slow step") for pid in found.pids("worker"))
    for pid in found.pids("worker"):
        assert all(_is_within(step, found.slices(pid, "collect")) for step in found.slices(pid, "slow step"))


@pytest.mark.processes
def test_the_batch_of_a_worker_that_was_killed(tmp_path: Path) -> None:
    hangs = {30: lambda: time.sleep(1000)}  # in its second batch
    collector = MultiAsyncCollector([lambda: GymWrapper(Slow(hangs))] * 2, frames_per_batch=20, num_workers=2)
    trace = collector.trace(tmp_path / "run.json")
    collector.next()
    assert wait_until(lambda: collector.stats()["workers"][1]["frames"] == 29, timeout_s=60)
    os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        list(collector)
    found = TraceFile(trace.path)
    (killed,) = found.pids("worker 1")
    assert len(found.slices(killed, "slow step")) == 29
    assert len(found.slices(killed, "collect")) == 2
    assert all(_is_within(step, found.slices(killed, "collect")) for step in found.slices(killed, "slow step"))


def test_of_threads_that_end_it_at_the_same_time_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10)
    trace = collector.trace(tmp_path / "run.json")
    collector.next()
    first, second, calls, end = threading.Event(), threading.Event(), [], collector.end_recording

    def ends() -> Any:
        calls.append(threading.get_ident())
        (second if first.is_set() else first).set()
        second.wait(0.2)  # for another one, which does not come
        return end()

    monkeypatch.setattr(collector, "end_recording", ends)
    threads = [threading.Thread(target=trace.stop) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert first.wait(30)
    for thread in threads:
        thread.join()
    collector.shutdown()
    assert len(calls) == 1
    assert TraceFile(tmp_path / "run.json").slices(1, "collect")
    companion = Companion("evaluator")
    companions.add(companion)
    assert companion.recorder is None
    companions.begin_recording()
    assert companion.recorder is not None
    companions.end_recording()


def test_a_trace_that_could_not_begin_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    companion = Companion("evaluator")
    companions.add(companion)

    def fails(recorder: Recorder) -> None:
        raise OSError("no descriptor is left")

    with monkeypatch.context() as patch:
        patch.setattr(collector, "_begin_recording", fails)
        for _ in range(2):
            with pytest.raises(OSError, match="no descriptor"):
                collector.trace(tmp_path / "run.json")
            with pytest.raises(OSError, match="no descriptor"):
                collector.report(tmp_path / "run.html")
    assert companion.recorder is None
    assert not [thread for thread in threading.enumerate() if thread.name == "swath-trace"]
    with collector.trace(tmp_path / "run.json"):
        collector.next()
    assert TraceFile(tmp_path / "run.json").slices(1, "collect")
    collector.shutdown()


def test_what_others_did_is_lost_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)

    def fails() -> Any:
        raise RuntimeError("it does not answer")

    monkeypatch.setattr(collector, "_recordings_elsewhere", fails)
    trace = collector.trace(tmp_path / "run.json")
    collector.next()
    with pytest.warns(UserWarning, match="has this process only: RuntimeError: it does not answer"):
        trace.stop()
    assert TraceFile(tmp_path / "run.json").slices(1, "collect")
    collector.shutdown()


def test_the_file_is_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with collector.report("run.html", trace="run.json") as report:
        collector.next()
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert report.path == tmp_path / "run.html"
    assert TraceFile(tmp_path / "run.json").slices(1, "collect")
    assert report.path.stat().st_size
    assert not list((tmp_path / "elsewhere").iterdir())
    collector.shutdown()


def test_a_page_and_its_trace_are_two_files(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    with pytest.raises(ValueError, match="give the trace a file of its own"):
        collector.report(tmp_path / "run", trace=str(tmp_path / "run"))
    collector.shutdown()


@pytest.mark.filterwarnings("error")
def test_a_file_that_cannot_be_written_does_not_keep_the_env_open() -> None:
    closed = []

    class Closing(Slow):
        def close(self) -> None:
            closed.append(True)
            super().close()

    collector = Collector(lambda: GymWrapper(Closing()), frames_per_batch=5)
    trace = collector.trace("/dev/full")
    collector.next()
    with pytest.raises(UserWarning, match="could not be written to /dev/full"):
        collector.shutdown()
    assert closed
    assert trace.recordings


def test_half_a_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    trace = collector.trace(tmp_path / "run.json")
    collector.next()

    def interrupted(events: Any) -> Any:
        yield {"ph": "M"}
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("swath.timeline.chrome.trace_events", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trace.stop()
    assert not (tmp_path / "run.json").exists()
    assert TraceFile(trace.stop()).slices(1, "collect")
    collector.shutdown()


def test_what_lasts_ends_after_all_that_is_in_it() -> None:
    recorder = Recorder(torch.zeros(64 + 10 * 64, dtype=torch.uint8))
    recorder.begin(Kind.COLLECT, 1.0)
    recorder.add(Kind.STEPS, 2.0, 4.0)
    *_, last = read(recorder.memory, now_s=3.0)
    assert (last.kind, last.start_s, last.end_s) == (Kind.COLLECT, 1.0, 4.0)
    recorder.add(Kind.COLLECT, 1.0, 5.0)  # it has just ended, and that was not said yet
    assert [record.kind for record in read(recorder.memory, now_s=3.0)] == [Kind.STEPS, Kind.COLLECT]


def test_threads_are_named_for_what_they_do() -> None:
    records = [
        Record(Kind.GAUGE, 0.0, 0.0, 1.0, 5.0, 0.0, 5),
        Record(Kind.UPDATE, 1.0, 2.0, 1.0, 0.0, 0.0, 6),
        Record(Kind.COLLECT, 1.0, 3.0, 0.0, 0.0, 0.0, 7),
        Record(Kind.UPDATE, 2.0, 3.0, 2.0, 0.0, 0.0, 8),
    ]
    events = trace_events([Recording("node 0", 12, records)])
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "thread 1", 2: "steps", 3: "thread 3"}


#: The collector is there to the very end: the traceback has it.
_FAILS = """
import os, sys
from swath.collectors import Collector, MultiSyncCollector

if __name__ == "__main__":
    if sys.argv[1] == "workers":
        collector = MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=50, num_workers=2)
    else:
        collector = Collector("CartPole-v1", frames_per_batch=50)
    collector.report("run.html", trace="run.json")
    for number, _ in enumerate(collector):
        1 / (3 - number)
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["workers", "single"])
def test_a_program_that_fails_has_its_files(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_FAILS)
    command = [sys.executable, "train.py", kind]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert done.returncode == 1
    assert len(TraceFile(tmp_path / "run.json").slices(1, "next batch")) == 4
    assert "<h2>Timeline</h2>" in (tmp_path / "run.html").read_text()


_FORKS = """
import os, sys
from swath.collectors import Collector

collector = Collector("CartPole-v1", frames_per_batch=50)
with collector.trace("run.json"):
    collector.next()
    child = os.fork()
    if child == 0:
        own = Collector("CartPole-v1", frames_per_batch=50, total_frames=100)
        with own.trace("child.json"):
            list(own)
        sys.exit(5)  # leaves the parent's block, too
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, os.path.getsize("run.json"))
"""


@pytest.mark.processes
def test_a_forked_child_traces_its_own_and_leaves_its_parents_file_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORKS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "5 0\n", done.stderr
    assert TraceFile(tmp_path / "run.json").slices(1, "collect")
    assert TraceFile(tmp_path / "child.json").slices(1, "collect")
