"""What a user does to TorchRL's envs and transforms has its effect, also where they were lowered.

Each attack is made on three collectors of the same envs: one that may lower them, one that steps them with TorchRL's
own ``step_and_maybe_reset``, and one that does without it. All must deliver the same, before and after it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from counting import CountingEnv
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import ParallelEnv
from swath.envs.guest import GuestEnv

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.processes,
]
STEPS = 20


def rl() -> Any:
    import torchrl.envs

    return torchrl.envs


@pytest.fixture(scope="module", autouse=True)
def _first_serial_env() -> None:
    """Memory of the first one in a process stays: that is no leak of a test."""
    env = rl().SerialEnv(2, lambda: rl().GymWrapper(CountingEnv(9)))
    env.rollout(2)
    env.close()


def counting() -> Any:
    return rl().GymWrapper(CountingEnv(9))


def transforms(max_steps: int | None = 6) -> Any:
    return rl().Compose(rl().InitTracker(), rl().StepCounter(max_steps=max_steps), rl().RewardSum())


def single(make: Callable[[], Any] = counting) -> Any:
    return rl().TransformedEnv(make(), transforms())


def outside(make: Callable[[], Any] = counting) -> Any:
    return rl().TransformedEnv(rl().SerialEnv(3, make), transforms())


def inside(make: Callable[[], Any] = counting) -> Any:
    return rl().SerialEnv(3, lambda: single(make))


STACKS = [single, outside, inside]


def policy(kind: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """One-hot actions that depend on what is seen, and on nothing else."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        chosen = observation[..., 1].to(torch.int64) * 2 + (observation[..., 3] > 0)
        one_hot = torch.nn.functional.one_hot(chosen % 3, 3)
        return one_hot if kind is None else kind(one_hot)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def stack_of(env: Any) -> list[Any]:
    """The TransformedEnvs in it."""
    return [env] if type(env).__name__ == "TransformedEnv" else list(env._envs)


def wrappers(env: Any) -> list[Any]:
    """TorchRL's wrappers of Gymnasium envs in it."""
    if type(env).__name__ == "TransformedEnv":
        return wrappers(env.base_env)
    if type(env).__name__ == "SerialEnv":
        return [wrapper for child in env._envs for wrapper in wrappers(child)]
    return [env]


def run(
    make: Callable[[], Any],
    way: str,
    attack: Callable[[Any, Any], Any] | None,
    act: Any,
    num_batches: int = 4,
    **kwargs: Any,
) -> tuple[list[TensorDictBase], list[str], type[Exception] | None]:
    """Batches, how the env was stepped in each, and what was raised; the attack comes after the second batch."""
    CountingEnv.made = 0
    guest = make()
    env = GuestEnv(guest, lower=way == "lowered")
    env.steps_quickly = way != "plain"
    collector = Collector(env, act, frames_per_batch=STEPS * guest.numel(), **kwargs)
    collector.set_seed(7)
    batches, plans = [], []
    try:
        for number, batch in enumerate(collector, 1):
            batches.append(batch.clone())
            plans.append(collector.env_plan())
            if number == num_batches:
                break
            if number == 2 and attack is not None:
                attack(guest, collector)
    except Exception as error:
        return batches, plans, type(error)
    finally:
        collector.shutdown()
        guest.close(raise_if_closed=False)
    return batches, plans, None


