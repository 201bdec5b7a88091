"""What a worker that collects and its owner say to each other: what it is, what to do, what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from swath.rollout.layout import Field
from swath.workers.spec import EnvsOfWorker, Incarnation

if TYPE_CHECKING:
    from swath.data.episodes import Ended
    from swath.envs.base import EnvBase
    from swath.rollout.structure import Structure


@dataclass(frozen=True)
class WorkerSpec(EnvsOfWorker):
    """All that a worker is made from; travels by cloudpickle."""

    #: Of the collector.
    num_members: int
    #: Trajectory ids of a member are its number plus multiples of this.
    id_stride: int
    policy: Any
    policy_factory: Callable[[], Any] | None
    #: Frames of a full batch of one member.
    frames: int
    collector_class: type
    collector_kwargs: Mapping[str, Any]
    init_fn: Callable[[], Any] | None
    #: Gives an env what the policy needs; None: nothing.
    complete_env: Callable[[EnvBase, Any], EnvBase] | None

    can_be_restarted: ClassVar[bool] = True

    def result(self, *parts: Any) -> CollectResult:
        return CollectResult(*parts)

    def make_worker(self, channel: Any, page: Any, incarnation: Incarnation) -> Any:
        from swath.remote.worker import Worker  # in the worker only: its owner needs none of it

        return Worker(channel, page, self, incarnation)

    def pieces(self) -> Iterator[tuple[str, Any]]:
        yield from super().pieces()
        yield "the policy", self.policy
        yield "policy_factory", self.policy_factory
        yield "init_fn", self.init_fn
        yield from self.collector_kwargs.items()


@dataclass(frozen=True)
class WorkerDescription:
    """What a worker says of itself once it is ready."""

    env_size: torch.Size
    fields: tuple[Field, ...]
    env: str
    merged: bool
    has_weights: bool
    structure: Structure | None = None


class CollectRequest(NamedTuple):
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
    #: For the replay buffer: how many of this worker's envs write (None: all).
    num_rows: int | None = None
    #: Whether new episodes start: in those under way, steps were taken that nobody got.
    anew: bool = False


def random_in_rows(random_frames: int, rows: range, num_rows: int) -> int:
    """How many of an order's random frames some of its rows get: they come first, step by step, the first rows first.

    >>> [random_in_rows(7, range(row, row + 1), 3) for row in range(3)], random_in_rows(7, range(1, 3), 3)
    ([3, 2, 2], 4)
    """
    steps, mixed = divmod(random_frames, num_rows)
    return steps * len(rows) + min(max(mixed - rows.start, 0), len(rows))


def random_in_lanes(random_frames: int, steps: Sequence[int], num_rows: int) -> int:
    """How many of an order's random frames are in the first steps of each lane; lanes are alike.

    >>> random_in_lanes(10, [5, 5], 2), random_in_lanes(10, [2, 5], 2)
    (10, 7)
    """
    each = num_rows // len(steps)
    rows = [range(first, first + each) for first in range(0, num_rows, each)]
    return sum(min(random_in_rows(random_frames, r, num_rows), n * each) for r, n in zip(rows, steps, strict=True))


def random_share(frames: Sequence[int], num_envs: int, wanted: int) -> int:
    """Of members with so many frames to deliver (the longest first), how many frames of all their steps must be random
    for ``wanted`` of those delivered to be: random frames come first, step by step.

    >>> random_share([10, 10], 1, 7), random_share([10, 4], 1, 12), random_share([20, 1], 2, 4)
    (7, 16, 5)
    """
    step = 0
    while step * num_envs < frames[0] and wanted > 0:
        delivered = sum(min(num_envs, max(0, each - step * num_envs)) for each in frames)
        if wanted < delivered:
            break
        wanted -= delivered
        step += 1
    return step * len(frames) * num_envs + (wanted if step * num_envs < frames[0] else 0)


#: Instead of a block's number: write to the replay buffer.
INTO_BUFFER = -1


class CollectResult(NamedTuple):
    """A batch is there: how many steps in each lane, and which version of the weights acted from which step on."""

    number: int
    steps: list[int]
    versions: list[tuple[int, int]]
    fragments: list[int]
    #: What is in the batch by number (``rollout/structure.py``).
    objects: Mapping[int, Any] = {}
    #: Of batches that were written to the replay buffer: those that have ended in them, as far as they were counted.
    episodes: Ended | None = None
