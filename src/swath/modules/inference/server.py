"""InferenceServer: one policy for many actors, which is called on all their requests at once."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.modules.inference.client import InferenceClient
from swath.modules.inference.loop import Batching, ServingLoop
from swath.modules.inference.pipes import MPTransport
from swath.modules.inference.served_policy import ServedPolicy
from swath.modules.inference.service import PolicyService
from swath.modules.inference.slots import SlotTransport
from swath.modules.inference.stats import ServerStats
from swath.modules.inference.threads import ThreadingTransport
from swath.modules.inference.transport import Transport
from swath.process.supervise import EndedAtExit

DeviceLike = torch.device | str | int | None
#: Settings that ``server_config`` may hold.
_CONFIGURABLE = ("max_batch_size", "min_batch_size", "timeout", "collect_stats", "stats_window_size")


class InferenceServer(PolicyService):
    """Serves a policy, from a thread of this process, to any number of clients, which are batched as they come.

    Args:
        model: any policy. A module is copied: what an optimizer does to it is seen after ``update_policy_weights_()``.
        transport: "threads" (which is "auto"), "slots" or "mp"; or a ``ThreadingTransport``, ``SlotTransport`` or
            ``MPTransport``. The last two are for clients in any process of this machine.
        policy_factory: makes the policy, instead of ``model``; what it makes is not copied.
        max_batch_size: rows of a batch; a single request may have more.
        min_batch_size, timeout: a batch with fewer rows waits for more, until its oldest request is ``timeout`` seconds
            old, or all clients wait. With 1, nothing ever waits.
        collate_fn: from a list of TensorDicts to one whose first dimension they are; by default rows are gathered
            without TensorDicts.
        device: where the policy computes; ``policy_device`` is the same.
        output_device: where answers go; by default to where requests came from.
        weight_sync: a weight scheme's half for this receiver; looked at between batches.
        num_clients: how many clients ``client()`` makes at most.
        collect_stats, stats_window_size: whether to measure, and how many requests and batches back.
        server_config: a mapping with ``max_batch_size``, ``min_batch_size``, ``timeout``, ``collect_stats`` or
            ``stats_window_size``, instead of these.
        policy_version, policy_version_key: the first version, and where answers have it (None: nowhere).
        exploration_type: how a probabilistic policy chooses for clients with no interaction type of their own; None: as
            the policy does by default.
        share_weights: serve ``model`` itself, not a copy.

    >>> from tensordict import TensorDict
    >>> from tensordict.nn import TensorDictModule
    >>> policy = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    >>> with InferenceServer(policy) as server:
    ...     answer = server.client()(TensorDict(observation=torch.zeros(4)))
    >>> answer["action"].shape, answer["policy_version"]
    (torch.Size([2]), tensor(0))
    """

    _owns = "a thread that answers"
    _instead_of_a_copy = (
        'make another one with the same arguments, or give others a client(): with transport="slots" or "mp" one can '
        "be sent to another process"
    )

    def __init__(
        self,
        model: Any = None,
        transport: Transport | str = "auto",
        *,
        policy_factory: Callable[[], Any] | None = None,
        max_batch_size: int = 64,
        min_batch_size: int = 1,
        timeout: float = 0.01,
        collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None = None,
        device: DeviceLike = None,
        policy_device: DeviceLike = None,
        output_device: DeviceLike = None,
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        num_clients: int | None = None,
        collect_stats: bool = True,
        stats_window_size: int = 1024,
        server_config: Mapping[str, Any] | None = None,
        policy_version: int = 0,
        policy_version_key: Any = "policy_version",
        exploration_type: InteractionType | str | None = None,
        share_weights: bool = False,
    ) -> None:
        if (model is None) == (policy_factory is None):
            raise TypeError("give either model or policy_factory")
        if model is not None and not callable(model):
            raise TypeError(f"a policy must be callable, got {type(model).__name__}; a factory goes to policy_factory=")
        unknown = [name for name in server_config or {} if name not in _CONFIGURABLE]
        if unknown:
            raise TypeError(f"server_config has {unknown[0]!r}; it may have {', '.join(_CONFIGURABLE)}")
        settings = {
            "max_batch_size": max_batch_size,
            "min_batch_size": min_batch_size,
            "timeout": timeout,
            "collect_stats": collect_stats,
            "stats_window_size": stats_window_size,
            **(server_config or {}),
        }
        batching = Batching(settings["max_batch_size"], settings["min_batch_size"], settings["timeout"])
        where, goes_to = (
            None if chosen is None else torch.device(chosen)
            for chosen in (device if policy_device is None else policy_device, output_device)
        )
        policy = ServedPolicy(
            model if policy_factory is None else policy_factory(),
            shares_weights=share_weights or policy_factory is not None,
            device=where,
            output_device=goes_to,
            collate_fn=collate_fn,
            kind=None if exploration_type is None else InteractionType(exploration_type),
            version=policy_version,
            version_key=policy_version_key,
        )
        if policy_factory is not None:
            policy.forget_source()
        self.transport = resolve_transport(transport, num_clients)
        self.transport.in_keys = None if collate_fn is not None else policy.in_keys
        self.transport.server = weakref.ref(self)
        self._num_clients = num_clients
        self._num_made = 0
        self._scheme = weight_sync
        self._model_id = weight_sync_model_id
        stats = ServerStats(settings["stats_window_size"], settings["collect_stats"])
        self._loop = ServingLoop(policy, self.transport, batching, stats, weight_sync)
        self._thread: threading.Thread | None = None
        #: A forked copy of this process has a copy of this object; the thread is not its own.
        self._pid = os.getpid()

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> InferenceServer:
        """Begin to answer.

        Raises:
            RuntimeError: it was started before; a server that was shut down is not started again.
        """
        if self._thread is not None:
            raise RuntimeError("this inference server was started before; make a new one to start again")
        self.transport.open()
        if self._scheme is not None:
            self._scheme.init_on_receiver(model_id=self._model_id, context=self)
            self._scheme.connect(worker_idx=0)
        self._thread = threading.Thread(target=_run_quietly, args=(self._loop,), name="swath-inference", daemon=True)
        self._thread.start()
        # Nothing below holds the server itself: one that nobody can ask any more is ended.
        weakref.finalize(self, _end, self._loop, self._thread, self._pid).atexit = False
        _started.add(self)
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """End, within ``timeout`` seconds; requests that were not answered fail with ``ServerClosed``."""
        if self._pid != os.getpid():
            return
        self._stop(timeout)
        if self._scheme is not None:
            self._scheme.shutdown()

    def _stop(self, timeout_s: float = 5.0) -> None:
        _end(self._loop, self._thread, self._pid, timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.transport.state == "open"

    @property
    def was_started(self) -> bool:
        return self._thread is not None

    # -- clients ---------------------------------------------------------------------------------------------------

    def client(self) -> InferenceClient:
        """Something that asks this server; may be made before ``start``."""
        if self._num_clients is not None and self._num_made >= self._num_clients:
            raise RuntimeError(f"this inference server was made for num_clients={self._num_clients}, and has them all")
        self._num_made += 1
        return self.transport.client()

    # -- the policy ------------------------------------------------------------------------------------------------

    def update_model(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn`` with the policy that is served, between two batches; counts its version up."""
        return self._loop.policy.change(fn)

    def _publish(self, model_id: str, source: Any) -> None:
        if model_id not in ("policy", self._model_id):
            raise KeyError(f"there is no model {model_id!r}; this server has {self._model_id!r}")
        self._loop.policy.publish(source)

    @property
    def policy_version(self) -> int:
        return self._loop.policy.version

    def get_model(self, model_id: str) -> Any:
        """For weight schemes."""
        return self._loop.policy.model

    def weights_applied(self, model_id: str, version: int | None) -> None:
        """For weight schemes."""
        self._loop.policy.count_update(version)

    # -- looking ---------------------------------------------------------------------------------------------------

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """Counters, and times in milliseconds: in the queue, and in the policy (medians and 95th percentiles).

        ``reset`` starts anew.
        """
        policy = self._loop.policy
        return {
            **self._loop.stats.read(reset=reset),
            "policy_version": policy.version,
            "weight_updates": policy.num_updates,
        }

    def policy_plan(self) -> str:
        """How the policy is called, and why not faster; see ``Collector.policy_plan``."""
        return self._loop.policy.describe()

    def __repr__(self) -> str:
        state = "serving" if self.is_alive else "not started" if self._thread is None else "shut down"
        return f"InferenceServer({type(self._loop.policy.model).__name__}, {type(self.transport).__name__}, {state})"


def resolve_transport(transport: Any, num_clients: int | None = None) -> Transport:
    if isinstance(transport, Transport):
        return transport
    if transport in ("auto", "threads"):
        return ThreadingTransport()
    if transport in ("slots", "mp"):
        kind = SlotTransport if transport == "slots" else MPTransport
        return kind() if num_clients is None else kind(num_clients)
    raise ValueError(f"transport must be 'auto', 'threads', 'slots', 'mp' or a Transport, got {transport!r}")


def _run_quietly(loop: ServingLoop) -> None:
    """Clients are told how the thread ended: nobody reads what a thread prints."""
    with contextlib.suppress(BaseException):
        loop.run()


def _end(loop: ServingLoop, thread: threading.Thread | None, pid: int, timeout_s: float = 5.0) -> None:
    if pid != os.getpid():
        return
    loop.stop()
    if thread is not None and thread is not threading.current_thread():
        thread.join(timeout_s)
    loop.give_up()  # a policy that does not return must not keep clients


#: Those that may run. (A thread that computes while the interpreter is taken down would crash it.)
_started = EndedAtExit[InferenceServer](lambda servers: [server._stop() for server in servers])
