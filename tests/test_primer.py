"""TensorDictPrimer on envs of ours; beside TorchRL's: ``test_lowering_primer.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from counting import make_counting
from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from swath.envs import (
    Bounded,
    Categorical,
    ClipTransform,
    Compose,
    Composite,
    ParallelEnv,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    Unbounded,
)
from swath.errors import PolicyError
from swath.testing import check_transform

ONE = Unbounded((2,))


def primed(**kwargs: Any) -> TransformedEnv:
    return TransformedEnv(make_counting(), Compose(StepCounter(9), TensorDictPrimer(memory=ONE, **kwargs)))


FORMS: dict[str, Callable[..., Any]] = {
    "one": primed,
    "several": lambda **kwargs: SerialEnv(3, lambda: primed(**kwargs)),
    "over several": lambda **kwargs: TransformedEnv(
        SerialEnv(3, make_counting),
        Compose(StepCounter(9), TensorDictPrimer(memory=ONE, expand_specs=True, **kwargs)),
    ),
    "twice": lambda **kwargs: TransformedEnv(primed(**kwargs), RewardSum()),
    "twice several": lambda **kwargs: TransformedEnv(SerialEnv(3, lambda: primed(**kwargs)), RewardSum()),
}


class Net(torch.nn.Module):
    """Counts in its memory the steps of an episode."""

    def forward(self, observation: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = torch.nn.functional.one_hot(memory[..., 0].long() % 3, 3)
        return action, memory + 1


def recurrent() -> TensorDictModule:
    return TensorDictModule(Net(), in_keys=["observation", "memory"], out_keys=["action", ("next", "memory")])


def check_memory(batch: Any, start: float, steps: bool = True) -> None:
    for data in (batch, batch["next"]):
        assert torch.equal(data["memory"], (start + steps * data["step_count"]).expand_as(data["memory"]))


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_what_a_policy_writes_goes_on(make: Callable[..., Any]) -> None:
    """From the start value on, over batches, at an episode's end, after a reset of some."""
    env = make(default_value=5.0)
    frames = 20 * env.batch_size.numel()
    with Collector(env, recurrent(), frames_per_batch=frames, total_frames=-1) as collector:
        stream = iter(collector)
        ends = 0
        for _ in range(4):
            batch = next(stream)
            check_memory(batch, 5.0)
            ends += int(batch["next", "done"].sum())
        assert ends > 4
        collector.reset()
        check_memory(next(stream), 5.0)


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_what_nobody_writes_stays(make: Callable[..., Any]) -> None:
    env = make(default_value=2.5)
    with Collector(env, None, frames_per_batch=20 * env.batch_size.numel(), total_frames=-1) as collector:
        for _ in range(2):
            check_memory(collector.next(), 2.5, steps=False)


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_on_tensordicts(make: Callable[..., Any]) -> None:
    """``rollout``, ``step`` and ``reset`` as a user calls them."""
    env = make(default_value=5.0)
    check_memory(env.rollout(30, recurrent(), break_when_any_done=False), 5.0)
    check_memory(env.rollout(30, break_when_any_done=False), 5.0, steps=False)
    root = env.reset()
    root["memory"] = torch.full_like(root["memory"], 7.0)
    assert (env.step(env.rand_action(root))["next", "memory"] == 7).all()
    if env.batch_size:
        root = env.step_mdp(root)
        mask = torch.tensor([[True], [False], [True]])
        after = env.reset(root.set("_reset", mask))
        assert after["memory"][:, 0].tolist() == [5.0, 7.0, 5.0]


def test_random_frames_keep_it() -> None:
    with Collector(primed(), recurrent(), frames_per_batch=8, total_frames=8, init_random_frames=4) as collector:
        (batch,) = collector
    steps = batch["step_count"][:, 0].tolist()
    assert batch["memory"][:4, 0].tolist() == [0.0] * 4
    assert batch["next", "memory"][4:, 0].tolist() == [1.0 + n if steps[4] else 1.0 for n in range(4)]


