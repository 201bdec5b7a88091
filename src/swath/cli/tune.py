"""``swath tune``: which collector, with how many envs in how many workers; the command."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from swath import platforms
from swath.cli.errors import explain_setup
from swath.cli.options import parse_count
from swath.cli.policy import find_factory, import_from_here, make_policy, split_name, takes_env
from swath.cli.streams import StatusLine, is_terminal, reader_may_leave, say, short_warnings, stdout_for_result

if TYPE_CHECKING:
    from swath.tuning.tuner import Tuner
    from swath.tuning.tuning import Trial, Tuning

EPILOG = """\
examples:
  swath tune CartPole-v1
  swath tune Pendulum-v1 --envs 16 --collector sync
  swath tune my_envs:Maze-v0 --policy my_agent.policies:make_policy --seconds 30
  swath tune CartPole-v1 --json | jq -r '.suggestions[0].code'

It measures a step of the env and calls of the policy, predicts from that how
fast each collector would be with how many envs in how many workers, and tries
the best few. Figures of a machine that does something else, too, are of that
machine. Ctrl-C stops it, and prints what is known by then.

exit codes:
  0    something can be suggested
  1    the env, the policy or every collector failed
  2    the command cannot be run as it was given
  130  stopped by Ctrl-C
"""
_COLLECTORS = ("any", "single", "sync", "async", "batched")
_MOST_ENVS = 10_000


@dataclass(frozen=True)
class TuneOptions:
    """What to tune, and how long."""

    env_id: str
    policy: str | None = None
    collector: str = "any"
    envs: tuple[int, ...] | None = None
    frames_per_batch: int | None = None
    categorical: bool = False
    seconds: float = 10.0
    json: bool = False
    traceback: bool = False

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> TuneOptions:
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})


def parse_counts(text: str) -> tuple[int, ...]:
    """
    >>> parse_counts("8"), parse_counts("4,8,1k")
    ((8,), (4, 8, 1000))
    """
    counts = tuple(parse_count(part) for part in text.split(","))
    if max(counts) > _MOST_ENVS:
        raise argparse.ArgumentTypeError(f"{max(counts):,} envs are too many; {_MOST_ENVS:,} at most")
    return counts


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600 seconds")
    return seconds


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "env_id", metavar="ENV", help="a Gymnasium env: CartPole-v1, or module:Env-v0 to import it first"
    )
    parser.add_argument(
        "--policy",
        metavar="MODULE:FACTORY",
        help="a function that makes the policy; called with the env if it takes an argument. The module is looked for "
        "here first (default: random actions)",
    )
    parser.add_argument(
        "--collector",
        choices=_COLLECTORS,
        default="any",
        help="what may collect: one process with the policy (single; its envs may be in others), workers that wait for "
        "each other (sync) or do not (async), one policy for whichever envs are ready (batched); default: any",
    )
    parser.add_argument(
        "--envs",
        type=parse_counts,
        metavar="N[,N…]",
        help="so many envs in all; several numbers to choose from (default: 1 to 64)",
    )
    parser.add_argument(
        "--frames-per-batch", type=parse_count, metavar="N", help="of all envs together (default: about 2,048)"
    )
    parser.add_argument("--categorical", action="store_true", help="discrete actions as integers instead of one-hot")
    parser.add_argument(
        "--seconds",
        type=parse_seconds,
        default=10.0,
        metavar="S",
        help="how long to measure and to try, about; starting workers comes in addition (default: 10)",
    )
    parser.add_argument(
        "--json", action="store_true", help="the result as one JSON object on stdout, nothing else there"
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")


def tune(options: TuneOptions) -> int:
    """Run the command; its exit code."""
    screen = StatusLine(sys.stderr)
    with stdout_for_result(options.json) as stdout, short_warnings():
        session = _Session(options, stdout, screen)
        try:
            return session.run()
        except KeyboardInterrupt:
            return session.stopped()
        except Exception as error:
            return session.failed(error)
        finally:
            screen.clear()


class _Session:
    def __init__(self, options: TuneOptions, stdout: TextIO, screen: StatusLine) -> None:
        self._options = options
        self._stdout = stdout
        self._screen = screen
        self._tuner: Tuner | None = None
        self._said: set[str] = set()

    def run(self) -> int:
        options = self._options
        if options.policy is not None:
            split_name(options.policy)
        self._say("loading PyTorch and the env")
        import_from_here()
        if options.collector != "single" and platforms.are_met(*platforms.WORKERS):
            from swath.process.start import server

            server().ensure_running()  # it imports PyTorch while we do
        self._tuner = tuner = make_tuner(options, self._say)
        with tuner.trying():
            tuner.run()
        self._print(tuner.result(), is_complete=True)
        return 0

    def _say(self, text: str) -> None:
        if is_terminal(sys.stderr):
            self._screen.show(text)
        elif text not in self._said:  # each arrangement is tried several times
            self._said.add(text)
            say(text)

    def stopped(self) -> int:
        self._screen.clear()
        if self._tuner is None or self._tuner.costs is None:
            say("stopped; nothing is known yet")
            if self._options.json:
                self._print_json({"complete": False, "error": "stopped", "exit_code": 130})
        else:
            say("stopped; this is what is known by now")
            self._print(self._tuner.result(), is_complete=False)
        return 130

    def failed(self, error: Exception) -> int:
        self._screen.clear()
        lines, code = explain_setup(error, self._options.env_id)
        if self._options.traceback:
            traceback.print_exception(error, file=sys.stderr)
        say(f"error: {lines[0]}")
        for line in lines[1:]:
            print(f"  {line}", file=sys.stderr)
        if self._options.json:
            self._print_json({"complete": False, "error": "\n".join(lines), "exit_code": code})
        return code

    # -- what is printed -----------------------------------------------------------------------------------------------

    def _print(self, tuning: Tuning, is_complete: bool) -> None:
        self._screen.clear()
        if self._options.json:
            told = {"complete": is_complete, "error": None, "exit_code": 0 if is_complete else 130}
            self._print_json({**told, **as_json(self._options, tuning)})
            return
        with reader_may_leave(self._stdout):
            for line in lines_of(self._options, tuning):
                print(line, file=self._stdout)

    def _print_json(self, told: dict[str, Any]) -> None:
        with reader_may_leave(self._stdout):
            print(json.dumps({"env_id": self._options.env_id, **told}, allow_nan=False), file=self._stdout)


def make_tuner(options: TuneOptions, progress: Any) -> Tuner:
    from functools import partial

    from swath.envs import GymEnv
    from swath.tuning.tuner import Tuner

    make_env = partial(GymEnv, options.env_id, categorical_action_encoding=options.categorical)
    policy = None
    factory = None if options.policy is None else find_factory(options.policy)
    env = make_env()  # also where it is not needed: what is wrong with it is said now
    try:
        if factory is not None:
            policy = make_policy(factory, options.policy or "", env)
    finally:
        env.close(raise_if_closed=False)
    return Tuner.of(
        make_env,
        policy,
        collector=options.collector,
        num_envs=options.envs,
        frames_per_batch=options.frames_per_batch,
        seconds=options.seconds,
        say=progress,
    )


def lines_of(options: TuneOptions, tuning: Tuning) -> list[str]:
    """What is said at the end, in 80 columns."""
    from swath.tuning import table

    policy = f"policy {options.policy}" if options.policy else "random actions"
    cores = "1 core" if tuning.cores == 1 else f"{tuning.cores} cores"
    lines = [f"{options.env_id} · {policy} · {cores}", "", *table.measured(tuning.costs), ""]
    if not tuning.trials:
        return [*lines, "nothing was tried yet"]
    lines += table.table(tuning)
    for takes_turns in (True, False):
        trial = tuning.best_of(takes_turns)
        if trial is not None:
            lines += ["", *table.headline(trial), ""]
            lines += [f"    {line}".rstrip() for line in code_of(options, trial)]
    if options.envs is None:
        lines += ["", *table.about_envs()]
    return lines


def as_json(options: TuneOptions, tuning: Tuning) -> dict[str, Any]:
    """The same for programs."""
    best = [trial for takes_turns in (True, False) if (trial := tuning.best_of(takes_turns)) is not None]
    return {
        "policy": options.policy,
        "cores": tuning.cores,
        "costs": asdict(tuning.costs),
        "ideal_fps": tuning.ideal,
        "trials": [_trial_as_json(trial) for trial in tuning.trials],
        "suggestions": [{**_trial_as_json(trial), "code": "\n".join(code_of(options, trial))} for trial in best],
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    arrangement = trial.arrangement
    return {
        "collector": trial.name,
        "form": str(arrangement.form),
        "num_envs": arrangement.num_envs,
        "num_workers": arrangement.num_workers if arrangement.form.has_processes else None,
        "frames_per_batch": trial.frames_per_batch,
        "predicted_fps": trial.predicted,
        "measured_fps": trial.fps if trial.samples else None,
        "samples": trial.samples,
        "error": trial.error,
    }


# -- the code to copy --------------------------------------------------------------------------------------------------


def code_of(options: TuneOptions, trial: Trial) -> list[str]:
    """The collector, in a script that runs as it stands."""
    from swath.tuning import layouts

    env, definitions = json.dumps(options.env_id), []
    needs_env = _policy_takes_env(options)
    imports = layouts.imports(trial.arrangement, options.policy is not None)
    if options.categorical or needs_env:
        made = f"GymEnv({env}{', categorical_action_encoding=True' if options.categorical else ''})"
        env, definitions = "make_env", ["", "def make_env():", f"    return {made}", ""]
        imports = with_name(imports, "swath.envs", "GymEnv")
    preparing, policy = [], None
    if options.policy is not None:
        module, factory = split_name(options.policy)
        imports = with_name(imports, module, factory.partition(".")[0])
        policy = f"{factory}()"
        if needs_env:
            policy, preparing = "policy", ["env = make_env()", f"policy = {factory}(env)", "env.close()"]
    call = layouts.call(trial.arrangement, trial.frames_per_batch, env, policy)
    return [*imports, *definitions, *([] if definitions else [""]), *preparing, *call]


def with_name(imports: list[str], module: str, name: str) -> list[str]:
    """
    >>> with_name(["from swath.envs import SerialEnv"], "swath.envs", "GymEnv")
    ['from swath.envs import GymEnv, SerialEnv']
    """
    start = f"from {module} import "
    for index, line in enumerate(imports):
        if line.startswith(start):
            names = sorted({*line.removeprefix(start).split(", "), name})
            return [*imports[:index], start + ", ".join(names), *imports[index + 1 :]]
    return [*imports, start + name]


def _policy_takes_env(options: TuneOptions) -> bool:
    return options.policy is not None and takes_env(find_factory(options.policy), options.policy)
