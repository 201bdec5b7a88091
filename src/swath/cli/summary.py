"""What is said at the end, and the Python lines that do the same."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TextIO

from swath.cli.episodes import Tally
from swath.cli.options import CollectOptions
from swath.cli.outcome import Outcome
from swath.cli.policy import find_factory, split_name, takes_env
from swath.disk import show_bytes
from swath.insight.quantities import duration, short

_WIDTH = 76


def python_lines(options: CollectOptions, frames_per_batch: int) -> list[str]:
    """The same collection from Python, batch by batch."""
    if options.workers is None:
        collector_class, make = "Collector", _lines_here
    else:
        collector_class, make = ("MultiSyncCollector" if options.sync else "MultiAsyncCollector"), _lines_with_workers
    imports = [f"from swath.collectors import {collector_class}", "from swath.envs import GymEnv"]
    seeding: list[str] = []
    if options.policy:
        module, factory = split_name(options.policy)
        imports += [f"from {module} import {factory.partition('.')[0]}"]
        imports = ["import random", "", "import numpy", "import torch", "", *imports]
        seeding = [f"{seed}({options.seed})" for seed in ("random.seed", "numpy.random.seed", "torch.manual_seed")]
    definitions, preparing, arguments = make(options)
    arguments += [f"frames_per_batch={frames_per_batch:_}", f"total_frames={options.frames:_}"]
    if options.max_frames_per_traj:
        arguments.append(f"max_frames_per_traj={options.max_frames_per_traj:_}")
    return [
        *imports,
        "",
        *definitions,
        *seeding,
        *preparing,
        *_call(f"collector = {collector_class}", arguments),
        f"collector.set_seed({options.seed})",
        "for batch in collector:",
        "    ...",
    ]


def _lines_here(options: CollectOptions) -> tuple[list[str], list[str], list[str]]:
    """Lines before and after seeding, and the first arguments of the collector."""
    return [], [f"env = {_env(options)}"], ["env", *_policy(options)]


def _lines_with_workers(options: CollectOptions) -> tuple[list[str], list[str], list[str]]:
    definitions = ["def make_env():", f"    return {_env(options)}", ""]
    preparing, policy = [], _policy(options)
    if policy and _takes_env(options):
        preparing = ["env = make_env()", f"policy = {policy[0]}", "env.close()"]
        policy = ["policy"]
    return definitions, preparing, [f"[make_env] * {options.envs}", *policy, f"num_workers={options.workers}"]


def _env(options: CollectOptions) -> str:
    arguments = [json.dumps(options.env_id)]
    if options.categorical:
        arguments.append("categorical_action_encoding=True")
    if options.envs > 1 and options.workers is None:
        arguments.append(f"num_envs={options.envs}")
    return f"GymEnv({', '.join(arguments)})"


def _policy(options: CollectOptions) -> list[str]:
    """The call that makes the policy, if there is one."""
    if options.policy is None:
        return []
    return [f"{split_name(options.policy)[1]}({'env' if _takes_env(options) else ''})"]


def _takes_env(options: CollectOptions) -> bool:
    name = options.policy or ""
    return takes_env(find_factory(name), name)


def _call(start: str, arguments: list[str]) -> list[str]:
    one_line = f"{start}({', '.join(arguments)})"
    if len(one_line) <= _WIDTH:
        return [one_line]
    return [f"{start}(", *(f"    {argument}," for argument in arguments), ")"]


def load_lines(out: str) -> list[str]:
    path = json.dumps(PurePath(out).as_posix(), ensure_ascii=False)
    return ["import swath", f"data = swath.load({path})  # .frames, .episodes, .metadata"]


def kept_line(outcome: Outcome, out: str) -> str:
    """What is left of a collection that did not end as planned."""
    lost = f"; {outcome.lost:,} later ones, not yet written, are lost" if outcome.lost else ""
    if not outcome.frames:
        return f"nothing was collected, so nothing was saved{lost.replace('later ones', 'frames')}"
    if outcome.complete:
        return f"all {outcome.frames:,} frames had been collected; they are saved in {out}"
    return f"kept {outcome.frames:,} of {outcome.requested_frames:,} frames in {out} (marked incomplete){lost}"


def print_summary(
    stream: TextIO, options: CollectOptions, outcome: Outcome, num_bytes: int, frames_per_batch: int
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    console.begin_capture()  # rich would end the program where the reader has left; our caller knows better

    def say(text: str | Text = "", style: str = "") -> None:
        console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True)

    seconds = outcome.seconds or 0.0
    took = f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
    say(f"{outcome.frames:,} frames of {options.env_id} in {took} ({outcome.fps:,.0f} frames/s)", "bold")
    say()
    for label, value in _facts(options, outcome, num_bytes):
        say(Text.assemble((f"  {label:<10}", "cyan"), value))
    say()
    if outcome.complete:
        say("The same from Python:")
        say()
        for code in python_lines(options, frames_per_batch):
            say(f"    {code}" if code else "", "green")
        say()
    say("Open it:")
    say()
    for code in load_lines(options.out):
        say(f"    {code}", "green")
    stream.write(console.end_capture())


def _facts(options: CollectOptions, outcome: Outcome, num_bytes: int) -> list[tuple[str, str]]:
    episodes = outcome.episodes
    ended = f"{episodes.count:,}"
    if episodes.unfinished:
        ended += f", and {episodes.unfinished:,} unfinished"
    facts = [("episodes", ended)]
    if episodes.count:
        facts += [("return", _spread(episodes.returns)), ("length", _spread(episodes.lengths))]
    facts += [("saved in", f"{options.out} ({show_bytes(num_bytes)})"), ("seed", str(options.seed))]
    return facts


def _spread(tally: Tally) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in tally.spread().items())
