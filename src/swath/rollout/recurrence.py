"""A policy's own state: what it writes under "next" and reads back at the root.

The state is zero at an episode's start. Its shape has to be known before the first call; it is taken, in this
order, from

1. ``policy.state_spec``, a mapping from key to spec (per env, without batch size);
2. a first call without the state, if the policy can do without (``hidden=None``);
3. the sizes of the recurrent layers in the policy (``nn.GRUCell``, ``nn.LSTM``, …);
4. the transforms that modules of TorchRL make for their states (``make_tensordict_primer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from swath.errors import PolicyInputError
from swath.keys import Key, as_key, show
from swath.rollout.layout import Layout
from swath.rollout.policies import PolicyCall, TensorDictCall

MAX_TRIES = 64


def first_states(
    policy: Any, calls: Sequence[PolicyCall], layout: Layout
) -> tuple[list[Key], list[dict[Key, torch.Tensor]]]:
    """The keys of the policy's state, and what to try as its first value, likeliest first."""
    own = {f.key for f in layout.carried}
    reads = [key for call in calls for key in call.in_keys or ()]
    writes = [key[1:] for call in calls for key in call.out_keys or () if key[0] == "next"]
    keys = [key for key in dict.fromkeys(reads) if key in writes and key not in own]
    if not keys:
        return [], [{}]

    def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((*layout.batch_size, *shape), dtype=dtype)

    declared = {as_key(k): spec for k, spec in dict(getattr(policy, "state_spec", None) or {}).items()}
    if declared:
        for key in keys:
            if key not in declared:
                raise PolicyInputError(
                    f"the policy's state_spec has no {show(key)}, which the policy reads and writes under 'next'"
                )
        return keys, [{key: zeros(declared[key].shape, declared[key].dtype) for key in keys}]

    candidates: list[dict[Key, torch.Tensor]] = []
    if all(isinstance(call, TensorDictCall) for call in calls):
        candidates.append({})
    layers = [m for m in getattr(policy, "modules", list)() if isinstance(m, (nn.RNNBase, nn.RNNCellBase))]
    dtype = next((p.dtype for layer in layers for p in layer.parameters()), torch.float32)
    shapes = list(dict.fromkeys(shape for layer in layers for shape in _state_shapes(layer)))
    # The same shape for all keys first (an LSTM's h and c), then every other combination.
    combinations = [tuple([shape] * len(keys)) for shape in shapes]
    combinations += [c for c in product(shapes, repeat=len(keys)) if c not in combinations]
    candidates += [
        {key: zeros(shape, dtype) for key, shape in zip(keys, combination, strict=True)}
        for combination in combinations[:MAX_TRIES]
    ]
    primed = _primed(policy)
    if all(key in primed for key in keys):
        candidates.append({key: zeros(primed[key].shape, primed[key].dtype) for key in keys})
    return keys, candidates


def _primed(policy: Any) -> dict[Key, Any]:
    """The specs of states that modules make a primer for."""
    specs: dict[Key, Any] = {}
    for module in getattr(policy, "modules", list)():
        make = getattr(module, "make_tensordict_primer", None)
        try:
            primers = None if make is None else make().primers
            specs |= {} if primers is None else {as_key(key): spec for key, spec in primers.items(True, True)}
        except Exception:  # it cannot say: the policy is told that its state is not known
            continue
    return specs


def _state_shapes(layer: nn.RNNBase | nn.RNNCellBase) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(layer.hidden_size,)]
    if isinstance(layer, nn.RNNBase):
        shapes.append((layer.num_layers * (2 if layer.bidirectional else 1), layer.hidden_size))
    return shapes


def unknown_state(keys: Sequence[Key]) -> PolicyInputError:
    return PolicyInputError(
        f"the policy carries the state {', '.join(map(show, keys))}, but its shape is not known; say it with "
        f"policy.state_spec = {{{show(keys[0])}: Unbounded((hidden_size,))}}"
    )
