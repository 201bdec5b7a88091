"""Envs: spaces, the TensorDict API, batches of envs, and the contract that all must keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from counting import CountingEnv, CountingTensorDictEnv
from swath.collectors import Collector
from swath.envs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    EnvBase,
    GymEnv,
    GymWrapper,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    SerialEnv,
    Unbounded,
    VectorEnv,
    next_seed,
    step_mdp,
)
from swath.errors import EnvClosed, EnvDataError, EnvError
from swath.testing import check_env
from warned import warned_here


class SpaceEnv(gymnasium.Env):
    """Samples its spaces; remembers the actions it got."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.actions: list[Any] = []
        self.observations: list[Any] = []

    def _sample(self) -> Any:
        self.observations.append(self.observation_space.sample())
        return self.observations[-1]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.actions = []
        return self._sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.actions.append(action)
        return self._sample(), 1.0, len(self.actions) % 7 == 0, False, {"position": np.float64(len(self.actions))}


BOX = spaces.Box(-1, 1, (2,), np.float32)
OBSERVATION_SPACES: dict[str, tuple[spaces.Space, bool, dict[Any, tuple[tuple[int, ...], torch.dtype]]]] = {
    **{
        f"box {dtype}": (spaces.Box(0, 1, (3,), dtype), False, {"observation": ((3,), torch_dtype)})
        for dtype, torch_dtype in [
            (np.float32, torch.float32),
            (np.float64, torch.float64),
            (np.float16, torch.float16),
            (np.uint8, torch.uint8),
            (np.int8, torch.int8),
            (np.int16, torch.int16),
            (np.int32, torch.int32),
            (np.int64, torch.int64),
            (np.bool_, torch.bool),
        ]
    },
    "box scalar": (spaces.Box(0, 1, (), np.float32), False, {"observation": ((), torch.float32)}),
    "box picture": (spaces.Box(0, 255, (5, 4, 3), np.uint8), False, {"observation": ((5, 4, 3), torch.uint8)}),
    "discrete": (spaces.Discrete(4, start=2), False, {"observation": ((4,), torch.int64)}),
    "discrete, categorical": (spaces.Discrete(4, start=2), True, {"observation": ((), torch.int64)}),
    "multi discrete": (spaces.MultiDiscrete([2, 3]), False, {"observation": ((5,), torch.int64)}),
    "multi discrete, categorical": (spaces.MultiDiscrete([2, 3]), True, {"observation": ((2,), torch.int64)}),
    "multi binary": (spaces.MultiBinary(4), False, {"observation": ((4,), torch.int8)}),
    "multi binary, 2d": (spaces.MultiBinary((2, 3)), False, {"observation": ((2, 3), torch.int8)}),
    "dict": (
        spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Discrete(3), d=spaces.Box(0, 1, (2, 2), np.float64))),
        False,
        {"a": ((2,), torch.float32), ("b", "c"): ((3,), torch.int64), ("b", "d"): ((2, 2), torch.float64)},
    ),
    "tuple": (
        spaces.Tuple((BOX, spaces.Discrete(2))),
        False,
        {("observation", "0"): ((2,), torch.float32), ("observation", "1"): ((2,), torch.int64)},
    ),
}


def leaf_of(observation: Any, key: Any) -> Any:
    if isinstance(observation, tuple):
        return observation[int(key[-1])]
    if isinstance(observation, (dict, spaces.Dict)):
        for part in key if isinstance(key, tuple) else (key,):
            observation = observation[part]
    return observation


def decoded(value: torch.Tensor, space: spaces.Space, categorical: bool) -> np.ndarray:
    """What stood in the env's own observation."""
    if isinstance(space, spaces.Discrete):
        return (value if categorical else value.argmax(-1)).numpy() + space.start
    if isinstance(space, spaces.MultiDiscrete) and not categorical:
        return np.array([part.argmax(-1) for part in value.split(space.nvec.tolist(), -1)])
    return value.numpy()


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_observation_spaces(name: str, num_envs: int | None) -> None:
    space, categorical, leaves = OBSERVATION_SPACES[name]
    raw = [SpaceEnv(space, spaces.Discrete(2)) for _ in range(num_envs or 1)]
    wrapped = [GymWrapper(env, categorical) for env in raw]
    env = wrapped[0] if num_envs is None else SerialEnv(num_envs, [lambda e=e: e for e in wrapped])
    assert set(env.observation_keys) == set(leaves)
    collector = Collector(env, frames_per_batch=20 * (num_envs or 1))
    batches = [collector.rollout().reshape(-1, 20) for _ in range(2)]
    for batch in batches:
        for key, (shape, dtype) in leaves.items():
            assert batch[key].shape[2:] == shape
            assert batch[key].dtype == dtype
            spec = env.observation_spec[key]
            assert spec.is_in(batch[key][0, 0].expand(spec.shape))
    data = batches[-1]
    for index, gym_env in enumerate(raw):
        for key in leaves:
            part = leaf_of(space, key) if isinstance(space, spaces.Dict) else space
            if isinstance(space, spaces.Tuple):
                part = space[int(key[-1])]
            last = data["next"].get(key)[index, -1]
            over = bool(data["next", "done"][index, -1])
            true_last = gym_env.observations[-2 if over else -1]
            np.testing.assert_array_equal(decoded(last, part, categorical), leaf_of(true_last, key))


