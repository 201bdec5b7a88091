"""RayCollector: nodes that are Ray actors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Unpack

import cloudpickle

from swath.collectors.assignment import list_nodes
from swath.collectors.distributed.answers import PicklingNode, as_request, lost, opened
from swath.collectors.distributed.arguments import NodesArguments
from swath.collectors.distributed.driver import NodesCollector
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.data.buffer_writer import buffer_writer
from swath.data.payload import Bytes
from swath.errors import NodeLost
from swath.integrations.ray import import_ray, start_ray
from swath.modules.inference_server.service import PolicyService
from swath.process import pickling
from swath.weight_update.nodes import RayWeightSyncScheme

#: What an actor asks of Ray by default; give ``remote_configs`` for more.
DEFAULT_REMOTE_CONFIG: dict[str, Any] = {"num_cpus": 1}
#: Weights are applied while a batch is collected, so they need a thread of their own.
_CONTROL = "control"
_WATCH = "watch"


class _Actor(PicklingNode):
    """What Ray runs."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = threading.Event()

    def stay(self) -> None:
        """Returns when the node closes; so whoever waits for it learns of the actor's end, however it came."""
        self._closing.wait()

    def close(self) -> None:
        self._closing.set()
        super().close()


#: Where to look when an actor is gone.
_OUTPUT = "What it printed is on its machine, in Ray's folder (/tmp/ray/session_latest/logs), also if not shown here"


