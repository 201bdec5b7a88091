"""Files of a folder that anybody may have made: each is opened as what it should be, or not at all.

A link could lead anywhere, a pipe would be waited for, and a text that is as large as the disk would be read into
memory. None of them is what swath writes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from swath.process.memory import show_bytes

#: More than any text that swath writes to a folder.
_LONGEST_TEXT = 64 * 2**20


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that is neither a link nor anything else."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} is a link, which swath does not follow in a folder of data") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no ordinary file")
    return descriptor


def no_buffer(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} does not hold a buffer: {why}")


def read_text(path: Path) -> str:
    with open(open_regular(path), encoding="utf-8") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LONGEST_TEXT:
            raise ValueError(f"{path} has {show_bytes(size)}; what swath writes there is shorter")
        return file.read()


def write_text(path: Path, text: str) -> None:
    """Instead of what is there, also of a link."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "w", encoding="utf-8") as file:
        file.write(text)


def numbered(folder: Path, before: str, after: str = "") -> dict[int, Path]:
    """The files and folders that are called ``before``, a number, ``after``."""
    found = {}
    for path in folder.iterdir():
        number = path.name.removeprefix(before).removesuffix(after)
        if path.name == f"{before}{number}{after}" and number.isdecimal() and number.isascii():
            found[int(number)] = path
    return found