ACTION_SPACES: dict[str, tuple[spaces.Space, bool]] = {
    "box": (BOX, False),
    "box, float64": (spaces.Box(-1, 1, (2, 2), np.float64), False),
    "box, integers": (spaces.Box(0, 9, (2,), np.int32), False),
    "discrete": (spaces.Discrete(3, start=5), False),
    "discrete, categorical": (spaces.Discrete(3, start=5), True),
    "multi discrete": (spaces.MultiDiscrete([2, 3]), False),
    "multi discrete, categorical": (spaces.MultiDiscrete([2, 3]), True),
    "multi binary": (spaces.MultiBinary(3), False),
    "dict": (spaces.Dict(x=BOX, y=spaces.Dict(z=spaces.Discrete(3))), False),
    "tuple": (spaces.Tuple((BOX, spaces.Discrete(3))), False),
}


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("name", ACTION_SPACES)
def test_action_spaces(name: str, num_envs: int | None) -> None:
    space, categorical = ACTION_SPACES[name]
    raw = [SpaceEnv(BOX, space) for _ in range(num_envs or 1)]
    wrapped = [GymWrapper(env, categorical) for env in raw]
    env = wrapped[0] if num_envs is None else SerialEnv(num_envs, [lambda e=e: e for e in wrapped])
    batch = Collector(env, frames_per_batch=600).rollout()
    assert all(len(gym_env.actions) == 600 // (num_envs or 1) for gym_env in raw)
    assert env.full_action_spec.is_in(batch.select(*env.action_keys).view(-1)[0].expand(env.batch_size)) or num_envs
    if name == "discrete":
        chosen = batch["action"].reshape(num_envs or 1, -1, 3).argmax(-1) + 5
        assert chosen.tolist() == [[int(a) for a in gym_env.actions] for gym_env in raw]
    if name == "dict":
        assert set(env.action_keys) == {("action", "x"), ("action", "y", "z")}
        values = np.stack([a["x"] for a in raw[0].actions])
        np.testing.assert_array_equal(batch["action", "x"].reshape(num_envs or 1, -1, 2)[0], values)
    env.rollout(3)


def test_a_float_vector_in_a_one_hot_slot_is_decoded_by_argmax() -> None:
    env = SpaceEnv(BOX, spaces.Discrete(3))
    wrapped = GymWrapper(env)
    root = wrapped.reset()
    root["action"] = torch.tensor([0.1, -5.0, 0.2])
    wrapped.step(root)
    assert env.actions == [2]


def test_an_env_may_keep_the_action_it_was_given() -> None:
    env = SpaceEnv(spaces.Box(-1, 1, (1,)), BOX)
    batch = Collector(GymWrapper(env), frames_per_batch=1500).rollout()
    np.testing.assert_array_equal(np.stack(env.actions), batch["action"].numpy())


def test_spaces_without_a_fixed_shape_are_refused() -> None:
    with pytest.raises(TypeError, match="Text spaces have no fixed shape"):
        GymWrapper(SpaceEnv(spaces.Text(3), BOX))


def test_a_discrete_observation_outside_its_space() -> None:
    class Outside(SpaceEnv):
        def _sample(self) -> Any:
            return -1

    with pytest.raises(EnvDataError, match="is -1, which is not in Discrete"):
        Collector(GymWrapper(Outside(spaces.Discrete(3), BOX)), frames_per_batch=4)


def test_info_keys() -> None:
    env = GymWrapper(SpaceEnv(BOX, BOX), info_keys=["position"])
    batch = Collector(env, frames_per_batch=6).rollout()
    assert batch["next", "position"].tolist() == [2, 3, 4, 5, 6, 7]  # one step was taken to see what info has
    assert batch["position"].tolist() == [0, 2, 3, 4, 5, 6]
    assert batch["position"].dtype == torch.float64
    with pytest.raises(KeyError, match=r"no 'positon' \(it has: 'position'\)"):
        GymWrapper(SpaceEnv(BOX, BOX), info_keys=["positon"])
    GymWrapper(SpaceEnv(BOX, BOX), info_keys={"late": Unbounded((2,))})


def test_pixels() -> None:
    env = GymEnv("CartPole-v1", from_pixels=True)
    batch = Collector(env, frames_per_batch=3).rollout()
    assert batch["pixels"].dtype == torch.uint8
    assert batch["pixels"].shape == (3, 400, 600, 3)
    assert "observation" not in batch
    both = GymEnv("CartPole-v1", from_pixels=True, pixels_only=False).rollout(2)
    assert {"pixels", "observation"} <= set(both.keys())
    with pytest.raises(EnvError, match="render_mode='rgb_array'"):
        GymWrapper(gymnasium.make("CartPole-v1"), from_pixels=True)


def test_frame_skip() -> None:
    data = GymWrapper(CountingEnv(longest=10**6), frame_skip=4).rollout(3, lambda observation: torch.eye(3)[0])
    assert data["next", "observation"][:, 1].tolist() == [4, 8, 12]
    assert data["next", "reward"].squeeze(-1).tolist() == [10, 26, 42]


def test_unknown_env_id_suggests_the_nearest() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match="did you mean 'CartPole-v1'"):
        GymEnv("CartPol-v1")
    with pytest.raises(TypeError, match="see GymWrapper"):
        GymEnv(CountingEnv())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use GymEnv"):
        GymWrapper("CartPole-v1")  # type: ignore[arg-type]


