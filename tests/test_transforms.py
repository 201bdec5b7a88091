"""Transforms: what they make of an env's data, in every collector, at the ends of episodes above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from counting import CountingEnv, CountingTensorDictEnv, make_counting
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from swath.errors import EnvError


class Doubled(Transform):
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def stack(max_steps: int | None = None) -> Compose:
    return Compose(
        StepCounter(max_steps),
        RewardSum(),
        InitTracker(),
        Doubled(in_keys=["observation"], out_keys=["double"]),
    )


def make_transformed() -> TransformedEnv:
    return TransformedEnv(make_counting(), stack(20))


def check(batch: Any, max_steps: int | None = 20) -> None:
    """``batch`` is [..., time]; CountingEnv's observation has the step of the episode."""
    after = batch["next"]
    assert (batch["step_count"][..., 0] == batch["observation"][..., 1]).all()
    assert (after["step_count"] == batch["step_count"] + 1).all()
    assert (after["step_count"][..., 0] == after["observation"][..., 1]).all(), "the last one is another episode's"
    assert torch.equal(after["episode_reward"], batch["episode_reward"] + after["reward"])
    assert (batch["episode_reward"][batch["step_count"] == 0] == 0).all()
    assert torch.equal(batch["is_init"], batch["step_count"] == 0)
    assert not after["is_init"].any()
    assert torch.equal(batch["double"], 2 * batch["observation"])
    assert torch.equal(after["double"], 2 * after["observation"])
    goes_on = ~after["done"][..., :-1, 0]
    for key in ("observation", "step_count", "episode_reward", "double"):
        assert torch.equal(batch[key][..., 1:, :][goes_on], after[key][..., :-1, :][goes_on])
    if max_steps is not None:
        over = after["step_count"] >= max_steps
        assert after["truncated"][over].all()
        assert after["done"][over].all()
        assert (after["step_count"] <= max_steps).all()


BASES: dict[str, Callable[[], Any]] = {
    "one": make_transformed,
    "over several": lambda: TransformedEnv(SerialEnv(3, make_counting), stack(20)),
    "several": lambda: SerialEnv(3, make_transformed),
    "over TensorDicts": lambda: TransformedEnv(CountingTensorDictEnv(), stack(20)),
    "twice": lambda: TransformedEnv(
        TransformedEnv(SerialEnv(2, make_counting), Compose(StepCounter(20), RewardSum())),
        Compose(InitTracker(), Doubled(in_keys=["observation"], out_keys=["double"])),
    ),
}
IN_PROCESSES: dict[str, Callable[[], Any]] = {
    "in processes": lambda: ParallelEnv(2, make_transformed),
    "over processes": lambda: TransformedEnv(ParallelEnv(2, make_counting), stack(20)),
}


@pytest.mark.parametrize("make", BASES.values(), ids=BASES)
def test_episodes(make: Callable[[], Any]) -> None:
    with Collector(make(), None, frames_per_batch=120, total_frames=720) as collector:
        ends = 0
        for batch in collector:
            check(batch)
            ends += int(batch["next", "done"].sum())
        assert ends > 10


@pytest.mark.processes
@pytest.mark.parametrize("make", IN_PROCESSES.values(), ids=IN_PROCESSES)
def test_episodes_of_envs_in_processes(make: Callable[[], Any]) -> None:
    test_episodes(make)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_in_workers(kind: Any) -> None:
    with kind([make_transformed] * 3, None, frames_per_batch=90, total_frames=900, num_workers=2) as collector:
        assert collector.env_plan().endswith("then StepCounter, RewardSum, InitTracker, Doubled")
        for batch in collector:
            check(batch)


@pytest.mark.processes
def test_in_central_inference() -> None:
    """Frames of all envs are mixed there, and each is true by itself."""
    policy = TensorDictModule(torch.nn.Linear(4, 3), in_keys=["observation"], out_keys=["action"])
    with AsyncBatchedCollector([make_transformed] * 3, policy, frames_per_batch=60, total_frames=600) as collector:
        for batch in collector:
            after = batch["next"]
            assert (after["step_count"] == batch["step_count"] + 1).all()
            assert (batch["step_count"][..., 0] == batch["observation"][..., 1]).all()
            assert torch.equal(after["episode_reward"], batch["episode_reward"] + after["reward"])


def test_after_a_reset_of_some_envs() -> None:
    env = TransformedEnv(SerialEnv(3, make_counting), stack())
    root = env.reset()
    for _ in range(3):
        root = env.step_mdp(env.step(env.rand_action(root)))
        root = env.maybe_reset(root)
    before = root.clone()
    mask = torch.tensor([[True], [False], [True]])
    after = env.reset(root.set("_reset", mask))
    assert (after["step_count"][[0, 2]] == 0).all()
    assert torch.equal(after["is_init"], mask | before["is_init"] & ~mask)
    for key in ("observation", "step_count", "episode_reward", "double"):
        assert torch.equal(after[key][1], before[key][1]), key
    check(env.rollout(30, break_when_any_done=False, auto_reset=False, tensordict=after)[..., :1], None)


