"""Shared by all tests and doctests: what every one of them finds, and what it may not leave behind."""

from __future__ import annotations

import gc
import multiprocessing.process
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict.nn.probabilistic import interaction_type

from counting import CountingEnv
from leaks import nothing_is_left

# Shells start background jobs with Ctrl-C ignored; then tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Two cores: more threads than that only make small networks slower.
torch.set_num_threads(1)


#: Modules whose docstrings' examples start processes; a doctest cannot be marked where it is.
_DOCTESTS_WITH_PROCESSES = {
    f"swath.{name}"
    for name in (
        "collectors.batched",
        "collectors.distributed.over_torch",
        "collectors.multi",
        "collectors.multi_async",
        "collectors.multi_sync",
        "envs.parallel",
        "modules.inference_server.process_server",
    )
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.rpartition(".")[0] in _DOCTESTS_WITH_PROCESSES:
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.xdist_group("ray"))  # one cluster for all of them


def pytest_collection_finish() -> None:
    """What is imported by now stays: to look at it again takes 0.15 s of every `gc.collect()`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _clocks_decide_nothing() -> Iterator[None]:
    """Whether looking at a policy, or calling it, takes too long depends on what else this machine does.

    With a patch of its own: the test's must be undone before anybody looks what the test leaves behind.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swath.rollout.capture.captured.LOOKING", float("inf"))
        patch.setattr("swath.rollout.capture.captured.MOST", float("inf"))
        yield


@pytest.fixture(autouse=True)
def _same_randomness_in_every_run() -> None:
    torch.manual_seed(0)
    CountingEnv.made = 0


@pytest.fixture(autouse=True)
def _exploration_type_is_left_as_it_was() -> Iterator[None]:
    assert interaction_type() is None
    yield
    assert interaction_type() is None


# -- processes ---------------------------------------------------------------------------------------------------------

_started: list[str] = []
_start = multiprocessing.process.BaseProcess.start


def _note_and_start(process: multiprocessing.process.BaseProcess) -> None:
    _started.append(process.name)
    _start(process)


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _started.append(event)


multiprocessing.process.BaseProcess.start = _note_and_start
sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def _processes_are_marked_and_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts processes says so (`make check` leaves it out), and leaves nothing behind."""
    if request.node.get_closest_marker("processes") is None:
        _started.clear()
        yield
        assert not _started, f"it starts a process ({_started[0]}): mark it with pytest.mark.processes"
    elif request.node.get_closest_marker("ray") is not None:
        yield  # the cluster's own processes come and go; tests/test_ray.py looks after its actors
    else:
        with nothing_is_left():
            yield


@pytest.fixture(scope="session")
def rpc_agent() -> None:
    """There was one: the first agent of torch RPC in a process opens descriptors that torch never closes."""
    from torch.distributed import rpc

    from swath.collectors.distributed import RPCCollector

    with RPCCollector("CartPole-v1", frames_per_batch=10, total_frames=10) as collector:
        list(collector)
    assert not rpc._is_current_rpc_agent_set()  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture(scope="session")
def _ray_ends_with_the_session() -> Iterator[None]:
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def cluster(_ray_ends_with_the_session: None) -> None:
    """A Ray cluster of this machine, for everybody: it takes seconds to start one."""
    from swath.integrations.ray import start_ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start_ray({"num_cpus": 4, "object_store_memory": 200_000_000, "log_to_driver": False})
