"""A buffer in a folder: written beside what is there, then put in its place by one rename.

``path/CURRENT`` names the subfolder that holds the buffer. Whatever happens while a new one is written, that one is
whole; the next save removes what was left behind.

A folder is data, which anybody may have made: nothing in it is run, unless the caller allows pickles, and it leads to
no file outside of it. All of it is looked at before anything of a buffer is changed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swath.data.folder import no_buffer, numbered, open_regular, read_text, write_text
from swath.data.held_frames import Held, as_data, from_data
from swath.data.list_storage import ListStorage
from swath.data.memory import FrameLayout
from swath.data.storage_base import Storage
from swath.data.storages import TensorStorage
from swath.data.tracks import Window
from swath.keys import Key

_CURRENT = "CURRENT"
_DATA = "data-"
#: Frames that are copied at a time.
_CHUNK = 65_536


def save_folder(path: Any, storage: Storage, about: Mapping[str, Any], held: Held) -> None:
    """``about``: what else there is to save; numbers, texts, arrays, and mappings of them."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{_DATA}{max(numbered(folder, _DATA), default=0) + 1}"
    new.mkdir()
    arrays: dict[str, np.ndarray] = {}
    content = {"about": _without_arrays(about, arrays, "about"), "storage": _save_storage(new, storage, arrays)}
    if held:
        content["held"] = _save_held(new, storage, arrays, held)
    np.savez(new / "arrays.npz", **arrays)  # type: ignore[arg-type]
    write_text(new / "content.json", json.dumps(content))
    for file in new.iterdir():
        _sync(file)
    _sync(new)
    named = folder / (_CURRENT + ".new")
    write_text(named, new.name)
    _sync(named)
    os.replace(named, folder / _CURRENT)
    _sync(folder)
    for old in numbered(folder, _DATA).values():
        if old != new:
            shutil.rmtree(old, ignore_errors=True)


def read_folder(path: Any, storage: Storage, allow_pickle: bool) -> tuple[dict[str, Any], Callable[[], None], Held]:
    """What was saved besides frames, what puts the frames into the storage, and what transforms held back."""
    folder = Path(path)
    if not os.path.lexists(folder / _CURRENT):
        raise FileNotFoundError(f"there is no saved buffer in {folder}")
    name = read_text(folder / _CURRENT).strip()
    current = {path.name: path for path in numbered(folder, _DATA).values()}.get(name)
    if current is None or current.is_symlink() or not current.is_dir():
        raise no_buffer(folder, f"{_CURRENT} says {name[:100]!r}, which is no folder in it")
    try:
        content = json.loads(read_text(current / "content.json"))
        arrays = _read_arrays(current / "arrays.npz")
        about = _with_arrays(content["about"], arrays)
        restore = _restoring(current, storage, content["storage"], arrays, allow_pickle)
        return about, restore, _read_held(current, content.get("held", {}), arrays, allow_pickle)
    except (KeyError, AttributeError, IndexError, RecursionError, zipfile.BadZipFile) as error:
        raise no_buffer(current, f"{type(error).__name__}: {error}") from error


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with open(open_regular(path), "rb") as file:
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > os.fstat(file.fileno()).st_size:  # as saved, it is not compressed
            raise ValueError(f"{path} says that it has {size:,} bytes of arrays, more than the file")
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as archive:
                return dict(archive)
        except MemoryError as error:
            raise ValueError(f"{path} says that it has arrays larger than memory: {error}") from error


