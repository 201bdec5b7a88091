"""``swath report``, and ``swath collect`` with ``--report`` and ``--trace``."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import swath
from command_checks import entries
from swath.cli.main import main
from trace_format import TraceFile

_COUNT = ("collect", "my_envs:Count-v0", "--seed", "0", "--frames", "900")


def section(page: Path, name: str) -> str:
    """The text of one section."""
    (found,) = re.findall(rf'<section id="{name}"[^>]*>(.*?)</section>', page.read_text(), re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", found)).split())


@pytest.mark.processes
@pytest.mark.parametrize("way", [("--envs", "2"), ("--workers", "2"), ("--workers", "2", "--sync")], ids=" ".join)
def test_a_collection_with_a_report(swath_here: Any, way: tuple[str, ...]) -> None:
    result = swath_here(*_COUNT, *way, "--out", "data", "--report")
    assert result.code == 0, result.stderr
    data = Path("data")
    assert {path.name for path in data.iterdir()} == {
        "episodes.csv", "frames", "metadata.json", "readings.jsonl", "report.html", "trace.json",
    }  # fmt: skip
    page = data / "report.html"
    assert "swath collect my_envs:Count-v0" in section(page, "what-ran")
    assert "None." in section(page, "faults")
    for name in ("timeline", "shares", "episodes", "slowest", "ideal"):
        assert section(page, name)
    assert TraceFile(data / "trace.json").slices(1)
    assert len(swath.load(data).frames) == 900
    # What is stored does not tell where it was.
    for name in ("metadata.json", "readings.jsonl", "report.html", "trace.json"):
        assert os.getcwd() not in (data / name).read_text(), name
    before = page.read_text()
    assert swath_here("report", "data").code == 0
    assert page.read_text() == before
    assert swath_here(*_COUNT, *way, "--out", "data", "--overwrite").code == 0
    assert not page.exists()


def test_a_report_without_a_trace_says_what_is_missing(swath_here: Any) -> None:
    assert swath_here(*_COUNT, "--out", "data").code == 0
    result = swath_here("report", "data", "--out", "page.html")
    assert result.code == 0
    assert result.stdout.startswith("page.html (")
    assert "There is no timeline" in Path("page.html").read_text()
    assert section(Path("page.html"), "shares")
    Path("data/readings.jsonl").unlink()
    assert swath_here("report", "data", "--out", "page.html").code == 0
    assert "Nothing was kept of how this went over time" in Path("page.html").read_text()
    assert section(Path("page.html"), "episodes")
    assert entries() == {"data", "page.html"}


def test_a_trace_goes_where_it_is_told(swath_here: Any) -> None:
    assert swath_here(*_COUNT, "--out", "data", "--trace", "run.json").code == 0
    assert TraceFile(Path("run.json")).about["env"] == "my_envs:Count-v0"
    assert not Path("data/trace.json").exists()
    assert swath_here("report", "run.json").code == 0
    assert section(Path("run.html"), "timeline")
    assert swath_here(*_COUNT, "--out", "more", "--trace").code == 0
    assert TraceFile(Path("more/trace.json")).slices(1, "steps")


def test_a_trace_that_has_no_room_where_it_was_told_to_go_is_beside_the_frames(swath_here: Any) -> None:
    result = swath_here(*_COUNT, "--out", "data", "--trace", "/dev/full", "--report")
    assert result.code == 0
    assert result.stderr.count("could not be written") == 1
    assert "to /dev/full: No space left on device; it goes to trace.json in the dataset's folder" in result.stderr
    assert TraceFile(Path("data/trace.json")).slices(1, "steps")
    assert section(Path("data/report.html"), "timeline")


def test_a_report_does_without_a_trace_that_has_no_room(swath_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swath.collectors.tracing.write_trace", full)
    result = swath_here(*_COUNT, "--out", "data", "--report")
    assert result.code == 0
    assert "the trace could not be written to trace.json: No space left on device" in result.stderr
    assert not Path("data/trace.json").exists()
    assert "There is no timeline" in Path("data/report.html").read_text()


def test_what_fails_has_a_report_too(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:Failing-v0", "--frames", "1k", "--out", "data", "--report")
    assert result.code == 1
    assert "RuntimeError: lost contact with 'robot.sock'" in section(Path("data/report.html"), "what-ran")
    assert "60 of 1,000" in section(Path("data/report.html"), "what-ran")
    assert "ended: RuntimeError: lost contact with" in section(Path("data/report.html"), "faults")


def test_a_report_that_cannot_be_written_costs_no_frame(swath_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_report", "write_readings"):
        monkeypatch.setattr(f"swath.cli.keeping.{name}", full)
    result = swath_here(*_COUNT, "--out", "data", "--report")
    assert result.code == 0
    assert "the report could not be written, the frames are: No space left on device" in result.stderr
    assert len(swath.load("data").frames) == 900
    result = swath_here("report", "data", "--out", "/dev/full")
    assert (result.code, "that is no file" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "report nowhere",
            "nowhere: there is no such file or folder; swath report takes a dataset's folder, or a trace",
        ),
        ("report .", "'.' is no swath dataset: it has no metadata.json"),
        ("report my_envs.py", "my_envs.py is no trace: it is not JSON to its end"),
        ("report empty.json", "empty.json is no trace: it is not JSON to its end"),
        ("report ok.json --out folder", "--out folder: that is a folder; name a file, such as folder/report.html"),
        ("report ok.json --out my_envs.py", "my_envs.py exists, and is no report of swath: choose another file with"),
        ("report ok.json --out nowhere/a.html", "nowhere/a.html cannot be written: No such file or directory; choose"),
        (
            "collect my_envs:Count-v0 --frames 9 --out x --trace nowhere/a.json",
            "--trace nowhere/a.json: cannot be writ",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(swath_here: Any, command: str, said: str) -> None:
    Path("empty.json").write_text("")
    Path("ok.json").write_text(json.dumps({"traceEvents": []}))
    Path("folder").mkdir()
    before = entries()
    result = swath_here(*command.split())
    assert result.code in (1, 2)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert entries() == before


def test_a_damaged_part_is_named(swath_here: Any) -> None:
    assert swath_here(*_COUNT, "--out", "data").code == 0
    Path("data/readings.jsonl").write_text("nothing\n")
    result = swath_here("report", "data")
    assert result.code == 2
    assert "data/readings.jsonl is not what swath collect writes" in result.stderr
    assert len(swath.load("data").frames) == 900  # frames do not depend on it


def test_a_misspelt_option_of_a_report(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["report", "data", "--output", "x"])
    assert "--output: did you mean --out?" in capsys.readouterr().err
