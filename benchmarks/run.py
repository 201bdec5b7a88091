"""swath and its rivals, side by side in one run: see README.md."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import torch

from check import check
from contenders import CONTENDERS, Contender
from ideal import Ideal
from report import Result, machine_facts, markdown, usable_cores, write_json
from setting import Setting

RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: 5 repeats of 0.1 s, 1 and 8 envs")
    parser.add_argument("--repeats", type=int, help="measurements of each contender, at least 5 (default 7)")
    parser.add_argument("--envs", type=_names, default=["CartPole-v1", "Pendulum-v1"], help="ids, comma-separated")
    parser.add_argument("--counts", type=_counts, help="numbers of envs (default 1,4,8,32)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="shortest measurement (default 1)")
    length.add_argument("--frames", type=int, help="measure so many frames instead of a time")
    parser.add_argument("--frames-per-batch", type=int, default=1000, help="rounded up to whole steps of all envs")
    parser.add_argument("--only", type=_rivals, help=f"swath and these rivals only, of {', '.join(_RIVALS)}")
    parser.add_argument(
        "--json", nargs="?", type=Path, const=RESULTS / time.strftime("%Y-%m-%d-%H%M%S.json"), help="keep all samples"
    )
    parser.add_argument("--markdown", action="store_true", help="end with a table for a README")
    options = parser.parse_args(arguments)
    if options.repeats is None:
        options.repeats = 5 if options.quick else 7
    if options.repeats < 5:
        parser.error("--repeats must be at least 5: a median of fewer says little")
    for name in ("seconds", "frames", "frames_per_batch"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if options.counts is None:
        options.counts = [1, 8] if options.quick else [1, 4, 8, 32]
    if options.seconds is None and options.frames is None:
        options.seconds = 0.1 if options.quick else 1.0
    return options


_RIVALS = [name for name in CONTENDERS if name != "swath"]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    counts = [int(number) for number in _names(text)]
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError("numbers of envs must be positive")
    return counts


def _rivals(text: str) -> list[str]:
    unknown = set(_names(text)) - set(CONTENDERS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no rival {', '.join(sorted(unknown))}; there are {', '.join(_RIVALS)}")
    return [name for name in _RIVALS if name in _names(text)]


def warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], usable_cores()
    if load > 0.25 * cores:
        print(f"WARNING: load average {load:.2f} on {cores} cores: something else runs, numbers will be off\n")


def measure(contender: Contender, frames_per_batch: int, seconds: float | None, frames: int | None) -> float:
    """Frames per second over whole batches, for at least so long or so many."""
    gc.collect()  # nobody pays for another one's garbage
    delivered = 0
    started = time.perf_counter()
    while True:
        delivered += contender.collect(frames_per_batch)
        elapsed = time.perf_counter() - started
        if elapsed >= (seconds or 0) and delivered >= (frames or 0):
            return delivered / elapsed


def order_of(names: list[str], repeat: int) -> list[str]:
    """Everyone comes first, and last, in turn; every other time backwards, so that neighbours change too."""
    shift = repeat % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if repeat % 2 else rotated


def run_setting(setting: Setting, names: list[str], options: argparse.Namespace) -> Result:
    ideal = Ideal(setting, seconds=options.seconds or 0.1)
    contenders: dict[str, Contender] = {}
    try:
        for name in names:
            contenders[name] = CONTENDERS[name](setting)
        for name, contender in contenders.items():  # warms up as well
            contender.collect(setting.frames_per_batch)
            check(name, contender.last_batch(), setting)
            contender.collect(setting.frames_per_batch)
            check(name, contender.last_batch(), setting)
        ideal.measure()
        result = Result(setting, ideal.recording.mean_episode, {name: [] for name in names})
        for repeat in range(options.repeats):
            for name in order_of([*names, "ideal"], repeat):
                if name == "ideal":
                    gc.collect()
                    result.ideal.append(ideal.measure())
                else:
                    result.fps[name].append(
                        measure(contenders[name], setting.frames_per_batch, options.seconds, options.frames)
                    )
        return result
    finally:
        for contender in contenders.values():
            contender.close()
        ideal.close()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    names = ["swath", *(_RIVALS if options.only is None else options.only)]
    load_at_start = os.getloadavg()
    warn_if_busy()
    facts = machine_facts()
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    length = f"{options.frames:,} frames" if options.frames else f"{options.seconds:g} s"
    print(f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, {versions}")
    print(
        f"one process, torch.set_num_threads(1); {options.repeats} repeats of at least {length}, contenders interleaved"
    )
    print("fps: policy-chosen transitions delivered per second; ratios and η: medians over the repeats\n")
    results: list[Result] = []
    for env_id in options.envs:
        for num_envs in options.counts:
            setting = Setting.rounded_up(env_id, num_envs, options.frames_per_batch)
            results.append(run_setting(setting, names, options))
            print(results[-1].table() + "\n", flush=True)
            if options.json:  # after every setting, so that an interrupted run leaves what it has
                parameters = {key: value for key, value in vars(options).items() if key not in ("json", "markdown")}
                loads = {"load_at_start": load_at_start, "load_at_end": os.getloadavg()}
                write_json(options.json, {**facts, **loads}, {**parameters, "torch_threads": 1}, results)
    if options.markdown:
        print(markdown(results))
    if options.json:
        print(f"all samples: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
