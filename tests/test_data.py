"""Replay buffers in one process: what is stored, and what is drawn."""

from __future__ import annotations

import json
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from programs import WarmProgram
from small_disk import ON_A_SMALL_DISK
from swath.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from swath.data.priority_tree import PriorityTree
from swath.data.tracks import NUM_COUNTERS, Tracks

pytestmark = pytest.mark.processes
STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


def numbers(start: int, count: int, **others: torch.Tensor) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count), **others}, batch_size=count)


def buffer(size: int = 100, storage: Any = LazyTensorStorage, **kwargs: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(size), **kwargs)


def episodes(lengths: list[int], first_id: int = 0) -> TensorDict:
    """Frames ``[sum of lengths]`` that know their episode and step."""
    ids = torch.repeat_interleave(torch.arange(first_id, first_id + len(lengths)), torch.tensor(lengths))
    steps = torch.cat([torch.arange(length) for length in lengths])
    done = torch.cat([torch.arange(length) == length - 1 for length in lengths]).unsqueeze(1)
    return TensorDict(
        {
            "collector": {"traj_ids": ids},
            "step": steps,
            "next": {"done": done, "truncated": torch.zeros_like(done)},
        },
        batch_size=len(ids),
    )


# -- storing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_the_oldest_is_overwritten(storage: Any) -> None:
    rb = buffer(10, storage, batch_size=5)
    assert len(rb) == 0
    assert rb.extend(numbers(0, 7)).tolist() == list(range(7))
    assert (len(rb), rb.write_count) == (7, 7)
    assert rb.extend(numbers(7, 6)).tolist() == [7, 8, 9, 0, 1, 2]
    assert (len(rb), rb.write_count) == (10, 13)
    assert rb[:]["x"].tolist() == list(range(3, 13))
    assert rb[-1]["x"] == 12
    assert rb[torch.tensor([0, 3])]["x"].tolist() == [10, 3]
    sample = rb.sample(200)
    assert set(sample["x"].tolist()) == set(range(3, 13))
    assert torch.equal(rb[sample["index"]]["x"], sample["x"])
    rb.extend(numbers(100, 25))  # more than fits
    assert rb[:]["x"].tolist() == list(range(115, 125))
    assert int(rb.add(numbers(500, 1)[0])) == rb.write_count % 10 - 1
    rb.empty()
    assert (len(rb), rb.write_count) == (0, 0)
    with pytest.raises(RuntimeError, match=r"empty.*wait=True"):
        rb.sample()
    rb.extend(numbers(0, 3))
    assert rb[:]["x"].tolist() == [0, 1, 2]


def test_what_is_stored_is_a_copy() -> None:
    for storage in STORAGES:
        rb = buffer(10, storage)
        data = numbers(0, 4)
        rb.extend(data)
        data["x"] += 100
        assert rb[:]["x"].tolist() == [0, 1, 2, 3]
        rb[:]["x"].zero_()
        rb.sample(4)["x"].zero_()
        assert rb[:]["x"].tolist() == [0, 1, 2, 3]


def test_tensors_lists_and_anything() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    rb.extend(torch.arange(6).reshape(6, 1))
    assert rb.sample().shape == (3, 1)
    assert rb[2].tolist() == [2]
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    rb.extend(["a", "b"])
    rb.add("c")
    assert rb[:] == ["a", "b", "c"]
    assert set(rb.sample(20)) == {"a", "b", "c"}
    rb = ReplayBuffer(batch_size=2)
    rb.extend([(torch.zeros(2), 1.0), (torch.ones(2), 2.0)])
    first, second = rb.sample()
    assert (first.shape, second.shape) == ((2, 2), (2,))
    mixed = TensorDict(x=torch.zeros(2), batch_size=2)
    mixed.set_non_tensor("text", "hello")
    with pytest.raises(TypeError, match=r"'text'.*ListStorage"):
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(mixed)


def test_rows_and_frames() -> None:
    """As in the reference: ndim=1 stores rows of a batch [envs, time], ndim=2 its frames."""
    batch = TensorDict(x=torch.arange(12).reshape(3, 4), batch_size=(3, 4))
    rows = ReplayBuffer(storage=LazyTensorStorage(100))
    rows.extend(batch)
    rows.extend(batch)
    assert (len(rows), rows.write_count, rows.sample(5).shape) == (6, 6, (5, 4))
    assert rows.sample(5)["x"].shape == (5, 4)
    frames = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    frames.extend(batch)
    frames.extend(batch + 100)
    assert (len(frames), frames.write_count) == (24, 24)
    assert frames[:]["x"][:8].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
    assert frames.sample(5)["x"].shape == (5,)


