"""Two states of swath, side by side: is this one as fast as that one?

make compare BASE=v0.1 [ARGS="--rounds 100 --rows MultiSync"]

Each row runs in two processes, one with the source of BASE and one with this, measured in turns of a fraction of
a second (this, that, that, this) while all processes of the other one are stopped: a machine that becomes slower for a
while hits both. A row's figure is the median, over the rounds, of this one's rate divided by that one's. Between it and
the truth lies what the same source shows against itself: `BASE=HEAD` tells.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from compare_probe import NOT_STOPPED, ROWS
from machine import machine_facts, warn_if_busy

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "compare"


def source_of(revision: str) -> Path:
    """The source folder of a revision, as git has it."""
    git = ["git", "-C", str(HERE.parent)]
    commit = subprocess.run([*git, "rev-parse", revision], capture_output=True, text=True, check=True).stdout.strip()
    folder = BUILD / commit
    if not folder.is_dir():
        archive = subprocess.run([*git, "archive", commit, "src"], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
    return folder / "src"


class Probe:
    """One row with one source. It and all that it starts are of one session, which is stopped while it is not asked."""

    def __init__(self, row: str, source: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "compare_probe.py"), row],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        said = self._line()
        if not said.startswith(f"ready {source}{os.sep}"):
            raise RuntimeError(f"{row}: measures another swath than that of {source}: {said!r}")
        self._is_stopped = row not in NOT_STOPPED
        self._signal(signal.SIGSTOP)

    def rate(self, seconds: float) -> float:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        rate = float(self._line())
        self._signal(signal.SIGSTOP)
        return rate

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a probe ended with {self._process.wait(10)}; what it said is above")
        return line.strip()

    def _signal(self, number: int) -> None:
        if not self._is_stopped:
            return
        for pid in _of_session(self._process.pid):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)


def _of_session(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, in brackets: the state, the parent, the process group, the session.
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
        except OSError:  # it has just ended
            continue
        if session == leader:
            found.append(int(folder.name))
    return found


def compare(row: str, base: Path, rounds: int, seconds: float) -> list[tuple[float, float]]:
    """In every round: the rate of this source, and that of the other."""
    this = Probe(row, HERE.parent / "src")
    try:
        that = Probe(row, base)
        try:
            found = []
            for number in range(rounds):
                if number % 2:
                    other = that.rate(seconds)
                    found.append((this.rate(seconds), other))
                else:
                    mine = this.rate(seconds)
                    found.append((mine, that.rate(seconds)))
            return found
        finally:
            that.close()
    finally:
        this.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two states of swath, side by side.")
    parser.add_argument("base", help="a revision that git knows")
    parser.add_argument("--rounds", type=int, default=60, help="how often each is measured (default 60)")
    parser.add_argument("--seconds", type=float, default=0.15, help="how long, each time (default 0.15)")
    parser.add_argument("--rows", default="", help="only those whose name has this in it")
    parser.add_argument("--json", type=Path, help="keep all samples")
    options = parser.parse_args()
    base = source_of(options.base)
    warn_if_busy()
    facts: dict[str, Any] = {"base": base.parent.name, **machine_facts()}
    print(
        f"this source against {options.base} ({base.parent.name[:7]}): {options.rounds} rounds of {options.seconds} s\n"
    )
    print(f"  {'':<48}{'this / base':>12}{'quartiles':>16}{'this, a second':>18}")
    samples = {}
    for row in ROWS:
        if options.rows not in row:
            continue
        found = samples[row] = compare(row, base, options.rounds, options.seconds)
        ratios = [mine / other for mine, other in found]
        low, _, high = quantiles(ratios, n=4)
        spread = f"{low:.2f} .. {high:.2f}"
        print(f"  {row:<48}{median(ratios):>12.3f}{spread:>16}{median(m for m, _ in found):>18,.0f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
