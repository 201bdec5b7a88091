"""Break the source in twenty places, one after another: do the tests of ``make test`` see it?

    python tests/mutations.py            # all of them, on a copy of this tree
    python tests/mutations.py --only 7   # one

Each names the test files that should fail. A mutation that survives, or whose line is gone, is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """In ``file`` of ``src/swath``, the first ``old`` becomes ``new``; ``tests`` see it."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # The episode's last observation is that of the step before.
    Mutation("rollout/boundaries.py", "column.take(row, env_ids)", "column.take(t, env_ids)", "test_oracle.py"),
    # A policy's state is carried into the next episode.
    Mutation("rollout/boundaries.py", "column.tensor[row, env_ids] = 0", "pass", "test_oracle.py"),
    # A layer loses its parameter.
    Mutation("rollout/functional.py", "F.leaky_relu(x, m.negative_slope)", "F.leaky_relu(x)", "test_plan.py"),
    # Log-probabilities are not normalised.
    Mutation("rollout/sampling.py", ".log_().add_(largest)", ".log_()", "test_plan.py"),
    # Truncated episodes are called terminated.
    Mutation("envs/gym_rows.py", "terminated[t, env] = terminated", "terminated[t, env] = True", "test_oracle.py"),
    # Discrete actions that do not begin at 0.
    Mutation("envs/gym_spaces.py", "row.argmax(-1) + start", "row.argmax(-1)", "test_envs.py"),
    # Seeds given before the envs were put together are lost.
    Mutation("envs/serial.py", "self.pending_seeds[index] = child", "self.pending_seeds[0] = child", "test_envs.py"),
    # The last batch overshoots the total.
    Mutation("collectors/budget.py", "else (1, left)", "else (1, None)", "test_collector.py"),
    # set_truncated marks the first step of a batch instead of the last.
    Mutation("data/postprocessing.py", "is_last[..., -1] = True", "is_last[..., 0] = True", "test_collector.py"),
    # Whole episodes lack their last frame.
    Mutation("data/trajectories.py", "start : stop + 1].clone()", "start : max(stop, 1)].clone()", "test_collector.py"),
    # Nothing is collected after a pause.
    Mutation("collectors/buffer_fill.py", "self._is_hurried = False\n\n    # --", "pass\n\n    # --", "test_replay.py"),
    # One restart more than was allowed.
    Mutation(
        "workers/pool.py",
        "handle.incarnation.number < self",
        "handle.incarnation.number <= self",
        "test_faults.py",
    ),
    # All workers draw the same numbers.
    Mutation("process/seeding.py", "torch.manual_seed(number)", "torch.manual_seed(0)", "test_multi.py"),
    # A process stays though its owner is gone.
    Mutation("process/owner.py", "SECONDS_TO_LEAVE = 1.0", "SECONDS_TO_LEAVE = 100.0", "test_evaluator.py"),
    # Workers read the slot that is being written.
    Mutation(
        "weight_update/shared_memory.py", "self._slots[slot], seq", "self._slots[0], seq", "test_weight_update.py"
    ),
    # Frames that were overwritten while they were copied are delivered.
    Mutation("data/tracks.py", "return (positions >= oldest[tracks]) &", "return (positions >= -1) |", "test_data.py"),
    # Priorities are used as they are.
    Mutation("data/prioritized.py", "(priority + self.eps) ** self.alpha", "priority + self.eps", "test_data.py"),
    # Answers go to other clients.
    Mutation(
        "modules/inference_server/loop.py",
        "zip(group, answers,",
        "zip(group, answers[::-1],",
        "test_inference_server.py",
    ),
    # Frames of a dataset are put in the wrong order.
    Mutation("dataset_files.py", "to[env] += length", "pass", "cli/test_cli_workers.py"),
    # Nodes that deliver other data are let in.
    Mutation(
        "collectors/remote.py",
        "if self == first:",
        "if True or self == first:",
        "test_distributed.py",
    ),
]


def copy_tree(folder: Path) -> None:
    for name in ("src", "tests", "examples", "pyproject.toml", "conftest.py", "README.md", "docs"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)


def run_tests(folder: Path, tests: str) -> tuple[bool, str]:
    """Whether they failed, and the line that says which."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", f"tests/{tests}"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, failed[0][:110] if failed else f"exit code {done.returncode}"


def try_mutation(mutation: Mutation) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        file = folder / "src" / "swath" / mutation.file
        source = file.read_text()
        if mutation.old not in source:
            print(f"gone      {mutation.file}: {mutation.old!r}", flush=True)
            return False
        file.write_text(source.replace(mutation.old, mutation.new, 1))
        started = time.monotonic()
        caught, which = run_tests(folder, mutation.tests)
        verdict = "caught  " if caught else "SURVIVED"
        print(f"{verdict}  {mutation.file}: {mutation.new!r}, {time.monotonic() - started:.0f} s: {which}", flush=True)
        return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="the N-th, counted from 0")
    options = parser.parse_args()
    chosen = MUTATIONS if options.only is None else [MUTATIONS[options.only]]
    caught = sum([try_mutation(mutation) for mutation in chosen])
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
