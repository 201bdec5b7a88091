"""The files of a dataset, opened for reading.

Whoever made a folder may have meant harm, or the disk may have been full: nothing in it is executed, followed to
another place, or believed before it was compared with the files' sizes. Frames are mapped copy-on-write: nothing that
is done to a tensor reaches the disk.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from tensordict import TensorDict

from swath.dataset_format import COMMITS, EPISODE_COLUMNS, EPISODES, FRAMES, Damaged, check_file, is_count, read_json
from swath.disk import show_bytes
from swath.keys import Key, nested, show
from swath.process.memory import free_bytes
from swath.rollout.layout import CPU

_META = "meta.json"
_LEAF = ".memmap"
#: No key is nearly as deep.
_MOST_LEVELS = 50
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
    if hasattr(torch, name)
}
#: Memory need not be there for all that could be written to. (Python has the name since 3.13.)
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
#: Before Python 3.13 a mapping keeps a descriptor.
_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

#: Env, place in the files, and length.
Piece = tuple[int, int, int]
Episode = dict[str, Any]


# -- frames ------------------------------------------------------------------------------------------------------------


def open_frames(root: Path, num_rows: int, exactly: bool = True) -> dict[Key, torch.Tensor]:
    """The first ``num_rows`` rows of every key; there must not be more of them if it is to be ``exactly`` so many."""
    leaves: dict[Key, torch.Tensor] = {}
    for key, path, shape, dtype in _described(root / FRAMES, root, ()):
        if exactly and shape[:1] != [num_rows]:
            raise Damaged(f"{show(key)} has {shape[:1]} rows, and there should be {num_rows:,}")
        size = torch.Size([num_rows, *shape[1:]])
        num_bytes = size.numel() * dtype.itemsize
        found = 0 if path is None else check_file(path, root)
        if found < num_bytes or (exactly and found != num_bytes):
            raise Damaged(f"the file of {show(key)} has {found:,} bytes, and should have {num_bytes:,}")
        flat = torch.empty(0, dtype=torch.uint8) if path is None or not num_bytes else _map(path, num_bytes)
        leaves[key] = flat.view(dtype).view(size)
    return leaves


def _described(folder: Path, root: Path, above: Key) -> Iterator[tuple[Key, Path | None, list[int], torch.dtype]]:
    """Key, file, shape and dtype of every tensor of a memory-mapped TensorDict.

    Files are looked for among those that the folder has, by the keys that their names encode: a key leads nowhere else.
    A tensor without elements has no file.
    """
    if len(above) > _MOST_LEVELS:
        raise Damaged("keys are nested without end")
    content = read_json(folder / _META, root)
    files, folders = {}, {}
    for entry in folder.iterdir():
        if entry.name.endswith(_LEAF):
            files[unquote(entry.name.removesuffix(_LEAF))] = entry
        else:
            folders[unquote(entry.name)] = entry
    for name, about in content.items():
        if not isinstance(about, dict):
            continue  # the shape of the whole, and the like
        key = (*above, name)
        if about.get("type") == "TensorDict" and name in folders:
            yield from _described(folders[name], root, key)
            continue
        dtype, shape = _DTYPES.get(about.get("dtype", "")), about.get("shape")
        if dtype is None or not isinstance(shape, list) or not all(map(is_count, shape)) or about.get("is_nested"):
            raise Damaged(f"{show(key)} is no tensor of a dataset: {json.dumps(about)[:100]}")
        yield key, files.get(name), shape, dtype


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    """A file's first bytes, read when they are used; what is written to them stays in memory.

    Not ``torch.from_file(shared=False)``: torch gives its descriptor to another process that a tensor is sent to, which
    then writes to the file; and it maps no more than there is memory.
    """
    with path.open("rb") as file:
        if sys.platform == "win32":
            mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
        else:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            mapped = mmap.mmap(file.fileno(), num_bytes, flags=flags, prot=protection, **_NO_DESCRIPTOR)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def as_tensordict(leaves: dict[Key, torch.Tensor], num_rows: int) -> TensorDict:
    return TensorDict(nested(leaves), batch_size=[num_rows], device=CPU).lock_()  # type: ignore[arg-type,return-value]


# -- episodes ----------------------------------------------------------------------------------------------------------


def read_episodes(root: Path, num_frames: int, num_bytes: int | None = None) -> list[Episode]:
    """The rows of ``episodes.csv``, or of its first ``num_bytes``; of a whole one, they hold every frame."""
    check_file(root / EPISODES, root)
    episodes: list[Episode] = []
    try:
        text = (root / EPISODES).read_bytes()[:num_bytes].decode()
        rows = csv.DictReader(io.StringIO(text, newline=""))
        episodes.extend({name: read(row[name]) for name, read in EPISODE_COLUMNS.items()} for row in rows)
    except (ValueError, KeyError, TypeError, csv.Error):
        raise Damaged(f"{EPISODES} cannot be read behind its row {len(episodes):,}") from None
    for row in episodes:
        if row["start"] < 0 or row["length"] < 1 or row["env"] < 0:
            raise Damaged(f"{EPISODES} has an episode of {row['length']} frames from {row['start']} on")
    found = sum(row["length"] for row in episodes)
    if num_bytes is None and (found != num_frames or any(e["start"] + e["length"] > num_frames for e in episodes)):
        raise Damaged(f"{EPISODES} has episodes of {found:,} frames, and there are {num_frames:,}")
    return episodes


# -- what was not finished ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commits:
    """What a collection had committed when it ended, or was killed."""

    #: What was added to the start of each env's episodes in ``episodes.csv``.
    offsets: list[int]
    #: The bytes of ``episodes.csv`` that count.
    episode_bytes: int
    #: Those of an env in the order of time.
    pieces: list[Piece]

    @property
    def frames_per_env(self) -> list[int]:
        counts = [0] * len(self.offsets)
        for env, _, length in self.pieces:
            counts[env] += length
        return counts

    @property
    def num_rows(self) -> int:
        """How much of the files it takes to have all of them."""
        return max((at + length for _, at, length in self.pieces), default=0)


def read_commits(root: Path) -> Commits:
    """Line by line; the last one may have been cut off by a kill."""
    check_file(root / COMMITS, root)
    first, *lines = (root / COMMITS).read_bytes().split(b"\n")[:-1] or [b"{}"]
    try:
        offsets = [_count(offset) for offset in json.loads(first)["offsets"]]
        entries = [json.loads(line) for line in lines]
        sizes = [_count(entry["episodes"]) for entry in entries]
        found = [tuple(map(_count, piece)) for entry in entries for piece in entry["pieces"]]
        pieces = [(env, at, length) for env, at, length in found]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{COMMITS} is not what a collection writes") from None
    if any(env >= len(offsets) for env, _, _ in pieces):
        raise Damaged(f"{COMMITS} has frames of an env that is not there")
    return Commits(offsets, sizes[-1] if sizes else 0, pieces)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r} is no count")
    return value


def open_unfinished(root: Path) -> tuple[dict[Key, torch.Tensor], list[Episode], list[int]]:
    """Frames, episodes and the number of each env's frames, as they are in a dataset that was finished."""
    commits = read_commits(root)
    counts = commits.frames_per_env
    if not any(counts):
        raise Damaged("the collection ended before its first batch, so there are no frames")
    leaves = put_in_order(open_frames(root, commits.num_rows, exactly=False), commits)
    offsets = starts_of(counts)
    episodes = read_episodes(root, sum(counts), commits.episode_bytes)
    ended = [0] * len(counts)
    for row in episodes:
        env = row["env"]
        if env >= len(counts):
            raise Damaged(f"{EPISODES} has an episode of env {env}, and there are {len(counts)}")
        row["start"] += offsets[env] - commits.offsets[env]
        ended[env] += row["length"]
    for env, (done, count, start) in enumerate(zip(ended, counts, offsets, strict=True)):
        if done > count:
            raise Damaged(f"{EPISODES} has {done:,} frames of env {env}, and there are {count:,}")
        if done < count:
            episodes.append(_under_way(leaves, env, start + done, count - done))
    return leaves, episodes, counts


