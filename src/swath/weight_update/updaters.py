"""The older interface: weight updaters. Thin adapters; new code uses schemes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from swath.integrations.ray import import_ray
from swath.warn import warn_user
from swath.weight_update.strategy import WeightStrategy


class WeightUpdaterBase:
    """Subclasses say how one worker gets the weights: ``_sync_weights_with_worker``."""

    def __init__(self) -> None:
        self._collectors: list[Any] = []
        self._post_hooks: list[Callable[[], Any]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__:
            warn_user(
                "WeightUpdaterBase is deprecated; subclass swath.weight_update.WeightSyncScheme", DeprecationWarning
            )

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define _sync_weights_with_worker")

    def _get_server_weights(self) -> Any:
        """The weights, where none are given: those of the collector's policy."""
        return self.collector.policy

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        if isinstance(server_weights, (TensorDictModuleBase, torch.nn.Module)):
            return WeightStrategy().extract_weights(server_weights)
        if isinstance(server_weights, (TensorDictBase, Mapping)):
            return server_weights
        raise TypeError(f"weights must be a module, a TensorDict or a dict, got {type(server_weights).__name__}")

    def all_worker_ids(self) -> Iterable[Any] | None:
        """The workers to update; None for one update without a number."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        return False

    # -- for users -------------------------------------------------------------------------------------------------

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Give weights to workers: to all, or to some."""
        server_weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        mapped = None if server_weights is None else self._maybe_map_weights(server_weights)
        if worker_ids is None:
            worker_ids = self.all_worker_ids()
        if worker_ids is None:
            self._sync_weights_with_worker(server_weights=mapped)
        else:
            for worker_id in [worker_ids] if isinstance(worker_ids, int) else list(worker_ids):
                if not self._skip_update(worker_id):
                    self._sync_weights_with_worker(worker_id=worker_id, server_weights=mapped)
        for hook in self._post_hooks:
            hook()

    __call__ = push_weights

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Called after every update."""
        self._post_hooks.append(hook)

    def register_collector(self, collector: Any) -> None:
        if collector not in self._collectors:
            self._collectors.append(collector)

    @property
    def collectors(self) -> list[Any]:
        return self._collectors

    @property
    def collector(self) -> Any:
        if len(self._collectors) != 1:
            raise ValueError(f"this updater has {len(self._collectors)} collectors; see its collectors")
        return self._collectors[0]

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """An updater for a policy, where the class can make one."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Set up after the workers have started; nothing by default."""

    def increment_version(self) -> None:
        self.collector.increment_version()


class VanillaWeightUpdater(WeightUpdaterBase):
    """For a collector in the same process: weights are copied in place."""

    def __init__(self, weight_getter: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        super().__init__()
        self._weight_getter = weight_getter
        self._policy_weights = policy_weights

    def _get_server_weights(self) -> Any:
        return super()._get_server_weights() if self._weight_getter is None else self._weight_getter()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any = None) -> None:
        if self._policy_weights is not None:
            WeightStrategy().apply_weights(self._policy_weights, server_weights)
        else:
            self.collector.send_weights(server_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """For workers in other processes. What they get is a copy, so ``policy_weights`` is not needed."""

    def __init__(
        self,
        get_server_weights: Callable[[], Any] | None = None,
        policy_weights: Mapping[Any, TensorDictBase] | None = None,
    ) -> None:
        super().__init__()
        self._getter = get_server_weights

    def _get_server_weights(self) -> Any:
        return super()._get_server_weights() if self._getter is None else self._getter()

    def all_worker_ids(self) -> Iterable[int]:
        return range(self.collector.num_workers)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        server_weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        self.collector.send_weights(self._maybe_map_weights(server_weights), worker_ids)  # all at the same time
        for hook in self._post_hooks:
            hook()

    __call__ = push_weights


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """For a policy that lives elsewhere: weights must be given."""

    def _get_server_weights(self) -> Any:
        raise RuntimeError("the policy lives elsewhere: give update_policy_weights_ the weights")

    def all_worker_ids(self) -> Iterable[int]:
        return range(self.collector.num_workers)

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any = None) -> None:
        self.collector.send_weights(server_weights, worker_id)


