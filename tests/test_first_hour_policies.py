"""Policies and envs that people bring in their first hour, in every collector."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from swath.envs import Composite, GymEnv, GymWrapper, SerialEnv, Unbounded
from swath.errors import EnvDataError, PolicyOutputError

KINDS = [
    "one env",
    "several envs",
    *[pytest.param(kind, marks=pytest.mark.processes) for kind in ("MultiSync", "AsyncBatched")],
]
FRAMES = 24


def pendulum(**kwargs: Any) -> GymEnv:
    return GymEnv("Pendulum-v1", **kwargs)


def collected(kind: str, make: Callable[[], Any], policy: Any, batches: int = 3, **kwargs: Any) -> list[Any]:
    """Batches of one of the collectors, as copies."""
    asked: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": batches * FRAMES, **kwargs}
    if kind == "one env":
        collector: Any = Collector(make, policy, **asked)
    elif kind == "several envs":
        collector = Collector(SerialEnv(3, make), policy, **asked)
    elif kind == "MultiSync":
        collector = MultiSyncCollector([make, make], policy, **asked)
    else:
        collector = AsyncBatchedCollector([make, make], policy, **asked)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


# -- 1: an action without the trailing 1 -------------------------------------------------------------------------------


def ones_of_the_batch(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.ones(td.shape))


def sine(observation: torch.Tensor) -> torch.Tensor:
    return observation[..., 1] * 2


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "called"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_action_without_the_trailing_1(kind: str, capture: bool) -> None:
    for batch in collected(kind, pendulum, ones_of_the_batch, capture_policy=capture):
        assert batch["action"].shape == (*batch.shape, 1)
        assert bool((batch["action"] == 1).all())


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "called"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_action_without_the_trailing_1_is_each_env_s_own(kind: str, capture: bool) -> None:
    for batch in collected(kind, pendulum, sine, capture_policy=capture):
        assert torch.equal(batch["action"].squeeze(-1), batch["observation"][..., 1] * 2)
        # ... and is what the env was given.
        angle = torch.atan2(batch["observation"][..., 1], batch["observation"][..., 0])
        cost = angle**2 + 0.1 * batch["observation"][..., 2] ** 2 + 0.001 * batch["action"].squeeze(-1) ** 2
        torch.testing.assert_close(batch["next", "reward"].squeeze(-1), -cost, rtol=1e-4, atol=1e-4)


def test_an_action_without_the_trailing_1_in_a_rollout_and_after_random_frames() -> None:
    rollout = SerialEnv(3, pendulum).rollout(5, ones_of_the_batch)
    assert rollout["action"].shape == (3, 5)  # as it was written
    (batch,) = collected("several envs", pendulum, ones_of_the_batch, batches=1, init_random_frames=9)
    is_one = (batch["action"] == 1).reshape(-1)
    assert int(is_one.sum()) == FRAMES - 9


def test_an_action_of_another_shape_is_refused_still() -> None:
    for wrong in (lambda observation: observation[..., :2], lambda observation: observation[..., :1, None]):
        with pytest.raises(PolicyOutputError, match="shape"):
            Collector(pendulum, wrong, frames_per_batch=FRAMES, total_frames=FRAMES)
    with pytest.raises(PolicyOutputError, match="categorical_action_encoding"):
        Collector("CartPole-v1", lambda observation: observation[..., 0].long(), frames_per_batch=FRAMES)


@pytest.mark.torchrl
@pytest.mark.filterwarnings("ignore")  # what TorchRL's collector says of itself
@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_action_without_the_trailing_1_is_taken_as_in_torchrl(num_envs: int) -> None:
    pytest.importorskip("torchrl")
    import torchrl.collectors
    import torchrl.envs
    from torchrl.testing.mocking_classes import CountingEnv

    def make() -> Any:
        return CountingEnv() if num_envs == 1 else torchrl.envs.SerialEnv(num_envs, CountingEnv)

    theirs = torchrl.collectors.Collector(make(), ones_of_the_batch, frames_per_batch=FRAMES, total_frames=FRAMES)
    (expected,) = [batch.clone() for batch in theirs]
    theirs.shutdown()
    (batch,) = Collector(make, ones_of_the_batch, frames_per_batch=FRAMES, total_frames=FRAMES)
    assert torch.equal(batch["action"].squeeze(-1), expected["action"])
    for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done")):
        assert torch.equal(batch[key], expected[key])


# -- 2: the device of the TensorDict that a policy gets ----------------------------------------------------------------


def says_its_device(td: TensorDictBase) -> TensorDictBase:
    place = torch.full((*td.shape, 1), 0.0 if td.device is None else 1.0)
    return td.set("action", place)


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "called"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [{}, {"device": "cpu"}, {"policy_device": "cpu"}, {"env_device": "cpu"}])
def test_the_tensordict_of_a_policy_has_its_device_where_it_was_said(kind: str, said: Any, capture: bool) -> None:
    expected = float("device" in said or "policy_device" in said)
    for batch in collected(kind, pendulum, says_its_device, capture_policy=capture, **said):
        assert bool((batch["action"] == expected).all())


@pytest.mark.torchrl
@pytest.mark.parametrize("said", [{}, {"device": "cpu"}, {"policy_device": "cpu"}, {"env_device": "cpu"}])
@pytest.mark.filterwarnings("ignore")  # what TorchRL's collector says of itself
def test_the_device_of_a_policy_s_tensordict_is_torchrl_s(said: Any) -> None:
    pytest.importorskip("torchrl")
    import torchrl.collectors
    import torchrl.envs

    theirs = torchrl.collectors.Collector(
        torchrl.envs.GymEnv("Pendulum-v1"), says_its_device, frames_per_batch=4, total_frames=4, **said
    )
    (expected,) = [batch["action"].clone() for batch in theirs]
    theirs.shutdown()
    for make in (pendulum, lambda: torchrl.envs.GymEnv("Pendulum-v1")):
        (batch,) = Collector(make, says_its_device, frames_per_batch=4, total_frames=4, **said)
        assert torch.equal(batch["action"], expected)


# -- 9: info that is there only at an episode's end --------------------------------------------------------------------


class Short(gymnasium.Env):
    """Episodes of five steps, of rewards 1 to 5."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        info: dict[str, Any] = {"count": self.count, "nested": {"twice": 2 * self.count}}
        if self.count == 5:
            info["is_success"] = True
        return np.zeros(2, np.float32), float(self.count), self.count == 5, False, info