def _sync(path: Path) -> None:
    """Let the disk have it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_arrays(value: Any, arrays: dict[str, np.ndarray], name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_arrays(entry, arrays, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {"__array__": name}
    return value


def _with_arrays(value: Any, arrays: Any) -> Any:
    if isinstance(value, dict):
        if "__array__" in value:
            return arrays[value["__array__"]]
        return {key: _with_arrays(entry, arrays) for key, entry in value.items()}
    return value


def _save_storage(folder: Path, storage: Storage, arrays: dict[str, np.ndarray]) -> dict[str, Any] | None:
    if not storage.is_laid_out:
        return None
    window = storage.tracks.window()
    slots = window.all_slots()
    if isinstance(storage, ListStorage):
        with open(folder / "items.pickle", "wb") as file:
            pickle.dump(storage.take(slots), file, pickle.HIGHEST_PROTOCOL)
        arrays["first"], arrays["sizes"], arrays["torn"] = window.first, window.sizes, np.zeros_like(window.sizes)
        return {}
    assert isinstance(storage, TensorStorage)
    memory = storage.laid_out()
    for number, leaf in enumerate(memory.leaves.values()):
        with open(folder / f"{number}.bin", "wb") as file:
            for start in range(0, len(slots), _CHUNK):
                part = leaf.index_select(0, torch.from_numpy(slots[start : start + _CHUNK]).to(leaf.device))
                file.write(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    arrays["first"], arrays["sizes"] = window.first, window.sizes
    arrays["torn"] = torn_frames(storage, window, slots)
    return {"layout": memory.layout.to_json(), "of_tensors": storage.of_tensors}


def _save_held(folder: Path, storage: Storage, arrays: dict[str, np.ndarray], held: Held) -> Any:
    """As the storage's own frames: as bytes, or as a pickle, where they may be anything."""
    if isinstance(storage, ListStorage):
        with open(folder / "held.pickle", "wb") as file:
            pickle.dump(held, file, pickle.HIGHEST_PROTOCOL)
        return "pickle"
    return _without_arrays(as_data(held), arrays, "held")


def _read_held(folder: Path, content: Any, arrays: Mapping[str, np.ndarray], allow_pickle: bool) -> Held:
    if content == "pickle":
        return _unpickled(folder / "held.pickle", allow_pickle)
    return from_data(_with_arrays(content, arrays))


def torn_frames(storage: Storage, window: Window, slots: np.ndarray) -> np.ndarray:
    """Of each track, how many of the oldest frames workers wrote over while they were copied."""
    intact = storage.tracks.intact(window, slots)
    bounds = np.append(0, np.cumsum(window.sizes))
    torn = []
    for start, stop in itertools.pairwise(bounds):
        bad = (~intact[start:stop]).nonzero()[0]
        torn.append(int(bad[-1]) + 1 if len(bad) else 0)
    return np.array(torn)


def _restoring(
    folder: Path, storage: Storage, content: Any, arrays: Mapping[str, np.ndarray], allow_pickle: bool
) -> Callable[[], None]:
    if content is None:
        return storage.clear
    first, sizes, torn = counts = [arrays[name] for name in ("first", "sizes", "torn")]
    if any(each.ndim != 1 or each.dtype.kind != "i" or len(each) != len(sizes) for each in counts):
        raise no_buffer(folder, "what it counts are no frames")
    if not len(sizes) or min(each.min() for each in (first, torn, sizes - torn)) < 0:
        raise no_buffer(folder, "it counts less than 0 frames")
    total = sum(sizes.tolist())
    if "layout" not in content:
        _require_list(storage)
        items = _unpickled(folder / "items.pickle", allow_pickle)
        if len(items) != total:
            raise no_buffer(folder, f"it has {len(items):,} entries, not {total:,}")
        return lambda: restore_items(storage, items, first, sizes)
    _require_tensors(storage)
    layout = FrameLayout.from_json(content["layout"])
    if len(sizes) != layout.num_tracks:
        raise no_buffer(folder, f"{len(sizes)} tracks instead of {layout.num_tracks}")
    leaves = {
        field.key: _mapped(folder / f"{number}.bin", total * math.prod(field.shape) * field.dtype.itemsize)
        .view(field.dtype)
        .view(total, *field.shape)
        for number, field in enumerate(layout.fields)
    }
    of_tensors = bool(content["of_tensors"])
    return lambda: restore_frames(storage, layout, leaves, first, sizes, torn, of_tensors)


