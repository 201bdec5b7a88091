"""The form of a dataset on disk, for whoever writes or reads one.

A dataset is a directory of three entries:

``frames/``
    a memory-mapped TensorDict ``[frames]``: all frames of env 0 in the order of time, then those of env 1, …
``episodes.csv``
    one row per episode, in the order in which they ended (from workers: in which they arrived);
    ``frames[start : start + length]`` is the episode. Those that were under way at the end come last, neither
    terminated nor truncated.
``metadata.json``
    how it was collected.

Beside them there may be what a report is drawn from (``swath report``), and the report itself:

``readings.jsonl``
    where the collection stood, some hundred times: the first line says what ran, each other line is a reading.
``trace.json``, ``report.html``
    with ``--trace`` and ``--report``.

While it is collected, and after a kill or on a full disk, there is another one:

``commits.jsonl``
    where the frames are that count. Its first line has the ``offsets`` of each env's episodes in ``episodes.csv``; each
    other line is a batch that was written, with its ``pieces`` (env, place in the files, length) and the length of
    ``episodes.csv`` in bytes. What is behind that, in any file, does not count.

torch is imported where it is needed: ``swath --help`` must not wait for it.
"""

from __future__ import annotations

import glob
import json
import stat
from pathlib import Path
from typing import Any

FORMAT = "swath-dataset"
FORMAT_VERSION = 1
FRAMES = "frames"
EPISODES = "episodes.csv"
METADATA = "metadata.json"
COMMITS = "commits.jsonl"
READINGS = "readings.jsonl"
TRACE = "trace.json"
REPORT = "report.html"
#: All that may be in the folder of a dataset.
ENTRIES = (COMMITS, EPISODES, FRAMES, METADATA, READINGS, TRACE, REPORT)
#: What the folder of a collection that is under way is called, with the number of the process behind it.
UNFINISHED = ".unfinished-"


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text]


#: The columns of ``episodes.csv``, and how to read them.
EPISODE_COLUMNS = {
    "env": int,
    "traj_id": int,
    "start": int,
    "length": int,
    "return": float,
    "terminated": _flag,
    "truncated": _flag,
}


#: No description is nearly as long.
_MOST_JSON = 100_000_000


class Damaged(ValueError):
    """Something in a dataset's folder is not what it must be."""


def check_file(path: Path, root: Path) -> int:
    """The size of a file that is one, and within ``root``."""
    name = path.relative_to(root)
    try:
        if not path.resolve().is_relative_to(root.resolve()):
            raise Damaged(f"{name} is a link to another place; copy the file there instead")
        about = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise Damaged(f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(about.st_mode):
        raise Damaged(f"{name} is no file")
    return about.st_size


def read_json(path: Path, root: Path) -> dict[str, Any]:
    if check_file(path, root) > _MOST_JSON:
        raise Damaged(f"{path.relative_to(root)} is too long to be a description of frames")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise Damaged(f"{path.relative_to(root)} is not JSON") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path.relative_to(root)} holds no description of frames")
    return content


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_metadata(folder: Path) -> dict[str, Any]:
    """A dataset's metadata; raises as ``load`` does where there is none."""
    if not folder.exists():
        raise FileNotFoundError(f"there is no dataset at {str(folder)!r}: no such directory{_instead_of(folder)}")
    if not (folder / METADATA).exists():
        raise ValueError(f"{str(folder)!r} is no swath dataset: it has no {METADATA}")
    try:
        metadata = read_json(folder / METADATA, folder)
    except Damaged as error:
        raise ValueError(f"{str(folder)!r} is no swath dataset: {error}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{str(folder)!r} is no swath dataset: its {METADATA} is another program's")
    version, versions = metadata.get("format_version"), metadata.get("versions")
    if isinstance(version, int) and version > FORMAT_VERSION:
        by = versions.get("swath") if isinstance(versions, dict) else "?"
        raise ValueError(
            f"{str(folder)!r} was written by swath {by} in a later format than this one reads; install that version"
        )
    if not (is_count(version) and is_count(metadata.get("frames")) and isinstance(metadata.get("env_id"), str)):
        raise ValueError(f"{str(folder)!r} is no swath dataset: its {METADATA} does not say what is in it")
    return metadata


def _instead_of(folder: Path) -> str:
    """A clause that names what a collection into this folder has left beside it, or nothing."""
    left = sorted(path.name for path in folder.parent.glob(glob.escape(folder.name + UNFINISHED) + "*"))
    return f"; {str(folder.with_name(left[-1]))!r} is one that is not finished, or was killed" if left else ""