class RayEngine:
    """See ``Engine``."""

    name = "Ray"
    restarts = True
    orders_per_node = 2

    def __init__(self, remote_configs: Sequence[Mapping[str, Any]], ray_init_config: Mapping[str, Any] | None) -> None:
        self._ray = import_ray()
        self._configs = remote_configs
        self._started_ray = start_ray(ray_init_config)
        self.actors: dict[int, Any] = {}
        self._promises: set[Future[Any]] = set()
        #: Done when an actor has ended.
        self._stays: dict[int, Future[None]] = {}
        self._closed = False

    def launch(self, plan: NodePlan) -> Future[NodeDescription]:
        ray = self._ray

        class SwathNode(_Actor):
            set_weights = ray.method(concurrency_group=_CONTROL)(_Actor.set_weights)
            close = ray.method(concurrency_group=_CONTROL)(_Actor.close)
            stay = ray.method(concurrency_group=_WATCH)(_Actor.stay)

        config = {**DEFAULT_REMOTE_CONFIG, **self._configs[plan.node % len(self._configs)]}
        remote = ray.remote(**config, max_restarts=0, concurrency_groups={_CONTROL: 1, _WATCH: 1})(SwathNode)
        actor = self.actors[plan.node] = remote.remote()
        self._stays[plan.node] = self._promise(plan.node, actor.stay.remote())
        return self._promise(plan.node, actor.make.remote(pickling.dumps_with_path(plan)))

    def collect(self, node: int, order: Order) -> Future[tuple[Report, Bytes | None]]:
        return self._ask(node, "collect", order)

    def share(self, weights: Bytes) -> Any:
        return self._ray.put(weights)

    def set_weights(self, node: int, shared: Any, version: int, model_id: str) -> Future[None]:
        return self._ask(node, "set_weights", shared, version, model_id)

    def call(self, node: int, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._ask(node, "call", as_request(name, args, kwargs), read=cloudpickle.loads)

    def _ask(self, node: int, method: str, *args: Any, read: Any = None) -> Future[Any]:
        actor = self.actors.get(node)
        if actor is None:
            return lost(node, "it was ended")
        return self._promise(node, getattr(actor, method).remote(*args), read)

    def _promise(self, node: int, reference: Any, read: Any = None) -> Future[Any]:
        """A reference as a future, which takes no thread and no polling however many there are."""
        promise: Future[Any] = Future()
        self._promises.add(promise)

        def keep(done: Future[Any]) -> None:
            self._promises.discard(promise)
            try:
                value = opened(done.result(), node, read)
            except BaseException as error:
                if not promise.done():
                    promise.set_exception(self._lost(node, error))
            else:
                if not promise.done():
                    promise.set_result(value)

        reference.future().add_done_callback(keep)
        return promise

    def _lost(self, node: int, error: BaseException) -> BaseException:
        known = self._ray.exceptions
        if isinstance(
            error, (known.RayActorError, known.NodeDiedError, known.ObjectLostError, known.WorkerCrashedError)
        ):
            words = " ".join(line.strip() for line in str(error).splitlines()[:1] if line.strip())
            return NodeLost(f"{words.rstrip('.')}. {_OUTPUT}", node)
        return error

    def is_there(self, node: int) -> bool:
        return node in self.actors and not self._stays[node].done()

    def end(self, node: int) -> None:
        actor = self.actors.pop(node, None)
        if actor is not None:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        ray = self._ray
        if not ray.is_initialized():
            return
        leaving = [actor.close.remote() for actor in self.actors.values()]
        if leaving:  # workers of theirs are ended in order; those of a killed one notice by themselves
            with suppress(Exception):
                ray.wait(leaving, num_returns=len(leaving), timeout=timeout_s)
        for node in list(self.actors):
            self.end(node)
        for promise in list(self._promises):  # whoever waits is told
            if not promise.done():
                promise.set_exception(NodeLost("the collector was shut down"))
        if self._started_ray:
            ray.shutdown()


def _as_client(policy: Any) -> Any:
    """An inference server, as a policy: what nodes are sent is a client of it.

    Raises:
        TypeError: its clients work in this machine, or process, only.
    """
    if not isinstance(policy, PolicyService):
        return policy
    if "ray" not in (policy.service_backend, getattr(policy, "transport_kind", None)):
        raise TypeError(
            f"nodes cannot reach this {type(policy).__name__}: make it with service_backend='ray', or with a "
            "RayTransport()"
        )
    return policy.client()


class _Done:
    """What ``async_shutdown`` returns, for those who await it."""

    def __await__(self) -> Any:
        return iter(())


class RayCollector(NodesCollector):
    """Collects in Ray actors. Arguments are those of ``NodesCollector``, and:

    Args:
        policy: as of any collector; or an inference server in Ray (``service_backend="ray"``, or ``RayTransport()``),
            which all nodes ask, and whose own ``update_policy_weights_`` is the way to give it weights.
        ray_init_config: for ``ray.init``; a cluster of this machine by default, which ends with the collector. Where
            Ray runs already, it is used as it is.
        remote_configs: what an actor asks of Ray (``num_cpus``, ``num_gpus``, ``memory``, ``resources``,
            ``runtime_env`` …); a dict, or a list with one for each.
        use_env_creator: accepted: whatever can be called, or pickled, is fine as an env.
        replay_buffer: actors write to a ``swath.data.RayReplayBuffer`` by themselves; to any other, this process does.

    >>> collector = RayCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=50, sync=True)  # doctest: +SKIP
    >>> [batch.shape for batch in collector]  # doctest: +SKIP
    [torch.Size([2, 25])]
    """

    _scheme_class = RayWeightSyncScheme
    _both_update_rules_are_fine = True

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        use_env_creator: bool | None = None,
        **common: Unpack[NodesArguments],
    ) -> None:
        self._closed = True  # until there is something to close
        configs = remote_configs or {}
        self._remote_configs = [configs] if isinstance(configs, Mapping) else list(configs)
        self._ray_init_config = ray_init_config
        super().__init__(create_env_fn, _as_client(policy), **common)

    def _make_engine(self, num_nodes: int) -> Engine:
        configs = self._remote_configs
        if len(configs) not in (1, num_nodes):
            raise ValueError(f"remote_configs has {len(configs)} entries for {num_nodes} nodes")
        return RayEngine(configs, self._ray_init_config)  # type: ignore[return-value]

    def _can_reach(self, replay_buffer: Any) -> bool:
        from swath.data.ray_buffer import RayReplayBuffer

        return isinstance(replay_buffer, RayReplayBuffer)

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors."""
        return list(self._engine.actors.values())

    @property
    def num_collectors(self) -> int:
        return self.num_nodes

    @property
    def local_policy(self) -> Any:
        return self.policy

    def add_collectors(
        self,
        create_env_fn: Any,
        num_collectors: int | None = None,
        *,
        create_env_kwargs: Mapping[str, Any] | None = None,
        policy_factory: Any = None,
        collector_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """More nodes, with the newest weights; each adds as many frames to a ``sync`` batch as the others have."""
        self._require_open()
        self._require_still("add_collectors")
        first = self._nodes.handles[0].plan
        plans = [
            self._plans.plan(
                self.num_workers + i,
                factory,
                create_env_kwargs,
                first.policy_factory if policy_factory is None else policy_factory,
                collector_kwargs,
            )
            for i, factory in enumerate(list_nodes(create_env_fn, num_collectors))
        ]
        self._start(plans)
        self._scheduler.add_places(len(plans))
        if "policy" in self._schemes and self.policy is not None:
            self._send_one("policy", None, [plan.node for plan in plans], self._policy_version)
        if self._writes_itself:
            for handle in self._alive:
                self._let_node_write(handle)
        elif self.replay_buffer is not None:
            by_episode = self._assembler is not None
            self._buffer_writer = buffer_writer(self.replay_buffer, self._num_envs, self._extends, by_episode)

    def stop_remote_collectors(self) -> None:
        """End the actors, and with them this collector."""
        self.shutdown()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> Any:
        """As of every collector; it may be awaited, too."""
        super().async_shutdown(timeout, close_env)
        return _Done()
