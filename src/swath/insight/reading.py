"""Where a program that collects stands at a moment, as plain numbers: what is shown of it, written down, and judged.

All seconds and counts are since the beginning, so two readings tell what was between them (``facts_between``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from swath.insight.facts import Facts, Place, Way
from swath.insight.from_json import of_json

#: A step that computes for less than this share of its time is one that waits.
_COMPUTES = 0.5


@dataclass(frozen=True)
class Program:
    """What does not change while it collects.

    Args:
        collector: its class.
        env: what the envs are, in words.
        layout: which envs are where, in words; empty in one process.
        command: how the program was called.
        cores: that it may use.
        total_frames: None for endless.
        started_at: seconds since 1970.
        in_processes: whether the envs are in processes of their own.
        versions: of what it runs on, by name.
    """

    collector: str
    env: str
    layout: str
    command: str
    pid: int
    way: Way
    cores: int
    num_envs: int
    frames_per_batch: int
    total_frames: int | None
    started_at: float
    in_processes: bool
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlaceReading:
    """A worker, a node, or the process itself. Its three parts of time add up to how long it has been there.

    Args:
        name: what it is to the user: "worker 3".
        env_s: in envs, resets included.
        policy_s: in the policy.
        waiting_s: without anything to do.
        cpu_s: in which it computed, of the time in which it collected; None where nobody knows.
        policy_version: of the weights that it has.
    """

    name: str
    pid: int | None
    alive: bool
    num_envs: int
    frames: int
    env_s: float
    policy_s: float
    waiting_s: float
    cpu_s: float | None = None
    policy_version: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class EpisodesReading:
    """Episodes that have ended: how many, and the last of them, the newest last."""

    count: int = 0
    returns: Sequence[float] = ()
    lengths: Sequence[int] = ()


@dataclass(frozen=True)
class BufferReading:
    """The replay buffer."""

    size: int
    capacity: int
    write_count: int
    num_sampled: int

    @property
    def samples_per_insert(self) -> float:
        return self.num_sampled / self.write_count if self.write_count else 0.0


@dataclass(frozen=True)
class Reading:
    """A moment.

    Args:
        at_s: when, by ``time.monotonic``.
        age_s: since the collector was made.
        collecting_s: in which a batch was being got; in the background, in which it ran.
        yours_s: in which the user had the turn, between two batches.
        held_back_s: in which collecting waited for the learner (``SamplesPerInsert``).
        in_background: the user does not ask for batches: a replay buffer gets them.
        lags: how many frames were so many updates old when they were delivered; in the last, so many or more.
        shared_bytes: of memory that batches are in.
        failure: what has ended it, if anything.
        is_closed: it is over.
    """

    program: Program
    at_s: float
    age_s: float
    frames: int
    batches: int
    collecting_s: float
    yours_s: float
    places: Sequence[PlaceReading]
    held_back_s: float = 0.0
    in_background: bool = False
    policy_version: int = 0
    lags: Sequence[int] = ()
    episodes: EpisodesReading = EpisodesReading()
    buffer: BufferReading | None = None
    shared_bytes: int | None = None
    failure: str | None = None
    is_closed: bool = False

    @property
    def restarts(self) -> int:
        return sum(place.restarts for place in self.places)

    def lag_quantile(self, share: float) -> int | None:
        """How old frames were when they were delivered, in updates: so many, or less, of this share of them.

        None if nothing was delivered.
        """
        return lag_quantile(self.lags, share)

    def as_json(self) -> dict[str, Any]:
        """As what JSON has."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Self:
        """What ``as_json`` made; a ``ValueError`` says what is wrong with it."""
        return of_json(cls, data)


def lag_quantile(lags: Sequence[int], share: float) -> int | None:
    """Of frames by age: as old as this share of them is, or less; None if there are none.

    >>> lag_quantile([90, 8, 2], 0.95)
    1
    """
    total, seen = sum(lags), 0
    for lag, frames in enumerate(lags):
        seen += frames
        if total and seen >= share * total:
            return lag
    return None


def facts_between(before: Reading | None, after: Reading) -> Facts:
    """How the time between two moments was spent; None for since the beginning.

    A place that was started again meanwhile is as of its beginning.
    """
    earlier = {} if before is None else {(place.name, place.restarts): place for place in before.places}
    places = [_place_between(earlier.get((place.name, place.restarts)), place) for place in after.places if place.alive]
    seconds = after.age_s - (0.0 if before is None else before.age_s)

    def share(name: str) -> float:
        spent = getattr(after, name) - (0.0 if before is None else getattr(before, name))
        return min(1.0, max(0.0, spent / seconds)) if seconds > 0 else 0.0

    return Facts(
        way=after.program.way,
        seconds=seconds,
        cores=after.program.cores,
        places=places,
        yours=share("yours_s"),
        in_background=after.in_background,
        held_back=share("held_back_s"),
        in_processes=after.program.in_processes,
    )


def _place_between(before: PlaceReading | None, after: PlaceReading) -> Place:
    def since(name: str) -> float:
        return max(0.0, getattr(after, name) - (0 if before is None else getattr(before, name)))

    env_s, policy_s, waiting_s = since("env_s"), since("policy_s"), since("waiting_s")
    whole_s = env_s + policy_s + waiting_s
    if not whole_s:
        return Place(after.name, after.num_envs, 0.0, 0.0, 1.0, since("frames"))
    on_core = None
    if after.cpu_s is not None and env_s + policy_s > 0:
        known = 0.0 if before is None or before.cpu_s is None else before.cpu_s
        on_core = min(1.0, max(0.0, after.cpu_s - known) / (env_s + policy_s))
    return Place(
        after.name,
        after.num_envs,
        env_s / whole_s,
        policy_s / whole_s,
        waiting_s / whole_s,
        since("frames"),
        sleeps=None if on_core is None else on_core < _COMPUTES,
        on_core=on_core,
    )
