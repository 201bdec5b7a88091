"""What a replay buffer consists of; each part may be exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from swath.data.samplers import Sampler
from swath.data.storage_base import Storage
from swath.data.transform_chain import TransformChain
from swath.data.writers import Writer


@dataclass
class BufferParts:
    """Shared by all that works on one buffer."""

    storage: Storage
    sampler: Sampler
    writer: Writer
    transforms: TransformChain
