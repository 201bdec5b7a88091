"""Weights: every way in which users hand them over, as one flat mapping; and how it is applied."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn


def flat_weights(source: Any) -> dict[str, torch.Tensor]:
    """A module, a TensorDict, or a (nested) state dict as ``{"0.weight": tensor, …}``.

    >>> sorted(flat_weights(nn.Linear(1, 1)))
    ['bias', 'weight']
    >>> sorted(flat_weights({"0": {"weight": torch.ones(1)}}))
    ['0.weight']
    """
    if isinstance(source, nn.Module):
        return _own_tensors(source)
    if isinstance(source, TensorDictBase):
        names = {key: key if isinstance(key, str) else ".".join(key) for key in source.keys(True, True)}
        return {name: source.get(key) for key, name in names.items()}
    if isinstance(source, Mapping):
        flat: dict[str, torch.Tensor] = {}
        for name, value in source.items():
            if isinstance(value, (Mapping, TensorDictBase)):
                flat.update({f"{name}.{inner}": tensor for inner, tensor in flat_weights(value).items()})
            else:
                flat[str(name)] = value
        return flat
    raise TypeError(
        f"weights must be a module, a TensorDict or a state dict, got {type(source).__name__}; to publish the policy's "
        "own weights, call update_policy_weights_() without arguments"
    )


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"the weights of {lazy[0]!r} do not exist yet: it is lazy, and was not called. Call the policy once before "
            "the collector is made, or make it with policy_factory"
        )
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


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
    weights = state.get(_OWN, copied_policy(state)[0])
    if isinstance(policy, nn.Module) and weights is not None:
        policy.load_state_dict(weights, strict=strict)


def copied_policy(state: Mapping[str, Any]) -> tuple[Any, int]:
    """Weights and version of the first copy of the policy in a collector's state, of one process or several."""
    while "policy_state_dict" not in state:
        inner = next((state[name] for name in ("node0", "worker0", "lane0") if name in state), None)
        if inner is None:
            return None, 0
        state = inner
    return state["policy_state_dict"], state["policy_version"]


def apply_weights(policy: Any, source: Any) -> None:
    """Copy weights into a policy, in place; all of them or, on any mismatch, none."""
    with torch.no_grad():
        for own, given in fitting_weights(policy, source):
            own.copy_(given)


def fitting_weights(policy: Any, source: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A policy's tensors, each with what is to go into it.

    Raises:
        KeyError, ValueError: these are not weights of this policy.
    """
    if not isinstance(policy, nn.Module):
        raise TypeError(f"the policy ({type(policy).__name__}) is no nn.Module, so it has no weights to update")
    own = _own_tensors(policy)
    given = {name: tensor for name, tensor in flat_weights(source).items() if isinstance(tensor, torch.Tensor)}
    unknown = [name for name in given if name not in own]
    # Tied layers have one tensor under several names; one of them will do.
    there = {id(own[name]) for name in given if name in own}
    missing = [name for name, parameter in policy.named_parameters() if id(parameter) not in there]
    if unknown or missing:
        what = f"has {unknown[0]!r}, which the policy has not" if unknown else f"lacks {missing[0]!r}"
        near = difflib.get_close_matches(unknown[0] if unknown else missing[0], list(own if unknown else given), 1)
        hint = f" (the policy has {near[0]!r})" if near and unknown else f" (it has {near[0]!r})" if near else ""
        raise KeyError(f"these weights do not fit the policy: the mapping {what}{hint}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"these weights do not fit the policy: {name!r} has shape {tuple(tensor.shape)}, the policy's has "
                f"{tuple(own[name].shape)}"
            )
    return [(own[name], tensor) for name, tensor in given.items()]


def choose_sources(
    positional: Any, weights: Any, policy: Any, weights_dict: Any, model_id: str | None
) -> dict[str, Any]:
    """The sources among the arguments of ``update_policy_weights_``, by model; None for the model's own weights."""
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


def choose_source(positional: Any, weights: Any, policy: Any, weights_dict: Any, model_id: str | None) -> Any:
    """As ``choose_sources``, for a collector with one model."""
    sources = choose_sources(positional, weights, policy, weights_dict, model_id)
    for name in sources:
        if name != "policy":
            raise KeyError(f"there is no model {name!r}; this collector has 'policy'")
    return sources["policy"]
