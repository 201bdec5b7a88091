"""A program's board: who finds it, what it tells, what it costs, and what is left of it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict.nn import TensorDictModule
from torch import nn

from board_programs import COLLECT, ONE, a_program, boards_of, looking_at
from leaks import children, descriptors, wait_until
from programs import WarmProgram
from swath.collectors import AsyncBatchedCollector, Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import GymEnv
from swath.insight.board import NAME, NoBoard, OthersBoard
from swath.insight.programs import Program, Programs, ask_all
from swath.insight.reading import Reading

HERE = os.getpid()


def a_collector(**more: Any) -> Collector:
    return Collector("CartPole-v1", **{"frames_per_batch": 50, "total_frames": -1, **more})


def a_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def readings(program: Program) -> list[Reading]:
    """Of its collectors, as of now."""
    ask_all([program], 10.0)
    assert program.told is not None
    return list(program.told.readings.values())


@pytest.fixture(autouse=True)
def _no_board_before_and_after() -> Iterator[None]:
    gc.collect()
    assert wait_until(lambda: not boards())
    yield
    gc.collect()
    assert wait_until(lambda: not boards() and not threads())


def boards() -> list[str]:
    return [what for what in descriptors().values() if NAME in what]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swath-board"]


# -- what it tells -----------------------------------------------------------------------------------------------------


def test_a_program_is_found_and_tells_where_it_stands() -> None:
    with a_collector() as collector, looking_at() as program:
        assert program.told is None
        next(iter(collector))
        (reading,) = readings(program)
        assert (reading.frames, reading.program.pid, reading.program.collector) == (50, HERE, "Collector")
        next(iter(collector))
        assert [reading.frames for reading in readings(program)] == [100]
    assert wait_until(lambda: not boards_of(HERE))


def test_several_collectors_have_one_board_and_the_last_takes_it_with_it() -> None:
    first, second = a_collector(), a_collector(frames_per_batch=70)
    assert (len(boards()), len(threads())) == (1, 1)
    with looking_at() as program:
        assert sorted(reading.program.frames_per_batch for reading in readings(program)) == [50, 70]
        first.shutdown()
        assert [reading.program.frames_per_batch for reading in readings(program)] == [70]
    second.shutdown()
    assert wait_until(lambda: not boards())


def test_a_collector_that_cannot_be_read_does_not_hide_the_others() -> None:
    class Secretive(Collector):
        def reading(self) -> Reading:
            raise RuntimeError("not \x1b[31mtoday")

    with a_collector(), Secretive("CartPole-v1", frames_per_batch=50), looking_at() as program:
        ask_all([program], 10.0)
        assert program.told is not None
        assert len(program.told.readings) == 1
        assert list(program.told.errors.values()) == ["RuntimeError: not �[31mtoday"]


def test_a_collector_is_not_kept() -> None:
    collector = a_collector()
    assert boards()
    del collector
    assert wait_until(lambda: not boards())


def test_a_collector_that_could_not_be_made_does_not_stay() -> None:
    with pytest.raises(AttributeError, match="collection_stopped") as caught:
        a_collector(interruptor=object())
    assert caught.value.__traceback__ is not None  # which has the collector
    assert not boards()


def test_many_come_and_go_in_several_threads() -> None:
    failures: list[BaseException] = []

    def make_and_close() -> None:
        try:
            for number in range(30):
                collector = a_collector()
                if number % 3:
                    collector.shutdown()
        except BaseException as error:
            failures.append(error)

    makers = [threading.Thread(target=make_and_close) for _ in range(4)]
    for maker in makers:
        maker.start()
    programs = Programs(only=HERE)
    while any(maker.is_alive() for maker in makers):
        ask_all(programs.find(), 0.01)
    programs.close()
    assert not failures


def test_several_may_look_at_once() -> None:
    with a_collector(), looking_at() as one, looking_at() as another:
        one.ask()
        another.ask()
        ask_all([one, another], 10.0)
        assert one.told is not None
        assert another.told is not None


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_nobody_looks_so_nothing_wakes_up() -> None:
    with a_collector() as collector:
        (thread,) = threads()

        def sleeps_through(batches: int) -> bool:
            before = _switches(thread)
            for _ in zip(range(batches), collector, strict=False):
                pass
            return _switches(thread) == before

        # (Twice, because the thread may be on its way to sleep when it is looked at first.)
        assert sleeps_through(1000) or sleeps_through(1000)


def _switches(thread: threading.Thread) -> int:
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def test_memory_is_there_only_once_somebody_looks() -> None:
    with a_collector(), looking_at() as program:
        (number,) = [number for number, what in descriptors().items() if NAME in what][:1]
        before = os.stat(f"/proc/self/fd/{number}").st_blocks * 512
        assert before <= 4096
        ask_all([program], 10.0)
        assert os.stat(f"/proc/self/fd/{number}").st_blocks * 512 <= before + 16384


def test_who_asks_without_end_is_answered_now_and_then() -> None:
    with a_collector(), looking_at() as program:
        ask_all([program], 10.0)
        started = time.monotonic()
        board = OthersBoard(next(f"/proc/self/fd/{n}" for n, what in descriptors().items() if NAME in what))
        with board:
            first = board.read()
            assert first is not None
            for _ in range(5000):
                board.ask()
            assert wait_until(lambda: (board.read() or first).number > first.number)
            last = board.read()
            assert last is not None
            assert last.number - first.number <= 2 + (time.monotonic() - started) / 0.1


# -- who is one --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector])
def test_workers_are_shown_with_their_program(kind: Any) -> None:
    with kind(["CartPole-v1"] * 2, a_policy(), frames_per_batch=50, total_frames=-1) as collector:
        next(iter(collector))
        assert len(children()) == 2
        assert [boards_of(pid) for pid in (HERE, *children())] == [[HERE], [], []]
        with looking_at() as program:
            assert [len(reading.places) for reading in readings(program)] == [2]


@pytest.mark.processes
def test_nodes_and_their_workers_are_shown_with_their_program() -> None:
    with DistributedCollector(
        ["CartPole-v1"] * 2,
        frames_per_batch=100,
        total_frames=-1,
        collector_class="sync",
        num_workers_per_collector=1,
    ) as collector:
        next(iter(collector))
        assert len(children()) == 4
        assert not [pid for pid in children() if boards_of(pid)]
        assert boards_of(HERE) == [HERE]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_is_no_program(backend: Any) -> None:
    with Evaluator(GymEnv_of_cartpole, policy_factory=random_policy, num_trajectories=2, backend=backend) as evaluator:
        evaluator.evaluate()
        assert not [pid for pid in (HERE, *children()) if boards_of(pid)]


def GymEnv_of_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


def random_policy(env: Any) -> Any:
    from swath.modules import RandomPolicy

    return RandomPolicy(env.action_spec)


FORKED = """
import os, time
from swath.collectors import Collector
make = lambda frames: Collector("CartPole-v1", frames_per_batch=frames, total_frames=-1)
collector = make(50)
child = os.fork()
if child == 0:
    collector.shutdown()  # the child's copy
    if os.path.exists("another"):
        collector = make(70)
    open(f"child-{os.getpid()}", "w").close()
    time.sleep(100)
    os._exit(0)
