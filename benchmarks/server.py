"""Part `server`: one policy for many threads, an observation each; requests per second, and how long one takes."""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from interleaved import order_of
from report import markdown_table
from setting import Setting

SETTING = Setting("CartPole-v1", 1, 1)
CLIENTS = (1, 16, 64)
MAX_BATCH_SIZE = 64
REPEATS = 5
WARM_UP_S = 0.1


class WrongAnswer(AssertionError):
    """A server's answer is not the network's; how fast it came would mean nothing."""


def _policy() -> TensorDictModule:
    return TensorDictModule(SETTING.make_network(), in_keys=["observation"], out_keys=["action"])


def swath_server(num_clients: int) -> Any:
    from swath.modules import InferenceServer

    return InferenceServer(_policy(), max_batch_size=MAX_BATCH_SIZE)


def torchrl_server(num_clients: int) -> Any:
    from torchrl.modules.inference_server import InferenceServer

    return InferenceServer(_policy(), max_batch_size=MAX_BATCH_SIZE)


def torchrl_slots(num_clients: int) -> Any:
    """With a transport of as many slots as clients, which is made for threads."""
    from torchrl.modules.inference_server import InferenceServer, SlotTransport

    return InferenceServer(_policy(), SlotTransport(num_clients), max_batch_size=MAX_BATCH_SIZE)


SERVERS: dict[str, Callable[[int], Any]] = {
    "swath": swath_server,
    "torchrl": torchrl_server,
    "torchrl, slots": torchrl_slots,
}


@dataclass
class Served:
    """By server, in every repeat: requests per second, and p50 and p99 of the seconds until the answer."""

    num_clients: int
    rate: dict[str, list[float]] = field(default_factory=dict)
    p50_s: dict[str, list[float]] = field(default_factory=dict)
    p99_s: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        return [
            [
                name,
                f"{median(rates):,.0f}",
                f"{min(rates):,.0f} .. {max(rates):,.0f}",
                f"{1e3 * median(self.p50_s[name]):.2f} / {1e3 * median(self.p99_s[name]):.2f} ms",
                "" if name == "swath" else f"{self.ratio(name):.2f} ×",
            ]
            for name, rates in self.rate.items()
        ]

    def ratio(self, name: str) -> float:
        """How many times more requests swath's answers: the median over the repeats."""
        return median(mine / theirs for mine, theirs in zip(self.rate["swath"], self.rate[name], strict=True))

    @property
    def title(self) -> str:
        return f"{self.num_clients} client thread" + ("s" if self.num_clients > 1 else "")

    def table(self) -> str:
        lines = [
            f"  {name:<18}{rate:>13}{spread:>22}{latency:>20}{ratio:>11}"
            for name, rate, spread, latency, ratio in [_HEADER, *self.rows()]
        ]
        return "\n".join([self.title, *lines])

    def as_json(self) -> dict[str, Any]:
        return {"num_clients": self.num_clients, "rate": self.rate, "p50_s": self.p50_s, "p99_s": self.p99_s}


_HEADER = ["server", "requests/s", "min .. max", "p50 / p99", "swath is"]


def heading(options: argparse.Namespace) -> str:
    return (
        f"InferenceServer in a thread, max_batch_size={MAX_BATCH_SIZE}; clients in threads, one observation a request; "
        f"{REPEATS} repeats\nservers interleaved, one at a time; medians over the repeats"
    )


def run(options: argparse.Namespace) -> Iterator[Served]:
    seconds = options.seconds or 1.0
    for num_clients in CLIENTS:
        result = Served(num_clients, *({name: [] for name in SERVERS} for _ in range(3)))
        for repeat in range(REPEATS):
            for name in order_of(list(SERVERS), repeat):
                gc.collect()
                rate, p50_s, p99_s = _measure(name, SERVERS[name](num_clients), num_clients, seconds)
                result.rate[name].append(rate)
                result.p50_s[name].append(p50_s)
                result.p99_s[name].append(p99_s)
        yield result


def _measure(name: str, server: Any, num_clients: int, seconds: float) -> tuple[float, float, float]:
    """Requests per second that were answered, p50 and p99 of their latencies."""
    server.start()
    try:
        clients = [server.client() for _ in range(num_clients)]
        _check(name, clients[0])
        latencies: list[list[float]] = [[] for _ in clients]
        counts_from = time.perf_counter() + WARM_UP_S
        until = counts_from + seconds
        threads = [
            threading.Thread(target=_ask, args=(client, found, counts_from, until))
            for client, found in zip(clients, latencies, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = np.concatenate([np.asarray(of_client) for of_client in latencies])
        p50_s, p99_s = np.percentile(found, [50, 99])
        return len(found) / seconds, float(p50_s), float(p99_s)
    finally:
        server.shutdown()


def _ask(client: Any, latencies: list[float], counts_from: float, until: float) -> None:
    """One question after the other; those answered in time count."""
    observation = torch.zeros(SETTING.obs_size)
    while True:
        started = time.perf_counter()
        client(TensorDict({"observation": observation}))["action"]
        now = time.perf_counter()
        if now > until:
            return
        if now >= counts_from:
            latencies.append(now - started)


def _check(name: str, client: Any) -> None:
    observation = torch.arange(SETTING.obs_size) / SETTING.obs_size
    answer = client(TensorDict({"observation": observation}))["action"]
    with torch.no_grad():
        expected = SETTING.make_network()(observation)
    if not torch.allclose(answer, expected, atol=1e-5):
        raise WrongAnswer(f"{name}: {answer} instead of {expected}")


def markdown(results: Sequence[Served]) -> str:
    return "\n\n".join(f"{result.title}:\n\n{markdown_table(_HEADER, result.rows())}" for result in results)
