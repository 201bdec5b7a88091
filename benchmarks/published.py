"""Part `published`: policies that people have published, captured and called, in one process.

They are those of the tests (tests/published_policies.py), which show that both ways give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from interleaved import order_of
from report import markdown_table, median_ratio

COUNTS = (1, 8)


def heading(options: argparse.Namespace) -> str:
    return (
        f"published policies, in one process; {options.repeats} repeats of batches of 250 steps, interleaved\n"
        "gain: frames per second captured, over those with capture_policy=False"
    )


@dataclass
class Gain:
    """Frames per second of every repeat, captured and called."""

    policy: str
    num_envs: int
    plan: str = ""
    captured: list[float] = field(default_factory=list)
    called: list[float] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        gain = f"{median_ratio(self.captured, self.called):.1f} ×"
        return [f"{median(self.captured):,.0f}", f"{median(self.called):,.0f}", gain]

    def table(self) -> str:
        captured, called, gain = self.cells
        return f"{self.policy:<32}{self.num_envs} envs: {captured:>8} {called:>8} {gain:>7}  {self.plan}"

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "num_envs": self.num_envs,
            "plan": self.plan,
            "fps": {"captured": self.captured, "called": self.called},
        }


def run(options: argparse.Namespace) -> Iterator[Gain]:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from published_policies import PUBLISHED, TORCHRL

    for name, (make_env, make_policy) in {**PUBLISHED, **TORCHRL}.items():
        for num_envs in COUNTS:
            yield _measure(Gain(name, num_envs), make_env, make_policy, options.repeats)


def _measure(gain: Gain, make_env: Any, make_policy: Any, repeats: int) -> Gain:
    from swath.collectors import Collector
    from swath.envs import SerialEnv

    torch.manual_seed(0)
    policy = make_policy()

    def collector(capture: bool) -> Any:
        env = make_env() if gain.num_envs == 1 else SerialEnv(gain.num_envs, make_env)
        return Collector(env, policy, frames_per_batch=250 * gain.num_envs, capture_policy=capture)

    with collector(True) as captured, collector(False) as called:
        streams = {"captured": iter(captured), "called": iter(called)}
        for repeat in range(repeats + 1):  # the first warms up
            for name in order_of(list(streams), repeat):
                started = time.perf_counter()
                num_frames = next(streams[name]).numel()
                if repeat:
                    getattr(gain, name).append(num_frames / (time.perf_counter() - started))
        gain.plan = captured.policy_plan()
    return gain


def markdown(results: Sequence[Gain]) -> str:
    """One row a policy: what is said of it, and for 1 and 8 envs frames per second captured, called, and the gain."""
    names = dict.fromkeys(result.policy for result in results)
    rows = []
    for name in names:
        found = [result for result in results if result.policy == name]
        rows.append([name, found[-1].plan, *(cell for result in found for cell in result.cells)])
    counts = [f"{what}, {n} env" for n in COUNTS for what in ("captured", "called", "gain")]
    return markdown_table(["policy", "policy_plan()", *counts], rows)
