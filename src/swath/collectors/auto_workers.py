"""``num_workers="auto"``: a worker with the first env measures, and the model says how many workers are enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from swath.collectors.single import Collector
from swath.costs.costs import Costs, Turn
from swath.costs.measuring import measure
from swath.costs.model import Machine, best_workers
from swath.envs.base import EnvBase
from swath.process.start import StartMethod
from swath.remote.requests import WorkerSpec
from swath.workers.layout import available_cores
from swath.workers.pool import WorkerPool

#: For so long it is looked at how the first env spends its time, and what the policy takes.
_SECONDS_TO_MEASURE = 0.5


def measured_workers(specs: Sequence[WorkerSpec], num_envs: int, method: StartMethod, *, is_sync: bool) -> int:
    """How many workers for so many envs, by what the env and the policy of ``specs`` cost.

    As few as collect about as much as any number of them would.
    """
    workers = WorkerPool(specs, method=method, receivers=lambda _: {}, started=lambda _: None)
    try:
        ((costs, steps),) = workers.call("examine", partial(costs_of, num_envs))
    finally:
        workers.shutdown()
    return best_workers(costs, num_envs, Machine(available_cores()), is_sync=is_sync, steps=steps)


def costs_of(num_envs: int, collector: Collector) -> tuple[Costs, int]:
    """In the worker: what a step of its env and of its policy cost, and how many steps a batch has."""

    def make(env: EnvBase, steps: int) -> Collector:
        return Collector(
            env,
            collector.policy,
            frames_per_batch=steps * env.batch_size.numel(),
            exploration_type=collector.exploration_type,
            policy_device=collector.runner.devices.policy,
        )

    has_own_calls = collector.env.batch_size.numel() > 1  # each such env keeps its own call of the policy
    batches = () if has_own_calls else tuple(2**power for power in range(1, num_envs.bit_length()))
    costs = measure(collector, make, seconds=_SECONDS_TO_MEASURE, batches=batches)
    if has_own_calls:
        one = costs.turns[1]
        costs = replace(costs, turns={1: one, 2: Turn(2 * one.policy_s, 2 * one.around_s)})
    return costs, max(1, collector.requested_frames_per_batch // collector.env.batch_size.numel())
