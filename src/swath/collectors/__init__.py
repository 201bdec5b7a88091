"""Collectors: policies run in envs, experience comes out in batches."""

from typing import TYPE_CHECKING

from swath.collectors.base import BaseCollector
from swath.collectors.batched import AsyncBatchedCollector
from swath.collectors.evaluator import Evaluator
from swath.collectors.legacy import (
    DataCollectorBase,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
    _MultiDataCollector,
    aSyncDataCollector,
)
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.profiling import ProfileConfig
from swath.collectors.reporting import Report
from swath.collectors.single import Collector
from swath.collectors.tracing import Trace
from swath.collectors.watching import Watch, watch
from swath.data.trajectories import split_trajectories
from swath.lazily import imported_when_asked
from swath.modules.random_policy import RandomPolicy
from swath.weight_update.updaters import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

if TYPE_CHECKING:
    from swath.collectors.distributed import DistributedDataCollector as DistributedDataCollector
    from swath.collectors.distributed import DistributedSyncDataCollector as DistributedSyncDataCollector
    from swath.collectors.distributed import RPCDataCollector as RPCDataCollector

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DataCollectorBase",
    "Evaluator",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "ProfileConfig",
    "RandomPolicy",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "Report",
    "SyncDataCollector",
    "Trace",
    "VanillaWeightUpdater",
    "Watch",
    "WeightUpdaterBase",
    "_MultiDataCollector",
    "aSyncDataCollector",
    "split_trajectories",
    "watch",
]

if not TYPE_CHECKING:  # for whom every name would be one of ours
    # They are of ``swath.collectors.distributed``, which is imported by those who use it only.
    _DISTRIBUTED = ("DistributedDataCollector", "DistributedSyncDataCollector", "RPCDataCollector")
    __getattr__ = imported_when_asked(__name__, dict.fromkeys(_DISTRIBUTED, "swath.collectors.distributed"))
