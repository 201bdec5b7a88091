"""Datasets on disk: what ``swath collect`` writes and ``load`` opens.

A dataset is a directory of three entries:

``frames/``
    a memory-mapped TensorDict ``[frames]``: all frames of env 0 in the order of time, then those of env 1, …
``episodes.csv``
    one row per episode, in the order in which they ended (from workers: in which they arrived);
    ``frames[start : start + length]`` is the episode. Those that were under way at the end come last, neither
    terminated nor truncated.
``metadata.json``
    how it was collected.

While it is collected, and after a kill or on a full disk, there is a fourth:

``commits.jsonl``
    where the frames are that count. Its first line has the ``offsets`` of each env's episodes in ``episodes.csv``; each
    other line is a batch that was written, with its ``pieces`` (env, place in the files, length) and the length of
    ``episodes.csv`` in bytes. What is behind that, in any file, does not count.

torch is imported where it is needed: ``swath --help`` must not wait for it.
"""

from __future__ import annotations

import glob
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict

FORMAT = "swath-dataset"
FORMAT_VERSION = 1
FRAMES = "frames"
EPISODES = "episodes.csv"
METADATA = "metadata.json"
COMMITS = "commits.jsonl"
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


@dataclass(frozen=True, repr=False, eq=False)
class Dataset:
    """A dataset that is open for reading.

    ``frames`` is read from disk as it is used. Its tensors can be written to; that changes them for this program, and
    never the files. (``TensorDict.load_memmap(path / "frames")`` is for who wants to change those.)
    """

    path: Path
    frames: TensorDict
    episodes: list[dict[str, Any]]
    metadata: dict[str, Any]

    def __repr__(self) -> str:
        incomplete = "" if self.metadata.get("complete") else ", incomplete"
        return (
            f"Dataset({self.metadata['env_id']}: {len(self.frames):,} frames, {len(self.episodes):,} episodes"
            f"{incomplete}, in {self.path})"
        )

    def __reduce__(self) -> Any:
        return load, (os.path.abspath(self.path),)  # in another process it is opened, not sent


def load(path: str | os.PathLike[str]) -> Dataset:
    """Open a dataset that ``swath collect`` wrote.

    The folder may be anybody's: nothing in it is executed. One that a collection left that was killed has what was
    committed; its ``metadata["complete"]`` is False.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: it is no dataset of swath, it is damaged, or it is one of a later version.
    """
    folder = Path(path)
    metadata = read_metadata(folder)
    from swath.dataset_files import as_tensordict, open_frames, open_unfinished, read_episodes

    try:
        if (folder / COMMITS).exists():
            leaves, episodes, counts = open_unfinished(folder)
            metadata.update(_numbers_of(episodes, counts, metadata))
        else:
            leaves = open_frames(folder, metadata["frames"])
            episodes = read_episodes(folder, metadata["frames"])
        return Dataset(folder, as_tensordict(leaves, metadata["frames"]), episodes, metadata)
    except Damaged as error:
        raise ValueError(f"the dataset in {str(folder)!r} is damaged: {error}") from None


def _numbers_of(episodes: list[dict[str, Any]], counts: list[int], metadata: dict[str, Any]) -> dict[str, Any]:
    """What metadata says of a collection that could not say it itself."""
    ended = [row for row in episodes if row["terminated"] or row["truncated"]]
    frames = sum(counts)
    return {
        "complete": frames == metadata.get("requested_frames"),
        "frames": frames,
        "frames_per_env": counts,
        "episodes": len(ended),
        "unfinished_episodes": len(episodes) - len(ended),
        "return": _spread([row["return"] for row in ended]),
        "length": _spread([row["length"] for row in ended]),
    }


def _spread(values: list[float]) -> dict[str, float | None]:
    """For JSON, which knows neither NaN nor infinity."""
    found = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)} if values else {}
    sound = math.isfinite(sum(values))
    return {name: found.get(name) if sound else None for name in ("mean", "min", "max")}


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


# -- files -------------------------------------------------------------------------------------------------------------


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
