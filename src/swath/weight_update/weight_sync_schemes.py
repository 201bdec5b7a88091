"""Schemes, where scripts for TorchRL import them from, too."""

from swath.weight_update.backends import WeightSyncBackend
from swath.weight_update.context import TransportBackend
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.strategy import WeightStrategy

__all__ = ["TransportBackend", "WeightStrategy", "WeightSyncBackend", "WeightSyncScheme"]
