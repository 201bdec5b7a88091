"""The collector over ``torch.distributed``, where scripts for TorchRL import it from, too."""

from swath.collectors.distributed.launchers import DEFAULT_SLURM_CONF
from swath.collectors.distributed.legacy import DistributedDataCollector
from swath.collectors.distributed.over_torch import DistributedCollector
from swath.weight_update.updaters import DistributedWeightUpdater

__all__ = ["DEFAULT_SLURM_CONF", "DistributedCollector", "DistributedDataCollector", "DistributedWeightUpdater"]
