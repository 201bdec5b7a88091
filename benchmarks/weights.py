"""Part `weights`: how long `update_policy_weights_()` takes, while 4 workers wait (sync) or collect (async)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from contenders import CollectorContender
from multi_contenders import multi_async, multi_sync, worker_per_env
from report import markdown_table
from setting import Setting

SETTING = Setting("CartPole-v1", 4, 50)
#: Widths of the two hidden layers.
SIZES = {"10 kB": 46, "10 MB": 1577}
COLLECTORS = {"MultiSync, idle": multi_sync, "MultiAsync, collecting": multi_async}
LIBRARIES = ("swath", "torchrl")
#: Async batches that may come from before an update: what is ready and what is under way.
_BATCHES_OLD = 4 * SETTING.num_envs


class WeightsNotUsed(AssertionError):
    """Workers did not act by the weights that they were given; how fast they got them would mean nothing."""


@dataclass
class UpdateTimes:
    """Seconds of every call, by what was measured and by library."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        """p50 and p95 of each library."""
        return [
            [title, *(_percentiles(calls[library]) for library in LIBRARIES)] for title, calls in self.seconds.items()
        ]

    def table(self) -> str:
        lines = [["p50 / p95", *LIBRARIES], *self.rows()]
        return "\n".join(f"  {title:<32}{ours:>22}{theirs:>22}" for title, ours, theirs in lines)

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds}


def _percentiles(seconds: list[float]) -> str:
    p50, p95 = 1e3 * np.percentile(seconds, [50, 95])
    return f"{p50:.2f} / {p95:.2f} ms"


def heading(options: argparse.Namespace) -> str:
    return (
        f"update_policy_weights_() with 4 workers, until it returns; {_num_calls(options)} calls each, "
        "a batch and new weights before each\nchecked first: that the workers act by the new weights"
    )


def run(options: argparse.Namespace) -> Iterator[UpdateTimes]:
    result = UpdateTimes()
    for size, width in SIZES.items():
        for title, make in COLLECTORS.items():
            result.seconds[f"{size}, {title}"] = {
                library: _measure(make, library, _network(width), _num_calls(options)) for library in LIBRARIES
            }
    yield result


def _measure(
    make: Callable[..., CollectorContender], library: str, network: nn.Sequential, num_calls: int
) -> list[float]:
    contender = make(library, SETTING, network, **worker_per_env(library, SETTING))
    try:
        for action in (0, 1, 0):
            _check_arrival(contender, network, action, 1 if make is multi_sync else _BATCHES_OLD)
        return [_update_s(contender, network) for _ in range(num_calls)]
    finally:
        contender.close()


def _num_calls(options: argparse.Namespace) -> int:
    return 20 if options.quick else 100


def _network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(SETTING.obs_size, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, SETTING.num_outputs),
    )


def _update_s(contender: CollectorContender, network: nn.Sequential) -> float:
    contender.collect(1)  # one batch; keeps workers that collect in the background at it
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.999)
    started = time.perf_counter()
    contender.collector.update_policy_weights_()
    return time.perf_counter() - started


def _check_arrival(contender: CollectorContender, network: nn.Sequential, action: int, max_batches: int) -> None:
    """Weights that always choose ``action`` must show, at the latest in the last of so many batches."""
    with torch.no_grad():
        last: Any = network[-1]
        last.bias.copy_(1e3 * torch.eye(SETTING.num_outputs)[action])
    contender.collector.update_policy_weights_()
    for _ in range(max_batches):
        contender.collect(1)
        if (contender.last_batch().actions == action).all():
            return
    raise WeightsNotUsed(f"{type(contender.collector)}: {max_batches} batches after an update, still the old weights")


def markdown(results: Sequence[UpdateTimes]) -> str:
    return markdown_table(["weight update, p50 / p95", *LIBRARIES], results[0].rows())
