"""The report: what is on the page, of runs that are made up, of real ones, and of what nobody should bring."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.errors import WorkerDied
from swath.insight.facts import Way
from swath.insight.reading import PlaceReading, Program, Reading
from swath.insight.report import EpisodeSeries, Run, report_page
from swath.insight.report.lanes import Lanes, NoTrace
from swath.insight.report.opening import read_readings, read_trace, run_of_trace, write_readings
from swath.insight.report.run import Thinned
from swath.insight.report.sections import about_reading
from trace_format import TraceFile

PROGRAM = Program(
    collector="MultiSyncCollector", env="GymEnv(CartPole-v1)", layout="2 workers", command="train.py --lr 1", pid=1,
    way=Way.SYNC, cores=2, num_envs=8, frames_per_batch=100, total_frames=1000, started_at=0.0, in_processes=True,
    versions={"torch": "2.13"},
)  # fmt: skip
_ALONE = {"meta", "link", "br"}


class Page(HTMLParser):
    """A page as a reader sees it: every element is closed, and what the text of each section is."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._section = "head"
        self.feed(page)
        assert not self.open
        self.text = " ".join(self.sections.values())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.sections[self._section] = self.sections.get(self._section, "") + " " + data

    @property
    def addresses(self) -> list[str]:
        names = ("src", "href", "action", "srcset", "data", "poster")
        return [value or "" for _, attrs in self.tags for name, value in attrs.items() if name in names]


def a_place(number: int, age_s: float, env: float, policy: float, **more: Any) -> PlaceReading:
    waiting = 1 - env - policy
    values = {
        "pid": 100 + number,
        "alive": True,
        "num_envs": 4,
        "frames": int(500 * age_s),
        "cpu_s": age_s * env,
    } | more
    return PlaceReading(
        f"worker {number}", env_s=env * age_s, policy_s=policy * age_s, waiting_s=waiting * age_s, **values
    )


def a_reading(age_s: float, places: list[PlaceReading] | None = None, **more: Any) -> Reading:
    if places is None:
        places = [a_place(number, age_s, 0.8, 0.1) for number in range(2)]
    values = {"frames": int(1000 * age_s), "batches": int(10 * age_s), "collecting_s": age_s, "yours_s": 0.0} | more
    return Reading(PROGRAM, 100 + age_s, age_s, places=places, **values)


def a_run(**more: Any) -> Run:
    readings = [a_reading(age / 2) for age in range(1, 21)]
    return Run(**{"about": about_reading(readings[-1], 7), "readings": readings, **more})


def some_episodes(count: int) -> EpisodeSeries:
    return EpisodeSeries.of_rows((float(number % 50), 10 + number % 5) for number in range(count))


