"""Every example with seeds 0, 1 and 2, one after another; then a page and pictures of what came out.

    make learn
    python examples/run_all.py --only ppo_cartpole --seeds 0
    python examples/run_all.py --report-only       # the page and the pictures again, from examples/results

Results are files in examples/results. docs/results.md and docs/pictures/learning-*.svg are made of them, and of nothing
else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import plot

HERE = Path(__file__).parent
EXAMPLES = (
    "ppo_cartpole",
    "dqn_cartpole",
    "sac_pendulum",
    "recurrent_ppo_masked_cartpole",
    "ppo_async_batched",
    "ppo_ray",
)
HEAD = """# Results

Made by `make learn` (`examples/run_all.py`), from the files in `examples/results`. Each run is a program of its own,
one after another, on {machine}.

A run ends when 100 evaluation episodes are good enough, or when its frames are used up. What the table shows is
measured after that, with 100 other episodes of the final policy: each the first of an env of its own (a `SerialEnv` of
100), actions without exploration. Seconds are from the first line of the training to its last, with the start of
workers and the evaluations on the way, without imports and without the last evaluation.

Each row is `python examples/EXAMPLE.py --seed SEED`.

| example | seed | frames | seconds | mean return of 100 episodes | target |
|---|---:|---:|---:|---:|---:|
"""


def run(example: str, seed: int, folder: Path) -> bool:
    """Whether it ended well; what it reached is in its file."""
    file = folder / f"{example}-{seed}.json"
    file.unlink(missing_ok=True)  # a run that fails leaves no old result behind
    command = [sys.executable, str(HERE / f"{example}.py"), "--seed", str(seed), "--json", str(file)]
    return subprocess.run(command).returncode == 0


def read_results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By example, in the order of seeds."""
    files = {example: sorted(folder.glob(f"{example}-*.json")) for example in EXAMPLES}
    return {example: [json.loads(file.read_text()) for file in found] for example, found in files.items() if found}


def page(results: dict[str, list[dict[str, Any]]], machine: str) -> str:
    lines = [
        f"| {example} | {r['seed']} | {r['frames']:,} | {r['seconds']:.1f} | {r['mean_return']:.1f} ± "
        f"{r['std_return']:.1f}{'' if r['reached'] else ' (missed)'} | {r['target']:g} |"
        for example, of_seeds in results.items()
        for r in of_seeds
    ]
    pictures = [f"![learning curves of {example}](pictures/learning-{example}.svg)" for example in results]
    return HEAD.format(machine=machine) + "\n".join(lines) + "\n\n## Learning curves\n\n" + "\n\n".join(pictures) + "\n"


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{cores} cores of {names[0] if names else platform.processor() or 'an unknown CPU'}"


def report(results_folder: Path, docs: Path) -> None:
    results = read_results(results_folder)
    for example, of_seeds in results.items():
        plot(of_seeds, docs / "pictures" / f"learning-{example}.svg")
    where = results_folder / "machine.txt"
    (docs / "results.md").write_text(page(results, where.read_text().strip() if where.exists() else "another machine"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=EXAMPLES, choices=EXAMPLES, metavar="EXAMPLE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", metavar="FOLDER")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    failed = []
    if not options.report_only:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "machine.txt").write_text(machine() + "\n")
        runs = [(example, seed) for example in options.only for seed in options.seeds]
        failed = [f"{example} with seed {seed}" for example, seed in runs if not run(example, seed, options.results)]
    report(options.results, options.docs)
    if failed:
        print(f"ended with an error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
