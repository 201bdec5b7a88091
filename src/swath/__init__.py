"""Collects reinforcement-learning data.

What most scripts need has a name here, and is imported when it is asked for; ``import swath`` alone imports neither
torch nor any env:

>>> from swath import Collector, GymEnv
>>> next(iter(Collector(GymEnv("CartPole-v1"), None, frames_per_batch=8, total_frames=8))).batch_size
torch.Size([8])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swath.dataset import load

if TYPE_CHECKING:
    from swath import collectors, data, envs, modules, testing, tuning, weight_update
    from swath.collectors import (
        AsyncBatchedCollector,
        AsyncCollector,
        Collector,
        Evaluator,
        MultiAsyncCollector,
        MultiCollector,
        MultiSyncCollector,
        RandomPolicy,
        split_trajectories,
        watch,
    )
    from swath.collectors.distributed import DistributedCollector, RayCollector
    from swath.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        PrioritizedSampler,
        ReplayBuffer,
        SliceSampler,
        TensorDictReplayBuffer,
    )
    from swath.envs import (
        EnvBase,
        ExplorationType,
        GymEnv,
        GymWrapper,
        ParallelEnv,
        SerialEnv,
        TransformedEnv,
        set_exploration_type,
    )
    from swath.modules import InferenceServer
    from swath.monitoring import scalars

__version__ = "0.1.0"

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "Collector",
    "DistributedCollector",
    "EnvBase",
    "Evaluator",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "InferenceServer",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "ParallelEnv",
    "PrioritizedSampler",
    "RandomPolicy",
    "RayCollector",
    "ReplayBuffer",
    "SerialEnv",
    "SliceSampler",
    "TensorDictReplayBuffer",
    "TransformedEnv",
    "__version__",
    "collectors",
    "data",
    "envs",
    "load",
    "modules",
    "scalars",
    "set_exploration_type",
    "split_trajectories",
    "testing",
    "tuning",
    "watch",
    "weight_update",
]

_FOLDERS = ("collectors", "data", "envs", "modules", "testing", "tuning", "weight_update")
_HOMES = {
    "AsyncBatchedCollector": "collectors",
    "AsyncCollector": "collectors",
    "Collector": "collectors",
    "DistributedCollector": "collectors.distributed",
    "EnvBase": "envs",
    "Evaluator": "collectors",
    "ExplorationType": "envs",
    "GymEnv": "envs",
    "GymWrapper": "envs",
    "InferenceServer": "modules",
    "LazyMemmapStorage": "data",
    "LazyTensorStorage": "data",
    "MultiAsyncCollector": "collectors",
    "MultiCollector": "collectors",
    "MultiSyncCollector": "collectors",
    "ParallelEnv": "envs",
    "PrioritizedSampler": "data",
    "RandomPolicy": "collectors",
    "RayCollector": "collectors.distributed",
    "ReplayBuffer": "data",
    "SerialEnv": "envs",
    "SliceSampler": "data",
    "TensorDictReplayBuffer": "data",
    "TransformedEnv": "envs",
    "scalars": "monitoring",
    "set_exploration_type": "envs",
    "split_trajectories": "collectors",
    "watch": "collectors",
}


if not TYPE_CHECKING:  # for whom every name would be one of ours

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return import_module(f"swath.{name}")
        if name not in _HOMES:
            where = ", ".join(f"swath.{folder}" for folder in _FOLDERS)
            raise AttributeError(
                f"module 'swath' has no attribute {name!r}: what is not in dir(swath) may be in {where}"
            )
        found = getattr(import_module(f"swath.{_HOMES[name]}"), name)
        globals()[name] = found  # asked for once
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