def recorded(info_keys: Any, **kwargs: Any) -> GymWrapper:
    env = gymnasium.wrappers.RecordEpisodeStatistics(Short(), **kwargs)
    return GymWrapper(gymnasium.wrappers.TransformReward(env, lambda reward: reward), info_keys=info_keys)


def zero(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.zeros(*td.shape, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_info_keys_episode_of_record_episode_statistics(kind: str) -> None:
    num_ends = 0
    for batch in collected(kind, partial(recorded, ["episode"]), zero):
        done = batch["next", "done"].squeeze(-1)
        num_ends += int(done.sum())
        episode = batch["next", "episode"]
        assert episode["r"].dtype is torch.float32
        assert episode["l"].dtype is torch.int64
        assert torch.equal(episode["r"], torch.where(done, 15.0, 0.0))
        assert torch.equal(episode["l"], torch.where(done, 5, 0))
        assert bool((episode["t"][~done] == 0).all())
        assert bool((batch["episode", "r"] == 0).all())  # of an episode that has just begun, and of one that goes on
    assert num_ends >= 12 - 3  # the last of each env may be under way


def test_info_keys_as_the_error_says() -> None:
    """What the message tells to write works."""
    with pytest.raises(KeyError, match=r"is_success.*info_keys=\{'is_success': Unbounded\(\(\)\)\}.*zeros"):
        recorded(["is_success"])
    with pytest.raises(KeyError, match=r"info_keys=\{'stats': Composite"):
        recorded(["stats"], stats_key="stats")
    stats = Composite(r=Unbounded(()), l=Unbounded((), torch.int64))
    specs = {"is_success": Unbounded((), torch.bool), "stats": stats}
    (batch,) = collected("one env", partial(recorded, specs, stats_key="stats"), zero, batches=1)
    done = batch["next", "done"].squeeze(-1)
    assert torch.equal(batch["next", "is_success"], done)
    assert torch.equal(batch["next", "stats", "r"], torch.where(done, 15.0, 0.0))
    assert sorted(batch["next", "stats"].keys()) == ["l", "r"]


def test_info_keys_of_each_step_nested_and_not() -> None:
    (batch,) = collected("several envs", partial(recorded, ["count", "nested"]), zero, batches=1)
    assert batch["next", "count"].tolist()[0] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert torch.equal(batch["next", "nested", "twice"], 2 * batch["next", "count"])


class Forgetful(Short):
    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return (*result, info if self.count < 3 else {})


def test_info_that_each_step_had_is_not_made_up() -> None:
    with pytest.raises(EnvDataError, match="count"):
        collected("one env", lambda: GymWrapper(Forgetful(), info_keys=["count"]), zero)


# -- 11: categorical_action_encoding and discrete observations ---------------------------------------------------------


@pytest.mark.torchrl
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1"])
def test_categorical_action_encoding_changes_discrete_observations_as_torchrl_s(name: str, categorical: bool) -> None:
    pytest.importorskip("torchrl")
    import torchrl.envs

    ours = GymEnv(name, categorical_action_encoding=categorical)
    theirs = torchrl.envs.GymEnv(name, categorical_action_encoding=categorical)
    for env in (ours, theirs):
        env.set_seed(0)
    for kind in ("observation", "action"):
        mine, other = (getattr(env, f"full_{kind}_spec")[kind] for env in (ours, theirs))
        assert (type(mine).__name__, mine.shape, mine.dtype) == (type(other).__name__, other.shape, other.dtype)
    first, second = ours.rollout(3), theirs.rollout(3)
    for key in ("observation", "action"):
        assert first[key].shape[1:] == second[key].shape[1:]
        assert first[key].dtype == second[key].dtype


# -- 11: policies that return NumPy ------------------------------------------------------------------------------------

WEIGHTS = np.array([0.5, -1.0, 0.25], dtype=np.float32)


def of_arrays(observation: np.ndarray) -> np.ndarray:
    """Takes arrays only: a tensor has no ``astype``."""
    return np.tanh(observation.astype(np.float32) @ WEIGHTS)[..., None]


def of_whatever(observation: Any) -> np.ndarray:
    """Takes tensors as well."""
    return np.tanh(np.asarray(observation) @ WEIGHTS)[..., None]


def network_in_numpy(observation: torch.Tensor) -> np.ndarray:
    """Takes tensors only."""
    return (observation @ torch.from_numpy(WEIGHTS)).tanh().unsqueeze(-1).numpy()


class Model:
    """As Stable-Baselines3's: ``predict`` gives ``(action, state)``."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def predict(
        self, observation: np.ndarray, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[np.ndarray, Any]:
        return of_arrays(observation), self.state


NUMPY = {
    "of arrays": of_arrays,
    "of whatever": of_whatever,
    "of tensors": network_in_numpy,
    "predict": Model().predict,
}


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "called"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NUMPY)
def test_policies_that_return_numpy(name: str, kind: str, capture: bool) -> None:
    for batch in collected(kind, pendulum, NUMPY[name], capture_policy=capture):
        expected = torch.tanh(batch["observation"] @ torch.from_numpy(WEIGHTS)).unsqueeze(-1)
        torch.testing.assert_close(batch["action"], expected)
        assert len(batch["action"].unique()) > FRAMES // 2


def test_numpy_policies_say_how_they_are_called() -> None:
    collector = Collector(pendulum, of_arrays, frames_per_batch=FRAMES, total_frames=3 * FRAMES)
    for _ in collector:
        pass
    assert collector.policy_plan() == "called as it is: it is written with NumPy"


def test_a_random_function_of_gymnasium_is_random() -> None:
    space = gymnasium.make("CartPole-v1").action_space
    for make in (lambda observation: space.sample(), lambda observation: int(space.sample())):
        batches = collected("one env", partial(GymEnv, "CartPole-v1", categorical_action_encoding=True), make)
        actions = torch.cat([batch["action"] for batch in batches])
        assert actions.dtype is torch.int64
        assert 0 < int(actions.sum()) < len(actions)


def test_numpy_policies_in_a_rollout() -> None:
    for policy in NUMPY.values():
        rollout = pendulum().rollout(4, policy)
        expected = torch.tanh(rollout["observation"] @ torch.from_numpy(WEIGHTS)).unsqueeze(-1)
        torch.testing.assert_close(rollout["action"], expected)


def test_numpy_policies_that_cannot_be_told_apart_say_what_to_write() -> None:
    def collector_of(policy: Any, env: Any = pendulum) -> Any:
        return Collector(env, policy, frames_per_batch=FRAMES, total_frames=FRAMES)

    with pytest.raises(PolicyOutputError, match=r"\(action, state\).*model\.predict\(observation\)\[0\]"):
        collector_of(Model(state=(np.zeros(2), np.zeros(2))).predict)
    with pytest.raises(PolicyOutputError, match="batch size"):  # one action for three envs
        collector_of(lambda observation: np.zeros(1, np.float32), SerialEnv(3, pendulum))
    with pytest.raises(PolicyOutputError, match="no array of numbers"):
        collector_of(lambda observation: np.array(["left"], dtype=object))
    with pytest.raises(PolicyOutputError, match="returned str"):
        collector_of(lambda observation: "left")

    def broken(observation: Any) -> Any:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        collector_of(broken)


def test_a_numpy_policy_may_keep_and_reuse_its_array() -> None:
    kept = np.zeros(1, np.float32)

    def counting(observation: Any) -> np.ndarray:
        kept[0] += 1
        return kept

    (batch,) = collected("one env", pendulum, counting, batches=1)
    assert torch.equal(batch["action"].reshape(-1).diff(), torch.ones(FRAMES - 1))
