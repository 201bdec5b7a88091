"""Costs: what one env and one policy were measured to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Turn:
    """A step of so many envs that themselves cost nothing: all that collecting takes besides them, in seconds.

    Args:
        policy_s: in the policy.
        around_s: reading and writing rows, delivering batches.
    """

    policy_s: float
    around_s: float

    @property
    def all_s(self) -> float:
        return self.policy_s + self.around_s


@dataclass(frozen=True)
class Costs:
    """Seconds, on a core that nobody else wants.

    Args:
        step_s: a step of the env, with its share of resets.
        step_std_s: how much that varies, from step to step.
        reset_s: of ``step_s``, the share of resets.
        sleeps: which share of ``step_s`` it waits rather than computes.
        turns: by the number of envs that a call of the policy is for, with one thread of torch, as in a worker.
        turns_here: the same, with as many threads as this process has.
        frame_bytes: what the env and the policy write in a step.
        steps: how many steps were measured.
        kept_off: which share of the time other programs had the core.
        notes: what could not be measured, and why.
    """

    step_s: float
    step_std_s: float
    reset_s: float
    sleeps: float
    turns: Mapping[int, Turn]
    turns_here: Mapping[int, Turn]
    frame_bytes: int
    steps: int
    kept_off: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def step_cpu_s(self) -> float:
        return self.step_s * (1.0 - self.sleeps)

    def turn_s(self, num_envs: float, *, here: bool = False) -> float:
        """All that collecting from so many envs takes in a step, besides their steps."""
        turns = self.turns_here if here else self.turns
        return between({count: turn.all_s for count, turn in turns.items()}, num_envs)

    def policy_s(self, num_envs: float, *, here: bool = False) -> float:
        """Of that, the policy."""
        turns = self.turns_here if here else self.turns
        return between({count: turn.policy_s for count, turn in turns.items()}, num_envs)


def between(known: Mapping[int, float], at: float) -> float:
    """A value between those that are known, on straight lines; beyond the last, on the last one.

    >>> between({1: 10.0, 3: 14.0}, 2), between({1: 10.0, 3: 14.0}, 5), between({1: 10.0}, 5)
    (12.0, 18.0, 10.0)
    """
    points = sorted(known.items())
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    (left, low), (right, high) = next((pair for pair in pairwise(points) if at <= pair[1][0]), points[-2:])
    slope = (high - low) / (right - left)
    return low + (max(0.0, slope) if at > right else slope) * (at - left)
