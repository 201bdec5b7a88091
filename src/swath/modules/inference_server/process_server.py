"""ProcessInferenceServer: an inference server in a process of its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Unpack

import cloudpickle
import torch

from swath import platforms
from swath.errors import InferenceError, ServerClosed, ServerDied, told
from swath.modules.inference_server.choosing import choose_transport
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.config import ServerSettings, check_settings
from swath.modules.inference_server.pipes import MPTransport
from swath.modules.inference_server.replies import not_started, opened, was_shut_down
from swath.modules.inference_server.server import InferenceServer
from swath.modules.inference_server.service import ServedElsewhere, as_tensors
from swath.modules.inference_server.transport import InferenceTransport
from swath.process import pickling
from swath.process.channel import Channel, pack, unpack
from swath.process.helper import Helper
from swath.process.owner import SECONDS_TO_LEAVE, leave_with_owner
from swath.process.start import StartMethod, check_start_method
from swath.process.supervise import EndedAtExit
from swath.timeline.companions import companions
from swath.timeline.recording import Recording
from swath.weight_update.weights import apply_weights

_SECONDS_FOR_HEALTH = 1.0
_SECONDS_FOR_RECORDING = 2.0


class ProcessInferenceServer(ServedElsewhere):
    """Serves a policy from a process of its own, to clients in any process of this machine.

    Args:
        policy_factory: makes the policy, in that process.
        transport: "slots" for requests of a fixed layout, or "mp" for whatever can be pickled (see ``choose_transport``
            for other names); "auto" is "slots", where the system has what that needs. Or a transport for other
            processes, whose clients may be made, and sent away, beforehand.
        num_clients: how many requests can be under way at a time.
        mp_context: "forkserver" (by default), "spawn" or "fork", or a context of ``multiprocessing``.
        startup_timeout: how many seconds ``start`` waits until the policy is made.
        num_threads: torch's threads there.
        settings: all others of ``InferenceServer``.

    >>> from tensordict import TensorDict
    >>> with ProcessInferenceServer(lambda: lambda observation: observation * 2) as server:
    ...     server.client()(TensorDict(observation=torch.ones(2)))["action"]
    tensor([2., 2.])
    """

    _place = "process"
    _owns = "a process that answers"

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: InferenceTransport | str = "auto",
        *,
        num_clients: int | None = None,
        request_spec: Any = None,
        response_spec: Any = None,
        transport_options: Mapping[str, Any] | None = None,
        mp_context: str | BaseContext | None = None,
        startup_timeout: float = 300.0,
        num_threads: int = 1,
        **settings: Unpack[ServerSettings],
    ) -> None:
        if not callable(policy_factory):
            raise TypeError(f"policy_factory must be a function, got {type(policy_factory).__name__}")
        platforms.require(
            type(self).__name__,
            (platforms.PROCESSES, platforms.LOCAL_SOCKETS),
            "use an InferenceServer, which serves threads of this process",
        )
        if transport == "auto":
            transport = "slots" if platforms.are_met(*platforms.STEPPING_WORKERS) else "mp"
        chosen = choose_transport(
            transport, num_clients, request_spec=request_spec, response_spec=response_spec, options=transport_options
        )
        if not isinstance(chosen, MPTransport):
            raise ValueError(
                f"transport must be one for other processes ('mp', 'slots', MPTransport(), SlotTransport(), ...), got "
                f"{transport!r}"
            )
        check_settings(ProcessInferenceServer, settings)
        #: For making clients here; the one that listens is made from it in the server's process.
        self.transport = chosen
        self.transport.serve_elsewhere(self)
        made_of = type(chosen), {**chosen.settings(), "address": chosen.address}
        advice = "Make what cannot be pickled inside of the policy_factory"
        with pickling.to_be_sent("policy_factory or a setting", "a process", advice):
            self._blueprint = pickling.dumps((policy_factory, made_of, {**settings, "request_spec": request_spec}))
        if isinstance(mp_context, BaseContext):
            mp_context = mp_context.get_start_method()
        self._method: StartMethod = check_start_method(mp_context)
        self._startup_timeout_s = startup_timeout
        self._num_threads = num_threads
        self._num_calls = 0
        #: Knows nothing of this object, so that it can be garbage.
        self._helper: Helper | None = None
        self._companion = _Companion(self)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> ProcessInferenceServer:
        """Start the process, and wait until it serves.

        Raises:
            TimeoutError: not within ``startup_timeout``.
            InferenceError: (a RuntimeError) it could not; the policy_factory's exception is the cause.
        """
        if self._helper is not None:
            raise self._started_before()
        self._helper = helper = Helper(_main, "inference server", self._method, (self._num_threads,), died=ServerDied)
        weakref.finalize(self, helper.close, 5.0, terminates=True).atexit = False
        _helpers.add(helper)
        try:
            helper.send(self._blueprint)
            if not helper.wait(self._startup_timeout_s):
                raise TimeoutError(
                    f"{helper.who} did not make its policy within {self._startup_timeout_s:g} s; give startup_timeout= "
                    "if it needs longer"
                )
            kind, content = helper.receive()
            if kind == "failed":
                cause = unpack(content, -1, helper.who)
                raise InferenceError(f"the inference server could not start: {told(cause)}") from cause
            companions.add(self._companion)
        except BaseException:
            self.shutdown(0.5)
            raise
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ask the process to end, then terminate it, then kill it, in ``timeout`` seconds; clients get an error."""
        if self._helper is not None:
            self._companion.server_ends()
            self._helper.close(timeout, terminates=True)

    @property
    def is_alive(self) -> bool:
        return self._helper is not None and not self._helper.process.has_ended()

    @property
    def pid(self) -> int | None:
        return None if self._helper is None else self._helper.pid

    @property
    def was_started(self) -> bool:
        return self._helper is not None

    # -- clients ---------------------------------------------------------------------------------------------------

    def client(self) -> InferenceClient:
        """Something that asks this server, in any process; may be made, and sent away, before ``start``."""
        return self.transport.client()

    @property
    def service_backend(self) -> str:
        return "process"

    @property
    def transport_kind(self) -> str:
        """What carries requests; see ``InferenceServer.transport_kind``."""
        return self.transport.transport_kind

    # -- the policy ------------------------------------------------------------------------------------------------

    def update_model_weights(
        self, weights: Any, *, mark_weight_update: bool = True, timeout: float | None = 300.0
    ) -> None:
        """As ``update_policy_weights_(weights)``, within ``timeout`` seconds, and counted or not."""
        function = partial(apply_weights, source=as_tensors(weights))
        self._call("update_model", function, mark_weight_update=mark_weight_update, timeout_s=timeout)

    # -- looking ---------------------------------------------------------------------------------------------------

    def stats(self, reset: bool = False, *, timeout: float | None = None) -> dict[str, Any]:
        """As ``InferenceServer.stats``, if they come within ``timeout`` seconds."""
        return self._call("stats", reset, timeout_s=timeout)

    def health(self, *, timeout: float = _SECONDS_FOR_HEALTH) -> dict[str, Any]:
        """``process_alive`` (and ``alive``), ``serving`` (its loop), ``pid``, ``exitcode``; ``control_error``, if any.

        Never raises, and waits for ``timeout`` seconds at most.
        """
        alive = self.is_alive
        health: dict[str, Any] = {"serving": False}
        if alive:
            try:
                health["serving"] = bool(self._call("is_serving", timeout_s=timeout))
            except Exception as error:
                health["control_error"] = repr(error)
                alive = self.is_alive
        exit_code = None if self._helper is None else self._helper.process.exit_code()
        return {"process_alive": alive, "alive": alive, **health, "pid": self.pid, "exitcode": exit_code}

    def ask_to_record(self, begin: bool) -> Sequence[Recording]:
        """For traces of collectors: what the process did since it was asked to begin."""
        if begin:
            self._call("begin_recording", timeout_s=_SECONDS_FOR_RECORDING)
            return []
        found = self._call("end_recording", timeout_s=_SECONDS_FOR_RECORDING)
        return [Recording.of_plain_data(data) for data in found]

    def _call(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        helper = self._helper
        if helper is None:
            raise not_started()
        if not helper.process.is_ours:
            raise ServerClosed("the inference server belongs to the process that this was forked from; ask a client()")
        with helper.lock:
            if helper.process.is_closed:
                raise was_shut_down()
            self._num_calls += 1
            helper.send(pickling.dumps(("call", self._num_calls, name, args, kwargs)))
            while True:
                if not helper.wait(timeout_s):
                    raise TimeoutError(f"the inference server did not answer within {timeout_s:g} s")
                kind, number, content = helper.receive()
                if number == self._num_calls:  # else the answer to a call that nobody waited for
                    break
        return opened(kind, content, helper.who)

    def __repr__(self) -> str:
        state = "serving" if self.is_alive else "not started" if self._helper is None else "ended"
        return f"ProcessInferenceServer(pid={self.pid}, {state})"


class _Companion:
    """Of a server in another process: what it records is there, and gone with it."""

    def __init__(self, server: ProcessInferenceServer) -> None:
        self._server = weakref.ref(server)
        self._traces = 0
        #: Of a server that was shut down meanwhile.
        self._kept: Sequence[Recording] = []

    def begin_recording(self) -> None:
        self._traces += 1
        self._ask(True)

    def end_recording(self) -> Sequence[Recording]:
        self._traces -= 1
        return self._ask(False) or self._kept

    def server_ends(self) -> None:
        if self._traces and not self._kept:
            self._kept = self._ask(False)

    def _ask(self, begin: bool) -> Sequence[Recording]:
        if (server := self._server()) is not None:
            with suppress(Exception):  # one that died is in no trace
                return server.ask_to_record(begin)
        return []


# -- in the process ------------------------------------------------------------------------------------------------


def _main(connection: Connection, num_threads: int) -> None:
    leave_with_owner()  # also from within a policy that does not return
    channel = Channel(connection)
    try:
        torch.set_num_threads(num_threads)
        policy_factory, (kind, made_of), settings = cloudpickle.loads(connection.recv_bytes())
        server = InferenceServer(policy_factory=policy_factory, transport=kind(**made_of), **settings).start()
    except (EOFError, ConnectionError):
        return
    except BaseException as error:
        channel.send("failed", pack(error))
        return
    try:
        channel.send("ready", None)
        while _follow(channel, server):
            pass
    except (EOFError, OSError):  # the owner is gone
        pass
    finally:
        server.shutdown(SECONDS_TO_LEAVE)
        os._exit(0)  # a policy's threads must not keep the process


def _follow(channel: Channel, server: InferenceServer) -> bool:
    """Do what the owner says; whether to go on."""
    order, *details = channel.receive()
    if order == "close":
        return False
    number, name, args, kwargs = details
    try:
        value = server.is_alive if name == "is_serving" else getattr(server, name)(*args, **kwargs)
        message = pickling.dumps(("value", number, value))
    except Exception as error:
        message = pickling.dumps(("failed", number, pack(error)))
    channel.send_pickled(message)
    return True


#: Processes that were not ended.
_helpers = EndedAtExit[Helper](lambda helpers: [helper.close(2.0, terminates=True) for helper in helpers])
