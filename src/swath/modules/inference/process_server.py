"""ProcessInferenceServer: an inference server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from swath import platforms
from swath.errors import InferenceError, ServerClosed, ServerDied, told
from swath.modules.inference.client import InferenceClient
from swath.modules.inference.pipes import DEFAULT_CLIENTS, MPTransport, no_free_slot
from swath.modules.inference.reception import Address
from swath.modules.inference.server import InferenceServer
from swath.modules.inference.service import PolicyService
from swath.modules.inference.slots import SlotTransport, require_slots
from swath.process import pickling
from swath.process.channel import Channel, pack, unpack
from swath.process.helper import Helper
from swath.process.owner import SECONDS_TO_LEAVE, leave_with_owner
from swath.process.start import StartMethod, check_start_method
from swath.process.supervise import EndedAtExit
from swath.weight_update.weights import flat_weights

_TRANSPORTS: dict[str, type[MPTransport]] = {"slots": SlotTransport, "mp": MPTransport}
_SECONDS_FOR_HEALTH = 1.0


class ProcessInferenceServer(PolicyService):
    """Serves a policy from a process of its own, to clients in any process of this machine.

    Args:
        policy_factory: makes the policy, in that process.
        transport: "slots" for requests of a fixed layout, or "mp" for whatever can be pickled; "auto" is "slots", where
            the system has what that needs.
        num_clients: how many requests can be under way at a time.
        mp_context: "forkserver" (by default), "spawn" or "fork".
        startup_timeout: how many seconds ``start`` waits until the policy is made.
        num_threads: torch's threads there.
        settings: all others of ``InferenceServer``.

    >>> from tensordict import TensorDict
    >>> with ProcessInferenceServer(lambda: lambda observation: observation * 2) as server:
    ...     server.client()(TensorDict(observation=torch.ones(2)))["action"]
    tensor([2., 2.])
    """

    _owns = "a process that answers"
    _instead_of_a_copy = "make another one with the same arguments, or give others a client(), which can be sent"

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: str = "auto",
        *,
        num_clients: int | None = None,
        mp_context: str | None = None,
        startup_timeout: float = 300.0,
        num_threads: int = 1,
        **settings: Any,
    ) -> None:
        if not callable(policy_factory):
            raise TypeError(f"policy_factory must be a function, got {type(policy_factory).__name__}")
        if transport not in ("auto", *_TRANSPORTS):
            raise ValueError(f"transport must be one of auto, {', '.join(_TRANSPORTS)}, got {transport!r}")
        platforms.require(
            type(self).__name__,
            (platforms.PROCESSES, platforms.LOCAL_SOCKETS),
            "use an InferenceServer, which serves threads of this process",
        )
        if transport == "auto":
            transport = "slots" if platforms.are_met(*platforms.STEPPING_WORKERS) else "mp"
        elif transport == "slots":
            require_slots()
        try:
            self._blueprint = pickling.dumps((policy_factory, settings))
        except Exception as error:
            raise TypeError(
                f"policy_factory or a setting cannot be sent to a process: {type(error).__name__}: {error}. Make what "
                "cannot be pickled inside of the policy_factory"
            ) from error
        self._transport = transport
        self._num_slots = DEFAULT_CLIENTS if num_clients is None else num_clients
        self._method: StartMethod = check_start_method(mp_context)
        self._startup_timeout_s = startup_timeout
        self._num_threads = num_threads
        self._address = Address.new()
        self._num_made = 0
        self._num_calls = 0
        #: Knows nothing of this object, so that it can be garbage.
        self._helper: Helper | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> ProcessInferenceServer:
        """Start the process, and wait until it serves.

        Raises:
            TimeoutError: not within ``startup_timeout``.
            InferenceError: (a RuntimeError) it could not; the policy_factory's exception is the cause.
        """
        if self._helper is not None:
            raise RuntimeError("this inference server was started before; make a new one to start again")
        arguments = self._address, self._transport, self._num_slots, self._num_threads
        self._helper = helper = Helper(_main, "inference server", self._method, arguments, died=ServerDied)
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
        except BaseException:
            self.shutdown(0.5)
            raise
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ask the process to end, then terminate it, then kill it, in ``timeout`` seconds; clients get an error."""
        if self._helper is not None:
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
        kind = _TRANSPORTS[self._transport]
        if self._num_made >= self._num_slots:
            raise no_free_slot(self._num_slots)
        self._num_made += 1
        return kind.client_type(self._address, self)

    # -- the policy ------------------------------------------------------------------------------------------------

    def update_model(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn`` with the policy, in its process, between two batches; counts its version up."""
        return self._call("update_model", fn)

    def _publish(self, model_id: str, source: Any) -> None:
        if source is None:
            raise ValueError(
                "the policy was made in the server's process, so there is none here to take weights from: "
                "update_policy_weights_(policy)"
            )
        flat = {k: t.detach().cpu() for k, t in flat_weights(source).items() if isinstance(t, torch.Tensor)}
        self._call("update_policy_weights_", weights=flat, model_id=model_id)

    @property
    def policy_version(self) -> int:
        return self.stats()["policy_version"]

    # -- looking ---------------------------------------------------------------------------------------------------

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """As ``InferenceServer.stats``."""
        return self._call("stats", reset)

    def health(self) -> dict[str, Any]:
        """``alive`` (the process), ``serving`` (its loop), ``pid``, ``exitcode``.

        Never raises, and waits for a second at most.
        """
        alive = self.is_alive
        serving = False
        if alive:
            with contextlib.suppress(Exception):
                serving = bool(self._call("is_serving", timeout_s=_SECONDS_FOR_HEALTH))
        return {
            "alive": alive,
            "serving": serving,
            "pid": self.pid,
            "exitcode": None if self._helper is None else self._helper.process.exit_code(),
        }

    def _call(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        helper = self._helper
        if helper is None:
            raise ServerClosed("the inference server was not started: call server.start(), or use it in a with block")
        if not helper.process.is_ours:
            raise ServerClosed("the inference server belongs to the process that this was forked from; ask a client()")
        with helper.lock:
            if helper.process.is_closed:
                raise ServerClosed("the inference server was shut down")
            self._num_calls += 1
            helper.send(pickling.dumps(("call", self._num_calls, name, args, kwargs)))
            while True:
                if not helper.wait(timeout_s):
                    raise TimeoutError(f"the inference server did not answer within {timeout_s:g} s")
                kind, number, content = helper.receive()
                if number == self._num_calls:  # else the answer to a call that nobody waited for
                    break
        if kind == "failed":
            raise unpack(content, -1, helper.who)
        return content

    def __repr__(self) -> str:
        state = "serving" if self.is_alive else "not started" if self._helper is None else "ended"
        return f"ProcessInferenceServer(pid={self.pid}, {state})"


# -- in the process ------------------------------------------------------------------------------------------------


def _main(connection: Connection, address: Address, transport: str, num_slots: int, num_threads: int) -> None:
    leave_with_owner()  # also from within a policy that does not return
    channel = Channel(connection)
    try:
        torch.set_num_threads(num_threads)
        policy_factory, settings = cloudpickle.loads(connection.recv_bytes())
        chosen = _TRANSPORTS[transport](num_slots, address=address)
        server = InferenceServer(policy_factory=policy_factory, transport=chosen, **settings).start()
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
