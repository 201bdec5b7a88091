"""What a user of a (simulated) system that lacks something sees: who needs it, what it is, and what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import assert_consistent, make_counting
from leaks import wait_until
from policies_for_tests import deterministic
from swath import platforms
from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from swath.collectors.distributed import DistributedCollector, RPCCollector
from swath.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from swath.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from swath.errors import OutOfSharedMemory, SwathError, UnsupportedPlatform
from swath.modules import InferenceServer, MPTransport, ProcessInferenceServer, SlotTransport
from swath.process.memory import SharedMemory
from swath.process.semaphores import ThreadSemaphore
from swath.weight_update import SharedMemWeightSyncScheme

pytestmark = pytest.mark.timeout(60)


def remove(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    for name in names:
        monkeypatch.delattr(module, name)


def become_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    remove(monkeypatch, os, "memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity")
    monkeypatch.setattr(platforms, "libc", object)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")


def become_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    become_macos(monkeypatch)
    remove(monkeypatch, os, "fork")
    remove(monkeypatch, socket, "AF_UNIX", "SCM_RIGHTS")
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    monkeypatch.setattr(platform, "system", lambda: "Windows")


def become_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


Make = Callable[[], Any]
MEMORY, SEMAPHORES, ORDER = "memfd_create", "sem_timedwait", "x86-64"
FORK, SOCKETS, BY_DESCRIPTOR, INTERFACES = "fork", "AF_UNIX", "/dev/fd", "network interfaces"
TWO = [make_counting] * 2

#: On which system, what is made, who needs it, what is missing, and what to do instead.
REFUSED: list[tuple[Any, Make, str, list[str], str]] = [
    (
        become_macos,
        lambda: MultiSyncCollector(TWO, frames_per_batch=10),
        "MultiSyncCollector",
        [MEMORY],
        "use a Collector with a SerialEnv",
    ),
    (
        become_macos,
        lambda: MultiCollector(TWO, frames_per_batch=10, sync=False),
        "MultiAsyncCollector",
        [MEMORY],
        "backend='threading'",
    ),
    (
        become_macos,
        lambda: AsyncCollector(make_counting, frames_per_batch=10),
        "AsyncCollector",
        [MEMORY],
        "use a Collector with a SerialEnv",
    ),
    (
        become_macos,
        lambda: Collector(make_counting, frames_per_batch=10, num_collectors=2),
        "MultiAsyncCollector",
        [MEMORY],
        "use a Collector with a SerialEnv",
    ),
    (become_macos, lambda: ParallelEnv(2, make_counting), "ParallelEnv", [MEMORY, SEMAPHORES], "use a SerialEnv"),
    (
        become_macos,
        lambda: AsyncEnvPool(TWO, backend="multiprocessing"),
        "ProcessorAsyncEnvPool",
        [MEMORY, SEMAPHORES],
        "use backend='threading'",
    ),
    (
        become_macos,
        lambda: AsyncBatchedCollector(TWO, deterministic(), frames_per_batch=10),
        "AsyncBatchedCollector with envs in processes",
        [MEMORY, SEMAPHORES],
        "use env_backend='threading'",
    ),
    (
        become_macos,
        lambda: ReplayBuffer(storage=LazyTensorStorage(10), shared=True),
        "ReplayBuffer(shared=True)",
        [MEMORY],
        "leave that out",
    ),
    (
        become_macos,
        lambda: LazyTensorStorage(10, shared_init=True),
        "LazyTensorStorage(shared_init=True)",
        [MEMORY],
        "leave that out",
    ),
    (
        become_macos,
        SharedMemWeightSyncScheme,
        "SharedMemWeightSyncScheme",
        [MEMORY],
        "use a MultiProcessWeightSyncScheme",
    ),
    (become_macos, SlotTransport, "transport='slots'", [MEMORY, SEMAPHORES], "use transport='mp'"),
    (
        become_macos,
        lambda: ProcessInferenceServer(deterministic, "slots"),
        "transport='slots'",
        [MEMORY, SEMAPHORES],
        "use transport='mp'",
    ),
    (
        become_macos,
        lambda: RPCCollector(TWO, frames_per_batch=10),
        "RPCCollector",
        [INTERFACES],
        "use a DistributedCollector",
    ),
    (become_arm, lambda: ParallelEnv(2, make_counting), "ParallelEnv", [ORDER], "use a SerialEnv"),
    (
        become_arm,
        lambda: AsyncBatchedCollector(TWO, deterministic(), frames_per_batch=10),
        "AsyncBatchedCollector with envs in processes",
        [ORDER],
        "use env_backend='threading'",
    ),
    (become_arm, SlotTransport, "transport='slots'", [ORDER], "use transport='mp'"),
    (
        become_windows,
        lambda: MultiSyncCollector(TWO, frames_per_batch=10),
        "MultiSyncCollector",
        [FORK, MEMORY],
        "use a Collector with a SerialEnv",
    ),
    (
        become_windows,
        lambda: Evaluator(make_counting, policy_factory=lambda env: deterministic(), backend="process"),
        "an Evaluator with backend='process'",
        [FORK],
        "use backend='thread'",
    ),
    (
        become_windows,
        lambda: DistributedCollector(TWO, frames_per_batch=10, launcher="mp"),
        "launcher='mp'",
        [FORK],
        "launcher='folder'",
    ),
    (
        become_windows,
        lambda: ProcessInferenceServer(deterministic),
        "ProcessInferenceServer",
        [FORK, SOCKETS],
        "use an InferenceServer",
    ),
    (become_windows, MPTransport, "MPTransport", [SOCKETS], "use transport='threads'"),
    (become_windows, lambda: LazyMemmapStorage(10), "LazyMemmapStorage", [BY_DESCRIPTOR], "use a LazyTensorStorage"),
]


@pytest.mark.parametrize(
    ("become", "make", "who", "what", "instead"),
    REFUSED,
    ids=[f"{who} {become.__name__.removeprefix('become_')}" for become, _, who, _, _ in REFUSED],
)
def test_refused_when_it_is_made(
    become: Any, make: Make, who: str, what: list[str], instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch)
    with pytest.raises(UnsupportedPlatform) as caught:
        make()
    monkeypatch.undo()
    message = str(caught.value)
    assert message.startswith(f"{who} needs ")
    for missing in what:
        assert missing in message.partition("which this system")[0]
    next_step = message.partition("does not have; ")[2]
    assert instead in next_step
    assert "run it on Linux on x86-64" in next_step
    assert isinstance(caught.value, SwathError)
    assert isinstance(caught.value, NotImplementedError)


def test_an_error_names_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    become_macos(monkeypatch)
    with pytest.raises(UnsupportedPlatform, match=r"which this system \(Darwin on arm64, Python 3\.\d+\.\d+"):
        ParallelEnv(2, make_counting)


@pytest.mark.processes
@pytest.mark.parametrize("become", [become_macos, become_windows])
def test_one_process_needs_nothing(become: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = Collector(
        SerialEnv(2, make_counting), deterministic(), frames_per_batch=20, total_frames=60, replay_buffer=rb
    )
    assert len(list(collector)) == 3
    assert rb.sample().shape == (8,)
    assert rb.write_count == 60
    evaluator = Evaluator(make_counting, policy_factory=lambda env: deterministic(), num_trajectories=2)
    assert evaluator.evaluate()
    evaluator.shutdown()
    with InferenceServer(deterministic()) as server:
        assert "action" in server.client()(TensorDict(observation=torch.zeros(4)))
    collector.shutdown()


def test_frames_in_a_file_need_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    become_macos(monkeypatch)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100), batch_size=8, shared=True)
    rb.extend(TensorDict(x=torch.arange(50), batch_size=[50]))
    assert rb.sample()["x"].max() < 50


@pytest.mark.processes
@pytest.mark.parametrize("become", [become_macos, become_windows])
def test_threads_wake_each_other_without_semaphores_of_the_system(become: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch)
    collector = AsyncBatchedCollector(
        [make_counting] * 3, deterministic(), env_backend="threading", frames_per_batch=50, total_frames=500
    )
    assert isinstance(collector.env._crew.ready, ThreadSemaphore)
    batches = list(collector)
    assert [len(batch) for batch in batches] == [50] * 10
    assert_consistent(batches)


def test_a_semaphore_of_threads_counts() -> None:
    semaphore = ThreadSemaphore()
    assert not semaphore.is_up()
    assert not semaphore.acquire(0.001)
    semaphore.release()
    semaphore.release()
    assert semaphore.is_up()
    assert semaphore.acquire(0)
    assert not semaphore.acquire(-1)


@pytest.mark.processes
def test_a_server_of_its_own_process_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    become_arm(monkeypatch)
    with ProcessInferenceServer(lambda: lambda observation: observation * 2) as server:
        assert server.transport_kind == "process"
        assert server.client()(TensorDict(observation=torch.ones(2)))["action"].tolist() == [2, 2]
    monkeypatch.undo()
    assert ProcessInferenceServer(deterministic).transport_kind == "process_slot"


# -- Linux, with a Python that was built for an old C library: conda's, uv's -----------------------------------------


@pytest.mark.processes
def test_python_need_not_know_what_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    remove(monkeypatch, os, "memfd_create", "pidfd_open", "MFD_CLOEXEC")
    rb = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=8, shared=True)
    rb.extend(TensorDict(x=torch.arange(50), batch_size=[50]))
    descriptor = rb.storage.memory.descriptor
    assert not os.get_inheritable(descriptor)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:swath-buffer")
    collector = MultiSyncCollector(TWO, deterministic(), frames_per_batch=20, total_frames=60)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(2, 10)] * 3
    assert_consistent(batches)
    collector.shutdown()


def test_what_the_c_library_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        @staticmethod
        def memfd_create(name: bytes, flags: int) -> int:
            ctypes.set_errno(errno.EMFILE)
            return -1

    remove(monkeypatch, os, "memfd_create")
    monkeypatch.setattr(platforms, "libc", Refuses)
    with pytest.raises(OutOfSharedMemory, match="as many files open as it may"):
        SharedMemory(100)


# -- Linux, on another processor -------------------------------------------------------------------------------------


@pytest.mark.processes
def test_on_arm_batches_reach_a_buffer_through_their_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would write to it without a lock, while the learner reads."""
    become_arm(monkeypatch)
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    collector = MultiAsyncCollector(TWO, deterministic(), frames_per_batch=20, total_frames=200, replay_buffer=rb)
    collector.start()
    assert wait_until(lambda: not collector.is_running(), 20)
    assert rb.write_count == 200
    assert collector._buffer_fill is None
    assert rb.storage.memory.descriptor is None
    collector.shutdown()


