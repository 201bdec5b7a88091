"""Weights through pipes, and no weights at all."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from swath.process.channel import Channel
from swath.weight_update.scheme import WeightSyncScheme


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights pickled and sent through a pipe to each worker; for models whose structure changes."""

    def _publish(self, weights: dict[str, torch.Tensor]) -> None:
        self._pickled = pickle.dumps(
            {name: tensor.detach().cpu() for name, tensor in weights.items()}, pickle.HIGHEST_PROTOCOL
        )

    def _published(self) -> dict[str, torch.Tensor]:
        return pickle.loads(self._pickled)

    def _post(self, worker: int, channel: Channel, sequence: int, version: int | None) -> None:
        channel.send("weights", sequence, version, self._pickled)

    def _unpack(self, channel: Channel, message: tuple[Any, ...]) -> tuple[Any, int, int | None] | None:
        _, sequence, version, pickled = message
        return pickle.loads(pickled), sequence, version


class NoWeightSyncScheme(WeightSyncScheme):
    """Workers keep the weights that they were made with."""

    def send(self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None) -> None:
        """Do nothing."""

    def receive(self, timeout: float | None = None) -> None:
        return None

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        self._connected = True