def test_later_data_that_differs_is_named() -> None:
    rb = buffer()
    rb.extend(numbers(0, 3, y=torch.zeros(3, 2)))
    with pytest.raises(KeyError, match=r"'y' is missing"):
        rb.extend(numbers(0, 3))
    with pytest.raises(KeyError, match="'z' is not among"):
        rb.extend(numbers(0, 3, y=torch.zeros(3, 2), z=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"'y'.*float32 \(2,\).*float64 \(2,\)"):
        rb.extend(numbers(0, 3, y=torch.zeros(3, 2, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"'y'.*\(2,\).*\(3,\)"):
        rb.extend(numbers(0, 3, y=torch.zeros(3, 3)))
    assert len(rb) == 3


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="not both"):
        ReplayBuffer(transform=lambda x: x, transform_factory=lambda: None)
    with pytest.raises(ValueError, match="prefetch needs batch_size"):
        ReplayBuffer(prefetch=2)
    with pytest.raises(ValueError, match="shared"):
        ReplayBuffer(prefetch=2, batch_size=3, shared=True)
    with pytest.raises(ValueError, match="drop_last"):
        ReplayBuffer(sampler=SamplerWithoutReplacement(drop_last=True))
    with pytest.raises(ValueError, match="dim_extend"):
        ReplayBuffer(dim_extend=-1)
    with pytest.raises(RuntimeError, match="batch_size"):
        buffer().sample()
    with pytest.raises(RuntimeError, match="batch_size"):
        next(iter(buffer()))
    with pytest.raises(RuntimeError, match="nothing"):
        buffer().extend(numbers(0, 0))
    with pytest.raises(ValueError, match="TensorDicts"):
        buffer().extend(torch.zeros(3))
    with pytest.raises(TypeError, match="Storage"):
        ReplayBuffer(storage=dict)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_size"):
        LazyTensorStorage(0)
    rb = buffer()
    rb.extend(numbers(0, 3))
    with pytest.raises(IndexError, match="100"):
        rb[torch.tensor([100])]
    with pytest.raises(RuntimeError, match="only read"):
        buffer(writer=ImmutableDatasetWriter()).extend(numbers(0, 3))


def test_parts_may_be_constructors_and_transforms_are_called() -> None:
    rb = ReplayBuffer(
        storage=lambda: LazyTensorStorage(10),
        sampler=RandomSampler,
        writer=RoundRobinWriter,
        transform=lambda data: data.set("y", data["x"] * 2),
        batch_size=4,
    )
    rb.append_transform(lambda data: data.set("z", data["y"] + 1))
    rb.extend(numbers(0, 5))
    sample = rb.sample()
    assert torch.equal(sample["z"], sample["x"] * 2 + 1)
    _, info = rb.sample(return_info=True)
    assert info["index"].shape == (4,)


def test_a_seed_gives_the_same_samples() -> None:
    def draw(generator: torch.Generator | None) -> list[int]:
        torch.manual_seed(3)
        rb = buffer(generator=generator)
        rb.extend(numbers(0, 50))
        return rb.sample(20)["x"].tolist()

    assert draw(None) == draw(None)
    assert draw(torch.Generator().manual_seed(1)) == draw(torch.Generator().manual_seed(1))
    assert draw(torch.Generator().manual_seed(1)) != draw(torch.Generator().manual_seed(2))


def test_prefetch() -> None:
    rb = buffer(batch_size=8, prefetch=3)
    rb.extend(numbers(0, 100))
    seen = torch.cat([rb.sample()["x"] for _ in range(100)])
    assert len(seen.unique()) > 95
    assert rb.num_sampled == 800


def test_highest_values_are_kept() -> None:
    for storage in STORAGES:
        rb = buffer(5, storage, writer=TensorDictMaxValueWriter(rank_key="value"))
        values = torch.randperm(40).float()
        for part in values.split(8):
            rb.extend(numbers(0, 8, value=part.unsqueeze(1)))
        assert sorted(rb[:]["value"].reshape(-1).tolist()) == [35, 36, 37, 38, 39]
    with pytest.raises(KeyError, match="'value'"):
        buffer(5, writer=TensorDictMaxValueWriter(rank_key="value")).extend(numbers(0, 3))


# -- drawing ---------------------------------------------------------------------------------------------------------


def test_uniform() -> None:
    rb = buffer(100)
    rb.extend(numbers(0, 130))
    counts = np.bincount(rb.sample(100_000)["x"], minlength=130)
    assert counts[:30].sum() == 0
    assert counts[30:].min() > 850
    assert counts[30:].max() < 1150


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_replacement(shuffle: bool) -> None:
    rb = buffer(sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=7)
    rb.extend(numbers(0, 20))
    for _ in range(2):
        batches = list(rb)
        assert [len(batch) for batch in batches] == [7, 7, 6]
        seen = torch.cat([batch["x"] for batch in batches]).tolist()
        assert sorted(seen) == list(range(20))
        assert (seen == sorted(seen)) != shuffle
    rb.sample()
    rb.extend(numbers(20, 5))  # anew
    assert sorted(torch.cat([batch["x"] for batch in rb]).tolist()) == list(range(25))
    rb = buffer(sampler=SamplerWithoutReplacement(drop_last=True), batch_size=7)
    rb.extend(numbers(0, 20))
    assert [len(batch) for batch in rb] == [7, 7]
    rb.empty()
    rb.extend(numbers(0, 3))
    assert list(rb) == []
    with pytest.raises(ValueError, match="never full"):
        rb.sample()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_tree(capacity: int, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tree, plain = PriorityTree(capacity), np.zeros(capacity)
    for _ in range(5):
        chosen = rng.integers(capacity, size=rng.integers(1, 2 * capacity + 1))
        values = np.where(rng.random(capacity) < 0.2, 0.0, rng.random(capacity))[chosen]
        plain[chosen] = values
        tree.set(chosen, plain[chosen])
        assert np.isclose(tree.total, plain.sum())
        assert tree.smallest == (plain[plain > 0].min() if plain.any() else np.inf)
    if plain.any():
        masses = rng.random(200) * plain.sum()
        expected = np.searchsorted(np.cumsum(plain), masses, side="right")
        found = tree.find(masses)
        assert (np.abs(found - expected) <= 0).mean() > 0.98  # but for rounding
        assert (plain[found] > 0).mean() > 0.98


def test_priorities() -> None:
    alpha, beta, eps = 0.7, 0.9, 1e-8
    rb = buffer(10, sampler=PrioritizedSampler(10, alpha=alpha, beta=beta))
    index = rb.extend(numbers(0, 10))
    priorities = torch.arange(10).float()
    rb.update_priority(index, priorities)
    p = (priorities.double() + eps) ** alpha
    sample = rb.sample(200_000)
    shares = torch.bincount(sample["x"], minlength=10) / 200_000
    assert torch.allclose(shares.double(), p / p.sum(), atol=4e-3)
    expected = (p[sample["x"]] / p.min()) ** -beta
    assert torch.allclose(sample["priority_weight"].double(), expected, rtol=1e-4)
    # New frames have the highest priority so far: 9, which 3 frames have then.
    rb.extend(numbers(10, 2))
    sample = rb.sample(200_000)
    shares = torch.bincount(sample["x"], minlength=12) / 200_000
    assert shares[:2].sum() == 0
    assert torch.allclose(shares[9:], shares[9].expand(3), atol=4e-3)
    sample["td_error"] = torch.ones(200_000, 1)
    rb.update_tensordict_priority(sample)
    with pytest.raises(ValueError, match="negative"):
        rb.update_priority(index, -1.0)
    with pytest.raises(ValueError, match="negative"):
        PrioritizedSampler(10, alpha=-1, beta=0)
    small = buffer(10, sampler=PrioritizedSampler(5, alpha=1, beta=1))
    small.extend(numbers(0, 5))
    with pytest.raises(ValueError, match="max_capacity"):
        small.sample(1)


def test_a_priority_is_not_given_to_the_frame_that_has_overwritten_its_own() -> None:
    rb = buffer(4, sampler=PrioritizedSampler(4, alpha=1, beta=0))
    rb.update_priority(rb.extend(numbers(0, 4)), torch.ones(4))
    sample = rb.sample(50)
    rb.extend(numbers(4, 2))  # in the places of 0 and 1
    rb.update_priority(sample["index"], torch.where(sample["x"] < 2, 1e6, 1.0))
    shares = torch.bincount(rb.sample(4000)["x"], minlength=6) / 4000
    assert shares[:2].sum() == 0
    assert shares[2:].min() > 0.2
    rb.update_priority(sample["index"].clone(), 3.0)  # whoever says so means what is there now
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert set(rb.sample(1000)["x"].tolist()) == {4}


@pytest.mark.parametrize("key", ["ids", "ends"])
@pytest.mark.parametrize("size", [2000, 300])
def test_slices_lie_within_one_trajectory(key: str, size: int) -> None:
    """100,000 slices, also of a buffer that has wrapped, that grows meanwhile, and that has many tracks."""
    rng = np.random.default_rng(0)
    how: dict[str, Any] = {} if key == "ids" else {"end_key": ("next", "done")}
    sampler = SliceSampler(slice_len=8, **how)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(size, ndim=2), sampler=sampler)
    next_id, rest = 0, [episodes([0])[:0]] * 3
    num_slices = 0
    while num_slices < 100_000:
        for env in range(3):
            while len(rest[env]) < 40:
                lengths = rng.integers(1, 30, size=3).tolist()
                rest[env] = torch.cat([rest[env], episodes(lengths, next_id)])
                next_id += 3
        rb.extend(torch.stack([each[:40] for each in rest]))
        rest = [each[40:] for each in rest]
        sample = rb.sample(8 * 1000).reshape(1000, 8)
        num_slices += 1000
        ids, steps = sample["collector", "traj_ids"], sample["step"]
        assert (ids == ids[:, :1]).all()
        assert (steps == steps[:, :1] + torch.arange(8)).all()
        assert sample["next", "done"][:, -1].all()
        assert sample["next", "truncated"][:, -1].all()
        assert not sample["next", "done"][:, :-1].any()
    assert len(rb) <= size


def test_trajectories_that_change_without_an_end() -> None:
    """Those that were cut short: only their ids tell, also between two writes."""
    rb = buffer(1000, sampler=SliceSampler(slice_len=4))
    for number in range(20):
        part = episodes([10], first_id=number // 2)
        part["next", "done"][:] = False
        part["step"] += 10 * (number % 2)
        rb.extend(part)
        rows = rb.sample(400).reshape(100, 4)
        assert (rows["collector", "traj_ids"] == rows["collector", "traj_ids"][:, :1]).all()
        assert (rows["step"] == rows["step"][:, :1] + torch.arange(4)).all()
    assert rb.sample(4000)["step"].max() == 19  # over both writes of an episode


def test_slices_are_uniform_over_trajectories() -> None:
    rb = buffer(1000, sampler=SliceSampler(num_slices=4))
    rb.extend(episodes([100, 10, 5, 20]))
    seen = torch.cat([rb.sample(40).reshape(4, 10)["collector", "traj_ids"][:, 0] for _ in range(2000)])
    shares = torch.bincount(seen, minlength=4) / len(seen)
    assert shares[2] == 0  # too short
    assert torch.allclose(shares[[0, 1, 3]], torch.full((3,), 1 / 3), atol=0.03)
    starts = torch.cat([rb.sample(40).reshape(4, 10)["step"][:, 0] for _ in range(500)])
    assert starts.max() == 90
    rb = buffer(1000, sampler=SliceSampler(slice_len=10, strict_length=False))
    rb.extend(episodes([3, 100]))
    lengths = {len(rb.sample(20)) for _ in range(50)}
    assert lengths == {6, 13, 20}


def test_slices_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="not both"):
        SliceSampler(num_slices=1, slice_len=2)
    with pytest.raises(TypeError, match="num_slices or slice_len"):
        SliceSampler()
    rb = buffer(100, sampler=SliceSampler(slice_len=10))
    rb.extend(episodes([3, 4]))
    with pytest.raises(RuntimeError, match="multiple of slice_len=10"):
        rb.sample(15)
    with pytest.raises(RuntimeError, match="no trajectory in the buffer has 10 frames"):
        rb.sample(20)
    with pytest.raises(TimeoutError):
        rb.sample(20, wait=True, timeout=0.01)
    rb = buffer(100, sampler=SliceSampler(slice_len=2))
    rb.extend(numbers(0, 10))
    with pytest.raises(KeyError, match="traj_key or end_key"):
        rb.sample(4)
    rb = buffer(100, sampler=SliceSampler(slice_len=2, traj_key="episode"))
    rb.extend(numbers(0, 10))
    with pytest.raises(KeyError, match="'episode'"):
        rb.sample(4)


# -- while others write ----------------------------------------------------------------------------------------------


def test_what_is_overwritten_while_it_is_copied_is_known() -> None:
    tracks = Tracks(np.zeros((NUM_COUNTERS, 2), dtype=np.int64), length=10)
    every = slice(None)
    tracks.begin(every, 10)
    assert len(tracks) == 0  # begun is not there
    tracks.commit(every, 10)
    window = tracks.window()
    slots = np.arange(20)
    assert tracks.intact(window, slots).all()
    tracks.begin(slice(1, 2), 3)
    assert (~tracks.intact(window, slots)).nonzero()[0].tolist() == [10, 11, 12]
    assert len(tracks) == 17  # what is being overwritten cannot be read
    # Its writer is killed; the next one writes less, and what the first may have destroyed stays unreadable.
    tracks.begin(slice(1, 2), 1)
    tracks.commit(slice(1, 2), 1)
    assert len(tracks) == 18
    assert tracks.window().positions(np.array([10, 11, 12, 13])).tolist() == [10, -1, -1, 3]
    window = tracks.window()
    with tracks.editing(0):
        assert tracks.intact(window, slots)[:10].sum() == 0
    assert tracks.intact(window, slots)[:10].sum() == 0
    assert tracks.intact(tracks.window(), slots)[:10].all()


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(64, alpha=1, beta=1)])
def test_nothing_torn_while_a_thread_overwrites_all(sampler: Any) -> None:
    rb = buffer(64, sampler=sampler)
    wide = 256

    def frames(start: int, count: int) -> TensorDict:
        x = torch.arange(start, start + count)
        return TensorDict(x=x, y=x.unsqueeze(1).expand(count, wide).clone(), batch_size=count)

    rb.extend(frames(0, 64))
    stop = threading.Event()

    def write() -> None:
        start = 64
        while not stop.is_set():
            rb.extend(frames(start, 16))
            start += 16

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            sample = rb.sample(32)
            assert torch.equal(sample["y"], sample["x"].unsqueeze(1).expand(-1, wide))
            assert torch.equal(sample["index"], sample["x"] % 64)
    finally:
        stop.set()
        thread.join()
    assert rb.write_count > 64


