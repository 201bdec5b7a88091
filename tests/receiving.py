"""A collector in somebody else's process, which receives weights: spawned processes import this by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from counting import make_counting
from swath.collectors import Collector
from swath.weight_update import WeightSyncScheme


class Constant(nn.Module):
    """Acts by its only weight."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 3)


def serve(scheme: WeightSyncScheme, asked: Any) -> None:
    """Somebody else's process: a Collector that says what its policy has chosen by, and the versions."""
    with Collector(
        make_counting,
        Constant(-1.0),
        frames_per_batch=4,
        track_policy_version=True,
        weight_recv_schemes={"policy": scheme},
    ) as collector:
        for batch in collector:
            asked.send((batch["action"][..., 0].unique().tolist(), batch["policy_version"].unique().tolist()))
            if asked.recv() == "stop":
                break
