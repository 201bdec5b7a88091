"""WeightSyncScheme: how weights get from the trainer to the workers.

The life of a scheme::

    trainer                                   worker
    init_on_sender(...)
        ── the scheme is pickled ──►          init_on_receiver(...)
    connect()              ◄── meet ──►       connect(worker_idx=i)
    send(weights)          ── weights ──►     receive()          applies them
                           ◄── applied ──
    shutdown()                                shutdown()

A collector does all of this for the schemes that it is given. Between two steps a worker looks whether weights wait,
so they are applied as a whole, also in the middle of a batch; and ``send`` returns when all have applied them.
"""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

from swath.process.channel import Channel, pack
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.memory import require_descriptors
from swath.weight_update.acknowledgements import Acknowledgements
from swath.weight_update.publications import Publications
from swath.weight_update.scheme_role import SchemeRole
from swath.weight_update.strategy import WeightStrategy
from swath.weight_update.weights import flat_weights

if TYPE_CHECKING:
    from swath.weight_update.backends import WeightSyncBackend

DEFAULT_TIMEOUT_S = 120.0


class WeightSyncScheme(SchemeRole):
    """Base of all schemes. A subclass says how weights travel (``_publish``, ``_post``, ``_unpack``).

    Args:
        strategy: "tensordict" or "state_dict": how weights look where they are handed to user code.
        sync: whether ``send`` waits until all have applied the weights; else it returns at once, and the next ``send``
            waits for this one.
        timeout_s: how long a worker has for it.
    """

    def __init__(
        self, strategy: str | WeightStrategy = "tensordict", *, sync: bool = True, timeout_s: float | None = None
    ) -> None:
        self.strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)  # type: ignore[arg-type]
        self.sync = sync
        if timeout_s is None:
            timeout_s = float(os.environ.get("TORCHRL_WEIGHT_SYNC_TIMEOUT", DEFAULT_TIMEOUT_S))
        self.timeout_s = timeout_s
        self._start_over()

    def _start_over(self) -> None:
        self.model_id: str | None = None
        self._role: str | None = None
        self._connected = False
        self._closed = False
        self._model: Any = None
        self._context: weakref.ref[Any] | None = None
        self._worker_idx: int | None = None
        self._channels: dict[int, Channel] = {}
        self._worker_ends: dict[int, Connection] = {}
        self._owed = Acknowledgements(self._channels)
        self._publications = Publications()
        #: Weights may be sent from several threads.
        self._lock = threading.RLock()

    @classmethod
    def from_backend(cls, backend: WeightSyncBackend, **kwargs: Any) -> WeightSyncScheme:
        """The scheme for a way of deployment, made with these arguments.

        >>> from swath.weight_update import WeightSyncScheme
        >>> WeightSyncScheme.from_backend("multiprocessing", sync=False)
        MultiProcessWeightSyncScheme(model_id=None, not initialised)
        """
        from swath.weight_update.backends import scheme_kind  # which knows all kinds, and they this one

        return scheme_kind(backend)(**kwargs)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: Any = None,
        model: Any = None,
        devices: Sequence[Any] | None = None,
        params_map: Mapping[int, Any] | None = None,
        device_map_fn: Any = None,
        num_workers: int | None = None,
    ) -> None:
        """Prepare to send; nothing is sent yet.

        Give either ``context`` (a collector) or what is to be sent (``model`` or ``weights``) and to how many
        (``num_workers``, or one entry of ``devices`` or ``params_map`` for each). A collector takes a scheme that was
        initialised for as many workers as it has.
        """
        if self._role == "sender" and context is not None and self._context is None and not self._connected:
            self._adopt(context, model_id)
            return
        if self._role is not None:
            raise RuntimeError(f"this scheme is a {self._role} already; make another one")
        if context is not None and any(x is not None for x in (weights, model, devices, params_map, device_map_fn)):
            raise ValueError("init_on_sender: give either context or weights/model/devices/params_map, not both")
        if weights is not None and model is not None:
            raise ValueError("init_on_sender: give either weights or model, not both")
        self.model_id = model_id or "policy"
        if context is not None:
            self._work_for(context)
            num_workers = context.num_workers if num_workers is None else num_workers
        elif num_workers is None:
            counted = devices if devices is not None else params_map
            if counted is None:
                raise ValueError("init_on_sender: say to how many workers: num_workers, devices or params_map")
            num_workers = len(counted)
        if params_map is not None and weights is None and model is None:
            weights = next(iter(params_map.values()))
        self.set_source(model if model is not None else weights)
        self._role = "sender"
        for worker in range(int(num_workers or 0)):
            self.replace_worker(worker)

    def _adopt(self, context: Any, model_id: str | None) -> None:
        """Work for a collector, as whoever initialised this has prepared it."""
        if model_id is not None and model_id != self.model_id:
            raise ValueError(f"this scheme was initialised for {self.model_id!r}, and is given as that of {model_id!r}")
        if context.num_workers != len(self._channels):
            raise ValueError(
                f"this scheme was initialised for {len(self._channels)} workers (num_workers, devices or params_map), "
                f"and the collector has {context.num_workers}"
            )
        self._work_for(context)

    def _work_for(self, context: Any) -> None:
        self._context = weakref.ref(context)
        self._lock = getattr(context, "lock", self._lock)

    def set_source(self, source: Any) -> None:
        """Whose weights are sent where none are given: a module's, which is not kept alive by this, or these.

        Raises:
            ValueError: it was initialised with another model, and works for a collector of this one.
        """
        given = self._source()
        if self._context is not None and given is not None:
            if source is None:
                return
            if isinstance(given, torch.nn.Module) and given is not source:
                raise ValueError("this scheme was initialised with another model than the collector's policy")
        if isinstance(source, torch.nn.Module):  # its owner may let go of it
            self._model = weakref.ref(source)
        else:
            self._model = None if source is None else (lambda: source)

    def replace_worker(self, worker: int) -> None:
        """Have a fresh connection for a worker: its first one, or one for its successor."""
        old = self._channels.pop(worker, None)
        if old is not None:
            old.close()
        self.started(worker)  # or not: its end is not for its successor
        self._owed.forget(worker)
        require_descriptors(2, f"connect worker {worker} for weights")
        ours, theirs = Pipe(duplex=True)
        self._channels[worker] = Channel(ours)
        self._worker_ends[worker] = theirs

    def is_waited_for(self, worker: int) -> bool:
        """Whether there is a connection for a worker that no worker has had yet."""
        return worker in self._worker_ends

    def for_worker(self, worker: int) -> WeightSyncScheme:
        """The half that goes to one worker."""
        half = self._copy()
        half._worker_ends = {worker: self._worker_ends[worker]}
        return half

    def started(self, worker: int) -> None:
        """The worker has its end: ours of it can go."""
        end = self._worker_ends.pop(worker, None)
        if end is not None:
            end.close()

    def _copy(self) -> WeightSyncScheme:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self._settings())
        copied._start_over()
        return copied

    def _settings(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "sync": self.sync, "timeout_s": self.timeout_s}

    def __copy__(self) -> WeightSyncScheme:
        """Another one with the same settings, and no connections: those are of one."""
        return self._copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSyncScheme:
        return self._copy()

    def __getstate__(self) -> dict[str, Any]:
        """Settings and the workers' ends of the connections; whoever gets it must init and connect anew."""
        # By whatever pickler: only multiprocessing's own knows what a connection is.
        ends = {worker: bytes(ForkingPickler.dumps(end)) for worker, end in self._worker_ends.items()}
        return {**self._settings(), "_worker_ends": ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ends = state.pop("_worker_ends")
        self.__dict__.update(state)
        self._start_over()
        self._worker_ends = {worker: pickle.loads(end) for worker, end in ends.items()}

    def init_on_receiver(
        self, *, model_id: str | None = None, context: Any = None, model: Any = None, worker_idx: int = 0
    ) -> None:
        """Prepare to receive, for ``model`` or for the model of that id in ``context``."""
        if self._role is not None:
            raise RuntimeError(f"this scheme is a {self._role} already; make another one")
        if context is not None and model is not None:
            raise ValueError("init_on_receiver: give either context or model, not both")
        if context is None and model is None:
            raise ValueError("init_on_receiver: say whose weights these are: context or model")
        self.model_id = model_id or "policy"
        self._context = None if context is None else weakref.ref(context)
        if model is not None:
            self.set_source(model)
        self._worker_idx = worker_idx
        self._role = "receiver"

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Meet the other side. A sender hands over ``weights`` (or its model's); a receiver waits for them.

        In a collector nobody waits: workers are made with their weights.
        """
        if self._role is None:
            raise RuntimeError("connect: call init_on_sender or init_on_receiver first")
        if self._connected:
            raise RuntimeError("connect: this scheme is connected already")
        if self._role == "sender":
            if worker_idx is not None:
                raise ValueError("connect: worker_idx is for receivers")
            self._connected = True
            source = weights if weights is not None else self._source()
            if self._context is None and source is not None:
                self.send(source)
            return
        if weights is not None:
            raise ValueError("connect: weights are for the sender")
        self._worker_idx = worker_idx if worker_idx is not None else self._worker_idx
        if self._worker_idx not in self._worker_ends:
            raise ValueError(f"connect: this scheme has no connection for worker {self._worker_idx}")
        self._channels[self._worker_idx] = Channel(self._worker_ends[self._worker_idx])
        self._connected = True
        if self._context is None:
            self.receive(timeout=self.timeout_s)

    def _source(self) -> Any:
        return None if self._model is None else self._model()

    def _require(self, role: str) -> None:
        if self._role != role or not self._connected:
            raise RuntimeError(
                f"{'send' if role == 'sender' else 'receive'}: this scheme is not connected as a {role}; call "
                f"init_on_{role} and connect first"
            )

    # -- sending ---------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        version: int | None = None,
    ) -> None:
        """Send weights (by default those of the sender's model) to all workers, or to some.

        Raises:
            WeightSyncError: a worker did not apply them in time.
        """
        self._require("sender")
        with self._lock:
            self._send(weights, worker_ids, version)

    def _send(self, weights: Any, worker_ids: int | Iterable[int] | None, version: int | None) -> None:
        workers = self.addressed(worker_ids)
        source = weights if weights is not None else self._source()
        if source is None:
            raise RuntimeError("send: there are no weights to send; give them, or a model in init_on_sender")
        if self._context is not None and not self._channels:  # what it is for is in this process
            self.context.update_policy_weights_(weights=source, model_id=self.model_id)
            return
        if isinstance(source, dict) and source and all(isinstance(name, int) for name in source):
            for worker, own in source.items():
                self._send(own, [worker], version)
            return
        self.finish()
        self._publish_to(
            workers, {n: t for n, t in flat_weights(source).items() if isinstance(t, torch.Tensor)}, version
        )
        if self.sync:
            self.finish()

    def _publish_to(self, workers: Sequence[int], weights: dict[str, torch.Tensor], version: int | None) -> None:
        self._publications.begin(workers, self._published)
        self._publish(weights)
        self._publications.end(workers, version)
        for worker in workers:
            self._post_to(worker, version)

    @ctrl_c_waits
    def resend(self, worker: int) -> None:
        """Give a worker that has just started what its predecessor was sent last, and wait for it alone."""
        with self._lock:
            last = self._publications.last_of(worker)
            if last is None:
                return
            number, version = last
            if number == self._publications.number:
                self._post_to(worker, version)
            else:
                self.finish()  # what is published now may still be read
                self._publish_to([worker], self._publications.kept(number), version)
            self._await([worker])

    def _post_to(self, worker: int, version: int | None) -> None:
        self._owed.expect(worker, self._publications.number)
        context = self.context
        try:
            if context is not None:  # first, since a pipe holds only so much until somebody reads
                context.wake_worker(worker, self.model_id)
            self._post(worker, self._channels[worker], self._publications.number, version)
        except OSError:  # it is dead: found out when its answer is waited for
            pass

    def addressed(self, worker_ids: int | Iterable[int] | None) -> list[int]:
        """The workers that ``send`` would reach.

        Raises:
            ValueError: there is no such worker.
        """
        if worker_ids is None:
            return sorted(self._channels)
        chosen = [worker_ids] if isinstance(worker_ids, int) else list(dict.fromkeys(worker_ids))
        for worker in chosen:
            if worker not in self._channels:
                raise ValueError(f"there is no worker {worker}; there are {len(self._channels)}, counted from 0")
        return chosen

    @ctrl_c_waits
    def finish(self) -> None:
        """Wait until all workers have applied what they were sent."""
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        self._await(None)

    def _await(self, workers: Sequence[int] | None) -> None:
        """Wait for the answers of these workers; None for all that were sent something."""
        self._owed.wait(workers, self.timeout_s, self.context)

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Any:
        """Apply the newest weights that were sent, and say so; None if none came within ``timeout`` seconds."""
        self._require("receiver")
        channel = self._channels[self._worker_idx]  # type: ignore[index]
        if not channel.connection.poll(timeout):
            return None
        weights, sequence, version = None, 0, None
        while True:
            got = self._unpack(channel, channel.receive())
            if got is not None:
                weights, sequence, version = got
            # Only the last of several counts; but who is woken for each takes one each time.
            if self._context is not None or not channel.has_message():
                break
        if weights is None:
            return self.receive(timeout)
        try:
            self._take(weights, version)
        except Exception as error:
            channel.send("failed", sequence, pack(error))
            if self._context is None:
                raise
            return None
        channel.send("applied", sequence)
        return weights

    def _take(self, weights: Any, version: int | None) -> None:
        context = self.context
        if hasattr(context, "take_weights"):  # it knows when nobody computes with them
            context.take_weights(self.model_id, weights, version)
            return
        for model in self._models():
            self.strategy.apply_weights(model, weights)
        if context is not None and hasattr(context, "weights_applied"):
            context.weights_applied(self.model_id, version)

    @property
    def connection(self) -> Connection:
        """Of a receiver, ready when weights wait."""
        self._require("receiver")
        return self._channels[self._worker_idx].connection  # type: ignore[index]

    def work_for(self, context: Any, model: Any) -> None:
        """A receiver that its user has initialised for this model is somebody's, who applies what it receives.

        Raises:
            ValueError: it was initialised for another.
        """
        if self.context is not None or self._source() is not model:
            raise ValueError(
                "this scheme was initialised as the receiver of another model than the collector's policy (which is a "
                "copy, if policy_device= says so); leave init_on_receiver to the collector"
            )
        self._context, self._model = weakref.ref(context), None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the receiver's model, as if they had been received; see ``WeightStrategy.apply_weights``."""
        if self._role != "receiver":
            raise RuntimeError("apply_weights: this scheme is no receiver; call init_on_receiver first")
        for model in self._models():
            self.strategy.apply_weights(model, weights, inplace)

    def _models(self) -> list[Any]:
        model = self._source()
        if model is not None:
            return [model]
        context = self.context
        if context is None:
            raise RuntimeError("receive: the model that weights are for is gone")
        if hasattr(context, "get_models"):
            return context.get_models(self.model_id)
        return [context.get_model(self.model_id)]

    def shutdown(self) -> None:
        """Close connections; harmless when called again."""
        if self.__dict__.get("_closed", True):
            return
        self._closed = True
        for channel in self._channels.values():
            channel.close()
        for end in self._worker_ends.values():
            end.close()
        self._channels.clear()
        self._worker_ends.clear()
        self._owed.clear()

    def __del__(self) -> None:
        self.shutdown()

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _publish(self, weights: dict[str, torch.Tensor]) -> None:
        """Have these weights ready to be posted."""
        raise NotImplementedError

    def _published(self) -> dict[str, torch.Tensor]:
        """A copy of what was published last."""
        raise NotImplementedError

    def _post(self, worker: int, channel: Channel, sequence: int, version: int | None) -> None:
        """Send what was published to one worker."""
        raise NotImplementedError

    def _unpack(self, channel: Channel, message: tuple[Any, ...]) -> tuple[Any, int, int | None] | None:
        """In the worker: the weights of a message, its number and their version; None if it only prepares."""
        raise NotImplementedError