# -- waiting, and holding back ----------------------------------------------------------------------------------------


def test_sample_waits_for_data() -> None:
    rb = buffer(batch_size=4)
    with pytest.raises(TimeoutError, match="not enough frames"):
        rb.sample(wait=True, timeout=0.01)
    got: list[TensorDict] = []
    thread = threading.Thread(target=lambda: got.append(rb.sample(wait=True, timeout=20)))
    thread.start()
    rb.extend(numbers(0, 3))
    rb.extend(numbers(3, 3))
    thread.join(20)
    assert got[0].shape == (4,)


def test_samples_per_insert() -> None:
    rate = SamplesPerInsert(2.0, min_size=10, slack=20)
    assert rate.may_write(written=10, sampled=0)
    assert rate.may_write(written=19, sampled=0)
    assert not rate.may_write(written=20, sampled=0)
    assert rate.may_write(written=20, sampled=1)
    assert not rate.may_sample(4, written=9, sampled=0)
    assert rate.may_sample(4, written=10, sampled=16)
    assert not rate.may_sample(4, written=10, sampled=17)
    rb = buffer(rate_limiter=rate)
    rb.extend(numbers(0, 10))
    for _ in range(5):
        rb.sample(4)
    assert rb.num_sampled == 20
    with pytest.raises(RuntimeError, match="no collector is writing"):
        rb.sample(4)
    rb.extend(numbers(10, 2))
    rb.sample(4)
    for wrong in ({"ratio": 0}, {"ratio": 1, "slack": 0}, {"ratio": 1, "min_size": 0}):
        with pytest.raises(ValueError, match="must be"):
            SamplesPerInsert(**wrong)


