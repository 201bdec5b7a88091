"""What a scheme says of itself: which side it is, of which model, for whom."""

from __future__ import annotations

import weakref
from typing import Any

from swath.weight_update.strategy import WeightStrategy


class SchemeRole:
    """The part of a scheme that is only asked."""

    strategy: WeightStrategy
    model_id: str | None
    _role: str | None
    _connected: bool
    _context: weakref.ref[Any] | None
    _worker_idx: int | None

    def _source(self) -> Any:
        """The model, or the weights, that it was given."""
        raise NotImplementedError

    def set_source(self, source: Any) -> None:
        raise NotImplementedError

    @property
    def context(self) -> Any:
        """The collector, or server, that it works for, if there is one, and it is not gone."""
        return None if self._context is None else self._context()

    @property
    def model(self) -> Any:
        """The model whose weights are sent, or that gets them."""
        model = self._source()
        if model is None and self._role == "receiver" and hasattr(self.context, "get_model"):
            return self.context.get_model(self.model_id)
        return model

    @model.setter
    def model(self, model: Any) -> None:
        self.set_source(model)

    @property
    def weights(self) -> Any:
        """A copy of the model's weights, as ``strategy`` has them; None without a model."""
        model = self.model
        return None if model is None else self.strategy.extract_weights(model)

    @property
    def worker_idx(self) -> int | None:
        """Which receiver it is."""
        return self._worker_idx

    @property
    def initialized_on_sender(self) -> bool:
        return self._role == "sender"

    @property
    def initialized_on_receiver(self) -> bool:
        return self._role == "receiver"

    @property
    def synchronized_on_sender(self) -> bool:
        return self._role == "sender" and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        return self._role == "receiver" and self._connected

    def __repr__(self) -> str:
        state = "not initialised" if self._role is None else f"{self._role}{', connected' if self._connected else ''}"
        return f"{type(self).__name__}(model_id={self.model_id!r}, {state})"
