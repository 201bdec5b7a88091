"""Names that collectors on nodes had earlier. (``RPCDataCollector`` is beside ``RPCCollector``.)"""

from __future__ import annotations

from swath.collectors.distributed.over_torch import DistributedCollector, DistributedSyncCollector
from swath.collectors.legacy import Renamed


class DistributedDataCollector(DistributedCollector, metaclass=Renamed):
    """The old name of ``DistributedCollector``."""

    new = DistributedCollector


class DistributedSyncDataCollector(DistributedSyncCollector, metaclass=Renamed):
    """The old name of ``DistributedSyncCollector``."""

    new = DistributedSyncCollector
