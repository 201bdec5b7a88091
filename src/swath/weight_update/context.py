"""What a scheme needs of others: of the collector that it sends for, of what carries the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SenderContext(Protocol):
    """What a scheme needs of the collector on the trainer's side."""

    #: Held while weights are sent.
    lock: Any

    def wake_worker(self, worker: int, model_id: str) -> None:
        """Let the worker wait for weights of this model, which are about to be posted."""
        ...

    def worker_sentinel(self, worker: int) -> int:
        """Ready when the worker's process has ended."""
        ...

    def worker_answered(self, worker: int) -> None:
        """The worker has applied what it was woken for."""
        ...

    def look_at_workers(self, workers: Sequence[int]) -> None:
        """End those that hang, where a limit was given."""
        ...

    def worker_gone(self, worker: int) -> None:
        """The worker's process has ended: raise, or start another one with the newest weights."""
        ...


class TransportBackend(Protocol):
    """What carries the weights to one worker."""

    def send_weights(self, weights: Any, version: int | None) -> None: ...

    def receive_weights(self, timeout: float | None = None) -> tuple[Any, int | None] | None: ...
