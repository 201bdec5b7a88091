"""A program that never was, at each moment of its life: the live view is tested with it, and drawn for the docs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from swath.insight.facts import Way
from swath.insight.history import History
from swath.insight.reading import BufferReading, EpisodesReading, PlaceReading, Program, Reading

PROGRAM = Program(
    collector="MultiAsyncCollector", env="GymEnv(Pendulum-v1)", layout="16 envs in 4 workers, 4 each",
    command="train.py", pid=4242, way=Way.ASYNC, cores=4, num_envs=16, frames_per_batch=1000, total_frames=1_000_000,
    started_at=0.0, in_processes=True,
)  # fmt: skip


def a_program(**more: Any) -> Program:
    return replace(PROGRAM, **more)


def a_reading(at_s: float, program: Program = PROGRAM, num_places: int = 4, **more: Any) -> Reading:
    """Of workers that all take a thousand frames a second, env 70 %, policy 20 %."""
    frames = int(1000 * at_s) * num_places
    return replace(
        Reading(
            program=program,
            at_s=1000 + at_s,
            age_s=at_s,
            frames=frames // 1000 * 1000,
            batches=frames // 1000,
            collecting_s=0.75 * at_s,
            yours_s=0.25 * at_s,
            places=[a_place(number, at_s) for number in range(num_places)],
        ),
        **more,
    )


def a_place(number: int, at_s: float, **more: Any) -> PlaceReading:
    about: dict[str, Any] = {"name": f"worker {number}", "pid": 1000 + number, "alive": True, "num_envs": 4}
    about |= {"frames": int(1000 * at_s), "env_s": 0.7 * at_s, "policy_s": 0.2 * at_s, "waiting_s": 0.1 * at_s}
    return PlaceReading(**{**about, **more})


def a_history(seconds: float = 20.0, every_s: float = 0.5, num_places: int = 4, **more: Any) -> History:
    history = History()
    for step in range(1, int(seconds / every_s) + 1):
        history.add(a_reading(step * every_s, num_places=num_places, **more))
    return history


def a_full_history(num_places: int = 4, seconds: int = 40) -> History:
    """All that there can be: episodes that get better, weights, a buffer, a restart, and one that is slow."""
    rng, history, returns = random.Random(0), History(), []
    program = a_program(num_envs=4 * num_places, layout=f"{4 * num_places} envs in {num_places} workers, 4 each")
    frames = [0] * num_places
    for second in range(1, seconds + 1):
        for number in range(num_places):
            frames[number] += int((700 if number == num_places - 1 else 3000) * (1 + 0.2 * rng.random()))
        returns += [-1400 + 22 * second + 200 * rng.random() for _ in range(6)]
        places = [
            a_place(number, second, frames=frames[number], restarts=int(number == 1), policy_version=4 * second)
            for number in range(num_places)
        ]
        history.add(
            a_reading(
                second,
                program,
                num_places,
                frames=sum(frames) // 1000 * 1000,
                places=places,
                policy_version=4 * second,
                lags=(600 * second, 300 * second, 90 * second, 10 * second),
                episodes=EpisodesReading(len(returns), returns[-100:], [200] * min(100, len(returns))),
                buffer=BufferReading(min(100_000, sum(frames)), 100_000, sum(frames), 4 * sum(frames)),
                shared_bytes=64_000_000,
            )
        )
    return history
