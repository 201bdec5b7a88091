"""What an AsyncBatchedCollector has under way when it is told to begin anew: dropped, counted, and never half there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from counting import CountingEnv, assert_consistent, make_counting
from policies_for_tests import deterministic
from swath.collectors import AsyncBatchedCollector
from swath.envs import GymWrapper

pytestmark = pytest.mark.processes


def make_endless() -> GymWrapper:
    return GymWrapper(CountingEnv(longest=10**9))


def in_step(make: Any = make_endless, count: int = 4, policy: Any = None, **kwargs: Any) -> AsyncBatchedCollector:
    """All envs in each call of the policy, so that each has its share of each batch, however busy the machine is."""
    kwargs = {"frames_per_batch": 30, "min_batch_size": count, "server_timeout": 10.0} | kwargs
    makers = make if isinstance(make, list) else [make] * count
    return AsyncBatchedCollector(makers, policy or deterministic(), env_backend="threading", **kwargs)


def minus_one(observation: torch.Tensor) -> torch.Tensor:
    return torch.full((*observation.shape[:-1], 3), -1.0)


BEGIN_ANEW = {
    "reset": lambda collector: collector.reset(),
    "some": lambda collector: collector.reset([3, 1]),
    "seed": lambda collector: collector.set_seed(5),
    "state": lambda collector: collector.load_state_dict(collector.state_dict()),
    "nothing": lambda collector: None,
}


@pytest.mark.parametrize("how", BEGIN_ANEW)
@pytest.mark.parametrize("num_random", [1, 37, 101])
def test_random_frames_are_exact_whatever_was_dropped(how: str, num_random: int) -> None:
    policy = TensorDictModule(minus_one, ["observation"], ["action"])
    collector = in_step(policy=policy, init_random_frames=num_random, total_frames=300)
    batches = []
    for batch in collector:
        batches.append(batch)
        if len(batches) < 8:
            BEGIN_ANEW[how](collector)
    assert sum(map(len, batches)) == 300
    random = [int((batch["action"] != -1).any(-1).sum()) for batch in batches]
    assert sum(random) == num_random, random


def test_random_frames_are_exact_where_every_batch_begins_anew() -> None:
    policy = TensorDictModule(minus_one, ["observation"], ["action"])
    data: Any = torch.cat(
        list(in_step(policy=policy, init_random_frames=101, total_frames=300, reset_at_each_iter=True))
    )
    assert int((data["action"] != -1).any(-1).sum()) == 101


def test_random_frames_are_exact_after_ctrl_c() -> None:
    """What was being collected is thrown away (docs/faults.md), so it was not among the frames that were asked for."""
    interrupts = iter([False] * 5 + [True] + [False] * 10_000)

    def act(observation: torch.Tensor) -> torch.Tensor:
        if next(interrupts):
            raise KeyboardInterrupt
        return minus_one(observation)

    # One random frame in the last call with any: so the policy is called while they are still due.
    policy = TensorDictModule(act, ["observation"], ["action"])
    collector = in_step(policy=policy, init_random_frames=101, total_frames=300, max_batch_size=4, frames_per_batch=150)
    with pytest.raises(KeyboardInterrupt):
        list(collector)
    data: Any = torch.cat(list(collector))
    assert len(data) == 300
    assert int((data["action"] != -1).any(-1).sum()) == 101


def test_envs_that_are_reset_begin_with_the_next_batch() -> None:
    """Frames of a batch of 30 and 4 envs are left over; and each env has a step under way."""
    collector = in_step(total_frames=300)
    batches: list[Any] = []
    for batch in collector:
        if batches:
            for env in range(4):
                own = batch[batch["env_index"] == env]
                assert (own["observation"][0, 1] == 0) == (env in (1, 3)), env
                assert len(own["collector", "traj_ids"].unique()) == 1
        batches.append(batch)
        collector.reset(torch.tensor([False, True, False, True]))
    assert [len(batch) for batch in batches] == [30] * 10
    assert_consistent(batches)


def test_the_tail_of_an_episode_is_no_episode() -> None:
    collector = in_step(lambda: make_counting(longest=3), total_frames=3000, yield_completed_trajectories=True)
    for number, episode in enumerate(collector):
        assert episode["observation"][0, 1] == 0
        assert bool(episode["next", "done"][-1])
        if number % 5 == 0:
            collector.reset([number % 4])
    assert len(collector._assembler._pending) <= 4  # type: ignore[union-attr]  # nothing waits for what was dropped


@pytest.mark.parametrize("some", [[0], None])
def test_an_env_that_raised_before_it_was_reset(some: list[int] | None) -> None:
    class Broken(CountingEnv):
        def step(self, action: Any) -> Any:
            if self.step_count == 10:  # it is under way when the first batch is delivered
                raise ValueError("the gearbox is broken")
            return super().step(action)

    makers = [make_endless, make_endless, lambda: GymWrapper(Broken(longest=10**9))]
    collector = in_step(makers, 3)
    assert len(next(iter(collector))) == 30
    collector.reset(some)
    with pytest.raises(ValueError, match="the gearbox is broken"):
        next(iter(collector))
