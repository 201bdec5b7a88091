"""Collectors whose rollouts run on nodes: Ray actors, torch.distributed ranks, torch RPC workers."""

from typing import TYPE_CHECKING

from swath.collectors.distributed.launchers import DEFAULT_SLURM_CONF, submitit_delayed_launcher
from swath.collectors.distributed.legacy import DistributedDataCollector, DistributedSyncDataCollector
from swath.collectors.distributed.over_torch import DistributedCollector, DistributedSyncCollector
from swath.collectors.distributed.ray import RayCollector
from swath.collectors.distributed.ray_eval_worker import RayEvalWorker
from swath.lazily import imported_when_asked
from swath.weight_update.updaters import DistributedWeightUpdater, RPCWeightUpdater

if TYPE_CHECKING:
    from swath.collectors.distributed.rpc import RPCCollector, RPCDataCollector

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCDataCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "RayEvalWorker",
    "submitit_delayed_launcher",
]

if not TYPE_CHECKING:  # for whom every name would be one of ours
    # Torch RPC is imported by those who use it only.
    _RPC = "swath.collectors.distributed.rpc"
    __getattr__ = imported_when_asked(__name__, {"RPCCollector": _RPC, "RPCDataCollector": _RPC})
