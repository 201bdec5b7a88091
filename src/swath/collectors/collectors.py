"""The collectors, where scripts for TorchRL import them from, too."""

from tensordict.nn import InteractionType

from swath.collectors.base import BaseCollector
from swath.collectors.legacy import (
    DataCollectorBase,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.single import Collector
from swath.data.trajectories import split_trajectories
from swath.modules.random_policy import RandomPolicy

#: Of every collector that is not told otherwise.
DEFAULT_EXPLORATION_TYPE = InteractionType.RANDOM

__all__ = [
    "DEFAULT_EXPLORATION_TYPE",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DataCollectorBase",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RandomPolicy",
    "SyncDataCollector",
    "aSyncDataCollector",
    "split_trajectories",
]
