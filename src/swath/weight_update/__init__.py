"""How weights get from a trainer to the workers that collect."""

from swath.weight_update.processes import MultiProcessWeightSyncScheme, NoWeightSyncScheme
from swath.weight_update.scheme import TransportBackend, WeightSyncScheme
from swath.weight_update.shared_memory import SharedMemWeightSyncScheme
from swath.weight_update.strategy import WeightStrategy

__all__ = [
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightStrategy",
    "WeightSyncScheme",
]
