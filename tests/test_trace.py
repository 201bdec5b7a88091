"""Traces, read by somebody who knows the format and not who writes it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import (
    AsyncBatchedCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from swath.collectors.distributed import DistributedCollector, RayCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv, ParallelEnv
from swath.modules import InferenceServer, ProcessInferenceServer
from swath.timeline.recorder import Kind, Recorder, read
from trace_format import TraceFile


def a_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


COLLECTORS: dict[str, Callable[[], Any]] = {
    "single": lambda: Collector("CartPole-v1", a_policy(), frames_per_batch=200, total_frames=4000),
    "sync": lambda: MultiSyncCollector(["CartPole-v1"] * 4, a_policy(), frames_per_batch=200, total_frames=4000),
    "async": lambda: MultiAsyncCollector(["CartPole-v1"] * 4, a_policy(), frames_per_batch=200, total_frames=4000),
    "batched": lambda: AsyncBatchedCollector(["CartPole-v1"] * 4, a_policy(), frames_per_batch=200, total_frames=4000),
    "parallel": lambda: Collector(
        ParallelEnv(4, lambda: GymEnv("CartPole-v1")), a_policy(), frames_per_batch=200, total_frames=4000
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", COLLECTORS)
def test_every_process_has_a_track_whose_slices_fill_its_time(kind: str, tmp_path: Path) -> None:
    collector = COLLECTORS[kind]()
    versions = []
    with collector.trace(tmp_path / "run.json") as trace:
        for _ in collector:
            collector.update_policy_weights_()
            versions.append(collector.policy_version)
    read_back = TraceFile(trace.path)
    workers = {"single": 0, "sync": 2, "async": 2, "batched": 2, "parallel": 2}[kind]
    assert len(read_back.processes) == 1 + workers
    for pid, name in read_back.processes.items():
        assert read_back.covered(pid) > 0.98, name
    assert len(read_back.slices(1, "yours")) == len(versions)
    assert [each["args"]["version"] for each in read_back.slices(1, "update_policy_weights_")] == versions
    assert {end["args"]["version"] for _, end in read_back.arrows} <= set(versions)
    assert read_back.arrows
    assert read_back.about["collector"].startswith(type(collector).__name__)


@pytest.mark.parametrize("slow", ["env", "policy", "reset"])
def test_what_is_slow_stands_alone_where_it_was(slow: str, tmp_path: Path) -> None:
    import gymnasium as gym

    class Slow(gym.Wrapper):
        def step(self, action: Any) -> Any:
            self.count = getattr(self, "count", 0) + 1
            if slow == "env" and self.count == 50:
                time.sleep(0.05)
            result = self.env.step(action)
            return result if self.count % 20 else (*result[:2], True, *result[3:])

        def reset(self, **kwargs: Any) -> Any:
            if slow == "reset" and getattr(self, "count", 0) == 60:
                time.sleep(0.05)
            return self.env.reset(**kwargs)

    calls = 0

    def policy(td: Any) -> Any:
        nonlocal calls
        calls += 1
        if slow == "policy" and calls == 50:
            time.sleep(0.05)
        return td.set("action", torch.tensor([1, 0]))

    from swath.envs import GymWrapper

    env = GymWrapper(Slow(gym.make("CartPole-v1")))
    collector = Collector(env, policy, frames_per_batch=100, total_frames=100)
    with collector.trace(tmp_path / "run.json") as trace:
        for _ in collector:
            pass
    found = TraceFile(trace.path)
    # (On a busy machine another step may have been slow, too.)
    slow_ones = [each for each in found.slices(1, "slow step") if each["dur"] > 50_000]
    parts = [each for each in found.slices(1, slow) if each["dur"] >= 50_000]
    assert [step for step in slow_ones for part in parts if step["ts"] <= part["ts"] < step["ts"] + step["dur"]]
    assert all(step["args"]["steps"] == 1 for step in slow_ones)


@pytest.mark.processes
def test_a_learner_with_a_buffer_that_workers_fill(tmp_path: Path) -> None:
    # Room for all of them: frames that are being replaced do not count.
    buffer = ReplayBuffer(storage=LazyTensorStorage(40_000), batch_size=32)
    collector = MultiAsyncCollector(
        ["CartPole-v1"] * 4, a_policy(), frames_per_batch=100, total_frames=6000, replay_buffer=buffer
    )
    with collector.trace(tmp_path / "run.json") as trace:
        collector.start()
        while buffer.write_count < 6000:
            buffer.sample(wait=True)
            collector.update_policy_weights_()
            time.sleep(0.02)
        collector.async_shutdown()
    found = TraceFile(trace.path)
    fill = [value for _, value in found.counters["frames in the buffer"]]
    assert fill == sorted(fill)
    assert fill[-1] > 0
    assert max(value for _, value in found.counters["frames/s"]) > 0
    assert found.counters["policy lag"]
    for pid in found.pids("worker"):
        assert found.slices(pid, "store")
        assert found.covered(pid) > 0.98
        assert [end for _, end in found.arrows if end["pid"] == pid]


@pytest.mark.processes
def test_a_worker_that_is_killed_and_its_successor(tmp_path: Path) -> None:
    collector = MultiCollector(
        ["CartPole-v1"] * 2, a_policy(), frames_per_batch=100, total_frames=3000, sync=True, num_workers=2,
        restart_workers=1,
    )  # fmt: skip
    trace = collector.trace(tmp_path / "run.json")
    for _ in range(5):
        collector.next()
    os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
    with pytest.warns(UserWarning, match="was started again"):
        list(collector)
    found = TraceFile(trace.path)
    before, after = found.pids("worker 1")
    assert "started again" in found.processes[after]
    assert found.slices(before, "steps")
    assert found.slices(after, "steps")


@pytest.mark.processes
def test_a_trace_in_the_middle_of_a_run_and_another_one(tmp_path: Path) -> None:
    collector = MultiSyncCollector(["CartPole-v1"] * 2, a_policy(), frames_per_batch=100, num_workers=2)
    batches = iter(collector)
    next(batches)
    for name in ("first", "second"):
        with collector.trace(tmp_path / name) as trace:
            with pytest.raises(RuntimeError, match="being traced already"):
                collector.trace(tmp_path / "third")
            for _ in range(3):
                next(batches)
        found = TraceFile(trace.path)
        assert len(found.slices(1, "wait for workers")) == 3
        assert all(len(found.slices(pid, "collect")) == 3 for pid in found.pids("worker"))
        next(batches)  # not recorded
    collector.shutdown()


def test_it_is_known_at_once_that_a_file_cannot_be_written(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    with pytest.raises(FileNotFoundError, match=r"trace: .*run\.json cannot be written: No such file or directory"):
        collector.trace(tmp_path / "nowhere" / "run.json")
    with pytest.raises(IsADirectoryError, match="cannot be written"):
        collector.trace(tmp_path)
    assert sum(batch.numel() for batch in collector) == 20


def test_a_disk_that_is_full_loses_nothing(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    trace = collector.trace("/dev/full")
    with pytest.warns(UserWarning, match="could not be written to /dev/full: No space left on device. It is kept"):
        for _ in collector:
            pass
    with pytest.raises(OSError, match="No space left"):
        trace.stop()
    trace.write(tmp_path / "run.json")
    assert TraceFile(tmp_path / "run.json").slices(1, "steps")


def test_an_exception_is_what_is_seen_and_the_file_is_there(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=40)

    def fails() -> None:
        with collector.trace(tmp_path / "run.json"):
            for number, _ in enumerate(collector):
                1 / (1 - number)

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(TraceFile(tmp_path / "run.json").slices(1, "collect")) == 2
    collector.shutdown()


def test_who_forgets_to_stop_has_the_file_when_the_collector_closes(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    collector.trace(tmp_path / "run.json")
    for _ in collector:
        pass
    assert TraceFile(tmp_path / "run.json").slices(1, "collect")
    assert not [thread for thread in threading.enumerate() if thread.name == "swath-trace"]


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10)
    with collector.trace(tmp_path / "run.json") as trace:
        pass
    assert not TraceFile(trace.path).arrows
    collector.shutdown()


def test_what_is_collected_does_not_depend_on_it(tmp_path: Path) -> None:
    batches = []
    for traced in (False, True):
        torch.manual_seed(0)
        collector = Collector("CartPole-v1", a_policy(), frames_per_batch=100, total_frames=500, init_random_frames=150)
        collector.set_seed(3)
        if traced:
            collector.trace(tmp_path / "run.json")
        batches.append(torch.cat(list(collector)))
    assert (batches[0] == batches[1]).all()


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    recorder = Recorder(torch.zeros(64 + 10 * 64, dtype=torch.uint8))
    for number in range(25):
        recorder.add(Kind.CALL, number, number + 1)
    with recorder.waiting(Kind.WAIT_FOR_REQUEST):
        *before, last = read(recorder.memory, now_s=1e9)
        assert [record.start_s for record in before] == list(range(15, 25))
        assert (last.kind, last.end_s) == (Kind.WAIT_FOR_REQUEST, 1e9)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "workers"),
    [(DistributedCollector, 1), (DistributedCollector, 2), pytest.param(RayCollector, 1, marks=pytest.mark.ray)],
)
def test_nodes(kind: Any, workers: int, tmp_path: Path) -> None:
    collector = kind(
        [lambda: GymEnv("CartPole-v1")] * 2, a_policy(), frames_per_batch=200, total_frames=4000,
        num_workers_per_collector=workers,
    )  # fmt: skip
    with collector.trace(tmp_path / "run.json") as trace:
        for _ in collector:
            collector.update_policy_weights_()
    found = TraceFile(trace.path)
    assert len(found.processes) == (3 if workers == 1 else 7)
    for pid in found.pids("node"):
        assert found.covered(pid) > 0.98, found.processes[pid]
    # Where a node has workers, it is they who take steps.
    steps = found.pids("node 0 " if workers == 1 else "node 0, worker")
    assert {end["pid"] for _, end in found.arrows} >= set(steps)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_has_a_track(backend: str, tmp_path: Path) -> None:
    policy = a_policy()
    collector = Collector("CartPole-v1", policy, frames_per_batch=200, total_frames=2000)
    more: dict[str, Any] = {"policy_factory": a_policy} if backend == "process" else {"policy": policy}
    evaluator = Evaluator(lambda: GymEnv("CartPole-v1"), num_trajectories=3, backend=backend, **more)
    with collector.trace(tmp_path / "run.json") as trace:
        for batch, _ in enumerate(collector):
            if batch in (2, 5):
                evaluator.evaluate(policy)
    evaluator.shutdown()
    found = TraceFile(trace.path)
    (track,) = found.pids("evaluator")
    assert found.covered(track) > 0.98
    assert len(found.slices(track, "evaluate")) == 2
    assert len(found.slices(track, "wait for a request")) == 3


@pytest.mark.processes
@pytest.mark.parametrize("kind", [InferenceServer, ProcessInferenceServer])
def test_an_inference_server_has_a_track_also_one_that_is_started_later(kind: Any, tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", a_policy(), frames_per_batch=100)
    with collector, collector.trace(tmp_path / "run.json") as trace, kind(policy_factory=a_policy) as server:
        client = server.client()
        for _, batch in zip(range(5), collector, strict=False):
            client(batch[:3].select("observation"))
    found = TraceFile(trace.path)
    (track,) = found.pids("inference server")
    assert found.covered(track) > 0.98
    assert sum(each["args"]["requests"] for each in found.slices(track, "serve")) == 5
    assert found.slices(track, "answer")


@pytest.mark.processes
def test_a_killed_server_is_in_no_trace_and_loses_nothing_of_it(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", a_policy(), frames_per_batch=100)
    with collector, ProcessInferenceServer(a_policy) as server:
        with collector.trace(tmp_path / "run.json") as trace:
            collector.next()
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        found = TraceFile(trace.path)
    assert not found.pids("inference server")
    assert found.slices(1, "collect")
