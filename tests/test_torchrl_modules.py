"""TorchRL's transforms, batched envs and policies as guests: same data as from its own collector.

Whatever is known as a whole is stepped in both ways, on rows and as it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from guest_ways import assert_way, both_ways, in_this_way
from seeded_cartpole import cartpole, seeded
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import GymEnv as OwnGymEnv
from swath.errors import PolicyError
from test_torchrl_envs import assert_same

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.processes,
]


def envs() -> Any:
    import torchrl.envs

    return torchrl.envs


def modules() -> Any:
    import torchrl.modules

    return torchrl.modules


@pytest.fixture(scope="module", autouse=True)
def what_torchrl_keeps_open() -> None:
    """Descriptors of torch's own processes, opened when the first tensor is shared."""
    env = envs().ParallelEnv(2, cartpole)
    env.reset()
    env.close()


def transformed(*names_and_arguments: tuple[str, dict[str, Any]], env: str = "CartPole-v1") -> Callable[[], Any]:
    def make() -> Any:
        transforms = [getattr(envs(), name)(**arguments) for name, arguments in names_and_arguments]
        return seeded(envs().TransformedEnv(envs().GymEnv(env), envs().Compose(*transforms)))

    return make


def fixed_policy(in_key: str = "observation", num_inputs: int = 4, num_actions: int = 2) -> TensorDictModule:
    """Sways by the sign of what it sees, so that episodes end."""
    torch.manual_seed(0)
    network = nn.Linear(num_inputs, num_actions)
    return TensorDictModule(lambda x: one_hot(network(x)), in_keys=[in_key], out_keys=["action"])


def one_hot(scores: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])


def run(
    kind: Any, make: Any, policy: Any, *, frames: int = 60, batches: int = 3, lower: bool | None = None, **kwargs: Any
) -> list[Any]:
    """Envs seed themselves: a seed that TorchRL's collector is given takes effect after the first episode only.

    ``lower``: whether the env must be lowered, or may not; None: whatever comes.
    """
    if lower is not None:
        make = [in_this_way(each, lower) for each in make] if isinstance(make, list) else in_this_way(make, lower)
    collector = kind(make, policy, frames_per_batch=frames, total_frames=frames * batches, **kwargs)
    result = [batch.clone() for batch in collector]
    if lower is not None:
        assert_way(collector, lower)
    collector.shutdown()
    return result


def torchrl_collector() -> Any:
    import torchrl.collectors

    return torchrl.collectors.Collector


TRANSFORMS = {
    "StepCounter": [("StepCounter", {})],
    "StepCounter with limit": [("StepCounter", {"max_steps": 7})],
    "RewardSum": [("RewardSum", {})],
    "InitTracker": [("InitTracker", {})],
    "ObservationNorm": [("ObservationNorm", {"loc": 0.5, "scale": 2.0, "in_keys": ["observation"]})],
    "VecNorm": [("VecNorm", {"in_keys": ["observation"]})],
    "CatFrames": [("CatFrames", {"N": 3, "dim": -1, "in_keys": ["observation"], "out_keys": ["frames"]})],
    "RewardScaling": [("RewardScaling", {"loc": 1.0, "scale": 0.1})],
    "DoubleToFloat": [("DoubleToFloat", {})],
    "several": [
        ("InitTracker", {}),
        ("StepCounter", {"max_steps": 9}),
        ("RewardSum", {}),
        ("ObservationNorm", {"loc": 0.0, "scale": 3.0, "in_keys": ["observation"], "out_keys": ["normalised"]}),
    ],
}


@both_ways
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, lower: bool) -> None:
    make = transformed(*TRANSFORMS[name])
    theirs = run(torchrl_collector(), make, fixed_policy())
    for ours, expected in zip(run(Collector, make, fixed_policy(), lower=lower), theirs, strict=True):
        assert_same(ours, expected)


