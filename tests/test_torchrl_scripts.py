"""TorchRL's published scripts with only the collector's import changed: the data are those of its own, key by key."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from guest_ways import in_this_way
from swath.collectors import Collector
from torchrl_scripts import CHEETAH, SCRIPTS, LikeCheetah, collected, first_difference

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]
#: Of those that are not lowered, why.
NOT_LOWERED = {"vmas": "VmasEnv is not known"}


def like_cheetah() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(LikeCheetah())


@pytest.mark.parametrize(("num_envs", "lower"), [(1, True), (3, True), (3, False)], ids=["one", "three", "as it is"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_data_are_torchrls(name: str, num_envs: int, lower: bool) -> None:
    from torchrl.collectors import Collector as TheirCollector

    script = SCRIPTS[name]
    make_base = like_cheetah if script.base == CHEETAH else None
    if make_base is None and script.is_missing:
        pytest.skip(f"needs {script.needed}")

    def of(kind: Any) -> tuple[list[Any], str]:
        torch.manual_seed(0)
        env = script.make_env(num_envs, make_base)
        policy = script.make_policy(env)
        given = env if kind is TheirCollector else in_this_way(lambda: env, lower)()
        return collected(kind, given, policy, steps=6 if "pixels" in name else 25, num_batches=2)

    ours, plan = of(Collector)
    assert first_difference(ours, of(TheirCollector)[0]) is None, plan
    reason = NOT_LOWERED.get(name) if lower else "lower=False"
    assert plan == f"stepped as it is: {reason}" if reason else plan.startswith("lowered: "), plan


def test_a_difference_is_found() -> None:
    """Of what the tests above and the benchmark rely on."""
    from torchrl.collectors import Collector as TheirCollector

    script = SCRIPTS["dqn"]
    batches = []
    for kind in (Collector, TheirCollector):
        torch.manual_seed(0)
        env = script.make_env(1)
        batches.append(collected(kind, env, script.make_policy(env), steps=10, num_batches=2)[0])
    assert first_difference(*batches) is None
    batches[0][1]["next", "reward"][3] += 1e-7
    assert first_difference(*batches) == "batch 1: ('next', 'reward') differs"
    assert "keys of one only: ['action']" in str(first_difference([batches[0][0].exclude("action")], batches[1][:1]))
