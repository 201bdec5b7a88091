"""Slices that reach over the ends of trajectories, and those without replacement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from swath.data import LazyTensorStorage, SliceSampler, SliceSamplerWithoutReplacement, TensorDictReplayBuffer


def buffer(lengths: list[int], batch_size: int, sampler: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=batch_size)
    rb.extend(
        TensorDict(
            traj=torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)]),
            step=torch.cat([torch.arange(length) for length in lengths]),
            batch_size=sum(lengths),
        )
    )
    return rb


def slices(rb: TensorDictReplayBuffer) -> list[tuple[int, int, int]]:
    """Trajectory, first step and length of each slice of a sample."""
    sample = rb.sample()
    ends = sample["next", "truncated"].reshape(-1).nonzero().reshape(-1).tolist()
    found = []
    first = 0
    for end in ends:
        traj, step = sample["traj"][first : end + 1], sample["step"][first : end + 1]
        assert (traj == traj[0]).all()
        assert (step == step[0] + torch.arange(len(step))).all()
        found.append((int(traj[0]), int(step[0]), len(step)))
        first = end + 1
    assert first == len(sample)
    return found


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (False, {(0, 4), (1, 4), (2, 4)}),
        ((False, True), {(0, 4), (1, 4), (2, 4), (3, 3), (4, 2), (5, 1)}),
        ((True, False), {(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 4)}),
        (True, {(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 4), (3, 3), (4, 2), (5, 1)}),
        (1, {(0, 3), (0, 4), (1, 4), (2, 4), (3, 3)}),
        ((0, 2), {(0, 4), (1, 4), (2, 4), (3, 3), (4, 2)}),
    ],
)
def test_span(span: Any, expected: set[tuple[int, int]]) -> None:
    rb = buffer([6], 400, SliceSampler(slice_len=4, traj_key="traj", span=span))
    assert {(first, length) for _, first, length in slices(rb)} == expected


def test_span_draws_all_frames_alike() -> None:
    rb = buffer([6], 40_000, SliceSampler(slice_len=4, traj_key="traj", span=True))
    shares = torch.bincount(rb.sample()["step"]).float()
    assert torch.allclose(shares / shares.mean(), torch.ones(6), atol=0.05)
    rb.sampler.span = (False, False)  # type: ignore[attr-defined]
    shares = torch.bincount(rb.sample()["step"]).float()
    assert shares[0] < shares.mean() * 0.6


def test_span_of_short_trajectories_and_padding() -> None:
    how: dict[str, Any] = {"slice_len": 4, "traj_key": "traj", "span": (False, True)}
    found = slices(buffer([2, 6], 400, SliceSampler(strict_length=False, **how)))
    assert {(first, length) for traj, first, length in found if traj == 0} == {(0, 2), (1, 1)}
    sample = buffer([6], 400, SliceSampler(pad_output=True, **how)).sample().reshape(100, 4)
    assert (sample["collector", "mask"].sum(1) == (6 - sample["step"][:, 0]).clamp(max=4)).all()


def test_span_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least one must be inside"):
        buffer([6], 4, SliceSampler(slice_len=4, traj_key="traj", span=4)).sample()


def test_every_trajectory_once() -> None:
    sampler = SliceSamplerWithoutReplacement(slice_len=3, traj_key="traj")
    rb = buffer([5, 2, 3, 9, 4, 7], 6, sampler)
    for _ in range(20):
        passes = list(iter_slices(rb))
        assert [len(each) for each in passes] == [2, 2, 1]
        assert sorted(traj for each in passes for traj, _, _ in each) == [0, 2, 3, 4, 5]
    rb.extend(TensorDict(traj=torch.full((3,), 6), step=torch.arange(3), batch_size=3))
    assert sorted(traj for each in iter_slices(rb) for traj, _, _ in each) == [0, 2, 3, 4, 5, 6]


def iter_slices(rb: TensorDictReplayBuffer) -> Any:
    while True:
        yield slices(rb)
        if rb.sampler.ran_out:
            return


def test_order_and_the_last_batch() -> None:
    how: dict[str, Any] = {"slice_len": 3, "traj_key": "traj", "shuffle": False}
    rb = buffer([3] * 5, 6, SliceSamplerWithoutReplacement(**how))
    assert [[traj for traj, _, _ in each] for each in iter_slices(rb)] == [[0, 1], [2, 3], [4]]
    rb = buffer([3] * 5, 6, SliceSamplerWithoutReplacement(drop_last=True, **how))
    assert [sample["traj"].tolist() for sample in rb] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
    with pytest.raises(ValueError, match="never full"):
        buffer([3], 6, SliceSamplerWithoutReplacement(drop_last=True, **how)).sample()


def test_a_pass_goes_on_after_loading() -> None:
    def make() -> TensorDictReplayBuffer:
        return buffer([4] * 8, 8, SliceSamplerWithoutReplacement(slice_len=4, traj_key="traj"))

    rb = make()
    seen = [traj for _ in range(2) for traj, _, _ in slices(rb)]
    other = make()
    other.load_state_dict(rb.state_dict())
    seen += [traj for _ in range(2) for traj, _, _ in slices(other)]
    assert sorted(seen) == list(range(8))
    assert other.sampler.ran_out


def test_whether_there_is_enough() -> None:
    rb = buffer([6, 2], 8, SliceSampler(slice_len=4, traj_key="traj"))
    assert rb.can_sample()
    assert not buffer([3, 2], 8, SliceSampler(slice_len=4, traj_key="traj")).can_sample()
    rb.empty()
    assert not rb.can_sample()


def test_a_checkpointer_is_not_ignored() -> None:
    with pytest.raises(TypeError, match=r"rb\.dumps"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), checkpointer=object())
