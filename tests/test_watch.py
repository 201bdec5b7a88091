"""swath.watch: in a terminal, in a log, in a notebook; and how it ends, whatever ends it."""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import swath
from leaks import wait_until
from small_terminal import Seen, SmallTerminal, start_in
from swath.collectors import Collector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv
from swath.insight.terminal import Terminal, terminal_of
from test_standing import COLLECTORS
from warned import warned_here


def a_collector(total_frames: int | None = 400, **more: Any) -> Collector:
    return Collector("CartPole-v1", nn.Linear(4, 2), frames_per_batch=100, total_frames=total_frames or -1, **more)


def a_background() -> tuple[Collector, ReplayBuffer]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=10)
    return a_collector(None, replay_buffer=buffer), buffer


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


# -- how it is used ----------------------------------------------------------------------------------------------------


def _in_a_loop(collector: Any, file: Any) -> list[Any]:
    return list(swath.watch(collector, file=file))


def _in_a_block(collector: Any, file: Any) -> list[Any]:
    with swath.watch(collector, file=file):
        return list(collector)


def _in_a_block_and_a_loop(collector: Any, file: Any) -> list[Any]:
    with swath.watch(collector, file=file) as watch:
        return list(watch)


def _with_numbers(collector: Any, file: Any) -> list[Any]:
    return [batch for _, batch in enumerate(swath.watch(collector, file=file))]


def _left_alone(collector: Any, file: Any) -> list[Any]:
    swath.watch(collector, file=file)
    return list(collector)


@pytest.mark.parametrize("use", [_in_a_loop, _in_a_block, _in_a_block_and_a_loop, _with_numbers, _left_alone])
def test_each_way_to_use_it(use: Callable[..., list[Any]]) -> None:
    expected = list(seeded())
    file = io.StringIO()
    batches = use(seeded(), file)
    assert wait_until(lambda: not watchers())
    for ours, theirs in zip(batches, expected, strict=True):
        assert (ours == theirs).all()
    first, *_, last = file.getvalue().splitlines()
    assert first == "swath: watching Collector · GymEnv(CartPole-v1) · 1 env"
    assert last.startswith("swath: 400 / 400 frames (100 %) · ")
    assert "closed after 0:0" in last


def seeded() -> Collector:
    torch.manual_seed(0)
    collector = a_collector()
    collector.set_seed(0)
    return collector


def test_a_collector_that_nobody_else_has() -> None:
    file = io.StringIO()
    assert len(list(swath.watch(a_collector(), file=file))) == 4
    assert "400 / 400" in file.getvalue()


def test_a_break_leaves_both_open() -> None:
    collector, file = a_collector(), io.StringIO()
    watch = swath.watch(collector, file=file)
    for _ in watch:
        break
    assert not watchers()
    assert file.getvalue().splitlines()[-1].startswith("swath: 100 / 400 frames (25 %)")
    assert len(list(watch)) == 3
    assert file.getvalue().splitlines()[-1].startswith("swath: 400 / 400 frames")


def test_an_error_of_the_user_ends_it_before_it_is_told() -> None:
    collector = a_collector()

    def train() -> None:
        for _ in swath.watch(collector, file=io.StringIO()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not watchers()
    assert len(list(collector)) == 3
    with pytest.raises(ZeroDivisionError), swath.watch(a_collector(), file=io.StringIO()):
        raise ZeroDivisionError
    assert not watchers()


def test_stop_ends_it_and_the_collector_goes_on() -> None:
    collector = a_collector()
    with swath.watch(collector, file=io.StringIO()) as watch:
        watch.stop()
        watch.stop()
        assert not watchers()
        assert len(list(collector)) == 4
    with pytest.raises(RuntimeError, match=r"this watch is over: swath\.watch\(collector\) begins another"):
        list(watch)


def test_what_fails_is_the_loops_error() -> None:
    def hook(batch: Any) -> None:
        raise RuntimeError("lost contact")

    with pytest.raises(RuntimeError, match="lost contact"):
        list(swath.watch(a_collector(post_collect_hook=hook), file=io.StringIO()))
    assert not watchers()


# -- what keeps what ---------------------------------------------------------------------------------------------------


def test_it_does_not_keep_the_collector() -> None:
    collector, file = a_collector(None), io.StringIO()
    swath.watch(collector, every_s=0.01, file=file)
    with swath.watch(collector, every_s=0.01, file=file):
        collector.next()
    assert len(watchers()) == 1
    reference = weakref.ref(collector)
    del collector
    gc.collect()
    assert wait_until(lambda: reference() is None)
    assert wait_until(lambda: not watchers())


def test_a_background_is_watched_until_it_ends() -> None:
    collector, buffer = a_background()
    file = io.StringIO()
    swath.watch(collector, every_s=0.01, file=file)
    collector.start()
    assert wait_until(lambda: buffer.write_count > 2000, 30)
    buffer.sample()
    assert wait_until(lambda: "samples per insert" in file.getvalue(), 30)
    collector.async_shutdown()
    assert wait_until(lambda: not watchers())
    assert "closed after" in file.getvalue().splitlines()[-1]


def test_a_background_that_fails_says_why() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=10)
    fails = threading.Event()

    def hook(batch: Any) -> None:
        if fails.is_set():
            raise RuntimeError("lost contact")

    collector = a_collector(None, replay_buffer=buffer, post_collect_hook=hook)
    file = io.StringIO()
    swath.watch(collector, file=file)
    with warned_here(match="lost contact"):
        collector.start()
        assert wait_until(lambda: len(buffer) > 0, 30)
        fails.set()
        assert wait_until(lambda: not watchers(), 30)
    assert "failed: Collector has stopped collecting in the background: RuntimeError: lost contact" in file.getvalue()


