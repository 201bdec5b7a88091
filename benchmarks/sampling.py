"""Part `sampling`: how long `sample(256)` takes in a full buffer of a million frames."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from interleaved import order_of
from report import markdown_table

CAPACITY = 1_000_000
SAMPLE = 256
SLICE = 16
CALLS = 200


def frames(count: int) -> TensorDict:
    """CartPole's keys, in episodes of 10 to 200 steps."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 201, size=count // 10)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), count)) + 1]
    ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[:count])
    done = torch.ones(count, 1, dtype=torch.bool)
    done[:-1, 0] = ids[1:] != ids[:-1]
    no = torch.zeros_like(done)
    return TensorDict(
        {
            "observation": torch.rand(count, 4),
            "action": torch.nn.functional.one_hot(torch.randint(2, (count,))),
            "done": no,
            "terminated": no,
            "truncated": no,
            "collector": {"traj_ids": ids},
            "next": {
                "observation": torch.rand(count, 4),
                "reward": torch.rand(count, 1),
                "done": done,
                "terminated": done,
                "truncated": no,
            },
        },
        batch_size=count,
    )


def _buffer(library: Any, sampler: Any) -> Any:
    rb = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=SAMPLE)
    for part in frames(CAPACITY).split(CAPACITY // 4):
        rb.extend(part)
    return rb


def _library(name: str) -> Any:
    import importlib

    return importlib.import_module(f"{name}.data")


class _FreeTree:
    """In the place of torchrl's sum and min trees, which are C++ and not built for every torch: it costs nothing, so
    that what is measured is less than torchrl takes."""

    def __init__(self, capacity: int) -> None:
        self._found = np.random.default_rng(0).integers(capacity, size=(64, SAMPLE))
        self._ones = torch.ones(SAMPLE)
        self._turn = 0

    def query(self, start: int, stop: int) -> float:
        return 1.0

    def scan_lower_bound(self, mass: np.ndarray) -> np.ndarray:
        self._turn = (self._turn + 1) % len(self._found)
        return self._found[self._turn]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._ones

    def __setitem__(self, index: Any, value: Any) -> None: ...


def _lend_torchrl_a_tree() -> bool:
    """Whether it needs one."""
    from torchrl.data.replay_buffers.samplers import prioritized

    if prioritized.SumSegmentTreeFp32 is not None and prioritized.SumSegmentTreeFp32 is not _FreeTree:
        return False
    for name in ("SumSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp32", "MinSegmentTreeFp64"):
        setattr(prioritized, name, _FreeTree)
    return True


def uniform(name: str) -> Callable[[], Any]:
    return _buffer(_library(name), None).sample


def prioritised(name: str) -> Callable[[], Any]:
    library = _library(name)
    rb = _buffer(library, library.PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5))
    rb.update_priority(torch.arange(CAPACITY), torch.rand(CAPACITY) + 0.01)
    return rb.sample


def updated(name: str) -> Callable[[], Any]:
    """Sampled, and given new priorities."""
    library = _library(name)
    rb = _buffer(library, library.PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5))
    errors = torch.rand(SAMPLE) + 0.01

    def step() -> Any:
        sample = rb.sample()
        rb.update_priority(sample["index"], errors)
        return sample

    return step


def slices(name: str) -> Callable[[], Any]:
    library = _library(name)
    return _buffer(library, library.SliceSampler(slice_len=SLICE, traj_key=("collector", "traj_ids"))).sample


def sb3(name: str) -> Callable[[], Any]:
    from stable_baselines3.common.buffers import ReplayBuffer

    env = gymnasium.make("CartPole-v1")
    rb = ReplayBuffer(CAPACITY, env.observation_space, env.action_space, handle_timeout_termination=True)
    rng = np.random.default_rng(0)
    rb.observations[:] = rng.random(rb.observations.shape)
    rb.next_observations[:] = rng.random(rb.observations.shape)
    rb.pos, rb.full = 0, True
    return lambda: rb.sample(SAMPLE)


CASES: dict[str, dict[str, Callable[[str], Callable[[], Any]]]] = {
    "uniform": {"swath": uniform, "torchrl": uniform, "stable-baselines3": sb3},
    "prioritised": {"swath": prioritised, "torchrl": prioritised},
    "prioritised, with new priorities": {"swath": updated, "torchrl": updated},
    f"slices of {SLICE}": {"swath": slices, "torchrl": slices},
}


@dataclass
class Sampling:
    """By library, in every repeat: p50 and p99 of the seconds that a sample takes."""

    case: str
    p50_s: dict[str, list[float]] = field(default_factory=dict)
    p99_s: dict[str, list[float]] = field(default_factory=dict)
    #: What is special about a library here.
    notes: dict[str, str] = field(default_factory=dict)

    def ratio(self, name: str) -> float:
        """How many times longer theirs takes."""
        return median(theirs / mine for mine, theirs in zip(self.p50_s["swath"], self.p50_s[name], strict=True))

    def rows(self) -> list[list[str]]:
        return [
            [
                self.case,
                name + ("*" if name in self.notes else ""),
                f"{1e6 * median(self.p50_s[name]):,.0f} µs",
                f"{1e6 * median(self.p99_s[name]):,.0f} µs",
                "" if name == "swath" else f"{self.ratio(name):.2f} ×",
            ]
            for name in self.p50_s
        ]

    def table(self) -> str:
        lines = [
            f"  {case:<36}{name:<20}{p50:>12}{p99:>12}{ratio:>12}"
            for case, name, p50, p99, ratio in [_HEADER, *self.rows()]
        ]
        return "\n".join([*lines, *(f"  *{name}: {note}" for name, note in self.notes.items())])

    def as_json(self) -> dict[str, Any]:
        return vars(self)


_HEADER = ["sampler", "library", "p50", "p99", "times swath's"]


def heading(options: argparse.Namespace) -> str:
    return f"sample({SAMPLE}) of {CAPACITY:,} CartPole frames; {CALLS} calls a repeat, {options.repeats} repeats"


def run(options: argparse.Namespace) -> Iterator[Sampling]:
    for case, makers in CASES.items():
        names = [name for name in makers if not options.only or name == "swath" or name in options.only]
        notes = {}
        if "torchrl" in names and "prioritised" in case and _lend_torchrl_a_tree():
            notes["torchrl"] = "its C++ tree, which does not load here, replaced by one that costs nothing"
        samplers = {name: makers[name](name) for name in names}
        result = Sampling(case, {name: [] for name in names}, {name: [] for name in names}, notes)
        for repeat in range(options.repeats):
            for name in order_of(names, repeat):
                gc.collect()
                seconds = _time(samplers[name])
                result.p50_s[name].append(float(np.percentile(seconds, 50)))
                result.p99_s[name].append(float(np.percentile(seconds, 99)))
        yield result


def _time(sample: Callable[[], Any]) -> list[float]:
    for _ in range(10):
        sample()
    seconds = []
    for _ in range(CALLS):
        started = time.perf_counter()
        sample()
        seconds.append(time.perf_counter() - started)
    return seconds


def markdown(results: Sequence[Sampling]) -> str:
    table = markdown_table(_HEADER, [row for result in results for row in result.rows()])
    notes = {f"\\*{name}: {note}" for result in results for name, note in result.notes.items()}
    return "\n\n".join([table, *sorted(notes)])
