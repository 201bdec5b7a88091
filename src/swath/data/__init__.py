"""Replay buffers."""

from swath.data.prioritized import PrioritizedSampler
from swath.data.rate import SamplesPerInsert
from swath.data.replay_buffer import ReplayBuffer, TensorDictReplayBuffer
from swath.data.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from swath.data.slices import SliceSampler
from swath.data.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage
from swath.data.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SamplesPerInsert",
    "SliceSampler",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "Writer",
]
