"""Weight schemes by the way of deployment that they are for."""

from __future__ import annotations

from typing import Literal

from swath.weight_update.nodes import DistributedWeightSyncScheme, RayWeightSyncScheme, RPCWeightSyncScheme
from swath.weight_update.processes import MultiProcessWeightSyncScheme, NoWeightSyncScheme
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.shared_memory import SharedMemWeightSyncScheme

WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"
]
_KINDS: dict[str, type[WeightSyncScheme]] = {
    "none": NoWeightSyncScheme,
    "direct": NoWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "thread": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "multiprocessing": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}


def scheme_kind(backend: str) -> type[WeightSyncScheme]:
    """The kind of scheme for a backend.

    >>> scheme_kind("multiprocessing").__name__
    'MultiProcessWeightSyncScheme'
    """
    if backend not in _KINDS:
        raise ValueError(f"there is no weight scheme for {backend!r}; there are {', '.join(map(repr, _KINDS))}")
    return _KINDS[backend]
