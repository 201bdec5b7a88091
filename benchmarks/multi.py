"""Part `multi`: collectors with worker processes, and what else spreads envs over processes.

The ideal here is C times that of one core with its share of the envs, X* = C / (s + c + f(b) / b) with b = envs / C.
Nothing is taken off for what C busy cores cost each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from interleaved import Race
from machine import usable_cores
from multi_contenders import CONTENDERS, PACKED_CONTENDERS, PACKED_STEPS, TITLES
from report import Throughput, throughput_markdown
from setting import Setting

OURS = {"swath-sync": "sync is", "swath-async": "async is"}
RIVALS = [name for name in CONTENDERS if name not in OURS]
#: Before a measurement; collectors that work ahead have up to two batches of each env ready.
WARM_UP_ROUNDS = 3


def heading(options: argparse.Namespace) -> str:
    length = f"{options.frames:,} frames" if options.frames else f"{options.seconds:g} s"
    return (
        f"worker processes; {options.repeats} repeats of at least {length}, contenders interleaved, one at a time\n"
        "sync is, async is: how many times faster swath's MultiSync and MultiAsync are; medians over the repeats"
    )


def run(options: argparse.Namespace) -> Iterator[Throughput]:
    names = [*OURS, *(name for name in RIVALS if options.only is None or name in options.only)]
    contenders = {name: CONTENDERS[name] for name in names}
    few = Setting.rounded_up("CartPole-v1", 4, options.frames_per_batch)
    many = Setting("CartPole-v1", 64, PACKED_STEPS)
    cores = usable_cores()
    yield Race(few, contenders, TITLES, OURS, WARM_UP_ROUNDS, min(cores, few.num_envs)).run(options)
    yield Race(many, PACKED_CONTENDERS, TITLES, OURS, WARM_UP_ROUNDS, min(cores, 2)).run(options)


markdown = throughput_markdown
