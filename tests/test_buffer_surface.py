"""Replay buffers as users of TorchRL know them: frames by index, changed in place, dicts, transforms, padded slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from counting import make_counting
from swath.collectors import Collector, MultiSyncCollector
from swath.collectors.utils import split_trajectories
from swath.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


def numbers(count: int, first: int = 0) -> Any:
    x = torch.arange(first, first + count)
    return TensorDict(x=x, y=x[:, None].float().repeat(1, 2), batch_size=count)


def filled(storage: Any = LazyTensorStorage, count: int = 10, **kwargs: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=storage(20), batch_size=4, **kwargs)
    rb.extend(numbers(count))
    return rb


def x_of(rb: Any) -> list[int]:
    return rb[:]["x"].tolist()


# -- rb[i] = td --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, [0]),
        (-1, [9]),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, 3), [0, 3, 6, 9]),
        ([7, 1], [7, 1]),
        (torch.tensor([7, 1]), [7, 1]),
        (torch.tensor(4), [4]),
        (np.array([3]), [3]),
        (range(2, 4), [2, 3]),
        (torch.arange(10) > 7, [8, 9]),
        (torch.zeros(10, dtype=torch.bool), []),
    ],
    ids=str,
)
def test_setitem(storage: Any, index: Any, changed: list[int]) -> None:
    rb = filled(storage)
    new = numbers(len(changed), 100)
    is_one = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.ndim)
    rb[index] = new[0] if is_one else new
    expected = list(range(10))
    for number, place in enumerate(changed):
        expected[place] = 100 + number
    assert x_of(rb) == expected
    assert rb[:]["y"][:, 1].tolist() == expected
    assert (len(rb), rb.write_count) == (10, 10)
    if changed:
        read = rb[index]
        assert torch.equal(read["x"], new[0]["x"] if is_one else new["x"])


@pytest.mark.parametrize("storage", STORAGES)
def test_setitem_of_a_full_buffer_means_what_getitem_does(storage: Any) -> None:
    rb = filled(storage, 20)
    index = rb.extend(numbers(5, 20))
    rb[0] = numbers(1, 500)[0]
    rb[index] = numbers(5, 700)
    assert x_of(rb) == [500, *range(6, 20), *range(700, 705)]


@pytest.mark.parametrize(
    ("index", "data", "error", "says"),
    [
        (10, numbers(1)[0], IndexError, "there is no frame 10: the buffer has 10"),
        (-11, numbers(1)[0], IndexError, "there is no frame -11"),
        (torch.tensor([15]), numbers(1), IndexError, "there is no frame 15"),
        (torch.tensor([99]), numbers(1), IndexError, "there is no frame 99"),
        (torch.tensor([-1]), numbers(1), IndexError, r"rb\[-1\]"),
        (torch.ones(3, dtype=torch.bool), numbers(3), IndexError, "a mask of shape"),
        ((0, 1), numbers(1), TypeError, "one dimension"),
        (torch.tensor([0.5]), numbers(1), TypeError, "integers"),
        ([0, 1], numbers(3), ValueError, "for 2 frames"),
        ([0, 1], numbers(1)[0], ValueError, "for 2 frames"),
        ([0], {"x": torch.tensor([1.0])}, ValueError, "'x': the buffer was laid out for torch.int64"),
        ([0], {"y": torch.zeros(1, 3)}, ValueError, "'y': the buffer was laid out"),
        ([0], {"z": torch.zeros(1)}, KeyError, "'z' is not among the keys"),
        ([0], torch.zeros(1), KeyError, "not among the keys"),
    ],
    ids=str,
)
def test_setitem_refuses(index: Any, data: Any, error: type[Exception], says: str) -> None:
    rb = filled()
    with pytest.raises(error, match=says):
        rb[index] = data
    assert x_of(rb) == list(range(10))
    assert rb.sample().shape == (4,)


def test_setitem_of_some_keys_and_of_a_frame_twice() -> None:
    rb = filled()
    rb[1] = {"x": torch.tensor(50)}
    rb[[2, 2]] = TensorDict(x=torch.tensor([60, 61]), batch_size=2)
    rb["x"] = rb["x"] + 1
    assert x_of(rb) == [1, 51, 62, 4, 5, 6, 7, 8, 9, 10]
    assert rb[:]["y"][:, 0].tolist() == list(range(10))


def test_setitem_of_an_empty_buffer() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    with pytest.raises(IndexError, match="empty"):
        rb[0] = numbers(1)[0]


def test_reading_what_was_never_written() -> None:
    rb = filled()
    with pytest.raises(IndexError, match="there is no frame 12"):
        rb[torch.tensor([3, 12])]


# -- set_, set_at_, update_ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_set_and_set_at_and_update(storage: Any) -> None:
    rb = filled(storage)
    assert rb.set_("x", torch.arange(10) * 2) is rb
    rb.set_at_("x", torch.tensor([-1, -2]), [0, 3])
    assert x_of(rb) == [-1, 2, 4, -2, 8, 10, 12, 14, 16, 18]
    rb.update_({"x": torch.zeros(10, dtype=torch.int64), "y": torch.ones(10, 2)}, keys_to_update=["y"])
    assert x_of(rb)[1] == 2
    assert bool((rb[:]["y"] == 1).all())
    with pytest.raises(ValueError, match="'x'"):
        rb.set_("x", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(KeyError, match="'z'"):
        rb.set_("z", torch.zeros(10))


# -- storage.set, storage[i], TensorStorage ----------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_storage_set_and_storage_getitem(storage: Any) -> None:
    kept = storage(10)
    kept.set(range(4), numbers(4))
    kept.set(4, numbers(1, 40)[0])
    kept[0] = numbers(1, 100)[0]
    kept.set(range(3, 7), numbers(4, 30))
    assert (len(kept), kept.shape) == (7, (7,))
    assert [int(frame["x"]) for frame in kept] == [100, 1, 2, 30, 31, 32, 33]
    assert int(kept.get(-1)["x"]) == 33
    assert kept.contains(6)
    assert not kept.contains(7)
    for index in (8, range(6, 11)):
        with pytest.raises(IndexError, match="right behind"):
            kept.set(index, numbers(1)[0] if isinstance(index, int) else numbers(5))
    assert len(ReplayBuffer(storage=kept, batch_size=7).sample()) == 7


def test_tensor_storage() -> None:
    data = TensorDict(x=torch.arange(12).reshape(3, 4), batch_size=[3, 4])
    rows, frames = TensorStorage(data), TensorStorage(data, ndim=2)
    assert (len(rows), len(frames)) == (3, 12)
    assert rows[1]["x"].tolist() == [4, 5, 6, 7]
    rb = ReplayBuffer(storage=rows, batch_size=2)
    assert rb.sample().shape == (2, 4)
    assert rb.extend(data[1:2]).tolist() == [0]
    assert rb[torch.tensor(0)]["x"].tolist() == [4, 5, 6, 7]
    assert data["x"][0].tolist() == [0, 1, 2, 3]
    assert len(TensorStorage(torch.zeros(5, 2))[:2]) == 2
    with pytest.raises(ValueError, match="or else max_size"):
        TensorStorage(data, 7)
    with pytest.raises(ValueError, match="or else max_size"):
        TensorStorage(None)


def test_tensor_storage_of_a_plain_dict() -> None:
    storage = TensorStorage({"x": torch.arange(4), "y": {"z": torch.ones(4, 2)}})
    assert len(storage) == 4
    assert storage[1]["x"] == 1
    assert storage[:]["y", "z"].shape == (4, 2)
    by_env = TensorStorage({"x": torch.arange(6).reshape(2, 3)}, ndim=2)
    assert by_env[:]["x"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_frames_of_many_shapes_are_refused_by_key_and_a_list_storage_takes_them(stack_dim: int) -> None:
    parts = [TensorDict({"n": {"x": torch.ones(5, length, 2)}}, [5]) for length in (3, 4)]
    whole = [part[0] for part in parts] if stack_dim == 0 else parts
    ragged: Any = LazyStackedTensorDict(*whole, stack_dim=stack_dim)
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(ValueError, match=r"\('n', 'x'\) is not of one shape in all frames.*ListStorage"):
        rb.extend(ragged)
    assert len(rb) == 0
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    rb.extend(ragged)
    assert len(rb) == len(ragged)


def test_a_tensor_that_is_refused_leaves_a_storage_of_tensordicts_as_it_was() -> None:
    rb = filled()
    with pytest.raises(KeyError):
        rb.extend(torch.zeros(3))
    assert sorted(rb.sample().keys()) == ["x", "y"]


# -- who must know -----------------------------------------------------------------------------------------------------


def test_prioritized_sampler_after_setitem() -> None:
    """A frame that was replaced is new: with the highest priority, and with none that was meant for the old one."""
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), batch_size=64)
    rb.extend(numbers(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 2.0, 0.0, 0.0]))
    before = rb.sample()
    assert set(before["x"].tolist()) == {1}
    rb[3] = numbers(1, 30)[0]
    assert set(rb.sample()["x"].tolist()) == {1, 30}
    sampled = rb.sample()
    rb[sampled["index"]] = sampled  # with the index and the weights that it has as a sample
    rb[1] = numbers(1, 10)[0]
    before["td_error"] = torch.zeros(64)
    rb.update_tensordict_priority(before)
    assert 10 in rb.sample()["x"].tolist()
    rb.set_at_("y", torch.zeros(1, 2), [0])  # the same frame: its priority is what it was
    assert 0 not in rb.sample()["x"].tolist()


def test_prioritized_sampler_after_a_max_value_writer_has_replaced_a_frame() -> None:
    """As of any frame that is new: no priority that was meant for the one before."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyTensorStorage(4),
        writer=TensorDictMaxValueWriter(rank_key="x"),
        batch_size=64,
    )
    rb.extend(numbers(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 2.0, 0.0, 0.0]))
    before = rb.sample()
    assert set(before["x"].tolist()) == {1}
    rb.extend(numbers(1, 30))  # instead of 0, which had a priority of 0
    assert set(rb.sample()["x"].tolist()) == {1, 30}
    rb.extend(numbers(1, 31))  # instead of 1, of which a sample is out
    before["td_error"] = torch.zeros(64)
    rb.update_tensordict_priority(before)
    assert 31 in rb.sample()["x"].tolist()
    later = rb.sample()
    later["td_error"] = torch.where(later["x"] == 31, 0.0, 1.0)
    rb.update_tensordict_priority(later)
    assert 31 not in rb.sample()["x"].tolist()
    rb.add(numbers(1, 1)[0])  # lower than all that are there: it replaces none
    assert 31 not in rb.sample()["x"].tolist()


