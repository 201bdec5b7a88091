"""Contenders measured in turn, in every repeat: a machine that becomes slower for a while hits all of them."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
    #: In the ideal: every core calls the network for its envs, or one does for all, or nobody does.
    network: Literal["split", "central", "none"] = "split"

    def run(self, options: argparse.Namespace) -> Throughput:
        num_envs = self.setting.num_envs
        batch_size = max(1, num_envs // self.cores) if self.network == "split" else num_envs
        share = Setting(self.setting.env_id, batch_size, self.setting.steps_per_batch)
        ideal = Ideal(share, seconds=options.seconds or 0.1, with_network=self.network != "none")
        contenders: dict[str, Contender] = {}
        try:
            for name, make in self.contenders.items():
                contenders[name] = make(self.setting)
            for name, contender in contenders.items():  # warms up as well
                for _ in range(2):
                    contender.collect(contender.batches.frames_per_batch)
                    for data, setting in contender.checked():
                        check(name, data, setting, contender.by_network)
                contender.rest()
            ideal.measure()
            result = Throughput(self.setting, ideal.recording.mean_episode, self.titles, self.ours, self.cores)
            result.fps = {name: [] for name in contenders}
            for repeat in range(options.repeats):
                for name in order_of([*contenders, "ideal"], repeat):
                    settle(self.warm_up_rounds > 0)
                    if name == "ideal":
                        result.ideal.append(ideal.measure())
                    else:
                        result.fps[name].append(frames_per_second(contenders[name], self.warm_up_rounds, options))
            return result
        finally:
            for contender in contenders.values():
                contender.close()
            ideal.close()


def settle(has_processes: bool) -> None:
    gc.collect()  # nobody pays for another one's garbage
    if has_processes:
        wait_until_idle()


def frames_per_second(contender: Contender, warm_up_rounds: int, options: argparse.Namespace) -> float:
    """Over whole rounds of all envs, for at least so long or so many."""
    contender.wake()
    contender.collect(warm_up_rounds * contender.frames_per_round)
    delivered = 0
    started = time.perf_counter()
    while True:
        delivered += contender.collect(contender.frames_per_round)
        elapsed = time.perf_counter() - started
        if elapsed >= (options.seconds or 0) and delivered >= (options.frames or 0):
            contender.rest()
            return delivered / elapsed


def order_of(names: list[str], repeat: int) -> list[str]:
    """Everyone comes first, and last, in turn; every other time backwards, so that neighbours change too."""
    shift = repeat % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if repeat % 2 else rotated
