"""Weights: every way in which users hand them over, as one flat mapping; and how it is applied."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from swath.warn import warn_user
from swath.weight_update.extra_state import (
    ENCODED,
    PLAIN,
    encode_state,
    encoded_states,
    has_extra_state,
    is_extra,
    set_extra_states,
)
from swath.weight_update.hidden import HiddenWeights


def flat_weights(source: Any) -> dict[str, torch.Tensor]:
    """A module, a TensorDict, or a (nested) state dict as ``{"0.weight": tensor, …}``.

    >>> sorted(flat_weights(nn.Linear(1, 1)))
    ['bias', 'weight']
    >>> sorted(flat_weights({"0": {"weight": torch.ones(1)}}))
    ['0.weight']
    """
    if isinstance(source, nn.Module):
        return {**_own_tensors(source), **encoded_states(source)}
    if isinstance(source, TensorDictBase):
        names = {key: key if isinstance(key, str) else ".".join(key) for key in source.keys(True, True)}
        return {name: source.get(key) for key, name in names.items()}
    if isinstance(source, Mapping):
        flat: dict[str, torch.Tensor] = {}
        for name, value in source.items():
            if str(name).rpartition(".")[2] == PLAIN:
                flat[str(name).removesuffix(PLAIN) + ENCODED] = encode_state("the state dict", value)
            elif isinstance(value, (Mapping, TensorDictBase)):
                flat.update({f"{name}.{inner}": tensor for inner, tensor in flat_weights(value).items()})
            elif isinstance(value, np.ndarray):
                raise TypeError(f"weights are tensors, and {name!r} is an ndarray; give torch.from_numpy(...) of it")
            else:
                flat[str(name)] = value
        return flat
    if has_state(source):
        return flat_weights(source.state_dict())
    if callable(source) and (own := _own_tensors(source)):
        return own
    raise TypeError(
        f"weights must be a module, a TensorDict or a state dict, got {type(source).__name__}; to publish the policy's "
        "own weights, call update_policy_weights_() without arguments"
    )


def has_state(thing: Any) -> bool:
    """Whether its weights are its state: a transform's statistics, which no module has."""
    if callable(thing):
        return False
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def weights_for_part(source: Any) -> Any:
    """Weights that were given for a part of the envs: all that its state has."""
    return source.state_dict() if has_extra_state(source) else source


def _own_tensors(policy: Any) -> dict[str, torch.Tensor]:
    """What a policy has registered, and what it uses besides."""
    own = HiddenWeights(policy).tensors
    if isinstance(policy, nn.Module):
        own.update(policy.named_parameters(remove_duplicate=False))
        own.update(policy.named_buffers(remove_duplicate=False))
    for name, tensor in own.items():
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"the weights of {name!r} do not exist yet: it is lazy, and was not called. Call the policy once "
                "before the collector is made, or make it with policy_factory"
            )
    return own


def has_weights(policy: Any) -> bool:
    """Whether a policy may have any; one that is no module has, if they are found."""
    return isinstance(policy, nn.Module) or (policy is not None and bool(HiddenWeights(policy).tensors))


def require_no_weights(policy: Any) -> None:
    """Of a policy that no scheme is for: an update would reach nobody.

    Raises:
        RuntimeError: it has weights.
    """
    if policy is None:
        return
    require_findable(policy)
    if has_weights(policy):
        raise RuntimeError(
            "weight_sync_schemes has no scheme for 'policy', so its weights reach nobody: give one, or leave "
            "weight_sync_schemes out"
        )


def require_findable(policy: Any) -> None:
    """Of a policy that is copied elsewhere: that its weights, if it has any, can be found.

    Raises:
        RuntimeError: it has something in it that cannot be looked into, and no weights were found beside it.
    """
    hidden = HiddenWeights(policy)
    if hidden.is_cut:
        warn_user(
            "update_policy_weights_: the policy leads to so many objects that not all were looked at; networks among "
            "the others are not sent. Register networks (self.net = net), and keep data out of the policy",
            RuntimeWarning,
        )
    if hidden.opaque and not _own_tensors(policy):
        raise RuntimeError(
            f"update_policy_weights_: cannot look into {hidden.opaque[0]} of the policy, so what it has of weights "
            "cannot be sent. Give an nn.Module with them among its parameters, or policy_factory= and the weights; if "
            "there are none, do not call this"
        )