def _under_way(leaves: dict[Key, torch.Tensor], env: int, start: int, length: int) -> Episode:
    """What ``episodes.csv`` says of an episode that had not ended."""
    try:
        reward, ids = leaves["next", "reward"], leaves["collector", "traj_ids"]
    except KeyError as error:
        raise Damaged(f"there are no {error} among the frames") from None
    total = float(reward[start : start + length].double().sum())
    values = (env, int(ids[start]), start, length, total, False, False)
    return dict(zip(EPISODE_COLUMNS, values, strict=True))


def put_in_order(leaves: dict[Key, torch.Tensor], commits: Commits) -> dict[Key, torch.Tensor]:
    """Every env's frames in one piece: as they are, if they are so already, else in memory."""
    counts, pieces = commits.frames_per_env, merged(commits.pieces)
    if are_in_order(pieces):
        return leaves
    total = sum(counts)
    needed = sum(leaf[:1].nbytes for leaf in leaves.values()) * total
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"the frames were not put in order when the collection ended; that takes {show_bytes(needed)} of memory "
            f"now, and {show_bytes(free)} are free"
        )
    ordered = {}
    for key, leaf in leaves.items():
        ordered[key] = target = torch.empty((total, *leaf.shape[1:]), dtype=leaf.dtype)
        for at, to, length in moves(pieces, counts):
            target[to : to + length] = leaf[at : at + length]
    return ordered


def starts_of(counts: Sequence[int]) -> list[int]:
    """Where each env's frames start.

    >>> starts_of([3, 0, 2])
    [0, 3, 3]
    """
    return list(accumulate(counts, initial=0))[:-1]


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of an env that follow each other in the files become one.

    >>> merged([(0, 0, 2), (1, 9, 2), (0, 2, 3), (1, 20, 1)])
    [(0, 0, 5), (1, 9, 2), (1, 20, 1)]
    """
    found: list[Piece] = []
    last: dict[int, int] = {}
    for env, at, length in pieces:
        index = last.get(env)
        if index is not None and found[index][1] + found[index][2] == at:
            found[index] = (env, found[index][1], found[index][2] + length)
        else:
            last[env] = len(found)
            found.append((env, at, length))
    return found


def are_in_order(pieces: Sequence[Piece]) -> bool:
    """Whether they are one behind the other, env by env."""
    ends = accumulate((length for _, _, length in pieces), initial=0)
    in_place = all(at == end for (_, at, _), end in zip(pieces, ends, strict=False))
    return in_place and all(a[0] <= b[0] for a, b in pairwise(pieces))


def moves(pieces: Iterable[Piece], counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Which frames go where: from, to and how many."""
    to = starts_of(counts)
    for env, at, length in pieces:
        yield at, to[env], length
        to[env] += length