def events_of(lanes: Mapping[str, Sequence[tuple[str, float, float]]]) -> Iterator[dict[str, Any]]:
    for pid, (name, slices) in enumerate(lanes.items(), start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{name} (pid {pid})"}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "steps"}}
        for called, start, took in slices:
            yield {"ph": "X", "name": called, "cat": "x", "pid": pid, "tid": 1, "ts": start, "dur": took}


# -- the page ----------------------------------------------------------------------------------------------------------


def test_what_is_on_the_page() -> None:
    lanes = Lanes.of_events(events_of({"worker 0": [("steps", 0, 5000), ("env", 0, 4000)]}))
    readings = [*a_run().readings[:-1], a_reading(10.0, lags=(800, 150, 0, 50), policy_version=9)]
    run = a_run(readings=readings, lanes=lanes, episodes=some_episodes(300), envs={"worker 1": [4, 5, 6, 7]})
    page = Page(report_page(run))
    sections = ["verdict", "timeline", "speed", "shares", "lag", "episodes", "slowest", "faults", "ideal", "what-ran"]
    assert list(page.sections) == ["head", *sections]
    assert "10,000 frames of 1,000 1,000 frames/s, overall" in re.sub(r"\s+", " ", page.sections["head"])
    assert "the learner waits 100 % of the time" in page.text.lower()
    assert "train.py --lr 1" in page.sections["what-ran"]
    assert "seed" in page.sections["what-ran"]
    assert "worker 1 (envs 4–7)" in page.sections["shares"]
    assert "80 %" in page.sections["lag"]
    assert "Half of the frames: 0 or fewer; 95 %: 1 or fewer. There were 9 updates." in page.sections["lag"]
    assert "None." in page.sections["faults"]
    assert page.addresses == ["data:,"]  # an icon that is none, so that nobody looks for one
    assert "http" not in report_page(run)


def test_the_ideal_is_what_cores_could_do_with_these_steps() -> None:
    # Of two workers on two cores, each of 500 frames/s: s = 1.6 ms, f(b)/b = 0.2 ms.
    ideal = a_run().ideal()
    assert ideal is not None
    assert (ideal.at_a_time, round(ideal.fps)) == (2, 1000)
    assert (round(ideal.step_s, 6), round(ideal.policy_s, 6)) == (0.0016, 0.0002)
    assert round(ideal.efficiency, 3) == round(1000 / (2 / 0.0018), 3)
    asleep = [a_reading(age, [a_place(n, age, 0.8, 0.1, cpu_s=0.01) for n in range(8)]) for age in (1.0, 2.0)]
    found = a_run(readings=asleep).ideal()
    assert found is not None
    assert (found.at_a_time, found.sleeps) == (8, True)
    assert Run({}).ideal() is None
    assert a_run(readings=[a_reading(1.0, [])]).ideal() is None


def test_what_is_given_as_text_stays_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    lanes = Lanes.of_events(events_of({f"worker {evil}": [(evil, 0, 5000)]}))
    program = replace(PROGRAM, env=evil, command=evil, layout=evil, versions={evil: evil})
    place = replace(a_place(0, 1.0, 0.5, 0.5), name=evil)
    reading = replace(a_reading(1.0, [place]), program=program, failure=evil)
    run = Run(about_reading(reading, evil), [reading], lanes, envs={evil: [1]}, notes=[evil])
    text = report_page(run)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2  # the timeline's numbers, and what draws them
    assert "img" not in [tag for tag, _ in page.tags]
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert evil in page.text
    (data,) = re.findall(r'id="timeline-data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["kinds"] == [[evil, "other"]]


def test_an_empty_run_and_one_reading_are_pages() -> None:
    assert "Nothing was recorded" in Page(report_page(Run({}, lanes=Lanes.of_events([])))).text
    page = Page(report_page(Run({"env": "CartPole"}, [a_reading(0.0)], episodes=some_episodes(0))))
    assert "Nothing has been collected yet" in page.text
    assert "No episode has ended" in page.text
    page = Page(report_page(a_run(readings=[a_reading(3.0)])))
    assert "speed" not in page.sections
    assert "shares" in page.sections


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    episodes = EpisodeSeries.of_rows([(float("nan"), 5), (float("inf"), 5), (1.0, 5), (3.0, 5)])
    page = Page(report_page(a_run(episodes=episodes)))
    assert "2 values are not finite, and not drawn" in page.sections["episodes"]
    assert "nan" not in report_page(a_run(episodes=episodes)).lower().replace("tenant", "")
    nothing = EpisodeSeries.of_rows([(float("nan"), 5)] * 200)
    assert "Returns: nothing to draw. 200 values are not finite." in Page(report_page(a_run(episodes=nothing))).text


def test_thousands_of_workers_and_long_names_are_a_small_page() -> None:
    places = [a_place(number, 10.0, 0.5 + number / 10_000, 0.1) for number in range(3000)]
    lanes = Lanes.of_events(events_of({f"worker {n}": [("env", 10.0 * k, 9) for k in range(40)] for n in range(1000)}))
    program = replace(PROGRAM, env="env " * 5000)
    readings = [replace(a_reading(age, places), program=program) for age in (5.0, 10.0)]
    run = Run(about_reading(readings[-1]), readings, lanes, some_episodes(50_000))
    text = report_page(run)
    assert len(text) < 2_000_000
    page = Page(text)
    assert "2,976 more are not shown" in page.text
    assert "960 more threads are not drawn" in page.text


def test_what_went_wrong_is_told_with_its_time() -> None:
    def at(age: float, restarts: int, alive: bool = True) -> list[PlaceReading]:
        return [a_place(0, age, 0.8, 0.1), a_place(1, age, 0.8, 0.1, restarts=restarts, alive=alive)]

    readings = [a_reading(1.0, at(1.0, 0)), a_reading(2.0, at(2.0, 1)), a_reading(3.0, at(3.0, 1, alive=False))]
    readings.append(a_reading(4.0, at(4.0, 1, alive=False), failure="WorkerDied: worker 1"))
    page = Page(report_page(a_run(readings=readings)))
    told = re.sub(r"\s+", " ", page.sections["faults"])
    assert "2.0 worker 1 was started again (process 101)" in told
    assert "3.0 worker 1 was lost (process 101)" in told
    assert "4.0 the collector ended: WorkerDied: worker 1" in told
    assert told.count("worker 1 was") == 2


def test_of_a_long_run_some_hundred_readings_are_kept() -> None:
    kept = Thinned()
    for number in range(100_000):
        kept.add(a_reading(number / 2, []))
    ages = [reading.age_s for reading in kept.all()]
    assert 200 <= len(ages) <= 402
    assert (ages[0], ages[-1]) == (0.0, 49_999.5)
    gaps = np.diff(ages[:-1])
    assert gaps.min() == gaps.max()


# -- the timeline ------------------------------------------------------------------------------------------------------


def test_what_lies_inside_is_what_counts() -> None:
    slices = [("next batch", 0, 100), ("wait for workers", 10, 50), ("hand over", 60, 20), ("yours", 100, 50)]
    (lane,) = Lanes.of_events(events_of({"you": slices})).lanes
    found = [(burst.shares[0][0], burst.start_us, burst.end_us) for burst in lane.bursts]
    assert found == [
        ("next batch", 0, 10), ("wait for workers", 10, 60), ("hand over", 60, 80), ("next batch", 80, 100),
        ("yours", 100, 150),
    ]  # fmt: skip


def test_slices_that_touch_by_rounding_or_overlap_are_both_there() -> None:
    """Of a trace's rounded times, the end of a slice may be behind the beginning of the next."""
    slices = [("env", 0, 100.001), ("wait for a request", 100.0, 900), ("env", 1000, 50), ("odd", 1040, 60)]
    (lane,) = Lanes.of_events(events_of({"worker 0": slices})).lanes
    found = [(burst.shares[0][0], round(burst.start_us), round(burst.end_us)) for burst in lane.bursts]
    assert found == [("env", 0, 100), ("wait for a request", 100, 1000), ("env", 1000, 1040), ("odd", 1040, 1100)]


def test_bursts_keep_the_time_of_what_they_are_made_of() -> None:
    """Whatever is merged: the sum of each name is what it was."""
    slices = [
        (name, 10.0 * k + at, took) for k in range(100_000) for name, at, took in (("env", 0, 7), ("policy", 7, 3))
    ]
    lanes = Lanes.of_events(events_of({"worker 0": slices}))
    assert lanes.finest_us > 0
    (lane,) = lanes.lanes
    assert 15_000 < len(lane.bursts) < 64_000
    sums = {"env": 0.0, "policy": 0.0}
    for burst in lane.bursts:
        for name, share in burst.shares:
            sums[name] += share * (burst.end_us - burst.start_us)
    assert sums["env"] == pytest.approx(700_000)
    assert sums["policy"] == pytest.approx(300_000)
    assert lane.seconds == pytest.approx({"env": 0.7, "policy": 0.3})
    assert len(report_page(Run({}, lanes=lanes))) < 1_000_000


def test_the_successor_of_a_worker_is_in_its_lane() -> None:
    first = list(events_of({"worker 1": [("env", 0, 100)]}))
    second = [{**event, "pid": 9} for event in events_of({"worker 1": [("env", 500, 100)]})]
    second[0]["args"] = {"name": "worker 1 (pid 77, started again 1 ×)"}
    (lane,) = Lanes.of_events([*first, *second]).lanes
    assert (lane.place, len(lane.bursts)) == ("worker 1", 2)
    assert [(mark.at_us, mark.says) for mark in lane.marks] == [(500, "worker 1 was started again")]


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON to its end"),
        ("hello", "it is not JSON to its end"),
        ('{"a": 1}', "it has no traceEvents"),
        ('[{"ph": "X", "name": "a", "ts": "soon", "dur": 1}]', "its event 0 is none of a trace (ValueError"),
        ('[{"ph": "X", "name": "a", "dur": 1}]', "its event 0 is none of a trace (KeyError: 'ts')"),
        ("[1, 2]", "its event 0 is none of a trace"),
        (
            '{"otherData": {}, "traceEvents": [\n{"ph":"M","name":"process_name","pid":1,"args":{"name":"a"}},\n',
            "its end",
        ),
    ],
)
def test_what_is_no_trace_is_said(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(NoTrace, match=re.escape(f"{tmp_path / 'run.json'} is no trace: {why}")):
        read_trace(tmp_path / "run.json")


def test_a_trace_of_another_program_is_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(list(events_of({"main": [("work", 0, 10)]}))))
    page = Page(report_page(run_of_trace(tmp_path / "run.json")))
    assert "timeline" in page.sections
    assert "This is of a trace alone" in page.text