def _unpickled(path: Path, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise ValueError(
            f"{path} is a pickle, as a ListStorage is saved, and opening one runs whatever it says; if you know who "
            "wrote it, loads(path, allow_pickle=True) does. Tensor storages are saved without"
        )
    with open(open_regular(path), "rb") as file:
        return pickle.load(file)


def _mapped(path: Path, num_bytes: int) -> torch.Tensor:
    """A file's bytes, of which changes are not written to it."""
    with open(open_regular(path), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != num_bytes:
            raise ValueError(f"{path} has {found:,} bytes and should have {num_bytes:,}")
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))


def _turn(storage: Storage, first: np.ndarray, sizes: np.ndarray) -> None:
    """Let full tracks begin where they began: every frame gets its slot, and a seed draws the same ones."""
    tracks = storage.tracks
    for track, size in enumerate(sizes):
        if size == tracks.length:
            tracks.begin_at(track, int(first[track]) % tracks.length)


def _require_list(storage: Storage) -> ListStorage:
    if not isinstance(storage, ListStorage):
        raise TypeError(f"this buffer was saved from a ListStorage; it cannot go into a {type(storage).__name__}")
    return storage


def _require_tensors(storage: Storage) -> TensorStorage:
    if not isinstance(storage, TensorStorage):
        raise TypeError(f"this buffer was saved from a tensor storage; it cannot go into a {type(storage).__name__}")
    return storage


def restore_items(storage: Storage, items: list[Any], first: np.ndarray, sizes: np.ndarray) -> None:
    storage = _require_list(storage)
    storage.lay_out(None, len(sizes))
    _turn(storage, first, sizes)
    bounds = np.append(0, np.cumsum(sizes))
    for track, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop > start:
            storage.write([items[start:stop]], track)


def restore_frames(
    storage: Storage,
    layout: FrameLayout,
    leaves: Mapping[Key, torch.Tensor],
    first: np.ndarray,
    sizes: np.ndarray,
    torn: np.ndarray,
    of_tensors: bool,
) -> None:
    """Put frames, track by track in ``leaves``, into a storage that is laid out for them."""
    storage = _require_tensors(storage)
    storage.of_tensors = of_tensors
    storage.lay_out_fields(layout.fields, layout.num_tracks, layout.sizes)
    _turn(storage, first, sizes - torn)
    bounds = np.append(0, np.cumsum(sizes))
    for track, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        for at in range(start + int(torn[track]), stop, _CHUNK):
            part = {key: leaf[at : min(at + _CHUNK, stop)].unsqueeze(0) for key, leaf in leaves.items()}
            storage.write_rows(part, track)
    storage.keep()


def storage_state(storage: Storage) -> dict[str, Any] | None:
    """All frames, in memory of their own."""
    if not storage.is_laid_out:
        return None
    window = storage.tracks.window()
    slots = window.all_slots()
    if isinstance(storage, ListStorage):
        return {"items": storage.take(slots), "first": window.first, "sizes": window.sizes}
    assert isinstance(storage, TensorStorage)
    memory = storage.laid_out()
    frames = [leaf.index_select(0, torch.from_numpy(slots).to(leaf.device)) for leaf in memory.leaves.values()]
    return {
        "layout": memory.layout.to_json(),
        "of_tensors": storage.of_tensors,
        "frames": frames,
        "first": window.first,
        "sizes": window.sizes,
        "torn": torn_frames(storage, window, slots),
    }


def restore_storage(storage: Storage, state: Mapping[str, Any] | None) -> None:
    """Instead of what is there."""
    if state is None:
        storage.clear()
    elif "items" in state:
        restore_items(storage, state["items"], state["first"], state["sizes"])
    else:
        layout = FrameLayout.from_json(state["layout"])
        leaves = {field.key: leaf for field, leaf in zip(layout.fields, state["frames"], strict=True)}
        restore_frames(storage, layout, leaves, state["first"], state["sizes"], state["torn"], state["of_tensors"])
