"""What a worker and its owner say to each other: what it is made from, what it is, what to do, what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swath.errors import add_note
from swath.rollout.layout import Field, Layout

if TYPE_CHECKING:
    from swath.envs.base import EnvBase
    from swath.rollout.structure import Structure


@dataclass(frozen=True)
class EnvsOfWorker:
    """Which envs a worker has, and how they are made."""

    worker: int
    members: range
    factories: Sequence[Any]
    env_kwargs: Sequence[Mapping[str, Any]]

    def make_envs(self, made: list[EnvBase]) -> None:
        """Make them, one after the other, into a list: whoever called closes them, also if one cannot be made."""
        from swath.envs.making import make_env

        for member, factory, kwargs in zip(self.members, self.factories, self.env_kwargs, strict=True):
            try:
                made.append(make_env(factory, kwargs))
            except Exception as error:
                add_note(error, f"swath: raised while env {member} was made")
                raise

    def pieces(self) -> Iterator[tuple[str, Any]]:
        """What it is made of, by what its users call it."""
        for member, factory in zip(self.members, self.factories, strict=True):
            yield f"create_env_fn of env {member}", factory
        yield "create_env_kwargs", self.env_kwargs


@dataclass(frozen=True)
class Blueprint(EnvsOfWorker):
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
    base_seed: int
    num_threads: int
    init_fn: Callable[[], Any] | None

    def make_worker(self, channel: Any, page: Any, life: Life) -> Any:
        from swath.workers.worker import Worker  # in the worker only: its owner needs none of it

        return Worker(channel, page, self, life)

    def pieces(self) -> Iterator[tuple[str, Any]]:
        yield from super().pieces()
        yield "the policy", self.policy
        yield "policy_factory", self.policy_factory
        yield "init_fn", self.init_fn
        yield from self.collector_kwargs.items()


@dataclass(frozen=True)
class EnvBlueprint(EnvsOfWorker):
    """What a worker is made from that only steps envs, for an owner who has the policy."""

    #: Truncate an episode after so many steps.
    max_steps: int | None
    base_seed: int
    num_threads: int

    def make_worker(self, channel: Any, page: Any, life: Life) -> Any:
        from swath.workers.env_worker import EnvWorker

        return EnvWorker(channel, page, self, life)

    def make_host(self) -> Any:
        from swath.workers.env_worker import EnvHost

        return EnvHost(self)


@dataclass(frozen=True)
class EnvDescription:
    """What a worker says of its envs, which are alike."""

    #: The batch size of each env.
    env_size: torch.Size
    device: torch.device | None
    #: The env's specs by kind: "observation", "action" and so on.
    specs: Mapping[str, Any]
    #: Of one env.
    layout: Layout
    env: str
    resets_single_envs: bool
    steps_stay_in_episodes: bool = True
    merged: bool = True


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
    structure: Structure | None = None


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


#: Instead of a block's number: write to the replay buffer.
INTO_BUFFER = -1


class Ready(NamedTuple):
    """A batch is there: how many steps in each lane, and which version of the weights acted from which step on."""

    number: int
    steps: list[int]
    versions: list[tuple[int, int]]
    fragments: list[int]
    #: What is in the batch by number (``rollout/structure.py``).
    objects: Mapping[int, Any] = {}
