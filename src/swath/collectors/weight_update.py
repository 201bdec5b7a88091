"""The older interface to weights, where TorchRL has it."""

from swath.weight_update.updaters import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "DistributedWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
