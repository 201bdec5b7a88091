"""Statistics of TorchRL's ``VecNorm`` and ``VecNormV2`` and of ours: the same values, and one takes the other's."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch

from counting import CountingEnv
from swath import envs as ours
from swath.collectors import Collector, MultiSyncCollector
from swath.weight_update import SharedMemWeightSyncScheme

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]
PATH = "env.transform[0]"
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "VecNorm": ("VecNorm", {"decay": 0.9}),
    "VecNorm, all alike": ("VecNorm", {"decay": 1.0, "eps": 1e-2}),
    "VecNormV2": ("VecNormV2", {"decay": 0.9}),
    "VecNormV2, all alike": ("VecNormV2", {"decay": 1.0, "eps": 1e-2}),
}


def make(lib: Any, name: str) -> Any:
    kind, options = OPTIONS[name]
    return getattr(lib, kind)(in_keys=["observation", "reward"], **options)


def theirs() -> Any:
    return importlib.import_module("torchrl.envs")


def counting(norm: Any) -> Any:
    lib = theirs()
    return lib.TransformedEnv(lib.GymWrapper(CountingEnv(6)), lib.Compose(norm, lib.StepCounter()))


def seen(name: str) -> tuple[Any, Any]:
    """One of TorchRL's, and one of ours that goes on from it. (With the same data: ``test_lowering_frames.py``.)"""
    their, own = make(theirs(), name), make(ours, name)
    counting(their).rollout(20, break_when_any_done=False)
    own.load_state_dict(dict(their.state_dict()))
    return their, own


def assert_same(mine: Any, expected: Any) -> None:
    assert set(mine.keys(True, True)) == set(expected.keys(True, True))
    for key in mine.keys(True, True):
        torch.testing.assert_close(mine[key], expected[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_copies_have_the_same_values(name: str) -> None:
    their, own = seen(name)
    for each in (own, own.frozen_copy(), own.clone()):
        assert_same(each.loc, their.loc)
        assert_same(each.scale, their.scale)
    assert own.standard_normal == their.standard_normal
    for mine, expected in zip(own.to_observation_norm(), their.to_observation_norm(), strict=True):
        assert torch.equal(mine.loc, expected.loc)
        assert torch.equal(mine.scale, expected.scale)
        assert bool(mine.standard_normal) == bool(expected.standard_normal)
        assert (mine.in_keys, mine.out_keys) == (list(expected.in_keys), list(expected.out_keys))


@pytest.mark.parametrize("name", OPTIONS)
def test_states_go_both_ways(name: str) -> None:
    their, own = seen(name)
    extra = their.get_extra_state()
    assert own.get_extra_state().keys() == extra.keys()
    assert all(torch.equal(own.get_extra_state()[key], extra[key]) for key in extra)
    for state in (dict(their.state_dict()), {"_extra_state": extra}):
        other = make(ours, name)
        other.load_state_dict(state)
        assert_same(other.loc, their.loc)
    back = make(theirs(), name)
    back.set_extra_state(own.get_extra_state())
    assert_same(back.scale, own.scale)
    shared = make(ours, name).share_memory()
    shared.set_extra_state(extra)
    for key in ("observation", "reward"):
        torch.testing.assert_close(shared.loc[key], their.loc[key])


def guest(name: str, lower: bool) -> Any:
    return ours.GuestEnv(counting(make(theirs(), name)), lower=lower)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_by_path_into_a_guest(name: str, lower: bool) -> None:
    """Its statistics are no tensors of a module: all of its state is sent."""
    their, _ = seen(name)
    with Collector(guest(name, lower), frames_per_batch=10) as collector:
        next(iter(collector))
        assert collector.env_plan().startswith("lowered") == lower
        for form in (their, their.state_dict()):
            collector.update_policy_weights_(form, model_id=PATH)
            assert_same(collector.env.transform[0].loc, their.loc)
            next(iter(collector))
        kept = their.loc.clone()
        assert_same(their.loc, kept)
        assert not torch.equal(collector.env.transform[0].loc["observation"], kept["observation"])


@pytest.mark.processes
@pytest.mark.parametrize("name", ["VecNorm", "VecNormV2"])
def test_by_path_into_guests_of_workers(name: str) -> None:
    their, _ = seen(name)
    with MultiSyncCollector(
        [partial(guest, name, True), partial(guest, name, False)],
        frames_per_batch=20,
        num_workers=2,
        weight_sync_schemes={PATH: SharedMemWeightSyncScheme()},
    ) as collector:
        next(iter(collector))
        collector.update_policy_weights_(their, model_id=PATH)
        for loc in collector.get_distant_attr(f"{PATH}.loc"):
            assert_same(loc, their.loc)