class _NodesWeightUpdater(WeightUpdaterBase):
    """For the nodes of a distributed collector, which must be registered (``register_collector``).

    Args:
        policy_weights: what is sent where nothing is given; by default the weights of the collector's policy.
        max_interval: a node gets weights with one of so many calls, and one more, only.
    """

    def __init__(self, policy_weights: Any = None, max_interval: int = 0) -> None:
        super().__init__()
        self.policy_weights = policy_weights
        self.max_interval = max(0, max_interval)
        self._calls_since: Counter[Any] = Counter()

    def _get_server_weights(self) -> Any:
        return super()._get_server_weights() if self.policy_weights is None else self.policy_weights

    def all_worker_ids(self) -> Iterable[int]:
        return range(self.collector.num_workers)

    def _skip_update(self, worker_id: Any) -> bool:
        self._calls_since[worker_id] += 1
        if self._calls_since[worker_id] <= self.max_interval:
            return True
        self._calls_since[worker_id] = 0
        return False

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        server_weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        asked = self.all_worker_ids() if worker_ids is None else worker_ids
        chosen = [node for node in ([asked] if isinstance(asked, int) else asked) if not self._skip_update(node)]
        if chosen:
            self._send(self._maybe_map_weights(server_weights), chosen)
        for hook in self._post_hooks:
            hook()

    __call__ = push_weights

    def _send(self, weights: Any, nodes: list[int]) -> None:
        self.collector.send_weights(weights, nodes)  # all at the same time


class RayWeightUpdater(_NodesWeightUpdater):
    """For a ``RayCollector``; or for actors with ``update_policy_weights_``.

    Args:
        policy_weights: what is sent where nothing is given; by default the weights of the collector's policy.
        remote_collectors: handles of actors, instead of a collector that is registered.
        max_interval: a node gets weights with one of so many calls, and one more, only.
    """

    def __init__(self, policy_weights: Any = None, remote_collectors: Any = None, max_interval: int = 0) -> None:
        super().__init__(policy_weights, max_interval)
        self.remote_collectors = remote_collectors

    def all_worker_ids(self) -> Iterable[int]:
        return super().all_worker_ids() if self.remote_collectors is None else range(len(self.remote_collectors))

    def _send(self, weights: Any, nodes: list[int]) -> None:
        if self.remote_collectors is None:
            super()._send(weights, nodes)
            return
        import_ray().get([self.remote_collectors[node].update_policy_weights_.remote(weights) for node in nodes])


class DistributedWeightUpdater(_NodesWeightUpdater):
    """For a ``DistributedCollector``.

    Args:
        store: None: the collector has connections of its own.
        policy_weights: what is sent where nothing is given; by default the weights of the collector's policy.
        num_workers: accepted for compatibility; it is the collector's.
        sync: True: the collector's scheme says whether to wait (``DistributedWeightSyncScheme(sync=False)``).
    """

    def __init__(
        self, store: None = None, policy_weights: Any = None, num_workers: int | None = None, sync: bool = True
    ) -> None:
        super().__init__(policy_weights)
        if store is not None:
            raise ValueError("DistributedWeightUpdater: leave store out; the collector has connections of its own")
        if not sync:
            raise ValueError("give sync=False to the collector's scheme: DistributedWeightSyncScheme(sync=False)")


class RPCWeightUpdater(_NodesWeightUpdater):
    """For an ``RPCCollector``.

    Args:
        collector_infos, collector_class, collector_rrefs: None: the collector knows its nodes.
        policy_weights: what is sent where nothing is given; by default the weights of the collector's policy.
        num_workers: accepted for compatibility; it is the collector's.
    """

    def __init__(
        self,
        collector_infos: None = None,
        collector_class: None = None,
        collector_rrefs: None = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(policy_weights)
        if not collector_infos is collector_class is collector_rrefs is None:
            raise ValueError("RPCWeightUpdater: leave collector_infos, _class and _rrefs out; the collector has them")


def adopt_updater(updater: Any, collector: Any) -> WeightUpdaterBase | None:
    """The updater that a collector was given, or that what it was given makes."""
    if updater is None:
        return None
    warn_user("weight_updater= is deprecated; use weight_sync_schemes=", DeprecationWarning)
    if not hasattr(updater, "push_weights") or isinstance(updater, type):
        if not callable(updater):
            raise TypeError(f"weight_updater must be a WeightUpdaterBase or make one, got {type(updater).__name__}")
        updater = updater()
    updater.register_collector(collector)
    return updater