# -- a log -------------------------------------------------------------------------------------------------------------


def test_lines_come_as_often_as_they_are_asked_for() -> None:
    collector, file = a_collector(None), io.StringIO()
    with swath.watch(collector, every_s=0.01, file=file):
        assert wait_until(lambda: bool(collector.next() is not None) and file.getvalue().count("\n") > 5, 30)
    assert "frames/s" in file.getvalue().splitlines()[3]


def test_a_log_that_cannot_be_written_does_no_harm(tmp_path: Any) -> None:
    reading, writing = os.pipe()
    file = os.fdopen(writing, "w")
    collector = a_collector(None)
    with swath.watch(collector, every_s=0.01, file=file):
        os.close(reading)
        assert wait_until(lambda: not watchers())
        collector.next()
    with pytest.raises(BrokenPipeError):
        file.close()
    closed = (tmp_path / "log").open("w")
    closed.close()
    assert len(list(swath.watch(a_collector(), file=closed))) == 4


def test_a_log_without_our_signs(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        list(swath.watch(a_collector(), file=file))
    assert "400 / 400 frames (100 %) ?" in (tmp_path / "log").read_text()


def test_stderr_is_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    list(swath.watch(a_collector()))
    said = capsys.readouterr()
    assert said.out == ""
    assert "swath: 400 / 400 frames" in said.err


def test_where_there_is_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(list(swath.watch(a_collector()))) == 4


# -- what it is not for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: GymEnv("CartPole-v1"),
            r"not a GymEnv: an env is seen in its collector, watch\(Collector\(env, policy",
        ),
        (lambda: a_background()[1], "not a ReplayBuffer: a replay buffer is seen with the collector that fills it"),
        (list, r"shows a collector \(Collector, MultiCollector, ...\), not a list: make a collector"),
        (lambda: "CartPole-v1", "not a str: make a collector"),
        (lambda: None, "not a NoneType"),
        (lambda: Collector, "not the class Collector: make one"),
        (lambda: iter(a_collector()), r"for number, batch in enumerate\(swath.watch\(collector\)\)"),
        (lambda: enumerate(a_collector()), "not an enumerate: give it the collector itself"),
    ],
)
def test_only_a_collector_is_watched(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        swath.watch(make())


@pytest.mark.parametrize("every_s", [0, -1, float("nan"), float("inf"), True, "1"])
def test_how_often_is_a_number(every_s: Any) -> None:
    with pytest.raises(ValueError, match="every_s must be a number above 0"):
        swath.watch(a_collector(), every_s=every_s)


@pytest.mark.parametrize("file", ["log.txt", 2, object()])
def test_a_file_is_a_file(file: Any) -> None:
    with pytest.raises(TypeError, match="file must be an open text file"):
        swath.watch(a_collector(), file=file)


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


# -- a notebook --------------------------------------------------------------------------------------------------------

_NOTEBOOK = """
import json
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell  # what kernels are made from; a terminal has another one
shell = InteractiveShell.instance()
shell.display_pub = CapturingDisplayPublisher(shell=shell)
cell = '''
import swath
collector = swath.Collector("CartPole-v1", frames_per_batch=100, total_frames=1000)
for number, batch in enumerate(swath.watch(collector, every_s=0.001)):
    print(number)
'''
assert shell.run_cell(cell).success
print(json.dumps(shell.display_pub.outputs))
"""


@pytest.mark.processes
def test_a_notebook_has_one_output_that_is_updated() -> None:
    ended = subprocess.run([sys.executable, "-c", _NOTEBOOK], text=True, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    *printed, outputs = ended.stdout.splitlines()
    assert printed == [str(number) for number in range(10)]
    first, *updates = json.loads(outputs)
    assert (first["update"], {update["update"] for update in updates}) == (False, {True})
    assert len({output["transient"]["display_id"] for output in (first, *updates)}) == 1
    last = updates[-1]["data"]
    assert "1,000 / 1,000 frames" in last["text/plain"]
    assert "1,000 / 1,000 frames" in last["text/html"]
    assert last["text/html"].startswith("<pre style=")