@both_ways
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_transforms_in_workers(kind: Any, lower: bool) -> None:
    make = transformed(*TRANSFORMS["several"])
    (ours, *_) = run(kind, [make], fixed_policy(), lower=lower)
    (theirs, *_) = run(torchrl_collector(), make, fixed_policy())
    assert_same(ours[0] if kind is MultiSyncCollector else ours, theirs)


@both_ways
def test_frame_limit_is_torchrls_own(lower: bool) -> None:
    make = transformed(("RewardSum", {}))
    theirs = run(torchrl_collector(), make, fixed_policy(), max_frames_per_traj=6)
    found = run(Collector, make, fixed_policy(), max_frames_per_traj=6, lower=lower)
    for ours, expected in zip(found, theirs, strict=True):
        assert_same(ours, expected)
        assert int(ours["next", "step_count"].max()) == 6


@both_ways
@pytest.mark.parametrize("name", ["SerialEnv", "ParallelEnv"])
def test_its_batched_envs(name: str, lower: bool) -> None:
    def make() -> Any:
        return getattr(envs(), name)(2, cartpole)

    ours = run(Collector, in_this_way(make, lower), fixed_policy(), frames=80)
    theirs = run(torchrl_collector(), make, fixed_policy(), frames=80)
    for own, expected in zip(ours, theirs, strict=True):
        assert own.shape == (2, 40)
        assert_same(own, expected)


@both_ways
def test_reset_of_one_env(lower: bool) -> None:
    make = in_this_way(lambda: envs().SerialEnv(2, transformed(("StepCounter", {}))), lower)
    collector = Collector(make, fixed_policy(), frames_per_batch=8)
    next(iter(collector))
    collector.reset([1])
    batch = next(iter(collector))
    assert batch["step_count"][:, 0].reshape(-1).tolist() == [4, 0]
    assert_way(collector, lower)
    collector.shutdown()


# -- policies ----------------------------------------------------------------------------------------------------------


def probabilistic_actor() -> Any:
    torch.manual_seed(0)
    return modules().ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=modules().OneHotCategorical,
        return_log_prob=True,
    )


def q_value_actor() -> Any:
    torch.manual_seed(0)
    spec = envs().GymEnv("CartPole-v1").action_spec
    return modules().QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=spec)


def actor_value_operator() -> Any:
    torch.manual_seed(0)
    hidden = TensorDictModule(nn.Linear(4, 8), in_keys=["observation"], out_keys=["hidden"])
    actor = modules().ProbabilisticActor(
        TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=modules().OneHotCategorical,
    )
    value = modules().ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    return modules().ActorValueOperator(hidden, actor, value)


def e_greedy() -> Any:
    spec = envs().GymEnv("CartPole-v1").action_spec
    return TensorDictSequential(q_value_actor(), modules().EGreedyModule(spec, eps_init=0.0, eps_end=0.0))


@both_ways
@pytest.mark.parametrize("make_policy", [probabilistic_actor, q_value_actor, actor_value_operator, e_greedy])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, AsyncBatchedCollector])
def test_policies(make_policy: Callable[[], Any], kind: Any, lower: bool) -> None:
    """Deterministically, its own collector's data; also in swath's own envs."""
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    exploration = {"exploration_type": ExplorationType.DETERMINISTIC}
    make = transformed(("InitTracker", {}))
    (theirs, *_) = run(torchrl_collector(), make, make_policy(), **exploration)
    (ours, *_) = run(kind, make if kind is Collector else [make], make_policy(), lower=lower, **exploration)
    ours = ours[0] if kind is MultiSyncCollector else ours
    assert_same(ours.exclude("env_index", "policy_version", ("next", "policy_version")), theirs)
    if not lower:
        return
    with set_exploration_type(ExplorationType.RANDOM):
        (own, *_) = run(kind, [lambda: OwnGymEnv("CartPole-v1")], make_policy())
    assert set(own.keys(True, True)) >= set(theirs.exclude("is_init", ("next", "is_init")).keys(True, True))


