"""Whatever happens to a worker: never a hang, an error that says who and how, and nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from counting import CountingEnv, assert_consistent, make_counting
from leaks import children, descriptors, wait_until
from policies_for_tests import deterministic
from slow_envs import ODD_EXCEPTIONS, Fails, FailsAsText, FailsToArrive, NeedsTwo, Switch, Unpicklable, WaitsForFile
from swath.collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.envs import GymWrapper
from swath.errors import CollectorClosed, OutOfSharedMemory, WorkerDied, WorkerHangs, WorkerRaised
from swath.process.memory import SharedMemory
from swath.process.start import server
from swath.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from swath.workers.handle import WorkerHandle
from warned import warned_here

pytestmark = pytest.mark.processes
KINDS = [MultiSyncCollector, MultiAsyncCollector]


def collecting(kind: type, workers: int = 2, **kwargs: Any) -> Any:
    return kind(
        [make_counting] * workers,
        deterministic(),
        **{"frames_per_batch": 60, "num_workers": workers, **kwargs},
    )


def exhaust(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def pids(collector: Any) -> list[int]:
    return [line["pid"] for line in collector.stats()["workers"]]


def kill_worker(collector: Any, worker: int) -> None:
    """As soon as there is one: it may be being started again."""
    assert wait_until(lambda: collector.stats()["workers"][worker]["alive"], 30)
    os.kill(pids(collector)[worker], signal.SIGKILL)


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("round_", [0, *(pytest.param(round_, marks=pytest.mark.slow) for round_ in range(1, 10))])
def test_killed_at_any_instant(kind: type, round_: int) -> None:
    """Ten times five instants for each kind: a hundred in all."""
    instants = random.Random(round_)
    for _ in range(5):
        collector = collecting(kind)
        victim = instants.randrange(2)
        pid = pids(collector)[victim]
        killed_at: list[float] = []

        def kill(pid: int = pid, killed_at: list[float] = killed_at) -> None:
            killed_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(instants.uniform(0, 0.05), kill)
        timer.start()
        with pytest.raises(WorkerDied, match=rf"worker {victim} \(pid {pid}, env {victim}\) was killed by SIGKILL"):
            for _ in collector:
                pass
        timer.join()
        assert time.monotonic() - killed_at[0] < 2
        collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM])
def test_other_signals_are_named(kind: type, number: signal.Signals) -> None:
    collector = collecting(kind)
    batches = iter(collector)
    next(batches)
    os.kill(pids(collector)[1], number)
    with pytest.raises(WorkerDied, match=f"was killed by {number.name} after") as caught:
        exhaust(batches)
    assert caught.value.worker == 1
    assert "restart_workers=N" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_it_starts(kind: type) -> None:
    with pytest.raises(WorkerDied, match=r"worker 1 .* was killed by SIGKILL .* while it started"):
        kind([make_counting, lambda: os.kill(os.getpid(), signal.SIGKILL)], frames_per_batch=10, num_workers=2)


def test_exit_in_the_middle_of_a_step() -> None:
    collector = MultiSyncCollector(
        [make_counting, lambda: Fails(5, lambda: os._exit(7))], frames_per_batch=60, num_workers=2
    )
    with pytest.raises(WorkerDied, match=r"worker 1 .* left with exit code 7"):
        next(iter(collector))


@pytest.mark.filterwarnings("ignore:worker")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [30, 1200])
def test_restarts_go_on_and_what_is_delivered_is_right(kind: type, steps: int) -> None:
    """Batches of 1,200 steps are committed strip by strip, so that some are taken over half done."""
    collector = collecting(
        kind,
        frames_per_batch=steps * (2 if kind is MultiSyncCollector else 1),
        total_frames=48_000,
        restart_workers=100,
        init_random_frames=steps,
        track_env=True,
    )
    collector.set_seed(3)
    instants = random.Random(steps)
    num_batches, num_kills = len(collector), 6
    # A kill comes at some instant after one batch, and before the next kill's turn.
    turns = [turn * num_batches // (num_kills + 1) for turn in range(num_kills + 1)]
    batches: list[Any] = []
    killer = threading.Thread(target=lambda: None)
    killer.start()
    for index, batch in enumerate(collector):
        batches.append(batch.clone())
        if index in turns:
            killer.join()
            if index != turns[-1]:
                killer = threading.Timer(instants.uniform(0, 0.02), kill_worker, (collector, instants.randrange(2)))
                killer.start()
    assert sum(batch.numel() for batch in batches) == 48_000
    assert sum(line["restarts"] for line in collector.stats()["workers"]) == num_kills
    rows = [row for batch in batches for row in (batch if batch.ndim == 2 else [batch])]
    assert_consistent(rows)
    # Within a batch, an episode that was broken off is marked: ids change only after a done.
    for row in rows:
        ids, done = row["collector", "traj_ids"], row["next", "done"].squeeze(-1)
        assert torch.equal(ids[1:] != ids[:-1], done[:-1])


def test_restarted_workers_have_the_newest_weights() -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.zeros(3))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.value.expand(*observation.shape[:-1], 3)

    network = Constant()
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector(
        [make_counting] * 2,
        policy,
        frames_per_batch=20,
        num_workers=2,
        restart_workers=3,
        track_policy_version=True,
    )
    batches = iter(collector)
    next(batches)
    network.value.data.fill_(4)
    collector.update_policy_weights_()
    os.kill(pids(collector)[0], signal.SIGKILL)
    with warned_here(match=r"worker 0 .*SIGKILL.*started again"):
        batch = next(batches)
    assert bool((batch["action"] == 4).all())
    assert bool((batch["policy_version"] == 1).all())
    network.value.data.fill_(5)
    os.kill(pids(collector)[1], signal.SIGKILL)
    with warned_here(match=r"worker 1 .*SIGKILL.*started again"):
        collector.update_policy_weights_()
    assert bool((next(batches)["action"] == 5).all())
    collector.shutdown()


@pytest.mark.alone
def test_restarts_run_out() -> None:
    collector = MultiSyncCollector(
        [lambda: Fails(3, lambda: os._exit(1))], frames_per_batch=60, restart_workers=2, num_workers=1
    )
    started = time.monotonic()
    with warned_here(match="started again"), pytest.raises(WorkerDied, match="restarts 2/2"):
        next(iter(collector))
    assert time.monotonic() - started < 5


# -- raising ---------------------------------------------------------------------------------------------------------


class MyError(Exception):
    pass


def raise_it(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("at", "when"), [(-1, "reset"), (7, "step")])
def test_what_an_env_raises_keeps_its_type(kind: type, packed: bool, at: int, when: str) -> None:
    def broken() -> Any:
        return Fails(at, lambda: raise_it(MyError("the door is stuck")))

    def run() -> None:
        list(kind([make_counting, make_counting, broken], frames_per_batch=60, num_workers=1 if packed else 3))

    with pytest.raises(MyError, match="the door is stuck") as caught:
        run()
    notes = "\n".join(caught.value.__notes__)
    assert "env 2" in notes
    assert f"in its {when}" in notes
    assert f"raised in worker {0 if packed else 2} (pid" in notes
    assert "raise_it" in str(caught.value.__cause__)


def test_failing_constructor_and_policy() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        MultiSyncCollector([make_counting, lambda: 1 // 0], frames_per_batch=10, num_workers=2)
    assert "while env 1 was made" in "\n".join(caught.value.__notes__)

    class Bad(torch.nn.Module):
        calls = 0

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            Bad.calls += 1
            if Bad.calls > 10:
                raise MyError("out of ideas")
            return observation[..., :3]

    policy = TensorDictModule(Bad(), in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector([make_counting] * 2, policy, frames_per_batch=100, num_workers=2)
    with pytest.raises(MyError, match="out of ideas") as caught_too:
        next(iter(collector))
    assert "raised by the policy" in "\n".join(caught_too.value.__notes__)


@pytest.mark.parametrize("kind", [Unpicklable, NeedsTwo])
def test_exceptions_that_cannot_be_pickled(kind: type[Exception]) -> None:
    collector = MultiSyncCollector(
        [lambda: Fails(3, lambda: raise_it(kind(5, "five")))],
        frames_per_batch=60,  # type: ignore[call-arg]
    )
    with pytest.raises(
        WorkerRaised, match=rf"{kind.__name__}: five is 5 \(an exception that cannot leave its process\)"
    ):
        next(iter(collector))


@pytest.mark.parametrize("odd", ODD_EXCEPTIONS)
def test_an_exception_that_fails_itself_is_told_all_the_same(odd: type[Exception]) -> None:
    """When it is shown, pickled, unpickled or given a note: it is what happened, and its worker did not die."""
    collector = MultiSyncCollector([lambda: Fails(3, lambda: raise_it(odd()))], frames_per_batch=60)
    with pytest.raises(ODD_EXCEPTIONS[odd]) as caught:
        next(iter(collector))
    assert type(caught.value) is ODD_EXCEPTIONS[odd]
    assert type(caught.value) is odd or odd.__name__ in str(caught.value)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by env 0 (_Fails) in its step" in notes
    assert "raised in worker 0 (pid" in notes
    assert "raise_it" in str(caught.value.__cause__)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("odd", [FailsAsText, FailsToArrive])
def test_an_exception_that_fails_itself_can_be_survived_by_restarting(odd: type[Exception]) -> None:
    collector = MultiAsyncCollector(
        [lambda: Fails(70, lambda: raise_it(odd()))], frames_per_batch=60, total_frames=120, restart_workers=2
    )
    assert sum(batch.numel() for batch in collector) == 120


def test_what_an_env_leaves_with_in_a_call_is_an_answer() -> None:
    collector = MultiSyncCollector([make_counting], frames_per_batch=60)
    with pytest.raises(WorkerRaised, match="SystemExit: not now"):
        collector.cascade_execute("env.set_seed", _Leaves())
    assert next(iter(collector)).numel() == 60
    collector.shutdown()


class _Leaves:
    def __int__(self) -> int:
        sys.exit("not now")

    __index__ = __int__


def test_an_exception_whose_constructor_makes_its_message_tells_the_true_one() -> None:
    collector = MultiSyncCollector([lambda: Fails(3, lambda: raise_it(Stuck("the door")))], frames_per_batch=60)
    with pytest.raises(Stuck) as caught:
        next(iter(collector))
    assert "it said: the door is stuck" in "\n".join(caught.value.__notes__)


class Stuck(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is stuck")


def test_what_cannot_be_sent_is_named_before_anything_starts() -> None:
    lock = threading.Lock()
    before = children()
    with pytest.raises(TypeError, match=r"create_env_fn of env 1 cannot be sent to a worker process: .*lock"):
        MultiSyncCollector([make_counting, lambda: lock], frames_per_batch=10)
    with pytest.raises(TypeError, match=r"the policy cannot be sent to a worker process"):
        MultiSyncCollector([make_counting], lambda observation: lock, frames_per_batch=10)
    assert children() == before


def test_completed_steps_are_kept() -> None:
    collector = MultiSyncCollector(
        [make_counting, lambda: Fails(700, lambda: raise_it(MyError()))],
        frames_per_batch=4000,
        num_workers=2,
    )
    with pytest.raises(MyError) as caught:
        next(iter(collector))
    left = collector.partial_batch
    assert left is not None
    assert left.shape[0] == 2
    assert 512 <= left.shape[1] <= 700
    assert_consistent(list(left))
    assert "collector.partial_batch" in "\n".join(caught.value.__notes__)


def test_completed_steps_are_kept_in_async_mode() -> None:
    collector = MultiAsyncCollector(
        [lambda: Fails(700, lambda: raise_it(MyError()))], frames_per_batch=1000, track_env=True
    )
    with pytest.raises(MyError):
        next(iter(collector))
    left = collector.partial_batch
    assert left is not None
    assert left.shape == (700,)
    assert_consistent([left])


@pytest.mark.filterwarnings("ignore:the door")
def test_an_exception_can_be_survived_by_restarting() -> None:
    collector = MultiSyncCollector(
        [lambda: Fails(50, lambda: raise_it(MyError("the door is stuck")))],
        frames_per_batch=20,
        total_frames=100,
        restart_workers=5,
    )
    assert sum(batch.numel() for batch in collector) == 100


# -- hanging ---------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["hangs", "is stopped"])
def test_hanging_is_found_out(kind: type, how: str) -> None:
    deed = threading.Event().wait if how == "hangs" else None
    factories = [make_counting, (lambda: Fails(40, lambda: time.sleep(1000))) if deed else make_counting]
    collector = kind(factories, frames_per_batch=100, num_workers=2, step_timeout_s=0.5)
    batches = iter(collector)
    if not deed:
        next(batches)
        os.kill(pids(collector)[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerHangs, match=r"worker 1 .* in one step for .* step_timeout_s=0\.5"):
        exhaust(batches)
    assert time.monotonic() - started < 0.5 + 1.0 + 0.5


@pytest.mark.alone
def test_shutdown_does_not_wait_for_a_step_that_hangs() -> None:
    collector = MultiAsyncCollector(
        [make_counting, lambda: Fails(5, lambda: time.sleep(1000))], frames_per_batch=50, num_workers=2
    )
    next(iter(collector))
    started = time.monotonic()
    collector.shutdown()
    assert time.monotonic() - started < 5
    started = time.monotonic()
    collector.shutdown()
    assert time.monotonic() - started < 0.1


def test_dropping_a_collector_ends_it() -> None:
    collector = collecting(MultiAsyncCollector)
    next(iter(collector))
    mine = pids(collector)
    del collector
    gc.collect()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine))


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_in_the_middle_and_after_a_death(kind: type) -> None:
    collector = collecting(kind)
    for _ in collector:
        os.kill(pids(collector)[0], signal.SIGKILL)
        collector.shutdown()
        break
    collector.shutdown()


def endless(kind: type, tmp_path: Path) -> Any:
    """Its first batch takes minutes."""
    slow = functools.partial(WaitsForFile, Switch(str(tmp_path / "never")), 10)
    return kind([slow] * 2, frames_per_batch=40_000, num_workers=2)


def is_in_the_middle(collector: Any) -> bool:
    return all(line["frames"] > 10 for line in collector.stats()["workers"])


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_from_another_thread_ends_who_iterates(
    kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that was told to leave was not lost, however late that is noticed."""
    is_shut_down = threading.Event()
    obituary = WorkerHandle.obituary

    def late_obituary(handle: WorkerHandle, restarts: int) -> Any:
        is_shut_down.wait(20)
        return obituary(handle, restarts)

    monkeypatch.setattr(WorkerHandle, "obituary", late_obituary)
    collector = endless(kind, tmp_path)

    def shut_down() -> None:
        assert wait_until(lambda: is_in_the_middle(collector), 30)
        collector.shutdown()
        is_shut_down.set()

    other = threading.Thread(target=shut_down)
    other.start()
    with pytest.raises(CollectorClosed, match="was shut down after"):
        next(iter(collector))
    other.join()


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_from_a_signal_handler_ends_who_iterates(kind: type, tmp_path: Path) -> None:
    """In the middle of a wait of the same thread, which is where a job that is ended mostly is."""
    collector = endless(kind, tmp_path)
    before = signal.signal(signal.SIGUSR1, lambda *_: collector.shutdown())

    def send_it() -> None:
        assert wait_until(lambda: is_in_the_middle(collector), 30)
        os.kill(os.getpid(), signal.SIGUSR1)

    other = threading.Thread(target=send_it)
    other.start()
    try:
        with pytest.raises(CollectorClosed):
            next(iter(collector))
    finally:
        other.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore:worker")
