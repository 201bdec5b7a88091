"""RPCCollector: nodes that are reached by torch RPC, for programs that have it. Its engine is no longer developed.

Torch RPC unpickles what arrives, and all of a group start together: no node can be started again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Unpack

import cloudpickle
import torch
from torch.distributed import rpc

from swath import platforms
from swath.addresses import LOOPBACK, is_loopback, own_address, warn_if_open
from swath.collectors.distributed.answers import PicklingNode, as_request, lost, opened, pass_on
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.launched import LaunchedArguments, LaunchedCollector
from swath.collectors.distributed.launchers import Launcher, NodeProcess, Ticket, how_it_ended
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.collectors.legacy import Renamed
from swath.data.payload import Bytes
from swath.errors import NodeLost
from swath.process import pickling
from swath.process.channel import Packed
from swath.weight_update.nodes import RPCWeightSyncScheme
from swath.weight_update.updaters import RPCWeightUpdater as RPCWeightUpdater  # where scripts for TorchRL import it

_SECONDS_BETWEEN_LOOKS = 0.02
_PINGS_PER_TIMEOUT = 4
#: One collects, one applies weights, the others answer.
_THREADS = 4


def _driver_name(run: str) -> str:
    """Names are used once: torch counts what a group of the same names has done before."""
    return f"swath-driver-{run}"


def _node_name(run: str, node: int) -> str:
    return f"swath-node-{node}-{run}"


#: Torch RPC takes the interface to listen on from the environment only.
_INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _join(name: str, rank: int, where: dict[str, Any], own: str) -> None:
    """Become part of the RPC group; returns when all have."""
    interface = _interface_of(own)
    rpc._init_counter = where["round"]
    before = {variable: os.environ.get(variable) for variable in _INTERFACE_VARIABLES}
    os.environ.update(dict.fromkeys(_INTERFACE_VARIABLES, interface))
    options = {"num_worker_threads": _THREADS, "rpc_timeout": where["start_timeout_s"], **(where["options"] or {})}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of itself
            rpc.init_rpc(
                name,
                rank=rank,
                world_size=where["num_nodes"] + 1,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=where["init_method"], **options),
            )
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


def _interface_of(address: str) -> str:
    if is_loopback(address):
        return "lo"
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ValueError(f"no interface of this machine has the address {address}")


# -- what is called on a node ------------------------------------------------------------------------------------------

_served = PicklingNode()
_leave = threading.Event()


def _make(plan: bytes) -> Any:
    return _served.make(plan)


def _collect(order: tuple[Any, ...]) -> Any:
    answer = _served.collect(Order(*order))
    if isinstance(answer, Packed):
        return answer
    report, payload = answer
    return report, None if payload is None else torch.from_numpy(payload)


def _set_weights(weights: torch.Tensor, version: int, model_id: str) -> Any:
    return _served.set_weights(weights.numpy(), version, model_id)


def _call(request: bytes) -> Any:
    return _served.call(request)


def _close() -> None:
    _leave.set()


def _here() -> bool:
    """Called on the driver."""
    return True


def _hush() -> None:
    """Torch RPC writes a line to stderr for every connection that ends, also when that is as it should be."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)


def serve(ticket: Ticket) -> None:
    """Be a node until the driver says that it is done, or is gone."""
    where = dict(ticket.where)
    devices = where["visible_devices"]
    if devices is not None:  # before CUDA is used for the first time
        os.environ["CUDA_VISIBLE_DEVICES"] = str(devices[ticket.node % len(devices)])
    address = where["address"]
    own = LOOPBACK if is_loopback(address) else own_address(address, 0)
    _join(_node_name(where["run"], ticket.node), ticket.node + 1, where, own)
    driver = _driver_name(where["run"])
    lost = None
    while not _leave.wait(where["node_timeout_s"] / _PINGS_PER_TIMEOUT):
        try:
            rpc.rpc_sync(driver, _here, timeout=where["node_timeout_s"])
        except Exception as error:
            lost = error
            break
    _hush()
    _served.ask_to_stop()
    closing = threading.Thread(target=_served.close, daemon=True)
    closing.start()
    closing.join(5.0)
    if lost is not None:
        print(f"swath: node {ticket.node} has lost its driver: {lost}", file=sys.__stdout__, flush=True)
    with suppress(Exception):
        rpc.shutdown(graceful=False)
    if lost is not None:
        raise NodeLost(f"node {ticket.node} has lost its driver: {lost}", ticket.node)


