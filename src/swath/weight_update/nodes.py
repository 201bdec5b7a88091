"""Weight schemes for nodes: weights travel as one piece of bytes, by the engine that the nodes run on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from swath.errors import WeightSyncError
from swath.process.ctrl_c import ctrl_c_waits, interruptible
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.strategy import WeightStrategy


class NodeWeightSyncScheme(WeightSyncScheme):
    """Base of the schemes of distributed collectors: they carry the weights, the scheme says to whom and waits.

    Args:
        strategy, sync, timeout_s: see ``WeightSyncScheme``.
        timeout: another name of ``timeout_s``.
        backend: accepted for compatibility ("gloo", or None): what carries weights is the collector's own
            ``backend=``.
    """

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        sync: bool = True,
        timeout_s: float | None = None,
        timeout: float | None = None,
        backend: str | None = None,
    ) -> None:
        if backend not in (None, "gloo"):
            raise ValueError(
                f"{type(self).__name__}: weights travel as the collector's batches do; give backend={backend!r} to the "
                "collector"
            )
        super().__init__(strategy, sync=sync, timeout_s=timeout if timeout_s is None else timeout_s)

    def _start_over(self) -> None:
        super()._start_over()
        #: By node: when it will have applied them, and which incarnation of it.
        self._under_way: dict[int, tuple[Future[None], int]] = {}
        #: What each node was sent last: the tensors' engine form, and the version.
        self._last_sent: dict[int, tuple[Any, int]] = {}

    def init_on_sender(self, *, model_id: str | None = None, context: Any = None, **others: Any) -> None:
        if context is None or any(value is not None for value in others.values()):
            raise ValueError(
                f"{type(self).__name__} needs context=, a distributed collector: give it to one as weight_sync_schemes="
            )
        if self._role is not None:
            raise RuntimeError(f"this scheme is a {self._role} already; make another one")
        self.model_id = model_id or "policy"
        self._context = weakref.ref(context)
        self._lock = context.lock
        self._role = "sender"
        self._connected = True

    def _send(self, weights: Any, worker_ids: Any, version: int | None) -> None:
        """For users who call ``send`` themselves: as if the collector had been asked."""
        nodes = None if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        self.context.update_policy_weights_(weights=weights, model_id=self.model_id, worker_ids=nodes)

    @ctrl_c_waits
    def send_to(self, tensors: Mapping[str, torch.Tensor], nodes: Sequence[int] | None, version: int) -> None:
        """Pack once, send to these nodes (all by default)."""
        with self._lock:
            self.finish()
            context = self.context
            shared = context.share_weights(tensors)
            for node in range(context.num_workers) if nodes is None else nodes:
                self._post(node, shared, version)
            if self.sync:
                self.finish()

    def _post(self, node: int, shared: Any, version: int) -> None:  # type: ignore[override]
        self._last_sent[node] = shared, version
        posted = self.context.post_weights(node, shared, version, self.model_id)
        if posted is not None:
            self._under_way[node] = posted

    def remember(self, shared: Any, nodes: Sequence[int], version: int) -> None:
        """What these nodes have already."""
        for node in nodes:
            self._last_sent[node] = shared, version

    @ctrl_c_waits
    def resend(self, worker: int) -> None:
        """To a node that was started again: what its predecessor was sent last; waits until it is applied."""
        self._under_way.pop(worker, None)
        if worker in self._last_sent:
            shared, version = self._last_sent[worker]
            posted = self.context.post_weights(worker, shared, version, self.model_id)
            if posted is not None:
                self._wait(worker, posted[0])

    def forget(self, node: int) -> None:
        """A node is gone."""
        self._under_way.pop(node, None)

    def _finish(self) -> None:
        failure: Exception | None = None
        while self._under_way:
            node, (future, incarnation) = next(iter(self._under_way.items()))
            try:
                self._wait(node, future)
            except WeightSyncError:
                self._under_way.clear()
                raise
            except Exception as error:
                self._under_way.pop(node, None)
                try:
                    self.context.weights_failed(node, incarnation, error)
                except Exception as raised:  # after all were heard: what is sent next is not to be blamed for it
                    failure = failure or raised
            else:
                self._under_way.pop(node, None)
        if failure is not None:
            raise failure

    def _wait(self, node: int, future: Future[None]) -> None:
        try:
            interruptible(future.result, self.timeout_s)
        except FutureTimeout:
            raise WeightSyncError(
                f"node {node} did not apply the weights within {self.timeout_s:g} s; a step of the env may take longer "
                "than that (timeout_s=)"
            ) from None


class RayWeightSyncScheme(NodeWeightSyncScheme):
    """For ``RayCollector``: one ``ray.put`` for all nodes."""


class DistributedWeightSyncScheme(NodeWeightSyncScheme):
    """For ``DistributedCollector``: over its process group."""


class RPCWeightSyncScheme(NodeWeightSyncScheme):
    """For ``RPCCollector``."""
