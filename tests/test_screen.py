"""The live view: all that there is, and nothing wider or higher than there is room for."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from screens import PROGRAM, a_full_history, a_history, a_place, a_program, a_reading
from swath.cli.progress import as_options
from swath.insight.facts import Facts, Place, Way
from swath.insight.history import History
from swath.insight.quantities import quantile, short, sparkline, whole
from swath.insight.reading import BufferReading, EpisodesReading, Reading
from swath.insight.screen import live_view, plain_line
from swath.insight.verdict import verdict


def shown(history: History, width: int, height: int | None = None, **more: Any) -> str:
    """As a terminal of this width has it: what rich would fold or cut is seen."""
    console = Console(width=width, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(live_view(history, width, height, **more))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_all_of_it_is_there(width: int) -> None:
    text = shown(a_full_history(), width)
    for part in (
        "MultiAsyncCollector · GymEnv(Pendulum-v1) · 16 envs in 4 workers, 4 each", "0:40",  # title
        "/ 1,000,000 frames", "42 %", "ETA 0:53",
        "frames/s now", "overall",
        "240 ended, of the last 100:", "return", "length    mean 200, p10 200, p90 200", "▁", "█",
        "yours 25 %, collecting 75 %",
        "p50 0, p95 2, max 3 updates", "updated 160 times",
        "100,000 / 100,000 frames (100 %), 4.00 samples per insert",
        "64.0 MB shared", "restarts 1",
        "worker 3 is 4.4 × slower than the others", "→ look at its env",
        "time in env / policy / waiting", "worker 0", "worker 1", "worker 2", "70%  20%  10%",
    ):  # fmt: skip
        assert part in text, part
    assert "…" not in text


def test_only_what_there_is() -> None:
    text = shown(a_history(program=a_program(total_frames=None)), 80)
    assert "80,000 frames" in text
    assert "no episode has ended yet" in text
    for absent in ("ETA", "%  80", "buffer", "policy lag", "memory", "restarts", "return"):
        assert absent not in text, absent
    assert "episodes are counted with each batch" in shown(a_history(0.5, frames=0), 80)
    assert shown(History(), 80).strip() == "nothing is known of it yet"


def test_a_background_has_no_turns_but_may_be_held_back() -> None:
    assert "yours" not in shown(a_history(in_background=True), 80)
    history = History()
    for second in range(20):
        history.add(a_reading(second, in_background=True, yours_s=0.0, held_back_s=0.6 * second))
    assert "held back by samples_per_insert 60 %" in shown(history, 80)
    assert "samples_per_insert holds them back" in " ".join(shown(history, 80).split())


def test_of_many_workers_the_slowest_are_named() -> None:
    history = History()
    for second in range(1, 21):
        places = [a_place(number, second) for number in range(1000)]
        places[617] = a_place(617, second, frames=100 * second)
        places[3] = a_place(3, second, alive=False, pid=None)
        history.add(a_reading(second, num_places=1000, places=places))
    for width, height in ((80, 24), (160, 50), (80, None)):
        lines = shown(history, width, height).splitlines()
        rows = [line[line.index("worker ") :] for line in lines if re.search(r"worker \d+ .*(%|ended)$", line.rstrip())]
        assert "ended" in rows[0]
        assert rows[0].startswith("worker 3 ")
        assert any(row.startswith("worker 617 ") for row in rows[1:3])
        assert any("all 1,000" in line for line in lines)
        assert any("more" in line and "1 of all have ended" in line for line in lines)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(40, 260),
    height=st.none() | st.integers(1, 80),
    num_places=st.sampled_from([0, 1, 2, 7, 8, 9, 30, 200]),
    env=st.sampled_from(["CartPole-v1", "環境" * 30, "x" * 300, ""]),
    total=st.sampled_from([None, 1, 1000, 10**12]),
    returns=st.lists(st.floats(), max_size=5),
    failure=st.sampled_from([None, "it broke " * 30, "x" * 500, "line\nline", "環境" * 60]),
    closed=st.booleans(),
    count=st.sampled_from([0, 5, 10**9]),
)
def test_never_wider_or_higher_than_there_is_room(
    width: int, height: int | None, num_places: int, env: str, total: int | None, returns: list[float], count: int,
    failure: str | None, closed: bool,
) -> None:  # fmt: skip
    history = a_history(
        6.0, 1.0, num_places, program=a_program(env=env, total_frames=total), failure=failure, is_closed=closed,
        episodes=EpisodesReading(len(returns), returns, [3] * len(returns)), policy_version=count,
        buffer=BufferReading(count, 10**12, count, 10 * count), shared_bytes=count or None,
    )  # fmt: skip
    view = live_view(history, width, height)
    lines = view.plain.split("\n")
    assert max(map(cell_len, lines)) <= width
    assert height is None or len(lines) <= height
    assert [line.rstrip() for line in shown(history, width, height).removesuffix("\n").split("\n")] == [
        line.rstrip() for line in lines
    ]
    assert "\n" not in plain_line(history)


def test_what_is_cut_says_so() -> None:
    history = a_history(program=a_program(env="A" * 100))
    assert shown(history, 80).splitlines()[0].count("…") == 1


def test_how_it_ended() -> None:
    history = a_history(10.0)
    history.add(a_reading(10.5, is_closed=True, places=[a_place(n, 10.5, alive=False, pid=None) for n in range(4)]))
    text = shown(history, 80)
    assert "closed after 0:10" in text or "closed after 0:11" in text
    assert "ETA" not in text
    assert "ended" not in text.replace("ended yet", "")  # that is no news of one of them
    assert "70%  20%  10%" in text
    history.add(a_reading(11.0, failure="MultiAsyncCollector has stopped: RuntimeError: broken\nleg.", is_closed=True))
    assert "failed: MultiAsyncCollector has stopped: RuntimeError: broken leg." in shown(history, 100)
    assert "failed: " in plain_line(history)


def test_a_line_of_a_log() -> None:
    line = plain_line(a_full_history())
    for part in (
        "/ 1,000,000 frames (42 %)",
        "frames/s, ",
        "ETA 0:53",
        "240 episodes, mean of the last 100: return -5",
        "4.00 samples per insert",
        "restarts 1",
        "worker 3 is 4.4 × slower than the others: look at its env",
    ):
        assert part in line, part


# -- the history -------------------------------------------------------------------------------------------------------


def test_now_is_over_whole_batches() -> None:
    """2 s of collecting, 5 s of training: neither of the two alone is how fast it is."""
    history, frames, program = History(), 0, a_program(way=Way.SYNC, total_frames=None)
    for tick in range(1, 700):
        at_s = tick / 10
        frames += 100 if at_s % 7 < 2 else 0
        batches = int((at_s + 5) // 7)
        places = [a_place(0, at_s, frames=frames)]
        history.add(a_reading(at_s, program, frames=frames, batches=batches, places=places))
        if at_s > 21:
            assert history.frames_per_s_now == pytest.approx(2000 / 7, rel=0.15)


def test_when_nothing_comes_it_says_so() -> None:
    history = a_history(20.0)
    assert history.frames_per_s_now == pytest.approx(4000)
    stuck = a_reading(20.0)
    for second in range(21, 40):
        history.add(replace(stuck, at_s=1000.0 + second, age_s=float(second), collecting_s=0.75 * second))
    assert history.frames_per_s_now == 0
    assert history.seconds_left is None


def test_frames_never_go_back_and_are_never_more_than_all() -> None:
    history = History()
    program = a_program(total_frames=10_000)
    history.add(a_reading(2.0, program))
    assert history.frames == 8000
    history.add(a_reading(2.5, program, places=[a_place(n, 1.0) for n in range(4)]))  # what was under way was dropped
    assert history.frames == 10_000
    history.add(a_reading(9.0, program))
    assert history.frames == 10_000
    assert history.seconds_left == 0
    history.add(a_reading(9.5, program, frames=2000, places=[a_place(n, 0.5) for n in range(4)]))  # load_state_dict
    assert history.frames == 2000


def test_of_batches_under_way_only_so_many_frames_count() -> None:
    """Frames that were dropped for their age were collected, too; they are nobody's progress."""
    history = History()
    program = a_program(way=Way.SYNC)
    history.add(a_reading(5.0, program, frames=3000))  # workers have taken 20,000
    assert history.frames == 4000


