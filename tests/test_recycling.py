"""Memory of delivered batches: used again, and never while somebody has it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from swath.collectors import Collector
from swath.envs import GymWrapper
from swath.rollout.layout import CPU, Field
from swath.rollout.recycling import MIN_BYTES, RecycledMemory

BYTES = Field(("pixels",), torch.Size([MIN_BYTES]), torch.uint8, CPU)


class Numbered(gymnasium.Env):
    """Its image holds the step's number; episodes of seven steps."""

    observation_space = spaces.Box(0, 255, (128, 128, 4), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.step_count = 0

    def _image(self) -> np.ndarray:
        return np.full((128, 128, 4), self.step_count, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.step_count = 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.step_count += 1
        return self._image(), 0.0, self.step_count == 7, False, {}


def test_it_is_used_again_when_nobody_has_it() -> None:
    memory = RecycledMemory()
    first = memory.empty((1,), BYTES)
    second = memory.empty((1,), BYTES)
    address = first.data_ptr()
    assert second.data_ptr() != address
    del first
    assert memory.empty((1,), BYTES).data_ptr() == address


@pytest.mark.parametrize(
    "look", [torch.Tensor.numpy, lambda x: x[0, 5:9], lambda x: x.untyped_storage(), lambda x: memoryview(x.numpy()[0])]
)
def test_it_is_not_used_again_while_somebody_looks_at_it(look: Any) -> None:
    memory = RecycledMemory()
    seen = look(memory.empty((1,), BYTES))
    addresses = {memory.empty((1,), BYTES).data_ptr() for _ in range(5)}
    kept = torch.frombuffer(seen, dtype=torch.uint8) if isinstance(seen, memoryview) else seen
    address = kept.ctypes.data if isinstance(kept, np.ndarray) else kept.data_ptr()
    assert not any(first <= address < first + MIN_BYTES for first in addresses)


def test_what_is_kept_is_bounded() -> None:
    memory = RecycledMemory()
    held = [memory.empty((1,), BYTES) for _ in range(9)]
    assert len({tensor.data_ptr() for tensor in held}) == 9
    del held
    assert len({memory.empty((1,), BYTES).data_ptr() for _ in range(9)}) == 1  # each is let go of at once
    larger = memory.empty((3,), BYTES)  # another size: what is there is of no use
    assert larger.shape == (3, MIN_BYTES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool])
def test_any_dtype(dtype: torch.dtype) -> None:
    field = Field(("x",), torch.Size([3, MIN_BYTES]), dtype, CPU)
    made = RecycledMemory().empty((2, 5), field)
    assert (made.shape, made.dtype) == ((2, 5, 3, MIN_BYTES), dtype)
    assert made.data_ptr() % 64 == 0
    assert made.is_contiguous()


@pytest.mark.parametrize("frames_per_batch", [10, 30])
@pytest.mark.parametrize("kept", [1, 3])
def test_batches_stay_as_they_were_delivered(frames_per_batch: int, kept: int) -> None:
    """Whoever keeps the last batches, or one leaf of them, finds in them what was there."""
    collector = Collector(GymWrapper(Numbered()), frames_per_batch=frames_per_batch, total_frames=12 * frames_per_batch)
    window: list[tuple[torch.Tensor, torch.Tensor]] = []
    frames = 0
    for batch in collector:
        window.append((batch["observation"][:, 0, 0, 0], batch["next", "observation"][:, 0, 0, 0]))
        window = window[-kept:]
        start = frames + frames_per_batch - sum(len(obs) for obs, _ in window)
        for obs, after in window:
            steps = torch.arange(start, start + len(obs)) % 7
            assert torch.equal(obs.long(), steps)
            assert torch.equal(after.long(), steps + 1)
            start += len(obs)
        frames += frames_per_batch
    assert frames == 12 * frames_per_batch
