"""``split_trajectories``: every frame once, each trajectory in a row of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import make_counting
from swath.collectors import Collector, MultiSyncCollector, split_trajectories
from swath.envs import SerialEnv


def frames(rows: list[list[int]], **others: Any) -> TensorDict:
    """``[envs, time]``, of these ids; ``x`` numbers the frames."""
    ids = torch.tensor(rows)
    content: dict[str, Any] = {"collector": {"traj_ids": ids}, "x": torch.arange(ids.numel()).view(ids.shape), **others}
    return TensorDict(content, batch_size=ids.shape)


def rows_of(split: TensorDict, mask_key: Any = ("collector", "mask")) -> list[list[int]]:
    return [row["x"][mask].tolist() for row, mask in zip(split, split[mask_key], strict=True)]


def test_by_id() -> None:
    split: Any = split_trajectories(frames([[0, 0, 0, 2], [1, 1, 3, 3]]))
    assert split.shape == (4, 3)
    assert rows_of(split) == [[0, 1, 2], [3], [4, 5], [6, 7]]
    assert not split["x"][~split["collector", "mask"]].any()


def test_without_ids_by_done() -> None:
    data = frames([[0, 0, 0, 0], [1, 1, 1, 1]]).exclude("collector")
    data["next", "done"] = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    assert rows_of(split_trajectories(data), "mask") == [[0, 1], [2, 3], [4, 5, 6, 7]]  # type: ignore[arg-type]


def test_rows_that_are_whole_stay_rows() -> None:
    split: Any = split_trajectories(frames([[0, 0], [1, 1]]))
    assert rows_of(split) == [[0, 1], [2, 3]]
    assert split["collector", "mask"].all()
    alone: Any = split_trajectories(frames([[0, 0]])[0])
    assert alone.shape == (1, 2)


def test_other_keys() -> None:
    data = TensorDict(ids=torch.tensor([4, 4, 9]), x=torch.arange(3), batch_size=3)
    assert rows_of(split_trajectories(data, trajectory_key="ids"), "mask") == [[0, 1], [2]]  # type: ignore[arg-type]


def test_what_was_not_collected_is_left_out() -> None:
    """A worker that was stopped early (preemptive_threshold) leaves frames with the id -1."""
    split: Any = split_trajectories(frames([[0, 0, -1, -1], [1, 2, 2, -1]]))
    assert rows_of(split) == [[0, 1], [4], [5, 6]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, once in a process
def test_nested() -> None:
    split: Any = split_trajectories(frames([[0, 0, 1]]), as_nested=True)
    assert [row.tolist() for row in split["x"].unbind()] == [[0, 1], [2]]


@pytest.mark.processes
def test_of_collectors() -> None:
    """Frames are counted, and each row is one episode or a part of one."""
    env = SerialEnv(3, lambda: make_counting(9))
    (alone,) = Collector(env, frames_per_batch=90, total_frames=90, split_trajs=True)
    factories = [lambda: make_counting(9)] * 3
    (together,) = MultiSyncCollector(factories, frames_per_batch=90, total_frames=90, split_trajs=True)
    for split in (alone, together):
        mask = split["collector", "mask"]
        assert int(mask.sum()) == 90
        for row, there in zip(split, mask, strict=True):
            assert len(row[there]["collector", "traj_ids"].unique()) == 1
            steps = row[there]["observation"][:, 1]
            assert torch.equal(steps, steps[0] + torch.arange(len(steps)))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5)])
def test_a_batch_without_frames_has_no_trajectories(shape: tuple[int, ...]) -> None:
    """As of one that was paused, or interrupted, before its first step."""
    batch = TensorDict(
        {
            "observation": torch.zeros(*shape, 4),
            "next": {"done": torch.zeros(*shape, 1, dtype=torch.bool)},
            "collector": {"traj_ids": torch.zeros(shape, dtype=torch.int64)},
        },
        batch_size=shape,
    )
    split = split_trajectories(batch)
    assert (split.shape, split["observation"].shape) == ((0, 0), (0, 0, 4))
    assert split["collector", "mask"].shape == (0, 0)
