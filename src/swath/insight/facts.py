"""How a program that collects has spent a while: all that a verdict is made from, whoever has measured it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median


class Way(StrEnum):
    """How collecting and its user take turns."""

    #: In the user's process, one after the other.
    SINGLE = "single"
    #: Workers; all of them have a part of every batch.
    SYNC = "sync"
    #: Workers that go on by themselves, whoever is first.
    ASYNC = "async"
    #: Workers that step, for one policy of the owner's.
    BATCHED = "batched"


@dataclass(frozen=True)
class Place:
    """A worker, a node, or the process itself: how it has spent its time. Of the shares, all three are 1.

    Args:
        name: what it is to the user: "worker 3".
        num_envs: how many envs it steps.
        env: share of its time in envs, resets included.
        policy: share in the policy.
        waiting: share without anything to do.
        frames: what it has collected in this while.
        sleeps: whether steps wait rather than compute; None where nobody knows.
        on_core: which share of the time in which it collects it computes; None where nobody knows.
    """

    name: str
    num_envs: int
    env: float
    policy: float
    waiting: float
    frames: float
    sleeps: bool | None = None
    on_core: float | None = None

    @property
    def busy(self) -> float:
        return self.env + self.policy


@dataclass(frozen=True)
class Facts:
    """How a program has spent a while.

    Args:
        way: how collecting and its user take turns.
        seconds: how long the while was.
        cores: that this process may use.
        places: who collects.
        yours: share of the time in which the user had the turn, between two batches.
        in_background: the user does not ask for batches: a replay buffer gets them (``start()``).
        held_back: share of the time in which collecting waited for the learner (``SamplesPerInsert``).
        in_processes: whether the envs are in processes of their own.
    """

    way: Way
    seconds: float
    cores: int
    places: Sequence[Place]
    yours: float = 0.0
    in_background: bool = False
    held_back: float = 0.0
    in_processes: bool = False

    @property
    def frames(self) -> float:
        return sum(place.frames for place in self.places)

    @property
    def num_envs(self) -> int:
        return sum(place.num_envs for place in self.places)

    def mean(self, share: str) -> float:
        """Of a share, over all places."""
        return sum(getattr(place, share) for place in self.places) / max(1, len(self.places))

    def slowest(self) -> tuple[Place, float] | None:
        """The place that takes longest for a frame of an env, and how many times as long as the others.

        In time that it was busy: where all have a part of every batch, all deliver the same, however fast they are.
        """
        cost = {place: place.busy * place.num_envs / place.frames for place in self.places if place.frames}
        if len(cost) < 2:
            return None
        place = max(cost, key=cost.__getitem__)
        others = median(seconds for other, seconds in cost.items() if other is not place)
        return (place, cost[place] / others) if others > 0 else None
