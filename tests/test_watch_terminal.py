"""swath.watch in a terminal: what is printed stays as it is, and so does the terminal."""

from __future__ import annotations

import functools
import gc
import io
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import swath
from leaks import wait_until
from small_terminal import Seen, SmallTerminal, start_in
from swath.collectors import Collector, MultiSyncCollector
from swath.envs import GymEnv
from swath.insight.terminal import Terminal, terminal_of
from test_standing import COLLECTORS
from warned import warned_here


def a_collector(total_frames: int | None = 400, **more: Any) -> Collector:
    return Collector("CartPole-v1", nn.Linear(4, 2), frames_per_batch=100, total_frames=total_frames or -1, **more)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swath-watch"]


@pytest.fixture(autouse=True)
def _no_watcher_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert wait_until(lambda: not watchers())
    for stream in (sys.stdout, sys.stderr):
        assert type(stream).__name__ != "_Above"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallTerminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    with SmallTerminal() as terminal:
        yield terminal


# -- a terminal --------------------------------------------------------------------------------------------------------


def test_in_a_terminal_it_stays_below_what_is_printed(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        for number, _ in enumerate(swath.watch(a_collector(), every_s=0.01)):
            print(f"update {number}")
            print("to stderr", file=sys.stderr)
        terminal.settle()
        lines = terminal.text.splitlines()
        assert lines[:8] == [line for number in range(4) for line in (f"update {number}", "to stderr")]
        assert lines[8].startswith("Collector · GymEnv(CartPole-v1) · 1 env")
        assert "400 / 400 frames" in lines[9]
        assert terminal.text.count("Collector · ") == 1
        assert not terminal.cursor_was_hidden


def test_what_is_printed_comes_whole_and_in_order(terminal: SmallTerminal) -> None:
    """Whatever pieces it is written in, however long its lines are."""
    with terminal.printed_to():
        rng, expected = random.Random(0), ""
        with swath.watch(a_collector(None), every_s=0.005):
            for number in range(300):
                text = rng.choice(
                    [
                        "\n",
                        "a",
                        f"{number} word ",
                        f"line {number}\n",
                        "x" * 200 + "\n",
                        "y" * 80 + "\n",
                        "two\nlines\n",
                    ]
                )
                expected += text
                rng.choice([sys.stdout, sys.stderr]).write(text)
        terminal.settle()
        alone = Seen(80)
        alone.feed(expected)
        expected_lines = [line.rstrip() for line in alone.lines[:-1]]
        assert terminal.lines[: len(expected_lines)] == expected_lines


def test_a_line_that_has_not_ended_stays_open(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        with swath.watch(a_collector(None), every_s=0.005):
            sys.stdout.write("50 %")
            terminal.wait_for("50 %\nCollector")
            sys.stdout.write("\r75 %")
            terminal.wait_for("75 %\nCollector")
            sys.stdout.write(" and more\n")
            terminal.wait_for("75 % and more\n\nCollector")
        assert "50 %" not in terminal.text


def test_the_last_view_does_not_follow_on_an_open_line(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        with swath.watch(a_collector(None), every_s=0.005):
            sys.stdout.write("99 %")
            terminal.wait_for("99 %\nCollector")
        terminal.wait_for("99 %\nCollector")
    assert "99 %Collector" not in terminal.text


def test_within_a_progress_bar_of_richs(terminal: SmallTerminal) -> None:
    """It puts a stream of its own in the place of ``sys.stderr``, which makes text of signs: there it gets lines."""
    from rich.console import Console
    from rich.progress import Progress

    with terminal.printed_to():
        with Progress(console=Console(file=sys.stderr, force_terminal=True)) as progress:
            task = progress.add_task("training", total=20)
            for _ in swath.watch(a_collector(2000)):
                progress.advance(task)
        terminal.wait_for("swath: 2,000 / 2,000 frames")
    assert "swath: watching Collector" in terminal.text
    assert "[0m" not in terminal.text
    assert "training" in terminal.text


def test_what_is_written_past_it_and_typed_stays(terminal: SmallTerminal) -> None:
    """By a debugger, who writes to the terminal itself, or by a worker."""
    with terminal.printed_to(), swath.watch(a_collector(None), every_s=0.005):
        terminal.wait_for("Collector")
        os.write(sys.stdout.fileno(), b"(Pdb) p 1 + 1")
        length = len(terminal.raw)
        terminal.wait_for(lambda: len(terminal.raw) > length + 5000)
        assert "(Pdb) p 1 + 1\nCollector" in terminal.text
        os.write(sys.stdout.fileno(), b"\n")
        terminal.wait_for("(Pdb) p 1 + 1\n\nCollector")


def test_another_stream_is_left_alone(terminal: SmallTerminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """``python train.py > log``: what is printed is in the log, to the last sign."""
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        monkeypatch.setattr(sys, "stderr", terminal.open())
        for _ in swath.watch(a_collector()):
            assert sys.stdout is log
            print("[bold]x" * 30)
    terminal.settle()
    assert (tmp_path / "log").read_text() == ("[bold]x" * 30 + "\n") * 4
    assert "400 / 400 frames" in terminal.text


def test_streams_are_as_they_were(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        before = sys.stdout, sys.stderr
        with swath.watch(a_collector(None), every_s=0.01):
            terminal.wait_for("Collector")
            assert sys.stdout is not before[0]
            assert (sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.fileno()) == (
                True,
                "utf-8",
                before[0].fileno(),
            )
            kept = sys.stdout
            with pytest.raises(TypeError, match="must be str"):
                kept.write(b"bytes")  # type: ignore[arg-type]
            kept.writelines(["some\n", "lines\n"])
        assert (sys.stdout, sys.stderr) == before
        print("by whoever has kept it", file=kept)
        terminal.wait_for("by whoever has kept it")


def test_who_replaces_the_streams_meanwhile_keeps_them(terminal: SmallTerminal) -> None:
    others = io.StringIO()
    with terminal.printed_to():
        with swath.watch(a_collector(None), every_s=0.01):
            terminal.wait_for("Collector")
            sys.stdout = others
        assert sys.stdout is others


def test_two_watches_of_one_collector_show_it_once(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        collector = a_collector(None)
        with swath.watch(collector, every_s=0.01):
            with swath.watch(collector, every_s=0.01):
                terminal.wait_for("Collector")
                assert len(watchers()) == 2
            assert len(watchers()) == 1
            collector.next()
            terminal.wait_for("\n100 frames")
            assert terminal.text.count("Collector ·") == 1
        terminal.settle()
        assert terminal.text.count("Collector ·") == 1


def test_two_collectors_share_a_terminal(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        first, second = a_collector(300), a_collector(400)
        with swath.watch(first, every_s=0.01), swath.watch(second, every_s=0.01):
            terminal.wait_for(lambda: terminal.text.count("Collector ·") == 2)
            assert len(terminal.text.splitlines()) <= 23
            list(first)
            terminal.wait_for("300 / 300 frames")
            print("between")
            list(second)
        terminal.settle()
        assert terminal.text.count("Collector ·") == 2
        assert "300 / 300 frames" in terminal.text
        assert "400 / 400 frames" in terminal.text
        assert "between" in terminal.text


@pytest.mark.parametrize(("columns", "lines"), [(30, 10), (80, 5), (80, 2), (200, 60)])
def test_it_fits_whatever_the_size(terminal: SmallTerminal, columns: int, lines: int) -> None:
    with terminal.printed_to():
        terminal.resize(columns, lines)
        collector = a_collector(None)
        with swath.watch(collector, every_s=0.01):
            collector.next()
            terminal.wait_for(lambda: len(terminal.raw) > 500)
            shown = terminal.text.splitlines()
            assert len(shown) < max(lines, 3)
            assert max(map(len, ["", *shown])) <= columns


def test_a_terminal_that_is_made_smaller(terminal: SmallTerminal) -> None:
    with terminal.printed_to(), swath.watch(a_collector(None), every_s=0.01):
        terminal.wait_for("Collector")
        terminal.resize(50, 12)
        terminal.wait_for(lambda: max(map(len, terminal.text.splitlines())) <= 50)


def test_a_terminal_that_cannot_redraw_gets_lines(terminal: SmallTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal.printed_to():
        monkeypatch.setenv("TERM", "dumb")
        list(swath.watch(a_collector()))
        terminal.settle()
        assert "swath: 400 / 400 frames" in terminal.text
        assert "\x1b" not in terminal.raw


def test_a_terminal_without_our_signs(terminal: SmallTerminal) -> None:
    list(swath.watch(a_collector(), file=terminal.open("ascii")))
    terminal.settle()
    assert "400 / 400 frames" in terminal.text


def test_no_terminal_is_kept(terminal: SmallTerminal) -> None:
    file = terminal.open()
    list(swath.watch(a_collector(), file=file))
    reference = weakref.ref(terminal_of(file))
    gc.collect()
    assert reference() is None
    assert isinstance(terminal_of(file), Terminal)


@pytest.mark.processes
def test_a_forked_process_prints_as_ever(terminal: SmallTerminal) -> None:
    with terminal.printed_to():
        with swath.watch(a_collector(None), every_s=0.001):
            terminal.wait_for("Collector")
            child = os.fork()
            if not child:
                print("of the child", flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert "of the child" in terminal.raw


# -- programs ----------------------------------------------------------------------------------------------------------

_PROGRAM = """
import sys, time
import swath
from swath.collectors import Collector
collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=-1)
for number, batch in enumerate(swath.watch(collector, every_s=0.05)):
    time.sleep(0.01)
    if number == 20:
        print("twenty")
    {more}
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_ended_leaves_the_terminal_in_order(terminal: SmallTerminal, number: int) -> None:
    before = terminal.attributes
    process: Any = start_in(terminal, _PROGRAM.format(more=""))
    terminal.wait_for("twenty\n\nCollector")
    os.kill(process.pid, number)
    process.join(30)
    terminal.settle()
    assert process.exitcode == (1 if number == signal.SIGINT else -number)
    process.close()
    assert terminal.attributes == before
    assert not terminal.cursor_was_hidden
    if number == signal.SIGINT:
        assert terminal.text.index("frames/s now") < terminal.text.index("KeyboardInterrupt")
        assert terminal.text.count("Collector ·") == 1


@pytest.mark.processes
def test_an_error_comes_below_the_last_view(terminal: SmallTerminal) -> None:
    process: Any = start_in(terminal, _PROGRAM.format(more="assert number < 30, 'a bug of mine'"))
    process.join(60)
    assert process.exitcode == 1
    process.close()
    terminal.settle()
    assert terminal.text.index("3,100 frames") < terminal.text.index("a bug of mine")
    assert terminal.text.count("Collector ·") == 1


@pytest.mark.processes
def test_a_program_that_forgets_it_ends_in_order() -> None:
    script = """
import swath
from swath.collectors import Collector
collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=-1)
swath.watch(collector)
collector.next()
kept = collector
"""
    ended = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines()[-1].startswith("swath: 100 frames · ")


@pytest.mark.processes
def test_workers_and_one_that_is_killed() -> None:
    file = io.StringIO()
    make = functools.partial(GymEnv, "CartPole-v1")
    collector = MultiSyncCollector([make] * 2, nn.Linear(4, 2), frames_per_batch=200, restart_workers=3)
    with collector, swath.watch(collector, every_s=0.01, file=file):
        collector.next()
        os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
        with warned_here(match="worker 0"):
            for _ in range(20):
                collector.next()
        assert wait_until(lambda: "restarts 1" in file.getvalue())


@pytest.mark.processes
@pytest.mark.parametrize("kind", COLLECTORS)
def test_each_kind_of_collector_is_shown(terminal: SmallTerminal, kind: str) -> None:
    make, _, places = COLLECTORS[kind]
    assert list(swath.watch(make(), file=terminal.open())) != []
    terminal.settle()
    assert "4,000 / 4,000 frames" in terminal.text
    assert "CartPole-v1" in terminal.lines[0]
    for place in places:
        assert any(line.startswith(place) and line.endswith("%") for line in terminal.lines), place
