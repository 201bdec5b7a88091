"""Weights that a scheme brings to a served policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swath.modules.inference_server.served_policy import ServedPolicy
from swath.weight_update.scheme import WeightSyncScheme

if TYPE_CHECKING:
    from swath.modules.inference_server.server import InferenceServer


class ReceivedWeights:
    """The receiving half of a scheme: one of swath's, or anything with its methods.

    What must be there is ``receive(timeout=)``: it applies weights that have come, and returns them, or None.
    ``init_on_receiver``, ``connect`` and ``shutdown`` are called where they are; not the first two of one that says
    ``initialized_on_receiver`` or ``synchronized_on_receiver``.
    """

    def __init__(self, scheme: Any, model_id: str, policy: ServedPolicy) -> None:
        if not callable(getattr(scheme, "receive", None)):
            raise TypeError(f"weight_sync must be a weight scheme, with receive(timeout=); got {type(scheme).__name__}")
        self.scheme = scheme
        self._model_id = model_id
        self._policy = policy
        #: It tells the server of what it applied, with the version; else it is counted here.
        self._tells = isinstance(scheme, WeightSyncScheme)

    def connect(self, server: InferenceServer) -> None:
        scheme = self.scheme
        if not getattr(scheme, "initialized_on_receiver", False) and hasattr(scheme, "init_on_receiver"):
            if self._tells:
                scheme.init_on_receiver(model_id=self._model_id, context=server)
            else:
                scheme.init_on_receiver(model_id=self._model_id, model=self._policy.model, worker_idx=0)
        elif self._tells and scheme.context is None:
            if scheme.model is not self._policy.model:
                raise ValueError(
                    "weight_sync was initialised for another model than the one that is served, which is a copy: leave "
                    "init_on_receiver to the server, or serve the module itself (share_weights=True)"
                )
            self._tells = False
        if not getattr(scheme, "synchronized_on_receiver", False) and hasattr(scheme, "connect"):
            scheme.connect(worker_idx=0)

    def receive(self) -> None:
        """Apply what has come; the policy does not compute meanwhile."""
        if self.scheme.receive(timeout=0) is not None and not self._tells:
            self._policy.count_update()

    def shutdown(self) -> None:
        if hasattr(self.scheme, "shutdown"):
            self.scheme.shutdown()
