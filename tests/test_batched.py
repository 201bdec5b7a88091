"""AsyncBatchedCollector: one policy, envs elsewhere, whichever are ready. See also ``test_contract``."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn

from counting import CountingEnv, assert_consistent, make_counting
from policies_for_tests import actor_critic, deterministic, recurrent, stochastic
from swath.collectors import AsyncBatchedCollector, RandomPolicy
from swath.envs import AsyncEnvPool, GymWrapper
from swath.errors import WorkerDied, WorkerHangs

pytestmark = pytest.mark.processes


def threads(count: int = 3, policy: Any = None, **kwargs: Any) -> AsyncBatchedCollector:
    return AsyncBatchedCollector(
        [make_counting] * count, deterministic() if policy is None else policy, env_backend="threading", **kwargs
    )


@pytest.mark.parametrize("policy", [deterministic, stochastic, recurrent, actor_critic, RandomPolicy])
def test_policies_of_every_kind(policy: Any) -> None:
    acting = policy()
    collector = AsyncBatchedCollector(
        [make_counting] * 5, acting, frames_per_batch=101, total_frames=707, num_workers=2
    )
    batches = list(collector)
    assert [len(batch) for batch in batches] == [101] * 7
    assert_consistent(batches)
    data: Any = torch.cat(batches)
    if policy in (deterministic, recurrent, actor_critic):  # what the policy says to the roots that were delivered
        with torch.no_grad():
            again = acting(data.select("observation", "hidden", strict=False))
        for key in again.keys(True, True):
            torch.testing.assert_close(data[key], again[key])
    if policy is recurrent:
        for env in range(5):
            own = data[data["env_index"] == env]
            starts = own["observation"][:, 1] == 0
            assert not own["hidden"][starts].any()
            going_on = ~starts[1:]
            assert torch.equal(own["hidden"][1:][going_on], own["next", "hidden"][:-1][going_on])


@given(
    envs=st.integers(1, 7),
    frames=st.integers(1, 40),
    total=st.integers(1, 150),
    most=st.integers(1, 8),
    workers=st.integers(1, 3),
)
@settings(max_examples=15, deadline=None)
def test_counts_are_exact(envs: int, frames: int, total: int, most: int, workers: int) -> None:
    collector = AsyncBatchedCollector(
        [make_counting] * envs,
        deterministic(),
        frames_per_batch=frames,
        total_frames=total,
        max_batch_size=most,
        num_workers=min(workers, envs),
        env_backend="threading",
    )
    assert len(collector) == -(-total // frames)
    batches = list(collector)
    assert [len(batch) for batch in batches] == [frames] * (total // frames) + [total % frames] * bool(total % frames)
    assert_consistent(batches)


def test_no_env_waits_for_another() -> None:
    gate = threading.Event()

    class Stuck(CountingEnv):
        def step(self, action: Any) -> Any:
            assert gate.wait(20)
            return super().step(action)

    makers = [lambda: GymWrapper(Stuck()), make_counting, make_counting]
    collector = AsyncBatchedCollector(
        makers, deterministic(), frames_per_batch=60, total_frames=300, env_backend="threading"
    )
    batches = []
    for batch in collector:
        batches.append(batch)
        assert (0 in batch["env_index"]) == (len(batches) > 3)
        if len(batches) >= 3:
            gate.set()
            # Its step is taken now; that it is in the next batch is a matter of frames, not of time.
            wait_for_step(collector)
    assert_consistent(batches)


def wait_for_step(collector: AsyncBatchedCollector) -> None:
    crew = collector.env._crew  # type: ignore[attr-defined]
    while crew.outcomes[0] == 1:
        time.sleep(0.001)


def test_episodes_one_by_one_and_several() -> None:
    collector = threads(frames_per_batch=50, total_frames=1000, yield_completed_trajectories=True)
    episodes = list(collector)
    assert len(episodes) > 10
    for episode in episodes:
        done = episode["next", "done"].reshape(-1)
        assert bool(done[-1])
        assert not done[:-1].any()
        assert episode["observation"][0, 1] == 0
    assert_consistent(episodes)
    collector = threads(frames_per_batch=50, total_frames=2000, trajs_per_batch=4)
    for batch in collector:
        assert batch.shape[0] == 4
        assert batch["collector", "mask"].any(1).all()
    with pytest.raises(ValueError, match="leave trajs_per_batch out"):
        threads(frames_per_batch=50, yield_completed_trajectories=True, trajs_per_batch=2)


def always_minus_one(observation: torch.Tensor) -> torch.Tensor:
    return torch.full((*observation.shape[:-1], 3), -1.0)


def test_random_frames_limits_and_hooks() -> None:
    calls: list[int] = []
    collector = threads(
        4,
        policy=TensorDictModule(
            lambda observation: torch.full((*observation.shape[:-1], 3), -1.0), ["observation"], ["action"]
        ),
        frames_per_batch=30,
        total_frames=300,
        init_random_frames=101,
        max_frames_per_traj=6,
        postproc=lambda batch: batch.set("seen", batch["observation"].clone()),
        post_collect_hook=lambda batch: calls.append(len(batch)),
    )
    batches = list(collector)
    assert calls == [30] * 10
    data: Any = torch.cat(batches)
    assert torch.equal(data["seen"], data["observation"])
    chosen = (data["action"] == -1).all(-1)
    # Exactly so many frames were not the policy's; of each env, the first ones.
    drawn = int((~chosen).sum())
    assert drawn <= 101
    later = sum(int((~(batch["action"] == -1).all(-1)).sum()) for batch in batches[-3:])
    assert later == 0
    assert drawn >= 101 - 8  # what was drawn and not delivered yet
    assert int(data["next", "step_count"].max()) == 6
    assert bool(data["next", "done"][data["next", "step_count"] == 6].all())


def test_limits_begin_anew_with_every_episode() -> None:
    makers = [lambda: make_counting(longest=9)] * 4
    for limit in (6, 100):
        collector = AsyncBatchedCollector(
            makers, deterministic(), frames_per_batch=60, total_frames=600, max_frames_per_traj=limit, num_workers=2
        )
        data: Any = torch.cat(list(collector))
        last = data["next", "done"].squeeze(-1)
        counts = data["next", "step_count"].squeeze(-1)
        assert torch.equal(counts.float(), data["next", "observation"][:, 1])
        assert int(counts.max()) == min(limit, 9)
        assert bool(last[counts == limit].all())
        # Episodes are of 1 to 9 steps; were they cut too early, none would be long.
        assert int((last & (counts >= 5)).sum()) > 20


def test_seeds_give_the_same_episodes_to_every_env() -> None:
    def collected(collector: AsyncBatchedCollector) -> dict[int, Any]:
        collector.set_seed(12)
        data: Any = torch.cat(list(collector))
        return {env: data[data["env_index"] == env] for env in range(4)}

    policy = deterministic()
    # All four in each call of the policy: so each has its share, however busy the machine is.
    evenly: Any = {"min_batch_size": 4, "server_timeout": 10.0, "frames_per_batch": 80}
    runs = [
        collected(AsyncBatchedCollector([make_counting] * 4, policy, total_frames=400, num_workers=workers, **evenly))
        for workers in (1, 2, 3)
    ]
    for env in range(4):
        common = min(len(run[env]) for run in runs)
        assert common > 20
        for run in runs[1:]:
            torch.testing.assert_close(run[env]["observation"][:common], runs[0][env]["observation"][:common])
    assert not torch.equal(runs[0][0]["observation"][:20], runs[0][1]["observation"][:20])
    # In the middle of collecting, too.
    collector = AsyncBatchedCollector([make_counting] * 4, policy, frames_per_batch=80, total_frames=-1, num_workers=2)
    next(iter(collector))
    collector.set_seed(12)
    batch = next(iter(collector))
    for env in range(4):
        own = batch[batch["env_index"] == env]["observation"]
        torch.testing.assert_close(own, runs[0][env]["observation"][: len(own)])
    collector.shutdown()


def test_resets() -> None:
    collector = threads(frames_per_batch=30, total_frames=120, reset_at_each_iter=True)
    for batch in collector:
        for env in batch["env_index"].unique():
            assert batch[batch["env_index"] == env]["observation"][0, 1] == 0
    # All three in each call of the policy: so each is in both batches, however busy the machine is.
    collector = threads(frames_per_batch=30, total_frames=-1, min_batch_size=3, server_timeout=10.0)
    first = next(iter(collector))
    collector.reset([1])
    second = next(iter(collector))
    old = first["collector", "traj_ids"][first["env_index"] == 1]
    own = second[second["env_index"] == 1]
    fresh = own["collector", "traj_ids"] > old.max()
    assert own["observation"][fresh][0, 1] == 0
    with pytest.raises(IndexError):
        collector.reset(torch.ones(5, dtype=torch.bool))
    collector.shutdown()


def test_weights_are_used_between_two_calls_of_the_policy() -> None:
    class Versioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.version = nn.Parameter(torch.zeros(()))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.version.expand(*observation.shape[:-1], 3).clone()

    policy = TensorDictModule(Versioned(), ["observation"], ["action"])
    collector = AsyncBatchedCollector([make_counting] * 4, policy, frames_per_batch=20, total_frames=-1, num_workers=2)
    stream = iter(collector)
    for version in range(1, 60):
        batch = next(stream)
        assert torch.equal(batch["action"][:, 0].long(), batch["policy_version"])
        assert int(batch["policy_version"].max()) == version - 1
        weights = {name: torch.full_like(value, version) for name, value in policy.state_dict().items()}
        collector.update_policy_weights_(weights)
    collector.shutdown()


def test_exploration_types() -> None:
    collector = threads(
        policy=stochastic(), frames_per_batch=40, total_frames=40, exploration_type=InteractionType.DETERMINISTIC
    )
    (batch,) = collector
    assert torch.equal(batch["action"].argmax(-1), batch["logits"].argmax(-1))


def test_batch_sizes_of_the_policy() -> None:
    sizes: list[int] = []

    def act(observation: torch.Tensor) -> torch.Tensor:
        sizes.append(len(observation))
        return torch.zeros(*observation.shape[:-1], 3)

    policy = TensorDictModule(act, ["observation"], ["action"])
    list(threads(6, policy, frames_per_batch=60, total_frames=240, max_batch_size=2))
    assert max(sizes[1:]) <= 2  # the first call finds out what the policy writes
    sizes.clear()
    collector = threads(6, policy, frames_per_batch=60, total_frames=240, min_batch_size=6, server_timeout=5.0)
    list(collector)
    assert set(sizes) == {6}
    assert collector.stats()["mean_batch_size"] == 6


def test_arguments() -> None:
    with pytest.raises(TypeError, match="a list with a function for every env"):
        AsyncBatchedCollector(make_counting, deterministic(), frames_per_batch=10)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="either policy or policy_factory"):
        AsyncBatchedCollector([make_counting], frames_per_batch=10)
    with pytest.raises(TypeError, match="not both"):
        AsyncBatchedCollector([make_counting], deterministic(), policy_factory=deterministic, frames_per_batch=10)
    with pytest.raises(ValueError, match="env_backend must be"):
        AsyncBatchedCollector([make_counting], deterministic(), frames_per_batch=10, env_backend="asyncio")
    with pytest.raises(ValueError, match="give either server_config or max_batch_size"):
        threads(frames_per_batch=10, max_batch_size=3, server_config={"max_batch_size": 4})
    with pytest.raises(ValueError, match="unknown entry 'batch'"):
        threads(frames_per_batch=10, server_config={"batch": 4})
    with pytest.raises(ValueError, match="min_batch_size=9 is more"):
        threads(frames_per_batch=10, min_batch_size=9, max_batch_size=4)
    with pytest.raises(TypeError, match="needs frames_per_batch"):
        threads()
    with pytest.raises(TypeError, match="did you mean 'frames_per_batch'"):
        threads(frames_per_batch=10, frame_per_batch=3)
    collector = threads(
        frames_per_batch=10,
        total_frames=10,
        server_config=SimpleNamespace(max_batch_size=2, min_batch_size=1, timeout=0.1),
        device_config={"storing_device": "cpu"},
        policy_version=5,
    )
    assert isinstance(collector.env, AsyncEnvPool)
    (batch,) = collector
    assert batch.device == torch.device("cpu")
    assert (batch["policy_version"] == 5).all()


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_an_env_that_raises(backend: str) -> None:
    class Broken(CountingEnv):
        taken = 0

        def step(self, action: Any) -> Any:
            self.taken += 1
            if self.taken > 20:
                raise ValueError("the gearbox is broken")
            return super().step(action)

    makers = [make_counting, make_counting, lambda: GymWrapper(Broken())]
    collector = AsyncBatchedCollector(
        makers, deterministic(), frames_per_batch=500, total_frames=5000, env_backend=backend, num_workers=3
    )
    got: list[Any] = []  # whole batches, if the other envs are much faster
    with pytest.raises(ValueError, match="the gearbox is broken") as caught:
        got.extend(collector)
    assert "env 2" in " ".join(caught.value.__notes__)
    partial = collector.partial_batch
    assert partial is not None
    got.append(partial)
    assert sum(int((batch["env_index"] == 2).sum()) for batch in got) == 20
    assert_consistent(got)


def test_a_policy_that_raises() -> None:
    calls = iter(range(1000))

    def act(observation: torch.Tensor) -> torch.Tensor:
        if next(calls) > 5:
            raise FloatingPointError("loss of precision")
        return torch.zeros(*observation.shape[:-1], 3)

    with pytest.raises(FloatingPointError, match="loss of precision"):
        list(threads(policy=TensorDictModule(act, ["observation"], ["action"]), frames_per_batch=100, total_frames=200))


def drain(stream: Any) -> None:
    for _ in stream:
        pass


@pytest.mark.alone
def test_a_killed_env_process() -> None:
    for instant in range(5):
        collector = AsyncBatchedCollector(
            [make_counting] * 4, deterministic(), frames_per_batch=40, total_frames=-1, num_workers=2
        )
        stream = iter(collector)
        for _ in range(instant):
            next(stream)
        victim = collector.env._crew.hosts.workers.handles[1].pid  # type: ignore[attr-defined]
        threading.Timer(0.003 * instant, os.kill, (victim, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+, envs 2 to 3\) was killed by SIGKILL"):
            drain(stream)
        assert time.monotonic() - started < 2


def test_a_step_that_hangs() -> None:
    class Hanging(CountingEnv):
        def step(self, action: Any) -> Any:
            time.sleep(30)

    collector = AsyncBatchedCollector(
        [lambda: GymWrapper(Hanging())], deterministic(), frames_per_batch=5, step_timeout_s=0.5
    )
    with pytest.raises(WorkerHangs, match="worker 0"):
        next(iter(collector))


@pytest.mark.parametrize("again", [True, False])
def test_one_env_given_twice_is_not_stepped_by_two_threads(again: bool) -> None:
    """Each of them would see only some of its steps. (In processes each has a copy.)"""
    env = GymWrapper(CountingEnv())
    factories = [env, env] if again else [lambda: env] * 2
    with pytest.raises(ValueError, match="one and the same, which two threads"):
        AsyncBatchedCollector(factories, deterministic(), frames_per_batch=20, env_backend="threading")
