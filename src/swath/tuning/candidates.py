"""Which arrangements come into question: those that this machine has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swath import platforms
from swath.costs.arrangement import Arrangement, Form
from swath.costs.costs import Costs
from swath.process import cgroups
from swath.process.memory import free_bytes
from swath.workers.layout import available_cores

#: Where nobody says how many envs there are to be.
NUMBERS_OF_ENVS = (1, 2, 4, 8, 16, 32, 64)
#: What a worker has to itself, besides the policy; it was 18 MB with a CartPole, 45 with pixels and a CNN.
_BYTES_OF_WORKER = 60_000_000
#: Of the free memory, so much is left alone.
_LEFT_ALONE = 0.3
_DESCRIPTORS_OF_WORKER = 12
#: Batches of workers that are in memory at the same time.
_BLOCKS = 4
#: Steps that compute all the time gain nothing by more workers than so many times the cores.
_CROWDED = 2
#: One that sleeps for less than this has a core to itself most of the time.
_SLEEPS = 0.2

# -- batches -----------------------------------------------------------------------------------------------------------

#: By default, a batch of all envs has about so many frames, …
_FRAMES_PER_BATCH = 2048
#: … at least so many steps (where a batch is of one env, …)
_LEAST_STEPS = 16
_LEAST_STEPS_ALONE = 256
#: … takes no longer than this, and no more memory.
_MOST_SECONDS = 0.25
_MOST_SECONDS_TO_TRY = 0.5
_MOST_BYTES = 64_000_000


def steps_per_batch(costs: Costs, arrangement: Arrangement, frames_per_batch: int | None, rows: int = 1) -> int:
    """How many steps of each env a batch has.

    Args:
        frames_per_batch: of all envs together, if it was said.
        rows: how many envs each of them has already.
    """
    num_envs = arrangement.num_envs * rows
    if frames_per_batch is not None:
        return max(1, -(-frames_per_batch // num_envs))
    is_alone = arrangement.form == Form.ASYNC
    steps = max(_FRAMES_PER_BATCH // num_envs, _LEAST_STEPS_ALONE if is_alone else _LEAST_STEPS)
    turn_s = costs.turn_s(arrangement.envs_per_worker) + arrangement.envs_per_worker * costs.step_s
    by_time = int(_MOST_SECONDS / max(turn_s, 1e-9))
    by_bytes = _MOST_BYTES // max(1, 2 * costs.frame_bytes * arrangement.num_envs)
    steps = max(min(steps, max(by_time, _LEAST_STEPS), by_bytes), 1)
    return steps - steps % _LEAST_STEPS if steps > _LEAST_STEPS else steps


def steps_to_try(costs: Costs, arrangement: Arrangement, steps: int) -> int:
    """As many, unless a batch would take too long to be waited for again and again."""
    turn_s = costs.turn_s(arrangement.envs_per_worker) + arrangement.envs_per_worker * costs.step_s
    return max(1, min(steps, int(_MOST_SECONDS_TO_TRY / max(turn_s, 1e-9))))


def frames_of(arrangement: Arrangement, steps: int, rows: int = 1) -> int:
    """``frames_per_batch=`` of the collector."""
    return steps * rows * (1 if arrangement.form == Form.ASYNC else arrangement.num_envs)


# -- room --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What there is place for: workers, and bytes of batches."""

    workers: int
    num_bytes: int | None

    @classmethod
    def of_this_machine(cls, policy: Any = None) -> Room:
        if not platforms.are_met(*platforms.WORKERS):
            return cls(0, free_bytes())
        free = free_bytes()
        most = [1_000]
        if free is not None:
            each = _BYTES_OF_WORKER + num_bytes_of(policy)
            most.append(int(free * (1 - _LEFT_ALONE)) // each)
        left = cgroups.read_limits().processes_left
        if left is not None:
            most.append(left // 4)  # threads count, too
        most.append(_descriptors_left() // _DESCRIPTORS_OF_WORKER)
        return cls(max(0, min(most)), None if free is None else int(free * (1 - _LEFT_ALONE)))

    def has_place_for(self, costs: Costs, arrangement: Arrangement, steps: int) -> bool:
        workers = arrangement.num_workers if arrangement.form.has_processes else 0
        num_bytes = _BLOCKS * 2 * costs.frame_bytes * arrangement.num_envs * steps
        return workers <= self.workers and (self.num_bytes is None or num_bytes <= self.num_bytes)


def num_bytes_of(policy: Any) -> int:
    if not isinstance(policy, torch.nn.Module):
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in (*policy.parameters(), *policy.buffers()))


def _descriptors_left() -> int:
    import resource  # not on Windows, where there are no workers

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# -- candidates --------------------------------------------------------------------------------------------------------


def candidates(
    costs: Costs, forms: Sequence[Form], numbers_of_envs: Sequence[int], most_workers: int
) -> Iterator[Arrangement]:
    """All that come into question, of these forms and with so many envs."""
    for num_envs in numbers_of_envs:
        for form in forms:
            yield from _of_form(costs, form, num_envs, most_workers)


def _of_form(costs: Costs, form: Form, num_envs: int, most_workers: int) -> Iterator[Arrangement]:
    if form == Form.SINGLE:
        is_faster = costs.turn_s(num_envs) < 0.9 * costs.turn_s(num_envs, here=True)
        yield Arrangement(form, num_envs, threads=1 if is_faster else None)
    elif form == Form.THREADED:
        if costs.sleeps > 0.5 and num_envs > 1:
            yield Arrangement(form, num_envs, num_envs)
    elif num_envs > 1 or form in (Form.SYNC, Form.ASYNC):
        least = 2 if form == Form.PARALLEL else 1
        for workers in numbers_of_workers(costs, num_envs):
            if least <= workers <= most_workers:
                yield Arrangement(form, num_envs, workers)


def numbers_of_workers(costs: Costs, num_envs: int) -> list[int]:
    """Powers of two, and as many as there are cores: more only where steps sleep."""
    cores = available_cores()
    most = num_envs if costs.sleeps > _SLEEPS else min(num_envs, _CROWDED * cores)
    powers = [2**power for power in range(most.bit_length())]
    return sorted({count for count in (*powers, cores, num_envs) if count <= most})
