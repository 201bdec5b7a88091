"""Numbers on the command line, ``swath.load`` of what is no dataset, numbers and workers on the screen, writers."""

from __future__ import annotations

import argparse
import csv
import json
import signal
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import swath
from swath.cli.episodes import Tally
from swath.cli.options import parse_count, parse_seed
from swath.cli.stopping import StopRequest
from swath.cli.writer import ArrivalWriter
from swath.disk import show_bytes
from swath.insight.quantities import short


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("100k", 100_000), ("1M", 10**6), ("1e5", 10**5), ("100_000", 10**5), ("1.5K", 1500), ("2G", 2 * 10**9)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "0", "-5", "1.5", "many", "nan", "inf", "1e99999999", "1e-3", "10 000"])
def test_no_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no"):
        parse_count(text)


@pytest.mark.parametrize("text", ["-1", "1.5", "x", str(2**32)])
def test_no_seeds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_seed(text)


def test_loading_what_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no dataset at"):
        swath.load(tmp_path / "nowhere")
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=r"it has no metadata\.json"):
        swath.load(tmp_path / "data")
    metadata = tmp_path / "data" / "metadata.json"
    metadata.write_text("half a fi")
    with pytest.raises(ValueError, match="is not JSON"):
        swath.load(tmp_path / "data")
    metadata.write_text('{"name": "another"}')
    with pytest.raises(ValueError, match="another program's"):
        swath.load(tmp_path / "data")
    metadata.write_text(json.dumps({"format": "swath-dataset", "format_version": 99, "versions": {"swath": "9.9"}}))
    with pytest.raises(ValueError, match=r"swath 9\.9 in a later format .* install that version"):
        swath.load(tmp_path / "data")
    with pytest.raises(ValueError, match="no swath dataset"):
        swath.load(metadata)


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5"), (1e20, "1e+20")]
)
def test_odd_numbers(value: float, shown: str) -> None:
    assert short(value) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")])
def test_sizes(count: float, shown: str) -> None:
    assert show_bytes(count) == shown


def test_a_nan_among_returns_is_seen() -> None:
    tally = Tally()
    assert tally.as_dict() == {"mean": None, "min": None, "max": None}
    for value in (1.0, float("nan"), 3.0):
        tally.add(value)
    assert tally.as_dict() == {"mean": None, "min": None, "max": None}


def test_signals_wait_for_what_must_be_done_whole() -> None:
    stop = StopRequest()
    with stop.listening():
        with pytest.raises(KeyboardInterrupt):  # nothing to keep yet
            signal.raise_signal(signal.SIGINT)
        stop = StopRequest()
    with stop.listening():
        stop.polite = True
        assert not stop.collection_stopped()
        signal.raise_signal(signal.SIGINT)
        assert stop.collection_stopped()
        with stop.held_off():
            signal.raise_signal(signal.SIGINT)
        assert stop.in_a_hurry  # it was not lost
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not stop._receive


def arrived(*pieces: tuple[int, range], length: int = 5) -> TensorDict:
    """A batch of pieces of envs, whose episodes are ``length`` steps long."""
    env = torch.cat([torch.full((len(steps),), env) for env, steps in pieces])
    step = torch.cat([torch.tensor(steps) for _, steps in pieces])
    done = (step % length == length - 1).unsqueeze(-1)
    frames = TensorDict(step=env * 1000 + step, batch_size=len(step))
    frames["next"] = TensorDict(reward=torch.ones(len(step), 1), done=done, terminated=done, batch_size=len(step))
    frames["collector"] = TensorDict(traj_ids=env + 10 * (step // length), env=env, batch_size=len(step))
    return frames


@pytest.mark.parametrize("planned", [31, 40])
def test_frames_of_envs_that_advance_unevenly_are_put_in_order(tmp_path: Path, planned: int) -> None:
    writer = ArrivalWriter(tmp_path, planned, 4, lambda frame: None)
    writer.add(arrived((2, range(7))))
    writer.add(arrived((0, range(3))))
    writer.add(arrived((2, range(7, 20))))
    writer.add(arrived((3, range(4)), (0, range(3, 6)), (3, range(4, 5))))
    assert writer.frames == 31
    writer.close()
    writer.put_together(tmp_path / "done")
    assert writer.frames_per_env == [6, 0, 20, 5]
    steps = [*range(6), *range(2000, 2020), *range(3000, 3005)]
    frames = TensorDict.load_memmap(tmp_path / "done" / "frames")
    assert frames["step"].tolist() == steps
    assert set(frames["collector"].keys()) == {"traj_ids"}
    with (tmp_path / "done" / "episodes.csv").open(newline="") as file:
        rows = [(int(row["env"]), int(row["start"]), int(row["length"])) for row in csv.DictReader(file)]
    ended = [(2, 6, 5), (2, 11, 5), (2, 16, 5), (2, 21, 5), (0, 0, 5), (3, 26, 5)]
    assert rows == [*ended, (0, 5, 1)]
    assert {path.name for path in (tmp_path / "done").iterdir()} == {"episodes.csv", "frames"}
