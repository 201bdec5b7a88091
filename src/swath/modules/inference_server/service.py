"""PolicyService: what every inference server offers, wherever its policy is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from swath.copying import NotCopied
from swath.hints import ExplainsGuesses
from swath.modules.inference_server.client import InferenceClient
from swath.weight_update.weights import choose_sources, flat_weights


class PolicyService(NotCopied, ExplainsGuesses):
    """Base of the servers. Subclasses start and end, make clients, and take over weights (``_publish``)."""

    _inner = (
        *("ask_to_record", "begin_recording", "end_recording"),
        *("transport_kind", "was_started", "weights_applied"),
    )

    def start(self) -> Self:
        raise NotImplementedError

    def shutdown(self, timeout: float = 5.0) -> None:
        raise NotImplementedError

    @property
    def was_started(self) -> bool:
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        raise NotImplementedError

    def _started_before(self) -> RuntimeError:
        if self.is_alive:
            return RuntimeError("this inference server is already running")
        return RuntimeError("this inference server was started before; make a new one to start again")

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


class ServedElsewhere(PolicyService):
    """Base of those whose policy is made, and stays, elsewhere: all that is done with it is asked (``_call``)."""

    #: Where the policy is, in errors.
    _place: str
    _instead_of_a_copy = "make another one with the same arguments, or give others a client(), which can be sent"

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the server there answers."""
        raise NotImplementedError

    def update_model(self, update_fn: Callable[[Any], Any], *, mark_weight_update: bool = True) -> Any:
        """Call a function with the policy, where it is, between two batches; what it returns.

        Counts the policy's version up, unless ``mark_weight_update`` is False.
        """
        return self._call("update_model", update_fn, mark_weight_update=mark_weight_update)

    def _publish(self, model_id: str, source: Any) -> None:
        if source is None:
            raise ValueError(
                f"the policy was made in the server's {self._place}, so there is none here to take weights from: "
                "update_policy_weights_(policy)"
            )
        self._call("update_policy_weights_", weights=as_tensors(source), model_id=model_id)

    @property
    def policy_version(self) -> int:
        return self._call("stats")["policy_version"]


def as_tensors(source: Any) -> dict[str, torch.Tensor]:
    """Weights on their way."""
    return {name: t.detach().cpu() for name, t in flat_weights(source).items() if isinstance(t, torch.Tensor)}
