"""TorchRL's TensorDictPrimer, lowered: the same data as TorchRL's own collector, and as a guest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

import swath.envs as ours
from swath.collectors import Collector
from swath.envs import GuestEnv
from test_lowering_property import STEPS, Foretold, assert_same

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]
FORMS = ("one", "transformed serial", "serial of transformed")


def theirs() -> Any:
    import torchrl.envs

    return torchrl.envs


def build(library: Any, form: str, transforms: Callable[[Any], list[Any]]) -> Any:
    """Of envs whose data follow from their actions; each ends by itself or is truncated."""

    def base(number: int) -> Any:
        return library.GymWrapper(Foretold(number, "vector"))

    def transformed(env: Any) -> Any:
        return library.TransformedEnv(env, library.Compose(library.InitTracker(), *transforms(library)))

    if form == "one":
        return transformed(base(1))
    if form == "transformed serial":
        return transformed(library.SerialEnv(3, [lambda n=n: base(n) for n in range(3)]))
    return library.SerialEnv(3, [lambda n=n: transformed(base(n)) for n in range(3)])


def collected(kind: Any, env: Any, policy: Any, **kwargs: Any) -> tuple[list[Any], str]:
    num_envs = max(1, env.batch_size.numel())
    collector = kind(env, policy, frames_per_batch=STEPS * num_envs, total_frames=3 * STEPS * num_envs, **kwargs)
    try:
        batches = [batch.clone() for batch in collector]
        return batches, collector.env_plan() if kind is Collector else ""
    finally:
        collector.shutdown()


def act(features: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(features[..., :3].argmax(-1), 3)


def recurrent(kind: str) -> tuple[Any, Any]:
    """A policy, and the module in it that has a state."""
    from torchrl import modules

    torch.manual_seed(0)
    module = getattr(modules, kind)(3, 4, in_key="observation", out_key="features").double()
    head = TensorDictModule(act, in_keys=["features"], out_keys=["action"])
    return TensorDictSequential([module, head]), module


def in_float64(primer: Any) -> Any:
    """As whoever has a policy in float64 writes it."""
    from torchrl.data import Unbounded

    return theirs().TensorDictPrimer(
        {key: Unbounded(spec.shape, dtype=torch.float64) for key, spec in primer.primers.items()}, expand_specs=True
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["LSTMModule", "GRUModule"])
def test_recurrent_policies(kind: str, form: str) -> None:
    from torchrl.collectors import Collector as TheirCollector

    policy, module = recurrent(kind)

    def make(library: Any = None) -> Any:
        return build(theirs(), form, lambda library: [in_float64(module.make_tensordict_primer())])

    expected, _ = collected(TheirCollector, make(), policy)
    guest, plan = collected(Collector, GuestEnv(make(), lower=False), policy)
    assert plan.startswith("stepped as it is")
    lowered, plan = collected(Collector, make(), policy)
    assert plan.startswith("lowered"), plan
    assert sum(int(batch["next", "done"].sum()) for batch in expected) > 3
    assert any(
        batch["next", "recurrent_state" if kind == "GRUModule" else "recurrent_state_c"].any() for batch in expected
    )
    assert_same(guest, expected, "the guest")
    assert_same(lowered, expected, plan)


@pytest.mark.parametrize("form", FORMS)
def test_primers_of_modules(form: str) -> None:
    """As scripts write it: ``get_primers_from_module``, appended to the env."""
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.modules.utils import get_primers_from_module

    policy, _ = recurrent("GRUModule")
    policy = policy.float()

    def make() -> Any:
        return build(
            theirs(), form, lambda t: [t.DoubleToFloat(in_keys=["observation"]), get_primers_from_module(policy)]
        )

    expected, _ = collected(TheirCollector, make(), policy)
    lowered, plan = collected(Collector, make(), policy)
    assert plan.startswith("lowered"), plan
    assert plan.endswith("InitTracker, DoubleToFloat, TensorDictPrimer")
    assert_same(lowered, expected, plan)


def spec(shape: Any, dtype: torch.dtype = torch.float32) -> Any:
    from torchrl.data import Unbounded

    return Unbounded(shape=shape, dtype=dtype)


def plus_one(tensordict: Any) -> Any:
    """Writes one of two primed keys, under "next"."""
    tensordict["next", "h"] = tensordict["h"] + 1
    return tensordict.set("action", torch.nn.functional.one_hot(tensordict["h"][..., 0].long() % 3, 3))


VALUES: dict[str, Callable[[Any], list[Any]]] = {
    "a number": lambda t: [t.TensorDictPrimer(h=spec((1,)), k=spec((2,)), default_value=3.0, expand_specs=True)],
    "by key": lambda t: [
        t.TensorDictPrimer(
            {"h": spec((1,)), "k": spec((2, 2), torch.int64)}, default_value={"h": 2.0, "k": 7}, expand_specs=True
        )
    ],
    "nested": lambda t: [
        t.TensorDictPrimer({"h": spec((1,)), ("deep", "k"): spec((2,), torch.float64)}, expand_specs=True)
    ],
    "two": lambda t: [
        t.TensorDictPrimer(h=spec((1,)), expand_specs=True),
        t.StepCounter(4),
        t.TensorDictPrimer(k=spec((1,)), default_value=1.0, expand_specs=True),
        t.RewardSum(),
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stack", VALUES.values(), ids=VALUES)
def test_values(stack: Callable[[Any], list[Any]], form: str) -> None:
    from torchrl.collectors import Collector as TheirCollector

    expected, _ = collected(TheirCollector, build(theirs(), form, stack), plus_one)
    lowered, plan = collected(Collector, build(theirs(), form, stack), plus_one)
    assert plan.startswith("lowered"), plan
    assert_same(lowered, expected, plan)
    own, _ = collected(Collector, build(ours, form, stack), plus_one)  # with specs of TorchRL
    assert_same(own, expected, "ours")


@pytest.mark.parametrize("form", FORMS)
def test_without_a_policy_that_writes_it(form: str) -> None:
    from torchrl.collectors import Collector as TheirCollector

    def policy(tensordict: Any) -> Any:
        return tensordict.set("action", torch.nn.functional.one_hot(tensordict["h"][..., 0].long() % 3, 3))

    stack = VALUES["a number"]
    expected, _ = collected(TheirCollector, build(theirs(), form, stack), policy)
    lowered, plan = collected(Collector, build(theirs(), form, stack), policy)
    assert plan.startswith("lowered"), plan
    assert_same(lowered, expected, plan)


@pytest.mark.parametrize("form", FORMS)
def test_resets_between_batches(form: str) -> None:
    """``reset_at_each_iter``, and a reset of the collector."""
    stack = VALUES["a number"]

    def data(env: Any) -> list[Any]:
        num_envs = max(1, env.batch_size.numel())
        with Collector(env, plus_one, frames_per_batch=STEPS * num_envs, total_frames=-1) as collector:
            batches = [collector.next().clone()]
            collector.reset()
            batches.append(collector.next().clone())
            if num_envs > 1:
                collector.reset([1])
            batches.append(collector.next().clone())
            return batches

    guest = data(GuestEnv(build(theirs(), form, stack), lower=False))
    assert_same(data(build(theirs(), form, stack)), guest, "the guest")


NOT_LOWERED: dict[str, tuple[Callable[[Any], list[Any]], str]] = {
    "random": (lambda t: [t.TensorDictPrimer(h=spec((1,)), random=True, expand_specs=True)], "draws its values"),
    "a function": (
        lambda t: [t.TensorDictPrimer(h=spec((1,)), default_value=lambda: torch.ones(1), expand_specs=True)],
        "calls its default_value",
    ),
    "changed behind it": (
        lambda t: [t.TensorDictPrimer(h=spec((1,)), expand_specs=True), t.ClipTransform(in_keys=["h"], low=0, high=3)],
        "'h' is what a TensorDictPrimer keeps",
    ),
}


@pytest.mark.parametrize(("stack", "reason"), NOT_LOWERED.values(), ids=NOT_LOWERED)
def test_what_is_left_to_torchrl(stack: Callable[[Any], list[Any]], reason: str) -> None:
    batches, plan = collected(Collector, build(theirs(), "one", stack), plus_one)
    assert plan.startswith("stepped as it is")
    assert reason in plan
    assert len(batches) == 3


def test_a_subclass_is_left_to_torchrl() -> None:
    class Own(theirs().TensorDictPrimer):
        pass

    _, plan = collected(Collector, build(theirs(), "one", lambda t: [Own(h=spec((1,)), expand_specs=True)]), plus_one)
    assert plan == "stepped as it is: Own is not known"


@pytest.mark.parametrize(
    "change",
    [
        lambda primer: setattr(primer, "default_value", {"h": 8.0, "k": 8}),
        lambda primer: primer.default_value.set("h", torch.tensor(8.0)),
        lambda primer: primer.default_value["h"].fill_(8.0),
    ],
    ids=["another", "one of them", "in place"],
)
def test_a_value_that_is_changed_between_batches(change: Any) -> None:
    """What the user does to the primer is seen with the next batch."""
    env = build(theirs(), "one", VALUES["by key"])
    with Collector(env, plus_one, frames_per_batch=STEPS, total_frames=-1) as collector:
        assert collector.next()["h"].min() == 2
        assert collector.env_plan().startswith("lowered")
        change(collector.env.guest.transform[1])
        batch = collector.next()
        firsts = batch["h"][batch["is_init"]]
        assert (firsts == 8).all()


@pytest.mark.parametrize("form", FORMS[:1])
def test_transforms_of_ours_around_a_primer_of_theirs(form: str) -> None:
    """What the policy writes gets through to the guest."""
    env = ours.TransformedEnv(GuestEnv(build(theirs(), form, VALUES["a number"]), lower=False), ours.RewardSum())
    expected, _ = collected(Collector, build(theirs(), form, VALUES["a number"]), plus_one)
    got, _ = collected(Collector, env, plus_one)
    for mine, other in zip(got, expected, strict=True):
        assert torch.equal(mine["h"], other["h"])
        assert torch.equal(mine["next", "h"], other["next", "h"])
        assert "episode_reward" in mine.keys()  # noqa: SIM118
