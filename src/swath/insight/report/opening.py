"""What a report is drawn from, read from files: the folder of a dataset, or a trace. They may be anybody's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from swath.dataset import load
from swath.dataset_format import READINGS, TRACE
from swath.insight.reading import EpisodesReading, Reading
from swath.insight.report.charts import show_number, show_seconds
from swath.insight.report.lanes import Lanes, NoTrace
from swath.insight.report.run import EpisodeSeries, Run
from swath.insight.report.sections import about_reading

_FORMAT = "swath-readings"
#: The first line of a trace that swath wrote ends with this; each line after it is an event.
_OURS = '"traceEvents": ['


# -- readings ----------------------------------------------------------------------------------------------------------


def write_readings(path: Path, readings: Sequence[Reading], envs: Mapping[str, Sequence[int]]) -> None:
    """Readings of one program. Its command is left out: it may tell about this machine's folders."""
    lines = []
    for reading in readings:
        if not lines:
            program = replace(reading.program, command="")
            lines.append(
                {"format": _FORMAT, "program": replace(reading, program=program).as_json()["program"], "envs": envs}
            )
        entry = replace(reading, episodes=EpisodesReading(reading.episodes.count)).as_json()
        del entry["program"]
        lines.append(entry)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


def read_readings(path: Path) -> tuple[list[Reading], dict[str, list[int]]]:
    """Readings, and the envs of places.

    Raises:
        ValueError: it is not what ``write_readings`` writes.
    """
    with path.open(encoding="utf-8") as file:
        try:
            first, *lines = [json.loads(line) for line in file]
            if first["format"] != _FORMAT:
                raise ValueError
            envs = {str(name): [int(env) for env in numbers] for name, numbers in first["envs"].items()}
            return [Reading.of_json({**line, "program": first["program"]}) for line in lines], envs
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{path} is not what swath collect writes") from None


# -- runs --------------------------------------------------------------------------------------------------------------


def run_of_dataset(folder: Path, trace: Path | None = None) -> Run:
    """What ``swath collect`` wrote.

    Args:
        trace: where its trace is, if not in the folder.

    Raises:
        ValueError, FileNotFoundError: as ``swath.load``; or something that is beside the frames is damaged.
    """
    dataset = load(folder)
    about, notes = dataset.metadata, []
    readings: list[Reading] = []
    envs: dict[str, list[int]] = {}
    if (folder / READINGS).exists():
        readings, envs = read_readings(folder / READINGS)
    else:
        notes.append(
            "Nothing was kept of how this went over time: it was collected by an earlier version, or it was killed. So "
            "there is no verdict, and no curve."
        )
    trace = folder / TRACE if trace is None else trace
    lanes = None
    if trace.exists():
        lanes, _ = read_trace(trace)
    else:
        notes.append("There is no timeline: swath collect draws one with --report, and keeps what it is made of.")
    if readings and readings[-1].failure is None and about.get("error"):  # it was read before that was known
        readings[-1] = replace(readings[-1], failure=str(about["error"]))
    ended = [row for row in dataset.episodes if row["terminated"] or row["truncated"]]
    return Run(
        about=_about_dataset(about, readings),
        readings=readings,
        lanes=lanes,
        episodes=EpisodeSeries.of_rows((row["return"], row["length"]) for row in ended),
        envs=envs,
        notes=notes,
    )


def _about_dataset(metadata: Mapping[str, Any], readings: Sequence[Reading]) -> dict[str, str]:
    about = {"env": str(metadata["env_id"]), "collector": "swath collect"}
    if readings:
        known = about_reading(readings[-1])
        about |= {name: known[name] for name in ("collector", "layout", "cores")}
    of = metadata.get("requested_frames")
    about["frames"] = f"{metadata['frames']:,}" + (f" of {of:,}" if isinstance(of, int) else "")
    for name, key in (
        ("envs", "num_envs"),
        ("workers", "workers"),
        ("policy", "policy"),
        ("seed", "seed"),
        ("frames per batch", "frames_per_batch"),
        ("command", "command"),
        ("written", "created"),
        ("stopped by", "stopped_by"),
        ("error", "error"),
    ):
        if metadata.get(key) is not None:
            about[name] = str(metadata[key])
    seconds, fps = metadata.get("seconds"), metadata.get("fps")
    if isinstance(seconds, int | float) and isinstance(fps, int | float):
        about["collecting took"] = f"{show_seconds(seconds)}, {show_number(fps)} frames/s"
    versions = metadata.get("versions")
    if isinstance(versions, dict):
        about["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return about


def run_of_trace(path: Path) -> Run:
    """What a trace has to tell: of swath, or of others in the same format.

    Raises:
        NoTrace: it is none.
    """
    lanes, about = read_trace(path)
    note = "This is of a trace alone, which has no totals: collector.report(path) and swath collect --report tell more."
    return Run(about={"trace": path.name, **about}, lanes=lanes, notes=[note])


# -- traces ------------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> tuple[Lanes, dict[str, str]]:
    """Its lanes, and what it says of the program."""
    try:
        with path.open(encoding="utf-8") as file:
            about, events = _about_and_events(file)
            return Lanes.of_events(events), about
    except NoTrace as error:
        raise NoTrace(f"{path} is no trace: {error}") from None
    except (ValueError, RecursionError):
        raise NoTrace(f"{path} is no trace: it is not JSON to its end") from None


def _about_and_events(file: TextIO) -> tuple[dict[str, str], Iterable[Mapping[str, Any]]]:
    first = file.readline()
    if first.rstrip().endswith(_OURS):
        return _strings(json.loads(first.rstrip() + "]}")), _line_by_line(file)
    whole = json.loads(first + file.read())
    events = whole.get("traceEvents") if isinstance(whole, dict) else whole
    if not isinstance(events, list):
        raise NoTrace("it has no traceEvents")
    return _strings(whole if isinstance(whole, dict) else {}), events


def _strings(whole: Mapping[str, Any]) -> dict[str, str]:
    about = whole.get("otherData")
    return {str(name): str(value) for name, value in about.items()} if isinstance(about, dict) else {}


def _line_by_line(file: TextIO) -> Iterator[Mapping[str, Any]]:
    """A trace may be large: no more than an event of it is in memory."""
    for line in file:
        line = line.strip().removesuffix(",")
        if line == "]}":
            return
        if line:
            yield json.loads(line)
    raise NoTrace("its end is missing")
