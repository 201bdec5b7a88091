"""Weights that get to the process of an Evaluator by the schemes that the user gave, one for each model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from swath.collectors.evaluation import Evaluation
from swath.process import pickling
from swath.process.helper import Helper
from swath.weight_update.nodes import NodeWeightSyncScheme
from swath.weight_update.scheme import WeightSyncScheme

#: The process, as schemes count them.
_WORKER = 0


def check_schemes(schemes: Any) -> dict[str, WeightSyncScheme]:
    """By model id.

    Raises:
        TypeError, ValueError: what is no scheme, or none for a process.
    """
    if not isinstance(schemes, Mapping):
        raise TypeError(f"weight_sync_schemes is a dict of a scheme for each model, got {type(schemes).__name__}")
    for model_id, scheme in schemes.items():
        if not isinstance(scheme, WeightSyncScheme) or isinstance(scheme, NodeWeightSyncScheme):
            raise TypeError(
                f"weight_sync_schemes[{model_id!r}] is a {type(scheme).__name__}: an Evaluator's process takes a "
                "SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme or NoWeightSyncScheme of swath.weight_update"
            )
        require_model(model_id, "weight_sync_schemes: ")
    return dict(schemes)


def require_model(model_id: str, where: str = "") -> None:
    if model_id != "policy" and "." not in model_id:
        raise KeyError(
            f"{where}there is no model {model_id!r}; an Evaluator has 'policy', and what a path such as "
            "'env.transform[0]' leads to"
        )


class Senders:
    """The owner's halves; what a scheme needs of a collector (``SenderContext``)."""

    num_workers = 1

    def __init__(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        self.lock = threading.RLock()
        self._schemes = schemes
        self._helper: Helper | None = None
        for model_id, scheme in schemes.items():
            scheme.init_on_sender(model_id=model_id, context=self)

    def halves(self) -> dict[str, WeightSyncScheme]:
        """The process's."""
        return {model_id: scheme.for_worker(_WORKER) for model_id, scheme in self._schemes.items()}

    def connect(self, helper: Helper) -> None:
        """The process has its halves."""
        self._helper = helper
        for scheme in self._schemes.values():
            scheme.started(_WORKER)
            scheme.connect()

    def send(self, weights: Mapping[str, Any]) -> None:
        for model_id, source in weights.items():
            self._schemes[model_id].send(source)

    def close(self) -> None:
        for scheme in self._schemes.values():
            scheme.shutdown()

    # -- for schemes -----------------------------------------------------------------------------------------------

    @property
    def _process(self) -> Helper:
        assert self._helper is not None
        return self._helper

    def wake_worker(self, worker: int, model_id: str) -> None:
        self._process.send(pickling.dumps(("take_weights", model_id)))

    def worker_sentinel(self, worker: int) -> int:
        return self._process.process.sentinel

    def worker_answered(self, worker: int) -> None:
        pass

    def look_at_workers(self, workers: Sequence[int]) -> None:
        pass

    def worker_gone(self, worker: int) -> None:
        self._process.receive()  # which raises, and says how it ended


class Receivers:
    """In the process: puts into an evaluation what the schemes get."""

    def __init__(self, schemes: Mapping[str, WeightSyncScheme], evaluation: Evaluation) -> None:
        self._schemes = schemes
        self._evaluation = evaluation
        for model_id, scheme in schemes.items():
            scheme.init_on_receiver(model_id=model_id, context=self, worker_idx=_WORKER)
            scheme.connect(worker_idx=_WORKER)

    def take(self, model_id: str) -> None:
        scheme = self._schemes[model_id]
        scheme.receive(timeout=scheme.timeout_s)

    # -- for schemes -----------------------------------------------------------------------------------------------

    def get_models(self, model_id: str) -> list[Any]:
        return self._evaluation.models(model_id)

    def weights_applied(self, model_id: str, version: int | None) -> None:
        """They are in force: the next evaluation begins with new episodes."""
