"""A caller's interaction type, inside of a request: for transports that carry nothing but TensorDicts."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

_KEY = "_interaction_type"
KINDS: tuple[InteractionType | None, ...] = (None, *InteractionType.__members__.values())


def stamped(tensordict: TensorDictBase, kind: InteractionType | None) -> TensorDictBase:
    """A request that says how a probabilistic policy is to choose; as it is, if it is left to the policy."""
    if kind is None:
        return tensordict
    number = torch.full(tensordict.batch_size, KINDS.index(kind), dtype=torch.int8)
    return tensordict.copy().set(_KEY, number)


def take_stamp(tensordict: TensorDictBase) -> tuple[TensorDictBase, InteractionType | None]:
    """The request without its stamp, and what it says."""
    stamp = tensordict.get(_KEY, None)
    if stamp is None:
        return tensordict, None
    return tensordict.exclude(_KEY), KINDS[int(stamp.reshape(-1)[0])] if stamp.numel() else None
