"""Replay buffers."""

from typing import TYPE_CHECKING

from swath.data.burn_in import BurnInTransform
from swath.data.list_storage import ListStorage
from swath.data.multi_step import MultiStep, MultiStepTransform
from swath.data.prioritized import PrioritizedSampler
from swath.data.rate import SamplesPerInsert
from swath.data.replay_buffer import ReplayBuffer
from swath.data.reward_to_go import Reward2GoTransform
from swath.data.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from swath.data.slices import SliceSampler
from swath.data.slices_once import SliceSamplerWithoutReplacement
from swath.data.storage_base import Storage
from swath.data.storages import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from swath.data.tensordict_buffer import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from swath.data.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from swath.lazily import imported_when_asked

if TYPE_CHECKING:
    from swath.data.ray_buffer import RayReplayBuffer

__all__ = [
    "BurnInTransform",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiStep",
    "MultiStepTransform",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "Reward2GoTransform",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SamplesPerInsert",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]

if not TYPE_CHECKING:  # for whom every name would be one of ours
    __getattr__ = imported_when_asked(__name__, {"RayReplayBuffer": "swath.data.ray_buffer"})
