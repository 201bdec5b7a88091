"""Ctrl-C, kills at random instants and closing at any moment, where the policy is here and envs are elsewhere."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn.probabilistic import interaction_type

from counting import assert_consistent, make_counting
from leaks import children, descriptors, wait_until
from policies_for_tests import deterministic
from programs import WarmProgram
from swath.collectors import AsyncBatchedCollector, BaseCollector, Collector
from swath.envs import ParallelEnv
from swath.errors import CollectorClosed, WorkerDied
from swath.stepping.shared_steps import ENDED

pytestmark = pytest.mark.processes


def lock_step(**kwargs: Any) -> BaseCollector:
    env = ParallelEnv(4, make_counting, num_workers=2)
    return Collector(env, deterministic(), frames_per_batch=200, **kwargs)


def first_come(**kwargs: Any) -> BaseCollector:
    return AsyncBatchedCollector([make_counting] * 4, deterministic(), frames_per_batch=200, num_workers=2, **kwargs)


MAKERS = pytest.mark.parametrize("make", [lock_step, first_come])


def pids(collector: Any) -> list[int]:
    return [member.pid for member in collector.env._crew.hosts.workers.handles]


@pytest.mark.alone
@MAKERS
def test_a_kill_at_any_instant_is_an_error_that_names_the_worker(make: Callable[..., Any]) -> None:
    draw = random.Random(0)
    for _ in range(12):
        collector = make(total_frames=-1)
        stream = iter(collector)
        next(stream)
        victim = draw.randrange(2)
        timer = threading.Timer(draw.uniform(0, 0.05), os.kill, (pids(collector)[victim], signal.SIGKILL))
        timer.start()
        started = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"worker {victim} .* was killed by SIGKILL"):
            for _ in stream:
                pass
        assert time.monotonic() - started < 2
        timer.join()


@MAKERS
def test_ctrl_c_leaves_the_collector_open(make: Callable[..., Any]) -> None:
    collector = make(total_frames=-1)
    next(iter(collector))
    for delay_s in (0.001, 0.01, 0.03):
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            interrupted(collector, timer)
        timer.join()
        # Episodes that have begun since are whole. (Those before may go on, if nothing was being collected just then.)
        first_id = collector.runner.ids.next_id
        batches = [batch for _, batch in zip(range(5), collector, strict=False)]
        flat = [batch.reshape(-1) for batch in batches]
        assert_consistent([batch[batch["collector", "traj_ids"] >= first_id] for batch in flat])
        assert interaction_type() is None
        assert torch.is_grad_enabled()
    collector.shutdown()


def test_ctrl_c_when_an_episode_has_just_ended() -> None:
    """The workers have marked the end, and reset the env; nobody has taken that over. It must not count for later."""
    collector = lock_step(total_frames=-1)
    stream = iter(collector)
    next(stream)
    stepper = collector._rollout._stepper
    wait, crew = stepper._await_all, stepper._crew
    for _ in range(10):

        def interrupted_at_an_end() -> None:
            wait()
            if any(crew.outcomes[part.group] == ENDED for part in stepper._parts):
                raise KeyboardInterrupt

        stepper._await_all = interrupted_at_an_end
        with pytest.raises(KeyboardInterrupt):
            list(collector)
        stepper._await_all = wait
        first_id = collector.runner.ids.next_id
        flat = [batch.reshape(-1) for _, batch in zip(range(3), collector, strict=False)]
        assert_consistent([batch[batch["collector", "traj_ids"] >= first_id] for batch in flat])
    collector.shutdown()


@MAKERS
def test_ctrl_c_between_collecting_and_delivering_ends_the_episodes(make: Callable[..., Any]) -> None:
    """The batch is lost, so what follows must not be taken for its continuation."""
    interrupts = iter([False, True, False, False])

    def hook(batch: Any) -> None:
        if next(interrupts):
            raise KeyboardInterrupt

    collector = make(total_frames=800, post_collect_hook=hook)
    delivered = [next(iter(collector))]
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    used = int(collector.partial_batch["collector", "traj_ids"].max())
    delivered = list(collector)
    assert min(int(batch["collector", "traj_ids"].min()) for batch in delivered) > used
    assert_consistent(delivered)


def interrupted(collector: Any, timer: threading.Timer) -> None:
    timer.start()
    for _ in collector:
        pass


@MAKERS
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_closing_while_another_thread_iterates(make: Callable[..., Any], delay_s: float) -> None:
    collector = make(total_frames=-1)
    errors: list[BaseException] = []
    running = threading.Event()

    def iterate() -> None:
        try:
            for _ in collector:
                running.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    assert running.wait(20)
    time.sleep(delay_s)  # at any moment
    collector.shutdown()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [CollectorClosed]


def test_many_collectors_one_after_the_other_leave_nothing() -> None:
    def once() -> None:
        for make in (lock_step, first_come):
            with contextlib.closing(ClosingBy(make(total_frames=400))) as each:
                assert sum(batch.numel() for batch in each.collector) == 400

    once()
    before = children(), len(descriptors())
    for _ in range(10):
        once()
    assert wait_until(lambda: children() <= before[0])
    assert len(descriptors()) <= before[1]


class ClosingBy:
    """``shutdown`` as ``close``."""

    def __init__(self, collector: Any) -> None:
        self.collector = collector
        self.close = collector.shutdown


def test_batches_stay_as_they_were_delivered() -> None:
    collector = first_come(total_frames=4000)
    kept, copies = [], []
    for batch in collector:
        kept.append(batch)
        copies.append(batch.clone())
    for batch, copy in zip(kept, copies, strict=True):
        assert all(torch.equal(batch.get(key), copy.get(key)) for key in copy.keys(True, True))


def test_processes_leave_when_their_owner_is_killed() -> None:
    script = (
        "from swath.collectors import AsyncBatchedCollector, RandomPolicy\n"
        "collector = AsyncBatchedCollector(['CartPole-v1'] * 4, RandomPolicy(), frames_per_batch=40, num_workers=2)\n"
        "stream = iter(collector)\n"
        "next(stream)\n"
        "print(*[member.pid for member in collector.env._crew.hosts.workers.handles], flush=True)\n"
        "for _ in stream: pass\n"
    )
    with WarmProgram(script) as owner:
        workers = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(workers) == 2
        owner.kill()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