def test_slices_after_setitem() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=4, traj_key="t"), batch_size=4)
    rb.extend(TensorDict(x=torch.arange(8), t=torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]), batch_size=8))
    assert rb.sample()["x"].tolist() == [0, 1, 2, 3]
    rb.set_("t", torch.tensor([0, 0, 1, 1, 2, 2, 2, 2]))
    assert rb.sample()["x"].tolist() == [4, 5, 6, 7]


def test_prefetched_samples_after_setitem() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, prefetch=4)
    rb.extend(numbers(4))
    rb.sample()
    rb[:] = numbers(4, 100)
    for _ in range(8):
        assert min(rb.sample()["x"].tolist()) >= 100


def test_max_value_writer_after_setitem() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="x"), batch_size=3)
    rb.extend(numbers(3, 10))
    rb[0] = numbers(1, 100)[0]
    rb.extend(numbers(2, 50))
    assert sorted(x_of(rb)) == [50, 51, 100]


def test_immutable_writer_refuses_setitem() -> None:
    rb = ReplayBuffer(storage=TensorStorage(numbers(3)), writer=ImmutableDatasetWriter())
    for change in (lambda: rb.__setitem__(0, numbers(1)[0]), lambda: rb.set_("x", torch.zeros(3).long())):
        with pytest.raises(RuntimeError, match="only read"):
            change()
    with pytest.raises(RuntimeError, match="only read"):
        rb.storage.set(0, numbers(1)[0])