@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_while_a_worker_is_started_again_leaves_none(kind: type, tmp_path: Path) -> None:
    """One that is made when nobody looks for it any more."""

    def make() -> Any:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) > 1:
            time.sleep(1000)
        return make_counting()

    collector = kind([make], deterministic(), frames_per_batch=60, restart_workers=5)
    batches = iter(collector)
    next(batches)
    os.kill(pids(collector)[0], signal.SIGKILL)

    def shut_down() -> None:
        assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 30)
        collector.shutdown(timeout=1.0)

    other = threading.Thread(target=shut_down)
    other.start()
    with pytest.raises(CollectorClosed):
        exhaust(batches)
    other.join()
    assert wait_until(lambda: all_gone([int(path.name) for path in tmp_path.iterdir()]))


@pytest.mark.alone
def test_shutdown_does_not_wait_for_a_worker_that_does_not_read() -> None:
    """Another thread is in the middle of a message to it."""
    collector = collecting(MultiSyncCollector)
    os.kill(pids(collector)[0], signal.SIGSTOP)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            collector.cascade_execute("env.set_seed", "x" * 10_000_000)
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert wait_until(lambda: collector._workers.handles[0].due == 1)
    started = time.monotonic()
    collector.shutdown(timeout=2.0)
    assert time.monotonic() - started < 5
    caller.join(10)
    assert not caller.is_alive()
    assert isinstance(errors[0], CollectorClosed)


