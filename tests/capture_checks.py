"""Captured and called, side by side: the same policy from the same seeds, with the same changes between batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from counting import CountingEnv, make_counting
from swath.collectors import Collector
from swath.envs import SerialEnv

#: What happens to a policy between two batches.
Change = Callable[[Any], Any]


@dataclass
class Collected:
    """What one run gave: its batches, the plan after each, the random state after all."""

    batches: list[TensorDict] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    random_state: torch.Tensor | None = None


def collected(
    make_policy: Callable[[], Any],
    changes: Sequence[Change | None],
    *,
    capture: bool,
    make_env: Callable[[], Any] = make_counting,
    num_envs: int | None = 2,
    steps: int = 40,
    **options: Any,
) -> Collected:
    """One batch, and one after each change (None: nothing changes), collected from the seeds of every run."""
    torch.manual_seed(0)
    CountingEnv.made = 0
    policy = make_policy()
    got = Collected()
    with Collector(
        make_env() if num_envs is None else SerialEnv(num_envs, make_env),
        policy,
        frames_per_batch=steps * (num_envs or 1),
        total_frames=-1,
        capture_policy=capture,
        **options,
    ) as collector:
        collector.set_seed(7)
        iterator = iter(collector)
        for change in (None, *changes):
            if change is not None:
                change(policy)
            got.batches.append(next(iterator).clone())
            got.plans.append(collector.policy_plan())
    got.random_state = torch.get_rng_state()
    return got


def assert_same_bits(captured: Collected, called: Collected) -> None:
    """Every leaf of every batch, and the random state that is left."""
    for number, (mine, theirs) in enumerate(zip(captured.batches, called.batches, strict=True)):
        assert set(mine.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            ours, plain = mine.get(key), theirs.get(key)
            assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), (number, key)
            if not torch.equal(bits(ours), bits(plain)):
                where = (bits(ours) != bits(plain)).view(*ours.shape[:2], -1).any(-1)
                env, step = where.nonzero()[0].tolist()
                raise AssertionError(
                    f"{key} of batch {number} ({captured.plans[number]}) differs in env {env}, step {step}: "
                    f"{ours[env, step]} {plain[env, step]}"
                )
    assert captured.random_state is not None
    assert called.random_state is not None
    assert torch.equal(captured.random_state, called.random_state)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def both_ways(make_policy: Callable[[], Any], *changes: Change | None, **options: Any) -> list[str]:
    """Collects captured and called, compares to the last bit; the plans of the captured run, one a batch."""
    captured = collected(make_policy, changes, capture=True, **options)
    called = collected(make_policy, changes, capture=False, **options)
    assert_same_bits(captured, called)
    assert not any(plan.startswith("captured") for plan in called.plans)
    return captured.plans