def test_a_program_that_goes_on_from_a_state_is_not_so_fast() -> None:
    history = History()
    for second in range(1, 11):
        history.add(a_reading(second, frames=500_000 + 4000 * second))
    assert history.frames == 540_000
    assert history.frames_per_s == pytest.approx(4000)


def test_who_comes_late_knows_the_whole_and_soon_what_is_now() -> None:
    history = History()
    history.add(a_reading(100.0))
    facts = history.facts
    assert facts is not None
    assert facts.seconds == 100
    assert history.frames_per_s == pytest.approx(4000)
    for tick in range(1, 30):
        history.add(a_reading(100 + tick / 2))
    facts = history.facts
    assert facts is not None
    assert 10 <= facts.seconds < 12


def test_a_worker_that_is_started_again_adds_to_what_there_was() -> None:
    history = History()
    for second in range(1, 20):
        since = second if second < 10 else second - 9
        places = [a_place(0, second), a_place(1, since, restarts=int(second >= 10))]
        history.add(a_reading(second, frames=2000 * (second - 1), places=places))
    assert history.frames_per_s_now == pytest.approx(2000)
    assert history.frames_per_s > 1800


def test_memory_is_bounded() -> None:
    history = History()
    for tick in range(20_000):
        history.add(a_reading(tick / 8))
    assert len(history.rates) < 300
    assert len(history._kept) < 400
    assert history.rates[5] == pytest.approx(4000, rel=0.1)


