"""TorchRL's transforms of values, shapes and keys, lowered: the same data as TorchRL's own, and ours alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

import swath.envs as ours
from counting import CountingEnv
from swath.collectors import Collector
from swath.envs import GuestEnv
from transform_envs import FloatsEnv

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
FORMS = ("one", "transformed serial", "serial of transformed")
Stack = Callable[[Any], list[Any]]


def theirs() -> Any:
    import torchrl.envs

    return torchrl.envs


def make_floats() -> FloatsEnv:
    return FloatsEnv()


def make_floats32() -> FloatsEnv:
    return FloatsEnv(action_dtype=np.float32)


def make_counting() -> CountingEnv:
    return CountingEnv(longest=5)


def build(library: Any, make: Callable[[], Any], stack: Stack, form: str) -> Any:
    def base() -> Any:
        return library.GymWrapper(make())

    def transformed(env: Any) -> Any:
        return library.TransformedEnv(env, library.Compose(*stack(library)))

    if form == "one":
        return transformed(base())
    if form == "transformed serial":
        return transformed(library.SerialEnv(3, base))
    return library.SerialEnv(3, lambda: transformed(base()))


class Actor(torch.nn.Module):
    """Actions of its own stream of random numbers, a little out of bounds, in the dtype that is asked for."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.draw = torch.Generator().manual_seed(5)

    def forward(self, done: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(self.shape, generator=self.draw) * 2
        if self.dtype.is_floating_point:
            return drawn.to(self.dtype)
        return torch.nn.functional.one_hot(drawn.argmax(-1), self.shape[-1]).to(self.dtype)


def policy(env: Any) -> TensorDictModule:
    (key,) = env.action_keys
    spec = env.full_action_spec[key]
    return TensorDictModule(Actor(spec.shape, spec.dtype), in_keys=["done"], out_keys=[key])


def seed(env: Any) -> None:
    """The same randomness in each library; TorchRL's ``set_seed`` takes a reset more than ours."""
    for number, each in enumerate(gym_envs(env)):
        each.np_random = np.random.default_rng(number)
        each.episode = 0


def gym_envs(env: Any) -> list[Any]:
    """Those that are stepped, of whatever is around them."""
    env = env.guest if isinstance(env, GuestEnv) else env
    if isinstance(env, ours.TransformedEnv):
        return gym_envs(env.base_env)
    if isinstance(env, ours.EnvBase):
        children = env.__dict__.get("gym_envs")
        return children if children is not None else [own for child in env.children for own in gym_envs(child)]
    if isinstance(env, theirs().TransformedEnv):
        return gym_envs(env.base_env)
    if isinstance(env, theirs().SerialEnv):
        if env.is_closed:
            env.start()
        return [own for child in env._envs for own in gym_envs(child)]
    return [env._env]


def data_of(env: Any, num_batches: int = 3) -> tuple[list[Any], str]:
    torch.manual_seed(3)
    seed(env)
    num_envs = max(1, env.batch_size.numel())
    with Collector(env, policy(env), frames_per_batch=20 * num_envs, total_frames=-1) as collector:
        batches = [collector.next().clone() for _ in range(num_batches)]
        return batches, collector.env.plan()


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    for mine, other in zip(got, expected, strict=True):
        assert mine.batch_size == other.batch_size
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            one, two = mine.get(key), other.get(key)
            assert one.dtype == two.dtype, (key, one.dtype, two.dtype)
            assert one.shape == two.shape, (key, one.shape, two.shape)
            assert torch.equal(one.nan_to_num(), two.nan_to_num()), key


def check(make: Callable[[], Any], stack: Stack, form: str, *, ours_too: bool = True) -> list[Any]:
    """Lowered, as a guest, and with transforms of ours."""
    lowered, plan = data_of(build(theirs(), make, stack, form))
    assert plan.startswith("lowered"), plan
    expected, plan = data_of(GuestEnv(build(theirs(), make, stack, form), lower=False))
    assert plan.startswith("stepped as it is")
    assert sum(int(batch["next", "done"].sum()) for batch in expected) > 3, "no episode has ended"
    assert_equal(lowered, expected)
    if ours_too:
        own, _ = data_of(build(ours, make, stack, form))
        assert_equal(own, expected)
    return expected


FLOATS: dict[str, Stack] = {
    "DoubleToFloat": lambda e: [e.DoubleToFloat()],
    "DoubleToFloat of some": lambda e: [e.DoubleToFloat(in_keys=["position"], out_keys=["small"])],
    "DoubleToFloat of actions": lambda e: [e.DoubleToFloat(in_keys=["velocity"], in_keys_inv=["action"])],
    "DTypeCast": lambda e: [e.DTypeCastTransform(torch.uint8, torch.float32)],
    "DTypeCast of rewards": lambda e: [e.DTypeCastTransform(torch.float32, torch.float64)],
    "DTypeCast to integers": lambda e: [
        e.ObservationNorm(0.0, 1e12, in_keys=["position"]),
        e.DTypeCastTransform(torch.float64, torch.int32, ["position"]),
        e.DTypeCastTransform(torch.float32, torch.float16, ["speed"]),
    ],
    "CatTensors": lambda e: [e.CatTensors(["velocity", "position"], "observation")],
    "CatTensors, kept": lambda e: [e.CatTensors(["velocity", "position"], "both", del_keys=False, sort=False)],
    "CatTensors, itself": lambda e: [e.CatTensors(["velocity", "position"], "position")],
    "CatTensors, images": lambda e: [
        e.RenameTransform(["image"], ["another"], create_copy=True),
        e.CatTensors(["image", "another"], "images", dim=-3),
    ],
    "ObservationNorm": lambda e: [e.ObservationNorm(0.3, 1.7, in_keys=["position", "speed"], out_keys=["p", "speed"])],
    "ObservationNorm, standard": lambda e: [
        e.ObservationNorm(torch.tensor([0.1, 0.2, 0.3]), torch.rand(3) + 1, in_keys=["position"], standard_normal=True)
    ],
    "ObservationNorm, float64": lambda e: [
        e.ObservationNorm(torch.rand(3).double(), torch.rand(3).double(), in_keys=["position"])
    ],
    "ObservationNorm of actions": lambda e: [e.ObservationNorm(0.3, 1.7, ["velocity"], in_keys_inv=["action"])],
    "ObservationNorm, by zero": lambda e: [
        e.ObservationNorm(0.0, torch.zeros(()), in_keys=["position"], standard_normal=True)
    ],
    "RewardScaling": lambda e: [e.RewardScaling(0.5, 0.1), e.RewardSum()],
    "RewardScaling, standard": lambda e: [e.RewardScaling(1, 3, standard_normal=True)],
    "RewardScaling, elsewhere": lambda e: [e.RewardScaling(1.0, 3.0, ["reward"], ["scaled"])],
    "RewardClipping": lambda e: [e.RewardSum(), e.RewardClipping(-1, 0.5)],
    "ClipTransform": lambda e: [e.ClipTransform(["position", "reward"], low=-0.5, high=0.7)],
    "ClipTransform, one end": lambda e: [
        e.ClipTransform(["position"], ["p"], low=-0.5),
        e.ClipTransform(["speed"], high=0.25),
    ],
    "ClipTransform of actions": lambda e: [e.ClipTransform(in_keys_inv=["action"], low=-0.5, high=0.7)],
    "SignTransform": lambda e: [e.SignTransform(["position", "reward"]), e.SignTransform(in_keys_inv=["action"])],
    "Unsqueeze, Squeeze": lambda e: [
        e.UnsqueezeTransform(-1, in_keys=["position", "reward"], out_keys=["p", "reward"]),
        e.UnsqueezeTransform(1, allow_positive_dim=True, in_keys=["image"]),
        e.SqueezeTransform(-1, in_keys=["speed", "velocity"]),
    ],
    "Unsqueeze of actions": lambda e: [e.UnsqueezeTransform(-2, in_keys=["speed"], in_keys_inv=["action"])],
    "Flatten, Permute": lambda e: [
        e.PermuteTransform((-1, -3, -2), in_keys=["image"]),
        e.FlattenObservation(-2, -1, in_keys=["image"], out_keys=["flat"]),
        e.FlattenObservation(0, 2, in_keys=["image"], allow_positive_dim=True),
    ],
    "Exclude": lambda e: [e.ExcludeTransform("image", "speed")],
    "Exclude rewards": lambda e: [e.RewardSum(), e.ExcludeTransform("reward")],
    "Select": lambda e: [e.SelectTransform("position", "velocity")],
    "Rename": lambda e: [
        e.RenameTransform(["position", "reward"], ["place", "gain"]),
        e.RenameTransform(["velocity"], [("a", "b")], create_copy=True),
    ],
    "Rename actions": lambda e: [e.RenameTransform([], [], ["action"], ["act"])],
    "ActionScaling": lambda e: [e.ActionScaling()],
    "ActionScaling, from 0": lambda e: [e.ActionScaling(standard_normal=False)],
    "ActionScaling, given": lambda e: [e.ActionScaling(loc=torch.tensor([0.5, 1.0]).double(), scale=2.0)],
    "many": lambda e: [
        e.DoubleToFloat(),
        e.ObservationNorm(torch.rand(3), torch.rand(3) + 0.5, in_keys=["position"], standard_normal=True),
        e.ClipTransform(["position"], low=-1, high=1),
        e.RewardScaling(0.0, 0.01),
        e.CatTensors(["position", "velocity", "speed"], "observation"),
        e.PermuteTransform((-1, -3, -2), in_keys=["image"]),
        e.RewardSum(),
        e.StepCounter(4),
        e.InitTracker(),
        e.ExcludeTransform("image"),
        e.ActionScaling(),
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FLOATS)
def test_the_data_are_torchrls(name: str, form: str) -> None:
    check(make_floats, seeded(FLOATS[name]), form)


def seeded(stack: Stack) -> Stack:
    def same(library: Any) -> list[Any]:
        torch.manual_seed(11)
        return stack(library)

    return same


@pytest.mark.parametrize("form", ["one", "transformed serial"])
def test_found_keys_and_projected_actions(form: str) -> None:
    stack: Stack = lambda e: [  # noqa: E731
        e.DiscreteActionProjection(3, 7),
        e.DoubleToFloat(),
        e.ObservationNorm(0.1, 3.0, in_keys=["observation"]),
    ]
    check(make_counting, stack, form)


@pytest.mark.parametrize("form", ["one", "serial of transformed"])
def test_vectors_are_found(form: str) -> None:
    check(make_floats, lambda e: [e.DoubleToFloat(), e.CatTensors()], form)


def test_float32_actions_are_scaled_and_clipped_as_torchrl_does() -> None:
    for form in FORMS:
        check(
            make_floats32, lambda e: [e.ActionScaling(), e.ClipTransform(in_keys_inv=["action"], low=-1, high=1)], form
        )


@pytest.mark.parametrize("form", FORMS)
def test_the_users_tensors_are_read(form: str) -> None:
    """Changed in place, or exchanged, between two batches; of one env only."""

    def collect(lower: bool) -> list[Any]:
        guest = build(theirs(), make_floats, lambda e: [e.ObservationNorm(0.0, 1.0, in_keys=["position"])], form)
        batches = []
        env = GuestEnv(guest, lower=lower)
        seed(env)
        with Collector(env, policy(env), frames_per_batch=30, total_frames=-1) as collector:
            batches.append(collector.next().clone())
            assert collector.env.plan().startswith("lowered") == lower
            norm = (guest._envs[1] if form == FORMS[2] else guest).transform[0]
            norm.loc.fill_(2.5)
            batches.append(collector.next().clone())
            norm.scale = torch.full((3,), 0.25)
            batches.append(collector.next().clone())
            norm.standard_normal.fill_(True)
            batches.append(collector.next().clone())
        return batches

    assert_equal(collect(True), collect(False))


def test_init_stats_finds_what_torchrl_finds() -> None:
    found = []
    for library in (theirs(), ours):
        for serial in (False, True):
            base = library.SerialEnv(2, lambda library=library: library.GymWrapper(make_counting()))
            base = base if serial else library.GymWrapper(make_counting())
            env = library.TransformedEnv(
                base,
                library.Compose(
                    library.ExcludeTransform("reward"),
                    library.RenameTransform(["observation"], ["seen"]),
                    library.ObservationNorm(in_keys=["seen"], standard_normal=serial),
                ),
            )
            seed(env)
            torch.manual_seed(0)
            norm = env.transform[2]
            dims = {"reduce_dim": (0, 1), "cat_dim": 1, "keep_dims": (0,)} if serial else {}
            norm.init_stats(50, **dims)
            # Episode, step and noise do not depend on the actions, of which each library has its own.
            found.append((norm.loc[..., [0, 1, 3]], norm.scale[..., [0, 1, 3]]))
            assert env.rollout(3)["seen"].shape[-1] == 4
    half = len(found) // 2
    for mine, other in zip(found[half:], found[:half], strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


def not_lowered(stack: Stack, form: str = "one", make: Callable[[], Any] = make_floats) -> str:
    """The same data all the same; the reason."""
    got, plan = data_of(build(theirs(), make, stack, form), 1)
    assert plan.startswith("stepped as it is"), plan
    assert_equal(got, data_of(GuestEnv(build(theirs(), make, stack, form), lower=False), 1)[0])
    return plan


def test_what_is_not_sure_to_be_the_same_stays_a_guest() -> None:
    clipped_sum: Stack = lambda e: [e.RewardSum(), e.ClipTransform(["episode_reward"], low=-1, high=1)]  # noqa: E731
    assert "ClipTransform changes 'episode_reward', with which RewardSum goes on" in not_lowered(clipped_sum)
    assert "leaves flags out" in not_lowered(
        lambda e: [e.SelectTransform("position", "done", "terminated", keep_dones=False)]
    )
    assert "which flags there are" in not_lowered(lambda e: [e.ExcludeTransform("truncated")])
    assert "from the front" in not_lowered(lambda e: [e.CatTensors(["position", "velocity"], "both", dim=0)])


def draw_stack(number: int) -> Stack:
    """Some transforms in any order, many of which do not fit together."""
    draw = np.random.default_rng(number)

    def key() -> str:
        return str(draw.choice(["position", "velocity", "speed", "reward", "small", "episode_reward", "step_count"]))

    def tensor() -> torch.Tensor:
        dtype = [torch.float32, torch.float64][draw.integers(2)]
        shape = [(), (1,), (3,)][draw.integers(3)]
        return torch.from_numpy(np.asarray(draw.normal(size=shape) + 2.0)).to(dtype)

    makers: list[Callable[[], tuple[str, tuple, dict]]] = [
        lambda: ("DoubleToFloat", (), {}),
        lambda: ("DoubleToFloat", ([key()],), {}),
        lambda: ("DTypeCastTransform", (torch.float32, torch.float64), {}),
        lambda: ("ObservationNorm", (tensor(), tensor(), [key()]), {"standard_normal": bool(draw.integers(2))}),
        lambda: ("ObservationNorm", (0.5, 2.0, [key()], ["small"]), {}),
        lambda: ("RewardScaling", (tensor(), tensor()), {"standard_normal": bool(draw.integers(2))}),
        lambda: ("RewardClipping", (-1, 1.0), {}),
        lambda: ("ClipTransform", ([key()],), {"low": -0.5, "high": 1}),
        lambda: ("ClipTransform", (), {"in_keys_inv": ["action"], "low": -0.5, "high": 1}),
        lambda: ("SignTransform", ([key()],), {}),
        lambda: ("UnsqueezeTransform", (-1,), {"in_keys": [key()]}),
        lambda: ("SqueezeTransform", (-1,), {"in_keys": [key()]}),
        lambda: ("UnsqueezeTransform", (-1,), {"in_keys_inv": ["action"]}),
        lambda: ("FlattenObservation", (-2, -1, ["image"]), {}),
        lambda: ("PermuteTransform", ((-2, -1, -3), ["image"]), {}),
        lambda: ("CatTensors", ([key(), key()], "small"), {"del_keys": bool(draw.integers(2))}),
        lambda: ("ExcludeTransform", (key(),), {}),
        lambda: ("SelectTransform", ("position", key(), key()), {}),
        lambda: ("RenameTransform", ([key()], ["small"]), {"create_copy": bool(draw.integers(2))}),
        lambda: ("ActionScaling", (), {"standard_normal": bool(draw.integers(2))}),
        lambda: ("RewardSum", (), {}),
        lambda: ("StepCounter", (3,), {}),
        lambda: ("InitTracker", (), {}),
    ]
    chosen = [makers[index]() for index in draw.permutation(len(makers))[: draw.integers(2, 7)]]
    return lambda e: [getattr(e, name)(*args, **kwargs) for name, args, kwargs in chosen]


@pytest.mark.parametrize("number", range(12))
def test_any_stack_gives_torchrls_data(number: int) -> None:
    """Lowered or not; one that TorchRL refuses is not tried. Not each draw can be lowered."""
    check_any_stack(number)


def check_any_stack(number: int) -> str:
    stack, form = draw_stack(number), FORMS[number % 3]
    try:
        expected, _ = data_of(GuestEnv(build(theirs(), make_floats, stack, form), lower=False), 2)
    except Exception as error:
        return f"refused: {error}"
    got, plan = data_of(build(theirs(), make_floats, stack, form), 2)
    assert_equal(got, expected)
    return plan