def test_readings_go_through_a_file_without_the_command(tmp_path: Path) -> None:
    readings = [a_reading(1.0), a_reading(2.0)]
    write_readings(tmp_path / "readings.jsonl", readings, {"worker 0": [0, 1]})
    assert "train.py" not in (tmp_path / "readings.jsonl").read_text()
    again, envs = read_readings(tmp_path / "readings.jsonl")
    assert [list(reading.places) for reading in again] == [reading.places for reading in readings]
    assert envs == {"worker 0": [0, 1]}
    (tmp_path / "readings.jsonl").write_text('{"format": "swath-readings"}\n7\n')
    with pytest.raises(ValueError, match=r"readings.jsonl is not what swath collect writes"):
        read_readings(tmp_path / "readings.jsonl")


# -- collectors --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_report_of_workers_one_of_which_is_killed(tmp_path: Path) -> None:
    collector = MultiSyncCollector(
        ["CartPole-v1"] * 2, frames_per_batch=100, total_frames=2000, num_workers=2, restart_workers=1
    )
    collector.set_seed(5)
    report = collector.report(tmp_path / "run.html", trace=tmp_path / "run.json")
    for _ in range(5):
        collector.next()
        collector.update_policy_weights_()
    os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
    with pytest.warns(UserWarning, match="was started again"):
        list(collector)
    page = Page(report.path.read_text())
    assert "worker 1 (env 1) was started again" in re.sub(r"\s+", " ", page.sections["faults"])
    assert "2,000" in page.sections["head"]
    assert {"timeline", "shares", "lag", "episodes", "ideal"} <= set(page.sections)
    assert re.search(r"seed\s+5", page.sections["what-ran"])
    assert len(TraceFile(tmp_path / "run.json").pids("worker 1")) == 2
    lanes, _ = read_trace(tmp_path / "run.json")
    assert [lane.place for lane in lanes.lanes] == ["you and the collector", "worker 0", "worker 1"]


