"""What limits a program, told from facts."""

from __future__ import annotations

from typing import Any

import pytest

from swath.insight.facts import Facts, Place, Way
from swath.insight.verdict import Limit, verdict


def workers(*rows: tuple[float, float, float, float], **more: Any) -> list[Place]:
    """env, policy, waiting, frames of each."""
    return [Place(f"worker {number}", 4, *row, **more) for number, row in enumerate(rows)]


def facts(way: Way, *rows: tuple[float, float, float, float], **more: Any) -> Facts:
    of_places = {name: more.pop(name) for name in ("sleeps", "on_core") if name in more}
    return Facts(way, 10.0, 2, workers(*rows, **of_places), in_processes=way != Way.SINGLE, **more)


EVEN = ((0.8, 0.1, 0.1, 1000), (0.8, 0.1, 0.1, 1000))

CASES: dict[str, tuple[Facts, Limit, str, str]] = {
    "env": (facts(Way.SYNC, *EVEN), Limit.ENV, "2 workers on 2 cores are busy, env 80 %", "a faster env"),
    "env, cores left": (
        facts(Way.SYNC, (0.8, 0.1, 0.1, 1000)),
        Limit.ENV,
        "1 worker on 2 cores is busy",
        "num_workers=2",
    ),
    "env, no workers": (facts(Way.SINGLE, (0.8, 0.1, 0.1, 1000)), Limit.ENV, "this process is busy", "MultiCollector"),
    "env, background": (facts(Way.ASYNC, *EVEN, in_background=True), Limit.ENV, "2 workers on 2 cores", "a faster env"),
    "policy, few envs": (facts(Way.SYNC, *[(0.2, 0.7, 0.1, 500)] * 2), Limit.POLICY, "takes 70 %", "envs_per_worker="),
    "policy, alone": (facts(Way.SINGLE, (0.2, 0.7, 0.1, 500)), Limit.POLICY, "this process", "SerialEnv"),
    "learner": (
        facts(Way.SYNC, *EVEN, yours=0.61),
        Limit.LEARNER,
        "2 workers wait for you: training takes 61 %",
        "start",
    ),
    "learner, alone": (
        facts(Way.SINGLE, EVEN[0], yours=0.9),
        Limit.LEARNER,
        "this process waits for you",
        "MultiCollector",
    ),
    "learner, async": (facts(Way.ASYNC, *EVEN, yours=0.9), Limit.LEARNER, "wait for you", "fewer workers"),
    "held back": (
        facts(Way.ASYNC, *EVEN, in_background=True, held_back=0.8),
        Limit.LEARNER,
        "wait for you 80 %",
        "lower ratio",
    ),
    "straggler": (
        facts(Way.SYNC, (0.2, 0.02, 0.78, 1000), (0.8, 0.08, 0.12, 1000), (0.2, 0.02, 0.78, 1000)),
        Limit.STRAGGLER,
        "worker 1 is 4.0 × slower",
        "sync=False",
    ),
    "sleeping": (
        facts(Way.SYNC, *EVEN, sleeps=True, on_core=0.05),
        Limit.SLEEPING,
        "compute 5 % of their time",
        "num_workers=8 would",
    ),
    "sleeping, alone": (
        facts(Way.SINGLE, EVEN[0], sleeps=True, on_core=0.05),
        Limit.SLEEPING,
        "5 %",
        "MultiCollector with num_workers=4",
    ),
    "idle": (
        facts(
            Way.ASYNC, (1.0, 0, 0, 3000), (1.0, 0, 0, 3000), (0, 0, 1.0, 0), (0, 0, 1.0, 0), sleeps=True, on_core=0.05
        ),
        Limit.IDLE,
        "2 of 4 workers have collected nothing",
        "a lower frames_per_batch",
    ),
    "idle, all of them": (
        facts(Way.ASYNC, (0.1, 0, 0.9, 10), (0, 0, 1.0, 0)),
        Limit.OVERHEAD,
        "wait 95 %",
        "frames_per_batch",
    ),
    "overhead": (
        facts(Way.SYNC, *[(0.1, 0.1, 0.8, 100)] * 2, yours=0.1),
        Limit.OVERHEAD,
        "wait 80 %",
        "frames_per_batch",
    ),
    "nothing": (Facts(Way.SYNC, 10.0, 2, workers((0, 0, 1, 0))), Limit.NOTHING_YET, "nothing has been collected", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_limits(case: str) -> None:
    given, limit, says, advice = CASES[case]
    found = verdict(given)
    assert found.limit == limit, found
    assert says in found.says
    assert advice in found.advice


def test_one_place_or_none_has_no_straggler() -> None:
    assert facts(Way.SYNC, (0.8, 0.1, 0.1, 1000)).slowest() is None
    assert facts(Way.SYNC, (0.8, 0.1, 0.1, 0), (0.8, 0.1, 0.1, 0)).slowest() is None
