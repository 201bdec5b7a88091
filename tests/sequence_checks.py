"""Batches to look ahead in, and what is ahead by a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

FLAGS = ("done", "terminated", "truncated")


def random_batch(
    *lead: int, seed: int = 0, chance: float = 0.25, ids: bool = True, reward_shape: tuple[int, ...] = (1,)
) -> Any:
    """Frames ``[*envs, time]``: numbered observations, random rewards, episodes that end at random."""
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.arange(torch.Size(lead).numel()).reshape(*lead, 1)
    done = torch.rand(*lead, 1, generator=rng) < chance
    terminated = done & (torch.rand(*lead, 1, generator=rng) < 0.5)
    flags = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    batch = TensorDict(
        {
            "observation": numbers * 1.0,
            "action": numbers % 3,
            "next": {
                "observation": numbers + 1.0,
                "pixels": (numbers % 200).to(torch.uint8).reshape(*lead, 1, 1).expand(*lead, 4, 4).clone(),
                "reward": torch.randn(*lead, *reward_shape, generator=rng),
                **flags,
            },
        },
        batch_size=lead,
    )
    if ids:
        before = done.squeeze(-1).long().cumsum(-1) - done.squeeze(-1).long()
        rows = torch.arange(torch.Size(lead[:-1]).numel()).reshape(*lead[:-1], 1)
        batch["collector", "traj_ids"] = before + 1000 * rows
    return batch


def looped(batch: Any, n_steps: int, gamma: float, ends: Any = None) -> Any:
    """n-step transitions of a batch ``[envs, time]``, frame by frame."""
    ends = batch["next", "done"].squeeze(-1) if ends is None else ends
    made = batch.clone()
    made["next", "original_reward"] = batch["next", "reward"].clone()
    made["steps_to_next_obs"] = torch.zeros(batch.shape, dtype=torch.int64)
    made["gamma"] = torch.zeros(batch.shape)
    made["nonterminal"] = torch.zeros(batch.shape, dtype=torch.bool)
    for row in range(batch.shape[0]):
        for t in range(batch.shape[1]):
            at, total = t, batch["next", "reward"][row, t].double().clone()
            while at + 1 < min(t + n_steps, batch.shape[1]) and not ends[row, at]:
                at += 1
                total += gamma ** (at - t) * batch["next", "reward"][row, at]
            made["next", "reward"][row, t] = total
            for key in ("observation", "pixels", *FLAGS):
                made["next", key][row, t] = batch["next", key][row, at]
            made["steps_to_next_obs"][row, t] = at - t + 1
            made["gamma"][row, t] = gamma ** (at - t + 1)
            made["nonterminal"][row, t] = t + 1 < batch.shape[1] and not ends[row, t]
    return made


def assert_same(found: Any, expected: Any) -> None:
    assert found.batch_size == expected.batch_size
    keys = {key if isinstance(key, tuple) else (key,) for key in found.keys(True, True)}
    assert keys == {key if isinstance(key, tuple) else (key,) for key in expected.keys(True, True)}
    for key in keys:
        one, other = found[key], expected[key]
        assert one.dtype == other.dtype, key
        assert one.shape == other.shape, key
        if one.is_floating_point():
            torch.testing.assert_close(one, other, msg=str(key))
        else:
            assert torch.equal(one, other), key
