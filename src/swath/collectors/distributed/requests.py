"""What a node and its driver say to each other: what a node is, what to do, what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from swath.rollout.layout import Field


@dataclass(frozen=True)
class IdSpace:
    """Which trajectory ids a node may use: ``first + k * stride`` for ``k`` of its own collector."""

    first: int
    stride: int

    @classmethod
    def of_node(cls, node: int, num_nodes: int) -> IdSpace:
        """Nodes that are there from the start share ids out evenly; each that is added later has a range of its own.

        >>> IdSpace.of_node(1, 4), IdSpace.of_node(4, 4).first == 2**40
        (IdSpace(first=1, stride=4), True)
        """
        if node < num_nodes:
            return cls(node, num_nodes)
        return cls((node - num_nodes + 1) << 40, 1)


@dataclass(frozen=True)
class NodePlan:
    """All that a node is made from; travels by cloudpickle, over ways that are the user's own."""

    node: int
    collector_class: Any
    factories: Sequence[Any]
    env_kwargs: Any
    policy: Any
    policy_factory: Callable[[], Any] | None
    frames: int
    collector_kwargs: Mapping[str, Any]
    ids: IdSpace
    base_seed: int
    num_threads: int = 1
    #: How often this node was started again.
    incarnation: int = 0
    #: No id of its own collector below this is used.
    first_own_id: int = 0
    #: Of a MultiCollector, which deals with them itself.
    random_frames: int = 0
    #: Parts of the envs that are sent weights, by their paths.
    part_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeDescription:
    """What a node says of itself once it is ready."""

    #: Of a batch: ``[*lead, steps]``.
    lead: tuple[int, ...]
    fields: tuple[Field, ...]
    #: Of each env that the seeds are counted over.
    env: str
    host: str
    pid: int
    has_weights: bool
    num_envs: int = 1
    #: ``Structure.to_json``: descriptions travel as text.
    structure: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        fields = [[list(f.key), list(f.shape), str(f.dtype).removeprefix("torch.")] for f in self.fields]
        return {**asdict(self), "fields": fields, "lead": list(self.lead)}

    @classmethod
    def of_json(cls, about: Mapping[str, Any]) -> NodeDescription:
        fields = tuple(
            Field(tuple(key), torch.Size(shape), getattr(torch, dtype)) for key, shape, dtype in about["fields"]
        )
        return cls(**{**about, "fields": fields, "lead": tuple(about["lead"])})


class Order(NamedTuple):
    """Collect a batch."""

    number: int
    steps: int
    #: Deliver only the first envs; None for all.
    num_envs: int | None = None
    random_frames: int = 0
    into_buffer: bool = False


@dataclass(frozen=True)
class Report:
    """What became of an order."""

    number: int
    shape: tuple[int, ...]
    frames: int
    #: Of the node's first env in this batch.
    first_env: int
    #: Its own collector's next trajectory id.
    next_id: int
    #: Trajectories that are no whole episodes.
    fragments: tuple[int, ...] = ()
    #: Of the order's random frames, how many were not taken.
    random_left: int = 0
    policy_version: int = 0
    #: Of a MultiCollector: its random frames that are still to come.
    own_random_left: int = 0
    busy_s: float = 0.0
    #: How much of that envs took, as a share; the policy took the rest. Of all batches: one step in each is timed.
    env_share: float = 1.0
    pack_s: float = 0.0
    #: Of a batch that the node has written to the replay buffer: those that ended in it, or why they are not known.
    episodes: Any = None

    @classmethod
    def of_json(cls, about: Mapping[str, Any]) -> Report:
        return cls(**{**about, "shape": tuple(about["shape"]), "fragments": tuple(about["fragments"])})
