"""What newcomers get wrong in their first hour is answered with who, what, where and the next step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import swath
from swath import (
    AsyncBatchedCollector,
    Collector,
    GymEnv,
    GymWrapper,
    InferenceServer,
    MultiCollector,
    RandomPolicy,
    ReplayBuffer,
    SerialEnv,
    TransformedEnv,
)
from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.collectors.config import BatchedConfig, CollectorConfig, SingleConfig
from swath.data import LazyTensorStorage, TensorDictReplayBuffer, sources
from swath.envs import ParallelEnv, StepCounter
from swath.errors import EnvDataError, PolicyOutputError
from warned import warned_here

FRAMES: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 8}
RETURNS: Any = ["action", "logprob", "entropy", "value"]


def make_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Agent(nn.Module):
    """As CleanRL has it: no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def get_action_and_value(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs = torch.distributions.Categorical(logits=self.actor(x))
        action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Model:
    """As Stable-Baselines3 has it."""

    def predict(self, observation: Any, state: Any = None) -> Any:
        return np.zeros(observation.shape[:-1], np.int64), None


# -- policies --------------------------------------------------------------------------------------------------------


def test_an_agent_without_forward_is_told_to_name_its_method() -> None:
    with pytest.raises(TypeError, match=r"the policy Agent has no forward\(\).*policy\.get_action_and_value, in_keys="):
        Collector(make_cartpole(), Agent(), **FRAMES)
    policy = TensorDictModule(Agent().get_action_and_value, in_keys=["observation"], out_keys=RETURNS)
    (batch,) = Collector(make_cartpole(), policy, **FRAMES)  # which is what it says
    assert batch["value"].shape == (8, 1)


def test_a_model_with_predict_is_told_to_give_the_method() -> None:
    with pytest.raises(TypeError, match=r"must be callable, got Model; give its method, Model\.predict"):
        Collector(make_cartpole(), Model(), **FRAMES)  # type: ignore[arg-type]
    (batch,) = Collector(make_cartpole(), Model().predict, **FRAMES)
    assert not batch["action"].any()


def test_a_class_is_no_policy_and_a_policy_no_factory() -> None:
    with pytest.raises(TypeError, match=r"the policy is the class Agent: give an object of it, or policy_factory="):
        Collector(make_cartpole(), Agent, **FRAMES)
    with pytest.raises(TypeError, match=r"must be a function that makes a policy; Linear is one already: policy="):
        Collector(make_cartpole(), policy_factory=nn.Linear(4, 2), **FRAMES)


def test_env_and_policy_in_the_wrong_order() -> None:
    with pytest.raises(TypeError, match=r"Linear, a module; the env, or what makes it, comes first, the policy second"):
        Collector(nn.Linear(4, 2), make_cartpole, **FRAMES)


def test_integer_actions_for_a_one_hot_env_are_told_both_ways_to_an_env() -> None:
    """Of ``SyncVectorEnv``, too, which has no such argument itself."""
    with contextlib.closing(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)) as envs:
        policy = TensorDictModule(Agent().get_action_and_value, in_keys=["observation"], out_keys=RETURNS)
        with pytest.raises(
            PolicyOutputError, match=r"=True \(an argument of GymEnv, and of GymWrapper, which takes any"
        ):
            Collector(envs, policy, **FRAMES)
        (batch,) = Collector(GymWrapper(envs, categorical_action_encoding=True), policy, **FRAMES)
        assert batch["action"].shape == (2, 4)


# -- envs ------------------------------------------------------------------------------------------------------------