# -- resources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, pytest.param(90, marks=pytest.mark.slow)])
def test_many_collectors_leave_nothing(count: int) -> None:
    def once(index: int) -> None:
        with collecting(KINDS[index % 2], total_frames=-1) as collector:
            next(iter(collector))

    for index in range(10):
        once(index)
    gc.collect()
    before = len(descriptors()), children(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(count):
        once(index)
    gc.collect()
    assert len(descriptors()) == before[0]
    assert children() == before[1]
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[2]
    assert grown_kib < 8 * 1024


def test_a_consumer_that_does_not_read_stops_the_workers() -> None:
    collector = collecting(MultiAsyncCollector, total_frames=-1)
    next(iter(collector))

    def idle() -> bool:
        # Two orders for each of the two workers, and one more for every batch that was taken from them.
        taken = 1 + len(collector._pieces)
        return sum(line["frames"] for line in collector.stats()["workers"]) == 60 * (2 * 2 + taken)

    assert wait_until(idle)
    counts = [line["frames"] for line in collector.stats()["workers"]]
    collector.getattr_env("batch_size")
    assert [line["frames"] for line in collector.stats()["workers"]] == counts
    collector.shutdown()


def test_no_room_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfSharedMemory, match=r"needs 1,000\.0 TB of shared memory, and .* are free"):
        SharedMemory(10**15)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # reserving more fails, as on a machine that is full
    try:
        with pytest.raises(OutOfSharedMemory, match=r"needs 1\.0 MB of shared memory"):
            SharedMemory(10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", range(1, 14))
def test_no_descriptors_left_is_an_error(room: int) -> None:
    """The limit is met at a different place each time."""
    server().ensure_running()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + room, hard))
    try:
        with pytest.raises(OutOfSharedMemory, match="as many files open as it may"):
            collecting(MultiSyncCollector, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- programs --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from swath.collectors import MultiCollector
from counting import make_counting

class Slow(Exception): ...

collector = MultiCollector([lambda: make_counting()] * 2, frames_per_batch=50, num_workers=2, sync={sync}, {more})
print(*[line["pid"] for line in collector.stats()["workers"]], flush=True)
{body}
"""


def program(body: str, sync: bool = True, more: str = "") -> subprocess.Popen[str]:
    """A script without a main guard."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body, sync=sync, more=more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        start_new_session=True,
    )


