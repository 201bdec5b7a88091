"""PolicyService: what every inference server offers, wherever its policy is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from swath.copying import NotCopied
from swath.modules.inference_server.client import InferenceClient
from swath.weight_update.weights import choose_sources


class PolicyService(NotCopied):
    """Base of the servers. Subclasses start and end, make clients, and take over weights (``_publish``)."""

    def start(self) -> Self:
        raise NotImplementedError

    def shutdown(self, timeout: float = 5.0) -> None:
        raise NotImplementedError

    @property
    def was_started(self) -> bool:
        raise NotImplementedError

    def client(self) -> InferenceClient:
        raise NotImplementedError

    def clients(self, num_clients: int) -> list[InferenceClient]:
        """So many clients, for as many who ask at the same time."""
        if not isinstance(num_clients, int) or isinstance(num_clients, bool):
            raise TypeError(f"num_clients must be a number, got {num_clients!r}")
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, got {num_clients}")
        return [self.client() for _ in range(num_clients)]

    @property
    def service_backend(self) -> str:
        """Where the policy is: "thread", "process" or "ray"."""
        raise NotImplementedError

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Let the served policy have these weights, between two batches: a module's, a TensorDict's, a state dict's.

        Without arguments, those of the policy that the server was made with. Counts the policy's version up, and
        returns when they are in force.
        """
        for name, source in choose_sources(policy_or_weights, weights, policy, weights_dict, model_id).items():
            self._publish(name, source)

    def _publish(self, model_id: str, source: Any) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self if self.was_started else self.start()

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