def saved_state(module: nn.Module) -> dict[str, Any]:
    """A module's state dict, that training does not change."""
    state = module.state_dict()
    return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in state.items()}


#: In the state of a collector whose workers, or nodes, have copies of the policy: the module that the trainer has.
_OWN = "own_policy_state_dict"


def save_own_policy(policy: Any) -> dict[str, Any]:
    return {_OWN: saved_state(policy)} if isinstance(policy, nn.Module) else {}


def load_own_policy(policy: Any, state: Mapping[str, Any], strict: bool) -> None:
    """The trainer's module as it was; or, of a run that had none, as its first worker's was."""
    weights = state.get(_OWN, _of_first_copy(state).get("policy_state_dict"))
    if isinstance(policy, nn.Module) and weights is not None:
        policy.load_state_dict(weights, strict=strict)


def copied_policy(state: Mapping[str, Any]) -> tuple[Any, int]:
    """Weights and version of the first copy of the policy in a collector's state, of one process or several."""
    own = _of_first_copy(state)
    weights = {**own.get("policy_state_dict", {}), **own.get("hidden_weights", {})}
    return weights or None, own.get("policy_version", 0)


def _of_first_copy(state: Mapping[str, Any]) -> Mapping[str, Any]:
    while not {"policy_state_dict", "hidden_weights"} & state.keys():
        inner = next((state[name] for name in ("node0", "worker0", "lane0") if name in state), None)
        if inner is None:
            return {}
        state = inner
    return state


def apply_weights(policy: Any, source: Any) -> None:
    """Copy weights into a policy, in place; all of them or, on any mismatch, none."""
    flat = flat_weights(source)
    with torch.no_grad():
        for own, given in fitting_weights(policy, flat):
            own.copy_(given)
    set_extra_states(policy, flat)