for batch in collector:
    time.sleep(0.005)
"""


@pytest.mark.processes
@pytest.mark.parametrize("makes_another", [False, True])
def test_a_forked_child_is_not_its_parent(makes_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if makes_another:
        (tmp_path / "another").touch()
    with a_program(FORKED) as parent:
        assert wait_until(lambda: bool(list(tmp_path.glob("child-*"))), 30)
        child = int(next(tmp_path.glob("child-*")).name.removeprefix("child-"))
        try:
            found = {pid: _told(pid) for pid in (parent.pid, child) if boards_of(pid)}
            assert found == ({parent.pid: [50], child: [70]} if makes_another else {parent.pid: [50]})
            parent.kill()
            parent.wait()
            assert boards_of(child) == ([child] if makes_another else [])
        finally:
            os.kill(child, signal.SIGKILL)


def _told(pid: int) -> list[int]:
    with looking_at(pid) as program:
        return [reading.program.frames_per_batch for reading in readings(program)]


# -- what breaks -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_stopped_program_is_silent_and_what_was_known_stays() -> None:
    with a_program() as running, looking_at(running.pid) as program:
        ask_all([program], 10.0)
        told = program.told
        assert told is not None
        assert not program.is_stopped
        running.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: program.is_stopped)
        ask_all([program], 0.3)
        assert program.silent_s > 0.3
        assert program.told is told
        with looking_at(running.pid) as newcomer:
            assert newcomer.told is not None  # from who has looked before
        running.send_signal(signal.SIGCONT)
        assert readings(program)[0].at_s > told.at_s
        assert program.silent_s == 0


BUSY = ONE + 'import re\nopen("busy", "w").close()\nre.match("(a+)+$", "a" * 40 + "b")\n'


@pytest.mark.processes
def test_a_program_that_holds_the_interpreter_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with a_program(BUSY) as running, looking_at(running.pid) as program:
        assert wait_until((tmp_path / "busy").exists)
        ask_all([program], 0.3)
        while program.has_answered():  # it had the time to answer before it was busy
            ask_all([program], 0.3)
        assert program.silent_s > 0.2
        assert not program.is_stopped


@pytest.mark.processes
def test_a_program_that_is_killed_leaves_nothing() -> None:
    with a_program() as running, looking_at(running.pid) as program:
        running.kill()
        running.wait()
        ask_all([program], 0.05)  # harmless
        assert boards_of(running.pid) == []


ENDS = (
    ONE
    + 'import time\nopen("here", "w").close()\nfor _ in range(40):\n    next(iter(collector))\n    time.sleep(0.005)\n'
)


@pytest.mark.processes
def test_a_program_ends_in_order_while_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with a_program(ENDS) as running:
        programs = Programs(only=running.pid)
        while running.poll() is None:
            for program in programs.find():
                program.ask()
        programs.close()
        assert running.communicate() == ("", "")
        assert running.wait() == 0


NO_DESCRIPTORS = """
import os, resource
from swath.collectors import Collector
from swath.envs import GymEnv
env = GymEnv("CartPole-v1")
Collector(env, frames_per_batch=50, total_frames=50).next()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
most = max(int(name) for name in os.listdir("/proc/self/fd"))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=100)
print([batch.numel() for batch in collector], collector.reading().frames)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=100)
links = [os.readlink(f"/proc/self/fd/{n}") for n in range(200) if os.path.islink(f"/proc/self/fd/{n}")]
print(sum("swath-board" in link for link in links))
"""


@pytest.mark.processes
def test_without_a_descriptor_left_a_collector_works_unseen() -> None:
    with WarmProgram(NO_DESCRIPTORS) as program:
        out, err = program.communicate()
    assert out.splitlines() == ["[50, 50] 100", "1"], err


def test_without_such_memory_a_collector_works_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("swath.platforms._in_libc", lambda *names: False)
    with a_collector() as collector:
        next(iter(collector))
        assert not boards()


def test_a_limit_of_file_sizes_leaves_a_collector_unseen() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with a_collector() as collector:
            next(iter(collector))
            assert not boards()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# -- who may read ------------------------------------------------------------------------------------------------------

STRANGER = 65534


def _as_stranger(act: Callable[[], bool]) -> bool:
    """In a process of another user's that was forked from this one."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os._exit(0 if act() else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_program_is_not_readable() -> None:
    with a_collector():
        (number,) = [number for number, what in descriptors().items() if NAME in what][:1]
        path = f"/proc/{HERE}/fd/{number}"

        def is_refused() -> bool:
            with pytest.raises(NoBoard, match="Permission denied"):
                OthersBoard(path)
            with pytest.raises(PermissionError):
                os.listdir(f"/proc/{HERE}/fd")
            return boards_of(HERE) == [] and Programs().find() == []

        assert _as_stranger(is_refused)
        assert boards_of(HERE) == [HERE]


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_does_not_see_others_programs() -> None:
    script = f"import os\nos.setgid({STRANGER})\nos.setuid({STRANGER})\n{ONE}print(1, flush=True)\n{COLLECT}"
    with WarmProgram(script) as running:
        assert running.stdout.readline() == "1\n"
        (path,) = (each for each in Path(f"/proc/{running.pid}/fd").iterdir() if NAME in os.readlink(each))
        with pytest.raises(NoBoard, match="it is another user's"):
            OthersBoard(str(path))
        assert boards_of(running.pid) == []