# -- quantities --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(), max_size=300), st.integers(1, 40))
def test_a_sparkline_has_a_sign_for_each_value_that_is_one(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    assert set(line) <= set("▁▂▃▄▅▆▇█")


@given(st.floats(0, 1e18))
def test_whole_numbers_are_short(value: float) -> None:
    assert len(whole(value)) <= 10


def test_quantiles() -> None:
    values = [float(value) for value in range(101)]
    assert [quantile(values[::-1], share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [0, 10, 50, 90, 100]
    assert quantile([float("nan"), 1.0, 2.0], 0.5) == 2


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5"), (1e20, "1e+20")]
)
def test_odd_numbers(value: float, said: str) -> None:
    assert short(value) == said


# -- on the command line -----------------------------------------------------------------------------------------------

_MANY: Any = {"seconds": 10.0, "cores": 4}


def _workers(count: int, **share: Any) -> list[Place]:
    return [Place(**{"name": f"worker {n}", "num_envs": 2, "frames": 1000.0} | share) for n in range(count)]


@pytest.mark.parametrize(
    "facts",
    [
        Facts(Way.SINGLE, places=_workers(1, env=0.9, policy=0.1, waiting=0.0), **_MANY),
        Facts(Way.SINGLE, places=_workers(1, env=0.1, policy=0.9, waiting=0.0), **_MANY),
        Facts(Way.SINGLE, places=_workers(1, env=0.1, policy=0.1, waiting=0.8), yours=0.8, **_MANY),
        Facts(Way.SYNC, places=_workers(2, env=0.9, policy=0.1, waiting=0.0), in_processes=True, **_MANY),
        Facts(Way.SYNC, places=_workers(2, env=0.1, policy=0.1, waiting=0.8), yours=0.8, in_processes=True, **_MANY),
        Facts(Way.SYNC, places=_workers(2, env=0.2, policy=0.1, waiting=0.7), in_processes=True, **_MANY),
        Facts(Way.ASYNC, places=_workers(2, env=0.1, policy=0.1, waiting=0.8), yours=0.8, in_processes=True, **_MANY),
        Facts(Way.ASYNC, places=_workers(2, env=0.1, policy=0.9, waiting=0.0), in_processes=True, **_MANY),
        Facts(
            Way.SYNC,
            places=[*_workers(2, env=0.1, policy=0.1, waiting=0.8), *_workers(1, env=0.9, policy=0.1, waiting=0.0)],
            in_processes=True,
            **_MANY,
        ),
        Facts(
            Way.SYNC,
            places=_workers(2, env=0.9, policy=0.0, waiting=0.1, sleeps=True, on_core=0.01),
            in_processes=True,
            **_MANY,
        ),
    ],
)  # fmt: skip
def test_advice_of_the_command_line_is_of_its_options(facts: Facts) -> None:
    found = verdict(facts)
    said = as_options(str(found))
    for python in ("=", "MultiCollector", "SerialEnv", "sync=", "learner", "training", "frames_per_batch", "start()"):
        assert python not in said, said


def test_readings_are_not_changed() -> None:
    reading = a_reading(3.0)
    before = reading.as_json()
    history = History()
    history.add(reading)
    shown(history, 80)
    assert reading.as_json() == before
    assert isinstance(history.latest, Reading)
    assert history.latest.program == PROGRAM
