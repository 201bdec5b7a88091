"""``swath top``: real programs, looked at from outside, in and out of a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from board_programs import COLLECT, ONE, a_program
from family import family
from leaks import wait_until
from swath import platforms
from swath.cli.main import main
from swath.cli.top.watched import Everyone
from swath.collectors import Collector
from swath.insight.board import OwnBoard
from swath.insight.reading import Reading
from test_reading import a_place, a_reading

HERE = os.getpid()
TWO = ONE + 'another = Collector("Pendulum-v1", frames_per_batch=50, total_frames=100_000)\n' + COLLECT


@pytest.fixture(autouse=True)
def _no_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may run beside this process."""
    monkeypatch.setattr("swath.insight.programs._own_processes", lambda: family(HERE))


#: The command, for which there are no other programs either.
_COMMAND = f"""
import sys
sys.path.append({str(Path(__file__).parent.parent)!r})
from family import family
import swath.insight.programs
from swath.cli.main import main
swath.insight.programs._own_processes = lambda: family({HERE})
code = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


# -- printed once ------------------------------------------------------------------------------------------------------


def test_nothing_runs(swath_here: Any) -> None:
    for arguments in (["top"], ["top", "--once"]):
        result = swath_here(*arguments)
        assert result.code == 0
        assert re.match(
            r"No program of \w+ collects on this machine\. .*open collector.*Programs of other users are not seen\.\)$",
            " ".join(result.stdout.split()),
        )
        assert result.stderr == ""
    result = swath_here("top", "--json")
    told = json.loads(result.stdout)
    assert (result.code, told["programs"], told["unreadable"]) == (0, [], [])


def test_a_system_without_such_memory_says_so(swath_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(platforms, "libc", object)
    result = swath_here("top")
    assert result.code == 2
    assert "swath top needs memory that processes share" in result.stderr
    assert "use swath.watch(collector) in the program itself, or run it on Linux" in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_full_disk_is_a_sentence(arguments: list[str], swath_process: Any) -> None:
    with open("/dev/full", "w") as full:
        process = swath_process("top", *arguments, stdout=full)
        assert process.communicate()[1] == "swath: what was found cannot be written: No space left on device\n"
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("pid", "said"),
    [
        (2**22 + 7, "there is no process 4194311"),
        (HERE, f"process {HERE} has no open collector of swath"),
    ],
    ids=["not there", "without a collector"],
)
def test_a_process_that_is_no_program(pid: int, said: str, swath_here: Any) -> None:
    for arguments in (["top", str(pid)], ["top", str(pid), "--json"]):
        result = swath_here(*arguments)
        assert result.code == 1
        assert said in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("top --jsn", "--jsn: did you mean --json?"),
        ("tops", "did you mean swath top?"),
        ("top train.py", "argument PID: a pid is a number above 0, not 'train.py'"),
        ("top 0", "argument PID: a pid is a number above 0, not '0'"),
    ],
)
def test_what_is_typed_wrong_is_answered(command: str, said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(command.split())
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.processes
def test_one_program_is_shown_whole_and_several_have_a_line_each(swath_here: Any) -> None:
    with a_program() as first:
        wait_until(lambda: " frames/s now" in swath_here("top").stdout, 30)
        result = swath_here("top")
        assert result.code == 0
        assert result.stderr == ""
        lines = result.stdout.splitlines()
        assert lines[0].startswith(f"{first.pid} · ")
        assert "Collector · GymEnv(CartPole-v1" in lines[1]
        assert re.search(r"[1-9][\d,]* frames/s now", result.stdout)
        assert "\x1b" not in result.stdout
        assert max(map(len, lines)) <= 80
        with a_program(TWO) as second:
            table = swath_here("top").stdout
            assert [int(line.split()[0]) for line in table.splitlines() if line.split()[0].isdigit()] == sorted(
                [first.pid, second.pid, second.pid]
            )
            whole = swath_here("top", str(second.pid)).stdout
            assert "GymEnv(CartPole-v1" in whole
            assert "GymEnv(Pendulum-v1" in whole


@pytest.mark.processes
def test_scripts_get_json(swath_here: Any) -> None:
    with a_program(TWO) as running:

        def told() -> Any:
            return json.loads(swath_here("top", "--json").stdout)["programs"]

        assert wait_until(lambda: told()[0]["collectors"][0]["reading"]["frames"] > 1000, 30)
        (program,) = told()
    assert (program["pid"], program["answers"], program["stopped"], program["errors"]) == (running.pid, True, False, [])
    assert 0 <= program["age_s"] < 60
    cartpole, pendulum = program["collectors"]
    assert cartpole["reading"]["program"]["total_frames"] is None
    assert cartpole["frames_per_s"] > 0
    assert cartpole["verdict"]
    assert pendulum["reading"]["frames"] == 0
    assert Reading.of_json(pendulum["reading"]).program.total_frames == 100_000


@pytest.mark.processes
def test_a_stopped_program_is_said_to_be(swath_here: Any) -> None:
    with a_program() as running:
        running.send_signal(signal.SIGSTOP)
        result = swath_here("top", "--once")
        assert result.code == 0
        assert f"{running.pid} is stopped (by a signal, or a debugger); nothing is known of it" in result.stdout
        told = json.loads(swath_here("top", "--json").stdout)["programs"][0]
        assert (told["answers"], told["stopped"], told["collectors"]) == (False, True, [])


@pytest.mark.processes
def test_torch_is_not_imported() -> None:
    with a_program() as running:
        done = subprocess.run([sys.executable, "-c", _COMMAND, "top"], capture_output=True, text=True, check=True)
    assert str(running.pid) in done.stdout
    assert done.stderr == "False\n"


# -- numbers of others -------------------------------------------------------------------------------------------------


def _told(*readings: Any, at_s: float | None = None) -> bytes:
    each = [{"number": number, "reading": reading} for number, reading in enumerate(readings)]
    return json.dumps({"at_s": time.monotonic() if at_s is None else at_s, "collectors": each}).encode()


READING = a_reading(3.0, [a_place(1.0, 1.0, 1.0, 5)]).as_json()
ABSURD: dict[str, dict[str, Any]] = {
    "none": READING,
    "negative": {**READING, "frames": -5, "age_s": -1.0, "collecting_s": -3.0},
    "no places": {**READING, "places": []},
    "endless": {**READING, "frames": 2**62, "age_s": 1e308, "collecting_s": 1e-308},
    "episodes": {**READING, "episodes": {"count": 9, "returns": [float("nan"), float("inf")], "lengths": []}},
    "no episodes": {**READING, "episodes": {"count": -9, "returns": [1.0] * 10_000, "lengths": [1]}},
    "buffer": {**READING, "buffer": {"size": 5, "capacity": 0, "write_count": -1, "num_sampled": 3}},
    "lags": {**READING, "lags": [-1, 1, -1], "policy_version": -2},
    "totals": {**READING, "program": {**READING["program"], "total_frames": -1, "cores": 0, "frames_per_batch": 0}},
    "none of it": {
        **READING,
        "program": {**READING["program"], "total_frames": 0, "num_envs": 0, "started_at": -1e300},
    },
    "markup": {**READING, "program": {**READING["program"], "env": "[/bold][red]x[link=http://a]\\["}},
    "long": {**READING, "program": {**READING["program"], "command": "界" * 900, "layout": "e\u0301" * 400}},
    "many": {**READING, "places": [READING["places"][0]] * 5000},
}


@pytest.fixture
def _does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an answer: on a board that a test has written, nobody answers."""
    monkeypatch.setattr("swath.cli.top.command._SECONDS_FOR_AN_ANSWER", 0.01)