class OldReset(gym.Env[Any, Any]):
    """From before gym 0.26."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32)


def test_a_reset_that_returns_an_observation_only_says_so() -> None:
    said = r"env 0 \(OldReset\), reset: reset\(\) must return \(observation, info\), it returned ndarray"
    with pytest.raises(EnvDataError, match=said):
        next(iter(Collector(OldReset(), None, **FRAMES)))


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_an_env_that_is_made_is_no_function(kind: Any) -> None:
    for made in (make_cartpole(), gym.make("CartPole-v1")):
        with pytest.raises(
            TypeError, match=rf"{kind.__name__} makes its envs, .* \w+\.\w+.*give a function that makes"
        ):
            kind(2, made)


def test_one_env_twice_is_refused() -> None:
    """It was stepped twice in each step, and the frames of both were nonsense."""
    env, gym_env = make_cartpole(), gym.make("CartPole-v1")
    around = lambda: TransformedEnv(env, StepCounter())  # noqa: E731
    for twice in (lambda: env, [env, env], lambda: gym_env, [gym_env, gym_env], around):
        with pytest.raises(ValueError, match=r"SerialEnv\(2\): some of these envs are one and the same"):
            SerialEnv(2, twice)
    SerialEnv(2, [env, make_cartpole()])


@pytest.mark.processes
@pytest.mark.parametrize("made", ["swath", "gymnasium"])
@pytest.mark.parametrize("kind", ["MultiCollector", "ParallelEnv", "AsyncBatchedCollector", "threads"])
def test_one_env_twice_in_a_worker_is_two(kind: str, made: str) -> None:
    """As it would be if each had a process of its own: how envs are packed must not be seen."""
    env = GymWrapper(StepsCounted()) if made == "swath" else StepsCounted()
    frames: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 12, "num_workers": 1}
    collector: Any
    if kind == "MultiCollector":
        collector = MultiCollector([lambda: env, lambda: env], None, sync=True, **frames)
    elif kind == "ParallelEnv":
        collector = Collector(ParallelEnv(2, lambda: env, num_workers=1), None, frames_per_batch=12, total_frames=12)
    else:
        backend = "threading" if kind == "threads" else "multiprocessing"
        collector = AsyncBatchedCollector([env, env], policy_factory=RandomPolicy, env_backend=backend, **frames)
    with collector:
        (batch,) = collector
    after, before = batch["next", "observation"], batch["observation"]
    assert ((after - before) == 1).all()


class StepsCounted(gym.Env[Any, Any]):
    """Whose observation is how many steps it has taken."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, False, False, {}


WARNS = """
import gymnasium as gym, numpy as np
from swath import MultiCollector

class OtherDtype(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3), {}

    def step(self, action):
        return np.zeros(3), 1.0, False, False, {}

if __name__ == "__main__":
    with MultiCollector([OtherDtype], frames_per_batch=8, total_frames=8, sync=True) as collector:
        list(collector)
"""


@pytest.mark.processes
def test_a_warning_in_a_worker_names_no_line_that_nobody_wrote(tmp_path: Path) -> None:
    """Not the command that Python starts a worker with, ``<string>:1``; nor is a file looked for."""
    (tmp_path / "warns.py").write_text(WARNS)
    ended = subprocess.run([sys.executable, "warns.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("<swath worker>:1: UserWarning: OtherDtype: observation 'observation' is float64")


def test_step_takes_no_action_alone() -> None:
    for env in (make_cartpole(), SerialEnv(2, make_cartpole)):
        env.reset()
        for action in (0, torch.zeros(2), np.zeros(2)):
            with pytest.raises(
                TypeError, match=r'step takes a TensorDict, got \w+: .*env\.step\(td\.set\("action", act'
            ):
                env.step(action)  # type: ignore[arg-type]


@pytest.mark.processes
def test_what_is_asked_of_workers_with_something_else() -> None:
    with MultiCollector([make_cartpole] * 2, None, frames_per_batch=8, sync=True) as collector:
        for seed in ("a", None):
            with pytest.raises(TypeError, match=rf"set_seed takes a whole number, got {seed!r}; without"):
                collector.set_seed(seed)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"reset_idx must have a bool for each of 2 envs, got 1"):
            collector.reset(1)  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match=r"attribute 'env': they are in the workers: get_distant_attr"):
            collector.env  # type: ignore[attr-defined]  # noqa: B018
        assert collector.get_distant_attr("env.batch_size") == [(), ()]


def test_set_seed_of_one_collector_without_a_number() -> None:
    with pytest.raises(
        TypeError, match=r"set_seed takes a whole number, got None; without set_seed every run is another"
    ):
        Collector(make_cartpole, None, **FRAMES).set_seed(None)  # type: ignore[arg-type]


# -- arguments -------------------------------------------------------------------------------------------------------


def flags_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if str(field.type).startswith("bool")]


@pytest.mark.parametrize("name", flags_of(SingleConfig))
def test_a_flag_that_is_a_string_is_refused(name: str) -> None:
    """``"False"``, from a command line or a file, is true."""
    given: dict[str, Any] = {**FRAMES, name: "False"}
    with pytest.raises(TypeError, match=rf"{name} must be True or False, got the string 'False'"):
        Collector(make_cartpole, None, **given)


def test_flags_are_found_by_their_types() -> None:
    assert {"split_trajs", "compile_policy", "trust_policy", "check_finite"} <= set(flags_of(CollectorConfig))
    assert "yield_completed_trajectories" in flags_of(BatchedConfig)