def test_setitem_is_saved_and_loaded(tmp_path: Path) -> None:
    rb = filled(sampler=PrioritizedSampler(20, 1.0, 1.0))
    rb.update_priority(torch.arange(10), torch.zeros(10))
    rb[4] = numbers(1, 40)[0]
    rb.save(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0), batch_size=4)
    other.loads(tmp_path)
    assert x_of(other) == x_of(rb)
    assert other.sample()["x"].tolist() == [40] * 4
    other[0] = numbers(1, 7)[0]
    assert x_of(other)[0] == 7


def test_setitem_while_a_thread_collects() -> None:
    """Frames are whole: what was set is there, or what the collector wrote over it."""
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=50)
    collector = Collector(lambda: make_counting(9), frames_per_batch=10, total_frames=5000, replay_buffer=rb)
    collector.start()
    first = rb.sample(10, wait=True)
    keys = [key for key in first.keys(True, True) if first[key].dtype.is_floating_point]
    for _ in range(50):
        rb[0] = first[0].apply(lambda leaf: torch.full_like(leaf, -7.0) if leaf.dtype.is_floating_point else leaf)
        sampled = rb.sample()
        is_set = torch.stack([(sampled[key].reshape(50, -1) == -7).all(1) for key in keys])
        assert bool((is_set.all(0) | ~is_set.any(0)).all())
    collector.async_shutdown()


