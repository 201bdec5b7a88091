"""Folders with tickets: a ticket is a pickle, so nobody but their owner may be able to put one there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swath.cli.main import main
from swath.collectors.distributed import DistributedCollector, launchers
from swath.collectors.distributed.launchers import FolderLauncher, Ticket, serve_from_folder
from swath.process import pickling

STRANGER = 54321

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


class Planted:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def plant(folder: Path, mark: Path, node: int = 0) -> Path:
    folder.mkdir(exist_ok=True, mode=0o700)
    ticket = folder / f"node-{node}.ticket"
    ticket.write_bytes(pickle.dumps(Planted(mark)))
    ticket.chmod(0o600)
    return ticket


def by_a_stranger(folder: Path, ticket: Path) -> None:
    os.chown(folder, STRANGER, -1)
    os.chown(ticket, STRANGER, -1)


def in_a_strangers_folder(folder: Path, ticket: Path) -> None:
    os.chown(folder, STRANGER, -1)


def in_a_folder_for_all(folder: Path, ticket: Path) -> None:
    os.chown(ticket, STRANGER, -1)
    folder.chmod(0o1777)  # as /tmp


def in_a_folder_of_a_group(folder: Path, ticket: Path) -> None:
    folder.chmod(0o770)


def before_the_folder_was_closed(folder: Path, ticket: Path) -> None:
    os.chown(ticket, STRANGER, -1)


def in_a_file_for_all(folder: Path, ticket: Path) -> None:
    ticket.chmod(0o666)


def as_a_link(folder: Path, ticket: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    ticket.rename(elsewhere)
    os.chown(elsewhere, STRANGER, -1)
    ticket.symlink_to(elsewhere)


def as_a_pipe(folder: Path, ticket: Path) -> None:
    ticket.unlink()
    os.mkfifo(ticket)


PLANTED: list[tuple[Callable[[Path, Path], None], list[str]]] = [
    (by_a_stranger, ["belongs to uid 54321, and this is root (uid 0)", "a folder of your own"]),
    (in_a_strangers_folder, ["belongs to uid 54321"]),
    (in_a_folder_for_all, ["others can write to it (mode 1777)", "chmod go-w"]),
    (in_a_folder_of_a_group, ["others can write to it (mode 0770)", "chmod go-w"]),
    (before_the_folder_was_closed, ["node-0.ticket", "belongs to uid 54321"]),
    (in_a_file_for_all, ["node-0.ticket", "others can write to it (mode 0666)"]),
    (as_a_link, ["node-0.ticket", "is a link"]),
    (as_a_pipe, ["node-0.ticket", "is no file"]),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("planted", "said"), PLANTED, ids=[each.__name__ for each, _ in PLANTED])
def test_a_ticket_that_another_user_could_have_planted_is_not_run(
    planted: Callable[[Path, Path], None], said: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "it ran"
    folder = tmp_path / "nodes"
    planted(folder, plant(folder, mark))
    assert main(["node", str(folder), "0", "--wait", "0.1"]) == 1
    words = capfd.readouterr().err
    assert words.startswith("swath node: ")
    assert str(folder) in words
    for each in said:
        assert each in words
    assert not mark.exists()


def test_a_ticket_of_ones_own_is_run(tmp_path: Path) -> None:
    """Else the tests above would prove nothing. A link is as good as the folder that it leads to."""
    mark = tmp_path / "it ran"
    (tmp_path / "link").symlink_to(tmp_path / "nodes")
    for folder in (tmp_path / "nodes", tmp_path / "link"):
        plant(tmp_path / "nodes", mark)
        with pytest.raises(TypeError):  # a folder was made, but that is no ticket
            serve_from_folder(folder, 0, 0.1)
        mark.rmdir()


def test_a_user_trusts_root_but_root_trusts_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "it ran"
    folder = tmp_path / "nodes"
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    by_a_stranger(folder, plant(folder, mark))
    with pytest.raises(TypeError):
        serve_from_folder(folder, 0, 0.1)
    mark.rmdir()
    os.chown(plant(folder, mark), 0, -1)
    os.chown(folder, 0, -1)
    with pytest.raises(TypeError):
        serve_from_folder(folder, 0, 0.1)
    mark.rmdir()
    by_a_stranger(folder, plant(folder, mark))
    monkeypatch.undo()
    with pytest.raises(PermissionError, match="belongs to uid 54321"):
        serve_from_folder(folder, 0, 0.1)
    assert not mark.exists()


@pytest.mark.parametrize("when", ["folder", "file"])
def test_what_is_put_in_its_place_after_the_look_is_not_run(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder above can exchange the folder at any moment; here, at the worst one."""
    mark = tmp_path / "it ran"
    folder, other = tmp_path / "nodes", tmp_path / "other"
    ran: list[int] = []
    folder.mkdir(mode=0o700)
    ticket = Ticket(0, 0, "nowhere", b"", {})
    monkeypatch.setattr(Ticket, "run", lambda self: ran.append(self.node))
    FolderLauncher(folder).start(ticket)
    by_a_stranger(other, plant(other, mark))
    looked = os.fstat

    def exchange(descriptor: int) -> os.stat_result:
        found = looked(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if other.exists() and name == str(folder if when == "folder" else folder / "node-0.ticket"):
            folder.rename(tmp_path / "aside")
            other.rename(folder)
        return found

    monkeypatch.setattr(os, "fstat", exchange)
    serve_from_folder(folder, 0, 1.0)
    assert ran == [0]  # what was looked at, and nothing else
    assert not other.exists()
    assert not mark.exists()
    assert (folder / "node-0.ticket").exists()


@pytest.mark.parametrize("launcher", ["folder", "submitit"])
def test_a_driver_puts_no_pickles_where_others_can_exchange_them(launcher: str, tmp_path: Path) -> None:
    folder = tmp_path / "nodes"
    folder.mkdir(mode=0o700)
    options: dict[str, Any] = {"slurm_kwargs": {"cluster": "local"}} if launcher == "submitit" else {}

    def make() -> None:
        DistributedCollector(["CartPole-v1"], frames_per_batch=10, launcher=launcher, folder=folder, **options)

    os.chown(folder, STRANGER, -1)
    with pytest.raises(PermissionError, match="belongs to uid 54321, and this is root"):
        make()
    os.chown(folder, 0, -1)
    folder.chmod(0o775)
    with pytest.raises(PermissionError, match=r"others can write to it \(mode 0775\).*chmod go-w"):
        make()
    assert not list(folder.iterdir())


def test_a_folder_that_the_launcher_makes_is_ones_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        FolderLauncher(tmp_path / "a" / "nodes").start(Ticket(3, 0, "nowhere", b"", {}))
    finally:
        os.umask(before)
    made = tmp_path / "a" / "nodes"
    assert made.stat().st_mode & 0o777 == 0o700
    assert launchers.ticket_path(made, 3).stat().st_mode & 0o777 == 0o600
    with launchers.OwnFolder(made) as own:
        assert isinstance(pickling.loads_with_path(own.take("node-3.ticket")), Ticket)
    assert not list(made.iterdir())


def test_swath_node_with_a_file_instead_of_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["node", str(tmp_path / "file"), "0"]) == 1
    assert "Not a directory" in capfd.readouterr().err