def test_batches_follow_one_another() -> None:
    """An episode goes on in the next batch, a reset of the collector starts all anew."""
    with Collector(make_transformed(), None, frames_per_batch=7, total_frames=-1) as collector:
        batches = iter(collector)
        frames = torch.cat([next(batches).clone() for _ in range(20)], -1)
        check(frames)
        collector.reset()
        assert next(batches)["step_count"][0] == 0


def test_what_is_appended_and_inserted() -> None:
    env = TransformedEnv(make_counting())
    assert env.append_transform(StepCounter()) is env
    env.insert_transform(0, RewardSum())
    assert [type(transform) for transform in env.transform] == [RewardSum, StepCounter]
    assert isinstance(env.transform[-1], StepCounter)
    assert len(env.transform[:1]) == 1
    assert {"step_count", "episode_reward"} <= set(env.rollout(2).keys())
    assert env.observation_spec["step_count"].dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformedEnv(make_counting(), Doubled(in_keys=["typo"])), "gives no 'typo'; it gives 'observation'"),
        (lambda: TransformedEnv(make_counting(), object()), "a transform is a swath.envs.Transform, not builtins.obj"),
        (lambda: Doubled(in_keys=["a", "b"], out_keys=["c"]), "differ in length"),
        (lambda: StepCounter(max_steps=0), "at least 1, got 0"),
        (lambda: StepCounter(update_done=False), "truncated and done"),
        (lambda: RewardSum(reset_keys=["other"]), "one episode per row"),
        (lambda: RewardSum(reward_spec=True), "not supported"),
        (lambda: InitTracker(init_key=("a", "b")), "must be a string"),  # type: ignore[arg-type]
        (lambda: TransformedEnv(make_transformed(), InitTracker()), "has 'is_init' already"),
    ],
)
def test_what_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        make()


def test_a_transform_that_is_refused_leaves_the_env_as_it_was() -> None:
    env = TransformedEnv(make_counting(), StepCounter())
    with pytest.raises(KeyError, match="typo"):
        env.append_transform(Doubled(in_keys=["typo"]))
    assert len(env.transform) == 1
    assert "step_count" in env.rollout(2)


def test_steps_that_are_none_are_refused() -> None:
    class Hidden(SyncVectorEnv):
        """Not known to take a mask of envs to reset."""

    with pytest.raises(EnvError, match="NEXT_STEP"):
        TransformedEnv(Hidden([CountingEnv] * 2, autoreset_mode=AutoresetMode.NEXT_STEP), StepCounter())


def test_envs_that_reset_by_themselves() -> None:
    def make(transform: Transform) -> TransformedEnv:
        return TransformedEnv(SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP), transform)

    with pytest.raises(EnvError, match=r"StepCounter\(max_steps=20\) needs an env whose parts can be reset"):
        make(stack(20))
    with Collector(make(stack()), None, frames_per_batch=120, total_frames=720) as collector:
        for batch in collector:
            check(batch, None)


def test_state_is_saved() -> None:
    env = make_transformed()
    env.set_seed(4)
    env.reset()
    state = env.state_dict()
    noise = env.rollout(5)["observation"][:, 3]
    other = make_transformed()
    other.load_state_dict(state)
    assert torch.equal(other.rollout(5)["observation"][:, 3], noise)


def test_a_policy_reads_what_transforms_give() -> None:
    def policy(step_count: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(step_count.squeeze(-1) % 3, 3)

    module = TensorDictModule(policy, in_keys=["step_count"], out_keys=["action"])
    with Collector(make_transformed(), module, frames_per_batch=60, total_frames=120) as collector:
        for batch in collector:
            assert torch.equal(batch["action"].argmax(-1), batch["step_count"].squeeze(-1) % 3)


def test_of_all_that_step_gives() -> None:
    """``step`` on TensorDicts, as a user would call it."""
    env = make_transformed()
    root = env.reset()
    assert isinstance(root, TensorDict)
    assert root["step_count"].shape == (1,)
    stepped = env.step(env.rand_action(root))
    assert stepped["next", "step_count"] == 1
    assert set(env.fake_tensordict().keys(True, True)) == set(stepped.keys(True, True))


class Rewarding(CountingEnv):
    """Gives rewards that are hard to add up, and goes on."""

    REWARDS = (0.1, 1e8, 1.0, -1e8, 1e-45, 3e38, 3e38, -1.0, float("-inf"), 2.0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, *_, info = super().step(action)
        return observation, self.REWARDS[(self.step_count - 1) % 10], False, False, info


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize("num_envs", [1, 2])
def test_sums_are_of_the_rewards_precision(num_envs: int) -> None:
    env = GymWrapper(Rewarding()) if num_envs == 1 else SerialEnv(2, lambda: GymWrapper(Rewarding()))
    sums = TransformedEnv(env, RewardSum()).rollout(10)["next", "episode_reward"].reshape(num_envs, 10)
    total, expected = torch.zeros(()), []
    for reward in Rewarding.REWARDS:
        total = total + torch.tensor(reward)
        expected.append(total)
    assert torch.equal(sums.nan_to_num(7.0), torch.stack(expected).expand(num_envs, 10).nan_to_num(7.0))
    assert sums.isinf().any()
    assert sums.isnan().any()