def worker_pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


def all_gone(mine: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in mine)


@pytest.fixture
def programs() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(program(*args, **kwargs))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_script_needs_no_main_guard_and_ends_by_itself(programs: Any) -> None:
    for more in ("", "mp_start_method='spawn'"):
        process = programs("for batch, _ in zip(collector, range(3)): pass", more=more)
        mine = worker_pids(process)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert err == ""
        assert all_gone(mine)


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_leave_when_the_parent_is_killed(programs: Any, sync: bool) -> None:
    process = programs("for batch in collector: print('.', flush=True)", sync)
    mine = worker_pids(process)
    process.stdout.readline()
    process.kill()
    assert wait_until(lambda: all_gone(mine), 5)


def have_left(mine: list[int]) -> bool:
    """Whoever has become their parent may not have noticed yet."""
    for pid in mine:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                return False
    return True


@pytest.mark.alone
@pytest.mark.parametrize("sync", [True, False])
def test_forked_workers_leave_together_when_the_parent_is_killed(programs: Any, sync: bool) -> None:
    """Each has been forked with the pipes of those before it."""
    body = f"""
collector.shutdown()
collector = MultiCollector([make_counting] * 6, frames_per_batch=60, num_workers=6, sync={sync}, mp_start_method="fork")
print(*[line["pid"] for line in collector.stats()["workers"]], flush=True)
for batch in collector:
    print(".", flush=True)
    time.sleep(1000)
"""
    process = programs(body, sync)
    worker_pids(process)
    mine = worker_pids(process)
    process.stdout.readline()
    process.kill()
    assert wait_until(lambda: have_left(mine), 5)


