"""Policies of envs whose TensorDicts are more than nested leaves: they are given, and give, what the env would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from swath.errors import PolicyOutputError
from swath.keys import Key, leaves_of, nested, show
from swath.rollout.layout import Layout
from swath.rollout.policies import PolicyCall, TensorDictCall, tensordict_callable
from swath.rollout.structure import Objects, Structure


def needs_structure(calls: Sequence[PolicyCall], structure: Structure) -> bool:
    """Whether a policy of these calls can tell the difference: one that reads plain leaves cannot."""
    special = {*structure.stacks, *structure.objects, *structure.ragged}
    for call in calls:
        if isinstance(call, TensorDictCall) and (special or structure.sizes or structure.classes):
            return True
        if any(_is_below(key, special) for key in (*(call.in_keys or ()), *(call.out_keys or ()))):
            return True
    return False


def _is_below(key: Key, places: set[Key]) -> bool:
    place = key[1:] if key[0] == "next" else key
    return any(place[: len(start)] == start for start in places)


def structured_call(policy: Any, env: Any, layout: Layout, trust_policy: bool) -> TensorDictCall:
    """The policy as a call on flat leaves."""
    structure = layout.structure
    assert structure is not None
    act = tensordict_callable(policy, env, trust_policy)
    objects: Objects = Objects() if env.objects is None else env.objects
    from_policy = Objects()

    def act_on_leaves(tensordict: TensorDictBase) -> TensorDictBase:
        flat = dict(leaves_of(tensordict))
        root = structure.build(flat, tensordict.batch_size, objects.kept, tensordict.device)
        result = act(root)
        if not isinstance(result, TensorDictBase):
            raise PolicyOutputError(f"the policy returned {type(result).__name__}, not a TensorDict")
        if structure.has_objects:  # the env's own, which are there already
            result = result.exclude(*structure.things)
        leaves = structure.flatten(result, from_policy, tensordict.batch_dims)
        if from_policy.kept:
            key = min(Structure.of(result).objects)
            raise PolicyOutputError(f"the policy's {show(key)} is no tensor; only envs may give such data")
        return TensorDict(nested(leaves), batch_size=tensordict.batch_size, device=tensordict.device)

    return TensorDictCall(act_on_leaves, None, None)