@both_ways
@pytest.mark.parametrize("name", ["LSTMModule", "GRUModule"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_recurrent_modules_with_their_primers(name: str, kind: Any, lower: bool) -> None:
    torch.manual_seed(0)
    recurrent = getattr(modules(), name)(4, 8, in_key="observation", out_key="features")
    policy = TensorDictSequential(
        [recurrent, TensorDictModule(lambda x: one_hot(x[..., :2]), in_keys=["features"], out_keys=["action"])]
    )

    def make() -> Any:
        env = envs().TransformedEnv(cartpole(), envs().InitTracker())
        return env.append_transform(recurrent.make_tensordict_primer())

    theirs = run(torchrl_collector(), make, policy)
    given = in_this_way(make, lower)
    ours = run(kind, given if kind is Collector else [given], policy)
    for own, expected in zip(ours, theirs, strict=True):
        assert_same(own[0] if kind is MultiSyncCollector else own, expected)
    assert any("recurrent" in str(key) for key in ours[0].keys(True, True))


def test_primers_are_refused_where_they_cannot_work() -> None:
    recurrent = modules().GRUModule(4, 2, in_key="observation", out_key="action")
    make = lambda: envs().TransformedEnv(  # noqa: E731
        envs().GymEnv("CartPole-v1"), envs().Compose(envs().InitTracker(), recurrent.make_tensordict_primer())
    )
    with pytest.raises(PolicyError, match="Leave the env's primer out"):
        AsyncBatchedCollector([make], recurrent, frames_per_batch=10)


def pendulum_actor() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def pendulum() -> Any:
    return seeded(envs().TransformedEnv(envs().GymEnv("Pendulum-v1"), envs().InitTracker()))


def test_ornstein_uhlenbeck_noise_goes_on_from_step_to_step() -> None:
    spec = pendulum().action_spec
    noise = modules().OrnsteinUhlenbeckProcessModule(spec, eps_init=1.0, eps_end=1.0, theta=0.0, sigma=0.0, mu=0.0)
    noise.ou.x0 = 0.3  # without drift and randomness it stays where it begins, if its state is kept
    policy = TensorDictSequential([pendulum_actor(), noise])
    (ours, *_) = run(Collector, pendulum, policy)
    steps: list[int] = []
    add = noise.ou.add_sample

    def watched(tensordict: Any, *args: Any, **kwargs: Any) -> Any:
        result = add(tensordict, *args, **kwargs)
        steps.append(int(result["_ou_steps"].reshape(-1)[0]))
        return result

    noise.ou.add_sample = watched
    (ours, *_) = run(Collector, pendulum, policy, frames=250, batches=1)
    counted = steps[-250:]  # one call was made to learn what the policy writes
    assert counted[:3] == [1, 2, 3]
    assert counted[199:202] == [200, 1, 2]  # the episode ends after 200 steps
    assert not any(key.startswith("_") for key in ours.keys())  # noqa: SIM118
    with pytest.raises(PolicyError, match="from call to call"):
        AsyncBatchedCollector([pendulum], policy, frames_per_batch=10)


def test_additive_gaussian_learns_its_spec_from_the_env() -> None:
    noise = modules().AdditiveGaussianModule(None, sigma_init=0.5, sigma_end=0.5)
    policy = TensorDictSequential([pendulum_actor(), noise])
    (ours, *_) = run(Collector, pendulum, policy)
    assert float(ours["action"].abs().max()) <= 2.0
    (again, *_) = run(Collector, pendulum, policy)
    assert not torch.equal(ours["action"], again["action"])  # which is noisy


def test_step_counts_reach_the_workers() -> None:
    """``EGreedyModule.step()`` changes a buffer, which goes with the weights."""
    spec = envs().GymEnv("CartPole-v1").action_spec
    greedy = modules().EGreedyModule(spec, eps_init=1.0, eps_end=0.0, annealing_num_steps=10)
    torch.manual_seed(0)
    always_left = TensorDictModule(
        lambda x: one_hot(torch.stack([x[..., 0] * 0 + 1, x[..., 0] * 0], -1)),
        in_keys=["observation"],
        out_keys=["action"],
    )
    policy = TensorDictSequential([always_left, greedy])
    collector = MultiSyncCollector([lambda: envs().GymEnv("CartPole-v1")] * 2, policy, frames_per_batch=100)
    stream = iter(collector)
    assert bool(next(stream)["action"][..., 1].any())
    greedy.step(10)
    collector.update_policy_weights_()
    assert not bool(next(stream)["action"][..., 1].any())
    collector.shutdown()


def test_a_primer_keeps_its_value_while_actions_are_random() -> None:
    from torchrl.data import Unbounded

    def make() -> Any:
        primer = envs().TensorDictPrimer(h=Unbounded(shape=(1,)), default_value=3.0)
        return seeded(envs().TransformedEnv(envs().GymEnv("CartPole-v1"), envs().Compose(envs().InitTracker(), primer)))

    def policy(tensordict: Any) -> Any:
        tensordict["next", "h"] = tensordict["h"] + 1
        return tensordict.set("action", one_hot(torch.tensor([1.0, 0.0])))

    (batch,) = run(Collector, make, policy, frames=12, batches=1, init_random_frames=4)
    state = batch["h"].reshape(-1).tolist()
    assert state[:5] == [3.0] * 5
    is_new = batch["is_init"].reshape(-1).tolist()
    for t in range(5, 12):
        assert state[t] == (3.0 if is_new[t] else state[t - 1] + 1)


@pytest.mark.parametrize("name", ["VecNorm", "VecNormV2"])
def test_a_saved_state_stays_as_it_was(name: str) -> None:
    collector = Collector(transformed((name, {"in_keys": ["observation"]}))(), fixed_policy(), frames_per_batch=20)
    next(iter(collector))
    state = collector.state_dict()["env_state_dict"]
    before = {key: value.clone() for key, value in leaves(state).items()}
    assert before
    next(iter(collector))
    assert all(torch.equal(before[key], value) for key, value in leaves(state).items())
    assert any(
        not torch.equal(before[key], value) for key, value in leaves(collector.state_dict()["env_state_dict"]).items()
    )
    collector.shutdown()


def leaves(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    if hasattr(tree, "items"):
        return {k: v for name, value in tree.items() for k, v in leaves(value, f"{path}.{name}").items()}
    return {}


def test_its_random_policy() -> None:
    env = envs().GymEnv("CartPole-v1")
    (ours, *_) = run(
        Collector, env, modules().RandomPolicy(env.action_spec) if hasattr(modules(), "RandomPolicy") else None
    )
    assert bool((ours["action"].sum(-1) == 1).all())
    assert bool(ours["action"][:, 0].any())
    assert bool(ours["action"][:, 1].any())


def test_one_import_changes() -> None:
    """A script of TorchRL's own objects; only where its collectors come from differs."""
    results = []
    for collectors in ("torchrl.collectors", "swath.collectors"):
        namespace: dict[str, Any] = {}
        script = f"""
import torch
from torch import nn
from tensordict.nn import TensorDictModule
from {collectors} import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor

torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))
env.set_seed(0)
policy = ProbabilisticActor(
    TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
    in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True,
)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
collector = Collector(env, policy, frames_per_batch=100, total_frames=300, exploration_type=ExplorationType.MODE)
frames = 0
batches = []
for data in collector:
    buffer.extend(data.reshape(-1))
    sample = buffer.sample()
    frames += data.numel()
    batches.append(data.clone())
    collector.update_policy_weights_()
collector.shutdown()
"""
        exec(script, namespace)
        results.append((namespace["frames"], namespace["batches"]))
    assert results[0][0] == results[1][0] == 300
    for theirs, ours in zip(results[0][1], results[1][1], strict=True):
        assert_same(ours, theirs)
