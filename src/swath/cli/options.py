"""The options of ``swath collect``, as text and as values."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, Overflow
from typing import Any

from swath.cli.errors import UsageError

_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "b": 1_000_000_000}
_MOST = 10**15
_SEEDS = 2**32  # what NumPy's global generator takes

EXAMPLES = """\
examples:
  swath collect CartPole-v1 --frames 100k --out data/cartpole
  swath collect Pendulum-v1 --frames 1M --envs 16 --seed 0 --out data/pendulum
  swath collect Pendulum-v1 --frames 1M --envs 16 --workers 4 --out data/quick
  swath collect my_envs:Maze-v0 --frames 10k --out data/maze
  swath collect CartPole-v1 --frames 50k --out data/agent \\
      --policy my_agent.policies:make_policy --max-frames-per-traj 200
  swath collect CartPole-v1 --frames 10k --out data/small --json | jq .fps

open what was collected:
  >>> import swath
  >>> data = swath.load("data/cartpole")
  >>> data.frames, data.episodes, data.metadata

Ctrl-C stops early and keeps what was collected; once more leaves at once.

exit codes:
  0    complete
  1    the env, the policy, a worker or the disk failed; what came before is
       kept
  2    the command cannot be run as it was given
  130  stopped by Ctrl-C
"""


@dataclass(frozen=True)
class CollectOptions:
    """What to collect, and where to."""

    env_id: str
    frames: int
    out: str
    envs: int = 1
    #: Processes that the envs are in; None: this one.
    workers: int | None = None
    sync: bool = False
    seed: int = 0
    policy: str | None = None
    max_frames_per_traj: int | None = None
    frames_per_batch: int | None = None
    categorical: bool = False
    overwrite: bool = False
    #: Write a report into the dataset's folder.
    report: bool = False
    #: Write a trace; "": into the dataset's folder.
    trace: str | None = None
    json: bool = False
    quiet: bool = False
    traceback: bool = False

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> CollectOptions:
        """Where no seed is given, one is drawn: it will be in the metadata, so every collection can be repeated."""
        values = {name: getattr(arguments, name) for name in cls.__dataclass_fields__}
        if values["seed"] is None:
            values["seed"] = secrets.randbelow(2**31)
        if values["envs"] is None:
            values["envs"] = values["workers"] or 1
        return cls(**values)

    def check(self) -> None:
        """Refuse options that do not go together."""
        if self.sync and self.workers is None:
            raise UsageError("--sync is about worker processes: say how many with --workers N, or leave it out")
        if self.workers is not None and self.envs < self.workers:
            raise UsageError(
                f"--envs {self.envs} is less than --workers {self.workers}, and every worker needs an env: "
                f"--envs {self.workers} or more, or --workers {self.envs}"
            )

    @property
    def keeps_trace(self) -> bool:
        """A report is drawn from one."""
        return self.report or self.trace is not None

    def identity(self) -> dict[str, Any]:
        """Which collection this is, for JSON."""
        workers = {} if self.workers is None else {"workers": self.workers, "sync": self.sync}
        return {"env_id": self.env_id, "num_envs": self.envs, **workers, "seed": self.seed}

    @property
    def evenly(self) -> bool:
        """Whether all envs advance together."""
        return self.workers is None or self.sync


def parse_count(text: str) -> int:
    """A positive whole number: 1000, 100_000, 100k, 1.5M, 1e5.

    >>> [parse_count(text) for text in ("100k", "1M", "1e5", "100_000", "2.5k")]
    [100000, 1000000, 100000, 100000, 2500]
    """
    digits, factor = text.strip(), 1
    if digits[-1:].lower() in _UNITS:
        digits, factor = digits[:-1], _UNITS[digits[-1].lower()]
    try:
        value = Decimal(digits) * factor
    except (InvalidOperation, Overflow):
        value = Decimal("NaN")
    if not value.is_finite():
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 100000, 100_000, 100k, 1M or 1e5")
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and {_MOST:.0e}")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def parse_seed(text: str) -> int:
    """A seed that every generator takes."""
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 0 <= seed < _SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {_SEEDS - 1}")
    return seed


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "env_id", metavar="ENV", help="a Gymnasium env: CartPole-v1, or module:Env-v0 to import it first"
    )
    what = parser.add_argument_group("what to collect")
    what.add_argument(
        "--frames", type=parse_count, required=True, metavar="N", help="how many frames, exactly: 100000, 100k, 1M, 1e5"
    )
    what.add_argument(
        "--envs",
        type=parse_count,
        metavar="N",
        help="so many envs side by side, in all (default: 1, or one for each worker)",
    )
    what.add_argument(
        "--policy",
        metavar="MODULE:FACTORY",
        help="a function that makes the policy; called with the env if it takes an argument. The module is looked for "
        "here first (default: random actions)",
    )
    what.add_argument(
        "--seed",
        type=parse_seed,
        metavar="N",
        help="the same seed collects the same data, with --workers only together with --sync (default: drawn)",
    )
    what.add_argument(
        "--max-frames-per-traj", type=parse_count, metavar="N", help="truncate episodes after so many frames"
    )
    what.add_argument("--categorical", action="store_true", help="discrete actions as integers instead of one-hot")
    how = parser.add_argument_group("how to collect")
    how.add_argument(
        "--workers",
        type=parse_count,
        metavar="N",
        help="collect in so many processes, which share the envs. Each goes on at its own pace, so how many frames are "
        "from which env differs from run to run (default: in this process)",
    )
    how.add_argument(
        "--sync",
        action="store_true",
        help="with --workers: all envs take the same number of steps, and the slowest sets the pace",
    )
    how.add_argument(
        "--frames-per-batch",
        type=parse_count,
        metavar="N",
        help="frames that are collected before they are written: of all envs together, or of each env with --workers "
        "and without --sync",
    )
    where = parser.add_argument_group("where to")
    where.add_argument("--out", required=True, metavar="DIR", help="the dataset's directory; must not exist")
    where.add_argument("--overwrite", action="store_true", help="replace DIR if it is a dataset of swath")
    where.add_argument(
        "--report",
        action="store_true",
        help="write DIR/report.html, which says how it went, and DIR/trace.json, of which its timeline is drawn",
    )
    where.add_argument(
        "--trace",
        nargs="?",
        const="",
        metavar="FILE",
        help="record which process did what when, for ui.perfetto.dev and swath report (default FILE: DIR/trace.json)",
    )
    screen = parser.add_argument_group("what to show")
    screen.add_argument(
        "--json", action="store_true", help="the result as one JSON object on stdout, nothing else there"
    )
    screen.add_argument("--quiet", action="store_true", help="only errors")
    screen.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
