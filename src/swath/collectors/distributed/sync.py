"""The synchronous collector over ``torch.distributed``, where scripts for TorchRL import it from, too."""

from swath.collectors.distributed.legacy import DistributedSyncDataCollector
from swath.collectors.distributed.over_torch import DistributedSyncCollector

__all__ = ["DistributedSyncCollector", "DistributedSyncDataCollector"]
