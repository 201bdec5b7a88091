"""Clients: what asks a server."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from swath.hints import ExplainsGuesses

if TYPE_CHECKING:
    from swath.modules.inference_server.transport import InferenceTransport


class InferenceClient(ExplainsGuesses):
    """Asks a server. Made by ``server.client()`` or ``transport.client()``; may be used by several threads.

    Args:
        transport: what requests are submitted to.
    """

    _inner = ("carries_interaction_type",)

    #: The caller's interaction type goes along with what is submitted; else it has to be in it.
    carries_interaction_type = False

    def __init__(self, transport: InferenceTransport) -> None:
        self._transport: Any = transport
        self.carries_interaction_type = transport.carries_interaction_type

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Ask, and wait: a new TensorDict with what was given, the policy's outputs and its version.

        Only the keys that the policy reads are sent.
        """
        return self.submit(td).result()

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        """Ask, and go on."""
        return self._transport.submit(td)

    def __deepcopy__(self, memo: dict[int, Any]) -> InferenceClient:
        """A policy that is copied asks the same server."""
        return self._transport.client()

    def close(self) -> None:
        """Let go of what the client holds; it can be used again."""