def test_attributes_of_the_wrapped_env() -> None:
    assert GymEnv("CartPole-v1").gravity == 9.8
    assert SerialEnv(2, lambda: GymEnv("CartPole-v1")).gravity == [9.8, 9.8]
    with pytest.raises(AttributeError, match="neither GymEnv nor CartPole-v1 has an attribute 'levity'"):
        _ = GymEnv("CartPole-v1").levity


# -- the TensorDict API ----------------------------------------------------------------------------------------------


def test_step_and_maybe_reset_keeps_the_last_observation() -> None:
    env = SerialEnv(2, [lambda: GymWrapper(CountingEnv(1)), lambda: GymWrapper(CountingEnv(10**6))])
    root = env.reset()
    stepped, following = env.step_and_maybe_reset(env.rand_action(root))
    assert stepped["next", "done"].squeeze(-1).tolist() == [True, False]
    assert stepped["next", "observation"][:, 1].tolist() == [1, 1]
    assert following["observation"][:, 1].tolist() == [0, 1]
    assert not following["done"].any()
    assert "action" in following
    assert "_reset" not in following


def test_rollout() -> None:
    env = SerialEnv(2, [lambda: GymWrapper(CountingEnv(1)), lambda: GymWrapper(CountingEnv(10**6))])
    assert env.rollout(5).shape == (2, 1)
    free = env.rollout(5, break_when_any_done=False)
    assert free.shape == (2, 5)
    assert free.names == [None, "time"]
    assert bool(free["next", "done"][0].all())
    whole = env.rollout(5, break_when_any_done=False, break_when_all_done=True)
    assert whole["next", "observation"][0, :, 1].tolist() == [1] * 5
    assert whole["next", "observation"][1, :, 1].tolist() == [1, 2, 3, 4, 5]
    assert whole["next", "reward"][0, 1:].sum() == 0
    assert bool(env.rollout(3, break_when_any_done=False, set_truncated=True)["next", "truncated"][:, -1].all())
    seen = []
    env.rollout(3, callback=lambda env, td: seen.append(td["action"]), break_when_any_done=False)
    assert len(seen) == 3
    with pytest.raises(TypeError, match="cannot both"):
        env.rollout(3, break_when_all_done=True)
    with pytest.raises(RuntimeError, match="auto_reset=False"):
        env.rollout(3, auto_reset=False)


def test_bad_steps() -> None:
    env = GymWrapper(CountingEnv())
    root = env.reset()
    with pytest.raises(KeyError, match="has no 'action'"):
        env.step(root)
    with pytest.raises(EnvDataError, match=r"shape \(2,\), expected \(3,\)"):
        env.step(root.set("action", torch.zeros(2)))
    with pytest.raises(RuntimeError, match="batch size"):
        env.step(TensorDict(batch_size=(3,)))
    env.close()
    with pytest.raises(EnvClosed):
        env.close()
    env.close(raise_if_closed=False)
    with pytest.raises(EnvClosed, match="was closed"):
        env.reset()


def test_seeds_follow_the_convention() -> None:
    assert next_seed(0) == 795726461
    env = GymWrapper(CountingEnv())
    assert env.set_seed(0) == 795726461
    assert env.set_seed(0, static_seed=True) == 0
    assert env.set_seed(None) is None
    serial = SerialEnv(2, lambda: GymWrapper(CountingEnv()))
    assert serial.set_seed(0) == next_seed(next_seed(0)) == SerialEnv(2, CountingTensorDictEnv).set_seed(0)
    first = serial.reset()["observation"][:, 3]
    alone = GymWrapper(CountingEnv())
    alone.set_seed(next_seed(0))
    assert first[1] == alone.reset()["observation"][3]
    serial.set_seed(5, static_seed=True)
    same = serial.reset()["observation"][:, 3]
    assert same[0] == same[1]