def test_sync_that_is_a_string_is_refused() -> None:
    """``sync="async"`` made a synchronous one."""
    said = r"sync must be True or False, got the string 'async'"
    given: dict[str, Any] = {**FRAMES, "sync": "async"}
    for kind in (MultiCollector, MultiSyncCollector, MultiAsyncCollector):
        with pytest.raises(TypeError, match=said):
            kind([make_cartpole], None, **given)
    with pytest.raises(TypeError, match=said):
        Collector(make_cartpole, None, num_collectors=2, backend="process", **given)


def test_arguments_by_position_that_have_names_only() -> None:
    space = gym.spaces.Box(-1, 1, (3,))
    said = r"ReplayBuffer takes nothing by position; .*: storage=LazyTensorStorage\(size\), batch_size=256"
    with pytest.raises(TypeError, match=said):  # as of Stable-Baselines3, and so of CleanRL
        ReplayBuffer(10_000, space, space, "cpu", handle_timeout_termination=False)  # type: ignore[misc, call-arg]
    said = r"Collector takes only create_env_fn and policy by position; .*: policy_factory=, frames_per_batch=, "
    with pytest.raises(TypeError, match=said):
        Collector(make_cartpole, None, 8, 16)  # type: ignore[misc]


def test_what_a_server_takes_is_shown() -> None:
    class Mine(InferenceServer):
        def __init__(self, colour: str) -> None:
            super().__init__(nn.Identity())

    assert inspect.signature(InferenceServer) == signature_of(InferenceServer)
    assert "max_batch_size" in inspect.signature(InferenceServer).parameters
    assert inspect.signature(Mine) == signature_of(Mine)


def signature_of(kind: type) -> inspect.Signature:
    """Of the constructor, without ``self`` and what it returns."""
    signature = inspect.signature(vars(kind)["__init__"])
    return signature.replace(parameters=list(signature.parameters.values())[1:])


# -- buffers and datasets --------------------------------------------------------------------------------------------


def test_who_waits_for_frames_that_nobody_collects_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PATIENCE_S", 0.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    said = r"no collector was started to fill this buffer: give it to one as replay_buffer=, and call that one's start"
    with warned_here(UserWarning, match=said), pytest.raises(TimeoutError):
        buffer.sample(wait=True, timeout=0.05)
    with pytest.raises(TimeoutError):  # once is enough
        buffer.sample(wait=True, timeout=0.05)


def test_who_waits_for_a_collector_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PATIENCE_S", 0.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    with Collector(make_cartpole, None, frames_per_batch=4, replay_buffer=buffer) as collector:
        collector.start()
        assert buffer.sample(wait=True, timeout=30).numel() == 4


def test_a_batch_size_that_is_none() -> None:
    for size in (0, 2.5, "64"):
        with pytest.raises(ValueError, match=rf"batch_size must be a whole number, at least 1; got {size!r}"):
            ReplayBuffer(batch_size=size)  # type: ignore[arg-type]
    assert ReplayBuffer(batch_size=np.int64(4)).batch_size == 4  # type: ignore[arg-type]


def test_a_number_is_no_storage() -> None:
    with pytest.raises(TypeError, match=r"expected a Storage of swath\.data, .*; got int: LazyTensorStorage\(100\)"):
        ReplayBuffer(storage=100)  # type: ignore[arg-type]


def test_set_at_of_another_number_of_frames_says_how_many() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TensorDict(a=torch.zeros(5), batch_size=[5]))
    with pytest.raises(ValueError, match=r"'a' has shape \(3,\); its first dimension must be the number of frames, 2"):
        buffer.set_at_("a", torch.zeros(3), torch.tensor([0, 1]))


def test_what_is_guessed_of_a_dataset_is_explained(tmp_path: Any) -> None:
    from swath.cli.main import main

    assert main(["collect", "CartPole-v1", "--frames", "9", "--out", str(tmp_path / "data")]) == 0
    data = swath.load(tmp_path / "data")
    for guess in ("observations", "rewards"):
        with pytest.raises(AttributeError, match=re.escape(f'attribute {guess!r}: frames["observation"], frames["act')):
            getattr(data, guess)
    assert data.frames["next", "reward"].shape == (9, 1)


@pytest.mark.processes
def test_an_env_that_only_the_program_registers_says_how_workers_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("OnlyHere-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    GymEnv("OnlyHere-v0").close()
    with pytest.raises(gym.error.NameNotFound, match="'module:OnlyHere-v0' imports that wherever the env is made"):
        MultiSyncCollector(["OnlyHere-v0"] * 2, **FRAMES)
    with pytest.raises(gym.error.NameNotFound, match="there is no env 'CartPol-v1'; did you mean 'CartPole-v1'"):
        GymEnv("CartPol-v1")
