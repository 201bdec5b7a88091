"""Envs of other packages: each keeps the contract, and gives what a plain loop over its package's own API gives.

Each family is skipped where its package is missing; `make test-envs` has them all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

import user_env_examples as examples
from leaks import wait_until
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import (
    DMControlEnv,
    DMControlWrapper,
    EnvPoolEnv,
    EnvPoolWrapper,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    PettingZooEnv,
    PettingZooWrapper,
    SerialEnv,
    next_seed,
)
from swath.envs.making import make_env
from swath.errors import EnvClosed, EnvError
from swath.modules import RandomPolicy
from swath.testing import check_env

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
]
SEED = 3


@dataclass(frozen=True)
class Case:
    """An env as a user hands it over, and what its own package says of the same actions."""

    make: Callable[[], Any]
    #: ``plain(batch)``: what is expected where, as the package's own API tells it; or it compares by itself.
    plain: Callable[[TensorDictBase], dict[Any, np.ndarray] | None]
    num_steps: int = 60
    #: Whether a seed determines what the env does.
    is_seedable: bool = True


# -- plain loops -----------------------------------------------------------------------------------------------------


class Record:
    """Steps of one env, as arrays under the keys that swath gives them."""

    def __init__(self) -> None:
        self.lists: dict[Any, list[Any]] = defaultdict(list)

    def observe(self, observation: Any, *prefix: str) -> None:
        named = observation if isinstance(observation, dict) else {"observation": observation}
        for name, value in named.items():
            self.lists[*prefix, name].append(np.array(value))

    def outcome(self, reward: Any, terminated: Any, truncated: Any) -> None:
        self.lists["next", "reward"].append([reward])
        self.lists["next", "terminated"].append([bool(terminated)])
        self.lists["next", "truncated"].append([bool(truncated)])
        self.lists["next", "done"].append([bool(terminated or truncated)])

    def arrays(self) -> dict[Any, np.ndarray]:
        return {key: np.array(values) for key, values in self.lists.items()}


def decoded(action: torch.Tensor, space: Any) -> Any:
    return int(action.argmax()) if isinstance(space, gymnasium.spaces.Discrete) else action.numpy()


def plain_gym(make: Callable[[], gymnasium.Env], batch: TensorDictBase) -> dict[Any, np.ndarray]:
    env, record = make(), Record()
    observation, _ = env.reset(seed=SEED)
    for action in batch["action"]:
        record.observe(observation)
        observation, reward, terminated, truncated, _ = env.step(decoded(action, env.action_space))
        record.observe(observation, "next")
        record.outcome(np.float32(reward), terminated, truncated)
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    return record.arrays()


def seeds_of(num_envs: int) -> list[int]:
    seeds = [SEED]
    while len(seeds) < num_envs:
        seeds.append(next_seed(seeds[-1]))
    return [seed % 2**31 for seed in seeds]


def plain_pool(make: Callable[[list[int]], tuple[Any, dict[str, Any]]], batch: TensorDictBase) -> dict[Any, np.ndarray]:
    """A pool that resets by itself: the step after an episode's last is no transition."""
    num_envs, num_steps = batch.shape
    env, reset_kwargs = make(seeds_of(num_envs))
    given: Any = batch["action"].numpy()
    choices = given if given.dtype.kind == "f" else given.argmax(-1)
    records, taken = [Record() for _ in range(num_envs)], np.zeros(num_envs, int)
    is_filler = np.zeros(num_envs, bool)
    observation, _ = env.reset(**reset_kwargs)
    while (taken < num_steps).any():
        actions = choices[np.arange(num_envs), np.minimum(taken, num_steps - 1)]
        after, reward, terminated, truncated, _ = env.step(actions)
        for i in np.flatnonzero(~is_filler & (taken < num_steps)):
            records[i].observe(observation[i])
            records[i].observe(after[i], "next")
            records[i].outcome(np.float32(reward[i]), terminated[i], truncated[i])
            taken[i] += 1
        observation, is_filler = after.copy(), terminated | truncated
    rows = [record.arrays() for record in records]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def plain_dm(make: Callable[..., Any], batch: TensorDictBase) -> dict[Any, np.ndarray]:
    env, record = make(random=SEED), Record()
    observation = env.reset().observation
    for action in batch["action"]:
        record.observe(observation)
        step = env.step(action.numpy())
        record.observe(step.observation, "next")
        record.outcome(step.reward, step.last() and step.discount == 0, step.last() and step.discount != 0)
        observation = env.reset().observation if step.last() else step.observation
    return record.arrays()