@pytest.mark.usefixtures("_does_not_wait")
@pytest.mark.parametrize("what", ABSURD)
def test_no_number_of_a_program_ends_it(what: str, swath_here: Any) -> None:
    board = OwnBoard()
    try:
        board.answer(_told(ABSURD[what]))
        for arguments in (["top", "--once"], ["top", "--json"]):
            result = swath_here(*arguments)
            assert (result.code, result.stderr) == (0, "")
            assert "\x1b" not in result.stdout
            if "--json" in arguments:
                json.loads(result.stdout, parse_constant=pytest.fail)
            else:
                assert str(HERE) in result.stdout
        board.answer(_told(ABSURD[what], ABSURD["none"], ABSURD["negative"]))
        assert swath_here("top", "--once").code == 0
    finally:
        board.close()


@pytest.mark.usefixtures("_does_not_wait")
def test_a_program_that_says_nonsense_is_said_to(swath_here: Any) -> None:
    board = OwnBoard()
    try:
        board.answer(b'{"at_s": 1, "collectors": [{"number": 0, "reading": {"frames": "\\u001b[31m"}}]}')
        result = swath_here("top", "--once")
        assert "what it tells of itself cannot be read" in result.stdout
        assert "\x1b" not in result.stdout
        assert json.loads(swath_here("top", "--json").stdout)["programs"][0]["errors"]
    finally:
        board.close()


# -- in a terminal -----------------------------------------------------------------------------------------------------


