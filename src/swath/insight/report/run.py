"""All that a report is made of, whoever has it: a collector, a dataset's folder, a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swath.data.episodes import Episodes
from swath.insight.facts import Facts, Way
from swath.insight.reading import EpisodesReading, Program, Reading, facts_between
from swath.insight.report.lanes import Lanes

#: Of a run, so many readings are kept at the most, and places in all of them.
_MOST_READINGS = 400
_MOST_PLACES = 40_000
_LEAST_SECONDS = 0.2
#: A step that computes for less than this share of its time is one that waits.
_COMPUTES = 0.5


@dataclass(frozen=True)
class EpisodeSeries:
    """Episodes that ended, in that order: what each was worth, how long it was, and how many frames there were then."""

    returns: np.ndarray
    lengths: np.ndarray
    frames: np.ndarray

    @classmethod
    def of(cls, episodes: Episodes) -> EpisodeSeries:
        return cls(episodes.returns, episodes.lengths, episodes.frames)

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[float, int]]) -> EpisodeSeries:
        """Of returns and lengths alone: frames are those of the episodes until then."""
        pairs = list(rows)
        lengths = np.array([length for _, length in pairs], dtype=np.int64)
        return cls(np.array([value for value, _ in pairs], dtype=np.float64), lengths, np.cumsum(lengths))

    def __len__(self) -> int:
        return len(self.returns)


@dataclass(frozen=True)
class Event:
    """A fault, or a new start. ``at_s`` is since the collector was made."""

    at_s: float
    place: str
    says: str


@dataclass(frozen=True)
class Ideal:
    """What a run could have been if collecting cost nothing: X* = C / (s + f(b)/b).

    Args:
        step_s: s, of one env's step, resets included.
        policy_s: f(b)/b, of the policy for one frame.
        at_a_time: C, how many steps can be taken at the same time.
        fps: X, what was reached while collecting had the turn.
        sleeps: whether steps wait, so that cores do not bound them.
    """

    step_s: float
    policy_s: float
    at_a_time: int
    fps: float
    sleeps: bool

    @property
    def ideal_fps(self) -> float:
        return self.at_a_time / (self.step_s + self.policy_s)

    @property
    def efficiency(self) -> float:
        return self.fps / self.ideal_fps


@dataclass(frozen=True)
class Run:
    """What a report tells. Whatever is missing is left out of it.

    Args:
        about: what ran, for people: names and what they are, in this order.
        readings: where it stood, the oldest first (see ``Thinned``).
        lanes: its timeline.
        episodes: all that are known.
        envs: which envs a place has, by its name.
        notes: what is not there, and why.
    """

    about: Mapping[str, str]
    readings: Sequence[Reading] = ()
    lanes: Lanes | None = None
    episodes: EpisodeSeries | None = None
    envs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def program(self) -> Program | None:
        return self.readings[-1].program if self.readings else None

    @property
    def first(self) -> Reading | None:
        """Where what is told begins; None for the beginning."""
        return self.readings[0] if len(self.readings) > 1 else None

    @property
    def in_background(self) -> bool:
        """Whether it went on beside its user for most of the time; at the end it may have been stopped."""
        return 2 * sum(reading.in_background for reading in self.readings) > len(self.readings)

    def facts(self) -> Facts | None:
        """How its time was spent, over all that is known."""
        if not self.readings:
            return None
        last = self.readings[-1]
        # At the end all are gone, or the one that has ended it: those count that were there until then.
        before = self.readings[-2] if len(self.readings) > 1 else last
        there = {place.name for place in (*before.places, *last.places) if place.alive}
        places = [replace(place, alive=place.name in there or not there) for place in last.places]
        return facts_between(self.first, replace(last, places=places, in_background=self.in_background))

    def rates(self) -> tuple[list[float], list[float]]:
        """Frames/s between two readings, at times since the collector was made."""
        times: list[float] = []
        rates: list[float] = []
        if len(self.readings) < 2:
            return times, rates
        before, last = self.readings[0], self.readings[-1]
        # The last reading may follow right behind another one: a rate over so little says nothing.
        least = min(_LEAST_SECONDS, (last.age_s - before.age_s) / 4)
        for reading in self.readings[1:]:
            if reading.age_s - before.age_s > least:
                times.append((before.age_s + reading.age_s) / 2)
                rates.append((reading.frames - before.frames) / (reading.age_s - before.age_s))
                before = reading
        return times, rates

    def events(self) -> list[Event]:
        """New starts, places that were lost, and what ended it."""
        found = []
        before: Reading | None = None
        for reading in self.readings:
            known = {} if before is None else {place.name: place for place in before.places}
            for place in reading.places:
                was = known.get(place.name)
                if was is None:
                    continue
                if place.restarts > was.restarts:
                    times = place.restarts - was.restarts
                    says = "was started again" + (f", {times} times" if times > 1 else "")
                    found.append(Event(reading.age_s, place.name, f"{says} (process {place.pid})"))
                elif was.alive and not place.alive and any(other.alive for other in reading.places):
                    found.append(Event(reading.age_s, place.name, f"was lost (process {was.pid})"))
            if reading.failure is not None and (before is None or before.failure is None):
                found.append(Event(reading.age_s, "the collector", f"ended: {reading.failure}"))
            before = reading
        return found

    def ideal(self) -> Ideal | None:
        """η is against this; None where too little is known."""
        if not self.readings:
            return None
        last, first = self.readings[-1], self.first
        program, places = last.program, last.places
        takes_turns = program.way in (Way.SINGLE, Way.SYNC) and not self.in_background
        clock = "collecting_s" if takes_turns else "age_s"
        seconds = getattr(last, clock) - (0.0 if first is None else getattr(first, clock))
        frames = last.frames - (0 if first is None else first.frames)
        cost = _cost(first, last)
        if frames <= 0 or seconds <= 0 or cost is None:
            return None
        step_s, policy_s, on_core = cost
        sleeps = on_core is not None and on_core < _COMPUTES
        at_a_time = len(places) if sleeps else min(program.cores, len(places)) if program.in_processes else 1
        return Ideal(step_s, policy_s, max(1, at_a_time), frames / seconds, sleeps)


def _cost(first: Reading | None, last: Reading) -> tuple[float, float, float | None] | None:
    """Seconds in envs and in the policy for a frame, and which share of them was computing; of places that stayed."""
    earlier = {} if first is None else {(place.name, place.restarts): place for place in first.places}
    frames = env_s = policy_s = cpu_s = 0.0
    count, is_known = 0, True
    for place in last.places:
        was = earlier.get((place.name, place.restarts))
        if was is None and (earlier or place.restarts):
            continue
        count += 1
        frames += place.frames - (0 if was is None else was.frames)
        env_s += place.env_s - (0.0 if was is None else was.env_s)
        policy_s += place.policy_s - (0.0 if was is None else was.policy_s)
        cpu_s += (place.cpu_s or 0.0) - (0.0 if was is None else was.cpu_s or 0.0)
        is_known &= place.cpu_s is not None
    if frames <= 0 or env_s + policy_s <= 0:
        return None
    on_core = cpu_s / (env_s + policy_s) if is_known else None
    if last.program.way == Way.BATCHED:  # all of them wait for the one policy, at the same time
        policy_s /= count
    return env_s / frames, policy_s / frames, on_core


class Thinned:
    """Readings of a run, about evenly over it, however long it is: when there are many, every other one goes.

    >>> from types import SimpleNamespace
    >>> kept = Thinned(most=4)
    >>> for number in range(9):
    ...     kept.add(SimpleNamespace(number=number, places=()))
    >>> [reading.number for reading in kept.readings]
    [0, 4, 8]
    """

    def __init__(self, most: int = _MOST_READINGS) -> None:
        self.readings: list[Reading] = []
        self._most = most
        self._every = 1
        self._seen = 0
        #: The last one, if it was not kept.
        self._last: Reading | None = None

    def add(self, reading: Reading) -> None:
        is_due = self._seen % self._every == 0
        self._seen += 1
        if not is_due:
            self._last = reading
            return
        self._last = None
        self.readings.append(reading)
        if len(self.readings) > min(self._most, max(8, _MOST_PLACES // max(1, len(reading.places)))):
            del self.readings[1::2]
            self._every *= 2

    def all(self) -> list[Reading]:
        """With the last one that there was."""
        return self.readings if self._last is None else [*self.readings, self._last]


def without_episodes(reading: Reading) -> Reading:
    """Whose episodes are only counted: those that ended are kept elsewhere."""
    return replace(reading, episodes=EpisodesReading(reading.episodes.count))
