"""Numbers on the command line, ``swath.load`` of what is no dataset, and numbers on the screen."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path

import pytest

import swath
from swath.cli.episodes import Tally
from swath.cli.options import parse_count, parse_seed
from swath.cli.progress import Meter, short, show_episodes
from swath.cli.stopping import StopRequest
from swath.cli.target import show_bytes


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
    with pytest.raises(ValueError, match="pip install --upgrade swath"):
        swath.load(tmp_path / "data")
    with pytest.raises(ValueError, match="no swath dataset"):
        swath.load(metadata)


def test_the_meter_never_shows_more_than_all() -> None:
    class NoEpisodes:
        count = 0
        frames = 0

        def recent_means(self) -> None:
            return None

    moment = Meter(10, lambda: 16, lambda: False, NoEpisodes()).read()
    assert moment.frames == 10
    assert moment.seconds_left == 0
    assert show_episodes(moment) == "episodes are counted with each batch"


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5"), (1e20, "1e+20")]
)
def test_odd_numbers(value: float, shown: str) -> None:
    assert short(value) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")])
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
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not stop._receive
