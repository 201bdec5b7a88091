"""Contenders measured in turn, in every repeat: a machine that becomes slower for a while hits all of them."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from check import check
from contenders import Contender
from ideal import Ideal
from machine import wait_until_idle
from report import Throughput
from setting import Setting


@dataclass(frozen=True)
class Race:
    """One setting, and who collects it."""

    setting: Setting
    contenders: dict[str, Callable[[Setting], Contender]]
    titles: dict[str, str]
    #: The contenders that the others are compared with, and the title of that column.
    ours: dict[str, str]
    #: Before every measurement: rounds that do not count.
    warm_up_rounds: int = 0
    #: Over how many cores the ideal spreads the envs.
    cores: int = 1

    def run(self, options: argparse.Namespace) -> Throughput:
        share = Setting(self.setting.env_id, max(1, self.setting.num_envs // self.cores), self.setting.steps_per_batch)
        ideal = Ideal(share, seconds=options.seconds or 0.1)
        contenders: dict[str, Contender] = {}
        try:
            for name, make in self.contenders.items():
                contenders[name] = make(self.setting)
            for name, contender in contenders.items():  # warms up as well
                for _ in range(2):
                    contender.collect(contender.batches.frames_per_batch)
                    check(name, contender.last_batch(), contender.batches)
                contender.rest()
            ideal.measure()
            result = Throughput(self.setting, ideal.recording.mean_episode, self.titles, self.ours, self.cores)
            result.fps = {name: [] for name in contenders}
            for repeat in range(options.repeats):
                for name in order_of([*contenders, "ideal"], repeat):
                    self._settle()
                    if name == "ideal":
                        result.ideal.append(ideal.measure())
                    else:
                        result.fps[name].append(self._fps(contenders[name], options.seconds, options.frames))
            return result
        finally:
            for contender in contenders.values():
                contender.close()
            ideal.close()

    def _settle(self) -> None:
        gc.collect()  # nobody pays for another one's garbage
        if self.warm_up_rounds:
            wait_until_idle()

    def _fps(self, contender: Contender, seconds: float | None, frames: int | None) -> float:
        """Frames per second over whole rounds of all envs, for at least so long or so many."""
        contender.wake()
        contender.collect(self.warm_up_rounds * contender.frames_per_round)
        delivered = 0
        started = time.perf_counter()
        while True:
            delivered += contender.collect(contender.frames_per_round)
            elapsed = time.perf_counter() - started
            if elapsed >= (seconds or 0) and delivered >= (frames or 0):
                contender.rest()
                return delivered / elapsed


def order_of(names: list[str], repeat: int) -> list[str]:
    """Everyone comes first, and last, in turn; every other time backwards, so that neighbours change too."""
    shift = repeat % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if repeat % 2 else rotated
