"""InferenceServer: one policy for many actors, which is called on all their requests at once."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.hints import explains_unknown
from swath.keys import Key
from swath.modules.inference_server.choosing import choose_transport
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.config import (
    DeviceLike,
    InferenceDeviceConfig,
    InferenceServerConfig,
    ServiceBackend,
    resolve_devices,
    resolve_server_config,
)
from swath.modules.inference_server.loop import ServingLoop
from swath.modules.inference_server.received_weights import ReceivedWeights
from swath.modules.inference_server.requests import keys_of
from swath.modules.inference_server.served_policy import ServedPolicy
from swath.modules.inference_server.service import PolicyService
from swath.modules.inference_server.stats import ServerStats
from swath.modules.inference_server.transport import InferenceTransport, Transport
from swath.modules.inference_server.user_transport import UserTransport
from swath.process.supervise import EndedAtExit
from swath.timeline.companions import companions


class InferenceServer(PolicyService):
    """Serves a policy, from a thread of this process, to any number of clients, which are batched as they come.

    Args:
        model: any policy. A module is copied: what an optimizer does to it is seen after ``update_policy_weights_()``.
        transport: "thread" (which is "auto"), "slots" or "mp" (see ``choose_transport`` for other names); or a
            ``ThreadingTransport``, ``SlotTransport``, ``MPTransport``, or one of your own (``InferenceTransport``).
            Slots and pipes are for clients in any process of this machine.
        policy_factory: makes the policy, instead of ``model``; what it makes is not copied.
        service_backend: where the policy is: "thread" of this process, a "process" of its own (this makes a
            ``ProcessInferenceServer``) or a "ray" actor (a ``RayInferenceServer``). The last two need policy_factory.
        service_backend_options: for a process ``mp_context`` and ``startup_timeout``; for Ray ``ray_init_config`` and
            ``remote_config``.
        transport_options: arguments of the transport that is made.
        request_spec, response_spec: a request and an answer, as they will be; other keys are not sent.
        max_batch_size: rows of a batch (64); a single request may have more.
        min_batch_size, timeout: a batch with fewer rows (1) waits for more, until its oldest request is ``timeout``
            (0.01) seconds old, or all clients wait. With 1, nothing ever waits.
        collate_fn: from a list of TensorDicts to one whose first dimension they are; by default rows are gathered
            without TensorDicts.
        device: where the policy computes; ``policy_device`` is the same.
        output_device: where answers go; by default to where requests came from.
        weight_sync: a weight scheme's half for this receiver; looked at between batches. Anything with
            ``receive`` will do.
        weight_sync_model_id: what the scheme calls the policy.
        num_clients: how many clients ``client()`` makes at most.
        collect_stats, stats_window_size: whether to measure (True), and how many requests and batches back (1024).
        server_config: an ``InferenceServerConfig``, or a mapping, instead of the arguments that it has.
        device_config: an ``InferenceDeviceConfig`` instead of the devices.
        static_batch_size: for CUDA graphs, which swath has no use for: it must be None.
        shutdown_event: ends the server when it is set, within a quarter of a second.
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

    @explains_unknown
    def __init__(
        self,
        model: Any = None,
        transport: InferenceTransport | str = "auto",
        *,
        policy_factory: Callable[[], Any] | None = None,
        service_backend: ServiceBackend | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport_options: Mapping[str, Any] | None = None,
        request_spec: Any = None,
        response_spec: Any = None,
        max_batch_size: int | None = None,
        static_batch_size: int | None = None,
        min_batch_size: int | None = None,
        timeout: float | None = None,
        collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None = None,
        device: DeviceLike = None,
        policy_device: DeviceLike = None,
        output_device: DeviceLike = None,
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        num_clients: int | None = None,
        collect_stats: bool | None = None,
        stats_window_size: int | None = None,
        server_config: InferenceServerConfig | Mapping[str, Any] | None = None,
        device_config: InferenceDeviceConfig | None = None,
        shutdown_event: Any = None,
        policy_version: int = 0,
        policy_version_key: Any = "policy_version",
        exploration_type: InteractionType | str | None = None,
        share_weights: bool = False,
    ) -> None:
        if (model is None) == (policy_factory is None):
            raise TypeError("give either model or policy_factory")
        if model is not None and not callable(model):
            raise TypeError(f"a policy must be callable, got {type(model).__name__}; a factory goes to policy_factory=")
        if service_backend_options:
            raise ValueError("service_backend_options are for service_backend='process' or 'ray'")
        self._config = resolve_server_config(
            server_config,
            {
                "max_batch_size": max_batch_size,
                "static_batch_size": static_batch_size,
                "min_batch_size": min_batch_size,
                "timeout": timeout,
                "collect_stats": collect_stats,
                "stats_window_size": stats_window_size,
            },
        )
        self.policy_device, self.output_device = resolve_devices(device_config, device, policy_device, output_device)
        self.policy_version_key = policy_version_key
        policy = ServedPolicy(
            model if policy_factory is None else policy_factory(),
            shares_weights=share_weights or policy_factory is not None,
            device=self.policy_device,
            output_device=self.output_device,
            collate_fn=collate_fn,
            kind=None if exploration_type is None else InteractionType(exploration_type),
            version=policy_version,
            version_key=policy_version_key,
        )
        if policy_factory is not None:
            policy.forget_source()
        self.transport = choose_transport(
            transport, num_clients, request_spec=request_spec, response_spec=response_spec, options=transport_options
        )
        #: What the loop takes requests from: the transport itself, or what stands for one of the user's.
        self._source = (
            self.transport
            if isinstance(self.transport, Transport)
            else UserTransport(self.transport, self._config.max_batch_size)
        )
        self._source.in_keys = keys_of(request_spec) or (None if collate_fn is not None else policy.in_keys)
        self._source.server = weakref.ref(self)
        self._num_clients = num_clients
        self._num_made = 0
        self.weight_sync = weight_sync
        self._model_id = weight_sync_model_id
        weights = None if weight_sync is None else ReceivedWeights(weight_sync, weight_sync_model_id, policy)
        self._weights = weights
        stats = ServerStats(self._config.stats_window_size, self._config.collect_stats)
        self._loop = ServingLoop(policy, self._source, self._config, stats, weights, shutdown_event)
        self._thread: threading.Thread | None = None
        #: A forked copy of this process has a copy of this object; the thread is not its own.
        self._pid = os.getpid()

    if not TYPE_CHECKING:  # type checkers read the constructor; what another backend makes has the same methods

        def __new__(cls, *args: Any, **kwargs: Any) -> PolicyService:
            from swath.modules.inference_server.backends import serve_elsewhere

            elsewhere = serve_elsewhere(*args, **kwargs) if cls is InferenceServer else None
            return super().__new__(cls) if elsewhere is None else elsewhere

        __new__.__signature__ = inspect.signature(__init__)  # so does inspect

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> InferenceServer:
        """Begin to answer.

        Raises:
            RuntimeError: it was started before; a server that was shut down is not started again.
        """
        if self._thread is not None:
            raise self._started_before()
        self._source.open()
        if self._weights is not None:
            self._weights.connect(self)
        companions.add(self._loop.companion)
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
        if self._weights is not None:
            self._weights.shutdown()

    def _stop(self, timeout_s: float = 5.0) -> None:
        _end(self._loop, self._thread, self._pid, timeout_s)

    def begin_recording(self) -> None:
        """For traces of collectors in the process of whoever owns this one's."""
        self._loop.companion.begin_recording()

    def end_recording(self) -> list[dict[str, Any]]:
        return [recording.as_plain_data() for recording in self._loop.companion.end_recording()]

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._source.state == "open"

    @property
    def was_started(self) -> bool:
        return self._thread is not None

    # -- what it was asked for -------------------------------------------------------------------------------------

    @property
    def service_backend(self) -> str:
        return "thread"

    @property
    def transport_kind(self) -> str:
        """What carries requests, as one of "thread", "process", "process_slot", "shared_memory", "ray", "custom"."""
        return getattr(self.transport, "transport_kind", "custom")

    @property
    def model(self) -> Any:
        """The policy that is served, which is a copy unless weights are shared."""
        return self._loop.policy.model

    @property
    def in_keys(self) -> tuple[Key, ...] | None:
        """What is sent of requests; everything where it is None."""
        return self._source.in_keys

    @property
    def device(self) -> torch.device | None:
        return self.policy_device

    @property
    def max_batch_size(self) -> int:
        return self._config.max_batch_size

    @property
    def min_batch_size(self) -> int:
        return self._config.min_batch_size

    @property
    def timeout(self) -> float:
        return self._config.timeout

    # -- clients ---------------------------------------------------------------------------------------------------

    def client(self) -> InferenceClient:
        """Something that asks this server; may be made before ``start``."""
        if self._num_clients is not None and self._num_made >= self._num_clients:
            raise RuntimeError(f"this inference server was made for num_clients={self._num_clients}, and has them all")
        self._num_made += 1
        return self.transport.client()

    # -- the policy ------------------------------------------------------------------------------------------------

    def update_model(self, update_fn: Callable[[Any], Any], *, mark_weight_update: bool = True) -> Any:
        """Call a function with the policy that is served, between two batches; what it returns.

        Counts the policy's version up, unless ``mark_weight_update`` is False.
        """
        return self._loop.policy.change(update_fn, counts=mark_weight_update)

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