@pytest.mark.processes
def test_a_report_of_a_learner_with_a_buffer(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(3000), batch_size=32)
    collector = MultiAsyncCollector(
        ["CartPole-v1"] * 2, frames_per_batch=100, total_frames=3000, replay_buffer=buffer
    )  # fmt: skip
    with collector.report(tmp_path / "run.html") as report:
        collector.start()
        while buffer.write_count < 3000:
            buffer.sample(wait=True)
        collector.async_shutdown()
    page = Page(report.path.read_text())
    assert "samples per insert" in page.sections["what-ran"]
    assert "Frames in the replay buffer" in page.sections["speed"]


def test_a_collector_that_is_over_tells_what_is_known(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=1000)
    for _ in collector:
        pass
    report = collector.report(tmp_path / "run.html")
    page = Page(report.path.read_text())
    assert "there is no timeline" in page.text
    assert {"shares", "episodes", "what-ran"} <= set(page.sections)
    assert not {"timeline", "speed"} & set(page.sections)
    assert report.stop() == tmp_path / "run.html"
    with pytest.raises(RuntimeError, match="nothing to trace: leave trace= out"):
        collector.report(tmp_path / "run.html", trace=tmp_path / "run.json")


def test_a_report_of_nothing_and_of_what_was_not_stopped(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=100)
    with collector.report(tmp_path / "empty.html"):
        pass
    assert "Nothing has been collected yet" in (tmp_path / "empty.html").read_text()
    collector.report(tmp_path / "run.html")
    collector.next()
    collector.shutdown()
    assert "100 " in Page((tmp_path / "run.html").read_text()).sections["head"]


