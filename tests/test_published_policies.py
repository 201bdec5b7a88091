"""Policies that people have published: each is captured, and gives what calling it gives."""

from __future__ import annotations

import importlib.util
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