# -- importing ---------------------------------------------------------------------------------------------------------

#: As little as Windows has; the packages that swath needs are imported before, as they know what to do there.
WITH_LITTLE = """
import ctypes, importlib, multiprocessing.context, os, pkgutil, socket, sys
import cloudpickle, gymnasium, rich.live, rich.table, tensordict, tensordict.nn, torch, torch.distributed.rpc

for name in "memfd_create pidfd_open posix_fallocate sched_getaffinity sched_yield fork forkpty uname".split():
    delattr(os, name)
for name in ("AF_UNIX", "SCM_RIGHTS"):
    delattr(socket, name)
for name in ("ForkProcess", "ForkServerProcess"):
    delattr(multiprocessing.context, name)
for name in ("resource", "fcntl", "termios", "pwd", "grp"):
    sys.modules[name] = None
ctypes.CDLL = lambda *args, **kwargs: object()

import swath
for module in pkgutil.walk_packages(swath.__path__, "swath."):
    if module.name not in ("swath.__main__", "swath.integrations.ray", "swath.data.ray_buffer"):
        importlib.import_module(module.name)

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv

for batch in Collector(SerialEnv(2, lambda: GymEnv("CartPole-v1")), frames_per_batch=10, total_frames=20):
    assert batch.shape == (2, 5)

from swath.cli.main import main
assert main(["collect", "CartPole-v1", "--frames", "100", "--out", "one", "--quiet"]) == 0
sys.exit(main(["collect", "CartPole-v1", "--frames", "100", "--workers", "2", "--out", "many"]))
"""


@pytest.mark.processes
def test_all_of_swath_can_be_imported_and_one_process_collects(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == 2, run.stderr
    assert "UnsupportedPlatform: MultiAsyncCollector needs processes" in run.stderr
    assert "leaving --workers out" in run.stderr
    assert "Traceback" not in run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"one"}
