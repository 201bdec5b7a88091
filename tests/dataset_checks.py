"""What must be true of every dataset on disk."""

from __future__ import annotations

import pytest
import torch

from swath.dataset import Dataset


def check_episodes(data: Dataset) -> None:
    """Rows cover every frame once, and say of each episode what its frames say."""
    covered = torch.zeros(len(data.frames), dtype=torch.int64)
    for row in data.episodes:
        frames = data.frames[row["start"] : row["start"] + row["length"]]
        covered[row["start"] : row["start"] + row["length"]] += 1
        assert (frames["collector", "traj_ids"] == row["traj_id"]).all()
        assert frames["next", "reward"].sum().item() == pytest.approx(row["return"])
        assert not frames["next", "done"][:-1].any()
        for flag in ("terminated", "truncated"):
            assert frames["next", flag][-1].item() is row[flag]
    assert (covered == 1).all()


def check_steps(data: Dataset) -> None:
    """Each env's frames are in one piece and in the order of time; its first observation counts its steps."""
    start = 0
    for count in data.metadata["frames_per_env"]:
        steps = data.frames["next", "observation"][start : start + count, 0]
        assert steps.tolist() == list(range(1, count + 1))
        start += count
    assert start == len(data.frames)
