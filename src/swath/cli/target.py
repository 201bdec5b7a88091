"""Where a dataset goes: written beside its place, moved there at the end."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from swath.cli.errors import UsageError
from swath.dataset_format import ENTRIES, UNFINISHED, read_metadata
from swath.disk import show_bytes


class Target:
    """The directory ``--out``.

    ``given`` is what the user wrote, for messages; ``path`` the same without symbolic links.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        self.given = out
        self.path = Path(os.path.realpath(out))
        self.overwrite = overwrite
        self._beside: Path | None = None
        self.published = False

    def check(self) -> None:
        """Refuse a place that is taken, or where nothing can be written."""
        if self.path.exists():
            self._check_replaceable()
        parent = self._existing_parent()
        if not parent.is_dir():
            raise UsageError(f"--out {self.given}: {parent.name} is a file, not a directory")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"--out {self.given}: no permission to write there")
        try:  # root may do everything, until it tries
            os.rmdir(tempfile.mkdtemp(prefix=".swath-", dir=parent))
        except OSError as error:
            raise self._not_there(error) from error

    def _not_there(self, error: OSError) -> UsageError:
        parent = self._existing_parent()
        what = "no permission" if error.errno in (errno.EACCES, errno.EPERM) else error.strerror
        if error.errno == errno.ENOENT:  # as /proc says it
            what = "that is no place for files"
        return UsageError(
            f"--out {self.given}: cannot write there: no folder can be made in {parent}: {what}; choose another place"
        )

    def _check_replaceable(self) -> None:
        if not self.overwrite:
            raise UsageError(f"--out {self.given}: exists already; choose another, or replace it with --overwrite")
        if self.path.is_dir() and not any(self.path.iterdir()):
            return
        try:
            read_metadata(Path(self.given))
        except ValueError as error:
            raise UsageError(f"--overwrite replaces datasets only, and {error}; remove it yourself") from None
        others = sorted({entry.name for entry in self.path.iterdir()} - set(ENTRIES))
        if others:
            raise UsageError(
                f"--overwrite would remove {others[0]!r}, which is in {self.given} but no part of the dataset; move it"
            )

    def _existing_parent(self) -> Path:
        return next(parent for parent in self.path.parents if parent.exists())

    def check_space(self, num_bytes: int, is_twice: bool = False) -> None:
        """Refuse what will not fit on the disk, rather than break off in the middle."""
        disk = shutil.disk_usage(self._existing_parent())
        free, needed = disk.free, num_bytes * 2 if is_twice else num_bytes
        if needed > free and disk.total:  # some do not say
            why = " (twice their size, until each env's are in one piece; not with --sync)" if is_twice else ""
            raise UsageError(
                f"--out {self.given}: the frames need {show_bytes(needed)}{why}, the disk has {show_bytes(free)} left"
            )

    @property
    def beside(self) -> Path:
        """The directory to write into, made on first use."""
        if self._beside is None:
            beside = self.path.with_name(f"{self.path.name}{UNFINISHED}{os.getpid()}")
            try:
                beside.mkdir(parents=True)
            except OSError as error:
                raise self._not_there(error) from error
            self._beside = beside
        return self._beside

    @property
    def given_beside(self) -> str:
        """Where the unfinished files are, as the user would write it."""
        return os.path.join(os.path.dirname(self.given.rstrip("/")), self.beside.name)

    def publish(self, folder: Path) -> None:
        """Move what was written to its place; ``folder`` is ``beside``, or in it."""
        old = None
        if self.path.exists():
            self._check_replaceable()  # it may have appeared, or changed, since
            old = self.path.with_name(f"{self.path.name}.old-{os.getpid()}")
            self.path.rename(old)
        folder.rename(self.path)
        self.published = True
        if folder == self._beside:
            self._beside = None
        self.discard()
        if old is not None:
            shutil.rmtree(old)

    def discard(self) -> None:
        """Remove what was written beside."""
        if self._beside is not None:
            shutil.rmtree(self._beside, ignore_errors=True)
            self._beside = None


def flush(folder: Path) -> None:
    """Let what was written reach the disk, before it gets a name that says it is whole."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
