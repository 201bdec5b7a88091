"""Policies that people have published: each is captured, and gives what calling it gives."""

from __future__ import annotations

import gc
import importlib.util
import time
from typing import Any

import pytest
import torch

from published_policies import PUBLISHED, TORCHRL
from swath.collectors import Collector
from swath.envs import SerialEnv

needs_torchrl = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs torchrl"),
]


def batches(make_env: Any, policy: Any, num_envs: int, *, capture: bool) -> tuple[list[dict[Any, Any]], str]:
    torch.manual_seed(0)
    env = make_env() if num_envs == 1 else SerialEnv(num_envs, make_env)
    with Collector(
        env, policy, frames_per_batch=30 * num_envs, total_frames=90 * num_envs, capture_policy=capture
    ) as collector:
        collector.set_seed(1)
        found = [dict(batch.items(True, True)) for batch in collector]
        return found, collector.policy_plan()


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", [*PUBLISHED, *(pytest.param(name, marks=needs_torchrl) for name in TORCHRL)])
def test_a_published_policy_is_captured(name: str, num_envs: int) -> None:
    make_env, make_policy = {**PUBLISHED, **TORCHRL}[name]
    torch.manual_seed(0)
    policy = make_policy()
    called, _ = batches(make_env, policy, num_envs, capture=False)
    captured, plan = batches(make_env, policy, num_envs, capture=True)
    assert plan.startswith("captured"), plan
    for expected, got in zip(called, captured, strict=True):
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            assert torch.equal(value, got[key]), key


def test_a_collection_of_garbage_while_it_is_recorded_is_not_the_policys() -> None:
    """Who is told of collections (Hypothesis, say) may look at the clock."""
    make_env, make_policy = PUBLISHED["CleanRL ppo"]
    threshold = gc.get_threshold()
    gc.callbacks.append(looks_at_the_clock)
    gc.set_threshold(1)
    try:
        _, plan = batches(make_env, make_policy(), 1, capture=True)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(looks_at_the_clock)
    assert plan.startswith("captured"), plan
    assert gc.isenabled()


def looks_at_the_clock(phase: str, info: Any) -> None:
    time.perf_counter()
