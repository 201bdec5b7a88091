"""What a worker and its owner say to each other: what it is made from, what it is, what to do, what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from swath.rollout.layout import Field


@dataclass(frozen=True)
class Blueprint:
    """All that a worker is made from; travels by cloudpickle."""

    worker: int
    members: range
    #: Of the collector; trajectory ids of a member are its number plus multiples of this.
    num_members: int
    factories: Sequence[Any]
    env_kwargs: Sequence[Mapping[str, Any]]
    policy: Any
    policy_factory: Callable[[], Any] | None
    #: Frames of a full batch of one member.
    frames: int
    collector_class: type
    collector_kwargs: Mapping[str, Any]
    base_seed: int
    num_threads: int
    init_fn: Callable[[], Any] | None


class Life(NamedTuple):
    """What differs when a worker is started again."""

    number: int = 0
    #: No trajectory id below this is used.
    first_traj_id: int = 0


@dataclass(frozen=True)
class Description:
    """What a worker says of itself once it is ready."""

    env_size: torch.Size
    fields: tuple[Field, ...]
    env: str
    merged: bool
    has_weights: bool


class Order(NamedTuple):
    """Collect a batch."""

    number: int
    block: int
    #: Of every member of the block.
    steps: tuple[int, ...]
    #: Which of the block's members these are.
    members: range
    #: Steps before this one are there already.
    first_step: int
    random_frames: int


class Ready(NamedTuple):
    """A batch is there: how many steps in each lane, and which version of the weights acted from which step on."""

    number: int
    steps: list[int]
    versions: list[tuple[int, int]]
    fragments: list[int]