def test_fake_tensordict_looks_like_a_step() -> None:
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    fake, real = env.fake_tensordict(), env.rand_step(env.reset())
    keys = sorted(map(str, real.keys(True, True)))
    assert sorted(map(str, fake.keys(True, True))) == keys
    for key in real.keys(True, True):
        assert fake.get(key).shape == real.get(key).shape
        assert fake.get(key).dtype == real.get(key).dtype


def test_step_mdp() -> None:
    env = GymWrapper(CountingEnv(10**6))
    stepped = env.rand_step(env.reset().set("kept", torch.ones(2)))
    root = step_mdp(stepped)
    assert set(root.keys()) == {"observation", "done", "terminated", "truncated", "kept"}
    assert torch.equal(root["observation"], stepped["next", "observation"])
    assert set(step_mdp(stepped, keep_other=False, exclude_reward=False, exclude_done=True).keys()) == {
        "observation",
        "reward",
    }


def test_to_moves_specs_and_data() -> None:
    env = GymWrapper(CountingEnv()).to("cpu")
    assert env.reset().device == torch.device("cpu")
    assert env.action_spec.device == torch.device("cpu")


# -- batches of envs -------------------------------------------------------------------------------------------------


def test_serial_env_arguments() -> None:
    def make(longest: int) -> EnvBase:
        return GymWrapper(CountingEnv(longest))

    env = SerialEnv(2, make, create_env_kwargs=[{"longest": 3}, {"longest": 4}])
    assert [child.env.longest for child in env.children] == [3, 4]
    with pytest.raises(RuntimeError, match="3 envs were asked for, but 2 factories"):
        SerialEnv(3, [CountingTensorDictEnv] * 2)
    with pytest.raises(ValueError, match="positive integer"):
        SerialEnv(0, CountingTensorDictEnv)
    # Gymnasium's own, and their ids, are wrapped, as everywhere.
    assert SerialEnv(2, CountingEnv).batch_size == SerialEnv(2, "CartPole-v1").batch_size == (2,)
    with pytest.raises(TypeError, match="which is no env"):
        SerialEnv(2, dict)
    with pytest.raises(EnvError, match="env 1 has another layout than env 0"):
        SerialEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: GymEnv("Pendulum-v1")])


def test_serial_env_reset_arguments_for_each_env() -> None:
    class Starts(CountingEnv):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            observation, info = super().reset(seed=seed)
            observation[2] = (options or {}).get("start", -1)
            return observation, info

    starts = [{"options": {"start": 3}}, {"options": {"start": 5}}]
    for env in (
        SerialEnv(2, lambda: GymWrapper(Starts()), serial_for_single=True),
        SerialEnv(2, [lambda: SerialEnv(1, lambda: GymWrapper(Starts()))] * 2),
    ):
        assert env.reset(list_of_kwargs=starts)["observation"][..., 2].reshape(-1).tolist() == [3, 5]
    with pytest.raises(TypeError, match="unknown argument: 'parallel'"):
        SerialEnv(2, CountingTensorDictEnv, parallel=True)


def test_an_env_of_ones_own_with_a_batch_size() -> None:
    class Batched(EnvBase):
        """Counts up to its own limit in each of its rows."""

        def __init__(self) -> None:
            super().__init__(batch_size=[3])
            self.observation_spec = Composite(observation=Unbounded((3, 1), torch.int64), shape=(3,))
            self.action_spec = Categorical(2, (3,))
            self.count = torch.zeros(3, 1, dtype=torch.int64)

        def _reset(self, tensordict: Any) -> TensorDict:
            mask = tensordict["_reset"] if tensordict is not None else torch.ones(3, 1, dtype=torch.bool)
            self.count = torch.where(mask, 0, self.count)
            return TensorDict(observation=self.count.clone(), batch_size=3)

        def _step(self, tensordict: Any) -> TensorDict:
            self.count = self.count + 1
            over = self.count >= torch.tensor([[2], [3], [100]])
            return TensorDict(observation=self.count.clone(), reward=torch.ones(3, 1), terminated=over, batch_size=3)

    check_env(Batched())
    batch = Collector(Batched(), frames_per_batch=18).rollout()
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert batch["next", "observation"].squeeze(-1).tolist() == [
        [1, 2, 1, 2, 1, 2],
        [1, 2, 3, 1, 2, 3],
        [1, 2, 3, 4, 5, 6],
    ]
    whole = Batched().rollout(5, break_when_any_done=False, break_when_all_done=True)
    assert whole["next", "observation"].squeeze(-1).tolist() == [[1, 2, 2, 2, 2], [1, 2, 3, 3, 3], [1, 2, 3, 4, 5]]
    assert whole["next", "reward"].squeeze(-1).tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1] * 5]


def test_serial_env_of_serial_envs() -> None:
    env = SerialEnv(2, lambda: SerialEnv(3, lambda: GymWrapper(CountingEnv(5))))
    assert env.batch_size == (2, 3)
    check_env(env)
    batch = Collector(env, frames_per_batch=60).rollout()
    assert batch.shape == (2, 3, 10)


