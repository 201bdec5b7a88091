"""The surface of replay buffers beside TorchRL's own: the same calls give the same; needs the extra `torchrl`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import swath.data
from swath.collectors.utils import split_trajectories

pytestmark = [pytest.mark.torchrl, pytest.mark.filterwarnings("ignore")]
theirs = pytest.importorskip("torchrl.data")
their_utils = pytest.importorskip("torchrl.collectors.utils")
BOTH = (swath.data, theirs)


def numbers(count: int, first: int = 0) -> Any:
    x = torch.arange(first, first + count)
    return TensorDict(x=x, y=x[:, None].float().repeat(1, 2), batch_size=count)


def assert_same(ours: Any, other: Any) -> None:
    assert set(ours.keys(True, True)) == set(other.keys(True, True))
    assert ours.batch_size == other.batch_size
    for key in ours.keys(True, True):
        assert torch.equal(ours[key], other[key]), key


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize(
    ("index", "data"),
    [
        (0, numbers(1, 90)[0]),
        (slice(2, 5), numbers(3, 90)),
        (torch.tensor([3, 1]), numbers(2, 90)),
        ([4, 0], numbers(2, 90)),
        (1, numbers(1, 90).select("x")[0]),
    ],
    ids=str,
)
def test_setitem(storage: str, index: Any, data: Any) -> None:
    made = []
    for module in BOTH:
        rb = module.ReplayBuffer(storage=getattr(module, storage)(20), batch_size=4)
        rb.extend(numbers(10))
        rb[index] = data
        made.append(rb[:])
    assert_same(*made)


def test_set_and_set_at_and_update() -> None:
    made = []
    for module in BOTH:
        rb = module.ReplayBuffer(storage=module.LazyTensorStorage(20), batch_size=4)
        rb.extend(numbers(10))
        rb.set_("x", torch.arange(10) * 3)
        rb.set_at_("x", torch.tensor([-1, -2]), [0, 4])
        rb.update_(TensorDict(y=torch.ones(10, 2), batch_size=10))
        made.append(rb[:])
    assert_same(*made)


def test_storage_set_and_storage_getitem() -> None:
    made = []
    for module in BOTH:
        storage = module.LazyTensorStorage(10)
        storage.set(range(4), numbers(4))
        storage.set(4, numbers(1, 40)[0])
        storage[1] = numbers(1, 10)[0]
        made.append((storage[:], storage.get(2), storage[1:3], len(storage)))
    ours, other = made
    for mine, their in zip(ours[:3], other[:3], strict=True):
        assert_same(mine, their)
    assert ours[3] == other[3]


def test_tensor_storage() -> None:
    made = []
    for module in BOTH:
        rb = module.ReplayBuffer(storage=module.TensorStorage(numbers(6)), batch_size=4)
        rb[2] = numbers(1, 20)[0]
        made.append(rb[:])
        assert (len(rb), rb.sample().shape) == (6, (4,))
    assert_same(*made)


def test_append_transform_inverted_and_insert_transform() -> None:
    made = []
    for module in BOTH:
        rb = module.ReplayBuffer(storage=module.LazyTensorStorage(20), batch_size=30)
        rb.append_transform(lambda td: td.set("x", td["x"] + 1), invert=True)
        rb.extend(numbers(3))
        made.append((rb[:], sorted(set(rb.sample()["x"].tolist()))))
    assert_same(made[0][0], made[1][0])
    assert made[0][1] == made[1][1] == [1, 2, 3]


def test_plain_dicts() -> None:
    made = []
    for module in BOTH:
        rb = module.ReplayBuffer(storage=module.LazyTensorStorage(20), batch_size=4)
        index = rb.extend({"a": torch.arange(5), "b": {"c": torch.zeros(5, 2)}})
        rb.add({"a": torch.tensor(7), "b": {"c": torch.ones(2)}})
        found = rb[:]
        made.append((index.tolist(), len(rb), found["a"].tolist(), found["b"]["c"].tolist()))
    assert made[0] == made[1]


def test_slice_sampler_pad_output() -> None:
    """Which slices are drawn is up to chance; what each of them is, is not."""
    data = TensorDict(
        x=torch.arange(6),
        traj=torch.tensor([0, 0, 1, 1, 1, 1]),
        is_init=torch.tensor([1, 0, 1, 0, 0, 0]).bool()[:, None],
        next=TensorDict(
            done=torch.tensor([0, 1, 0, 0, 0, 0]).bool()[:, None],
            terminated=torch.zeros(6, 1).bool(),
            truncated=torch.zeros(6, 1).bool(),
            batch_size=6,
        ),
        batch_size=6,
    )
    keys = ["x", "is_init", ("next", "done"), ("next", "truncated"), ("collector", "mask")]
    found: list[set[str]] = []
    for module in BOTH:
        sampler = module.SliceSampler(slice_len=4, traj_key="traj", strict_length=False, pad_output=True)
        rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(20), sampler=sampler, batch_size=160)
        rb.extend(data)
        rows = rb.sample().select(*keys).reshape(40, 4)
        found.append({str([row[key].reshape(-1).int().tolist() for key in keys]) for row in rows})
    assert found[0] == found[1]


def test_slice_sampler_end_keys() -> None:
    data = TensorDict(
        x=torch.arange(6),
        one=torch.tensor([0, 1, 0, 0, 0, 1]).bool(),
        two=torch.tensor([0, 0, 0, 1, 0, 0]).bool(),
        batch_size=6,
    )
    found: list[set[tuple[int, ...]]] = []
    for module in BOTH:
        sampler = module.SliceSampler(slice_len=2, end_keys=["one", "two"])
        rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(6), sampler=sampler, batch_size=80)
        rb.extend(data)
        found.append({tuple(row) for row in rb.sample()["x"].reshape(40, 2).tolist()})
    assert found[0] == found[1] == {(0, 1), (2, 3), (4, 5)}


# (Of a number at the right TorchRL takes one less; with True there, it fails where a slice has no frame at all.)
@pytest.mark.parametrize("span", [False, 2, (1, False), (True, False)])
def test_slice_sampler_span(span: Any) -> None:
    data = TensorDict(x=torch.arange(6), traj=torch.zeros(6).long(), batch_size=6)
    found: list[set[tuple[int, ...]]] = []
    for module in BOTH:
        sampler = module.SliceSampler(slice_len=4, traj_key="traj", span=span)
        rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(6), sampler=sampler, batch_size=4)
        rb.extend(data)
        found.append({tuple(rb.sample()["x"].tolist()) for _ in range(300)})
    assert found[0] == found[1] | ({(4, 5)} if span == 2 else set())


def test_slice_sampler_without_replacement() -> None:
    data = TensorDict(x=torch.arange(30), traj=torch.arange(10).repeat_interleave(3), batch_size=30)
    found = []
    for module in BOTH:
        sampler = module.SliceSamplerWithoutReplacement(slice_len=3, traj_key="traj", shuffle=False)
        rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(30), sampler=sampler, batch_size=12)
        rb.extend(data)
        found.append([sample["x"].tolist() for sample in rb])
    assert found[0] == found[1]


# (Where every row is a trajectory, TorchRL's are not nested.)
@pytest.mark.parametrize("ids", [[[0, 0, 0, 1], [2, 2, 3, 3]], [[0, 0, 1, 1], [2, 2, 3, 3]], [[0, 1, 2, 3], [4] * 4]])
def test_split_trajectories_as_nested(ids: list[list[int]]) -> None:
    about = TensorDict(traj_ids=torch.tensor(ids), batch_size=[2, 4])
    flags = TensorDict(done=torch.zeros(2, 4, 1).bool(), batch_size=[2, 4])
    batch = TensorDict(x=torch.randn(2, 4, 3), collector=about, next=flags, batch_size=[2, 4])
    made: Any = [split(batch.clone(), as_nested=True) for split in (split_trajectories, their_utils.split_trajectories)]
    assert made[0].batch_size == made[1].batch_size
    assert_same(*[each.to_padded_tensor(mask_key="mask") for each in made])


def test_can_sample() -> None:
    """(TorchRL's sampler with priorities cannot be made with every torch: its tree of sums is C++.)"""
    made = []
    for module in BOTH:
        rb = module.ReplayBuffer(storage=module.LazyTensorStorage(8), batch_size=2)
        found = [rb.can_sample()]
        rb.extend(numbers(3))
        made.append([*found, rb.can_sample()])
    assert made[0] == made[1] == [False, True]