# -- saving ----------------------------------------------------------------------------------------------------------


def filled(storage: Any, sampler: Any = None, ndim: int = 1) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(100, ndim=ndim), sampler=sampler, batch_size=4)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("through", ["folder", "state_dict"])
@pytest.mark.parametrize("count", [30, 250])
def test_saved_and_loaded(storage: Any, through: str, count: int, tmp_path: Path) -> None:
    def make() -> TensorDictReplayBuffer:
        return filled(storage, PrioritizedSampler(100, alpha=1, beta=1))

    rb = make()
    index = rb.extend(numbers(0, count))[-30:]
    rb.update_priority(index, torch.arange(30) + 1.0)
    rb.sample()
    other = make()
    other.extend(numbers(1000, 5))
    if through == "folder":
        rb.dumps(tmp_path / "rb")
        rb.dumps(tmp_path / "rb")  # over the first
        other.loads(tmp_path / "rb", allow_pickle=storage is ListStorage)
        assert len(list((tmp_path / "rb").glob("data-*"))) == 1
    else:
        other.load_state_dict(rb.state_dict())
    assert torch.equal(other[:]["x"], rb[:]["x"])
    assert (other.write_count, other.num_sampled) == (rb.write_count, rb.num_sampled)
    mine, theirs = rb.sample(1000), other.sample(1000)
    assert torch.equal(mine["x"], theirs["x"])
    assert torch.equal(mine["priority_weight"], theirs["priority_weight"])
    other.extend(numbers(5000, 3))
    assert other[:]["x"][-3:].tolist() == [5000, 5001, 5002]
    empty = make()
    empty.load_state_dict(make().state_dict())
    assert len(empty) == 0
    with pytest.raises(FileNotFoundError, match="no saved buffer"):
        make().loads(tmp_path / "nothing")


