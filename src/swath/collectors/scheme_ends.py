"""Weight schemes of a single collector: weights that come to it from elsewhere, and that it passes on."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

from swath.collectors.config import SingleConfig
from swath.envs.paths import parts_of
from swath.errors import CollectorClosed, WeightSyncError
from swath.weight_update.processes import NoWeightSyncScheme
from swath.weight_update.scheme import WeightSyncScheme


class Reception:
    """Receives what others send, in a thread: weights are applied between two steps, also while nothing is collected.

    Batches wait for the first weights of each scheme: what a sender hands over when it connects.
    """

    def __init__(
        self, schemes: Mapping[str, WeightSyncScheme], take: Callable[..., Any], policy: Any, worker_idx: int | None
    ) -> None:
        #: Applies weights; of who may be gone.
        self._take = weakref.WeakMethod(take)
        self._schemes = _checked("weight_recv_schemes", schemes)
        #: By model: set when weights have come, or none will ever come.
        self._first = {model_id: threading.Event() for model_id in self._schemes}
        self._hung_up: set[str] = set()
        for model_id, scheme in self._schemes.items():
            self._attach(model_id, scheme, policy, worker_idx or 0)
        self._connections: dict[Any, str] = {
            scheme.connection: model_id
            for model_id, scheme in self._schemes.items()
            if not isinstance(scheme, NoWeightSyncScheme)
        }
        self._wake_up, self._wake = os.pipe()
        weakref.finalize(self, _close_both, self._wake_up, self._wake)
        self._thread = threading.Thread(target=self._run, name="swath-weight-receiver", daemon=True)
        self._thread.start()

    def _attach(self, model_id: str, scheme: WeightSyncScheme, policy: Any, worker_idx: int) -> None:
        if scheme.initialized_on_receiver:  # by its user, for the very policy
            scheme.work_for(self, policy)
        else:
            scheme.init_on_receiver(model_id=model_id, context=self, worker_idx=worker_idx)
        if scheme.synchronized_on_receiver or isinstance(scheme, NoWeightSyncScheme):
            self._first[model_id].set()
        if not scheme.synchronized_on_receiver:
            scheme.connect()

    def take_weights(self, model_id: str, weights: Any, version: int | None) -> None:
        """Called by a scheme."""
        take = self._take()
        if take is None:
            raise CollectorClosed("the collector that these weights are for is gone")
        first = not self._first[model_id].is_set()
        take(model_id, weights, 0 if first and version is None else version)
        self._first[model_id].set()

    def wait_for_first(self) -> None:
        """Until there were weights of each.

        Raises:
            WeightSyncError: there were none in time, or there will not be any.
        """
        for model_id, scheme in self._schemes.items():
            first = self._first[model_id]
            if not first.is_set() and not first.wait(scheme.timeout_s):
                raise WeightSyncError(
                    f"no weights have come for {model_id!r} within {scheme.timeout_s:g} s (timeout_s=); the sender "
                    "hands them over with connect() or send()"
                )
            if model_id in self._hung_up:
                raise WeightSyncError(f"the sender of {model_id!r} hung up before it sent any weights")

    def _run(self) -> None:
        connections = self._connections
        while connections:
            try:
                ready = wait([*connections, self._wake_up])
            except OSError:  # closed, by who could not wait for this thread any longer
                return
            if self._wake_up in ready:
                return
            for each in ready:
                model_id = connections[each]
                try:
                    self._schemes[model_id].receive(timeout=0)
                except (EOFError, OSError):  # the weights that there are stay
                    del connections[each]
                    if not self._first[model_id].is_set():
                        self._hung_up.add(model_id)
                        self._first[model_id].set()

    def close(self) -> None:
        os.write(self._wake, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        for scheme in self._schemes.values():
            scheme.shutdown()


def _close_both(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class PassingOn:
    """Schemes by which a collector's updates go on to others, or to a part of its env that has a name.

    One that was initialised by its user, for receivers elsewhere, sends to them. One that was not is for what is here:
    its ``send`` is ``update_policy_weights_``.
    """

    def __init__(self, schemes: Mapping[str, WeightSyncScheme], collector: Any) -> None:
        self._schemes = _checked("weight_sync_schemes", schemes)
        #: Those whose receivers are elsewhere.
        self._elsewhere: dict[str, WeightSyncScheme] = {}
        for model_id, scheme in self._schemes.items():
            if scheme.initialized_on_sender:
                self._elsewhere[model_id] = scheme
                if not scheme.synchronized_on_sender:
                    scheme.connect()
                continue
            if model_id != "policy" and not _leads_somewhere(collector, model_id):
                raise KeyError(
                    f"weight_sync_schemes: {model_id!r} is nothing of this collector ('policy', 'env.transform[0]'); "
                    "a scheme for something elsewhere is initialised before: init_on_sender(model=..., num_workers=n)"
                )
            scheme.init_on_sender(model_id=model_id, context=collector, num_workers=0)
            scheme.connect()

    def is_off(self, model_id: str) -> bool:
        return isinstance(self._schemes.get(model_id), NoWeightSyncScheme)

    def leaves_alone(self, path: str, collector: Any) -> bool:
        """Whether nothing here is updated: it is not to be, or what has this name is elsewhere only."""
        return self.is_off(path) or (path in self._elsewhere and not _leads_somewhere(collector, path))

    def weights_for(self, path: str, weights: Any) -> Any:
        """These, or those of the model that its scheme was initialised with."""
        if "." not in path and path not in self._elsewhere:
            raise KeyError(
                f"there is no model {path!r}; this collector has 'policy', and what a path such as 'env.transform[0]' "
                "leads to"
            )
        if weights is None and path in self._schemes:
            weights = self._schemes[path].model
        if weights is None:
            raise TypeError(f"update_policy_weights_: give the weights for {path!r}")
        return weights

    def send(self, model_id: str, weights: Any) -> None:
        if model_id in self._elsewhere:
            self._elsewhere[model_id].send(weights)

    def close(self) -> None:
        for scheme in self._schemes.values():
            scheme.shutdown()


def _leads_somewhere(collector: Any, path: str) -> bool:
    try:
        return bool(parts_of(collector, path))
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _checked(name: str, schemes: Any) -> dict[str, WeightSyncScheme]:
    if not isinstance(schemes, Mapping):
        raise TypeError(
            f"{name} must be a dict of schemes by model id, {{'policy': scheme}}; got {type(schemes).__name__}"
        )
    for model_id, scheme in schemes.items():
        if not isinstance(scheme, WeightSyncScheme):
            raise TypeError(f"{name}[{model_id!r}] must be a WeightSyncScheme, got {type(scheme).__name__}")
    return dict(schemes)


class SchemeEnds:
    """Both, of one collector: what was asked for with ``weight_sync_schemes`` and ``weight_recv_schemes``."""

    def __init__(self, collector: Any, take: Callable[..., Any], config: SingleConfig) -> None:
        self.passing_on = PassingOn(config.weight_sync_schemes or {}, collector)
        received, policy = config.weight_recv_schemes, collector.policy
        self._reception = Reception(received, take, policy, config.worker_idx) if received else None

    def wait_for_first(self) -> None:
        if self._reception is not None:
            self._reception.wait_for_first()

    def close(self) -> None:
        if self._reception is not None:
            self._reception.close()
        self.passing_on.close()
