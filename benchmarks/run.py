"""swath and its rivals, side by side in one run: see README.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import batched
import driver
import filling
import multi
import nodes
import parallel
import payload
import policies
import published
import sampling
import server
import single
import sleeping
import startup
import stragglers
import transforms
import tuning
import watched
import weights
from machine import machine_facts, warn_if_busy
from report import write_json

RESULTS = Path(__file__).parent / "results"
PARTS: dict[str, Any] = {
    "single": single,
    "policies": policies,
    "published": published,
    "transforms": transforms,
    "multi": multi,
    "startup": startup,
    "weights": weights,
    "sleeping": sleeping,
    "parallel": parallel,
    "batched": batched,
    "payload": payload,
    "stragglers": stragglers,
    "server": server,
    "filling": filling,
    "sampling": sampling,
    "nodes": nodes,
    "driver": driver,
    "watched": watched,
    "tuning": tuning,
}
_RIVALS = list(dict.fromkeys([*single.RIVALS, *policies.RIVALS, *multi.RIVALS, *batched.RIVALS]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=_parts, default=list(PARTS), help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--quick", action="store_true", help="a look: 5 repeats of 0.1 s, 1 and 8 envs, 20 updates")
    parser.add_argument("--repeats", type=int, help="measurements of each contender, at least 5 (default 7)")
    parser.add_argument("--envs", type=_names, default=["CartPole-v1", "Pendulum-v1"], help="ids (part single)")
    parser.add_argument("--counts", type=_counts, help="numbers of envs (part single; default 1,4,8,32)")
    parser.add_argument("--policies", type=_policies, help=f"of {', '.join(policies.CASES)} (part policies)")
    parser.add_argument("--stacks", type=_stacks, help=f"of {', '.join(transforms.CASES)} (part transforms)")
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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parts(text: str) -> list[str]:
    names = list(PARTS) if text == "all" else _names(text)
    _require_known(names, list(PARTS), "part")
    return names


def _counts(text: str) -> list[int]:
    counts = [int(number) for number in _names(text)]
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError("numbers of envs must be positive")
    return counts


def _rivals(text: str) -> list[str]:
    _require_known(_names(text), _RIVALS, "rival")
    return _names(text)


def _policies(text: str) -> list[str]:
    _require_known(_names(text), list(policies.CASES), "policy")
    return _names(text)


def _stacks(text: str) -> list[str]:
    _require_known(_names(text), list(transforms.CASES), "stack")
    return _names(text)


def _require_known(names: list[str], known: list[str], what: str) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise argparse.ArgumentTypeError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")


def end(*_: Any) -> None:
    """Ended from outside, a run must still close what it started: some of it may be stopped, and would stay so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    sys.exit("terminated")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, end)
    torch.set_num_threads(1)
    load_at_start = os.getloadavg()
    warn_if_busy()
    facts = machine_facts()
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    print(f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, {versions}")
    results: dict[str, list[Any]] = {}
    for name in options.part:
        results[name] = []
        print(f"\n{PARTS[name].heading(options)}\n")
        for result in PARTS[name].run(options):
            results[name].append(result)
            print(result.table() + "\n", flush=True)
            if options.json:  # after every result, so that an interrupted run leaves what it has
                parameters = {key: value for key, value in vars(options).items() if key not in ("json", "markdown")}
                loads = {"load_at_start": load_at_start, "load_at_end": os.getloadavg()}
                write_json(options.json, {**facts, **loads}, {**parameters, "torch_threads": 1}, results)
    if options.markdown:
        print("\n\n".join(PARTS[name].markdown(found) for name, found in results.items()))
    if options.json:
        print(f"all samples: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
