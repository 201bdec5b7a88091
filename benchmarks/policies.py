"""Part `policies`: the policies that people write, each in all collectors and in a loop; what capturing them gains."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import contenders
import multi_contenders
from interleaved import frames_per_second, order_of, settle
from multi import WARM_UP_ROUNDS
from policy_contenders import CASES, CONTENDERS, MULTI_CONTENDERS, Case
from report import markdown_table, median_ratio, spread
from setting import Setting

COUNTS = (1, 8)
#: The one that is collected in workers.
MULTI_CASE, MULTI_ENVS = "forward", 4
RIVALS = [name for name in (*CONTENDERS, *MULTI_CONTENDERS) if not name.startswith("swath")]
TITLES = {**contenders.TITLES, **multi_contenders.TITLES, "swath-called": "capture_policy=False"}
STARTUP_REPEATS = 3
#: Titles, and arguments of the program that is measured.
STARTUPS = {
    "Collector": ["1", "capture"],
    "Collector, capture_policy=False": ["1", "call"],
    "MultiSync, 4 workers": ["4", "capture"],
    "MultiSync, 4 workers, capture_policy=False": ["4", "call"],
}
_PROBE = Path(__file__).with_name("policies_probe.py")


@dataclass
class Measured:
    """All samples of one policy in one setting; the i-th ones of all contenders were taken in the same repeat."""

    policy: str
    setting: Setting
    #: The contenders that the others are compared with, and the title of that column.
    ours: dict[str, str]
    fps: dict[str, list[float]] = field(default_factory=dict)
    #: By contender: what ``policy_plan()`` says.
    plans: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return CASES[self.policy].title

    def ratio(self, ours: str, name: str) -> float:
        return median_ratio(self.fps[ours], self.fps[name])

    def cells(self, name: str) -> list[str]:
        return ["" if ours == name else f"{self.ratio(ours, name):.2f} ×" for ours in self.ours]

    def table(self) -> str:
        setting = self.setting
        lines = [
            f"{self.title} ({self.policy}), {setting}: batches of {setting.frames_per_batch:,} frames",
            *(f"  {name}: {plan}" for name, plan in self.plans.items()),
            f"  {'contender':<22}{'median fps':>11}{'min .. max':>20}" + _right(self.ours.values()),
        ]
        for name, samples in self.fps.items():
            lines.append(f"  {TITLES[name]:<22}{spread(samples)}{_right(self.cells(name))}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            **asdict(self.setting),
            "frames_per_batch": self.setting.frames_per_batch,
            "plans": self.plans,
            "fps": self.fps,
        }


@dataclass
class StartUp:
    """Seconds of every repeat, by title."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {title: [] for title in STARTUPS})

    def rows(self) -> list[list[str]]:
        return [[title, f"{median(samples):.2f} s"] for title, samples in self.seconds.items()]

    def table(self) -> str:
        lines = [f"{CASES['agent'].title}: seconds from the constructor to the end of the first 1,000 frames"]
        return "\n".join([*lines, *(f"  {title:<44}{seconds:>9}" for title, seconds in self.rows())])

    def as_json(self) -> dict[str, Any]:
        return {"startup_s": self.seconds}


def heading(options: argparse.Namespace) -> str:
    length = f"{options.frames:,} frames" if options.frames else f"{options.seconds:g} s"
    return (
        f"policies of two hidden layers of 64, the same module for all; {options.repeats} repeats of at least "
        f"{length}, contenders interleaved\nabove each table: what policy_plan() says when all is over"
    )


def run(options: argparse.Namespace) -> Iterator[Measured | StartUp]:
    policies = options.policies or list(CASES)
    for policy in policies:
        for num_envs in COUNTS:
            setting = CASES[policy].setting(num_envs, options.frames_per_batch)
            yield _race(policy, setting, _wanted(CONTENDERS, options), {"swath": "swath is"}, options)
    if MULTI_CASE in policies:
        setting = CASES[MULTI_CASE].setting(MULTI_ENVS, options.frames_per_batch)
        ours = {"swath-sync": "sync is", "swath-async": "async is"}
        yield _race(MULTI_CASE, setting, _wanted(MULTI_CONTENDERS, options), ours, options, WARM_UP_ROUNDS)
    if not options.policies:
        yield _start_up()


def _wanted(all_of: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: make
        for name, make in all_of.items()
        if name.startswith("swath") or options.only is None or name in options.only
    }


def _race(
    policy: str,
    setting: Setting,
    makers: dict[str, Callable[[Case, Setting], Any]],
    ours: dict[str, str],
    options: argparse.Namespace,
    warm_up_rounds: int = 0,
) -> Measured:
    result = Measured(policy, setting, ours, {name: [] for name in makers})
    running: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, make in makers.items():
            running[name] = make(CASES[policy], setting)
            stack.callback(running[name].close)
        for name, contender in running.items():  # warms up as well
            for _ in range(2):
                contender.collect(contender.batches.frames_per_batch)
                contender.check(name)
            contender.rest()
        for repeat in range(options.repeats):
            for name in order_of(list(running), repeat):
                settle(warm_up_rounds > 0)
                result.fps[name].append(frames_per_second(running[name], warm_up_rounds, options))
        for name in ours:
            running[name].check(name)  # what was measured, too
            result.plans[name] = running[name].plan()
    return result


def _start_up() -> StartUp:
    result = StartUp()
    for _ in range(STARTUP_REPEATS):
        for title, arguments in STARTUPS.items():
            command = [sys.executable, str(_PROBE), *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
            result.seconds[title].append(json.loads(done.stdout.splitlines()[-1]))
    return result


def _right(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>11}" for cell in cells)


def markdown(results: Sequence[Measured | StartUp]) -> str:
    """One row per policy and number of envs; workers and start-up by themselves."""
    measured = [result for result in results if isinstance(result, Measured)]
    tables = [
        _comparison([result for result in measured if ours in result.fps], ours) for ours in ("swath", "swath-sync")
    ]
    starts = [markdown_table(["start-up", "seconds"], r.rows()) for r in results if isinstance(r, StartUp)]
    return "\n\n".join(filter(None, [*tables, *starts]))


def _comparison(results: Sequence[Measured], ours: str) -> str:
    if not results:
        return ""
    others = [name for name in results[0].fps if name != ours]
    rows = [
        [
            result.title,
            str(result.setting.num_envs),
            f"**{median(result.fps[ours]):,.0f}**",
            *(f"{median(result.fps[name]):,.0f} ({result.ratio(ours, name):.1f} ×)" for name in others),
            result.plans[ours],
        ]
        for result in results
    ]
    return markdown_table(["policy", "envs", *(TITLES[name] for name in (ours, *others)), "policy_plan()"], rows)
