"""Boards that somebody has written by hand: nothing of them is believed, and nothing of them is obeyed."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from board_programs import boards_of, looking_at
from leaks import descriptors
from swath.insight.board import NAME, NoBoard, OthersBoard, OtherVersion, OwnBoard
from swath.insight.programs import Programs
from swath.process.memory_files import new_descriptor, new_sealed_descriptor
from test_reading import a_place, a_reading

HERE = os.getpid()


class Forged:
    """A board that somebody has written by hand, in this process."""

    def __init__(self, board: OwnBoard | None = None) -> None:
        self.board = board or OwnBoard()
        self.path = next(f"/proc/self/fd/{number}" for number, what in descriptors().items() if NAME in what)

    def write(self, at: int, data: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR)
        os.pwrite(descriptor, data, at)
        os.close(descriptor)

    def __enter__(self) -> Forged:
        return self

    def __exit__(self, *_: Any) -> None:
        self.board.close()


def _told_by(reading: Any) -> bytes:
    return json.dumps({"at_s": 0.0, "collectors": [{"number": 0, "reading": reading}]}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"at_s": "x", "collectors": []}',
        b'{"at_s": 1, "collectors": [3]}',
        b'{"at_s": 1, "collectors": {"a": 1}}',
        b'{"at_s": 1, "collectors": [{"number": 1e400, "reading": {}}]}',
        b'{"at_s": 1, "collectors": [{"number": 0, "reading": {"frames": 1}}]}',
        b"9" * 10_000,
    ],
)
def test_what_makes_no_sense_is_said_to_make_none(text: bytes) -> None:
    with Forged() as forged:
        forged.board.answer(text)
        with looking_at() as program:
            assert program.told is None
            assert program.error is not None
            assert "cannot be read" in program.error
            assert program.error.isprintable()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("frames", "many"),
        ("frames", 10**30),
        ("frames", True),
        ("at_s", float("nan")),
        ("places", [3]),
        ("places", "abc"),
        ("program", None),
        ("lags", {"a": 1}),
        ("episodes", {"count": 1, "returns": ["x"], "lengths": []}),
        ("is_closed", 1),
    ],
)
def test_a_reading_of_other_types_is_refused(path: str, value: Any) -> None:
    with Forged() as forged:
        forged.board.answer(_told_by({**_a_reading(), path: value}))
        with looking_at() as program:
            assert program.told is None
            assert path in str(program.error)


def _a_reading() -> dict[str, Any]:
    return a_reading(3.0, [a_place(1.0, 1.0, 1.0, 5)]).as_json()


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed() -> None:
    reading = _a_reading()
    program = {**reading["program"], "env": "\x1b]0;owned\x07\x1b[2J\u202e", "versions": {"a\x1b": "\x9b31m"}}
    with Forged() as forged:
        forged.board.answer(_told_by({**reading, "program": program, "failure": "x" * 10**6}))
        with looking_at() as found:
            assert found.told is not None
            told = found.told.readings[0]
            assert told.program.env.isprintable()
            assert all(text.isprintable() for pair in told.program.versions.items() for text in pair)
            assert len(told.failure or "") <= 1000


def test_a_length_or_checksum_that_is_wrong_is_not_believed() -> None:
    with Forged() as forged:
        forged.board.answer(b"first")
        forged.board.answer(b"second")
        slots = (4096, 4096 + (2 << 20))
        with OthersBoard(forged.path) as board:
            newest = board.read()
            assert newest is not None
            assert newest.text == b"second"
            forged.write(slots[0] + 20, b"torn")  # the second is in the first slot
            older = board.read()
            assert older is not None
            assert older.text == b"first"
            forged.write(slots[1], struct.pack("<QQI", 9, 2**60, 0))
            forged.write(slots[0], struct.pack("<QQI", 9, 2**64 - 1, 0))
            assert board.read() is None


def test_a_board_of_another_version_is_told_of() -> None:
    with Forged() as forged:
        forged.write(8, struct.pack("<I", 99))
        forged.write(16, b"9.9\x1b[31m".ljust(16, b"\0"))
        with pytest.raises(OtherVersion, match=r"it runs swath 9\.9\?\[31m, whose boards swath .* cannot read"):
            OthersBoard(forged.path)
        programs = Programs(only=HERE)
        assert programs.find() == []
        assert [each.pid for each in programs.unreadable] == [HERE]


def test_what_is_no_board_is_none(tmp_path: Path) -> None:
    made = [new_descriptor(NAME), new_sealed_descriptor(NAME, 10), new_sealed_descriptor(NAME, 4096)]
    made.append(new_sealed_descriptor(NAME, 4096))
    os.pwrite(made[-1], struct.pack("<8sII16s", b"swathtop", 1, HERE, b"1"), 0)
    os.ftruncate(made[0], 100 << 20)  # whoever made it may make it smaller at any time
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"swathtop" * 10)
    try:
        assert boards_of(HERE) == []
        for path in [*(f"/proc/self/fd/{number}" for number in made), "fifo", "file", "none"]:
            with pytest.raises(NoBoard):
                OthersBoard(str(tmp_path / path))
    finally:
        for number in made:
            os.close(number)


def test_a_board_cannot_be_made_smaller_under_its_program() -> None:
    with Forged() as forged:
        descriptor = os.open(forged.path, os.O_RDWR)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def test_an_answer_that_does_not_fit_is_none() -> None:
    with Forged() as forged, pytest.raises(ValueError, match="more than the"):
        forged.board.answer(b"x" * (OwnBoard.most_bytes + 1))
