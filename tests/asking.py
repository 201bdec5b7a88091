"""A client's questions, for processes of any start method: those that are spawned import this by its name."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


def ask(client: Any, count: int) -> None:
    for _ in range(count):
        assert client(TensorDict(observation=torch.randn(4)))["action"].shape == (2,)