def test_several_tracks_are_saved(tmp_path: Path) -> None:
    rb = filled(LazyTensorStorage, ndim=2)
    for start in range(0, 80, 20):
        rb.extend(TensorDict(x=torch.arange(start, start + 20).repeat(3, 1), batch_size=(3, 20)))
    rb.dumps(tmp_path)
    other = filled(LazyTensorStorage, ndim=2)
    other.loads(tmp_path)
    assert torch.equal(other[:]["x"], rb[:]["x"])
    with pytest.raises(TypeError, match="tensor storage"):
        filled(ListStorage).loads(tmp_path)


_SAVES = """
import os, signal, sys, threading
import torch
from tensordict import TensorDict
from swath.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

path, kind = sys.argv[1:]
if kind == "memmap":
    rb = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=path, existsok=True))
else:
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
start = 0
while True:
    x = torch.arange(start, start + 1000)
    rb.extend(TensorDict(x=x, y=x.unsqueeze(1).expand(1000, 64).clone(), batch_size=1000))
    start += 1000
    if kind == "folder" and start % 5000 == 0:
        rb.dumps(path)
    print(start, flush=True)
"""


@pytest.mark.parametrize("kind", ["memmap", "folder"])
@pytest.mark.parametrize("lines", [3, 17, 150])
def test_what_was_committed_is_there_after_a_kill(kind: str, lines: int, tmp_path: Path) -> None:
    path = tmp_path / "rb"
    with WarmProgram(_SAVES, str(path), kind) as program:
        committed = [int(program.stdout.readline()) for _ in range(lines)][-1]
        program.kill()
        assert program.wait() == -signal.SIGKILL
    if kind == "memmap":
        rb = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=path, existsok=True))
        with pytest.raises(FileExistsError, match="existsok"):
            LazyMemmapStorage(100_000, scratch_dir=path)
    elif committed >= 5000:
        rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
        rb.loads(path)
        committed -= committed % 5000
    else:
        return
    x = rb[:]["x"]
    assert rb.write_count >= committed
    assert x[-1] + 1 == rb.write_count
    assert torch.equal(x, torch.arange(int(x[0]), int(x[-1]) + 1))
    assert torch.equal(rb[:]["y"], x.unsqueeze(1).expand(-1, 64))
    rb.extend(TensorDict(x=x[:10], y=x[:10].unsqueeze(1).expand(10, 64), batch_size=10))
    assert torch.equal(rb[:]["x"][-10:], x[:10])


_FILLS = """
import os
import torch
from tensordict import TensorDict
from swath.data import LazyMemmapStorage, ReplayBuffer
from swath.errors import DiskFull

def rows(count):
    return TensorDict(x=torch.ones(count, 1000, dtype=torch.uint8), batch_size=count)

path, how = sys.argv[1:]
rb = ReplayBuffer(storage=LazyMemmapStorage(600, scratch_dir=path, existsok=True))
if how == "before":
    with open(path + "/other", "wb") as file:
        file.write(bytes(700_000))
    try:
        rb.extend(rows(10))
    except DiskFull as error:
        print(error)
    print(sorted(os.listdir(path)))
else:
    rb.extend(rows(10))
    try:
        with open(path + "/other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(10_000))
    except OSError:
        pass
    rb.extend(rows(600))
    print(len(rb), int(rb[:]["x"].sum()))
"""


def test_who_is_gone_ends_no_trajectory_of_others_in_a_track_that_they_share() -> None:
    frames = TensorDict(
        {"next": {"done": torch.zeros(2, 6, 1, dtype=torch.bool), "truncated": torch.zeros(2, 6, 1, dtype=torch.bool)}},
        batch_size=[2, 6],
    )
    shared, own = (ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
    shared.prepare_tracks(1)
    shared.write_rows(frames.reshape(1, 12))
    shared.end_tracks(0, 1, 2)
    assert not shared[:]["next", "done"].any()
    own.prepare_tracks(2)
    own.write_rows(frames)
    own.end_tracks(1, 1, 2)
    assert own[:]["next", "done"].nonzero()[:, 0].tolist() == [11]


def test_a_buffer_in_a_file_has_its_room_whoever_fills_the_disk(tmp_path: Path) -> None:
    with WarmProgram(ON_A_SMALL_DISK + _FILLS, str(tmp_path), "1000000", str(tmp_path), "after") as program:
        stdout, stderr = program.communicate()
    assert (program.returncode, stdout) == (0, "600 600000\n"), stderr


def test_a_buffer_that_the_disk_has_no_room_for_says_needed_and_free(tmp_path: Path) -> None:
    with WarmProgram(ON_A_SMALL_DISK + _FILLS, str(tmp_path), "1000000", str(tmp_path), "before") as program:
        stdout, stderr = program.communicate()
    assert program.returncode == 0, stderr
    message, left = stdout.splitlines()
    assert re.search(r"needs 600\.\d kB of disk, and \d\d\d\.\d kB are free; lower its max_size", message)
    assert left == "['other']"


@pytest.mark.parametrize("change", ["absolute", "above", "link", "huge", "negative", "dtype", "list", "short"])
def test_a_folder_that_somebody_prepared_is_no_buffer(tmp_path: Path, change: str) -> None:
    outside = tmp_path / "outside.bin"
    folder = tmp_path / "rb"
    ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder)).extend(numbers(0, 8))
    file, frames = folder / "layout.json", folder / "frames-1.bin"
    outside.write_bytes(frames.read_bytes())
    content = json.loads(file.read_text())
    layout = json.loads(content["layout"])
    if change in ("absolute", "above"):
        content["file"] = str(outside) if change == "absolute" else "../outside.bin"
    elif change == "link":
        frames.unlink()
        frames.symlink_to(outside)
    elif change == "huge":
        layout["length"] = 10**18
    elif change == "negative":
        layout["length"], layout["num_tracks"] = -8, -1
    elif change == "dtype":
        layout["fields"][0]["dtype"] = "load"
    elif change == "short":
        frames.write_bytes(frames.read_bytes()[:-1])
    content["layout"] = json.dumps(layout)
    file.write_text(json.dumps([content] if change == "list" else content))
    before = outside.read_bytes(), frames.stat().st_size
    with pytest.raises(ValueError, match="does not hold a buffer"):
        LazyMemmapStorage(8, scratch_dir=folder, existsok=True)
    assert (outside.read_bytes(), frames.stat().st_size) == before


