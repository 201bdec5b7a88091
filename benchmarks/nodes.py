"""Part `nodes`: collectors on 2 nodes of this machine, by engine; and what a batch and a weight update cost."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from interleaved import order_of
from report import markdown_table

PROBE = Path(__file__).parent / "nodes_probe.py"
#: Library, engine, mode. The first of each mode is what an engine's overhead is measured against.
CONTENDERS = [
    ("swath", "process", "sync"),
    ("swath", "gloo", "sync"),
    ("swath", "ray", "sync"),
    ("torchrl", "gloo", "sync"),
    ("torchrl", "ray", "sync"),
    ("swath", "process", "async"),
    ("swath", "gloo", "async"),
    ("swath", "ray", "async"),
    ("torchrl", "gloo", "async"),
    ("torchrl", "ray", "async"),
]
ENVS_PER_NODE = (1, 8)
#: 10 MB to 4 nodes.
UPDATES = [("swath", "gloo"), ("swath", "ray"), ("swath", "rpc"), ("torchrl", "gloo"), ("torchrl", "ray")]
_SECONDS_FOR_ONE = 150


def probe(*arguments: Any) -> dict[str, Any] | None:
    """A contender's figures; None if it failed."""
    command = [sys.executable, str(PROBE), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_FOR_ONE, check=False)
    except subprocess.TimeoutExpired:
        return None
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    print(f"  {' '.join(map(str, arguments))} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return None


@dataclass
class OnNodes:
    """By contender, in every repeat: frames per second."""

    envs_per_node: int
    fps: dict[str, list[float]] = field(default_factory=dict)
    start_up_s: dict[str, list[float]] = field(default_factory=dict)
    bytes_per_batch: dict[str, float] = field(default_factory=dict)
    #: Of the process that gets the batches.
    driver_cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, mine: str, theirs: str) -> float | None:
        pairs = list(zip(self.fps.get(mine, ()), self.fps.get(theirs, ()), strict=False))
        return median(a / b for a, b in pairs) if pairs else None

    def rows(self) -> list[list[str]]:
        rows = []
        for name, samples in self.fps.items():
            library, engine, mode = name.split()
            if not samples:
                rows.append([name, "failed", "", "", "", "", ""])
                continue
            local = self.ratio(name, f"swath process {mode}")
            rival = self.ratio(f"swath {engine} {mode}", name) if library == "torchrl" else None
            rows.append(
                [
                    name,
                    f"{median(samples):,.0f}",
                    f"{min(samples):,.0f} .. {max(samples):,.0f}",
                    "" if local is None else f"{local:.2f}",
                    "" if rival is None else f"{rival:.1f}x",
                    f"{1e3 * median(self.driver_cpu_s[name]):.1f} ms",
                    f"{median(self.start_up_s[name]):.1f} s",
                ]
            )
        return rows

    def table(self) -> str:
        lines = [f"2 nodes x {self.envs_per_node} CartPole"]
        lines += [
            f"  {name:<24}{fps:>10}{spread:>20}{local:>20}{rival:>12}{cpu:>12}{start:>10}"
            for name, fps, spread, local, rival, cpu, start in [_HEADER, *self.rows()]
        ]
        lines += [f"  {name}: {size:,.0f} bytes a batch" for name, size in self.bytes_per_batch.items()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return vars(self)


_HEADER = ["contender", "frames/s", "min .. max", "of MultiCollector", "swath is", "driver CPU", "start-up"]


@dataclass
class Updates:
    """Seconds of every call of update_policy_weights_, by contender."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        return [
            [name, f"{1e3 * median(calls):.1f} ms", f"{1e3 * min(calls):.1f} .. {1e3 * max(calls):.1f}"]
            if calls
            else [name, "failed", ""]
            for name, calls in self.seconds.items()
        ]

    def table(self) -> str:
        lines = ["update_policy_weights_() of 10 MB to 4 nodes that collect, until it returns"]
        return "\n".join([*lines, *(f"  {name:<24}{p50:>12}{spread:>22}" for name, p50, spread in self.rows())])

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def heading(options: argparse.Namespace) -> str:
    return (
        f"collectors on nodes of this machine, batches of 1,000 frames in all; {options.repeats} repeats, interleaved, "
        "each contender in a process of its own"
    )


def run(options: argparse.Namespace) -> Iterator[OnNodes | Updates]:
    contenders = [c for c in CONTENDERS if not options.only or c[0] == "swath" or "torchrl" in options.only]
    names = [" ".join(contender) for contender in contenders]
    seconds = 2 * (options.seconds or 1.0)
    chosen = [envs for envs in ENVS_PER_NODE if envs in options.counts] or ENVS_PER_NODE
    for envs in chosen:
        result = OnNodes(envs, {name: [] for name in names}, {name: [] for name in names})
        for repeat in range(options.repeats):
            for name in order_of(names, repeat):
                found = probe("collect", *name.split(), envs, seconds)
                if found is not None:
                    result.fps[name].append(found["fps"])
                    result.start_up_s[name].append(found["start_up_s"])
                    result.driver_cpu_s.setdefault(name, []).append(found["driver_cpu_s_per_batch"])
                    if "bytes_per_batch" in found:
                        result.bytes_per_batch[name] = found["bytes_per_batch"]
        yield result
    updates = Updates({f"{library} {engine}": [] for library, engine in UPDATES})
    for repeat in range(2):
        for library, engine in UPDATES if repeat % 2 else UPDATES[::-1]:
            found = probe("weights", library, engine, 10 if options.quick else 40)
            if found is not None:
                updates.seconds[f"{library} {engine}"] += found["seconds"]
    yield updates


def markdown(results: Sequence[OnNodes | Updates]) -> str:
    tables = []
    for result in results:
        if isinstance(result, OnNodes):
            header = [f"2 nodes x {result.envs_per_node} CartPole", *_HEADER[1:]]
        else:
            header = ["10 MB of weights to 4 nodes", "p50", "min .. max"]
        tables.append(markdown_table(header, result.rows()))
    return "\n\n".join(tables)
