"""Part `filling`: 4 CartPole workers fill a replay buffer in the background, alone and with a learner that samples."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from contenders import swath_env, swath_policy, torchrl_env, torchrl_policy
from interleaved import order_of
from report import markdown_table
from setting import Setting

SETTING = Setting("CartPole-v1", 4, 250)
CAPACITY = 200_000
SAMPLE = 256
WARM_UP_FRAMES = 4000
ITERATED = "swath, iterated over"
STARTED = "swath, start()"
BATCHED = "swath AsyncBatched, start()"
TORCHRL = "torchrl, start()"


def _swath(replay_buffer: Any, **options: Any) -> Any:
    from swath.collectors import MultiAsyncCollector

    return MultiAsyncCollector(
        [lambda: swath_env(SETTING)] * SETTING.num_envs,
        swath_policy(SETTING, SETTING.make_network()),
        frames_per_batch=SETTING.steps_per_batch,
        total_frames=-1,
        replay_buffer=replay_buffer,
        **options,
    )


def swath_iterated() -> tuple[Any, Any]:
    return _swath(None), None


def swath_started() -> tuple[Any, Any]:
    from swath.data import LazyTensorStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=SAMPLE)
    return _swath(rb), rb


def batched_started() -> tuple[Any, Any]:
    """Its policy runs in a thread of the learner's process."""
    from swath.collectors import AsyncBatchedCollector
    from swath.data import LazyTensorStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=SAMPLE)
    collector = AsyncBatchedCollector(
        [lambda: swath_env(SETTING)] * SETTING.num_envs,
        swath_policy(SETTING, SETTING.make_network()),
        frames_per_batch=SETTING.frames_per_batch,
        total_frames=-1,
        replay_buffer=rb,
    )
    return collector, rb


def torchrl_started() -> tuple[Any, Any]:
    from torchrl.collectors import MultiAsyncCollector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=SAMPLE, shared=True)
    collector = MultiAsyncCollector(
        [lambda: torchrl_env(SETTING)] * SETTING.num_envs,
        torchrl_policy(SETTING, SETTING.make_network()),
        frames_per_batch=SETTING.steps_per_batch,
        total_frames=-1,
        replay_buffer=rb,
    )
    return collector, rb


CONTENDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    ITERATED: swath_iterated,
    STARTED: swath_started,
    BATCHED: batched_started,
    TORCHRL: torchrl_started,
}


@dataclass
class Filling:
    """By contender, in every repeat: frames per second, alone and with a learner; the learner's samples and times."""

    alone: dict[str, list[float]] = field(default_factory=dict)
    with_learner: dict[str, list[float]] = field(default_factory=dict)
    samples_per_s: dict[str, list[float]] = field(default_factory=dict)
    p50_s: dict[str, list[float]] = field(default_factory=dict)
    p99_s: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        rows = []
        for name in self.alone:
            row = [name, f"{median(self.alone[name]):,.0f}", _spread(self.alone[name])]
            if name in self.with_learner:
                latency = f"{1e6 * median(self.p50_s[name]):,.0f} / {1e6 * median(self.p99_s[name]):,.0f} µs"
                row += [
                    f"{median(self.with_learner[name]):,.0f}",
                    f"{median(self.samples_per_s[name]):,.0f}",
                    latency,
                ]
            else:
                row += ["", "", ""]
            rows.append(row)
        return rows

    def ratios(self) -> list[tuple[str, float]]:
        def of(mine: Sequence[float], theirs: Sequence[float]) -> float:
            return median(a / b for a, b in zip(mine, theirs, strict=True))

        theirs = TORCHRL
        found = [("start() / iterated over", of(self.alone[STARTED], self.alone[ITERATED]))]
        found.append(("start() with a learner / alone", of(self.with_learner[STARTED], self.alone[STARTED])))
        if theirs in self.alone:
            found.append(("start() / torchrl's", of(self.alone[STARTED], self.alone[theirs])))
            found.append(("with a learner / torchrl's", of(self.with_learner[STARTED], self.with_learner[theirs])))
            found.append(("sample p50, torchrl's / swath's", of(self.p50_s[theirs], self.p50_s[STARTED])))
        return found

    def table(self) -> str:
        lines = [
            f"  {name:<30}{alone:>12}{spread:>20}{learner:>16}{samples:>12}{latency:>20}"
            for name, alone, spread, learner, samples, latency in [_HEADER, *self.rows()]
        ]
        return "\n".join([*lines, "", *(f"  {name:<34}{ratio:>8.2f}" for name, ratio in self.ratios())])

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "ratios": dict(self.ratios())}


_HEADER = ["contender", "frames/s", "min .. max", "with a learner", "samples/s", "sample p50 / p99"]


def _spread(samples: Sequence[float]) -> str:
    return f"{min(samples):,.0f} .. {max(samples):,.0f}"


def heading(options: argparse.Namespace) -> str:
    return (
        f"4 CartPole workers fill a buffer of {CAPACITY:,} frames with start(); then the learner samples {SAMPLE} as "
        f"fast as it can\n{options.repeats} repeats, interleaved, each with new workers"
    )


def run(options: argparse.Namespace) -> Iterator[Filling]:
    names = [name for name in CONTENDERS if not options.only or "swath" in name or "torchrl" in options.only]
    seconds = 2 * (options.seconds or 1.0)
    result = Filling({name: [] for name in names}, *({name: [] for name in names[1:]} for _ in range(4)))
    for repeat in range(options.repeats):
        for name in order_of(names, repeat):
            gc.collect()
            collector, rb = CONTENDERS[name]()
            try:
                if rb is None:
                    result.alone[name].append(_iterate(collector, seconds))
                else:
                    _fill(name, collector, rb, seconds, result)
            finally:
                (collector.shutdown if rb is None else collector.async_shutdown)()
    yield result


def _iterate(collector: Any, seconds: float) -> float:
    batches = iter(collector)
    warm = 0
    while warm < WARM_UP_FRAMES:
        warm += next(batches).numel()
    frames, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        frames += next(batches).numel()
    return frames / (time.perf_counter() - started)


def _fill(name: str, collector: Any, rb: Any, seconds: float, result: Filling) -> None:
    collector.start()
    while rb.write_count < WARM_UP_FRAMES:
        time.sleep(0.05)
    before, started = rb.write_count, time.perf_counter()
    time.sleep(seconds)
    result.alone[name].append((rb.write_count - before) / (time.perf_counter() - started))
    latencies, sample = [], None
    before, started = rb.write_count, time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        sample = rb.sample()
        latencies.append(time.perf_counter() - now)
    taken = time.perf_counter() - started
    assert sample is not None
    assert sample.shape == (SAMPLE,), sample.shape
    result.with_learner[name].append((rb.write_count - before) / taken)
    result.samples_per_s[name].append(len(latencies) / taken)
    p50_s, p99_s = np.percentile(latencies, [50, 99])
    result.p50_s[name].append(float(p50_s))
    result.p99_s[name].append(float(p99_s))


def markdown(results: Sequence[Filling]) -> str:
    tables = [markdown_table(_HEADER, result.rows()) for result in results]
    tables += [markdown_table(["ratio", ""], [[n, f"{r:.2f}"] for n, r in result.ratios()]) for result in results]
    return "\n\n".join(tables)