# -- parts that are exchanged ------------------------------------------------------------------------------------------


def test_parts_can_be_exchanged() -> None:
    rb = buffer(10, batch_size=4)
    sampler, writer = SamplerWithoutReplacement(), RoundRobinWriter()
    rb.set_sampler(sampler)
    rb.set_writer(writer)
    rb.set_storage(LazyTensorStorage(20))
    assert (rb.sampler, rb.writer, rb.storage.max_size, rb.batch_size) == (sampler, writer, 20, 4)
    rb.extend(numbers(0, 8))
    with pytest.raises(RuntimeError, match="make another one"):
        rb.set_storage(LazyTensorStorage(30))
    assert repr(rb) == (
        "TensorDictReplayBuffer(LazyTensorStorage, SamplerWithoutReplacement, RoundRobinWriter, 8 of 20 frames)"
    )


def test_draws_follow_a_generator() -> None:
    drawn = []
    for _ in range(2):
        rb = buffer(100, batch_size=16)
        rb.extend(numbers(0, 100))
        rb.set_rng(torch.Generator().manual_seed(3))
        drawn.append(rb.sample()["x"].tolist())
    assert drawn[0] == drawn[1]


def test_transforms_on_the_way_in_and_out() -> None:
    class Shift:
        def __call__(self, data: TensorDict) -> TensorDict:
            return data.set("x", data["x"] + 1)

        def inv(self, data: TensorDict) -> TensorDict:
            return data.set("x", data["x"] - 1)

    rb = buffer(10, batch_size=10).append_transform(Shift())
    rb.extend(numbers(5, 3))
    assert rb[:]["x"].tolist() == [4, 5, 6]
    assert set(rb.sample()["x"].tolist()) <= {5, 6, 7}
    rb.append_transform(lambda td: td.set("x", td["x"] * 2), invert=True)
    rb.extend(TensorDict(x=torch.tensor([50]), batch_size=1))
    assert rb[-1]["x"] == 99  # doubled, then what Shift does to what is written


def test_next_says_once_that_all_was_given() -> None:
    rb = buffer(10, sampler=SamplerWithoutReplacement(), batch_size=5)
    rb.extend(numbers(0, 10))
    got = [rb.next() for _ in range(6)]
    assert [each is None for each in got] == [False, False, True, False, False, True]
    assert sorted(torch.cat([got[3]["x"], got[4]["x"]]).tolist()) == list(range(10))


def test_slices_of_thousands_of_short_episodes() -> None:
    """More than there is room for at first; then most of them are overwritten, and forgotten."""
    rb = buffer(3000, sampler=SliceSampler(slice_len=2, strict_length=True), batch_size=200)
    for round_ in range(8):
        rb.extend(episodes([2, 3] * 250, first_id=500 * round_))
        rows = rb.sample().reshape(-1, 2)
        ids, steps = rows["collector", "traj_ids"], rows["step"]
        assert (ids[:, 0] == ids[:, 1]).all()
        assert (steps[:, 1] == steps[:, 0] + 1).all()
        assert ids.min() >= 500 * round_ - 700


def test_a_slice_s_end_is_marked_also_where_nothing_says_truncated() -> None:
    rb = buffer(50, sampler=SliceSampler(slice_len=4), batch_size=20)
    rb.extend(episodes([10] * 5).exclude(("next", "truncated")))
    ends = rb.sample().reshape(5, 4)["next", "truncated"].squeeze(-1)
    assert ends[:, -1].all()
    assert not ends[:, :-1].any()


# -- rows ------------------------------------------------------------------------------------------------------------


def rows_of(count: int, start: int = 0) -> TensorDict:
    """Rows of 5 steps, with a nested TensorDict of 4 agents each."""
    x = torch.arange(start, start + count).reshape(count, 1, 1).expand(count, 5, 4).clone()
    agents = TensorDict(x=x + 1, batch_size=(count, 5, 4))
    return TensorDict(x=x, agents=agents, batch_size=(count, 5))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_keep_their_batch_size(storage: Any, kind: Any, tmp_path: Path) -> None:
    rb = kind(storage=storage(10), batch_size=2)
    rb.extend(rows_of(3))
    rb.add(rows_of(1, start=3)[0])
    others = [kind(storage=storage(10), batch_size=2) for _ in range(2)]
    rb.dumps(tmp_path)
    others[0].loads(tmp_path, allow_pickle=storage is ListStorage)
    others[1].load_state_dict(rb.state_dict())
    for each in (rb, *others):
        sample = each.sample()
        assert (sample.batch_size, sample["agents"].batch_size) == ((2, 5), (2, 5, 4))
        assert torch.equal(sample["agents", "x"], sample["x"] + 1)
        assert (each[:].batch_size, each[0].batch_size) == ((4, 5), (5,))
        if kind is TensorDictReplayBuffer:
            assert torch.equal(sample["index"], sample["x"][..., 0])


