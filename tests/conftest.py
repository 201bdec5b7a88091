"""Shared by all tests."""

from __future__ import annotations

import signal

import pytest
import torch

from counting import CountingEnv

# Shells start background jobs with Ctrl-C ignored; then tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Two cores: more threads than that only make small networks slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_randomness_in_every_run() -> None:
    torch.manual_seed(0)
    CountingEnv.made = 0
