"""Ctrl-C at any instant: no message is cut, no frame is lost from the middle of an episode, and one can go on."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from counting import CountingEnv, make_counting
from leaks import children, wait_until
from policies_for_tests import deterministic
from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.background import Batches
from swath.collectors.buffer_fill import BufferFill
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymWrapper
from swath.process import ctrl_c
from swath.process.ctrl_c import ctrl_c_waits, interruptible

pytestmark = pytest.mark.processes


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# -- the two functions -----------------------------------------------------------------------------------------------


def test_it_comes_at_the_end_of_what_must_be_whole() -> None:
    done = []

    @ctrl_c_waits
    def inner() -> None:
        press()
        done.append("inner")

    @ctrl_c_waits
    def outer() -> None:
        inner()
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    outer_again = ctrl_c_waits(lambda: "nothing is left of it")
    assert outer_again() == "nothing is left of it"


def test_pressed_twice_it_comes_at_once() -> None:
    done = []

    @ctrl_c_waits
    def change() -> None:
        press()
        done.append("after one")
        press()
        done.append("after two")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done == ["after one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("first", ["pressed", "waits"])
def test_it_comes_in_what_waits(first: str) -> None:
    done = []
    never, _ = Pipe()

    @ctrl_c_waits
    def wait() -> None:
        if first == "pressed":
            press()
        else:
            threading.Timer(0.05, press).start()
        done.append("books")
        ctrl_c.wait([never])
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert done == ["books"]


def test_an_error_is_not_lost_to_it() -> None:
    @ctrl_c_waits
    def fail() -> None:
        press()
        raise ValueError("the env is on fire")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert str(caught.value.__context__) == "the env is on fire"


def test_whoever_ignores_it_goes_on_to() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ctrl_c_waits(press)()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_s_own_handler_is_called_and_stays() -> None:
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        assert ctrl_c_waits(lambda: (press(), list(came))[1])() == []
        assert came == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone() -> None:
    seen: list[Any] = []
    thread = threading.Thread(
        target=ctrl_c_waits(lambda: seen.append(interruptible(signal.getsignal, signal.SIGINT))),
    )
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


class PressedWhileItIsFinalized:
    def __del__(self) -> None:
        press()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_that_happens_to_run_does_not_swallow_it() -> None:
    done = []

    def make_garbage() -> None:
        PressedWhileItIsFinalized()
        done.append("waited")

    @ctrl_c_waits
    def change() -> None:
        interruptible(make_garbage)
        done.append("changed")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done == ["waited", "changed"]
    outer_again = ctrl_c_waits(lambda: "nothing is left of it")
    assert outer_again() == "nothing is left of it"


# -- collectors ------------------------------------------------------------------------------------------------------


class Presser:
    """Presses Ctrl-C a moment after it is asked to, from another thread."""

    def __init__(self) -> None:
        self._asked: list[float] = []
        self._news = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def press_after(self, seconds: float) -> None:
        self._asked.append(seconds)
        self._news.release()

    def end(self) -> None:
        self._asked.append(-1.0)
        self._news.release()
        assert self._done.acquire(timeout=5)

    def _run(self) -> None:
        while True:
            self._news.acquire()
            seconds = self._asked.pop(0)
            if seconds < 0:
                self._done.release()
                return
            time.sleep(seconds)
            press()


@pytest.fixture
def presser() -> Iterator[Presser]:
    made = Presser()
    yield made
    made.end()


class Episodes:
    """Checks that every episode is delivered from its first step on, without a gap."""

    def __init__(self) -> None:
        self._last_step: dict[int, int] = {}
        self.frames = 0

    def check(self, batch: Any) -> None:
        self.frames += batch.numel()
        for row in batch if batch.ndim == 2 else [batch]:
            ids = row["collector", "traj_ids"]
            for traj_id in ids.unique().tolist():
                steps = row["observation"][ids == traj_id][:, 1]
                first = self._last_step.get(traj_id, -1) + 1
                assert torch.equal(steps, torch.arange(first, first + len(steps), dtype=steps.dtype)), (traj_id, steps)
                self._last_step[traj_id] = int(steps[-1])


def many_workers(kind: type) -> Callable[[], Any]:
    return lambda: kind([make_counting] * 2, deterministic(), frames_per_batch=60, num_workers=2)


def nodes(sync: bool) -> Callable[[], Any]:
    return lambda: DistributedCollector([make_counting] * 2, deterministic(), frames_per_batch=60, sync=sync)


MAKERS = {
    "MultiSync": many_workers(MultiSyncCollector),
    "MultiAsync": many_workers(MultiAsyncCollector),
    "Async": lambda: AsyncCollector(make_counting, deterministic(), frames_per_batch=60),
    "Distributed": nodes(sync=False),
    "DistributedSync": nodes(sync=True),
}


def take_all(collector: Any, got: list[Any], presser: Presser, seconds: float) -> None:
    presser.press_after(seconds)
    got.extend(collector)  # as a loop does: one by one


@pytest.mark.parametrize("name", MAKERS)
def test_going_on_after_ctrl_c_at_any_instant(name: str, presser: Presser) -> None:
    """A message that is cut in two would end its worker, or never be answered; a batch that is lost leaves a gap."""
    draw = random.Random(0)
    collector = MAKERS[name]()
    episodes = Episodes()
    for _ in range(60):
        got: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            take_all(collector, got, presser, draw.uniform(0, 0.006))
        counted = collector.stats()["frames"]
        for batch in got:
            episodes.check(batch)
        left = 0 if collector.partial_batch is None else collector.partial_batch.numel()
        if episodes.frames + left != counted:
            # It came between two instructions of this loop, which lost the batch that it was given.
            episodes = Episodes()
            collector.set_seed(0)
        episodes.frames = counted
        for batch in itertools.islice(collector, 3):
            episodes.check(batch)
    assert all(line["alive"] for line in collector.stats().get("workers", ()))
    collector.shutdown()


def make_and_wait(method: str, presser: Presser, seconds: float) -> None:
    presser.press_after(seconds)
    with MultiSyncCollector(
        [make_counting] * 2, deterministic(), frames_per_batch=60, num_workers=2, mp_start_method=method
    ):
        threading.Event().wait(60)


@pytest.mark.parametrize(("method", "seconds"), [("forkserver", 0.1), ("fork", 0.1)])
def test_ctrl_c_while_workers_start(method: str, seconds: float, presser: Presser, capfd: Any) -> None:
    """None is left behind, and none says anything."""
    draw = random.Random(1)
    for _ in range(30):
        with pytest.raises(KeyboardInterrupt):
            make_and_wait(method, presser, draw.uniform(0, seconds))
    assert capfd.readouterr().err == ""


class SlowToClose(CountingEnv):
    def __init__(self, closing: Path) -> None:
        super().__init__()
        self.closing = closing

    def close(self) -> None:
        self.closing.touch()
        threading.Event().wait(60)


def test_ctrl_c_while_workers_are_ended_is_not_swallowed(tmp_path: Path) -> None:
    closing = tmp_path / "closing"
    collector = MultiSyncCollector([lambda: GymWrapper(SlowToClose(closing))], deterministic(), frames_per_batch=20)
    next(iter(collector))

    def press_when_it_closes() -> None:
        wait_until(closing.exists, 30)
        press()

    thread = threading.Thread(target=press_when_it_closes)
    thread.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        collector.shutdown(timeout=100)
    assert time.monotonic() - started < 60  # by force, and not when the env has closed
    thread.join()


@pytest.mark.filterwarnings("ignore:worker")
def test_ctrl_c_while_a_worker_is_started_again(tmp_path: Path) -> None:
    """It has not got its weights yet: another one is started, gets them, and does not count as a second restart."""
    begun = tmp_path / "begun"

    def make() -> Any:
        if begun.exists():  # the second life
            begun.unlink()
            (tmp_path / "building").touch()
            time.sleep(60)
        return make_counting()

    policy = deterministic()
    collector = MultiSyncCollector([make, make_counting], policy, frames_per_batch=60, num_workers=2, restart_workers=1)
    next(iter(collector))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    collector.update_policy_weights_()
    begun.touch()
    os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)

    def press_when_it_builds() -> None:
        wait_until((tmp_path / "building").exists, 30)
        press()

    thread = threading.Thread(target=press_when_it_builds)
    thread.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(collector)
    assert time.monotonic() - started < 30
    thread.join()
    batches = list(itertools.islice(collector, 3))
    assert all(batch.shape == (2, 30) for batch in batches)
    lines = collector.stats()["workers"]
    assert lines[0]["policy_version"] == lines[1]["policy_version"] == 1
    with torch.no_grad():
        expected = policy(batches[-1].clone())["action"]
    torch.testing.assert_close(batches[-1]["action"], expected)
    collector.shutdown()


# -- while something in the background is waited for -------------------------------------------------------------------


class Held(CountingEnv):
    """Its steps wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.may_go_on, self.is_closed = threading.Semaphore(0), threading.Event(), False

    def step(self, action: Any) -> Any:
        self.steps.release()
        assert self.may_go_on.wait(60)
        return super().step(action)

    def close(self) -> None:
        self.is_closed = True


