"""RayClient: asks an actor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tensordict import TensorDictBase

from swath.errors import ServerDied
from swath.integrations.ray import import_ray
from swath.keys import Key
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.replies import opened
from swath.modules.inference_server.requests import read_content
from swath.modules.inference_server.stamp import stamped


class RayClient(InferenceClient):
    """A client that works in any process of the cluster, wherever it is unpickled.

    Args:
        actor: has ``ask(tensordict)``, which returns ``("answer", outputs)`` or ``("failed", exception)``.
        in_keys: what is sent; None: everything.
    """

    carries_interaction_type = True

    def __init__(self, actor: Any, in_keys: tuple[Key, ...] | None) -> None:
        self._actor = actor
        self._in_keys = in_keys

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        reference = self._ask(td)
        return td.copy().update(opened(*reply_from(lambda: import_ray().get(reference))))

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        asked = td.copy()
        future: Future[TensorDictBase] = Future()
        future.set_running_or_notify_cancel()

        def settle(answered: Future[Any]) -> None:
            try:
                future.set_result(asked.update(opened(*reply_from(answered.result))))
            except Exception as error:
                future.set_exception(error)

        self._ask(td).future().add_done_callback(settle)
        return future

    def _ask(self, tensordict: TensorDictBase) -> Any:
        content = read_content(tensordict, self._in_keys)
        return self._actor.ask.remote(stamped(content.as_tensordict(), content.kind))

    def __deepcopy__(self, memo: dict[int, Any]) -> RayClient:
        return type(self)(self._actor, self._in_keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._actor, self._in_keys)


def reply_from(get: Callable[[], Any]) -> Any:
    """What a call of an actor gives.

    Raises:
        ServerDied: the actor is gone.
    """
    try:
        return get()
    except import_ray().exceptions.RayActorError as error:
        raise ServerDied(f"the inference server is gone: {error}") from error
