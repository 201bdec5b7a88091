"""What two moments of a program tell of the time between them."""

from __future__ import annotations

import json
from dataclasses import replace

from swath.insight.facts import Way
from swath.insight.reading import BufferReading, EpisodesReading, PlaceReading, Program, Reading, facts_between

PROGRAM = Program(
    collector="MultiSyncCollector", env="GymEnv(CartPole-v1)", layout="2 workers", command="train.py", pid=1,
    way=Way.SYNC, cores=2, num_envs=8, frames_per_batch=100, total_frames=None, started_at=0.0, in_processes=True,
)  # fmt: skip


def a_reading(age_s: float, places: list[PlaceReading], **more: float) -> Reading:
    spent = {"collecting_s": age_s / 2, "yours_s": age_s / 2} | more
    return Reading(program=PROGRAM, at_s=100 + age_s, age_s=age_s, frames=0, batches=0, places=places, **spent)  # type: ignore[arg-type]


def a_place(env_s: float, policy_s: float, waiting_s: float, frames: int, **more: float) -> PlaceReading:
    return PlaceReading("worker 0", 7, True, 4, frames, env_s, policy_s, waiting_s, **more)  # type: ignore[arg-type]


def test_facts_are_of_the_time_between() -> None:
    before = a_reading(10.0, [a_place(9.0, 0.0, 1.0, 500, cpu_s=9.0)], yours_s=0.0)
    after = a_reading(20.0, [a_place(10.0, 4.0, 6.0, 700, cpu_s=10.0)], yours_s=6.0)
    found = facts_between(before, after)
    (place,) = found.places
    assert (place.env, place.policy, place.waiting, place.frames) == (0.1, 0.4, 0.5, 200)
    assert (place.on_core, place.sleeps) == (0.2, True)
    assert (found.seconds, found.yours, found.cores) == (10.0, 0.6, 2)


def test_a_place_that_was_started_again_begins_anew_and_one_that_is_gone_is_left_out() -> None:
    before = a_reading(10.0, [a_place(9.0, 0.0, 1.0, 500)])
    again = replace(a_place(1.0, 1.0, 2.0, 80), restarts=1)
    gone = replace(a_place(9.0, 0.0, 1.0, 500), name="worker 1", alive=False)
    (place,) = facts_between(before, a_reading(20.0, [again, gone])).places
    assert (place.env, place.frames) == (0.25, 80)


def test_the_age_of_frames() -> None:
    assert a_reading(1.0, []).lag_quantile(0.5) is None
    aged = replace(a_reading(1.0, []), lags=(50, 45, 0, 5))
    assert [aged.lag_quantile(share) for share in (0.5, 0.95, 1.0)] == [0, 1, 3]


def test_a_reading_goes_through_json() -> None:
    reading = replace(
        a_reading(1.0, [a_place(1.0, 0.5, 0.5, 10)]),
        episodes=EpisodesReading(2, (1.5, 2.5), (10, 20)), buffer=BufferReading(5, 10, 20, 40), lags=(1, 2),
    )  # fmt: skip
    text = json.dumps(reading.as_json())
    again = Reading.of_json(json.loads(text))
    assert json.dumps(again.as_json()) == text
    assert again.buffer is not None
    assert again.buffer.samples_per_insert == 2
    assert facts_between(None, again) == facts_between(None, reading)
