"""TorchRL's published examples run with swath, beside TorchRL itself with the same data."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.weight_update.weights import flat_weights
from torchrl_examples import SLICE_LENGTH, Films, evaluation, recurrent_sequence_training, trajectory_assembly
from torchrl_scripts import first_difference

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore"),
]


def test_trajectory_assembly() -> None:
    ours, theirs = trajectory_assembly("swath"), trajectory_assembly("torchrl")
    assert first_difference([ours["padded"]], [theirs["padded"]]) is None
    for key in ("traj_ids", "mask"):
        assert torch.equal(ours["padded"]["collector", key], theirs["padded"]["collector", key])
    assert torch.equal(ours["nested"], theirs["nested"])
    assert ours["nested shape"] == theirs["nested shape"] == (3, -1)
    assert ours["stored"] == theirs["stored"] == 3
    for result in (ours, theirs):  # each has random actions of its own
        mask = result["episodes"]["collector", "mask"]
        assert mask.shape[0] == 3
        ends = result["episodes"]["next", "done"].squeeze(-1)
        assert ends.sum(1).tolist() == [1, 1, 1]
        assert all(bool(ends[row, length - 1]) for row, length in enumerate(mask.sum(1).tolist()))


def test_recurrent_sequence_training() -> None:
    result = recurrent_sequence_training("swath")
    data = result["data"]
    assert {"rs_h", "rs_c", "is_init", "logits"} <= set(data.keys())
    assert data["is_init"].reshape(-1).tolist()[0]
    torch.testing.assert_close(result["replayed"], data["features"], rtol=1e-4, atol=1e-5)
    assert {0, SLICE_LENGTH} & set(result["starts"])
    assert result["losses"][-1] < result["losses"][0]


def mock_env() -> Any:
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    return ContinuousActionVecMockEnv()


def mock_policy(env: Any = None) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(7, 7), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_evaluator_example(backend: str) -> None:
    ours, theirs = (
        evaluation("swath", backend, mock_env, mock_policy),
        evaluation(
            "torchrl",
            "thread",
            mock_env,
            mock_policy,  # (in a process it leaves one behind)
        ),
    )
    for result in (ours, theirs):
        assert (result["polled"]["eval/step"], result["metrics"]["eval/step"]) == (100, 200)
        assert [step for step, _ in result["log"]] == [100, 200]
        assert result["metrics"]["eval/num_episodes"] == 3
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    assert ours["log"][0][1].keys() == theirs["log"][0][1].keys()


def filmed(films: Films) -> Any:
    from torchrl.envs import TransformedEnv
    from torchrl.envs.libs.gym import GymEnv
    from torchrl.record import VideoRecorder

    env = GymEnv("CartPole-v1", from_pixels=True, pixels_only=False)
    return TransformedEnv(env, VideoRecorder(films, tag="eval/video", skip=1))


@pytest.mark.parametrize("library", ["swath", "torchrl"])
def test_evaluator_writes_torchrls_videos(library: str) -> None:
    from torchrl_examples import of

    films = Films()
    evaluator = of(library, "collectors").Evaluator(
        filmed(films), of(library, "collectors").RandomPolicy(), max_steps=10, num_trajectories=1, frames_per_batch=10
    )
    try:
        evaluator.evaluate(step=30)
        evaluator.evaluate(step=60)
    finally:
        evaluator.shutdown()
    assert [(name, step) for name, step, _ in films.videos] == [("eval/video", 30), ("eval/video", 60)]
    assert all(shape[0] == 1 and shape[2] == 3 for *_, shape in films.videos)


@pytest.mark.parametrize("kind", ["VecNorm", "VecNormV2"])
@pytest.mark.parametrize("nested", [False, True])
def test_torchrls_statistics_do_not_learn_from_evaluations(kind: str, nested: bool) -> None:
    from torchrl.envs import Compose, StepCounter, TransformedEnv, transforms

    from swath.collectors import Evaluator

    norm = getattr(transforms, kind)(in_keys=["observation"])
    env = TransformedEnv(mock_env(), Compose(StepCounter(), Compose(norm)) if nested else norm)
    env.rollout(5)
    before = {name: value.clone() for name, value in flat_weights(norm.state_dict()).items()}
    with Evaluator(env, mock_policy(), max_steps=10, num_trajectories=2) as evaluator:
        evaluator.evaluate()
    after = flat_weights(norm.state_dict())
    assert before
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_torchrl_env_is_no_function() -> None:
    from swath.collectors import Evaluator

    with pytest.raises(ValueError, match="callable"):
        Evaluator(mock_env(), policy_factory=partial(mock_policy), backend="process")
