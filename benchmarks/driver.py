"""Part `driver`: how many batches a driver takes, with 10 to 1,000 nodes that do nothing but answer.

The driver is a `DistributedCollector`, all of it real: orders, process groups, messages, batches as TensorDicts. The
nodes are threads of a few processes; each has a process group of its own with the driver, and answers an order with a
batch that was made once. So what is measured is what the driver can take, not what nodes can make.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from report import markdown_table

#: Nodes, and frames of a batch.
SETTINGS = ((10, 1000), (10, 10_000), (100, 1000), (1000, 1000))
PROCESSES = 4
#: Weights of these sizes are sent to all nodes, 1 GB in all at most.
WEIGHT_MB = (1, 10)
_MOST_MB = 1000


# -- the synthetic side ------------------------------------------------------------------------------------------------


def _host(pipe: Any) -> None:
    """A process that becomes a node, in a thread, for every ticket that it gets."""
    device: list[Any] = []
    while (ticket := pipe.recv()) is not None:
        threading.Thread(target=_synthetic_node, args=(ticket, device), daemon=True).start()


_making = threading.Lock()


def _synthetic_node(ticket: Any, device: list[Any]) -> None:

    from swath.collectors.distributed.meeting import connect_to_store, make_device
    from swath.collectors.distributed.requests import Order, Report
    from swath.collectors.distributed.wire import CLOSE, COLLECT, DONE, HELLO, PING, Link, LinkBroken

    where = ticket.where
    with _making:
        if not device:
            device.append(make_device(where["address"]))
    store = connect_to_store(where["address"], where["port"], where["start_timeout_s"])
    store.set(f"{where['name']}/here", where["address"])
    link = Link(
        store,
        where["name"],
        1,
        device[0],
        timeout_s=where["node_timeout_s"],
        start_timeout_s=where["start_timeout_s"],
    )
    about, payload = _made_once(ticket.make_plan().frames)
    try:
        while (message := link.receive()).kind != CLOSE:
            if message.kind == PING:
                link.send(PING)
            elif message.kind == HELLO:
                link.send(DONE, message.number, about.to_json())
            elif message.kind == COLLECT:
                order = Order(*message.about)
                report = Report(order.number, (order.steps,), order.steps, 0, order.number)
                link.send(DONE, message.number, asdict(report), payload)
            else:
                link.send(DONE, message.number)
    except LinkBroken:
        pass
    link.close()


_batch: list[Any] = []


def _made_once(frames: int) -> tuple[Any, np.ndarray]:
    """A description and a batch of CartPole."""
    with _making:
        if not _batch:
            from swath.collectors.distributed.node import Node
            from swath.collectors.distributed.requests import IdSpace, NodePlan, Order
            from swath.collectors.single import Collector

            plan = NodePlan(0, Collector, ["CartPole-v1"], None, None, None, frames, {}, IdSpace(0, 1), 0)
            node = Node(plan)
            _batch.append((node.describe(), node.collect(Order(1, frames))[1]))
    return _batch[0]


class SyntheticLauncher:
    """Hands tickets to a few processes, in turn."""

    leaves_machine = False
    restarts = False

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._hosts = []
        for _ in range(PROCESSES):
            mine, theirs = context.Pipe()
            process = context.Process(target=_host, args=(theirs,), daemon=True)
            process.start()
            self._hosts.append((mine, process))

    def start(self, ticket: Any) -> Any:
        self._hosts[ticket.node % PROCESSES][0].send(ticket)
        return self

    def has_ended(self) -> None: ...

    def end(self, timeout_s: float) -> None: ...

    def close(self) -> None:
        for pipe, process in self._hosts:
            pipe.send(None)
            process.join(2.0)
            process.kill()


def _collector(num_nodes: int, frames: int, policy: nn.Module) -> Any:
    from swath.addresses import LOOPBACK
    from swath.collectors.distributed import DistributedCollector
    from swath.collectors.distributed.process_group import ProcessGroupEngine

    class Driver(DistributedCollector):
        def _make_engine(self, num_nodes: int, **own: Any) -> Any:
            return ProcessGroupEngine(
                SyntheticLauncher(),
                backend="gloo",
                address=LOOPBACK,
                port=0,
                secret=None,
                node_timeout_s=120.0,
                start_timeout_s=300.0,
            )

    return Driver(["CartPole-v1"] * num_nodes, policy, frames_per_batch=frames, start_timeout_s=300.0)


# -- the measurements --------------------------------------------------------------------------------------------------


@dataclass
class DriverLoad:
    num_nodes: int
    frames_per_batch: int
    start_up_s: float = 0.0
    batches_per_s: list[float] = field(default_factory=list)
    cpu_s_per_batch: float = 0.0
    bytes_per_batch: float = 0.0
    #: By MB: seconds until all nodes have applied them.
    update_s: dict[int, list[float]] = field(default_factory=dict)
    threads: int = 0

    def row(self) -> list[str]:
        updates = [
            f"{1e3 * median(self.update_s[size]):,.0f} ms" if size in self.update_s else "" for size in WEIGHT_MB
        ]
        return [
            f"{self.num_nodes:,}",
            f"{self.frames_per_batch:,}",
            f"{median(self.batches_per_s):,.0f}",
            f"{1e6 * self.cpu_s_per_batch:,.0f} µs",
            f"{median(self.batches_per_s) * self.frames_per_batch:,.0f}",
            f"{self.bytes_per_batch:,.0f}",
            *updates,
            f"{self.start_up_s:.1f} s",
        ]

    def table(self) -> str:
        return "\n".join("".join(f"{cell:>16}" for cell in row) for row in [_HEADER, self.row()])

    def as_json(self) -> dict[str, Any]:
        return vars(self)


_HEADER = ["nodes", "frames a batch", "batches/s", "CPU a batch", "frames/s", "bytes a batch"]
_HEADER += ["1 MB to all", "10 MB to all", "start-up"]


def heading(options: argparse.Namespace) -> str:
    return (
        "a DistributedCollector (async, gloo) with nodes that only answer with batches of CartPole.\n"
        "Driver and nodes share this machine's cores, so a driver with cores of its own takes more"
    )


def run(options: argparse.Namespace) -> Iterator[DriverLoad]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    for num_nodes, frames in SETTINGS[:3] if options.quick else SETTINGS:
        yield _measure(num_nodes, frames, options)


def _measure(num_nodes: int, frames: int, options: argparse.Namespace) -> DriverLoad:
    result = DriverLoad(num_nodes, frames)
    started = time.perf_counter()
    with _collector(num_nodes, frames, nn.Linear(4, 2)) as collector:
        result.start_up_s = time.perf_counter() - started
        batches = iter(collector)
        for _ in range(2 * num_nodes):
            next(batches)
        count, cpu_s, received = 0, time.process_time(), collector._engine.num_bytes[1]
        for _ in range(options.repeats):
            taken, started = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - started) < (options.seconds or 1.0):
                next(batches)
                taken += 1
            result.batches_per_s.append(taken / elapsed)
            count += taken
        result.cpu_s_per_batch = (time.process_time() - cpu_s) / count
        result.bytes_per_batch = (collector._engine.num_bytes[1] - received) / count
        result.threads = threading.active_count()
        collector._still("updates")
        for size in WEIGHT_MB:
            if size * num_nodes <= _MOST_MB:
                result.update_s[size] = [_update(collector, size) for _ in range(5)]
    return result


def _update(collector: Any, size_mb: int) -> float:
    weights = {"w": torch.zeros(size_mb * 250_000)}
    started = time.perf_counter()
    collector._schemes["policy"].send_to(weights, None, 1)
    return time.perf_counter() - started


def markdown(results: Sequence[DriverLoad]) -> str:
    return markdown_table(_HEADER, [result.row() for result in results])
