"""Policies of every kind, for the env in ``counting``."""

from __future__ import annotations

import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn


def mlp(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def deterministic() -> TensorDictModule:
    return TensorDictModule(mlp(), in_keys=["observation"], out_keys=["action"])


def stochastic() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        [
            TensorDictModule(mlp(), in_keys=["observation"], out_keys=["logits"]),
            ProbabilisticTensorDictModule(
                in_keys=["logits"],
                out_keys=["action"],
                distribution_class=torch.distributions.OneHotCategorical,
                return_log_prob=True,
                default_interaction_type=InteractionType("random"),
            ),
        ]
    )


class GRUNet(nn.Module):
    """Works with and without a batch dimension."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, hidden)
        self.head = nn.Linear(hidden, 3)

    def forward(self, observation: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = self.cell(observation, hidden)
        return self.head(new), new


def recurrent() -> TensorDictModule:
    return TensorDictModule(GRUNet(), in_keys=["observation", "hidden"], out_keys=["action", ("next", "hidden")])


def actor_critic() -> TensorDictSequential:
    return TensorDictSequential(
        [
            TensorDictModule(mlp(4, 8), in_keys=["observation"], out_keys=["features"]),
            TensorDictModule(nn.Linear(8, 3), in_keys=["features"], out_keys=["action"]),
            TensorDictModule(nn.Linear(8, 1), in_keys=["features"], out_keys=["state_value"]),
        ]
    )


class Marking(nn.Module):
    """Writes a mark that random frames, where the policy is not called, do not have."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return observation[..., :3], torch.ones(observation.shape[:-1])
