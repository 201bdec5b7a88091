"""How many frames a second an arrangement would collect, from what was measured of its parts (docs/performance.md).

Of one core, ``X = n / (n s + f(n))``: n envs that step one after the other, and one call of the policy for all. Here is
what more of them change: cores that are shared, steps that sleep, workers that wait for the slowest, messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from swath.costs.arrangement import Arrangement, Form
from swath.costs.costs import Costs

#: How often the batch of an ``AsyncBatchedCollector``'s policy is guessed again from the speed that follows from it.
_GUESSES = 30
#: At most so many envs in a call of it (``max_batch_size``).
_MOST_ROWS = 64
#: An arrangement with fewer workers or envs is preferred as long as it is not slower by more than this.
NEAR = 0.03


@dataclass(frozen=True)
class Machine:
    """What a collector runs on. Times were measured on a core of 2023; only what is near to each other depends on them.

    Args:
        cores: that this process may use.
        order_s: telling a worker to step, and being told that it has: what it costs both of them.
        request_s: asking a worker for a batch, and handing it over.
        thread_s: as ``order_s``, of a thread.
    """

    cores: int
    order_s: float = 12e-6
    request_s: float = 300e-6
    thread_s: float = 25e-6


def predict(costs: Costs, arrangement: Arrangement, machine: Machine, steps: int) -> float:
    """Steps of envs in a second; ``steps`` of each env are a batch.

    >>> from swath.costs.costs import Turn
    >>> turns = {1: Turn(20e-6, 2e-6), 2: Turn(22e-6, 2e-6)}
    >>> costs = Costs(10e-6, 0.0, 0.0, 0.0, turns, turns, 36, 1000)
    >>> round(predict(costs, Arrangement(Form.SINGLE, 1), Machine(2), 100))
    31250
    """
    match arrangement.form:
        case Form.SINGLE:
            return _single(costs, arrangement)
        case Form.SYNC | Form.ASYNC:
            return _workers(costs, arrangement, machine, steps)
        case Form.PARALLEL:
            return _parallel(costs, arrangement, machine)
        case Form.BATCHED | Form.THREADED:
            return _batched(costs, arrangement, machine)


def ideal(costs: Costs, cores: int) -> float:
    """All cores do nothing but step envs and call the policy for the largest batch that was measured.

    Steps that sleep take none of a core: then this is no bound that can be reached.
    """
    most = max(costs.turns)
    return cores / max(1e-9, costs.step_cpu_s + costs.policy_s(most) / most)


def _single(costs: Costs, arrangement: Arrangement) -> float:
    n = arrangement.num_envs
    return n / (n * costs.step_s + costs.turn_s(n, here=arrangement.threads is None))


def _workers(costs: Costs, arrangement: Arrangement, machine: Machine, steps: int) -> float:
    n, w = arrangement.envs_per_worker, arrangement.num_workers
    is_sync = arrangement.form == Form.SYNC
    turn_s = costs.turn_s(n)
    batches = (1 if is_sync else n) / steps  # in each step, of a worker
    step_s = n * costs.step_s + turn_s
    busy_s = n * costs.step_cpu_s + turn_s + batches * machine.request_s
    taken_s = max(step_s, w * busy_s / machine.cores)
    if is_sync:  # nobody collects between two batches, and all wait for the slowest
        spread_s = costs.step_std_s * (n * steps) ** 0.5
        taken_s += (machine.request_s + spread_s * slowest_of(w)) / steps
    return arrangement.num_envs / taken_s


def _parallel(costs: Costs, arrangement: Arrangement, machine: Machine) -> float:
    n, w = arrangement.envs_per_worker, arrangement.num_workers
    spread_s = costs.step_std_s * n**0.5
    step_s = n * costs.step_s + machine.order_s + spread_s * slowest_of(w)
    busy_s = n * costs.step_cpu_s + machine.order_s
    together_s = max(step_s, w * busy_s / machine.cores)
    return arrangement.num_envs / (together_s + costs.turn_s(arrangement.num_envs) + w * machine.order_s)


def _batched(costs: Costs, arrangement: Arrangement, machine: Machine) -> float:
    """Envs, cores and the policy each set a bound; how many envs are ready at once depends on what comes out."""
    num_envs, n = arrangement.num_envs, arrangement.envs_per_worker
    in_threads = arrangement.form == Form.THREADED
    order_s = machine.thread_s if in_threads else machine.order_s
    # See ``_envs_per_group`` of the collector: two groups to a worker, where there is a core for the policy.
    crowded = not in_threads and 1 < arrangement.num_workers >= machine.cores
    group = 1 if in_threads else n if crowded else -(-n // 2)
    cores = 1 if in_threads else machine.cores
    rows, frames_per_s = float(min(group, _MOST_ROWS)), 0.0
    for _ in range(_GUESSES):
        turn_s = costs.turn_s(rows) + 2 * order_s * rows / group
        by_core = cores / (costs.step_cpu_s + order_s / group + turn_s / rows)
        by_policy = rows / turn_s
        by_env = num_envs / (n * costs.step_s + order_s + turn_s)
        frames_per_s = min(by_core, by_policy, by_env)
        ready = min(max(frames_per_s * turn_s, group), num_envs, _MOST_ROWS)
        rows += (ready - rows) / 2
    return frames_per_s


def slowest_of(count: int) -> float:
    """By how many standard deviations the slowest of so many is later than the mean.

    >>> [round(slowest_of(count), 1) for count in (1, 2, 16)]
    [0.0, 0.6, 1.8]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def best_workers(costs: Costs, num_envs: int, machine: Machine, *, is_sync: bool, steps: int) -> int:
    """How many workers for so many envs: as few as are about as fast as any number of them would be."""
    form = Form.SYNC if is_sync else Form.ASYNC
    speeds = {
        count: predict(costs, Arrangement(form, num_envs, count), machine, steps) for count in range(1, num_envs + 1)
    }
    return least_near(speeds)


def least_near(speeds: dict[int, float]) -> int:
    """The smallest key whose value is near to the largest value.

    >>> least_near({1: 50.0, 2: 98.5, 3: 100.0})
    2
    """
    return min(near(speeds))


def near(speeds: Mapping[Any, float], share: float = NEAR) -> list[Any]:
    """The keys whose values are near to the largest."""
    most = max(speeds.values())
    return [key for key, speed in speeds.items() if speed >= (1 - share) * most]
