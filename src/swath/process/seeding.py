"""Seeds for processes: one tree, a branch for every worker and every incarnation of it."""

from __future__ import annotations

import random

import numpy as np
import torch


def draw_base_seed() -> int:
    """From torch's generator, so that ``torch.manual_seed`` decides what workers do, too."""
    return int(torch.randint(2**62, ()).item())


def derived_seed(seed: int, *branch: int) -> int:
    """A seed of 32 bits for a branch of the tree.

    >>> derived_seed(0, 1) == derived_seed(0, 1) != derived_seed(0, 2)
    True
    """
    return int(np.random.SeedSequence(seed, spawn_key=branch).generate_state(1)[0])


def seed_process(seed: int, *branch: int) -> None:
    """Seed the generators that a process has: forked ones would all draw the same numbers."""
    number = derived_seed(seed, *branch)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (envs and policies may draw from it)
    torch.manual_seed(number)
