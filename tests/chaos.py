"""Chaos: every collector, random calls and real kills, and an oracle that looks at every frame.

    python tests/chaos.py --minutes 10 --seed 3                           # all collectors in turn
    python tests/chaos.py --minutes 30 --collector MultiAsync --kills 1000
    python tests/chaos.py --seed 17 --collector MultiSync --rounds 1      # one again, as a failure says

A round is a process of its own: what it leaves behind is seen, and when it hangs its stacks are shown. Rounds that fail
are told with their seed, their operations and what was wrong; the others go on.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import chaos as this  # as it is called in the process of a round
from chaos_oracle import Wrong
from chaos_round import KINDS, Plan, Round
from leaks import children, nothing_is_left, wait_until
from swath.process.start import server, start_process

#: So long an operation may take, on a busy machine, with workers that are started again and again.
PATIENCE_S = 60.0


def _in_its_process(kind: str, seed: int, folder: str, told: Connection) -> None:
    with open(f"{folder}/stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        warnings.simplefilter("ignore")
        try:
            with nothing_is_left():
                outcome = Round(Plan.of(kind, seed), f"{folder}/board", lambda op: told.send(("op", op))).play()
            told.send(("outcome", outcome))
        except Wrong as wrong:
            told.send(("wrong", f"{wrong}"))
        except BaseException:
            told.send(("wrong", traceback.format_exc()))
        os._exit(0)  # whatever is left of a round that failed


def play(kind: str, seed: int, patience_s: float = PATIENCE_S) -> str:
    """Play one round; what came out. Raises ``Wrong`` with all that is needed to play it again."""
    server().ensure_running()
    before = children()
    ops: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        told, tells = Pipe(duplex=False)
        process: Any = start_process("forkserver", this._in_its_process, (kind, seed, folder, tells), "chaos")
        tells.close()
        try:
            while True:
                if not told.poll(patience_s):
                    raise Wrong(f"nothing for {patience_s:g} s; it hangs at\n{_stacks(process.pid, folder)}")
                what, text = told.recv()
                if what == "op":
                    ops.append(text)
                elif what == "wrong":
                    raise Wrong(text)
                else:
                    process.join(10)
                    if not wait_until(lambda: children() <= before, 10):
                        raise Wrong(f"processes are left: {children() - before}")
                    return text
        except EOFError:
            process.join(10)
            raise Wrong(_report(kind, seed, ops, f"its process ended with {process.exitcode}")) from None
        except Wrong as wrong:
            raise Wrong(_report(kind, seed, ops, str(wrong))) from None
        finally:
            told.close()
            process.kill()
            process.join(10)
            process.close()
            if not wait_until(lambda: children() <= before, 10):
                for pid in children() - before:
                    os.kill(pid, signal.SIGKILL)


def _stacks(pid: int, folder: str) -> str:
    os.kill(pid, signal.SIGUSR1)
    stacks = Path(folder, "stacks")
    wait_until(lambda: stacks.stat().st_size > 0, 5)
    time.sleep(0.5)  # until it has written all of them
    return stacks.read_text()


def _report(kind: str, seed: int, ops: list[str], what: str) -> str:
    return "\n".join(
        [
            what.rstrip(),
            f"with {Plan.of(kind, seed)}",
            f"operations: {'; '.join(ops)}",
            f"again: python tests/chaos.py --collector {kind} --seed {seed} --rounds 1",
        ]
    )


def _kind_of(wrong: str) -> str:
    """The first line that says something, without its numbers."""
    lines = wrong.partition("\nwith ")[0].splitlines()
    return re.sub(r"\d+", "…", lines[-1] if lines[0].startswith("Traceback") else lines[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="start no round after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next one")
    parser.add_argument("--collector", choices=KINDS, help="only this one")
    parser.add_argument("--rounds", type=int, help="so many at most")
    parser.add_argument("--kills", type=int, help="stop after so many")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds that an operation may take")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    seed, kills, failures = options.seed, 0, Counter[str]()
    while time.monotonic() < until and (options.rounds is None or seed - options.seed < options.rounds):
        kind = options.collector or KINDS[seed % len(KINDS)]
        started = time.monotonic()
        try:
            outcome = play(kind, seed, options.patience)
            kills += int(re.search(r"(\d+) kills", outcome)[1])  # type: ignore[index]
        except Wrong as wrong:
            outcome = f"WRONG\n{wrong}"
            failures[f"{kind}: {_kind_of(str(wrong))}"] += 1
        print(f"{kind} {seed}: {outcome} ({time.monotonic() - started:.1f} s)", flush=True)
        seed += 1
        if options.kills is not None and kills >= options.kills:
            break
    print(f"{seed - options.seed} rounds, {kills} kills, {failures.total()} wrong")
    for what, count in failures.most_common():
        print(f"{count:4} × {what}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