def test_rows_of_another_batch_size_are_refused() -> None:
    rb = buffer(10)
    rb.extend(rows_of(3))
    with pytest.raises(ValueError, match=r"batch size \(5,\).*\(\)"):
        rb.extend(rows_of(3).auto_batch_size_(1))
    flat = rows_of(3)
    flat["agents"].batch_size = (3, 5)
    with pytest.raises(ValueError, match=r"'agents'.*\(5, 4\).*\(5,\)"):
        rb.extend(flat)
    assert len(rb) == 3


def test_a_reopened_memmap_has_rows_of_the_same_batch_size(tmp_path: Path) -> None:
    for round_ in range(2):
        rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True), batch_size=2)
        rb.extend(rows_of(3, start=3 * round_))
        assert (rb.sample().batch_size, rb.sample()["agents"].batch_size) == ((2, 5), (2, 5, 4))
        assert rb[:]["x"][:, 0, 0].tolist() == list(range(3 * round_ + 3))


@pytest.mark.parametrize("storage", STORAGES)
def test_priorities_and_ranks_of_rows(storage: Any) -> None:
    rb = buffer(10, storage, sampler=PrioritizedSampler(10, alpha=1, beta=1), batch_size=40)
    rb.extend(rows_of(4))
    sample = rb.sample()
    assert sample["priority_weight"].shape == (40, 5)
    # Of the priorities of a row's steps the highest counts.
    sample["td_error"] = torch.zeros(40, 5)
    sample["td_error"][:, 2] = (sample["x"][:, 0, 0] == 2).float()
    rb.update_tensordict_priority(sample)
    assert set(rb.sample()["x"][:, 0, 0].tolist()) == {2}
    highest = buffer(2, storage, writer=TensorDictMaxValueWriter(rank_key="x"))
    highest.extend(rows_of(4))
    assert sorted(highest[:]["x"][:, 0, 0].tolist()) == [2, 3]
    assert highest[:].batch_size == (2, 5)


@pytest.mark.parametrize("storage", STORAGES)
def test_highest_values_of_many_envs_are_kept(storage: Any) -> None:
    rb = TensorDictReplayBuffer(storage=storage(6, ndim=2), writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(TensorDict(x=torch.randperm(30).reshape(3, 10), batch_size=(3, 10)))
    assert sorted(rb[:]["x"].tolist()) == list(range(24, 30))


def test_what_is_drawn_of_a_list_is_not_what_is_stored() -> None:
    """Entries of different sizes are a lazy stack, whose members are TensorDicts of their own."""
    rb = buffer(10, ListStorage)
    for length in (3, 5):
        rb.add(TensorDict(x=torch.arange(length), batch_size=length))
    sample = rb.sample(20)
    assert [each["index"].shape == each["x"].shape for each in sample.unbind(0)] == [True] * 20
    for each in (*sample.unbind(0), rb[0], *rb[:].unbind(0)):
        each["x"].zero_()
    assert sorted(rb[1].keys()) == ["x"]
    assert rb[1]["x"].tolist() == [0, 1, 2, 3, 4]


# -- edits -----------------------------------------------------------------------------------------------------------


def test_an_edit_that_was_broken_off_does_not_stop_readers(tmp_path: Path) -> None:
    """By a kill, in a file that is opened again; or by an exception."""

    def opened() -> TensorDictReplayBuffer:
        storage = LazyMemmapStorage(20, scratch_dir=tmp_path, existsok=True)
        return TensorDictReplayBuffer(storage=storage, batch_size=4)

    rb = opened()
    rb.extend(episodes([6, 4]))
    rb.storage.tracks.edits[:] += 1  # what a kill leaves
    del rb
    rb = opened()
    assert rb.sample()["step"].shape == (4,)
    tracks = rb.storage.tracks
    with pytest.raises(KeyboardInterrupt), tracks.editing(0):
        raise KeyboardInterrupt
    assert rb.sample()["step"].shape == (4,)


def test_a_frame_that_a_kill_left_half_overwritten_is_not_delivered(tmp_path: Path) -> None:
    def opened() -> TensorDictReplayBuffer:
        storage = LazyMemmapStorage(4, scratch_dir=tmp_path, existsok=True)
        return TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="x"), batch_size=4)

    rb = opened()
    rb.extend(numbers(0, 4, y=torch.arange(4)))
    kept = rb.storage.tracks.editing(0, slot=1)
    kept.__enter__()  # and a kill
    rb.storage.leaves["x",][1] = 1000  # but not y
    del rb
    rb = opened()
    assert sorted(zip(rb[:]["x"].tolist(), rb[:]["y"].tolist(), strict=True)) == [(0, 0), (2, 2), (3, 3)]
    # It goes on with the values that are there.
    rb.extend(numbers(10, 2, y=torch.arange(10, 12)))
    assert sorted(rb[:]["x"].tolist()) == [2, 3, 10, 11]


@pytest.mark.parametrize("through", ["folder", "state_dict"])
def test_highest_values_are_kept_after_loading(through: str, tmp_path: Path) -> None:
    def make() -> TensorDictReplayBuffer:
        return buffer(5, writer=TensorDictMaxValueWriter(rank_key="x"))

    rb, other = make(), make()
    rb.extend(numbers(0, 8))
    rb.dumps(tmp_path)
    other.loads(tmp_path) if through == "folder" else other.load_state_dict(rb.state_dict())
    other.extend(numbers(2, 4))
    assert sorted(other[:]["x"].tolist()) == [4, 5, 5, 6, 7]


