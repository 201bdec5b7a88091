"""Tables for people, Markdown for the README, JSON for later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ideal import IdealParts
from setting import Setting


class Result(Protocol):
    """What a part of the benchmark found out."""

    def table(self) -> str: ...

    def as_json(self) -> dict[str, Any]: ...


@dataclass
class Throughput:
    """All samples of one setting; the i-th ones of all contenders were taken in the same repeat."""

    setting: Setting
    mean_episode: float
    titles: dict[str, str]
    #: The contenders that the others are compared with, and the title of that column.
    ours: dict[str, str]
    #: The ideal is that of one core, times this.
    cores: int = 1
    fps: dict[str, list[float]] = field(default_factory=dict)
    ideal: list[IdealParts] = field(default_factory=list)

    def ratio(self, ours: str, name: str) -> float:
        """How many times faster one of ours is: the median over the repeats."""
        return median_ratio(self.fps[ours], self.fps[name])

    def efficiency(self, name: str) -> float:
        """η, the median over the repeats."""
        return median(fps / ideal for fps, ideal in zip(self.fps[name], self.ideal_fps, strict=True))

    @property
    def ideal_fps(self) -> list[float]:
        return [self.cores * parts.fps for parts in self.ideal]

    def table(self) -> str:
        setting = self.setting
        ratio_titles = "".join(f"{title:>11}" for title in self.ours.values())
        lines = [
            f"{setting}: batches of {setting.frames_per_batch:,} frames ({setting.steps_per_batch} steps of each), "
            f"episodes of {self.mean_episode:.0f} steps",
            f"  {'contender':<22}{'median fps':>11}{'min .. max':>20}{ratio_titles}{'η':>8}",
        ]
        for name, samples in self.fps.items():
            ratios = "".join(f"{self._ratio_cell(ours, name):>11}" for ours in self.ours)
            lines.append(f"  {self.titles[name]:<22}{spread(samples)}{ratios}{self.efficiency(name):>8.3f}")
        title = "ideal X*" if self.cores == 1 else f"ideal X*, {self.cores} cores"
        lines.append(f"  {title:<22}{spread(self.ideal_fps)}")
        lines.append("  " + self._parts())
        return "\n".join(lines)

    def _ratio_cell(self, ours: str, name: str) -> str:
        return "" if name == ours else f"{self.ratio(ours, name):.2f} ×"

    def _parts(self) -> str:
        envs = self.ideal[0].num_envs
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
            "cores": self.cores,
            "fps": self.fps,
            "ideal": [{**asdict(parts), "fps": parts.fps} for parts in self.ideal],
        }


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the repeats: the i-th samples of both were taken in the same one."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def spread(samples: Sequence[float]) -> str:
    return f"{median(samples):>11,.0f}{f'{min(samples):,.0f} .. {max(samples):,.0f}':>20}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    divider = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, divider, *rows])


def throughput_markdown(results: Sequence[Throughput]) -> str:
    """One table per setting, one row per contender."""
    return "\n\n".join(f"{result.setting}:\n\n{_throughput_table(result)}" for result in results)


def _throughput_table(result: Throughput) -> str:
    header = ["contender", "frames/s", *(f"{result.titles[ours]} is" for ours in result.ours), "η"]
    rows = [
        [
            result.titles[name],
            f"{median(samples):,.0f}",
            *("" if ours == name else f"{result.ratio(ours, name):.1f} ×" for ours in result.ours),
            f"{result.efficiency(name):.2f}",
        ]
        for name, samples in result.fps.items()
    ]
    return markdown_table(header, rows)


def write_json(path: Path, facts: dict[str, Any], parameters: dict[str, Any], results: dict[str, list[Any]]) -> None:
    """``results`` by the name of the part; each says which part it is from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"part": part, **result.as_json()} for part, found in results.items() for result in found]
    content = {"machine": facts, "parameters": parameters, "results": entries}
    path.write_text(json.dumps(content, indent=1) + "\n")