def press_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Whoever waits for what the background does hurries it: once, Ctrl-C is pressed then."""
    hurry = kind.hurry

    def hurry_and_press(self: Any) -> None:
        monkeypatch.setattr(kind, "hurry", hurry)
        hurry(self)
        press()

    monkeypatch.setattr(kind, "hurry", hurry_and_press)


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(10_000))


def test_ctrl_c_while_a_pause_is_waited_for_leaves_it_running(monkeypatch: pytest.MonkeyPatch) -> None:
    env, rb = Held(), buffer()
    collector = Collector(lambda: GymWrapper(env), deterministic(), frames_per_batch=10, replay_buffer=rb)
    collector.start()
    assert env.steps.acquire(timeout=60)
    press_while_it_is_waited_for(monkeypatch, Batches)
    with pytest.raises(KeyboardInterrupt), collector.pause():
        pytest.fail("it is in the middle of a step")
    env.may_go_on.set()
    assert wait_until(lambda: rb.write_count > 50, 60)
    with collector.pause():
        assert collector.is_running()
    collector.async_shutdown()


def test_ctrl_c_while_the_end_of_the_background_is_waited_for_closes_the_env(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Held()
    collector = Collector(lambda: GymWrapper(env), deterministic(), frames_per_batch=10, replay_buffer=buffer())
    collector.start()
    assert env.steps.acquire(timeout=60)
    press_while_it_is_waited_for(monkeypatch, Batches)
    with pytest.raises(KeyboardInterrupt):
        collector.shutdown()
    assert env.is_closed
    env.may_go_on.set()
    assert wait_until(lambda: not collector.is_running(), 60)


def test_ctrl_c_while_the_end_of_the_background_is_waited_for_ends_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    collector = MultiSyncCollector([make_counting] * 2, deterministic(), frames_per_batch=20, replay_buffer=buffer())
    collector.start()
    press_while_it_is_waited_for(monkeypatch, BufferFill)
    with pytest.raises(KeyboardInterrupt):
        collector.shutdown()
    assert children() <= before
    assert wait_until(lambda: not collector.is_running(), 60)