def test_values() -> None:
    env = primed(default_value={"memory": torch.tensor([1.0, 2.0])})
    assert env.reset()["memory"].tolist() == [1.0, 2.0]
    specs = Composite({"a": Categorical(5, (1,)), ("b", "c"): Unbounded((2,), torch.float64)})
    env = TransformedEnv(make_counting(), TensorDictPrimer(specs, default_value={"a": 3, "b": {"c": 0.5}}))
    root = env.reset()
    assert root["a"].tolist() == [3]
    assert root["b", "c"].tolist() == [0.5, 0.5]
    assert root["b", "c"].dtype == torch.float64
    assert env.observation_spec["a"].n == 5
    as_dict = TensorDictPrimer({"a": ONE, ("b", "c"): ONE})
    assert as_dict.out_keys == ["a", ("b", "c")]
    whole = TensorDictPrimer(Composite(memory=Unbounded((3, 2)), shape=(3,)))
    assert TransformedEnv(SerialEnv(3, make_counting), whole).reset()["memory"].shape == (3, 2)
    also = TensorDictPrimer(memory=Unbounded((3, 2)), expand_specs=False)
    assert TransformedEnv(SerialEnv(3, make_counting), also).reset()["memory"].shape == (3, 2)


def test_what_is_drawn_is_drawn_for_each_episode() -> None:
    goal = TensorDictPrimer(goal=Bounded(-2.0, 2.0, (1,)), random=True, expand_specs=True)
    env = TransformedEnv(SerialEnv(3, make_counting), Compose(StepCounter(9), goal))
    with Collector(env, None, frames_per_batch=90, total_frames=90) as collector:
        (batch,) = collector
    for episodes in batch:
        firsts = (episodes["step_count"] == 0).squeeze(-1).nonzero().reshape(-1).tolist()
        for begin, end in zip(firsts, [*firsts[1:], 30], strict=True):
            assert (episodes["goal"][begin:end] == episodes["goal"][begin]).all()
        assert episodes["goal"].unique().numel() == len(firsts) > 1
    assert bool((batch["goal"].abs() <= 2).all())
    assert torch.equal(batch["goal"], batch["next", "goal"])


def test_functions() -> None:
    calls: list[Any] = []

    def each() -> torch.Tensor:
        calls.append(None)
        return torch.full((3, 1), float(len(calls)))

    env = TransformedEnv(
        SerialEnv(3, make_counting), TensorDictPrimer(n=Unbounded((1,)), default_value=each, expand_specs=True)
    )
    root = env.reset()
    assert root["n"].tolist() == [[1.0]] * 3
    root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert root["n"].tolist() == [[1.0], [2.0], [1.0]]

    def at_once(reset: torch.Tensor) -> TensorDict:
        calls.append(reset.clone())
        return TensorDict(n=torch.full((int(reset.sum()), 1), 9.0), batch_size=[int(reset.sum())])

    primer = TensorDictPrimer(n=Unbounded((1,)), default_value=at_once, single_default_value=True, expand_specs=True)
    env = TransformedEnv(SerialEnv(3, make_counting), primer)
    root = env.reset()
    root["n"] = root["n"] * 0
    root = env.step_mdp(env.step(env.rand_action(root)))
    root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert root["n"].tolist() == [[0.0], [9.0], [0.0]]
    assert calls[-1].tolist() == [[False], [True], [False]]


@pytest.mark.processes
def test_in_workers() -> None:
    make = lambda: primed(default_value=5.0)  # noqa: E731
    with MultiSyncCollector([make] * 2, recurrent(), frames_per_batch=40, total_frames=120) as collector:
        for batch in collector:
            check_memory(batch, 5.0)


