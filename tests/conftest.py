"""Shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from tensordict.nn.probabilistic import interaction_type

from counting import CountingEnv

# Shells start background jobs with Ctrl-C ignored; then tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Two cores: more threads than that only make small networks slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_randomness_in_every_run() -> None:
    torch.manual_seed(0)
    CountingEnv.made = 0


@pytest.fixture(autouse=True)
def _exploration_type_is_left_as_it_was() -> Iterator[None]:
    assert interaction_type() is None
    yield
    assert interaction_type() is None
