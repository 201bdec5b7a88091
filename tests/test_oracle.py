"""Every field of every transition equals the plain loop's, over batches, with episodes of 1 to 50 steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from counting import CountingEnv, CountingTensorDictEnv, assert_same, plain_loop
from policies_for_tests import actor_critic, deterministic, recurrent, stochastic
from swath.collectors import Collector
from swath.envs import EnvBase, GymWrapper, SerialEnv, next_seed

NUM_ENVS = 3
SEED = 7


class OtherVectorEnv(gymnasium.vector.VectorWrapper):
    """Hides that it is Gymnasium's own, so that nothing but the documented API can be used."""


def vector(mode: AutoresetMode, kind: Callable[..., Any] = SyncVectorEnv) -> Callable[[], EnvBase]:
    def make() -> EnvBase:
        env = kind([CountingEnv] * NUM_ENVS, autoreset_mode=mode)
        return GymWrapper(env)

    return make


def other_vector(mode: AutoresetMode) -> Callable[[], EnvBase]:
    return lambda: GymWrapper(OtherVectorEnv(SyncVectorEnv([CountingEnv] * NUM_ENVS, autoreset_mode=mode)))


ENVS: dict[str, Callable[[], EnvBase]] = {
    "single": lambda: GymWrapper(CountingEnv()),
    "single, on TensorDicts": CountingTensorDictEnv,
    "serial": lambda: SerialEnv(NUM_ENVS, lambda: GymWrapper(CountingEnv())),
    "serial, on TensorDicts": lambda: SerialEnv(NUM_ENVS, CountingTensorDictEnv),
    "sync vector, disabled": vector(AutoresetMode.DISABLED),
    "sync vector, same step": vector(AutoresetMode.SAME_STEP),
    "sync vector, next step": vector(AutoresetMode.NEXT_STEP),
    "other vector, same step": other_vector(AutoresetMode.SAME_STEP),
}
#: In NEXT_STEP mode an unknown vector env takes filler steps, on which a policy draws numbers too.
FILLER_ENVS = {"other vector, next step": other_vector(AutoresetMode.NEXT_STEP)}
POLICIES: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]]]] = {
    "deterministic": (deterministic, {}),
    "stochastic": (stochastic, {}),
    "recurrent": (recurrent, {"hidden": (8,)}),
    "actor-critic": (actor_critic, {}),
}


def expected_and_got(make_env: Callable[[], EnvBase], policy_kind: str, *, per_env: int, num_batches: int) -> tuple:
    torch.manual_seed(0)
    make_policy, state_shapes = POLICIES[policy_kind]
    policy = make_policy()
    env = make_env()
    single = env.batch_size == torch.Size([])
    num_envs = env.batch_size.numel()
    seeds = [SEED]
    while len(seeds) < num_envs:
        seeds.append(next_seed(seeds[-1]))

    torch.manual_seed(1)
    oracle = plain_loop(
        [CountingEnv() for _ in seeds],
        seeds,
        policy,
        per_env * num_batches,
        batched=not single,
        state_shapes=state_shapes,
    )
    env.set_seed(SEED)
    torch.manual_seed(1)
    collector = Collector(
        env, policy, frames_per_batch=per_env * num_envs, total_frames=per_env * num_envs * num_batches
    )
    batches = [batch.unsqueeze(0) if single else batch for batch in collector]
    assert len(batches) == num_batches == len(collector)
    return oracle, torch.cat(batches, 1)


@pytest.mark.parametrize("policy_kind", POLICIES)
@pytest.mark.parametrize("env_kind", ENVS)
def test_equals_plain_loop(env_kind: str, policy_kind: str) -> None:
    oracle, got = expected_and_got(ENVS[env_kind], policy_kind, per_env=37, num_batches=9)
    assert int(oracle["next", "done"].sum()) > 5
    assert_same(got, oracle)


@pytest.mark.parametrize("policy_kind", ["deterministic", "recurrent", "actor-critic"])
def test_filler_steps_are_never_delivered(policy_kind: str) -> None:
    oracle, got = expected_and_got(FILLER_ENVS["other vector, next step"], policy_kind, per_env=37, num_batches=9)
    # Envs advance unevenly, so ids are drawn in another order; the episodes must be the same ones.
    ids, oracle_ids = (td.pop(("collector", "traj_ids")) for td in (got, oracle))
    for row, oracle_row in zip(ids, oracle_ids, strict=True):
        changes, oracle_changes = row.diff() != 0, oracle_row.diff() != 0
        assert torch.equal(changes, oracle_changes)
    assert len(ids.unique()) == int(oracle["next", "done"][:, :-1].sum()) + NUM_ENVS
    assert_same(got, oracle)


def test_batches_longer_than_a_strip() -> None:
    oracle, got = expected_and_got(ENVS["serial"], "stochastic", per_env=1300, num_batches=2)
    assert_same(got, oracle)


@pytest.mark.processes
def test_async_vector_env() -> None:
    oracle, got = expected_and_got(
        vector(AutoresetMode.NEXT_STEP, AsyncVectorEnv), "stochastic", per_env=40, num_batches=3
    )
    assert_same(got, oracle)


def test_every_step_ends_an_episode() -> None:
    torch.manual_seed(0)
    policy = recurrent()
    env = SerialEnv(2, lambda: GymWrapper(CountingEnv(longest=1)))
    env.set_seed(SEED)
    oracle = plain_loop(
        [CountingEnv(longest=1) for _ in range(2)],
        [SEED, next_seed(SEED)],
        policy,
        30,
        state_shapes={"hidden": (8,)},
    )
    collector = Collector(env, policy, frames_per_batch=20, total_frames=60)
    got: Any = torch.cat(list(collector), 1)
    assert_same(got, oracle)
    assert bool(oracle["next", "done"].all())