@pytest.mark.processes
def test_envs_that_are_given_actions_only() -> None:
    make = lambda: primed(default_value=5.0)  # noqa: E731
    with ParallelEnv(2, make) as env, pytest.raises(PolicyError, match="Leave the env's primer out"):
        Collector(env, recurrent(), frames_per_batch=20)
    with pytest.raises(PolicyError, match="Leave the env's primer out"):
        AsyncBatchedCollector([make], recurrent(), frames_per_batch=20)
    with ParallelEnv(2, make) as env, Collector(env, None, frames_per_batch=20, total_frames=20) as collector:
        for batch in collector:
            check_memory(batch, 5.0, steps=False)
    # Around the processes it is here, and so is what the policy writes.
    with ParallelEnv(2, make_counting) as inner:
        outer = TransformedEnv(inner, Compose(StepCounter(9), TensorDictPrimer(memory=ONE, expand_specs=True)))
        with Collector(outer, recurrent(), frames_per_batch=60, total_frames=60) as collector:
            for batch in collector:
                check_memory(batch, 0.0)


def of(*transforms: Any, num_envs: int = 0) -> Any:
    return TransformedEnv(SerialEnv(num_envs, make_counting) if num_envs else make_counting(), Compose(*transforms))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorDictPrimer(), "which keys"),
        (lambda: TensorDictPrimer({"a": ONE}, b=ONE), "primers or keywords, not both: b"),
        (lambda: TensorDictPrimer(a=3), "'a' is a builtins.int, not a spec; one is Unbounded"),
        (lambda: TensorDictPrimer(a=ONE, random=True, default_value=1.0), "leave default_value out"),
        (lambda: TensorDictPrimer(a=ONE, default_value={"b": 1.0}), "default_value has 'b', the primers are 'a'"),
        (lambda: TensorDictPrimer(a=ONE, reset_key=("agents", "_reset")), "one episode per row"),
        (lambda: TensorDictPrimer(a=ONE, call_before_env_reset=True), "no env of swath reads a TensorDict"),
        (lambda: TensorDictPrimer(a=ONE, single_default_value=True), "for a default_value that is a function"),
        (lambda: TensorDictPrimer(a=ONE, device="meta"), "rows are in main memory"),
        (lambda: of(TensorDictPrimer(observation=ONE)), "the env gives 'observation' already"),
        (lambda: of(TensorDictPrimer(action=ONE)), "'action' is in the env's action_spec already"),
        (lambda: of(TensorDictPrimer(a=ONE), num_envs=3), r"shape \(\), the env \(3,\); say expand_specs=True"),
        (lambda: of(TensorDictPrimer(a=ONE, expand_specs=False), num_envs=3), r"does not begin with the env's batch"),
        (lambda: of(TensorDictPrimer(a=ONE, default_value=torch.ones(3))).reset(), r"has shape \(3,\) .* says \(2,\)"),
        (lambda: of(TensorDictPrimer(a=ONE, default_value=lambda: torch.ones(1))).reset(), r"shape \(1,\) .* \(2,\)"),
        (lambda: of(TensorDictPrimer(a=Categorical(3, (1,)), default_value=0.5)).reset(), "int64, which cannot be 0.5"),
        (
            lambda: of(TensorDictPrimer(a=ONE), ClipTransform(["a"], low=0, high=1)),
            "'a' is what a TensorDictPrimer keep",
        ),
        (lambda: of(TensorDictPrimer(a=ONE), RenameTransform(["a"], ["b"])), "'a' is what a TensorDictPrimer keeps"),
        (lambda: TransformedEnv(primed(), ClipTransform(["memory"], low=0, high=1)), "'memory' is what a TensorDictP"),
    ],
)
def test_what_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        make()


def test_the_contract() -> None:
    check_transform(TensorDictPrimer(memory=ONE, default_value=2.0, expand_specs=True), make_counting)
    check_transform(TensorDictPrimer(goal=Bounded(-1.0, 1.0, (2,)), random=True, expand_specs=True), make_counting)
