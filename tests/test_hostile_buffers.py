"""Folders of replay buffers that somebody else made: nothing in them is run, and none leads outside."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

pytestmark = pytest.mark.processes


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def buffer(storage: Any = LazyTensorStorage, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(10), batch_size=2, **kwargs)


def saved(folder: Path, storage: Any = LazyTensorStorage, **kwargs: Any) -> Path:
    rb = buffer(storage, **kwargs)
    rb.extend(TensorDict(x=torch.arange(6), y=torch.zeros(6, 3), batch_size=6))
    rb.sample()
    rb.dumps(folder)
    return folder / "data-1"


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_layout(content: Any, change: Callable[[Any], None], of: Callable[[Any], Any]) -> None:
    holder = of(content)
    layout = json.loads(holder["layout"])
    change(layout)
    holder["layout"] = json.dumps(layout)


def test_pickles_are_not_opened_unless_allowed(tmp_path: Path) -> None:
    current = saved(tmp_path / "rb", ListStorage)
    trap = tmp_path / "trapped"
    (current / "items.pickle").write_bytes(pickle.dumps(Trap(trap)))
    for storage in (LazyTensorStorage, LazyMemmapStorage):
        for allow in (False, True):  # the storage's type is looked at first
            with pytest.raises(TypeError, match="saved from a ListStorage"):
                buffer(storage).loads(tmp_path / "rb", allow_pickle=allow)
    with pytest.raises(ValueError, match=r"items.pickle is a pickle.*allow_pickle=True"):
        buffer(ListStorage).loads(tmp_path / "rb")
    assert not trap.exists()
    with pytest.raises(TypeError):
        buffer(ListStorage).loads(tmp_path / "rb", allow_pickle=True)
    assert trap.exists()  # which is what was asked for


def test_a_pickle_among_the_arrays_is_not_opened(tmp_path: Path) -> None:
    current = saved(tmp_path / "rb")
    trap = tmp_path / "trapped"
    np.savez(current / "arrays.npz", first=np.array([Trap(trap)], dtype=object), sizes=[6], torn=[0])
    with pytest.raises(ValueError, match="allow_pickle=False"):
        buffer().loads(tmp_path / "rb", allow_pickle=True)  # that is said of items only
    assert not trap.exists()


@pytest.mark.parametrize(
    "name", ["/etc", "..", "../rb/data-1", "data-1/../data-1", "data-9", "", ".", "data-1\0", "data-x"]
)
def test_current_names_a_folder_within(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "rb")
    (tmp_path / "rb" / "data-x").mkdir()
    (tmp_path / "rb" / "CURRENT").write_text(name)
    rb = buffer()
    with pytest.raises(ValueError, match="CURRENT says"):
        rb.loads(tmp_path / "rb")
    rb.extend(TensorDict(x=torch.arange(3), batch_size=3))
    rb.dumps(tmp_path / "rb")  # what is not ours is left alone
    assert (tmp_path / "rb" / "data-x").exists()
    rb.loads(tmp_path / "rb")
    assert len(rb) == 3


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    current = saved(tmp_path / "rb")
    secret = tmp_path / "secret"
    for name in ("content.json", "arrays.npz", "0.bin", "1.bin", "../CURRENT"):
        path = (current / name).resolve()
        shutil.copy(path, secret)
        path.unlink()
        path.symlink_to(secret)
        with pytest.raises(ValueError, match=f"{path.name} is a link"):
            buffer().loads(tmp_path / "rb")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ValueError, match=f"{path.name} is no ordinary file"):
            buffer().loads(tmp_path / "rb")
        path.unlink()
        shutil.copy(secret, path)
    current.rename(tmp_path / "elsewhere")
    current.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no folder in it"):
        buffer().loads(tmp_path / "rb")
    (tmp_path / "link").symlink_to(tmp_path / "rb")  # what the user names may be one
    current.unlink()
    (tmp_path / "elsewhere").rename(current)
    buffer().loads(tmp_path / "link")


def test_saving_writes_over_no_other_file(tmp_path: Path) -> None:
    saved(tmp_path / "rb")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "rb" / "CURRENT.new").symlink_to(precious)
    saved(tmp_path / "rb")
    folder = tmp_path / "memmap"
    folder.mkdir()
    (folder / "layout.json.new").symlink_to(precious)
    (folder / "frames-1.bin").symlink_to(precious)
    (folder / "frames-x.bin").write_text("not ours")
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
    rb.extend(torch.arange(5))
    assert precious.read_text() == "mine"
    assert (folder / "frames-x.bin").exists()


LAYOUTS: dict[str, Callable[[Any], None]] = {
    "a dtype that is a function": lambda layout: layout["fields"][0].update(dtype="load"),
    "a dtype that is none": lambda layout: layout["fields"][0].update(dtype=["float32"]),
    "a huge shape": lambda layout: layout["fields"][0].update(shape=[2**40, 2**40]),
    "a shape whose product is 0 in 64 bits": lambda layout: layout["fields"][0].update(shape=[2**32, 2**32]),
    "a negative shape": lambda layout: layout["fields"][0].update(shape=[-1]),
    "a shape of texts": lambda layout: layout["fields"][0].update(shape=["1"]),
    "no tracks": lambda layout: layout.update(num_tracks=0),
    "many tracks": lambda layout: layout.update(num_tracks=2**60),
    "tracks of nothing": lambda layout: layout.update(length=0),
    "long tracks": lambda layout: layout.update(length=2**60),
    "the same key twice": lambda layout: layout.update(fields=layout["fields"] * 2),
    "a key in another": lambda layout: layout["fields"][1].update(key=[*layout["fields"][0]["key"], "z"]),
    "a key that is none": lambda layout: layout["fields"][0].update(key=[1]),
    "a batch size that is none": lambda layout: layout.update(sizes=[{"key": [], "size": [7]}]),
    "no fields": lambda layout: layout.update(fields=[]),
    "fields that are none": lambda layout: layout.update(fields=3),
    "nothing": lambda layout: layout.clear(),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_layouts_that_are_none(tmp_path: Path, what: str) -> None:
    current = saved(tmp_path / "rb")
    change_json(current / "content.json", lambda c: change_layout(c, LAYOUTS[what], lambda c: c["storage"]))
    rb = buffer()
    rb.extend(torch.arange(4))
    with pytest.raises(ValueError, match="no layout of a replay buffer"):
        rb.loads(tmp_path / "rb")
    assert rb[:].tolist() == [0, 1, 2, 3]  # as it was
    folder = tmp_path / "memmap"
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder)).extend(
        TensorDict(x=torch.arange(6), y=torch.zeros(6, 3), batch_size=6)
    )
    change_json(folder / "layout.json", lambda c: change_layout(c, LAYOUTS[what], lambda c: c))
    with pytest.raises(ValueError, match="does not hold a buffer"):
        LazyMemmapStorage(10, scratch_dir=folder, existsok=True)


ARRAYS: dict[str, dict[str, Any]] = {
    "fewer than none": {"sizes": [-6]},
    "more than there are": {"sizes": [7]},
    "a sum that is none in 64 bits": {"first": [0] * 4, "sizes": [2**62] * 4, "torn": [0] * 4},
    "more torn than there are": {"torn": [8]},
    "a beginning before all": {"first": [-3]},
    "numbers that are none": {"sizes": [6.5]},
    "two dimensions": {"sizes": [[6]]},
    "other tracks": {"first": [0, 0], "sizes": [3, 3], "torn": [0, 0]},
    "no tracks": {"first": np.zeros(0, int), "sizes": np.zeros(0, int), "torn": np.zeros(0, int)},
}


@pytest.mark.parametrize("what", ARRAYS)
def test_counts_that_cannot_be(tmp_path: Path, what: str) -> None:
    current = saved(tmp_path / "rb")
    np.savez(current / "arrays.npz", **{"first": [0], "sizes": [6], "torn": [0], **ARRAYS[what]})
    with pytest.raises(ValueError, match=r"does not hold a buffer|should have"):
        buffer().loads(tmp_path / "rb")


def test_arrays_that_are_larger_than_they_are(tmp_path: Path) -> None:
    current = saved(tmp_path / "rb")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (2**44,)})
    with zipfile.ZipFile(current / "arrays.npz", "w") as archive:
        archive.writestr("sizes.npy", header.getvalue())
    with pytest.raises(ValueError, match=r"larger than memory|read|reshape"):
        buffer().loads(tmp_path / "rb")
    with zipfile.ZipFile(current / "arrays.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sizes.npy", b"\0" * 10_000_000)
    with pytest.raises(ValueError, match="more than the file"):
        buffer().loads(tmp_path / "rb")
    (current / "arrays.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="does not hold a buffer"):
        buffer().loads(tmp_path / "rb")
    with open(current / "content.json", "r+b") as file:
        file.truncate(2**40)  # a hole
    with pytest.raises(ValueError, match=r"content.json has"):
        buffer().loads(tmp_path / "rb")


@pytest.mark.parametrize("order", [[0, 6], [-1], [0.5], [[1]], ["a"]])
def test_orders_of_frames_that_are_not_there(tmp_path: Path, order: Any) -> None:
    current = saved(tmp_path / "rb", sampler=SamplerWithoutReplacement())
    arrays = dict(np.load(current / "arrays.npz"))
    np.savez(current / "arrays.npz", **{**arrays, "about.sampler.order": np.array(order)})
    with pytest.raises(ValueError, match="no order"):
        buffer(sampler=SamplerWithoutReplacement()).loads(tmp_path / "rb")


@pytest.mark.parametrize("priorities", [[-1.0] * 6, [1.0] * 5 + [np.nan], [[1.0] * 6]])
def test_priorities_that_are_none(tmp_path: Path, priorities: Any) -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(10, alpha=1, beta=1)

    current = saved(tmp_path / "rb", sampler=sampler())
    arrays = dict(np.load(current / "arrays.npz"))
    np.savez(current / "arrays.npz", **{**arrays, "about.sampler.priorities": np.array(priorities)})
    with pytest.raises(ValueError, match="no priorities"):
        buffer(sampler=sampler()).loads(tmp_path / "rb")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other.bin", "frames-1.bin/../../other.bin", "other.bin", "", ".", 3]
)
def test_a_memmap_is_a_file_in_its_folder(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "rb"
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
    rb.extend(torch.arange(6))
    for place in (tmp_path, folder):  # of the right size
        shutil.copy(folder / "frames-1.bin", place / "other.bin")
    before = (tmp_path / "other.bin").read_bytes()
    change_json(folder / "layout.json", lambda content: content.update(file=name))
    with pytest.raises(ValueError, match="does not hold a buffer"):
        LazyMemmapStorage(10, scratch_dir=folder, existsok=True)
    change_json(folder / "layout.json", lambda content: content.update(file="frames-1.bin"))
    LazyMemmapStorage(10, scratch_dir=folder, existsok=True)
    (folder / "frames-1.bin").unlink()
    (folder / "frames-1.bin").symlink_to(tmp_path / "other.bin")
    with pytest.raises(ValueError, match="is a link"):
        LazyMemmapStorage(10, scratch_dir=folder, existsok=True)
    assert (tmp_path / "other.bin").read_bytes() == before


@pytest.mark.parametrize(
    "counters", [[3, 6, 0, 0], [-1, -1, 0, 0], [2**62, 2**62, 0, 0], [6, 6, -2, 0], [6, 6, 0, 11], [6, 6, 0, -1]]
)
def test_a_memmap_counts_what_can_be_there(tmp_path: Path, counters: list[int]) -> None:
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path)).extend(torch.arange(6))
    with open(tmp_path / "frames-1.bin", "r+b") as file:
        file.write(np.array(counters, dtype=np.int64).tobytes())
    with pytest.raises(ValueError, match="cannot be there"):
        LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)
    with open(tmp_path / "frames-1.bin", "r+b") as file:
        file.write(np.array([6, 6, 0, 0], dtype=np.int64).tobytes())
    assert len(LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)) == 6
    os.truncate(tmp_path / "frames-1.bin", 100)
    with pytest.raises(ValueError, match="has 100 bytes"):
        LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)
