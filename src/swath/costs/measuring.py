"""What a collector's env and policy cost, found out by collecting for a short while."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch

from swath.costs.costs import Costs, Turn
from swath.costs.echo import EchoEnv
from swath.envs.base import EnvBase
from swath.timeline.recorder import Kind, Record, Recorder, new_memory, read

if TYPE_CHECKING:  # the class comes from above
    from swath.collectors.single import Collector

#: Makes a collector of an env and the policy that is measured, with batches of so many steps.
MakeCollector = Callable[[EnvBase, int], "Collector"]
#: Numbers of envs that a call of the policy is measured for.
BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: How many steps are collected at a time: those of about so long, …
_PART_S = 0.02
_MOST_STEPS = 128
#: … and of the envs that cost nothing, no more than this.
_MOST_BYTES = 16 * 2**20
#: What comes first finds nothing prepared; so many parts do not count.
_WARM_UP_PARTS = 2
#: A share of waiting below this is no more than how exactly it was measured.
_LEAST_SLEEP = 0.05
#: What takes longer than this is often interrupted where others want the core, too.
_INTERRUPTED_S = 1e-3
#: With fewer stretches of steps there is nothing to compare.
_FEW = 8
#: The quartiles of a normal distribution, in its standard deviations.
_QUARTILES_APART = 1.35


@dataclass(frozen=True)
class Spent:
    """How long something took, and what of it this process had nothing to do, or no core."""

    wall_s: float
    cpu_s: float
    queued_s: float
    #: How often the thread gave its core away.
    switches: float

    @property
    def on_own_core(self) -> float:
        """Which share of the time would have been enough, had nobody else wanted the core."""
        return 1.0 - min(0.9, self.queued_s / max(self.wall_s, 1e-9))

    @property
    def slept_s(self) -> float:
        return max(0.0, self.wall_s - self.cpu_s - self.queued_s)


class Clock:
    """Wall time, CPU time of the process, and how long this thread was kept from a core."""

    def __init__(self) -> None:
        self._began = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), _queued_s(), _switches()

    def spent(self) -> Spent:
        return Spent(*(now - then for now, then in zip(self._read(), self._began, strict=True)))


def _queued_s() -> float:
    """Seconds that this thread could have run and had no core; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _switches() -> float:
    if sys.platform == "win32":  # where nobody counts them
        return time.perf_counter() * 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD if sys.platform == "linux" else resource.RUSAGE_SELF).ru_nvcsw


