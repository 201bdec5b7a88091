"""Policies of envs whose TensorDicts are more than nested leaves: they are given, and give, what the env would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from swath.errors import PolicyOutputError
from swath.rollout.layout import Key, Layout, leaves_of, nested
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
    not_for_policies = Objects()

    def act_on_leaves(tensordict: TensorDictBase) -> TensorDictBase:
        flat = dict(leaves_of(tensordict))
        root = structure.build(flat, tensordict.batch_size, objects.kept, tensordict.device)
        result = act(root)
        if not isinstance(result, TensorDictBase):
            raise PolicyOutputError(f"the policy returned {type(result).__name__}, not a TensorDict")
        leaves = structure.flatten(result, not_for_policies, tensordict.batch_dims)
        if not_for_policies.kept and (others := [key for key in leaves if key not in flat and _is_thing(key, result)]):
            raise PolicyOutputError(f"the policy's {others[0]} is no tensor; only envs may give such data")
        not_for_policies.kept.clear()
        return TensorDict(nested(leaves), batch_size=tensordict.batch_size, device=tensordict.device)

    return TensorDictCall(act_on_leaves, None, None)


def _is_thing(key: Key, data: TensorDictBase) -> bool:
    from tensordict.utils import is_non_tensor

    return is_non_tensor(data.get(key, None))
