"""Which transport a server uses, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swath.modules.inference_server.fixed_slots import ProcessSlotTransport, SharedMemoryTransport
from swath.modules.inference_server.pipes import MPTransport
from swath.modules.inference_server.slots import SlotTransport
from swath.modules.inference_server.threads import ThreadingTransport
from swath.modules.inference_server.transport import InferenceTransport

#: Names of swath and of TorchRL.
_IN_THIS_PROCESS = ("auto", "thread", "threads", "queue", "direct")
_PIPES = ("mp", "process")
_DECLARED: dict[str, type[ProcessSlotTransport]] = {
    "process_slot": ProcessSlotTransport,
    "shared_memory": SharedMemoryTransport,
}


def choose_transport(
    transport: Any,
    num_clients: int | None = None,
    *,
    request_spec: Any = None,
    response_spec: Any = None,
    options: Mapping[str, Any] | None = None,
) -> InferenceTransport:
    """A transport that was given, or the one of this name.

    ==================================  ==================================================================
    "auto", "thread", "queue", "direct"  ``ThreadingTransport``
    "mp", "process"                      ``MPTransport``
    "slots"                              ``SlotTransport``
    "process_slot"                       ``ProcessSlotTransport``, with request_spec and response_spec
    "shared_memory"                      ``SharedMemoryTransport``, with request_spec and response_spec
    ==================================  ==================================================================
    """
    if isinstance(transport, InferenceTransport):
        if options:
            raise ValueError("transport_options are for a transport that the server makes; this one is made already")
        return transport
    if response_spec is not None and transport not in _DECLARED:
        raise ValueError("response_spec is for transport='process_slot' or 'shared_memory'")
    chosen = dict(options or {})
    if transport in _IN_THIS_PROCESS:
        return ThreadingTransport(**chosen)
    if num_clients is not None:
        chosen.setdefault("num_slots", num_clients)
    if transport in _PIPES:
        return MPTransport(**chosen)
    if transport == "slots":
        return SlotTransport(request_spec=request_spec, **chosen)
    if transport in _DECLARED:
        if request_spec is None or response_spec is None:
            raise ValueError(f"transport={transport!r} needs request_spec and response_spec")
        chosen.setdefault("num_slots", 1)
        return _DECLARED[transport](request_spec, response_spec, **chosen)
    names = ", ".join(map(repr, (*_IN_THIS_PROCESS, *_PIPES, "slots", *_DECLARED)))
    raise ValueError(f"transport must be one of {names} or an InferenceTransport, got {transport!r}")
