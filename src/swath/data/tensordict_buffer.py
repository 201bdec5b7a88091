"""Replay buffers that are put together: of TensorDicts, whose samples say where they are from, and prioritised."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.frames import as_many_frames
from swath.data.list_storage import ListStorage
from swath.data.prioritized import PrioritizedSampler
from swath.data.replay_buffer import ReplayBuffer
from swath.data.storage_base import Storage
from swath.data.writers import TensorDictRoundRobinWriter, Writer


class TensorDictReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` of TensorDicts, whose samples have their ``index`` and what the sampler knows of them.

    Args:
        priority_key: where ``update_tensordict_priority`` finds priorities, and ``extend`` and ``add`` those of new
            frames, which have the highest so far if they bring none.

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

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Many, as ``ReplayBuffer.extend``. Frames that have a priority get it, unless ``update_priority`` is False."""
        data = as_many_frames(data, self.storage.ndim)
        if isinstance(data, (list, tuple)) and len(data) and all(is_tensor_collection(entry) for entry in data):
            data = torch.stack(list(data))  # type: ignore[arg-type]
        if not is_tensor_collection(data):
            raise ValueError(f"TensorDictReplayBuffer stores TensorDicts, got {type(data).__name__}")
        index, given = super().extend(data), data.get(self.priority_key, None)
        if given is not None and update_priority is not False and isinstance(self.sampler, PrioritizedSampler):
            self._prioritize(index[index >= 0])  # a writer may have left frames out
        return index

    def _prioritize(self, index: torch.Tensor) -> None:
        """Read from what is stored: a transform may have held back, or changed, what was given."""
        if len(index) and (priority := self[index].get(self.priority_key, None)) is not None:
            self.update_priority(index, priority)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a sample that has them under ``priority_key``."""
        priority = data.get(self.priority_key, None)
        if priority is None:
            raise KeyError(f"there is no {self.priority_key!r} in this sample to take priorities from")
        self.update_priority(data.get("index"), priority)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` with a ``PrioritizedSampler``.

    Args:
        alpha, beta, eps, dtype: of the sampler.
        kwargs: as ``ReplayBuffer`` takes them.

    >>> from swath.data import LazyTensorStorage
    >>> rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(torch.arange(10.0))
    >>> rb.update_priority(torch.arange(10), torch.rand(10))
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Storage | None = None,
        **kwargs: Any,
    ) -> None:
        storage = ListStorage(1000) if storage is None else storage
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)
        super().__init__(**{"storage": storage, "sampler": sampler, **kwargs})

    @property
    def prioritized_sampler(self) -> PrioritizedSampler:
        """The sampler that has the priorities."""
        return self.sampler  # type: ignore[return-value]


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A ``TensorDictReplayBuffer`` with a ``PrioritizedSampler``.

    Args:
        alpha, beta, eps: of the sampler.
        priority_key: where ``update_tensordict_priority`` finds priorities.
        reduction: of priorities with more than one entry a frame: "max", "min", "mean" or "median".
        kwargs: as ``ReplayBuffer`` takes them.

    >>> from swath.data import LazyTensorStorage
    >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4)
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: Any = "td_error",
        eps: float = 1e-8,
        storage: Storage | None = None,
        reduction: str = "max",
        **kwargs: Any,
    ) -> None:
        storage = ListStorage(1000) if storage is None else storage
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, storage=storage, sampler=sampler, **kwargs)

    @property
    def prioritized_sampler(self) -> PrioritizedSampler:
        """The sampler that has the priorities."""
        return self.sampler  # type: ignore[return-value]