# -- the driver's side -------------------------------------------------------------------------------------------------


class RPCEngine:
    """See ``Engine``."""

    name = "torch RPC"
    restarts = False
    #: It makes calls in any order.
    orders_per_node = 1

    def __init__(
        self,
        launcher: Launcher,
        num_nodes: int,
        *,
        address: str,
        port: int,
        options: Any,
        visible_devices: Any,
        node_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        if rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
            raise RuntimeError(
                "this process has an RPC agent already, and can have only one: shut it down, or use a "
                "DistributedCollector"
            )
        self._launcher = launcher
        self._num_nodes = num_nodes
        self._address = address
        self._timeout_s = node_timeout_s
        self._folder = tempfile.mkdtemp(prefix="swath-rpc-")
        # Nodes of this machine, or of a shared file system, meet in a file: no port is open for that.
        self._where = {
            "address": address,
            "init_method": f"tcp://{address}:{port}" if port else f"file://{self._folder}/rendezvous",
            "num_nodes": num_nodes,
            "run": uuid.uuid4().hex[:12],
            "round": rpc._init_counter,  # groups are told apart by how many this process has had
            "options": options,
            "visible_devices": visible_devices,
            "node_timeout_s": node_timeout_s,
            "start_timeout_s": start_timeout_s,
        }
        self._processes: dict[int, NodeProcess] = {}
        self._plans: dict[int, NodePlan] = {}
        self._started: dict[int, Future[Any]] = {}
        self._pending: dict[int, set[Future[Any]]] = {}
        self._lost: dict[int, NodeLost] = {}
        self._lock = threading.Lock()
        self._joined = False
        self._closed = threading.Event()

    def launch(self, plan: NodePlan) -> Future[NodeDescription]:
        """The last of them lets all meet."""
        ticket = Ticket(
            node=plan.node,
            incarnation=plan.incarnation,
            engine=__name__,
            plan=b"",  # the plan comes by RPC
            where=self._where,
        )
        self._processes[plan.node] = self._launcher.start(ticket)
        self._plans[plan.node] = plan
        self._pending[plan.node] = set()
        future = self._started[plan.node] = Future()
        if len(self._processes) == self._num_nodes:
            threading.Thread(target=self._meet, name="swath-meet", daemon=True).start()
            threading.Thread(target=self._watch, name="swath-watch", daemon=True).start()
        return future

    def _meet(self) -> None:
        try:
            _join(_driver_name(self._where["run"]), 0, self._where, self._address)
            self._joined = True
            for node, plan in self._plans.items():
                made = self._ask(node, _make, pickling.dumps_with_path(plan))
                made.add_done_callback(lambda done, future=self._started[node]: pass_on(done, future))
        except Exception as error:
            for node, future in self._started.items():
                if not future.done():
                    future.set_exception(NodeLost(str(error), node))

    def _watch(self) -> None:
        """Processes that end by themselves, which RPC notices only if something is under way; and nodes cut off."""
        last_ping = time.monotonic()
        while not self._closed.wait(_SECONDS_BETWEEN_LOOKS * 5):
            for node, process in list(self._processes.items()):
                if node not in self._lost and (how := process.has_ended()) is not None:
                    self._lose(node, how)
            if self._joined and time.monotonic() - last_ping > self._timeout_s / _PINGS_PER_TIMEOUT:
                last_ping = time.monotonic()
                for node in [n for n in self._processes if n not in self._lost]:
                    self._ask(node, _here, timeout_s=self._timeout_s)

    def _lose(self, node: int, why: str) -> None:
        with self._lock:
            if node in self._lost:
                return
            loss = self._lost[node] = NodeLost(why, node)
            pending, self._pending[node] = self._pending[node], set()
        for future in [*pending, self._started[node]]:
            if not future.done():
                with suppress(Exception):
                    future.set_exception(NodeLost(str(loss), node))

    def _ask(self, node: int, function: Any, *args: Any, read: Any = None, timeout_s: float = 0) -> Future[Any]:
        promise: Future[Any] = Future()
        with self._lock:
            loss = self._lost.get(node)
            if loss is None:
                self._pending[node].add(promise)
        if loss is not None:
            return lost(node, str(loss))

        def keep(done: torch.futures.Future[Any]) -> None:
            try:
                value = done.value()
            except Exception as error:
                self._lose(node, self._why(node, error))
                return
            with self._lock:
                known = promise in self._pending[node]
                self._pending[node].discard(promise)
            if not known:
                return
            try:
                promise.set_result(opened(value, node, read))
            except BaseException as error:
                promise.set_exception(error)

        try:
            rpc.rpc_async(
                _node_name(self._where["run"], node), function, args=args, timeout=timeout_s
            ).add_done_callback(keep)
        except Exception as error:
            self._lose(node, self._why(node, error))
        return promise

    def _why(self, node: int, error: Exception) -> str:
        return how_it_ended(self._processes[node]) or str(error).splitlines()[0]

    # -- asking ----------------------------------------------------------------------------------------------------

    def collect(self, node: int, order: Order) -> Future[tuple[Report, Bytes | None]]:
        def read(value: tuple[Report, torch.Tensor | None]) -> tuple[Report, Bytes | None]:
            report, payload = value
            return report, None if payload is None else payload.numpy()

        return self._ask(node, _collect, tuple(order), read=read)

    def share(self, weights: Bytes) -> torch.Tensor:
        return torch.from_numpy(weights)

    def set_weights(self, node: int, shared: torch.Tensor, version: int, model_id: str) -> Future[None]:
        return self._ask(node, _set_weights, shared, version, model_id)

    def call(self, node: int, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._ask(node, _call, as_request(name, args, kwargs), read=cloudpickle.loads)

    def is_there(self, node: int) -> bool:
        return not self._closed.is_set() and node not in self._lost

    # -- ending ----------------------------------------------------------------------------------------------------

    def end(self, node: int) -> None:
        self._lose(node, "it was told to leave")
        self._processes[node].end(0.0)

    def close(self, timeout_s: float) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        if self._joined:
            told = []
            for node in self._processes:
                if node not in self._lost:
                    name = _node_name(self._where["run"], node)
                    with suppress(Exception):
                        told.append(rpc.rpc_async(name, _close, timeout=timeout_s))
            for each in told:
                with suppress(Exception):
                    each.wait()
            with suppress(Exception):
                # A graceful one waits for ever if a node is lost meanwhile. This one makes torch write a line to stderr
                # for every connection that it closes.
                rpc.shutdown(graceful=False)
        for process in self._processes.values():
            process.end(max(0.1, deadline - time.monotonic()))
        self._launcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RPCCollector(LaunchedCollector):
    """Collects on nodes that are reached by torch RPC. Arguments are those of ``LaunchedCollector``, and:

    Args:
        tensorpipe_options: for ``TensorPipeRpcBackendOptions``.
        visible_devices: the numbers of GPUs; each node sees one of them only.

    A process can have one of these at a time. Torch RPC is no longer developed: prefer a ``DistributedCollector``.
    """

    _scheme_class = RPCWeightSyncScheme

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        tensorpipe_options: Mapping[str, Any] | None = None,
        visible_devices: Sequence[int] | None = None,
        **common: Unpack[LaunchedArguments],
    ) -> None:
        self._closed = True  # until there is something to close
        self._tensorpipe_options = tensorpipe_options
        self._visible_devices = visible_devices
        super().__init__(create_env_fn, policy, **common)

    def _make_engine(self, num_nodes: int) -> Engine:
        launch, who = self._launch, type(self).__name__
        is_here = is_loopback(launch.address)
        platforms.require(who, (platforms.INTERFACE_NAMES,), "use a DistributedCollector")
        warn_if_open(
            launch.address,
            None,
            who,
            "torch RPC runs whatever it is sent, and knows no secrets. Use a network, or a firewall, that keeps others "
            "out; or a DistributedCollector with secret=",
        )
        if not is_here and not launch.tcp_port:
            raise ValueError("RPCCollector: with an address, give tcp_port= as well: nodes meet there")
        return RPCEngine(
            launch.launcher(who),
            num_nodes,
            address=launch.address,
            port=0 if is_here else launch.tcp_port,
            options=self._tensorpipe_options,
            visible_devices=self._visible_devices,
            node_timeout_s=self._node_timeout_s,
            start_timeout_s=self._start_timeout_s,
        )


class RPCDataCollector(RPCCollector, metaclass=Renamed):
    """The old name of ``RPCCollector``."""

    new = RPCCollector