@pytest.mark.alone
def test_workers_leave_though_a_forked_copy_of_their_parent_lives_on(programs: Any) -> None:
    """A DataLoader's worker, say, which has copies of all descriptors."""
    body = """
import os, signal
child = os.fork()
if not child:
    signal.alarm(60)
    while True: signal.pause()
print(child, flush=True)
next(iter(collector))
print(".", flush=True)
time.sleep(1000)
"""
    process = programs(body)
    mine = worker_pids(process)
    child = int(process.stdout.readline())
    process.stdout.readline()
    process.kill()
    try:
        assert wait_until(lambda: have_left(mine), 5)
        assert not have_left([child])
    finally:
        os.kill(child, signal.SIGKILL)


_DIES_WHILE_THE_SERVER_IMPORTS = """
from swath.process.start import server
server().ensure_running()
print(server()._forkserver_pid, flush=True)
"""
_DIES_WHILE_A_NEW_INTERPRETER_IMPORTS = """
import os, slow_module
from swath.process.start import start_process
os.environ["SLOW"] = "1"
print(start_process("spawn", slow_module.main, (), "slow").pid, flush=True)
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("script", "module"),
    [(_DIES_WHILE_THE_SERVER_IMPORTS, "gymnasium"), (_DIES_WHILE_A_NEW_INTERPRETER_IMPORTS, "slow_module")],
)
def test_what_is_importing_leaves_when_the_parent_is_killed(script: str, module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(f"""
import os, pathlib, time
if {module!r} == "gymnasium" or "SLOW" in os.environ:
    pathlib.Path({str(tmp_path)!r}, "begun").touch()
    time.sleep(60)