def assert_equal(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    assert ours.batch_size == theirs.batch_size
    keys = {str(key): key for key in theirs.keys(True, True)}
    assert {str(key) for key in ours.keys(True, True)} == set(keys)
    for key in keys.values():
        torch.testing.assert_close(
            ours.get(key), theirs.get(key), rtol=0, atol=0, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )


def compare(
    make: Callable[[], Any],
    attack: Callable[[Any, Any], Any] | None = None,
    act: Any = None,
    *,
    lowered: bool | None = True,
    after: bool | None = None,
    **kwargs: Any,
) -> list[TensorDictBase]:
    """Both ways; ``lowered`` and ``after`` say whether it was lowered before the attack, and after it."""
    act = policy() if act is None else act
    ours, plans, error = run(make, "lowered", attack, act, **kwargs)
    quick, _, _ = run(make, "quick", attack, act, **kwargs)
    theirs, _, expected = run(make, "plain", attack, act, **kwargs)
    assert error is expected
    for number, (mine, faster, other) in enumerate(zip(ours, quick, theirs, strict=True)):
        for got, plan in ((mine, plans[number]), (faster, "quick")):
            try:
                assert_equal(got, other)
            except AssertionError as difference:
                raise AssertionError(f"batch {number}: {difference} ({plan})") from None
    if lowered is not None:
        assert all(plan.startswith("lowered") is lowered for plan in plans[:2]), plans
    if after is not None:
        assert plans[2:], "it raised"
        assert all(plan.startswith("lowered") is after for plan in plans[2:]), plans
    return ours


# -- attributes and transforms that are changed ------------------------------------------------------------------------


def each_transform(env: Any, name: str) -> list[Any]:
    """The transforms of this class."""
    return [transform for part in stack_of(env) for transform in part.transform if type(transform).__name__ == name]


def shorter(env: Any, _: Any) -> None:
    for transform in each_transform(env, "StepCounter"):
        transform.max_steps = 2


def longer(env: Any, _: Any) -> None:
    for transform in each_transform(env, "StepCounter"):
        transform.max_steps = 1000


def no_limit(env: Any, _: Any) -> None:
    for transform in each_transform(env, "StepCounter"):
        transform.max_steps = None


def another_key(env: Any, _: Any) -> None:
    for transform in each_transform(env, "RewardSum"):
        transform.in_keys = ["reward"]
        transform.out_keys = ["episode_reward"]


def double(env: Any, _: Any) -> None:
    """A transform of TorchRL's that takes any function."""
    for part in stack_of(env):
        part.append_transform(lambda data: data.set("observation", data["observation"] * 2))


def remove_sum(env: Any, _: Any) -> None:
    for part in stack_of(env):
        del part.transform[2]
        part.empty_cache()


def swap(env: Any, _: Any) -> None:
    for part in stack_of(env):
        part.transform = transforms(3)


def count_by_hook(env: Any, _: Any) -> None:
    for transform in each_transform(env, "RewardSum"):
        transform.register_forward_hook(lambda *args: None)


def on_the_instance(env: Any, _: Any) -> None:
    for transform in each_transform(env, "RewardSum"):
        own = transform._step

        def step(tensordict: Any, next_tensordict: Any, own: Any = own) -> Any:
            data = own(tensordict, next_tensordict)
            return data.set("episode_reward", data["episode_reward"] + 100)

        transform._step = step


def wrapped_gym_env(env: Any, _: Any) -> None:
    for wrapper in wrappers(env):
        wrapper._env = gymnasium.wrappers.TransformReward(wrapper._env, lambda reward: float(reward) * 10)


def patched_gym_env(env: Any, _: Any) -> None:
    for wrapper in wrappers(env):
        own = wrapper._env.step
        wrapper._env.step = lambda action, own=own: (own(action)[0] + 1, 5.0, False, True, {})


def modes(env: Any, _: Any) -> None:
    env.train()
    env.eval()
    for part in stack_of(env):
        part.transform.train()


def info(env: Any, _: Any) -> None:
    for wrapper in wrappers(env):
        wrapper.set_info_dict_reader(rl().default_info_dict_reader(["length"]))


def frame_skip(env: Any, _: Any) -> None:
    for wrapper in wrappers(env):
        wrapper.wrapper_frame_skip = 2


@pytest.mark.parametrize("make", STACKS)
@pytest.mark.parametrize(
    ("attack", "after"),
    [
        (shorter, True),
        (longer, True),
        (no_limit, True),
        (another_key, True),
        (double, False),
        (swap, True),
        (remove_sum, None),
        (count_by_hook, False),
        (on_the_instance, False),
        (wrapped_gym_env, True),
        (patched_gym_env, True),
        (modes, True),
        (info, None),
        (frame_skip, True),
    ],
)
def test_changed_between_batches(make: Any, attack: Any, after: bool | None) -> None:
    if attack is remove_sum and make is inside:
        pytest.skip("nobody writes the sum any more: TorchRL's SerialEnv repeats what is in its memory")
    batches = compare(make, attack, after=after)
    if attack is shorter:
        assert batches[3]["next", "step_count"].max() == 2
    if attack is longer:
        assert batches[3]["next", "step_count"].max() > 6


@pytest.mark.parametrize("inner", [counting, single])
def test_a_transform_that_looks_at_envs_that_were_not_reset(inner: Callable[[], Any]) -> None:
    """Of those, TorchRL's SerialEnv shows what their episodes began with, which was before this transform came."""

    class Crowd(rl().Transform):
        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            seen = tensordict_reset["observation"]
            return tensordict_reset.set("observation", seen + seen.sum(0, keepdim=True))

        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            return next_tensordict

    def make() -> Any:
        return rl().TransformedEnv(rl().SerialEnv(3, inner), rl().RewardScaling(0.0, 2.0))

    compare(make, lambda env, _: env.append_transform(Crowd()), after=False)


@pytest.mark.parametrize("make", STACKS)
@pytest.mark.parametrize("owner", ["RewardSum", "TransformedEnv", "GymWrapper"])
@pytest.mark.parametrize("disguised", [False, True])
def test_a_method_of_a_class_replaced(make: Any, owner: str, disguised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(rl(), owner)
    name = {"RewardSum": "_step", "TransformedEnv": "_step", "GymWrapper": "read_reward"}[owner]
    own = getattr(kind, name)

    def replaced(self: Any, *args: Any) -> Any:
        result = own(self, *args)
        if name == "read_reward":
            return result + 1000
        return result.set("reward", result["reward"] + 1000)

    replaced = functools.wraps(own)(replaced) if disguised else replaced

    def attack(env: Any, _: Any) -> None:
        monkeypatch.setattr(kind, name, replaced)

    CountingEnv.made = 0
    act = policy()
    ours, plans, error = run(make, "lowered", attack, act)
    monkeypatch.undo()
    theirs, _, expected = run(make, "plain", attack, act)
    assert error is expected is None
    assert [plan.startswith("lowered") for plan in plans] == [True, True, False, False]
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other)
    assert (ours[2]["next", "reward"] >= 1000).all()
    # and where it was replaced before the collector was made
    _, plans, _ = run(make, "lowered", None, act, num_batches=2)
    assert not any(plan.startswith("lowered") for plan in plans)


# -- what is done with the collector, and with the env beside it -------------------------------------------------------


def user_resets(env: Any, _: Any) -> None:
    env.reset()


def user_rolls_out(env: Any, _: Any) -> None:
    torch.manual_seed(0)
    env.rollout(15, break_when_any_done=False)


def user_steps(env: Any, _: Any) -> None:
    torch.manual_seed(0)
    env.rand_step(env.reset())


def resets(_: Any, collector: Any) -> None:
    collector.reset()


def resets_some(_: Any, collector: Any) -> None:
    if collector.env.batch_size:
        collector.reset([1])


def seeds(_: Any, collector: Any) -> None:
    collector.set_seed(11)


def user_seeds(env: Any, _: Any) -> None:
    env.set_seed(12)
    env.reset()


def saves_and_loads(_: Any, collector: Any) -> None:
    collector.load_state_dict(collector.state_dict())


def loads_env(env: Any, _: Any) -> None:
    env.load_state_dict(env.state_dict())


def change_and_reset_some(env: Any, collector: Any) -> None:
    double(env, collector)
    resets_some(env, collector)


def shorter_and_reset_some(env: Any, collector: Any) -> None:
    shorter(env, collector)
    resets_some(env, collector)


@pytest.mark.parametrize("make", STACKS)
@pytest.mark.parametrize(
    "attack",
    [
        user_resets,
        user_rolls_out,
        user_steps,
        resets,
        resets_some,
        seeds,
        user_seeds,
        saves_and_loads,
        loads_env,
        change_and_reset_some,
        shorter_and_reset_some,
    ],
)
def test_used_between_batches(make: Any, attack: Any) -> None:
    compare(make, attack, num_batches=5)


@pytest.mark.parametrize("make", [*STACKS, counting])
@pytest.mark.parametrize(
    "options",
    [
        {"max_frames_per_traj": 3},
        {"device": "cpu"},
        {"reset_at_each_iter": True},
        {"init_random_frames": 50},
        {"split_trajs": True},
        {"set_truncated": True},
        {"compact_obs": True},
        {"max_frames_per_traj": 4, "device": "cpu", "storing_device": "cpu"},
    ],
    ids=str,
)
def test_arguments_of_a_collector(make: Any, options: dict[str, Any]) -> None:
    lowered: bool | None = True
    if "max_frames_per_traj" in options and make is not counting:
        lowered = None  # a second counter of the same key
    compare(make, None, lowered=lowered, **options)


@pytest.mark.parametrize("make", STACKS)
def test_two_collectors_on_one_env(make: Any) -> None:
    def alternately(lower: bool) -> list[TensorDictBase]:
        CountingEnv.made = 0
        guest = make()
        act, frames = policy(), STEPS * guest.numel()
        first, second = (Collector(GuestEnv(guest, lower=lower), act, frames_per_batch=frames) for _ in range(2))
        first.set_seed(3)
        return [batch.clone() for pair in zip(range(3), first, second, strict=False) for batch in pair[1:]]

    for mine, other in zip(alternately(True), alternately(False), strict=True):
        assert_equal(mine, other)


# -- what envs and policies give ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [single, outside])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.int32])
def test_one_hot_actions_of_another_dtype(make: Any, dtype: torch.dtype) -> None:
    compare(make, act=policy(lambda action: action.to(dtype)), lowered=None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_categorical_actions_of_another_dtype(dtype: torch.dtype) -> None:
    def make() -> Any:
        return single(lambda: rl().GymWrapper(CountingEnv(9), categorical_action_encoding=True))

    compare(make, act=policy(lambda action: action.argmax(-1).to(dtype)), lowered=None)


KINDS = [
    "int rewards",
    "0-d rewards",
    "1-d rewards",
    "float32 rewards",
    "bool rewards",
    "no rewards",
    "huge rewards",
    "infinite rewards",
    "nan rewards",
    "tensor rewards",
    "list rewards",
    "NumPy flags",
    "float64",
    "int64",
    "at times float64",
    "lists",
    "tuples",
    "not contiguous",
    "tensors",
    "uint8 space",
]


class Odd(CountingEnv):
    """Gives what a Gymnasium env should not; or takes vectors."""

    def __init__(self, kind: str) -> None:
        super().__init__(9)
        self.kind = kind
        if kind == "box actions":
            self.action_space = spaces.Box(-1, 1, (3,), np.float32)
        if kind == "uint8 space":
            self.observation_space = spaces.Box(0, 255, (4,), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        observation, info = super().reset(seed=seed)
        return self._given(observation), info

    def step(self, action: Any) -> Any:
        self.seen = np.asarray(action)
        if self.kind == "box actions":
            action = float(np.asarray(action, np.float64) @ [0.1, 0.2, 0.3])
        observation, reward, terminated, truncated, info = super().step(action)
        if self.kind == "box actions":
            observation[3] = {"f": 1, "i": 2, "b": 3, "u": 4}[self.seen.dtype.kind] * 100 + self.seen.dtype.itemsize
        rewards = {
            "int rewards": int(reward) - 2,
            "0-d rewards": np.array(reward),
            "1-d rewards": np.array([reward]),
            "float32 rewards": np.float32(reward) / 3,
            "bool rewards": reward > 3,
            "no rewards": None,
            "huge rewards": 1e39,
            "infinite rewards": float("inf"),
            "nan rewards": float("nan"),
            "tensor rewards": torch.tensor(reward),
            "list rewards": [reward],
        }
        reward = rewards.get(self.kind, reward)
        if self.kind == "NumPy flags":
            terminated, truncated = np.bool_(terminated), np.bool_(truncated)
        return self._given(observation), reward, terminated, truncated, info

    def _given(self, observation: np.ndarray) -> Any:
        if self.kind == "float64":
            return observation.astype(np.float64) / 3
        if self.kind == "int64":
            return observation.astype(np.int64)
        if self.kind == "at times float64":
            return observation if self.step_count % 3 else observation.astype(np.float64) / 3
        if self.kind == "lists":
            return observation.tolist()
        if self.kind == "tuples":
            return tuple(observation.tolist())
        if self.kind == "not contiguous":
            return np.stack([observation, observation], 1)[:, 0]
        if self.kind == "tensors":
            return torch.from_numpy(observation)
        if self.kind == "uint8 space":
            return np.abs(observation)
        if self.kind == "another shape":
            return observation[:3]
        if self.kind == "one more dimension":
            return observation[None]
        return observation


@pytest.mark.parametrize(
    ("make", "kind"), [*((single, kind) for kind in KINDS), (outside, "float64"), (inside, "lists")]
)
def test_odd_envs(make: Any, kind: str) -> None:
    compare(lambda: make(lambda: rl().GymWrapper(Odd(kind))), lowered=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.float16])
@pytest.mark.parametrize("make", [single, outside])
def test_box_actions_of_another_dtype(make: Any, dtype: torch.dtype) -> None:
    act = policy(lambda action: (action * 3).to(dtype))
    compare(lambda: make(lambda: rl().GymWrapper(Odd("box actions"))), act=act, lowered=None)


@pytest.mark.parametrize("encode", [True, False])
def test_fast_encoding(encode: bool) -> None:
    def make() -> Any:
        wrapper = rl().GymWrapper(Odd("int rewards"))
        wrapper.fast_encoding(encode)
        return rl().TransformedEnv(wrapper, transforms())

    compare(make, lowered=None)


# -- what is not known is not lowered ----------------------------------------------------------------------------------


def test_subclasses_and_the_like_are_not_lowered() -> None:
    class Sum(rl().RewardSum):
        pass

    class Wrapper(rl().GymWrapper):
        pass

    for make in (
        lambda: rl().TransformedEnv(counting(), Sum()),
        lambda: single(lambda: Wrapper(CountingEnv(9))),
        lambda: rl().TransformedEnv(counting(), lambda data: data),
        lambda: type("TransformedEnv", (rl().TransformedEnv,), {"__module__": "torchrl.envs.transforms._base"})(
            counting(), transforms()
        ),
    ):
        compare(make, lowered=False)


def test_specs_of_the_user() -> None:
    from torchrl.data import Composite, Unbounded

    def make() -> Any:
        env = counting()
        env.observation_spec = Composite(observation=Unbounded((4,), dtype=torch.float64))
        return rl().TransformedEnv(env, transforms())

    compare(make, lowered=None)


# -- in workers --------------------------------------------------------------------------------------------------------


def seeded(make: Callable[[], Any], lower: bool, first: int) -> Any:
    CountingEnv.made = first
    return GuestEnv(make(), lower=lower)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_in_workers(kind: Any, num_workers: int) -> None:
    def collect(lower: bool) -> list[TensorDictBase]:
        makers = [functools.partial(seeded, single, lower, number) for number in range(2)]
        collector = kind(makers, policy(), frames_per_batch=60, total_frames=240, num_workers=num_workers)
        collector.set_seed(5)
        return [batch.clone() for batch in collector]

    def sorted_rows(batches: list[TensorDictBase]) -> list[list[float]]:
        rows = []
        for batch in batches:
            flat = batch.reshape(-1)
            keys = ["observation", "action", "step_count", "episode_reward", "is_init", "done"]
            keys += [("next", key) for key in (*keys[:1], *keys[2:], "reward", "terminated", "truncated")]
            columns = [flat[key].to(torch.float64).reshape(len(flat), -1) for key in keys]
            rows += torch.cat(columns, 1).tolist()
        return sorted(rows)

    ours, theirs = collect(True), collect(False)
    if kind is MultiSyncCollector:
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine.exclude(("collector", "traj_ids")), other.exclude(("collector", "traj_ids")))
    elif kind is AsyncBatchedCollector:  # which env comes first differs from run to run: each one's own frames do not
        for number in range(2):
            mine, other = (torch.cat([b[b["env_index"].reshape(-1) == number] for b in bs]) for bs in (ours, theirs))
            length = min(len(mine), len(other))
            ids = ("env_index", "policy_version", "collector", ("next", "policy_version"))
            assert_equal(mine[:length].exclude(*ids), other[:length].exclude(*ids))
    else:
        assert sorted_rows(ours) == sorted_rows(theirs)


@pytest.mark.parametrize("changed", [False, True])
def test_in_a_parallel_env(changed: bool) -> None:
    def collect(lower: bool) -> list[TensorDictBase]:
        makers = [functools.partial(seeded, single, lower, number) for number in range(2)]
        batches = []
        with ParallelEnv(2, makers) as env:
            collector = Collector(env, policy(), frames_per_batch=60)
            collector.set_seed(5)
            for number, batch in enumerate(collector):
                batches.append(batch.clone())
                if number == 3:
                    break
                if number == 1 and changed:
                    env.set_missing_tolerance(True)  # with which nothing is lowered
        return batches

    for mine, other in zip(collect(True), collect(False), strict=True):
        assert_equal(mine, other)
