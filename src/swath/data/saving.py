"""A buffer in a folder: written beside what is there, then put in its place by one rename.

``path/CURRENT`` names the subfolder that holds the buffer. Whatever happens while a new one is written, that one is
whole; the next save removes what was left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swath.data.memory import FrameLayout
from swath.data.storages import ListStorage, Storage, TensorStorage
from swath.data.tracks import Window
from swath.rollout.layout import Key

_CURRENT = "CURRENT"
#: Frames that are copied at a time.
_CHUNK = 65_536


def save_folder(path: Any, storage: Storage, about: Mapping[str, Any]) -> None:
    """``about``: what else there is to save; numbers, texts, arrays, and mappings of them."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(name.name.removeprefix("data-")) for name in folder.glob("data-*")]
    new = folder / f"data-{max(numbers, default=0) + 1}"
    new.mkdir()
    arrays: dict[str, np.ndarray] = {}
    content = {"about": _without_arrays(about, arrays, "about"), "storage": _save_storage(new, storage, arrays)}
    np.savez(new / "arrays.npz", **arrays)  # type: ignore[arg-type]
    (new / "content.json").write_text(json.dumps(content))
    for file in new.iterdir():
        _sync(file)
    _sync(new)
    named = folder / (_CURRENT + ".new")
    named.write_text(new.name)
    _sync(named)
    os.replace(named, folder / _CURRENT)
    _sync(folder)
    for old in folder.glob("data-*"):
        if old != new:
            shutil.rmtree(old, ignore_errors=True)


def load_folder(path: Any, storage: Storage) -> dict[str, Any]:
    """Put the frames into a storage; what else was saved is returned."""
    folder = Path(path)
    current = _current(folder)
    if current is None:
        raise FileNotFoundError(f"there is no saved buffer in {folder}")
    content = json.loads((current / "content.json").read_text())
    with np.load(current / "arrays.npz") as arrays:
        about = _with_arrays(content["about"], arrays)
        _load_storage(current, storage, content["storage"], arrays)
    return about


def _current(folder: Path) -> Path | None:
    named = folder / _CURRENT
    return folder / named.read_text().strip() if named.exists() else None


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
    slots = window.slots(np.arange(window.total))
    if isinstance(storage, ListStorage):
        with open(folder / "items.pickle", "wb") as file:
            pickle.dump(storage.get(slots), file, pickle.HIGHEST_PROTOCOL)
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


def torn_frames(storage: Storage, window: Window, slots: np.ndarray) -> np.ndarray:
    """Of each track, how many of the oldest frames workers wrote over while they were copied."""
    intact = storage.tracks.intact(window, slots)
    bounds = np.append(0, np.cumsum(window.sizes))
    torn = []
    for start, stop in itertools.pairwise(bounds):
        bad = (~intact[start:stop]).nonzero()[0]
        torn.append(int(bad[-1]) + 1 if len(bad) else 0)
    return np.array(torn)


def _load_storage(folder: Path, storage: Storage, content: Any, arrays: Any) -> None:
    if content is None:
        storage.clear()
        return
    first, sizes, torn = arrays["first"], arrays["sizes"], arrays["torn"]
    if "layout" not in content:
        items = pickle.loads((folder / "items.pickle").read_bytes())
        restore_items(storage, items, first, sizes)
        return
    layout = FrameLayout.from_json(content["layout"])
    total = int(sizes.sum())
    leaves = {}
    for number, field in enumerate(layout.fields):
        size = total * field.num_bytes
        found = (folder / f"{number}.bin").stat().st_size
        if found != size:
            raise ValueError(f"{folder / f'{number}.bin'} has {found:,} bytes and should have {size:,}")
        saved = torch.empty(0, dtype=torch.uint8)
        if size:
            saved = torch.from_file(str(folder / f"{number}.bin"), size=size, dtype=torch.uint8)
        leaves[field.key] = saved.view(field.dtype).view(total, *field.shape)
    restore_frames(storage, layout, leaves, first, sizes, torn, content["of_tensors"])


def _turn(storage: Storage, first: np.ndarray, sizes: np.ndarray) -> None:
    """Let full tracks begin where they began: every frame gets its slot, and a seed draws the same ones."""
    tracks = storage.tracks
    for track, size in enumerate(sizes):
        if size == tracks.length:
            tracks.begin_at(track, int(first[track]) % tracks.length)


def restore_items(storage: Storage, items: list[Any], first: np.ndarray, sizes: np.ndarray) -> None:
    if not isinstance(storage, ListStorage):
        raise TypeError(f"this buffer was saved from a ListStorage; it cannot go into a {type(storage).__name__}")
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
    if not isinstance(storage, TensorStorage):
        raise TypeError(f"this buffer was saved from a tensor storage; it cannot go into a {type(storage).__name__}")
    storage.of_tensors = of_tensors
    storage.lay_out_fields(layout.fields, layout.num_tracks)
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
    slots = window.slots(np.arange(window.total))
    if isinstance(storage, ListStorage):
        return {"items": storage.get(slots), "first": window.first, "sizes": window.sizes}
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
