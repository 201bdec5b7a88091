"""Envs of a ``SerialEnv`` with the same transforms: transformed at once, with the data that each gets by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from counting import CountingEnv, make_counting
from swath.collectors import Collector
from swath.envs import (
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    FlattenObservation,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
)
from swath.envs.hoisting import Hoisted


class Doubled(Transform):
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def counted(*transforms: Transform, max_steps: int = 20) -> Any:
    return TransformedEnv(make_counting(), Compose(StepCounter(max_steps), RewardSum(), InitTracker(), *transforms))


def seen(**names: Any) -> dict[str, Any]:
    return {"in_keys": ["observation"], **names}


STACKS: dict[str, Callable[[], Any]] = {
    "counters": counted,
    "values": lambda: counted(
        DTypeCastTransform(torch.float32, torch.float64, **seen(out_keys=["wide"])),
        DoubleToFloat(in_keys=["wide"], out_keys=["narrow"]),
        ClipTransform(**seen(out_keys=["clipped"]), low=-0.5, high=0.5),
        RewardScaling(1.0, 3.0),
    ),
    "shapes": lambda: counted(
        UnsqueezeTransform(-1, **seen(out_keys=["deep"])),
        FlattenObservation(-2, -1, in_keys=["deep"], out_keys=["flat"]),
        RenameTransform(["flat"], ["other"], create_copy=True),
        CatTensors(["observation", "other"], "both", del_keys=False),
    ),
    "a dimension from the front": lambda: counted(
        UnsqueezeTransform(0, **seen(out_keys=["deep"]), allow_positive_dim=True)
    ),
    "frames": lambda: counted(
        CatFrames(3, -1, **seen(out_keys=["frames"])), TimeMaxPool(**seen(out_keys=["largest"]), T=3)
    ),
}


def batches(env: Any, monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[list[TensorDictBase], str]:
    """Several, with a reset of one env and a seed in between."""
    with Collector(env, None, frames_per_batch=90, total_frames=360) as collector:
        collector.set_seed(5)
        torch.manual_seed(0)
        found = []
        for number, batch in enumerate(collector):
            found.append(batch.clone())
            if number == 1:
                collector.reset(torch.tensor([1]))
            if number == 2:
                collector.set_seed(6)
        return found, collector.env_plan()


def compare(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, hoisted and not; the plan of the first."""
    CountingEnv.made = 0
    ours, plan = batches(SerialEnv(3, make))
    with monkeypatch.context() as patch:
        patch.setattr(Hoisted, "of", lambda self, children: None)
        CountingEnv.made = 0
        theirs, other_plan = batches(SerialEnv(3, make))
    assert other_plan.startswith("3 in turn, each: 1 Gymnasium env")
    for own, other in zip(ours, theirs, strict=True):
        assert sorted(map(str, own.keys(True, True))) == sorted(map(str, other.keys(True, True)))
        for key in own.keys(True, True):
            torch.testing.assert_close(own[key], other[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")
    return plan


@pytest.mark.parametrize("make", STACKS.values(), ids=STACKS)
def test_data_are_those_of_each_env_by_itself(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(make, monkeypatch).startswith(
        "3 Gymnasium envs stepped on rows, then StepCounter, RewardSum, InitTracker"
    )


def test_each_env_has_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        number = float(CountingEnv.made + 1)
        return counted(ObservationNorm(loc=number, scale=2 * number, **seen(out_keys=["normal"])))

    compare(make, monkeypatch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: counted(Doubled(**seen(out_keys=["double"]))),
        lambda: counted(VecNorm(in_keys=["observation"])),
        lambda: counted(max_steps=5 + CountingEnv.made),
    ],
    ids=["of others", "of all envs", "different"],
)
def test_others_take_turns(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compare(make, monkeypatch)
    assert "in turn, each" in plan or ";" in plan


def test_a_transform_added_to_each_env() -> None:
    env = SerialEnv(2, counted)
    assert env.plan().endswith("InitTracker")
    for child in env.children:
        child.append_transform(RewardScaling(0.0, 2.0))
    assert env.plan().endswith("InitTracker, RewardScaling")
    assert env.children[0].rollout(2)["observation"].shape == (2, 4), "the children are what they were"


def test_the_transforms_are_found_where_they_were() -> None:
    env = SerialEnv(2, counted)
    env.rollout(3)
    assert [type(transform[0]) for transform in env.transform] == [StepCounter, StepCounter]
    assert [transform[0].container for transform in env.transform] == env.children
