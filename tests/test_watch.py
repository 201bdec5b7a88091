"""swath.watch, each way to use it: in a log, in a notebook; and how it ends, whatever ends it."""

from __future__ import annotations

import gc
import io
import json
import os
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
from swath.collectors import Collector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv
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