def test_serial_env_of_envs_that_differ_in_what_specs_do_not_say() -> None:
    raw = [SpaceEnv(BOX, spaces.Discrete(3)), SpaceEnv(BOX, spaces.Discrete(3, start=5))]
    env = SerialEnv(2, [lambda e=e: GymWrapper(e) for e in raw])
    Collector(env, frames_per_batch=60).rollout()
    assert {int(action) for action in raw[1].actions} == {5, 6, 7}


def test_a_subclass_that_changes_the_step_is_obeyed() -> None:
    class Doubled(GymWrapper):
        def _step(self, tensordict: Any) -> TensorDict:
            out = super()._step(tensordict)
            return out.set("reward", out["reward"] * 2)

    plain = GymWrapper(CountingEnv(10**6)).rollout(3, lambda observation: torch.eye(3)[0])["next", "reward"]
    (batch,) = Collector(
        Doubled(CountingEnv(10**6)), lambda observation: torch.eye(3)[0], frames_per_batch=3, total_frames=3
    )
    assert torch.equal(batch["next", "reward"], plain * 2)
    several = SerialEnv(2, lambda: Doubled(CountingEnv(10**6)))
    (batch,) = Collector(several, lambda observation: torch.eye(3)[:1].expand(2, 3), frames_per_batch=6, total_frames=6)
    assert torch.equal(batch["next", "reward"][1], plain * 2)


@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_tensordict_env_may_keep_the_action_it_was_given(num_steps: int) -> None:
    class Remembers(CountingTensorDictEnv):
        last: Any = None

        def _step(self, tensordict: Any) -> TensorDict:
            out = super()._step(tensordict)
            before, self.last = self.last, tensordict["action"]
            tensordict["observation"].zero_()
            return out.set("reward", torch.zeros(1) if before is None else (self.last - before).abs().sum()[None])

    numbers = iter(range(100))
    collector = Collector(
        Remembers(10**6),
        lambda observation: torch.full((3,), float(next(numbers))),
        frames_per_batch=num_steps,
        total_frames=10,
    )
    data: Any = torch.cat(list(collector))
    assert data["next", "reward"].flatten().tolist()[1:] == [3] * 9
    assert data["observation"][:, 1].tolist() == list(range(10))