def measure(
    collector: Collector, make: MakeCollector, *, seconds: float, batches: Iterable[int] = BATCHES, threads: int = 1
) -> Costs:
    """What the env and the policy of ``collector`` cost.

    It collects from them, and throws away what comes: the next batch that is asked for starts new episodes.

    Args:
        make: a collector of the same policy and another env.
        seconds: about how long it may take: half of it for the env, half for the policy.
        batches: numbers of envs that a call of the policy may be for.
        threads: of torch, in the process that the user's own collector would run in.
    """
    frame_bytes = collector.runner.rollout.strip.layout.bytes_per_step
    with torch_threads(1):
        records, spent, steps = _collect(collector, seconds / 2)
        found = _StepCosts.of(records, spent)
        sizes = sorted({1, *batches})
        turns, note = _turns(collector, make, sizes, seconds / 4, found)
    turns_here = turns
    if threads > 1 and not note:
        with torch_threads(threads):
            turns_here, note = _turns(collector, make, sizes, seconds / 4, found)
        turns_here = turns_here if not note else turns
    collector.reset()
    return Costs(
        found.step_s,
        found.step_std_s,
        found.reset_s,
        found.sleeps,
        turns,
        turns_here,
        frame_bytes,
        steps,
        1.0 - spent.on_own_core,
        (note,) if note else (),
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@contextmanager
def _recorded(collector: Collector) -> Iterator[Recorder]:
    control = collector.runner.rollout.control
    before, control.recorder = control.recorder, Recorder(new_memory())
    try:
        yield control.recorder
    finally:
        control.recorder = before


def step_beside_others(collector: Collector, num_envs: int, seconds: float) -> float:
    """A step of one of the envs of a collector that steps so many, one after the other."""
    with torch_threads(1):
        records, spent, _ = _collect(collector, seconds)
    return _StepCosts.of(records, spent).step_s / num_envs


def _collect(collector: Collector, seconds: float, most_steps: int = _MOST_STEPS) -> tuple[list[Record], Spent, int]:
    """Collect for so long; what was recorded, what it took, and how many steps it were."""
    began = time.perf_counter()
    deadline = began + seconds
    num_steps = 1
    for _ in range(_WARM_UP_PARTS):
        started = time.perf_counter()
        collector.collect_part(num_steps, None, 0)
        num_steps = _steps_of(_PART_S, time.perf_counter() - started, num_steps, most_steps)
        if time.perf_counter() > began + seconds / 3:
            break
    steps, taken_s = 0, 0.0
    with _recorded(collector) as recorder:
        clock = Clock()
        while not steps or time.perf_counter() + taken_s < deadline:
            started = time.perf_counter()
            collector.collect_part(num_steps, None, 0)
            steps, taken_s = steps + num_steps, time.perf_counter() - started
            num_steps = _steps_of(_PART_S, taken_s, num_steps, most_steps)
        spent = clock.spent()
    return read(recorder.memory), spent, steps


def _steps_of(seconds: float, taken_s: float, num_steps: int, most: int) -> int:
    return max(1, min(most, 4 * num_steps, int(seconds * num_steps / max(taken_s, 1e-9))))


@dataclass(frozen=True)
class _StepCosts:
    """Of one step of the one env that there is."""

    step_s: float
    step_std_s: float
    reset_s: float
    policy_s: float
    sleeps: float

    @classmethod
    def of(cls, records: list[Record], spent: Spent) -> _StepCosts:
        stretches = [record for record in records if record.kind == Kind.STEPS and record.count]
        steps = sum(stretch.count for stretch in stretches)
        env_s = sum(map(_env_s, stretches))
        own = spent.on_own_core
        step_s, step_std_s = _mean_and_spread(stretches, own)
        # Who sleeps gives its core away; and what is little of the whole may be anybody's.
        does_sleep = spent.slept_s > _LEAST_SLEEP * spent.wall_s * own and spent.switches >= steps * _LEAST_SLEEP
        sleeps = min(1.0, spent.slept_s / max(env_s * own, 1e-9)) if does_sleep else 0.0
        share = step_s / (env_s / steps)
        return cls(
            step_s,
            step_std_s,
            sum(stretch.y for stretch in stretches) / steps * share,
            _typical([stretch.x / stretch.count for stretch in stretches], own),
            sleeps,
        )


def _env_s(stretch: Record) -> float:
    """Of a stretch of steps, what is not the policy's: steps and resets."""
    return stretch.end_s - stretch.start_s - stretch.x


def _mean_and_spread(stretches: Sequence[Record], own: float) -> tuple[float, float]:
    """Of a step; ``own`` is the share of the time in which there was a core, or nothing to do.

    Long steps vary as they like. Short ones hardly do; where they do, the machine was busy.
    """
    steps = sum(stretch.count for stretch in stretches)
    each = [_env_s(stretch) / stretch.count for stretch in stretches]
    if len(stretches) < _FEW or median(each) > _INTERRUPTED_S:
        mean = sum(map(_env_s, stretches)) / steps
        square = sum(stretch.count**2 * (value - mean) ** 2 for stretch, value in zip(stretches, each, strict=True))
        return mean * own, math.sqrt(square / steps) * own
    low, middle, high = quantiles(each, n=4)
    return middle, (high - low) / _QUARTILES_APART * math.sqrt(steps / len(stretches))


def _typical(values: Sequence[float], own: float) -> float:
    """Of what takes about the same each time: those that were interrupted do not count. Of long ones, most were."""
    usual = quantiles(values, n=4)[0] if len(values) > 1 else sum(values)
    return max(0.0, usual * own if usual > _INTERRUPTED_S else usual)


def _turns(
    collector: Collector, make: MakeCollector, sizes: list[int], seconds: float, found: _StepCosts
) -> tuple[dict[int, Turn], str]:
    """By number of envs; and why not of all, if it is so."""
    env, rollout = collector.env, collector.runner.rollout
    shown = {field.key for field in env.row_layout().carried}
    row = {key: column.rows[0].clone() for key, column in rollout.strip.carried.items() if key in shown}
    frame_bytes = max(1, rollout.strip.layout.bytes_per_step)
    turns: dict[int, Turn] = {}
    share_s = seconds / len(sizes)
    for size in sizes:
        most_steps = max(2, min(_MOST_STEPS, _MOST_BYTES // (frame_bytes * size)))
        if turns and _predicted_s(turns, size) > 4 * share_s:
            break  # a step of so many takes too long to be measured, and hardly tells anything new
        try:
            with make(EchoEnv(env, row, None if size == 1 else size), most_steps) as echo:
                turns[size] = _turn(*_collect(echo, share_s, most_steps))
        except Exception as error:
            if not turns:
                alone = Turn(found.policy_s, 0.0)
                return {1: alone}, f"what the policy takes for many envs at once is not known: {_first_line(error)}"
            return turns, f"the policy was not asked for {size} envs at once: {_first_line(error)}"
    turns = never_less(turns)
    # Between two steps of a real env, the policy finds the caches cold.
    cold_s = max(0.0, found.policy_s - turns[1].policy_s)
    return {size: Turn(turn.policy_s + cold_s, turn.around_s) for size, turn in turns.items()}, ""


def never_less(turns: Mapping[int, Turn]) -> dict[int, Turn]:
    """For fewer envs, no turn takes longer than for more: then it was interrupted.

    >>> never_less({1: Turn(3.0, 0.0), 2: Turn(9.0, 0.0), 4: Turn(4.0, 1.0)})[2]
    Turn(policy_s=4.0, around_s=1.0)
    """
    sizes = sorted(turns)
    return {
        size: min((turns[more] for more in sizes[number:]), key=lambda turn: turn.all_s)
        for number, size in enumerate(sizes)
    }


def _predicted_s(turns: dict[int, Turn], size: int) -> float:
    largest = max(turns)
    return turns[largest].all_s * size / largest


def _turn(records: list[Record], spent: Spent, steps: int) -> Turn:
    stretches = [record for record in records if record.kind == Kind.STEPS and record.count]
    inside_s = sum(stretch.end_s - stretch.start_s for stretch in stretches)
    own = spent.on_own_core
    policy_s = _typical([stretch.x / stretch.count for stretch in stretches], own)
    stepping_s = _typical([_env_s(stretch) / stretch.count for stretch in stretches], own)
    between_s = max(0.0, spent.wall_s - inside_s) * own / steps  # batches that are delivered
    return Turn(policy_s, stepping_s + between_s)


def _first_line(error: BaseException) -> str:
    said: Any = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {said[0]}"
