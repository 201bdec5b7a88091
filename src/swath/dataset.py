"""Datasets: what ``swath collect`` wrote, opened for reading. ``dataset_format.py`` says what is in their folders.

torch is imported where it is needed: ``swath --help`` must not wait for it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swath.dataset_format import COMMITS, Damaged, read_metadata

if TYPE_CHECKING:
    from tensordict import TensorDict


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

    if not TYPE_CHECKING:  # for whom every attribute would be there

        def __getattr__(self, name: str) -> Any:
            from swath.hints import no_attribute

            raise no_attribute(self, name)

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