def test_done_without_terminated_is_truncated() -> None:
    class Done(CountingTensorDictEnv):
        def _step(self, tensordict: Any) -> TensorDict:
            out = super()._step(tensordict).exclude("truncated")
            over = torch.tensor([self.inner.step_count == 3])
            return out.set("done", over).set("terminated", torch.zeros(1, dtype=torch.bool))

    batch: Any = Collector(Done(10**6), frames_per_batch=6).rollout()
    assert batch["next", "done"].flatten().tolist() == [False, False, True] * 2
    assert torch.equal(batch["next", "done"], batch["next", "truncated"])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rewards_as_envs_give_them(num_envs: int) -> None:
    class Rewards(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            kinds = [int, float, np.float32, np.float64, np.array, lambda r: np.array([r]), lambda r: np.array([[r]])]
            return observation, kinds[self.step_count % len(kinds)](float(int(reward))), *rest

    env = SerialEnv(num_envs, lambda: GymWrapper(Rewards(10**6)))
    batch = Collector(
        env, lambda observation: torch.eye(3)[:1].expand(num_envs, 3), frames_per_batch=20 * num_envs
    ).rollout()
    assert batch["next", "reward"].squeeze(-1).tolist() == [list(range(1, 21))] * num_envs


@pytest.mark.parametrize("extra", [True, False])
def test_an_unknown_or_missing_key_at_some_step(extra: bool) -> None:
    class Changes(SpaceEnv):
        def _sample(self) -> Any:
            observation = super()._sample()
            if len(self.observations) > 3:
                if extra:
                    observation["b"]["new"] = 1
                else:
                    del observation["b"]["c"]
            return observation

    space = spaces.Dict(a=BOX, b=spaces.Dict(c=BOX))
    message = "the observation\\['b'\\] has 'new', which its space has not" if extra else r"\('b', 'c'\) is missing"
    with pytest.raises(EnvDataError, match=rf"env 0 \(Changes\), step: .*{message}(.|\n)*in step 2 of this batch"):
        Collector(GymWrapper(Changes(space, BOX)), frames_per_batch=6).rollout()


def test_a_key_in_no_spec_of_a_tensordict_env() -> None:
    class Adds(CountingTensorDictEnv):
        def _step(self, tensordict: Any) -> TensorDict:
            return super()._step(tensordict).set("speed", torch.zeros(1))

    with pytest.raises(EnvDataError, match="step gives 'speed', which is in none of its specs"):
        Collector(Adds(), frames_per_batch=6).rollout()


def test_reserved_names_in_an_observation() -> None:
    with pytest.raises(ValueError, match="'reward', which is the name of something else"):
        GymWrapper(SpaceEnv(spaces.Dict(reward=BOX), BOX))


def test_info_that_changes_its_kind() -> None:
    class Scores(CountingEnv):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {"score": 0 if self.step_count < 3 else 2.5}

    with pytest.raises(
        EnvDataError, match=r"info\['score'\] is float64, on its first step it was int64; say its dtype"
    ):
        Collector(GymWrapper(Scores(10**6), info_keys=["score"]), frames_per_batch=6).rollout()
    env = GymWrapper(Scores(10**6), info_keys={"score": Unbounded(())})
    assert Collector(env, frames_per_batch=4).rollout()["next", "score"].tolist() == [0, 0, 2.5, 2.5]


def test_a_reset_with_another_dtype_later_is_an_error() -> None:
    class Doubles(CountingEnv):
        def _observe(self, action: float) -> Any:
            observation = super()._observe(action)
            return observation.astype("float64") if self.episode > 2 and self.step_count == 0 else observation

    with pytest.raises(EnvDataError, match="reset: observation 'observation' has dtype float64"):
        Collector(GymWrapper(Doubles(3)), frames_per_batch=40).rollout()


def test_gym_env_with_num_envs() -> None:
    assert GymEnv("CartPole-v1", num_envs=3).batch_size == (3,)


def test_an_error_in_a_serial_env_of_tensordict_envs_names_the_env() -> None:
    class Broken(CountingTensorDictEnv):
        def _step(self, tensordict: Any) -> Any:
            raise ZeroDivisionError

    env = SerialEnv(2, [CountingTensorDictEnv, Broken])
    with pytest.raises(ZeroDivisionError) as caught:
        env.rollout(2)
    assert "in env 1 of a SerialEnv" in "".join(caught.value.__notes__)


class Hidden(gymnasium.vector.VectorWrapper):
    """Not Gymnasium's own, as far as one can see."""


def test_vector_env_that_cannot_reset_single_envs() -> None:
    inner = Hidden(SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    env = GymWrapper(inner)
    assert isinstance(env, VectorEnv)
    with pytest.raises(EnvError, match=r"max_frames_per_traj needs an env .* AutoresetMode.DISABLED"):
        Collector(env, frames_per_batch=4, max_frames_per_traj=3)
    collector = Collector(env, frames_per_batch=4)
    with pytest.raises(EnvError, match="a reset of some envs needs an env"):
        collector.reset([0])
    assert collector.rollout().shape == (2, 2)


def test_vector_env_without_metadata() -> None:
    inner = SyncVectorEnv([CountingEnv] * 2)
    inner.metadata = {}
    with pytest.raises(EnvError, match="autoreset_mode"):
        GymWrapper(inner)


def uneven(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]) -> EnvBase:
    """A vector env with fillers whose envs advance very unevenly, and little memory for it."""
    monkeypatch.setattr("swath.rollout.ragged.MAX_WAITING_STEPS", 1)
    inner = SyncVectorEnv([lambda n=n: CountingEnv(n) for n in lengths], autoreset_mode=AutoresetMode.NEXT_STEP)
    return GymWrapper(Hidden(inner))


def test_an_env_that_runs_far_ahead_of_the_others_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # Env 0 is a filler every other step, env 1 never: after some batches it must be cut, and marked where it is.
    collector = Collector(uneven(monkeypatch, (1, 10**6)), frames_per_batch=20, total_frames=400)
    with warned_here(match=r"env 1 .* got 20 steps ahead .* AutoresetMode.DISABLED") as caught:
        data: Any = torch.cat(list(collector), 1)
    assert len(caught) == 1
    assert bool(data["next", "done"][0].all())
    ids, count = data["collector", "traj_ids"][1], data["observation"][1, :, 1]
    gaps = (count.diff() != 1).nonzero().reshape(-1)
    assert len(gaps) > 0
    assert bool(data["next", "truncated"][1, gaps].all())
    assert int(data["next", "done"][1, :-1].sum()) == len(gaps)
    assert torch.equal((ids.diff() != 0).nonzero().reshape(-1), gaps)
    steps = data["next", "observation"][1, :, 1] - data["observation"][1, :, 1]
    assert bool((steps == 1).all())


@pytest.mark.filterwarnings("ignore:env . of a vector env in NEXT_STEP")
def test_what_was_cut_is_no_whole_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    env = uneven(monkeypatch, (1, 30))
    collector = Collector(env, frames_per_batch=16, total_frames=2000, trajs_per_batch=1, traj_format="cat")
    whole = 0
    for episode in collector:
        count = episode["observation"][:, 1]
        assert count.tolist() == list(range(len(count))), "an episode that begins in its middle, or has a hole"
        whole += 1
    assert whole > 500


def test_frames_that_wait_are_kept_by_default() -> None:
    inner = SyncVectorEnv([lambda: CountingEnv(1), lambda: CountingEnv(50)], autoreset_mode=AutoresetMode.NEXT_STEP)
    data: Any = torch.cat(list(Collector(GymWrapper(Hidden(inner)), frames_per_batch=4, total_frames=800)), 1)
    same = ~data["next", "done"][1, :-1, 0]
    assert bool((data["observation"][1, 1:, 1][same] == data["observation"][1, :-1, 1][same] + 1).all())


def test_fillers_with_an_interruptor_never_give_an_empty_batch() -> None:
    class AfterEveryStep:
        def collection_stopped(self) -> bool:
            return True

    inner = SyncVectorEnv([lambda: CountingEnv(1)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    collector = Collector(
        GymWrapper(Hidden(inner)), frames_per_batch=8, total_frames=20, interruptor=AfterEveryStep(), set_truncated=True
    )
    assert {batch.shape[1] for batch in collector} == {1}


def test_serial_env_of_vector_envs_with_fillers_is_refused() -> None:
    def make() -> EnvBase:
        return GymWrapper(Hidden(SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)))

    with pytest.raises(EnvError, match="filler steps cannot be left out"):
        SerialEnv(2, make)


@pytest.mark.parametrize("total", [2, 7, 25])
def test_random_frames_are_exact_with_fillers(total: int) -> None:
    inner = SyncVectorEnv([lambda: CountingEnv(2)] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    policy_calls = lambda observation: (observation[:, :3], torch.ones(3))  # noqa: E731
    collector = Collector(
        GymWrapper(Hidden(inner)), policy_calls, frames_per_batch=12, total_frames=120, init_random_frames=total
    )
    data: Any = torch.cat(list(collector), 1)
    assert int((data["output1"] == 0).sum()) == total


# -- the contract ----------------------------------------------------------------------------------------------------

ENVS: dict[str, Callable[[], EnvBase]] = {
    "CartPole": lambda: GymEnv("CartPole-v1"),
    "CartPole, integers": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "Pendulum": lambda: GymEnv("Pendulum-v1"),
    "FrozenLake": lambda: GymEnv("FrozenLake-v1"),
    "Blackjack": lambda: GymEnv("Blackjack-v1"),
    "counting": lambda: GymWrapper(CountingEnv(5)),
    "on TensorDicts": lambda: CountingTensorDictEnv(5),
    "serial": lambda: SerialEnv(3, lambda: GymWrapper(CountingEnv(5))),
    "serial, on TensorDicts": lambda: SerialEnv(3, lambda: CountingTensorDictEnv(5)),
    **{
        f"vector, {mode.name}": lambda mode=mode: GymWrapper(
            SyncVectorEnv([lambda: CountingEnv(5)] * 3, autoreset_mode=mode)
        )
        for mode in AutoresetMode
    },
    **{
        f"other vector, {mode.name}": lambda mode=mode: GymWrapper(
            Hidden(SyncVectorEnv([lambda: CountingEnv(5)] * 3, autoreset_mode=mode))
        )
        for mode in AutoresetMode
    },
    "vector, one-hot choices": lambda: GymWrapper(
        SyncVectorEnv([lambda: SpaceEnv(spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 2]))] * 3)
    ),
    "vector CartPole": lambda: GymWrapper(
        gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    ),
}


@pytest.mark.parametrize("name", ENVS)
def test_envs_keep_the_contract(name: str) -> None:
    env = ENVS[name]()
    check_env(env, num_steps=60)
    env.close()


def break_env(name: str) -> EnvBase:
    class Broken(CountingTensorDictEnv):
        def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
            out = super()._reset(tensordict)
            if name == "done after reset":
                out["done"] = torch.ones(1, dtype=torch.bool)
            if name == "unseeded":
                self.inner.np_random = np.random.default_rng()
            return out

        def _step(self, tensordict: Any) -> Any:
            out = super()._step(tensordict)
            if name == "missing key":
                del out["observation"]
            if name == "dtype":
                out["reward"] = out["reward"].double()
            if name == "shape":
                out["observation"] = out["observation"][:2]
            if name == "no reason":
                out["truncated"] = torch.zeros(1, dtype=torch.bool)
                out["terminated"] = torch.zeros(1, dtype=torch.bool)
                out["done"] = torch.ones(1, dtype=torch.bool)
            return out

    return Broken(5)


@pytest.mark.parametrize("name", ["done after reset", "unseeded", "missing key", "dtype", "shape", "no reason"])
def test_check_env_finds_what_is_broken(name: str) -> None:
    with pytest.raises((AssertionError, EnvError)):
        check_env(break_env(name))


# -- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        Unbounded((2, 3)),
        Unbounded((2,), torch.int64),
        Unbounded((2,), torch.bool),
        Bounded(-1, 2, (2, 3)),
        Bounded(np.array([0, -np.inf]), np.array([np.inf, 3]), (2,)),
        Bounded(0, 255, (4,), torch.uint8),
        Bounded(-3, 3, (4,), torch.int32),
        Categorical(4, (2,)),
        Categorical(2, (1,), torch.bool),
        Binary(5),
        OneHot(4),
        OneHot(4, (2, 4)),
        MultiCategorical([2, 5]),
        MultiOneHot([2, 5]),
    ],
    ids=repr,
)
def test_specs(spec: Any) -> None:
    drawn = spec.rand((500,))
    assert drawn.shape == (500, *spec.shape)
    assert spec.is_in(drawn)
    assert spec.zero((2,)).shape == (2, *spec.shape)
    assert spec.expand(3, *spec.shape).rand().shape == (3, *spec.shape)
    assert spec == spec.clone()
    assert spec != Composite()
    assert not spec.is_in(drawn.to(torch.complex64))
    if not isinstance(spec, Unbounded) and spec.dtype != torch.bool:
        assert not spec.is_in(drawn + 300) or spec.dtype == torch.uint8