def main(): pass
""")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", script + "import time; time.sleep(1000)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert wait_until((tmp_path / "begun").exists, 30)
    process.kill()
    process.communicate()
    try:
        assert wait_until(lambda: have_left([pid]), 5)
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.alone
@pytest.mark.parametrize("sync", [True, False])
def test_ctrl_c_gives_one_traceback(programs: Any, sync: bool) -> None:
    process = programs("for batch in collector: print('.', flush=True)", sync)
    mine = worker_pids(process)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    started = time.monotonic()
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - started < 3
    # One of one process: it may have come where another exception was being handled.
    assert err.count("Traceback") - err.count("During handling of the above exception") == 1
    assert err.rstrip().endswith(("KeyboardInterrupt", "are in collector.partial_batch"))
    assert all_gone(mine)


@pytest.mark.alone
def test_ctrl_c_twice_leaves_at_once(programs: Any) -> None:
    """The first one waits for envs to close, which these do not."""
    body = """
from slow_envs import Fails
collector.shutdown()
collector = MultiCollector([lambda: Fails(3, lambda: time.sleep(1000))], frames_per_batch=50, sync=True)
print(*[line["pid"] for line in collector.stats()["workers"]], flush=True)
for batch in collector: pass
"""
    process = programs(body)
    worker_pids(process)
    mine = worker_pids(process)
    # It is at work, and then sleeps in its step.
    assert wait_until(lambda: Path(f"/proc/{mine[0]}/stat").read_text().split()[2] == "S")
    os.killpg(process.pid, signal.SIGINT)
    while "KeyboardInterrupt" not in process.stderr.readline():
        pass
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert wait_until(lambda: all_gone(mine), 1)
    assert time.monotonic() - started < 1
    process.wait(timeout=10)  # the interpreter's own end, in which torch takes its time


def test_ctrl_c_and_going_on() -> None:
    """In a notebook, say."""
    collector = MultiCollector([make_counting] * 2, deterministic(), frames_per_batch=200_000, num_workers=2, sync=True)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    timer.join()
    collector.set_seed(0)
    other = iter(collector)
    batch = next(other)
    assert batch.numel() == 200_000
    assert_consistent(list(batch[:, :300]))
    collector.shutdown()


# -- what others found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["sys.exit", "KeyboardInterrupt"])
def test_an_env_that_leaves_does_not_take_its_owner_along(deed: str) -> None:
    def leave() -> None:
        if deed == "sys.exit":
            sys.exit("the simulator is gone")
        raise KeyboardInterrupt

    collector = MultiSyncCollector([make_counting, lambda: Fails(5, leave)], frames_per_batch=60, num_workers=2)
    with pytest.raises(WorkerRaised, match="SystemExit: the simulator is gone" if deed == "sys.exit" else deed):
        next(iter(collector))


def test_a_thread_of_an_env_does_not_keep_the_process() -> None:
    def leave_a_thread() -> None:
        threading.Thread(target=threading.Event().wait).start()
        raise MyError("gone")

    collector = MultiSyncCollector([lambda: Fails(5, leave_a_thread)], frames_per_batch=60)
    pid = pids(collector)[0]
    with pytest.raises(MyError, match="gone"):
        next(iter(collector))
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.alone
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_death_is_noticed_though_a_child_of_the_worker_lives_on(method: str, tmp_path: Path) -> None:
    def leave_a_child() -> None:
        child = os.fork()
        if not child:
            signal.alarm(20)
            while True:
                signal.pause()
        (tmp_path / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    collector = MultiSyncCollector([lambda: Fails(5, leave_a_child)], frames_per_batch=60, mp_start_method=method)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        next(iter(collector))
    assert time.monotonic() - started < 2
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@pytest.mark.alone
def test_hanging_while_weights_are_sent() -> None:
    collector = MultiAsyncCollector(
        [make_counting, lambda: Fails(40, lambda: time.sleep(1000))],
        deterministic(),
        frames_per_batch=100,
        num_workers=2,
        step_timeout_s=0.5,
    )
    next(iter(collector))
    started = time.monotonic()

    def update() -> None:
        for _ in range(1000):
            collector.update_policy_weights_()

    with pytest.raises(WorkerHangs, match="worker 1"):
        update()
    assert time.monotonic() - started < 3
    collector.shutdown()


class ClosesNever(CountingEnv):
    def step(self, action: Any) -> Any:
        raise MyError("the door is stuck")

    def close(self) -> None:
        time.sleep(1000)


@pytest.mark.alone
def test_weights_for_a_worker_that_raised_and_does_not_close() -> None:
    collector = MultiAsyncCollector(
        [make_counting, lambda: GymWrapper(ClosesNever())], deterministic(), frames_per_batch=100, num_workers=2
    )
    started = time.monotonic()

    def update() -> None:
        next(iter(collector))
        while True:
            collector.update_policy_weights_()

    with pytest.raises(MyError, match="the door is stuck"):
        update()
    assert time.monotonic() - started < 3
    collector.shutdown(timeout=1.0)


def test_going_on_after_ctrl_c_leaves_no_gap_in_a_trajectory() -> None:
    """A worker that was done already had frames which nobody got: its episodes must not go on."""
    collector = MultiSyncCollector(
        [lambda: make_counting(10**6), lambda: Fails(15, lambda: time.sleep(0.5))],
        frames_per_batch=20,
        num_workers=2,
    )
    batches = iter(collector)
    seen = [next(batches).clone()]
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    timer.join()
    seen += [batch.clone() for batch, _ in zip(iter(collector), range(3), strict=False)]
    assert_consistent([row for batch in seen for row in batch])
    collector.shutdown()


def test_reset_of_some_envs_leaves_no_gap_in_async_mode() -> None:
    collector = MultiAsyncCollector([lambda: make_counting(10**6)] * 4, frames_per_batch=20, num_workers=2)
    batches = iter(collector)
    seen = []
    for index in range(12):
        seen += [next(batches).clone() for _ in range(5)]
        collector.reset([index % 4 == env for env in range(4)])
    assert_consistent(seen)
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:worker")
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_restarted_worker_gets_what_it_was_sent(scheme: type) -> None:
    policy = deterministic()
    collector = MultiSyncCollector(
        [make_counting] * 3,
        policy,
        frames_per_batch=30,
        num_workers=3,
        restart_workers=5,
        weight_sync_schemes={"policy": scheme()},
    )
    batches = iter(collector)

    def weights(value: float) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(tensor, value) for name, tensor in policy.state_dict().items()}

    def acts() -> list[float]:
        return next(batches)["action"][:, 0, 0].tolist()

    collector.update_policy_weights_({0: weights(0.0), 1: weights(0.1), 2: weights(0.2)})
    before = acts()
    assert len(set(before)) == 3
    collector.update_policy_weights_(weights(0.0), worker_ids=[2])
    for worker in (1, 0, 2):
        os.kill(pids(collector)[worker], signal.SIGKILL)
        after = acts()
        assert after[0] == after[2] == before[0]
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:worker")
def test_updates_from_threads_while_workers_die() -> None:
    policy = deterministic()
    collector = collecting(MultiAsyncCollector, restart_workers=1000)
    done = threading.Event()
    failures: list[BaseException] = []

    def update() -> None:
        try:
            while not done.is_set():
                collector.update_policy_weights_(policy)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=update) for _ in range(2)]
    batches = iter(collector)
    for thread in threads:
        thread.start()
    seen = []
    for index in range(60):
        seen.append(next(batches).clone())
        if index in (10, 25, 40):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids(collector)[index % 2], signal.SIGKILL)
    done.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not failures
    assert_consistent(seen)
    collector.shutdown()
