"""Part `single`: collectors and loops in one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median

from contenders import CONTENDERS, TITLES
from interleaved import Race
from report import Throughput, markdown_table
from setting import Setting

RIVALS = [name for name in CONTENDERS if name != "swath"]


def heading(options: argparse.Namespace) -> str:
    length = f"{options.frames:,} frames" if options.frames else f"{options.seconds:g} s"
    return (
        "one process, torch.set_num_threads(1); "
        f"{options.repeats} repeats of at least {length}, contenders interleaved\n"
        "fps: policy-chosen transitions delivered per second; ratios and η: medians over the repeats"
    )


def run(options: argparse.Namespace) -> Iterator[Throughput]:
    names = ["swath", *(name for name in RIVALS if options.only is None or name in options.only)]
    contenders = {name: CONTENDERS[name] for name in names}
    for env_id in options.envs:
        for num_envs in options.counts:
            setting = Setting.rounded_up(env_id, num_envs, options.frames_per_batch)
            yield Race(setting, contenders, TITLES, ours={"swath": "swath is"}).run(options)


def markdown(results: Sequence[Throughput]) -> str:
    """One row per setting: medians, and in brackets how many times faster swath is."""
    rivals = [name for name in results[0].fps if name != "swath"]
    rows = [
        [
            result.setting.env_id,
            str(result.setting.num_envs),
            f"**{median(result.fps['swath']):,.0f}**",
            *(f"{median(result.fps[name]):,.0f} ({result.ratio('swath', name):.1f} ×)" for name in rivals),
            f"{result.efficiency('swath'):.2f}",
        ]
        for result in results
    ]
    return markdown_table(["env", "envs", TITLES["swath"], *(TITLES[name] for name in rivals), "η"], rows)