def test_bounds_are_reached() -> None:
    drawn = Bounded(0, 3, (1,), torch.int64).rand((1000,))
    assert drawn.unique().tolist() == [0, 1, 2, 3]
    assert MultiCategorical([2, 3]).rand((1000,)).amax(0).tolist() == [1, 2]


def test_composite() -> None:
    spec = Composite({"a": OneHot(3), ("b", "c"): Unbounded((2,))})
    assert spec.keys(True, True) == ["a", ("b", "c")]
    assert spec.is_in(spec.rand((4,)))
    assert spec["b", "c"].shape == (2,)
    assert ("b", "c") in spec
    assert "z" not in spec
    grown = spec.expand(5)
    assert grown["b", "c"].shape == (5, 2)
    assert grown.zero().shape == (5,)
    del spec["b", "c"]
    assert spec.keys(True, True) == ["a"]
    assert spec.clone() == spec


# -- vector envs -------------------------------------------------------------------------------------------------------


def test_a_vector_env_says_what_it_is_and_passes_on_what_it_has() -> None:
    inner = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    env = VectorEnv(inner)
    assert "batch_size=(2,)" in repr(env)
    assert env.num_envs == 2
    with pytest.raises(AttributeError):
        env.no_such_thing  # noqa: B018
    assert env.set_seed(None) is None
    assert env.set_seed(3, static_seed=True) == 3
    first = env.reset()["observation"]
    assert torch.equal(first[0], first[1])
    with pytest.raises(TypeError, match=r"takes a gymnasium\.vector\.VectorEnv, got CartPole"):
        VectorEnv(gymnasium.make("CartPole-v1").unwrapped)  # type: ignore[arg-type]