class Seen:
    """``swath top`` in a terminal of its own."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (24, 80)) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.modes = termios.tcgetattr(self._theirs)
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "top", *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),  # type: ignore[func-returns-value]
        )

    def _read(self) -> None:
        while select.select([self._ours], [], [], 0.02)[0]:
            try:
                self.text += os.read(self._ours, 65536).decode("utf-8", "replace")
            except OSError:
                return

    def shows(self, text: str, timeout_s: float = 20.0) -> bool:
        """From now on."""
        begins = len(self.text)

        def is_there() -> bool:
            self._read()
            return text in self.text[begins:]

        return wait_until(is_there, timeout_s)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def left(self, timeout_s: float = 20.0) -> int | None:
        """Its exit code, if it has left."""

        def has_ended() -> bool:
            self._read()
            return self.process.poll() is not None

        wait_until(has_ended, timeout_s)
        self._read()
        return self.process.poll()

    @property
    def is_as_it_was(self) -> bool:
        shown = self.text.rfind("\x1b[?25h") > self.text.rfind("\x1b[?25l")  # the cursor
        on_its_page = self.text.rfind("\x1b[?1049l") > self.text.rfind("\x1b[?1049h")
        return termios.tcgetattr(self._theirs) == self.modes and shown and on_its_page

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Seen]]:
    with contextlib.ExitStack() as opened:

        def start(*arguments: str, **more: Any) -> Seen:
            seen = Seen(*arguments, **more)
            opened.callback(seen.close)
            return seen

        yield start


@pytest.mark.processes
@pytest.mark.parametrize(
    ("leave", "code"),
    [(b"q", 0), (b"\x03", 0), (signal.SIGTERM, 143), (signal.SIGINT, 0)],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGINT"],
)
def test_whoever_leaves_finds_the_terminal_as_it_was(leave: Any, code: int, terminal: Any) -> None:
    with a_program() as running:
        seen = terminal()
        assert seen.shows("frames/s now")
        assert seen.shows(str(running.pid))
        assert not seen.is_as_it_was
        seen.press(leave) if isinstance(leave, bytes) else seen.process.send_signal(leave)
        assert seen.left() == code
        assert seen.is_as_it_was
        assert "Traceback" not in seen.text


@pytest.mark.processes
def test_who_is_stopped_gives_the_terminal_back_meanwhile(terminal: Any) -> None:
    with a_program():
        seen = terminal()
        assert seen.shows("frames/s now")
        seen.process.send_signal(signal.SIGTSTP)
        # (The process leads its session, so the kernel drops the second signal: it goes on at once.)
        assert seen.shows("\x1b[?1049l")
        assert seen.shows("frames/s now")
        seen.press(b"q")
        assert seen.left() == 0
        assert seen.is_as_it_was


@pytest.mark.processes
def test_programs_come_stop_and_end_while_they_are_watched(terminal: Any) -> None:
    with a_program() as first:
        seen = terminal(size=(50, 160))
        assert seen.shows("frames/s now")
        with a_program() as second:
            assert seen.shows("FRAMES/S")
            second.send_signal(signal.SIGSTOP)
            assert seen.shows(f"{second.pid} is stopped")
            second.send_signal(signal.SIGCONT)
            second.kill()
            second.wait()
            assert seen.shows(f"{second.pid} (")
            assert seen.shows("has ended")
        assert seen.shows("frames/s now")
        first.kill()
        first.wait()
        assert seen.shows("No program collects now")
        with a_program():
            assert seen.shows("frames/s now")
        seen.press(b"q")
        assert seen.left() == 0


@pytest.mark.processes
def test_who_watches_one_program_leaves_with_it(terminal: Any) -> None:
    with a_program() as running, a_program():
        seen = terminal(str(running.pid))
        assert seen.shows("frames/s now")
        running.kill()
        running.wait()
        assert seen.left() == 0
        assert seen.is_as_it_was
        after = seen.text[seen.text.rfind("\x1b[?1049l") :]
        assert "frames/s now" in after  # what was known last stays
        assert f"{running.pid} (" in after
        assert "has ended" in after


@pytest.mark.processes
def test_a_busy_program_is_said_not_to_answer(terminal: Any) -> None:
    board = OwnBoard()  # that nobody answers on
    try:
        board.answer(_told(READING))
        seen = terminal(str(HERE))
        assert seen.shows("has not answered for 3 s; this is of")
        seen.press(b"q")
        assert seen.left() == 0
    finally:
        board.close()


def test_a_program_that_makes_one_collector_after_another_is_bidden_one_farewell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []

    class Programs:
        unreadable = ()

        def __init__(self, only: int | None) -> None: ...
        def close(self) -> None: ...
        def find(self) -> list[Any]:
            return list(found)

    monkeypatch.setattr("swath.cli.top.watched.Programs", Programs)
    with Everyone() as everyone:
        for _ in range(3):
            found[:] = [SimpleNamespace(pid=HERE, command="tune.py", told=None)]
            everyone.find()
            assert everyone.notes == []
            found.clear()
            everyone.find()
            assert everyone.notes == [f"{HERE} (tune.py) has closed its last collector"]


def test_a_notebooks_collector_is_seen_between_two_batches(swath_here: Any) -> None:
    with Collector("CartPole-v1", frames_per_batch=50, total_frames=-1) as collector:
        collector.next()
        told = json.loads(swath_here("top", "--json").stdout)
        assert told["programs"][0]["collectors"][0]["reading"]["frames"] == 50
