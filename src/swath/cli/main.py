"""``swath``: the entry point. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from swath import __version__
from swath.cli.doctor import EPILOG
from swath.cli.errors import USAGE
from swath.cli.options import EXAMPLES, CollectOptions, add_collect_arguments
from swath.cli.top import EPILOG as TOP_EPILOG
from swath.cli.tune import EPILOG as TUNE_EPILOG
from swath.cli.tune import TuneOptions, add_tune_arguments, tune


class Parser(argparse.ArgumentParser):
    """Whose errors say what was probably meant."""

    _COMMANDS: ClassVar = ("collect", "node", "doctor", "tune", "top", "report")
    #: What other programs call an option.
    _GUESSES: ClassVar = {
        **dict.fromkeys(["--num-envs", "--n-envs", "--num_envs", "--n_envs"], "--envs"),
        **dict.fromkeys(["--num-workers", "--n-workers", "--num_workers", "--processes", "--jobs"], "--workers"),
        **dict.fromkeys(["--steps", "--timesteps", "--total-timesteps", "--total-frames", "--num-frames"], "--frames"),
        **dict.fromkeys(["--max-steps", "--max-episode-steps", "--time-limit"], "--max-frames-per-traj"),
        **dict.fromkeys(["--output", "--out-dir", "--output-dir", "--dir", "--save"], "--out"),
        **dict.fromkeys(["--batch-size", "--n-steps", "--num-steps"], "--frames-per-batch"),
        **dict.fromkeys(["--force", "--exist-ok"], "--overwrite"),
        **dict.fromkeys(["--agent", "--model", "--actor"], "--policy"),
        **dict.fromkeys(["--env", "--env-id", "--gym-id", "--task"], "ENV, the first word, without a name before it"),
    }

    #: What people look for that is not there.
    _MISSING: ClassVar = dict.fromkeys(
        ["--resume", "--continue", "--append"],
        "a folder is not gone on with: collect the rest with another --out and another --seed, then swath.load both",
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._given: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        known = re.findall(r"(?<![\w-])--[a-z][\w-]*", self.format_help())
        hints = []
        for option in [word.partition("=")[0] for word in self._given if word.startswith("--")]:
            if option in known:
                continue
            if option in self._MISSING:
                hints.append(f"{option}: {self._MISSING[option]}")
                continue
            near = [self._GUESSES[option]] if option in self._GUESSES else difflib.get_close_matches(option, known, n=1)
            hints += [f"{option}: did you mean {name}?" for name in near]
        if message.startswith("argument COMMAND") and self._given:
            asked = next((word for word in self._given if not word.startswith("-")), "")
            near = difflib.get_close_matches(asked, list(self._COMMANDS), n=1)
            hints += [f"did you mean swath {name}?" for name in near]
        super().error("\n".join([message, *hints]))


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the commands."""
    parser = Parser(prog="swath", description="Collects reinforcement-learning data.")
    parser.add_argument("--version", action="version", version=f"swath {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    collect = commands.add_parser(
        "collect",
        help="run a policy in an env, save what happens; see swath collect --help",
        description="Run a policy in an env and save what happened, as a memory-mapped TensorDict.",
        usage="swath collect ENV --frames N --out DIR [options]",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_collect_arguments(collect)
    node = commands.add_parser(
        "node",
        help="be a node of a DistributedCollector that has launcher='folder'",
        description="Wait for a collector's ticket in a folder that both machines see, and collect for it. The ticket "
        "is a pickle, so folder and ticket must be yours, and nobody else may be able to write to them.",
    )
    node.add_argument("folder", metavar="FOLDER", help="folder= of the collector")
    node.add_argument("number", metavar="NUMBER", type=int, help="which node to be, counted from 0")
    node.add_argument("--wait", metavar="SECONDS", type=float, help="for the ticket; for ever by default")
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with this machine and set-up, and how to mend it",
        description="Look at the machine and the set-up: cores, memory, limits, versions, GPUs, Ray; and start a "
        "worker. What it prints can be pasted into an issue.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout, with all facts")
    tune_parser = commands.add_parser(
        "tune",
        help="find out which collector is fastest for an env and a policy",
        description="Find out which collector is fastest for an env and a policy, with how many envs in how many "
        "workers, and print the code that makes it.",
        usage="swath tune ENV [--policy MODULE:FACTORY] [options]",
        epilog=TUNE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_tune_arguments(tune_parser)
    top = commands.add_parser(
        "top",
        help="show programs that collect, from another terminal",
        description="Show where programs that collect stand: how fast, what each worker does, what limits them. In a "
        "terminal it goes on until q or Ctrl-C; elsewhere it prints once.",
        epilog=TOP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("pid", metavar="PID", type=_pid, nargs="?", help="of one program; all of them by default")
    top.add_argument("--once", action="store_true", help="print it once, and leave")
    top.add_argument("--json", action="store_true", help="one JSON object on stdout, and leave")
    report = commands.add_parser(
        "report",
        help="draw a page that says how a collection went, from its folder or from a trace",
        description="Draw one page of HTML that needs no network: of a dataset's folder (swath collect), or of a trace "
        "(collector.trace, swath collect --trace).",
    )
    report.add_argument("path", metavar="PATH", help="a dataset's folder, or a trace: run.json")
    report.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the folder, or the trace's name with .html)"
    )
    others = {"node": node, "doctor": doctor, "tune": tune_parser, "top": top, "report": report}
    return parser, {"collect": collect, **others}


def _pid(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a pid is a number above 0, not {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    parser, commands = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.get(arguments.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if arguments.command == "node":
        from swath.cli.node import serve

        return serve(arguments.folder, arguments.number, arguments.wait)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without "·" must not end a command
    if arguments.command == "doctor":
        from swath.cli.doctor.command import examine

        return examine(as_json=arguments.json)
    if arguments.command == "tune":
        return tune(TuneOptions.from_arguments(arguments))
    if arguments.command == "top":
        from swath.cli.top.command import top

        return top(arguments.pid, json_wanted=arguments.json, once=arguments.once)
    if arguments.command == "report":
        from swath.cli.report import report

        return report(arguments.path, arguments.out)
    from swath.cli.collect import collect

    return collect(CollectOptions.from_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
