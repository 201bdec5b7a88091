"""Tables for people, Markdown for the README, JSON for later."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import swath
from contenders import TITLES
from ideal import IdealParts
from setting import Setting


@dataclass
class Result:
    """All samples of one setting; the i-th ones of all contenders were taken in the same repeat."""

    setting: Setting
    mean_episode: float
    fps: dict[str, list[float]] = field(default_factory=dict)
    ideal: list[IdealParts] = field(default_factory=list)

    def ratio_to(self, name: str) -> float:
        """How many times faster swath is: the median over the repeats."""
        return median(ours / theirs for ours, theirs in zip(self.fps["swath"], self.fps[name], strict=True))

    def efficiency(self, name: str) -> float:
        """η, the median over the repeats."""
        return median(fps / ideal.fps for fps, ideal in zip(self.fps[name], self.ideal, strict=True))

    def table(self) -> str:
        setting = self.setting
        lines = [
            f"{setting}: batches of {setting.frames_per_batch:,} frames ({setting.steps_per_batch} steps of each), "
            f"episodes of {self.mean_episode:.0f} steps",
            f"  {'contender':<20}{'median fps':>11}{'min .. max':>20}{'swath is':>11}{'η':>8}",
        ]
        for name, samples in self.fps.items():
            spread = f"{min(samples):,.0f} .. {max(samples):,.0f}"
            ratio = "" if name == "swath" else f"{self.ratio_to(name):.2f} ×"
            lines.append(
                f"  {TITLES[name]:<20}{median(samples):>11,.0f}{spread:>20}{ratio:>11}{self.efficiency(name):>8.3f}"
            )
        ideals = [parts.fps for parts in self.ideal]
        spread = f"{min(ideals):,.0f} .. {max(ideals):,.0f}"
        lines.append(f"  {'ideal X*':<20}{median(ideals):>11,.0f}{spread:>20}")
        lines.append("  " + self._parts())
        return "\n".join(lines)

    def _parts(self) -> str:
        envs = self.setting.num_envs
        step_us, copy_us, forward_us = (
            1e6 * median(values)
            for values in (
                [parts.step_s for parts in self.ideal],
                [parts.copy_s for parts in self.ideal],
                [parts.forward_s for parts in self.ideal],
            )
        )
        kinds = [parts.forward_kind for parts in self.ideal]
        usual = max(set(kinds), key=kinds.count)
        return (
            f"ideal: s = {step_us:.2f} µs (step), c = {copy_us:.2f} µs (copy), "
            f"f({envs})/{envs} = {forward_us / envs:.2f} µs (forward: {usual})"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.setting),
            "frames_per_batch": self.setting.frames_per_batch,
            "mean_episode": self.mean_episode,
            "fps": self.fps,
            "ideal": [{**asdict(parts), "fps": parts.fps} for parts in self.ideal],
        }


def markdown(results: list[Result]) -> str:
    """One row per setting: medians, and in brackets how many times faster swath is."""
    rivals = [name for name in results[0].fps if name != "swath"]
    header = ["env", "envs", TITLES["swath"], *(TITLES[name] for name in rivals), "η"]
    rows = [
        [
            result.setting.env_id,
            str(result.setting.num_envs),
            f"**{median(result.fps['swath']):,.0f}**",
            *(f"{median(result.fps[name]):,.0f} ({result.ratio_to(name):.1f} ×)" for name in rivals),
            f"{result.efficiency('swath'):.2f}",
        ]
        for result in results
    ]
    divider = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, divider, *rows])


def machine_facts() -> dict[str, Any]:
    packages = ("torchrl", "torch", "tensordict", "gymnasium", "numpy")
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"swath": swath.__version__, **{package: _version(package) for package in packages}},
        "swath_commit": _commit(),
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def write_json(path: Path, facts: dict[str, Any], parameters: dict[str, Any], results: list[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "parameters": parameters, "results": [result.as_json() for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n")
