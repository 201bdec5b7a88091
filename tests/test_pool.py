"""AsyncEnvPool: send to some envs, receive whichever are ready."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import CountingEnv, assert_consistent, make_counting, plain_loop
from policies_for_tests import deterministic
from swath.envs import (
    AsyncEnvPool,
    GymEnv,
    GymWrapper,
    ProcessorAsyncEnvPool,
    SerialEnv,
    ThreadingAsyncEnvPool,
    next_seed,
)
from swath.errors import EnvBusy, EnvClosed, NothingSent, WorkerDied
from swath.testing import check_env

pytestmark = pytest.mark.processes
BACKENDS = pytest.mark.parametrize("backend", ["threading", "multiprocessing"])


class GatedEnv(CountingEnv):
    """Steps only once the event of its number is set; in threads only."""

    gates: dict[int, threading.Event]

    def __init__(self, number: int, gates: dict[int, threading.Event]) -> None:
        super().__init__(longest=1000)
        self.number, self.gates = number, gates

    def step(self, action: Any) -> Any:
        assert self.gates[self.number].wait(10)
        return super().step(action)


def gated(count: int) -> tuple[AsyncEnvPool, dict[int, threading.Event]]:
    gates = {number: threading.Event() for number in range(count)}
    return AsyncEnvPool([lambda i=i: GymWrapper(GatedEnv(i, gates)) for i in range(count)]), gates


@BACKENDS
def test_each_env_is_its_own_plain_loop(backend: str) -> None:
    policy = deterministic()
    with AsyncEnvPool([make_counting] * 3, backend=backend) as pool:
        assert type(pool) is {"threading": ThreadingAsyncEnvPool, "multiprocessing": ProcessorAsyncEnvPool}[backend]
        seeds = [4]
        while len(seeds) < 4:
            seeds.append(next_seed(seeds[-1]))
        assert pool.set_seed(4) == seeds[3]
        pool.async_reset_send()
        frames: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        roots = pool.async_reset_recv(min_get=3)
        assert roots["env_index"].tolist() == [0, 1, 2]
        with torch.no_grad():
            pool.async_step_and_maybe_reset_send(policy(roots))
            while min(map(len, frames.values())) < 60:
                steps, following = pool.async_step_and_maybe_reset_recv(min_get=1)
                for step in steps.unbind(0):
                    frames[int(step["env_index"])].append(step)
                pool.async_step_and_maybe_reset_send(policy(following))
        pool.async_step_and_maybe_reset_recv(min_get=3)
        for env, steps in frames.items():
            got: Any = torch.stack(steps)
            oracle: Any = plain_loop([CountingEnv()], [seeds[env]], policy, len(got), batched=False)[0]
            for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done")):
                torch.testing.assert_close(got[key], oracle[key])
            for flag in ("terminated", "truncated"):
                assert torch.equal(got["next", flag], oracle["next", flag])
            assert not got["done"].any()


def test_the_first_that_is_ready_comes_first() -> None:
    pool, gates = gated(3)
    with pool:
        pool.async_step_send(pool.rand_action(pool.reset()))
        gates[1].set()
        first = pool.async_step_recv()
        assert first["env_index"].tolist() == [1]
        assert first["next", "observation"][0, 1] == 1
        with pytest.raises(TimeoutError, match="0 of 1"):
            pool.async_step_recv(timeout=0.05)
        # Env 1 goes on while the others are still in their first step.
        pool.async_step_send(first["next"].copy().set("action", first["action"]), env_index=[1])
        assert pool.async_step_recv(env_index=[1])["next", "observation"][0, 1] == 2
        for gate in gates.values():
            gate.set()
        rest = pool.async_step_recv(min_get=2)
        assert rest["env_index"].tolist() == [0, 2]


def test_a_thread_for_each_env() -> None:
    pool, gates = gated(4)
    got: dict[int, list[Any]] = {i: [] for i in range(4)}

    def drive(env: int) -> None:
        pool.async_reset_send(env_index=env)
        root = pool.async_reset_recv(env_index=env)
        for _ in range(50):
            action = torch.nn.functional.one_hot(torch.tensor(env % 3), 3)
            pool.async_step_and_maybe_reset_send(root.set("action", action), env_index=env)
            step, root = pool.async_step_and_maybe_reset_recv(env_index=env)
            assert step.batch_size == ()
            got[env].append(step)

    with pool:
        for gate in gates.values():
            gate.set()
        threads = [threading.Thread(target=drive, args=(env,)) for env in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for env, steps in got.items():
        assert [float(step["next", "observation"][1]) for step in steps] == [float(i) for i in range(1, 51)]
        assert all(float(step["next", "observation"][2]) == env % 3 for step in steps)


def test_calls_out_of_order() -> None:
    pool, gates = gated(2)
    with pool:
        for gate in gates.values():
            gate.set()
        with pytest.raises(NothingSent, match="waits for 1 envs, but 0 are under way"):
            pool.async_step_recv()
        roots = pool.rand_action(pool.reset())
        pool.async_step_send(roots[:1], env_index=[0])
        with pytest.raises(EnvBusy, match="env 0 has not been received since async_step_send"):
            pool.async_step_send(roots)
        with pytest.raises(EnvBusy, match="env 0"):
            pool.reset()
        with pytest.raises(NothingSent, match="env 1"):
            pool.async_step_recv(env_index=1)
        with pytest.raises(NothingSent, match="async_reset_send"):
            pool.async_reset_recv(env_index=0)
        with pytest.raises(NothingSent, match="waits for 2 envs, but 1"):
            pool.async_step_recv(min_get=2)
        with pytest.raises(IndexError, match="there is no env 7"):
            pool.async_step_send(roots, env_index=7)
        with pytest.raises(EnvBusy, match="twice"):
            pool.async_step_send(roots, env_index=[1, 1])
        with pytest.raises(RuntimeError, match=r"2 envs of batch size \(\)"):
            pool.async_step_send(roots[:1].clone().exclude("env_index"), env_index=[0, 1])
        pool.async_step_recv()
        with pytest.raises(KeyError, match="no 'action'"):
            pool.async_step_send(roots.exclude("action"))
    with pytest.raises(EnvClosed):
        pool.async_reset_send()
    with pytest.raises(NotImplementedError, match="asyncio"):
        AsyncEnvPool([make_counting], backend="asyncio")
    with pytest.raises(ValueError, match="stack must be"):
        AsyncEnvPool([make_counting], stack="deep")


def test_max_get_and_stacks() -> None:
    for stack in ("dense", "maybe_dense", "lazy"):
        with AsyncEnvPool([make_counting] * 3, stack=stack) as pool:
            pool.async_reset_send()
            pool._await([0, 1, 2], 3, None) if pool._lock.acquire() else None
            pool._lock.release()
            two = pool.async_reset_recv(max_get=2)
            assert two.batch_size == (2,)
            assert isinstance(two, TensorDict) == (stack != "lazy")
            assert pool.async_reset_recv(min_get=1)["observation"].shape == (1, 4)


def test_as_any_env() -> None:
    with AsyncEnvPool([make_counting] * 3, backend="multiprocessing", num_workers=2) as pool:
        data = pool.rollout(20, break_when_any_done=False)
        assert data.shape == (3, 20)
        assert data["env_index"].tolist() == [[i] * 20 for i in range(3)]
        data["collector", "traj_ids"] = torch.arange(3).unsqueeze(1) * 1000 + data["observation"][..., 0].long()
        assert_consistent([data])


@BACKENDS
def test_the_contract_of_an_env(backend: str) -> None:
    with AsyncEnvPool([make_counting] * 3, backend=backend) as pool:
        check_env(pool)


@BACKENDS
def test_an_env_that_raises(backend: str) -> None:
    class Broken(CountingEnv):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("no ground below")

    makers = [make_counting, lambda: GymWrapper(Broken()), make_counting]
    with AsyncEnvPool(makers, backend=backend) as pool:
        pool.async_step_send(pool.rand_action(pool.reset()))
        with pytest.raises(ZeroDivisionError, match="no ground below") as caught:
            pool.async_step_recv(min_get=3)
        assert "env 1" in " ".join(caught.value.__notes__)
        pool.async_reset_send(env_index=[1])  # it can go on
        assert pool.async_reset_recv()["env_index"].tolist() == [1]


@pytest.mark.alone
def test_a_killed_process() -> None:
    with AsyncEnvPool([make_counting] * 2, backend="multiprocessing") as pool:
        roots = pool.rand_action(pool.reset())
        os.kill(pool._crew.hosts.workers.handles[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        started = time.monotonic()
        pool.async_step_send(roots)
        with pytest.raises(WorkerDied, match=r"worker 1 .* was killed by SIGKILL"):
            pool.async_step_recv(min_get=2)
        assert time.monotonic() - started < 2


def test_sizes_and_shutdown() -> None:
    pool = AsyncEnvPool([lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1"))] * 2, backend="threading")
    assert pool.env_batch_sizes == [torch.Size([3])] * 2
    assert (pool.shape, pool.numel()) == (torch.Size([2, 3]), 6)
    pool.shutdown()
    assert pool.is_closed
