"""The last minutes of a program, kept from readings: how fast it is now, and what a verdict is made from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from swath.insight.facts import Facts, Way
from swath.insight.reading import Reading, facts_between
from swath.insight.verdict import Limit, Verdict, verdict

#: "Now" is over so many seconds, or over whole batches, where they take longer.
_NOW_S = 2.0
#: What is said of how time is spent is over so many.
_WHILE_S = 10.0
#: A shorter while says nothing.
_LEAST_S = 1.0
#: Nothing that is shown of "now" is older.
_LONGEST_S = 60.0
#: A curve is of so many points: of all the time.
_POINTS = 240
#: Readings of many places are kept less often.
_LEAST_BETWEEN_S = 0.2
_PLACES_A_SECOND = 500


@dataclass(frozen=True)
class _Moment:
    reading: Reading
    #: Frames that were collected, of those that are delivered or will be.
    taken: int


class History:
    """What is shown of a program: its last reading, and how it came there.

    >>> from swath.insight.reading import PlaceReading, Program
    >>> program = Program("Collector", "CartPole-v1", "", "", 1, Way.SINGLE, 2, 1, 50, 1000, 0.0, False)
    >>> history = History()
    >>> for second in range(5):
    ...     place = PlaceReading("this process", 1, True, 1, 100 * second, 0.8 * second, 0.2 * second, 0.0)
    ...     history.add(Reading(program, second, second, 100 * second, 2 * second, second, 0.0, [place]))
    >>> history.frames_per_s_now, history.frames_per_s, history.seconds_left
    (100.0, 100.0, 6.0)
    """

    def __init__(self) -> None:
        #: Not too many: of the last minute.
        self._kept: deque[_Moment] = deque()
        self._rates: deque[float] = deque()
        self._rate_every_s = 0.5
        self._rated: _Moment | None = None
        #: When there were how many batches: of the last minute.
        self._batches: deque[tuple[float, int]] = deque()
        #: What each place has collected, over its restarts.
        self._of_places: dict[str, int] = {}
        self._produced = 0
        self._shown = 0
        self.latest: Reading | None = None

    def add(self, reading: Reading) -> None:
        """The next reading of the same program."""
        before = self.latest
        if before is not None and reading.frames < before.frames:
            self._shown = 0  # it was put back to an earlier state
        if before is not None and before.in_background and reading.yours_s == before.yours_s:
            reading = replace(reading, in_background=True)  # that was all: nobody has asked for a batch since
        self._count(reading)
        self.latest = reading
        moment = _Moment(reading, min(self._shown, self._produced))
        if before is not None and reading.batches != before.batches:
            self._batches.append((reading.at_s, reading.batches))
            while len(self._batches) > 2 and self._batches[1][0] < reading.at_s - _LONGEST_S:
                self._batches.popleft()
        self._rate(moment)
        kept = self._kept
        between_s = max(_LEAST_BETWEEN_S, len(reading.places) / _PLACES_A_SECOND)
        if len(kept) > 1 and kept[-1].reading.at_s - kept[-2].reading.at_s < between_s:
            kept.pop()  # the last is always there
        kept.append(moment)
        while len(kept) > 2 and kept[1].reading.at_s <= reading.at_s - _LONGEST_S:
            kept.popleft()

    def _count(self, reading: Reading) -> None:
        for place in reading.places:
            before = self._of_places.get(place.name, 0)
            self._produced += place.frames - before if place.frames >= before else place.frames
            self._of_places[place.name] = place.frames
        # Batches that are under way: of all together, or of one env each. (Of what is more, frames were dropped.)
        program = reading.program
        at_once = program.num_envs if program.way == Way.ASYNC else 1
        under_way = sum(place.frames for place in reading.places) - reading.frames
        collected = reading.frames + min(max(0, under_way), at_once * program.frames_per_batch)
        total = math.inf if program.total_frames is None else program.total_frames
        self._shown = int(max(self._shown, min(collected, total)))

    def _rate(self, moment: _Moment) -> None:
        """Another point of the curve."""
        last = self._rated
        if last is None:
            self._rated = moment
            return
        seconds = moment.reading.at_s - last.reading.at_s
        if seconds < self._rate_every_s:
            return
        self._rates.append((moment.taken - last.taken) / seconds)
        self._rated = moment
        if len(self._rates) == _POINTS:  # of all the time: half as many, of twice as much
            pairs = list(self._rates)
            self._rates = deque((a + b) / 2 for a, b in zip(pairs[::2], pairs[1::2], strict=True))
            self._rate_every_s *= 2

    # -- what is shown ---------------------------------------------------------------------------------------------

    @property
    def frames(self) -> int:
        """That were collected, those of batches under way too; never less than before."""
        return self._shown

    @property
    def rates(self) -> Sequence[float]:
        """Frames/s over all the time."""
        return list(self._rates)

    @property
    def frames_per_s_now(self) -> float:
        return self._rate_over(_NOW_S)

    @property
    def frames_per_s(self) -> float:
        """Since it began to collect."""
        if self.latest is None:
            return 0.0
        spent = self.latest.collecting_s + (0.0 if self.latest.in_background else self.latest.yours_s)
        return min(self._shown, self._produced) / spent if spent > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the last frame, if it goes on as of late."""
        total = None if self.latest is None else self.latest.program.total_frames
        rate = self._rate_over(_WHILE_S)
        if total is None:
            return None
        if self._shown >= total:
            return 0.0
        return (total - self._shown) / rate if rate > 0 else None

    @property
    def facts(self) -> Facts | None:
        """How it has spent its time of late; once it is over, all of it."""
        latest = self.latest
        if latest is None:
            return None
        if latest.is_closed:  # its workers have ended with it
            return facts_between(None, replace(latest, places=[replace(place, alive=True) for place in latest.places]))
        return facts_between(self._before(_WHILE_S), latest)

    @property
    def verdict(self) -> Verdict | None:
        """What limits it of late; None as long as too little is known."""
        facts = self.facts
        found = None if facts is None else verdict(facts)
        return None if found is None or found.limit == Limit.NOTHING_YET else found

    @property
    def lags(self) -> Sequence[int]:
        """Frames that were delivered of late, by age; of all the time, if there were none."""
        if self.latest is None:
            return ()
        before = self._before(_WHILE_S)
        since = [now - then for now, then in zip_longest(self.latest.lags, before.lags if before else (), fillvalue=0)]
        return since if any(since) else self.latest.lags

    # -- windows ---------------------------------------------------------------------------------------------------

    def _rate_over(self, seconds: float) -> float:
        if len(self._kept) < 2:
            return 0.0
        start, end = self._moment_before(seconds), self._kept[-1]
        passed = end.reading.at_s - start.reading.at_s
        return max(0, end.taken - start.taken) / passed if passed > 0 else 0.0

    def _before(self, seconds: float) -> Reading | None:
        """The reading of so long ago; None for the beginning, where too little is known."""
        if not self._kept:
            return None
        moment = self._moment_before(seconds).reading
        return None if self._kept[-1].reading.at_s - moment.at_s < _LEAST_S else moment

    def _moment_before(self, seconds: float) -> _Moment:
        """The moment of so long ago, in whole batches: parts of one would be of collecting, or of training."""
        kept = self._kept
        end = kept[-1].reading
        cycle_s = self._seconds_a_batch
        if cycle_s:
            seconds = cycle_s * math.ceil(seconds / cycle_s)
        since = end.at_s - min(seconds, _LONGEST_S) - 1e-6
        return next((moment for moment in reversed(kept) if moment.reading.at_s <= since), kept[0])

    @property
    def _seconds_a_batch(self) -> float:
        if len(self._batches) < 2:
            return 0.0
        (since, first), (until, last) = self._batches[0], self._batches[-1]
        return (until - since) / (last - first) if last > first else 0.0
