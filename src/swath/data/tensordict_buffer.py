"""Replay buffers of TensorDicts, whose samples say where they are from."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.replay_buffer import ReplayBuffer
from swath.data.writers import TensorDictRoundRobinWriter, Writer


class TensorDictReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` of TensorDicts, whose samples have their ``index`` and what the sampler knows of them.

    Args:
        priority_key: where ``update_tensordict_priority`` finds priorities.

    >>> from tensordict import TensorDict
    >>> from swath.data import LazyTensorStorage, PrioritizedSampler
    >>> rb = TensorDictReplayBuffer(
    ...     storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, alpha=0.7, beta=0.5), batch_size=4
    ... )
    >>> _ = rb.extend(TensorDict(x=torch.arange(10), batch_size=10))
    >>> sample = rb.sample()
    >>> sample["td_error"] = torch.rand(4)
    >>> rb.update_tensordict_priority(sample)
    """

    _adds_index = True

    def __init__(self, *, priority_key: Any = "td_error", **kwargs: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**kwargs)

    def _default_writer(self) -> Writer:
        return TensorDictRoundRobinWriter()

    def extend(self, data: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)) and len(data) and all(is_tensor_collection(entry) for entry in data):
            data = torch.stack(list(data))  # type: ignore[arg-type]
        if not is_tensor_collection(data):
            raise ValueError(f"TensorDictReplayBuffer stores TensorDicts, got {type(data).__name__}")
        return super().extend(data)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a sample that has them under ``priority_key``."""
        priority = data.get(self.priority_key, None)
        if priority is None:
            raise KeyError(f"there is no {self.priority_key!r} in this sample to take priorities from")
        self.update_priority(data.get("index"), priority)
