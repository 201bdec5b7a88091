"""Plans: the arguments of a distributed collector, resolved once into what each node is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swath.collectors.assignment import for_each
from swath.collectors.distributed.requests import IdSpace, NodePlan
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.numbers import positive_int
from swath.collectors.single import Collector
from swath.process.seeding import draw_base_seed

_CLASSES = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
#: Of ``collector_kwargs``: what is the driver's business, and what would make batches uneven.
_DRIVERS_OWN = ("replay_buffer", "total_frames", "frames_per_batch", "init_random_frames")
_UNEVEN = ("preemptive_threshold", "cat_results")


@dataclass(frozen=True)
class NodePlans:
    """Makes the plan of any node, also of those that are added later."""

    who: str
    #: How many nodes there are at the start.
    count: int
    collector_class: type
    num_workers: int
    policy: Any
    #: Frames of a node's batch.
    frames: int
    #: For every node's collector; devices may be lists with one for each.
    common: Mapping[str, Any]
    #: Of a MultiCollector, for each node: it orders ahead of what is asked of it, so it has to know its random frames
    #: from the start.
    random_frames: Sequence[int]
    base_seed: int
    num_threads: int
    #: Parts of the envs that are sent weights, by their paths.
    part_ids: tuple[str, ...]

    @classmethod
    def resolve(
        cls,
        who: str,
        count: int,
        *,
        collector_class: Any,
        num_workers: Any,
        policy: Any,
        frames: int,
        common: Mapping[str, Any],
        random_frames: int,
        num_threads: int,
        part_ids: tuple[str, ...],
    ) -> NodePlans:
        num_workers = positive_int("num_workers_per_collector", num_workers)
        kind = node_class(collector_class, num_workers)
        whole, rest = divmod(random_frames, count)
        own_random = issubclass(kind, MultiCollector)
        shares = [whole + (node < rest) if own_random else 0 for node in range(count)]
        seed = draw_base_seed()
        return cls(who, count, kind, num_workers, policy, frames, common, shares, seed, num_threads, part_ids)

    def plan(self, node: int, factory: Any, env_kwargs: Any, policy_factory: Any, kwargs: Any) -> NodePlan:
        kwargs = dict(kwargs or {})
        for name in kwargs:
            if name in _DRIVERS_OWN:
                raise ValueError(f"{name} is an argument of {self.who}, not of collector_kwargs")
            if name in _UNEVEN:
                raise ValueError(f"{name} is not for collectors on nodes: their batches are whole, and stacked")
        common = {
            name: value[node % len(value)] if name.endswith("device") and isinstance(value, (list, tuple)) else value
            for name, value in self.common.items()
        }
        return NodePlan(
            node=node,
            collector_class=self.collector_class,
            factories=[factory] * self.num_workers,
            env_kwargs=env_kwargs,
            policy=self.policy if policy_factory is None else None,
            policy_factory=policy_factory,
            frames=self.frames,
            collector_kwargs={**common, **kwargs},
            ids=IdSpace.of_node(node, self.count),
            base_seed=self.base_seed,
            num_threads=self.num_threads,
            random_frames=self.random_frames[node] if node < self.count else 0,
            part_ids=self.part_ids,
        )

    def all(self, factories: Sequence[Any], env_kwargs: Any, policy_factory: Any, kwargs: Any) -> list[NodePlan]:
        """Of those that are there at the start; each argument is one for all, or a list with one for each."""
        each = zip(
            factories,
            for_each("create_env_kwargs", env_kwargs, self.count, ValueError),
            for_each("policy_factory", policy_factory, self.count, ValueError),
            for_each("collector_kwargs", kwargs, self.count, ValueError),
            strict=True,
        )
        return [self.plan(node, *given) for node, given in enumerate(each)]


def node_class(given: Any, num_workers: int) -> type:
    """The collector that runs on a node."""
    if isinstance(given, str):
        if given not in _CLASSES:
            raise ValueError(f"collector_class must be a class or one of {', '.join(_CLASSES)}; got {given!r}")
        given = _CLASSES[given]
    if not (isinstance(given, type) and issubclass(given, (Collector, MultiCollector))):
        raise TypeError(f"collector_class must be Collector or a MultiCollector, got {given!r}")
    if num_workers > 1 and not issubclass(given, MultiCollector):
        return MultiSyncCollector
    return given