def test_a_vector_env_that_does_not_say_how_it_resets() -> None:
    inner = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    inner.metadata = {}
    with pytest.raises(EnvError, match=r"metadata\['autoreset_mode'\] is missing.*set it"):
        VectorEnv(inner)


class Actions(gymnasium.Env):
    """Observes the actions that it was given, of nested spaces."""

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    action_space = spaces.Dict(
        {"a": spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.Discrete(3, start=2)]), "b": spaces.Box(-1, 1, ())}
    )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action: Any) -> Any:
        (box, number), scalar = action["a"], action["b"]
        return np.array([box[0], number, scalar], dtype=np.float32), 0.0, False, False, {}


def test_nested_actions_reach_each_env_of_a_vector_env() -> None:
    data: Any = VectorEnv(SyncVectorEnv([Actions] * 3)).rollout(5)
    seen = data["next", "observation"]
    assert torch.equal(seen[..., 0], data["action", "a", "0"].squeeze(-1))
    assert torch.equal(seen[..., 1], data["action", "a", "1"].float().argmax(-1) + 2.0)
    assert torch.equal(seen[..., 2], data["action", "b"].reshape(3, 5))


def test_envs_that_were_seeded_before_they_were_put_together() -> None:
    def make(seed: int) -> EnvBase:
        env = GymWrapper(CountingEnv())
        env.set_seed(seed)
        return env

    seeds = [5, 9, 2]
    first: Any = SerialEnv(3, [lambda seed=seed: make(seed) for seed in seeds]).reset()
    alone = [make(seed).reset()["observation"] for seed in seeds]
    assert torch.equal(first["observation"], torch.stack(alone))


def test_sizes() -> None:
    env = GymEnv("CartPole-v1")
    assert (env.shape, env.ndim, env.batch_dims, env.ndimension(), env.numel()) == (torch.Size([]), 0, 0, 0, 1)
    env = SerialEnv(2, lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")))
    assert (env.shape, env.ndim, env.batch_dims, env.ndimension(), env.numel()) == (torch.Size([2, 3]), 2, 2, 2, 6)