@pytest.mark.processes
def test_setitem_while_workers_write() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    collector = MultiSyncCollector([lambda: make_counting(9)] * 2, frames_per_batch=20, replay_buffer=rb)
    collector.start()
    frame = rb.sample(wait=True)[0]
    for change in (lambda: rb.__setitem__(0, frame), lambda: rb.storage.set(0, frame)):
        with pytest.raises(RuntimeError, match=r"workers are writing to this buffer.*pause"):
            change()
    with collector.pause():
        rb[0] = frame
        assert bool((rb[0] == frame).all())
    collector.async_shutdown()


# -- dicts -------------------------------------------------------------------------------------------------------------


def test_plain_dicts() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    assert rb.extend({"a": torch.arange(5), "b": {"c": np.zeros((5, 2))}}).tolist() == [0, 1, 2, 3, 4]
    assert int(rb.add({"a": torch.tensor(7), "b": {"c": np.ones(2)}})) == 5
    rb.extend([{"a": 8, "b": {"c": np.ones(2)}}] * 2)
    assert rb[:]["a"].tolist() == [0, 1, 2, 3, 4, 7, 8, 8]
    assert rb.sample()["b", "c"].shape == (4, 2)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    other.extend({"a": torch.arange(5)})
    assert sorted(other.sample().keys()) == ["a", "index"]
    with pytest.raises(ValueError, match="a dict of frames"):
        rb.extend({"a": torch.arange(5), "b": {"c": np.zeros((4, 2))}})
    with pytest.raises(ValueError, match="a dict of frames"):
        rb.extend({"a": [[1, 2], [3]]})


# -- transforms --------------------------------------------------------------------------------------------------------


def plus(count: int) -> Any:
    return lambda td: td.set("x", td["x"] + count)


def test_insert_transform() -> None:
    rb = filled()
    rb.append_transform(lambda td: td.set("x", td["x"] * 10))
    assert rb.insert_transform(0, plus(1)) is rb
    assert set(rb.sample()["x"].tolist()) <= {10 * (i + 1) for i in range(10)}
    rb.insert_transform(-1, plus(1))
    assert len(rb.transform) == 3
    assert set(rb.sample()["x"].tolist()) <= {10 * (i + 2) for i in range(10)}
    for index in (4, -4):
        with pytest.raises(ValueError, match="inserted"):
            rb.insert_transform(index, plus(1))


class Doubling:
    def __call__(self, td: Any) -> Any:
        return td.set("x", td["x"] * 2)

    def inv(self, td: Any) -> Any:
        return td.set("x", td["x"] // 2)


def test_append_transform_inverted() -> None:
    rb = filled()
    rb.append_transform(plus(100), invert=True)
    rb.extend(numbers(1, 10))
    given = numbers(1, 50)[0]
    rb[0] = given
    assert x_of(rb) == [150, *range(1, 10), 110]
    assert int(given["x"]) == 50
    assert set(rb.sample(50)["x"].tolist()) <= set(x_of(rb))
    both = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=5)
    both.append_transform(Doubling(), invert=True)
    both.extend(numbers(3))
    assert x_of(both) == [0, 2, 4]
    assert set(both.sample()["x"].tolist()) <= {0, 1, 2}
    with pytest.raises(TypeError, match="without invert=True"):
        rb.append_transform(MultiStepTransform(n_steps=3, gamma=0.9), invert=True)


def test_setitem_where_a_transform_looks_ahead() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(n_steps=3, gamma=0.9), batch_size=4)
    for _ in Collector(lambda: make_counting(9), frames_per_batch=10, total_frames=10, replay_buffer=rb):
        pass
    with pytest.raises(TypeError, match="MultiStepTransform needs the frames behind one"):
        rb[0] = rb[0]
    rb.storage.set(0, rb[1])
    assert bool((rb[0] == rb[1]).all())


