"""Datasets on disk: what ``swath collect`` writes and ``load`` opens.

A dataset is a directory of three entries:

``frames/``
    a memory-mapped TensorDict ``[frames]``: all frames of env 0 in the order of time, then those of env 1, …
``episodes.csv``
    one row per episode, in the order in which they ended (from workers: in which they arrived);
    ``frames[start : start + length]`` is the episode. Those that were under way at the end come last, neither
    terminated nor truncated.
``metadata.json``
    how it was collected. Written last, so a directory without it is no dataset.

torch is imported where it is needed: ``swath --help`` must not wait for it.
"""

from __future__ import annotations

import csv
import json
import os
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


def _flag(text: str) -> bool:
    return text == "true"


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

    ``frames`` is read from disk as it is used. It is meant to be read: writing into its tensors changes the files.
    """

    path: Path
    frames: TensorDict
    episodes: list[dict[str, Any]]
    metadata: dict[str, Any]

    def __repr__(self) -> str:
        incomplete = "" if self.metadata["complete"] else ", incomplete"
        return (
            f"Dataset({self.metadata['env_id']}: {len(self.frames):,} frames, {len(self.episodes):,} episodes"
            f"{incomplete}, in {self.path})"
        )


def load(path: str | os.PathLike[str]) -> Dataset:
    """Open a dataset that ``swath collect`` wrote.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: it is no dataset of swath, or one of a later version.
    """
    folder = Path(path)
    metadata = read_metadata(folder)
    from tensordict import TensorDict

    frames = TensorDict.load_memmap(
        folder / FRAMES
    ).memmap_()  # it is already; now is_memmap() says so, and it is locked
    return Dataset(folder, frames, list(_read_episodes(folder / EPISODES)), metadata)


def read_metadata(folder: Path) -> dict[str, Any]:
    """A dataset's metadata; raises as ``load`` does where there is none."""
    if not folder.exists():
        raise FileNotFoundError(f"there is no dataset at {str(folder)!r}: no such directory")
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{str(folder)!r} is no swath dataset: it has no {METADATA}") from None
    except ValueError:
        raise ValueError(f"{str(folder)!r} is no swath dataset: its {METADATA} is not JSON") from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{str(folder)!r} is no swath dataset: its {METADATA} is another program's")
    if metadata["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{str(folder)!r} was written by swath {metadata['versions']['swath']} in a later format than this one "
            "reads; install that version"
        )
    return metadata


def _read_episodes(path: Path) -> Any:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {name: read(row[name]) for name, read in EPISODE_COLUMNS.items()}