def test_arguments_that_are_no_text_keep_no_report_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", os.fsdecode(b"run-\xff")])
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    with collector.report(tmp_path / "run.html") as report:
        list(collector)
    assert "run-\\udcff" in report.path.read_text()


def test_one_at_a_time(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10)
    with collector.report(tmp_path / "run.html"):
        for another in (collector.trace, collector.report):
            with pytest.raises(
                RuntimeError, match=r"for a report to .*run.html: stop.*report\(path, trace='run.json'\)"
            ):
                another(tmp_path / "other")
    with (
        collector.trace(tmp_path / "run.json"),
        pytest.raises(RuntimeError, match=r"being traced already, to .*run.json: stop that one first"),
    ):
        collector.report(tmp_path / "run.html")
    collector.shutdown()


def test_it_is_known_at_once_that_a_report_cannot_be_written(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10)
    with pytest.raises(FileNotFoundError, match=r"report: .*run.html cannot be written: No such file"):
        collector.report(tmp_path / "nowhere" / "run.html")
    with pytest.raises(IsADirectoryError, match=r"report: trace=: .* cannot be written"):
        collector.report(tmp_path / "run.html", trace=tmp_path)
    collector.next()
    collector.shutdown()


def test_a_disk_that_is_full_loses_no_report(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=20)
    report = collector.report("/dev/full", trace="/dev/full")
    with pytest.warns(UserWarning, match="the report could not be written to /dev/full: No space left"):
        for _ in collector:
            pass
    report.write(tmp_path / "run.html")
    assert "timeline" in Page((tmp_path / "run.html").read_text()).sections
    with pytest.raises(OSError, match="its trace could not be written to /dev/full"):
        report.write_trace("/dev/full")
    report.write_trace(tmp_path / "run.json")
    assert TraceFile(tmp_path / "run.json").slices(1, "steps")


def test_what_failed_first_is_what_is_seen(tmp_path: Path) -> None:
    collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=40)

    def fails() -> None:
        with collector.report(tmp_path / "run.html"):
            for number, _ in enumerate(collector):
                1 / (1 - number)

    with pytest.raises(ZeroDivisionError):
        fails()
    page = Page((tmp_path / "run.html").read_text())
    assert "20 " in page.sections["head"]
    assert "the collector ended: ZeroDivisionError: division by zero" in " ".join(page.sections["faults"].split())
    collector.shutdown()


@pytest.mark.processes
def test_a_worker_that_is_killed_ends_it_and_the_report_says_so(tmp_path: Path) -> None:
    collector = MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=100, num_workers=2)

    def dies() -> None:
        with collector.report(tmp_path / "run.html"):
            for number, _ in enumerate(collector):
                if number == 20:
                    os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)

    with pytest.raises(WorkerDied):
        dies()
    told = " ".join(Page((tmp_path / "run.html").read_text()).sections["faults"].split())
    assert re.search(r"worker 1 \(env 1\) was lost \(process \d+\)", told)
    assert "the collector ended: WorkerDied: worker 1" in told