# -- prepared ahead --------------------------------------------------------------------------------------------------


def twins(count: int, size: int = 10, **kwargs: Any) -> list[TensorDictReplayBuffer]:
    """The same buffer, without prefetch and with."""
    return [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(size),
            sampler=SamplerWithoutReplacement(**kwargs),
            batch_size=count,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(3),
        )
        for prefetch in (None, 1, 2, 7)
    ]


def test_an_epoch_with_prefetch_is_what_it_is_without() -> None:
    for rb in twins(5):
        for round_ in range(4):
            rb.extend(numbers(10 * round_, 10))
            batches = [batch["x"] for batch in rb]
            assert [len(batch) for batch in batches] == [5, 5]
            assert sorted(torch.cat(batches).tolist()) == list(range(10 * round_, 10 * round_ + 10))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=25), st.booleans(), st.booleans())
def test_whatever_is_called_prefetch_changes_nothing(calls: list[int], drop_last: bool, shuffle: bool) -> None:
    """Of passes: the same batches in the same order, whatever else is done in between."""
    seen = []
    for rb in twins(4, drop_last=drop_last, shuffle=shuffle):
        rb.extend(numbers(0, 9))
        got: list[Any] = []
        for number, call in enumerate(calls):
            if call < 3:
                got.append(rb.sample()["x"].tolist())
            elif call == 3:
                got.append(rb.sample(5 if len(rb) >= 5 else 2)["x"].tolist())
            elif call == 4:
                rb.extend(numbers(100 * number, number % 7 + 4))
            elif call == 5:
                got.append([batch["x"].tolist() for batch in rb])
            elif call == 6:
                batch = rb.next()
                got.append(None if batch is None else batch["x"].tolist())
            elif call == 7:
                rb.load_state_dict(rb.state_dict())
            elif call == 8:
                rb.empty()
                rb.extend(numbers(100 * number, 9))
            else:
                batch, info = rb.sample(return_info=True)
                got.append((batch["x"].tolist(), info["index"].tolist()))
        seen.append((got, rb.num_sampled))
    assert seen[1:] == seen[:1] * 3


class FailsOnce:
    """A transform that raises the n-th time it is called."""

    def __init__(self, error: type[BaseException], n: int) -> None:
        self._error = error
        self._left = n

    def __call__(self, data: TensorDict) -> TensorDict:
        self._left -= 1
        if not self._left:
            raise self._error("once")
        return data


@pytest.mark.parametrize("prefetch", [None, 1, 2, 7])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.timeout(60)
def test_a_sample_that_fails_is_lost_to_no_pass(prefetch: int | None, error: type[BaseException]) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SamplerWithoutReplacement(),
        batch_size=3,
        prefetch=prefetch,
        transform=FailsOnce(error, 3),
    )
    rb.extend(TensorDict(x=torch.arange(12), batch_size=12))
    seen: list[int] = []
    for _ in range(4 if prefetch else 5):  # where the thread failed, the caller draws it again, and does not
        with suppress(error):
            seen += rb.sample()["x"].tolist()
    assert sorted(seen) == list(range(12))


def test_counters_that_are_as_they_were_have_not_been_otherwise() -> None:
    tracks = Tracks(np.zeros((NUM_COUNTERS, 2), dtype=np.int64), 5)
    tracks.begin(slice(0, 2), 4)
    tracks.commit(slice(0, 2), 4)
    window, slots = tracks.window(), np.arange(4)
    assert tracks.unchanged(window)
    assert tracks.intact(window, slots).all()
    with tracks.editing(1):
        during = tracks.window()
        assert not tracks.unchanged(window)
        assert not tracks.unchanged(during)
        assert tracks.intact(window, slots).all()
        assert not tracks.intact(during, slots + 5).any()
    assert not tracks.unchanged(window)
    for change in (lambda: tracks.begin(slice(0, 1), 3), lambda: tracks.commit(slice(0, 1), 3), tracks.clear):
        window = tracks.window()
        change()
        assert not tracks.unchanged(window)


def test_nothing_that_was_overwritten_is_given_out_with_prefetch() -> None:
    rb = buffer(10, batch_size=4, prefetch=3)
    with pytest.raises(RuntimeError, match="empty"):
        rb.sample()
    for round_ in range(20):
        rb.extend(numbers(10 * round_, 10))
        for _ in range(4):
            assert rb.sample()["x"].min() >= 10 * round_
    rb.append_transform(lambda data: data.set("y", data["x"] + 1))
    assert "y" in rb.sample()
    rb.empty()
    with pytest.raises(RuntimeError, match="empty"):
        rb.sample()


def test_a_pass_loses_nothing_when_it_is_saved(tmp_path: Path) -> None:
    for rb in twins(4, size=20):
        rb.extend(numbers(0, 18))
        before = [rb.sample()["x"] for _ in range(2)]
        rb.dumps(tmp_path)
        other = buffer(20, sampler=SamplerWithoutReplacement(), batch_size=4)
        other.loads(tmp_path)
        for each in (rb, other):
            assert sorted(torch.cat([*before, *(batch["x"] for batch in each)]).tolist()) == list(range(18))


def test_no_frame_is_twice_in_a_sample_without_replacement_while_others_write() -> None:
    rb = buffer(64, sampler=SamplerWithoutReplacement(), batch_size=48)
    rb.extend(numbers(0, 64))
    stop = threading.Event()

    def write() -> None:
        start = 64
        while not stop.is_set():
            rb.extend(numbers(start, 3))
            start += 3

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            batch = rb.sample()["x"]
            assert len(batch.unique()) == len(batch)
    finally:
        stop.set()
        writer.join()
