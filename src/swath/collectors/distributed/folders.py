"""Folders that only their owner can write to: what swath reads from them, it runs.

A folder is opened once, looked at, and then held. What others put in its place later, if they can write to the folder
above, is not what is read; so it does not matter whose that one is.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

from swath import platforms

_FOLDER = getattr(os, "O_DIRECTORY", 0)
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not keep us waiting


def make_own(folder: Any) -> Path:
    """A folder for pickles and secrets: one that is made now, or one that nobody else can write to."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if platforms.are_met(platforms.FILE_OWNERS):
        OwnFolder(path).close()
    return path


class OwnFolder:
    """A folder of this user's, or root's, that nobody else can write to.

    Raises:
        PermissionError: it is somebody else's, or others can write to it.
    """

    def __init__(self, folder: Any) -> None:
        platforms.require("a folder with tickets", (platforms.FILE_OWNERS,), "start nodes on another system")
        self._path = Path(folder)
        self._descriptor = os.open(self._path, os.O_RDONLY | _FOLDER)
        try:
            _require_own(self._path, os.fstat(self._descriptor), "give a folder of your own (mkdir -m 700)")
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def take(self, name: str) -> bytes:
        """What is in a file of it, which is removed."""
        path = self._path / name
        try:
            descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise PermissionError(f"{path} is a link, and it is not followed: put the file itself there") from None
            raise
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise PermissionError(f"{path} is no file: remove it, and let the collector put its ticket there")
            _require_own(path, about, "remove it, and let a collector of your own put its ticket there")
            data = file.read()
        os.unlink(name, dir_fd=self._descriptor)
        return data

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> OwnFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _require_own(path: Path, about: os.stat_result, advice: str) -> None:
    """An access control list shows in the mode, too: its mask is what the group may do."""
    me = os.geteuid()
    danger = "swath runs what is in there"
    if about.st_uid not in (me, 0):
        owner = _name(about.st_uid)
        raise PermissionError(
            f"{path} belongs to {owner}, and this is {_name(me)}; {danger}, so it must be your own: {advice}, or run "
            f"this as {owner}"
        )
    mode = stat.S_IMODE(about.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path}: others can write to it (mode {mode:04o}), and {danger}: look who has put something there, then "
            f"`chmod go-w {path}`; or {advice}"
        )


def _name(uid: int) -> str:
    import pwd  # not on Windows

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
