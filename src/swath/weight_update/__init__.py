"""How weights get from a trainer to the workers that collect."""

from swath.weight_update.backends import WeightSyncBackend
from swath.weight_update.context import TransportBackend
from swath.weight_update.nodes import (
    DistributedWeightSyncScheme,
    NodeWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)
from swath.weight_update.processes import MultiProcessWeightSyncScheme, NoWeightSyncScheme
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.shared_memory import SharedMemWeightSyncScheme
from swath.weight_update.strategy import WeightStrategy

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "NodeWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightStrategy",
    "WeightSyncBackend",
    "WeightSyncScheme",
]
