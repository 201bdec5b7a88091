"""TorchRL's published examples that collect, rebuilt step by step; each is a function of the library that collects.

What is not a collector's business (modules, losses) is TorchRL's in both.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn


def of(library: str, module: str) -> Any:
    return importlib.import_module(f"{library}.{module}")


# -- trajectory assembly (the tutorial of that name) -------------------------------------------------------------------


def chunk() -> TensorDict:
    """Fifteen frames of three episodes of 4, 5 and 6 steps, as a collector gives them."""
    generator = torch.Generator().manual_seed(0)
    done = torch.zeros(15, 1, dtype=torch.bool)
    done[[3, 8, 14]] = True
    draw = lambda width: torch.randn(15, width, generator=generator)  # noqa: E731
    return TensorDict(
        {
            "observation": draw(4),
            ("next", "observation"): draw(4),
            ("next", "reward"): draw(1),
            ("next", "done"): done,
            ("collector", "traj_ids"): torch.tensor([0] * 4 + [1] * 5 + [2] * 6),
        },
        batch_size=[15],
    )


def trajectory_assembly(library: str) -> dict[str, Any]:
    """Split a chunk, padded and nested; have a collector deliver whole episodes; store them."""
    split = of(library, "collectors.utils").split_trajectories
    data = chunk()
    padded = split(data, trajectory_key=("collector", "traj_ids"), as_nested=False)
    nested = split(data, trajectory_key=("collector", "traj_ids"), as_nested=True)
    collectors, envs, buffers = of(library, "collectors"), of(library, "envs"), of(library, "data")
    env = envs.GymEnv("CartPole-v1")
    env.set_seed(0)
    collector = collectors.Collector(
        env,
        collectors.RandomPolicy(env.action_spec),
        frames_per_batch=50,
        total_frames=-1,
        trajs_per_batch=3,
        traj_format="padded",
    )
    try:
        episodes = next(iter(collector))
    finally:
        collector.shutdown()
    buffer = buffers.ReplayBuffer(storage=buffers.LazyTensorStorage(max_size=100_000))
    buffer.extend(padded)
    return {
        "padded": padded,
        "nested": nested["observation"].to_padded_tensor(0.0),
        "nested shape": nested.batch_size,
        "episodes": episodes,
        "stored": len(buffer),
    }


# -- recurrent sequence training (the tutorial of that name) -----------------------------------------------------------

SLICES, SLICE_LENGTH, HIDDEN = 4, 8, 16


def remembering(seed: int = 0) -> TensorDictSequential:
    """An LSTM, logits, and the larger of two."""
    from torchrl.modules import LSTMModule

    torch.manual_seed(seed)
    lstm = LSTMModule(
        input_size=4,
        hidden_size=HIDDEN,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
        python_based=True,
    )
    head = TensorDictModule(nn.Linear(HIDDEN, 2), in_keys=["features"], out_keys=["logits"])
    choose = TensorDictModule(lambda logits: logits.argmax(-1), in_keys=["logits"], out_keys=["action"])
    return TensorDictSequential(*[lstm, head, choose])


def recurrent_sequence_training(library: str) -> dict[str, Any]:
    """The collector sees that the policy remembers, slices are sampled, and the network is trained on them."""
    from torchrl.modules import set_recurrent_mode

    policy = remembering().eval()
    envs, buffers = of(library, "envs"), of(library, "data")
    env = envs.GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    collector = of(library, "collectors").Collector(
        env, policy, frames_per_batch=64, total_frames=512, auto_register_policy_transforms=True
    )
    try:
        data = next(iter(collector))
    finally:
        collector.shutdown()
    buffer = buffers.TensorDictReplayBuffer(
        storage=buffers.LazyTensorStorage(max_size=1024),
        sampler=of(library, "data.replay_buffers").SliceSampler(slice_len=SLICE_LENGTH, strict_length=False),
        batch_size=SLICES * SLICE_LENGTH,
    )
    buffer.extend(data)
    with set_recurrent_mode(True):
        replayed = policy(data.select("observation", "rs_h", "rs_c", "is_init").unsqueeze(0))
    learner = remembering(1)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    losses, starts = [], []
    for _ in range(12):
        sample = buffer.sample()
        starts = sample["is_init"].reshape(-1).nonzero().reshape(-1).tolist()
        with set_recurrent_mode(True):
            logits = learner(sample.clone())["logits"]
        loss = (logits - torch.tensor([1.0, 0.0])).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"data": data, "replayed": replayed["features"][0], "starts": starts, "losses": losses}


# -- the evaluator's (its own documentation) ---------------------------------------------------------------------------


class Log:
    """What is asked of a logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((step, metrics))


class Films:
    """… of one for videos."""

    exp_name = "films"

    def __init__(self) -> None:
        self.videos: list[tuple[str, int | None, tuple[int, ...]]] = []

    def log_video(self, name: str, video: torch.Tensor, step: int | None = None, **kwargs: Any) -> None:
        self.videos.append((name, step, tuple(video.shape)))


def evaluation(library: str, backend: str, make_env: Any, make_policy: Any) -> dict[str, Any]:
    """Trigger, poll, evaluate; results go to a logger."""
    log = Log()
    trained = make_policy()
    where: dict[str, Any] = {"policy_factory": make_policy, "backend": backend}
    evaluator = of(library, "collectors").Evaluator(
        make_env,
        max_steps=20,
        num_trajectories=3,
        on_result=lambda result: log.log_metrics(
            {name: value.item() for name, value in result.items() if name != "eval/step"},
            step=result["eval/step"].item(),
        ),
        **where,
    )
    try:
        evaluator.trigger_eval(trained, step=100)
        polled = evaluator.poll(timeout=60)
        metrics = evaluator.evaluate(trained, step=200)
    finally:
        evaluator.shutdown()
    return {"polled": polled, "metrics": metrics, "log": log.lines}