def fitting_weights(policy: Any, source: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A policy's tensors, each with what is to go into it.

    Raises:
        KeyError, ValueError: these are not weights of this policy.
    """
    own, given = _fitting(policy, source)
    return [(own[name], tensor) for name, tensor in given.items()]


def weights_for_copies(policy: Any, source: Any) -> Any:
    """Weights that were given for a policy, as its copies elsewhere take them.

    What is one network here, under two names, may be two of them there: one that was copied, and one that was imported.

    Raises:
        KeyError, ValueError: these are not weights of this policy.
    """
    own, given = _fitting(policy, source)
    values = {id(own[name]): tensor for name, tensor in given.items()}
    everywhere = {name: values[id(tensor)] for name, tensor in own.items() if id(tensor) in values}
    if len(everywhere) <= len(given):
        return source
    return {**everywhere, **{name: state for name, state in flat_weights(source).items() if is_extra(name)}}


def _fitting(policy: Any, source: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A policy's tensors, and what was given for them, by the policy's names."""
    if not has_weights(policy):
        raise TypeError(f"the policy ({type(policy).__name__}) is no nn.Module, so it has no weights to update")
    own = _own_tensors(policy)
    flat = {name: tensor for name, tensor in flat_weights(source).items() if not is_extra(name)}
    given = {name: tensor for name, tensor in flat.items() if isinstance(tensor, torch.Tensor)}
    for name in flat.keys() - given.keys():  # a state dict may have more in it, which is nobody's weight
        if name in own:
            raise TypeError(
                f"these weights do not fit the policy: {name!r} is a {type(flat[name]).__name__}, not a tensor"
            )
    given = _named_as_in(policy, own, given)
    unknown = [name for name in given if name not in own]
    # Tied layers have one tensor under several names; one of them will do.
    there = {id(own[name]) for name in given if name in own}
    missing = [name for name, tensor in own.items() if _is_weight(tensor) and id(tensor) not in there]
    if unknown or missing:
        what = f"has {unknown[0]!r}, which the policy has not" if unknown else f"lacks {missing[0]!r}"
        near = difflib.get_close_matches(unknown[0] if unknown else missing[0], list(own if unknown else given), 1)
        hint = f" (the policy has {near[0]!r})" if near and unknown else f" (it has {near[0]!r})" if near else ""
        if missing and not unknown and missing[0] in HiddenWeights(policy).tensors:
            hint = " (the policy uses it, but its state_dict() does not have it: give the policy itself)"
        raise KeyError(f"these weights do not fit the policy: the mapping {what}{hint}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"these weights do not fit the policy: {name!r} has shape {tuple(tensor.shape)}, the policy's has "
                f"{tuple(own[name].shape)}"
            )
        require_exact(name, tensor.dtype, own[name].dtype)
    return own, given


def _is_weight(tensor: torch.Tensor) -> bool:
    """And no buffer, without which an update is one, too."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _named_as_in(policy: Any, own: Mapping[str, Any], given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the module that a policy hides: as the policy calls them."""
    if not given or all(name in own for name in given):
        return given
    roots = [root for root in HiddenWeights(policy).roots if all(root + name in own for name in given)]
    if len(roots) > 1 and len({id(own[root + name]) for root in roots for name in given}) > len(given):
        raise ValueError(
            f"these weights fit several modules of the policy ({', '.join(root.rstrip('.') for root in roots)}); give "
            "the policy, or nothing"
        )
    return {roots[0] + name: tensor for name, tensor in given.items()} if roots else given


def require_exact(name: str, given: torch.dtype, own: torch.dtype) -> None:
    """Refuse weights that the tensor they go into would change."""
    if not holds_all_of(own, given):
        named, wanted = (str(dtype).removeprefix("torch.") for dtype in (given, own))
        raise ValueError(
            f"these weights do not fit: {name!r} is {named}, and {wanted} where it goes, which cannot hold all of its "
            f"values; if that is meant, convert it first: .to({own})"
        )


def holds_all_of(own: torch.dtype, given: torch.dtype) -> bool:
    """Whether every value of one dtype is one of the other, too: a matter of types, not of what happens to be in them.

    >>> holds_all_of(torch.float32, torch.int16), holds_all_of(torch.float32, torch.int32)
    (True, False)
    """
    if own is given:
        return True
    if given.is_complex or own is torch.bool:
        return given.is_complex and own.is_complex and holds_all_of(own.to_real(), given.to_real())
    if own.is_complex:
        return holds_all_of(own.to_real(), given)
    if given is torch.bool:
        return True
    if given.is_floating_point:
        if not own.is_floating_point:
            return False
        mine, its = torch.finfo(own), torch.finfo(given)
        return mine.eps <= its.eps and mine.max >= its.max and mine.smallest_normal <= its.smallest_normal
    its_range = torch.iinfo(given)
    if own.is_floating_point:
        mine = torch.finfo(own)
        return 2 / mine.eps >= its_range.max and mine.max >= its_range.max
    mine_range = torch.iinfo(own)
    return mine_range.min <= its_range.min and mine_range.max >= its_range.max


def choose_sources(
    positional: Any, weights: Any, policy: Any, weights_dict: Any, model_id: str | None, policy_weights: Any = None
) -> dict[str, Any]:
    """The sources among the arguments of ``update_policy_weights_``, by model; None for the model's own weights."""
    if policy_weights is not None:
        warn_user("policy_weights= is now called weights=", DeprecationWarning)
        weights = policy_weights
    if positional is not None and (weights is not None or policy is not None):
        raise ValueError("update_policy_weights_: give the weights once, by position or by keyword")
    if weights is not None and policy is not None:
        raise ValueError("update_policy_weights_: give either weights= or policy=, not both")
    if weights_dict is not None and (model_id is not None or weights is not None or positional is not None):
        raise ValueError("update_policy_weights_: weights_dict goes alone, it names the models itself")
    if weights_dict is not None:
        return dict(weights_dict)
    source = next((given for given in (positional, weights, policy) if given is not None), None)
    return {"policy" if model_id is None else model_id: source}