def place(batch: TensorDictBase, agents: list[str], agent: str) -> tuple[str, int]:
    """An agent's group, and where it stands in it."""
    group = agent.rpartition("_")[0]
    return group, [other for other in agents if other.rpartition("_")[0] == group].index(agent)


def assert_observed(data: Any, i: int, observation: Any, leave_out: str = "") -> None:
    named = observation if isinstance(observation, dict) else {"observation": observation}
    for name, value in named.items():
        assert name == leave_out or np.array_equal(data[name][i].numpy(), value), name


def plain_parallel(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """Compares agent by agent, in every step."""
    env = make()
    agents = list(env.possible_agents)
    observations, _ = env.reset(seed=SEED)
    for step in batch.unbind(0):
        for agent in agents:
            group, i = place(batch, agents, agent)
            assert bool(step[group, "mask"][i]) == (agent in env.agents)
            if agent in env.agents:
                assert_observed(step[group], i, observations[agent])
        actions = {}
        for agent in env.agents:
            group, i = place(batch, agents, agent)
            actions[agent] = decoded(step[group, "action"][i], env.action_space(agent))
        observations, rewards, terminated, truncated, _ = env.step(actions)
        for agent in actions:
            group, i = place(batch, agents, agent)
            after = step["next", group]
            assert_observed(after, i, observations[agent])
            assert after["reward"][i] == np.float32(rewards[agent])
            assert bool(after["terminated"][i]) == terminated[agent]
            assert bool(after["truncated"][i]) == truncated[agent]
        assert bool(step["next", "done"]) == (not env.agents)
        if not env.agents:
            observations, _ = env.reset()


def plain_turns(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """PettingZoo's own loop over turns, ``last()`` and all; its reward is what an agent got since its last turn."""
    env = make()
    env.reset(seed=SEED)
    agents, steps, t = list(env.possible_agents), batch.unbind(0), 0
    groups = {place(batch, agents, agent)[0] for agent in agents}
    while True:
        since_last_turn = dict.fromkeys(agents, 0.0)
        for agent in env.agent_iter():
            observation, reward, terminated, truncated, _ = env.last()
            group, i = place(batch, agents, agent)
            assert since_last_turn[agent] == pytest.approx(reward, abs=1e-5)
            since_last_turn[agent] = 0.0
            if terminated or truncated:
                after = steps[t - 1]["next", group]
                # What it might do depends on when it is asked: it does nothing any more.
                assert_observed(after, i, observation, leave_out="action_mask")
                assert (bool(after["terminated"][i]), bool(after["truncated"][i])) == (terminated, truncated)
                env.step(None)
                continue
            if t == len(steps):
                return
            step = steps[t]
            acting = {(g, j) for g in groups for j in step[g, "mask"].nonzero().flatten().tolist()}
            assert acting == {(group, i)}
            assert_observed(step[group], i, observation)
            env.step(decoded(step[group, "action"][i], env.action_space(agent)))
            for other in agents:
                its_group, j = place(batch, agents, other)
                since_last_turn[other] += float(step["next", its_group, "reward"][j])
            t += 1
        assert bool(steps[t - 1]["next", "done"])
        env.reset()


# -- cases -----------------------------------------------------------------------------------------------------------


def gym_case(env_id: str, num_steps: int = 60, **kwargs: Any) -> Case:
    make = partial(examples.gym_env, env_id, **kwargs)
    return Case(make, partial(plain_gym, partial(gymnasium.make, env_id, **kwargs)), num_steps)


def pool_case(task: str, num_envs: int, num_steps: int = 60, batch_size: int | None = None, **kwargs: Any) -> Case:
    parts = {} if batch_size is None else {"batch_size": batch_size}

    def make_plain(seeds: list[int]) -> tuple[Any, dict[str, Any]]:
        return examples.pool(task, num_envs=num_envs, seed=seeds, **kwargs), {}

    make = partial(examples.pool, task, num_envs=num_envs, **parts, **kwargs)
    return Case(make, partial(plain_pool, make_plain), num_steps)


def atari_vector_case(**kwargs: Any) -> Case:
    def make_plain(seeds: list[int]) -> tuple[Any, dict[str, Any]]:
        return examples.atari_vector(), {"seed": np.array(seeds)}

    return Case(partial(examples.atari_vector, **kwargs), partial(plain_pool, make_plain), num_steps=100)


def dm_case(domain: str, task: str, **kwargs: Any) -> Case:
    make = partial(examples.dm_suite, domain, task, **kwargs)
    return Case(make, partial(plain_dm, make))


def particles_case(task: str, parallel: bool, num_steps: int = 60, **kwargs: Any) -> Case:
    make = partial(examples.particles, task, parallel, max_cycles=10, **kwargs)
    return Case(make, partial(plain_parallel if parallel else plain_turns, make), num_steps)


def zoo_case(kind: str, task: str, num_steps: int, is_seedable: bool = True, **kwargs: Any) -> Case:
    make = partial(examples.zoo, kind, task, **kwargs)
    return Case(make, partial(plain_parallel if kind == "parallel" else plain_turns, make), num_steps, is_seedable)


KNIGHTS = "butterfly/knights_archers_zombies_v11"
#: (marker, packages, case)
CASES: dict[str, tuple[str, str, Case]] = {
    "envpool sync": ("envpool", "envpool", pool_case("CartPole-v1", 4)),
    "envpool async": ("envpool", "envpool", pool_case("CartPole-v1", 6, batch_size=2)),
    "envpool pixels": ("envpool", "envpool", pool_case("Pong-v5", 2, 40, max_episode_steps=15)),
    "envpool floats": ("envpool", "envpool", pool_case("Pendulum-v1", 3, max_episode_steps=15)),
    "atari id": ("atari", "ale_py", gym_case("ALE/Pong-v5", 40, max_episode_steps=12)),
    "atari old id": ("atari", "ale_py", gym_case("BreakoutNoFrameskip-v4", 40, max_episode_steps=12)),
    "atari vector": ("atari", "ale_py", atari_vector_case()),
    "atari vector same step": (
        "atari",
        "ale_py",
        atari_vector_case(autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP),
    ),
    "mujoco Hopper": ("mujoco", "mujoco", gym_case("Hopper-v5")),
    "mujoco HalfCheetah": ("mujoco", "mujoco", gym_case("HalfCheetah-v5", max_episode_steps=20)),
    "dm_control": ("dm_control", "dm_control", dm_case("cartpole", "balance", time_limit=0.2)),
    "dm_control scalars": ("dm_control", "dm_control", dm_case("walker", "walk", time_limit=0.5)),
    "shimmy id": ("dm_control", "shimmy", gym_case("dm_control/cartpole-balance-v0", max_episode_steps=20)),
    "pettingzoo parallel": ("pettingzoo", "mpe2", particles_case("simple_adversary_v3", True)),
    "pettingzoo floats": ("pettingzoo", "mpe2", particles_case("simple_spread_v3", True, continuous_actions=True)),
    "pettingzoo knights": ("pettingzoo", "pettingzoo pymunk", zoo_case("parallel", KNIGHTS, 300, max_cycles=100)),
    "pettingzoo turns": ("pettingzoo", "mpe2", particles_case("simple_adversary_v3", False, 100)),
    "pettingzoo knights in turns": (
        "pettingzoo",
        "pettingzoo pymunk",
        # Its resets leave something of the last episode behind, also in a plain loop.
        zoo_case("aec", KNIGHTS, 300, max_cycles=40, is_seedable=False),
    ),
    "pettingzoo tictactoe": ("pettingzoo", "pettingzoo pygame", zoo_case("aec", "classic/tictactoe_v3", 60)),
    "pettingzoo connect four": ("pettingzoo", "pettingzoo pygame", zoo_case("aec", "classic/connect_four_v3", 100)),
}


#: One of each wrapper, for tests that start processes.
OF_EACH_KIND = [
    "envpool sync",
    "envpool async",
    "atari id",
    "atari vector",
    "mujoco Hopper",
    "dm_control",
    "shimmy id",
    "pettingzoo parallel",
    "pettingzoo tictactoe",
]


def params(names: Iterable[str]) -> list[Any]:
    """Cases by name; those whose package is missing are skipped before anything is set up for them."""
    found = []
    for name in names:
        marker, packages, case = CASES[name]
        missing = [package for package in packages.split() if importlib.util.find_spec(package) is None]
        skip = pytest.mark.skipif(bool(missing), reason=f"{missing} not installed; `make test-envs` has it")
        found.append(pytest.param(case, id=name, marks=[getattr(pytest.mark, marker), skip]))
    return found


@pytest.fixture(params=params(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


# -- the contract ----------------------------------------------------------------------------------------------------


def test_specs_and_seeds(case: Case) -> None:
    env = make_env(case.make)
    if case.is_seedable:
        check_env(env, num_steps=case.num_steps)
    else:
        with pytest.raises(AssertionError, match="the same seed gives other data"):
            check_env(env, num_steps=case.num_steps)
    env.close()


def test_as_a_plain_loop_has_it(case: Case) -> None:
    env = make_env(case.make)
    collector = Collector(env, frames_per_batch=case.num_steps * env.batch_size.numel())
    collector.set_seed(SEED)
    batch = collector.rollout()
    assert bool(batch["next", "done"].any()), "no episode ended, so nothing is shown about ends"
    for key, expected in (case.plain(batch) or {}).items():
        found: Any = batch[key].numpy()
        assert found.dtype == expected.dtype, key
        assert np.array_equal(found, expected), key
    collector.shutdown()


def assert_episodes_are_whole(data: TensorDictBase, observation_keys: Any) -> None:
    """Along each trajectory, what came next is what the next step starts from, up to its end."""
    for episode in data["collector", "traj_ids"].unique().tolist():
        steps: Any = data[data["collector", "traj_ids"] == episode]
        over = steps["next", "done"].squeeze(-1)
        assert not bool(over[:-1].any())
        for key in observation_keys:
            assert torch.equal(steps["next"].get(key)[:-1].nan_to_num(), steps.get(key)[1:].nan_to_num()), key


@pytest.mark.parametrize("case", params(OF_EACH_KIND), indirect=True)
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector])
def test_in_two_workers(case: Case, kind: type) -> None:
    with make_env(case.make) as env:
        rows, keys = env.batch_size.numel(), env.observation_keys
    total = 4 * rows * 20 + 2 * rows
    policy: dict[str, Any] = {"policy": RandomPolicy()} if kind is AsyncBatchedCollector else {}
    collector = kind([case.make] * 2, **policy, frames_per_batch=2 * rows * 20, total_frames=total, num_workers=2)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    assert sum(batch.numel() for batch in batches) == total
    frames: Any = torch.cat([batch.reshape(-1) for batch in batches])
    assert_episodes_are_whole(frames, keys)


@pytest.mark.parametrize("case", params(OF_EACH_KIND), indirect=True)
@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_several_as_one(case: Case, batched: Any) -> None:
    env = batched(2, case.make)
    (batch,) = Collector(env, frames_per_batch=env.batch_size.numel() * 10, total_frames=env.batch_size.numel() * 10)
    assert batch.shape == (*env.batch_size, 10)
    assert_episodes_are_whole(batch.reshape(-1), env.observation_keys)


def test_close_ends_threads(case: Case) -> None:
    make_env(case.make).close()  # what a package starts once in a process is not the env's
    before = len(os.listdir("/proc/self/task"))
    env = make_env(case.make)
    env.rollout(3)
    env.close()
    with pytest.raises(EnvClosed):
        env.reset()
    assert wait_until(lambda: len(os.listdir("/proc/self/task")) <= before), "threads are left"


def test_episodes_can_be_cut(case: Case) -> None:
    env = make_env(case.make)
    rows = env.batch_size.numel()
    if not env.resets_single_envs:
        pytest.skip("it resets by itself in the step that ends an episode")
    (batch,) = Collector(env, frames_per_batch=rows * 12, total_frames=rows * 12, max_frames_per_traj=4)
    assert_episodes_are_whole(batch.reshape(-1), env.observation_keys)
    for episode in batch["collector", "traj_ids"].unique().tolist():
        assert int((batch["collector", "traj_ids"] == episode).sum()) <= 4


# -- EnvPool ---------------------------------------------------------------------------------------------------------


def collected(env: Any, num_steps: int = 50, **kwargs: Any) -> TensorDictBase:
    frames = num_steps * env.batch_size.numel()
    collector = Collector(env, frames_per_batch=frames, total_frames=frames, **kwargs)
    collector.set_seed(SEED)
    (batch,) = collector
    return batch


@pytest.mark.envpool
def test_a_pool_in_parts_is_the_same_pool() -> None:
    pytest.importorskip("envpool")
    rollouts = []
    for batch_size in (4, 2):
        torch.manual_seed(0)
        pool = examples.pool("CartPole-v1", num_envs=4, batch_size=batch_size, seed=5)
        rollouts.append(make_env(pool).rollout(30, break_when_any_done=False))
    whole, parts = rollouts
    assert bool(whole["next", "done"].any())
    assert torch.equal(whole["next", "observation"], parts["next", "observation"])


@pytest.mark.envpool
def test_pools_by_id() -> None:
    pytest.importorskip("envpool")
    check_env(EnvPoolEnv("FrozenLake-v1", num_envs=3))  # its observation is an integer
    one, other = (EnvPoolEnv("CartPole-v1", num_envs=2) for _ in range(2))
    assert not torch.equal(one.reset()["observation"], other.reset()["observation"]), "both have the same seed"
    seeded = [EnvPoolEnv("CartPole-v1", True, num_envs=2, seed=1).reset()["observation"] for _ in range(2)]
    assert torch.equal(*seeded)
    with pytest.raises(ValueError, match=r"no task 'CartPol-v1'; did you mean 'CartPole-v1'"):
        EnvPoolEnv("CartPol-v1")


@pytest.mark.envpool
def test_pools_are_recognised() -> None:
    envpool = pytest.importorskip("envpool")
    assert type(GymWrapper(examples.pool("CartPole-v1", num_envs=2))) is EnvPoolWrapper
    (batch,) = Collector(lambda: envpool.make_gymnasium("Pong-v5", num_envs=8), frames_per_batch=16, total_frames=16)
    assert batch["observation"].shape == (8, 2, 4, 84, 84)
    with pytest.raises(TypeError, match='env_type="gymnasium"'):
        make_env(envpool.make("CartPole-v1", env_type="dm", num_envs=2))


# -- ale-py and Gymnasium ids ----------------------------------------------------------------------------------------


@pytest.mark.atari
def test_atari_ids() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(gymnasium.error.NameNotFound, match="did you mean 'ALE/Pong-v5'"):
        GymEnv("ALE/Pon-v5")


@pytest.mark.atari
def test_atari_in_parts_is_refused() -> None:
    ale_py = pytest.importorskip("ale_py")
    with pytest.raises(EnvError, match="make it without batch_size"):
        make_env(ale_py.AtariVectorEnv("pong", 4, batch_size=2))


@pytest.mark.atari
def test_two_modes_of_atari_side_by_side() -> None:
    """ale-py writes the mode into a dictionary that all vector envs share."""
    pytest.importorskip("ale_py")
    modes = gymnasium.vector.AutoresetMode
    made = [examples.atari_vector(autoreset_mode=mode) for mode in (modes.SAME_STEP, modes.NEXT_STEP)]
    assert [make_env(env).autoreset_mode for env in made] == [modes.SAME_STEP, modes.DISABLED]


@pytest.mark.dm_control
def test_shimmy_ids() -> None:
    pytest.importorskip("shimmy")
    with pytest.raises(gymnasium.error.NameNotFound, match="did you mean 'dm_control/cartpole-balance-v0'"):
        GymEnv("dm_control/cartpole-balnce-v0")


@pytest.mark.mujoco
def test_mujoco_ids() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match="did you mean 'HalfCheetah-v5'"):
        GymEnv("HalfCheeta-v5")


@pytest.mark.parametrize(
    ("package", "make", "error", "extra"),
    [
        ("ale_py", lambda: GymEnv("ALE/Pong-v5"), gymnasium.error.DependencyNotInstalled, "atari"),
        (
            "dm_control",
            lambda: GymEnv("dm_control/cartpole-balance-v0"),
            gymnasium.error.DependencyNotInstalled,
            "dm-control",
        ),
        ("dm_control", lambda: DMControlEnv("cartpole", "balance"), ModuleNotFoundError, "dm-control"),
        ("envpool", lambda: EnvPoolEnv("CartPole-v1"), ModuleNotFoundError, "envpool"),
        ("pettingzoo", lambda: PettingZooEnv("butterfly/pistonball_v6"), ModuleNotFoundError, "pettingzoo"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, make: Callable[[], Any], error: type[Exception], extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{package}.suite", raising=False)
    with pytest.raises(error, match=re.escape(f"needs the package {package!r}")) as caught:
        make()
    assert f'pip install "swath[{extra}]"' in str(caught.value)


def test_mujoco_that_is_missing_is_named() -> None:
    if importlib.util.find_spec("mujoco") is not None:
        pytest.skip("mujoco is installed")
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match=re.escape('pip install "swath[mujoco]"')):
        GymEnv("HalfCheetah-v5")


def test_no_package_is_imported_unasked() -> None:
    code = "import sys, swath.envs; print([name for name in sys.argv[1:] if name in sys.modules])"
    packages = ["envpool", "ale_py", "mujoco", "dm_env", "dm_control", "shimmy", "pettingzoo", "mpe2"]
    told = subprocess.run([sys.executable, "-c", code, *packages], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


# -- dm_control ------------------------------------------------------------------------------------------------------


@pytest.mark.dm_control
def test_dm_env_ends_dtypes_and_nested_keys() -> None:
    pytest.importorskip("dm_env")
    raw = examples.countdown()
    (batch,) = Collector(raw, frames_per_batch=16, total_frames=16)  # episodes of 3 and 5 steps, twice
    ends = [2, 7, 10, 15]
    assert batch["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist() == ends
    assert batch["next", "terminated"].squeeze(-1).nonzero().squeeze(-1).tolist() == [2, 10]
    assert batch["next", "truncated"].squeeze(-1).nonzero().squeeze(-1).tolist() == [7, 15]
    assert batch["next", "arm", "angle"].tolist() == [1, 2, 3, 1, 2, 3, 4, 5] * 2
    assert batch["arm", "angle"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4] * 2
    dtypes = {("arm", "angle"): torch.float32, ("arm", "speed"): torch.float64, "count": torch.int32}
    assert {key: batch[key].dtype for key in dtypes} == dtypes
    assert batch["next", "reward"].dtype == torch.float32
    assert batch["action", "choice"].shape == (16, 3)
    received = raw.actions[:16]
    assert [int(action["choice"]) for action in received] == batch["action", "choice"].argmax(-1).tolist()
    assert np.array_equal([action["force"] for action in received], batch["action", "force"].numpy())
    with pytest.raises(EnvError, match="no generator that could be seeded"):
        DMControlWrapper(raw).set_seed(1)


@pytest.mark.dm_control
def test_dm_suite_by_name() -> None:
    pytest.importorskip("dm_control")
    env = DMControlEnv("cartpole", "balance", task_kwargs={"random": 1})
    assert env.reset()["position"].dtype == torch.float64
    with pytest.raises(TypeError, match="without arguments"):
        env.reset(options={})
    env.close()
    with pytest.raises(ValueError, match="did you mean 'cartpole, balance'"):
        DMControlEnv("cartpol", "balance")


@pytest.mark.dm_control
def test_dm_composer_is_seeded() -> None:
    pytest.importorskip("dm_control")
    from dm_control import manipulation

    env = make_env(lambda: manipulation.load("reach_site_features"))
    first = []
    for seed in (1, 1, 2):
        env.set_seed(seed)
        first.append(env.reset()["target_position"])
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    env.close()


# -- PettingZoo ------------------------------------------------------------------------------------------------------


@pytest.mark.pettingzoo
def test_agents_that_leave() -> None:
    pytest.importorskip("pettingzoo")
    raw = examples.leaving()
    batch = collected(make_env(raw), num_steps=8)  # two episodes of four steps
    scout: Any = batch["scout"]
    assert scout["mask"][:4].tolist() == [[True] * 3, [True] * 3, [False, True, True], [False, True, True]]
    assert batch["next", "scout", "mask"][3].tolist() == [False] * 3
    # Its last observation is there; afterwards it has nothing.
    assert batch["next", "scout", "position"][:4, 0].tolist() == [[1, 1], [2, 1], [0, 0], [0, 0]]
    assert batch["next", "scout", "position"][3, 1].tolist() == [4, 2]
    assert batch["next", "scout", "reward"][:4, :, 0].tolist() == [[1, 1, 1], [2, 2, 2], [0, 3, 3], [0, 4, 4]]
    assert batch["next", "scout", "terminated"][:4, :, 0].tolist() == [
        [False, False, False],
        [True, False, False],
        [True, False, False],
        [True, True, False],
    ]
    assert batch["next", "scout", "truncated"][:4, 2, 0].tolist() == [False, False, False, True]
    assert torch.equal(scout["done"][1:4], batch["next", "scout", "done"][:3])
    assert not bool(scout["done"][4].any()), "a new episode starts with all of them"
    assert batch["next", "done"].squeeze(-1).tolist() == [False, False, False, True] * 2
    assert [sorted(actions) for actions in raw.received[-4:]] == [
        ["scout_0", "scout_1", "scout_2"],
        ["scout_0", "scout_1", "scout_2"],
        ["scout_1", "scout_2"],
        ["scout_1", "scout_2"],
    ]


@pytest.mark.pettingzoo
@pytest.mark.parametrize(
    ("ends", "terminated", "truncated"),
    [
        (("terminated", "terminated"), True, False),
        (("truncated", "truncated"), False, True),
        (("terminated", "truncated"), False, True),
    ],
)
def test_the_end_of_all_agents(ends: tuple[str, str], terminated: bool, truncated: bool) -> None:
    pytest.importorskip("pettingzoo")
    steps: Any = PettingZooWrapper(examples.leaving(lives=(1, 3), ends=ends)).rollout(10)
    last = steps[-1]["next"]
    assert (bool(last["terminated"]), bool(last["truncated"])) == (terminated, truncated)


@pytest.mark.pettingzoo
def test_groups() -> None:
    pytest.importorskip("pettingzoo")
    by_agent = {f"scout_{i}": [f"scout_{i}"] for i in range(3)}
    env = PettingZooWrapper(examples.leaving(), True, group_map=by_agent)
    check_env(env)
    assert env.rollout(2)["scout_1", "action"].shape == (2, 1)
    assert env.action_keys == [(name, "action") for name in by_agent]
    with pytest.raises(ValueError, match="each agent once"):
        PettingZooWrapper(examples.leaving(), group_map={"all": ["scout_0"]})
    with pytest.raises(ValueError, match="name of something else"):
        PettingZooWrapper(examples.leaving(), group_map={"action": ["scout_0", "scout_1", "scout_2"]})
    pytest.importorskip("mpe2")
    everyone = ["adversary_0", "agent_0", "agent_1"]
    with pytest.raises(EnvError, match=r"observation_spaces differ: .* put them into different groups"):
        PettingZooEnv("mpe/simple_adversary_v3", group_map={"all": everyone})


@pytest.mark.pettingzoo
def test_action_masks() -> None:
    pytest.importorskip("pettingzoo")
    steps = PettingZooWrapper(examples.leaving(lives=(40, 40, 40))).rollout(40)
    assert steps["scout", "action_mask"].dtype == torch.bool
    assert not bool(steps["scout", "action"][..., 1].any()), "the second action is never allowed"
    assert steps["scout", "item"].shape == (40, 3, 4)


@pytest.mark.pettingzoo
def test_pettingzoo_by_id() -> None:
    pytest.importorskip("pettingzoo")
    for package, task, said in [
        ("mpe2", "mpe/simple_sprad_v3", "did you mean 'mpe/simple_spread_v3'"),
        ("pettingzoo", "butterfly/pistonbal_v6", "did you mean 'butterfly/pistonball_v6'"),
        ("pettingzoo", "classic/tictactoe_v3", "has no parallel form; give parallel=False"),
    ]:
        pytest.importorskip(package)
        with pytest.raises(ValueError, match=said):
            PettingZooEnv(task)
    with PettingZooEnv("mpe/simple_spread_v3", N=2) as env:
        assert env.group_map == {"agent": ["agent_0", "agent_1"]}
        check_env(env)


# -- the docs --------------------------------------------------------------------------------------------------------

BLOCK = re.compile(r"^```python (\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall((Path(__file__).parent.parent / "docs" / "envs.md").read_text())


@pytest.mark.parametrize(
    ("package", "code"), [pytest.param(*block, id=f"{block[0]}-{i}") for i, block in enumerate(BLOCKS)]
)
def test_blocks_run(package: str, code: str) -> None:
    """Those that need a package say so: ```python envpool."""
    pytest.importorskip(package)
    exec(code, {"__name__": "__main__"})
