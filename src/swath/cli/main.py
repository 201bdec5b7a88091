"""``swath``: the entry point. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from swath import __version__
from swath.cli.errors import USAGE
from swath.cli.options import EXAMPLES, CollectOptions, add_collect_arguments


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swath", description="Collects reinforcement-learning data.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"swath {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    collect = commands.add_parser(
        "collect",
        help="run a policy in an env, save what happens; see swath collect --help",
        description="Run a policy in an env and save what happened, as a memory-mapped TensorDict.",
        usage="swath collect ENV --frames N --out DIR [options]",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_collect_arguments(collect)
    node = commands.add_parser(
        "node",
        help="be a node of a DistributedCollector that has launcher='folder'",
        description="Wait for a collector's ticket in a folder that both machines see, and collect for it. The ticket "
        "is a pickle, so folder and ticket must be yours, and nobody else may be able to write to them.",
        allow_abbrev=False,
    )
    node.add_argument("folder", metavar="FOLDER", help="folder= of the collector")
    node.add_argument("number", metavar="NUMBER", type=int, help="which node to be, counted from 0")
    node.add_argument("--wait", metavar="SECONDS", type=float, help="for the ticket; for ever by default")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if arguments.command == "node":
        from swath.cli.node import serve

        return serve(arguments.folder, arguments.number, arguments.wait)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without "·" must not end a collection
    from swath.cli.collect import collect

    return collect(CollectOptions.from_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
