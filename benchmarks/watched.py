"""Part `watched`: what it costs to look: the same collector left alone, traced, and asked for readings, in turns."""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from contenders import swath_env, swath_policy
from interleaved import order_of
from report import markdown_table
from setting import Setting

#: Of each look a turn, of at least so many seconds; many short turns, since the machine's speed drifts.
TURN_S = 0.4
TURNS_PER_REPEAT = 4
#: As often as a live view does.
_READINGS_PER_S = 8
_HEADER = ["collector", "alone, frames/s", "traced / alone", "quartiles", "read / alone", "quartiles"]


def _single(num_envs: int) -> Any:
    from swath.collectors import Collector
    from swath.envs import SerialEnv

    setting = Setting.rounded_up("CartPole-v1", num_envs, 1000)
    env = SerialEnv(num_envs, partial(swath_env, setting)) if num_envs > 1 else swath_env(setting)
    policy = swath_policy(setting, setting.make_network())
    return Collector(env, policy, frames_per_batch=setting.frames_per_batch)


def _workers(sync: bool) -> Any:
    from swath.collectors import MultiAsyncCollector, MultiSyncCollector

    setting = Setting("CartPole-v1", 4, 250)
    kind, frames = (MultiSyncCollector, 1000) if sync else (MultiAsyncCollector, 250)
    policy = swath_policy(setting, setting.make_network())
    return kind([partial(swath_env, setting)] * 4, policy, frames_per_batch=frames)


def _batched() -> Any:
    from swath.collectors import AsyncBatchedCollector

    setting = Setting("CartPole-v1", 8, 125)
    policy = swath_policy(setting, setting.make_network())
    return AsyncBatchedCollector([partial(swath_env, setting)] * 8, policy, frames_per_batch=1000)


CASES: dict[str, Callable[[], Any]] = {
    "Collector, 1 CartPole": partial(_single, 1),
    "Collector, 8 CartPoles": partial(_single, 8),
    "MultiSync, 4 CartPoles": partial(_workers, True),
    "MultiAsync, 4 CartPoles": partial(_workers, False),
    "AsyncBatched, 8 CartPoles": _batched,
}


@contextmanager
def _read(collector: Any) -> Iterator[None]:
    over = threading.Event()

    def look() -> None:
        while not over.wait(1 / _READINGS_PER_S):
            collector.reading()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _looks(folder: str) -> dict[str, Callable[[Any], AbstractContextManager[Any]]]:
    return {
        "alone": lambda collector: nullcontext(),
        "traced": lambda collector: collector.trace(Path(folder) / "trace.json"),
        "read": _read,
    }


@dataclass
class Watched:
    """By look, in every turn: frames per second."""

    title: str
    fps: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self, look: str) -> list[float]:
        return [mine / alone for mine, alone in zip(self.fps[look], self.fps["alone"], strict=True)]

    def row(self) -> list[str]:
        row = [self.title, f"{median(self.fps['alone']):,.0f}"]
        for look in ("traced", "read"):
            low, _, high = quantiles(self.ratios(look), n=4)
            row += [f"{median(self.ratios(look)):.3f}", f"{low:.2f} .. {high:.2f}"]
        return row

    def table(self) -> str:
        return markdown_table(_HEADER, [self.row()])

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "fps": self.fps}


def heading(options: argparse.Namespace) -> str:
    turns = options.repeats * TURNS_PER_REPEAT
    return f"Looking at a collector: {turns} turns of {TURN_S} s each; medians of ratios of neighbouring turns"


def run(options: argparse.Namespace) -> Iterator[Watched]:
    for title, make in CASES.items():
        with tempfile.TemporaryDirectory() as folder, make() as collector:
            yield _measured(title, collector, _looks(folder), options.repeats * TURNS_PER_REPEAT)


def _measured(title: str, collector: Any, looks: Any, turns: int) -> Watched:
    batches = iter(collector)
    result = Watched(title, {name: [] for name in looks})
    for turn in range(-1, turns):  # the first one warms up
        for name in order_of(list(looks), turn):
            gc.collect()
            with looks[name](collector):
                rate = _rate(batches)
            if turn >= 0:
                result.fps[name].append(rate)
    return result


def _rate(batches: Iterator[Any]) -> float:
    """The first batches of a turn were collected in another one."""
    for _ in range(8):
        next(batches)
    frames, started = 0, time.perf_counter()
    while time.perf_counter() - started < TURN_S:
        frames += next(batches).numel()
    return frames / (time.perf_counter() - started)


def markdown(results: Sequence[Watched]) -> str:
    return markdown_table(_HEADER, [result.row() for result in results])