# -- slices ------------------------------------------------------------------------------------------------------------


def slices(**kwargs: Any) -> ReplayBuffer:
    sampler = SliceSampler(slice_len=4, strict_length=False, **kwargs)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=40)
    flags = TensorDict(done=torch.tensor([0, 1, 0, 0, 0, 0, 1]).bool()[:, None], batch_size=7)
    cut = torch.tensor([0, 0, 0, 0, 1, 0, 0]).bool()
    is_init = torch.tensor([1, 0, 1, 0, 0, 1, 0]).bool()[:, None]
    rb.extend(TensorDict(x=torch.arange(7), cut=cut, is_init=is_init, next=flags, batch_size=7))
    return rb


def test_slice_sampler_pad_output() -> None:
    sample = slices(end_keys=[("next", "done"), "cut"], pad_output=True).sample()
    rows = sample.reshape(10, 4)
    expected = {
        (0, 1, 1, 1): (2, [1, 0, 0, 0]),
        (2, 3, 4, 4): (3, [1, 0, 0, 0]),
        (5, 6, 6, 6): (2, [1, 0, 0, 0]),
    }
    assert {tuple(row) for row in rows["x"].tolist()} <= expected.keys()
    for row in rows:
        length, starts = expected[tuple(row["x"].tolist())]
        assert row["collector", "mask"].tolist() == [step < length for step in range(4)]
        assert row["next", "truncated"].reshape(-1).nonzero().tolist() == [[length - 1]]
        assert row["is_init"].reshape(-1).int().tolist() == starts
    with pytest.raises(ValueError, match="strict_length=False"):
        SliceSampler(slice_len=4, pad_output=True)


def test_slice_sampler_end_keys() -> None:
    sample = slices(end_keys=[("next", "done"), "cut"]).sample()
    behind = sample["next", "truncated"].reshape(-1).nonzero().reshape(-1).tolist()
    found = {tuple(part.tolist()) for part in sample["x"].tensor_split([end + 1 for end in behind]) if len(part)}
    assert found <= {(0, 1), (2, 3, 4), (5, 6)}
    with pytest.raises(TypeError, match="not both"):
        SliceSampler(slice_len=4, end_key="cut", end_keys=["cut"])
    with pytest.raises(KeyError, match="'a' or 'b'"):
        slices(end_keys=["a", "b"]).sample()


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_slice_sampler_with_both_keys_takes_the_end_where_there_is_no_trajectory_key() -> None:
    x = torch.arange(20)
    data = TensorDict({"x": x, "over": (x % 5 == 4)[:, None]}, batch_size=20)

    def sample(**kwargs: Any) -> Any:
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=3, **kwargs), batch_size=30)
        rb.extend(data)
        return rb.sample()

    x = sample(traj_key="episode", end_key="over").reshape(10, 3)["x"]
    assert (x // 5 == x[:, :1] // 5).all()
    for keys in ({"traj_key": "episode"}, {"traj_key": "episode", "end_key": "ovr"}):
        with pytest.raises(KeyError, match="no 'episode' in the buffer"):
            sample(**keys)


def test_prioritized_replay_buffer() -> None:
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), batch_size=16)
    rb.extend(torch.arange(5))
    rb.update_priority(torch.arange(5), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]))
    sample, info = rb.sample(return_info=True)
    assert set(sample.tolist()) == {3}
    assert info["priority_weight"].shape == (16,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_split_trajectories_as_nested() -> None:
    ids = torch.tensor([[0, 0, 0, 1], [2, 2, 3, 3]])
    batch = TensorDict(
        x=torch.arange(8).reshape(2, 4), collector=TensorDict(traj_ids=ids, batch_size=[2, 4]), batch_size=[2, 4]
    )
    split: Any = split_trajectories(batch, as_nested=True)
    assert split.batch_size == (4, -1)
    padded = split.to_padded_tensor(mask_key="mask")
    assert padded["x"].tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0], [6, 7, 0]]
    assert padded["mask"].sum(1).tolist() == [3, 1, 2, 2]
    whole: Any = split_trajectories(batch[:, :2], as_nested=True)  # all of one length
    assert whole.batch_size == (2, -1)
    assert whole.to_padded_tensor(mask_key="mask")["mask"].all()
