"""Shared by all tests."""

from __future__ import annotations

import torch

# Two cores: more threads than that only make small networks slower.
torch.set_num_threads(1)
