"""What may be a policy, and how each kind is called.

A policy becomes a list of calls. Accepted, in this order:

1. a ``TensorDictModuleBase``; sequences are taken apart, plain modules and samplers are called on tensors;
2. a callable whose parameter is named ``tensordict`` or ``td``, or annotated as a TensorDict;
3. a callable with ``in_keys`` and ``out_keys``;
4. any other callable: by the names of its parameters where they are observation keys, else by position; its first
   results are the actions, further ones ``output1``, ``output2``, …
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from swath.errors import PolicyError
from swath.keys import Key, as_key
from swath.rollout.functional import is_plain
from swath.rollout.numpy_policy import call_first
from swath.rollout.tensordict_internals import has_arguments_of_its_own, has_generator, hides_outputs, modules_of


@dataclass(frozen=True)
class TensorCall:
    """``function(*inputs) -> output or tuple of outputs``; out_keys None: actions, then output1, …"""

    function: Callable[..., Any]
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...] | None
    returns_tuple: bool = False
    #: The TensorDictModule that this call was taken out of.
    whole: TensorDictModule | None = None
    #: Whether it is written with NumPy (``numpy_policy.py``): of what it does, torch sees nothing.
    is_numpy: bool = False


@dataclass(frozen=True)
class SampleCall:
    """A ``ProbabilisticTensorDictModule`` whose distribution can be built and sampled directly."""

    module: ProbabilisticTensorDictModule
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]

    @property
    def draws_at_random(self) -> bool:
        """Whether the exploration type now in force asks for a random sample, which is what can be done directly."""
        kind = interaction_type() or self.module.default_interaction_type
        return kind is InteractionType.RANDOM


@dataclass(frozen=True)
class TensorDictCall:
    """``function(tensordict) -> tensordict``; keys None: whatever it reads, and whatever is new in the result."""

    function: Callable[[TensorDictBase], Any]
    in_keys: tuple[Key, ...] | None
    out_keys: tuple[Key, ...] | None


PolicyCall = TensorCall | SampleCall | TensorDictCall

_KNOWN_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)


def policy_calls(policy: Any, env: Any, trust_policy: bool = False) -> list[PolicyCall]:
    """The calls that a policy consists of."""
    refuse_rand_step(policy)
    if isinstance(policy, TensorDictModuleBase):
        return module_calls(policy)
    _refuse_what_cannot_act(policy)
    if trust_policy or _is_compiled(policy) or _takes_tensordict(policy):
        return [whole_call(policy)]
    in_keys, out_keys = getattr(policy, "in_keys", None), getattr(policy, "out_keys", None)
    if in_keys is not None and out_keys is not None:
        return [TensorCall(policy, tuple(map(as_key, in_keys)), tuple(map(as_key, out_keys)))]
    return [TensorCall(policy, tuple(map(as_key, _match_parameters(policy, env.observation_keys))), None)]


def refuse_rand_step(policy: Any) -> None:
    """``env.rand_step`` takes the step itself, which is the collector's part."""
    env = getattr(policy, "__self__", None)
    if getattr(policy, "__name__", None) == "rand_step" and hasattr(type(env), "rand_action"):
        raise TypeError(
            f"policy={type(env).__name__}.rand_step would step the env in each of the collector's steps; for random "
            "actions leave the policy out"
        )


def _refuse_what_cannot_act(policy: Any) -> None:
    name = type(policy).__name__
    if isinstance(policy, type):
        raise TypeError(f"the policy is the class {policy.__name__}: give an object of it, or policy_factory=")
    if not callable(policy):
        instead = (
            f"give its method, {name}.predict" if hasattr(policy, "predict") else "a factory goes to policy_factory="
        )
        raise TypeError(f"a policy must be callable, got {name}; {instead}")
    if isinstance(policy, nn.Module) and getattr(policy.forward, "__func__", None) is nn.Module.forward:
        method = "get_action_and_value" if hasattr(policy, "get_action_and_value") else "method"
        raise TypeError(
            f"the policy {name} has no forward(); say which of its methods acts, and what that takes and returns: "
            f'TensorDictModule(policy.{method}, in_keys=["observation"], out_keys=["action", ...])'
        )


def _is_compiled(policy: Any) -> bool:
    return type(policy).__name__ in ("OptimizedModule", "CudaGraphModule")


def _signature(policy: Any) -> inspect.Signature:
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(
            f"{policy!r}: its parameters cannot be inspected; wrap it in a TensorDictModule, or pass trust_policy=True "
            "if it takes and returns a TensorDict"
        ) from None


def _required(signature: inspect.Signature) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in signature.parameters.values() if p.kind in named and p.default is p.empty]


def _takes_tensordict(policy: Any) -> bool:
    signature = _signature(policy)
    # One that may be left out, as of env.rand_action, is given as well.
    wanted = _required(signature) or list(signature.parameters.values())[:1]
    if len(wanted) != 1:
        return False
    parameter = wanted[0]
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotated = "TensorDict" in annotation
    else:
        annotated = isinstance(annotation, type) and issubclass(annotation, TensorDictBase)
    return parameter.name in ("tensordict", "td") or annotated


def _match_parameters(policy: Any, observation_keys: Sequence[Any]) -> list[Any]:
    signature = _signature(policy)
    names = [parameter.name for parameter in _required(signature)]
    if names and set(names) <= {key for key in observation_keys if isinstance(key, str)}:
        return names
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if len(names) == len(observation_keys) or (takes_any and len(names) <= len(observation_keys)):
        return list(observation_keys)
    raise TypeError(
        f"cannot tell what to give to the policy {getattr(policy, '__name__', type(policy).__name__)}: it takes "
        f"({', '.join(names)}), the env has the observation keys {list(observation_keys)}. Name its parameters after "
        "those keys, wrap it in a TensorDictModule(policy, in_keys=[...], out_keys=[...]), or pass trust_policy=True "
        "if it takes and returns a TensorDict"
    )


def module_calls(module: Any, nested: bool = False) -> list[PolicyCall]:
    """A module's calls: taken apart where that gives the same, as one TensorDict call otherwise."""
    whole: list[PolicyCall] = [whole_call(module)]
    if not is_plain(module):
        return whole
    forward = type(module).forward
    if isinstance(module, TensorDictSequential) and forward in _KNOWN_SEQUENCES:
        children = modules_of(module)
        if children is None:
            return whole
        samplers = [isinstance(child, ProbabilisticTensorDictModule) for child in children]
        if module.partial_tolerant or module.inplace not in (None, True) or any(samplers[:-1]):
            return whole
        if nested and hides_outputs(module):  # what it hides, a later module must not see
            return whole
        return [call for child in children for call in module_calls(child, nested=True)]
    if isinstance(module, TensorDictModule) and forward is TensorDictModule.forward:
        if (
            module.inplace is True
            and module.method is None
            and not module.method_kwargs
            and not has_arguments_of_its_own(module)
        ):
            in_keys, out_keys = (tuple(map(as_key, k)) for k in (module.in_keys, module.out_keys))
            return [TensorCall(module.module, in_keys, out_keys, whole=module)]
        return whole
    if (
        isinstance(module, ProbabilisticTensorDictModule)
        and forward is ProbabilisticTensorDictModule.forward
        and module.num_samples is None
        and not has_generator(module)
        and not module.cache_dist
        and isinstance(module.distribution_class, type)
        and not issubclass(module.distribution_class, CompositeDistribution)
        and len(module.dist_sample_keys) == 1
    ):
        return [SampleCall(module, *(tuple(map(as_key, k)) for k in (module.in_keys, module.out_keys)))]
    return whole


def whole_call(module: Any) -> TensorDictCall:
    """A module as one call with a TensorDict."""
    return TensorDictCall(module, declared_keys(module, "in_keys"), declared_keys(module, "out_keys"))


def declared_keys(module: Any, which: str) -> tuple[Key, ...] | None:
    """``in_keys`` or ``out_keys`` of a module; None if it does not say."""
    keys = getattr(module, which, None)
    return None if keys is None else tuple(map(as_key, keys))


def as_unknown(call: PolicyCall) -> PolicyCall:
    """A call of which no first call was made: its results are looked at each time."""
    return replace(call, returns_tuple=True) if isinstance(call, TensorCall) else call


def name_outputs(result: Any, out_keys: tuple[Key, ...] | None, action_keys: Sequence[Key]) -> tuple[Key, ...]:
    """The keys of a tensor call's results."""
    count = len(result) if isinstance(result, tuple) else 1
    if out_keys is None:
        extra = count - len(action_keys)
        return (*action_keys[:count], *((f"output{i + 1}",) for i in range(extra)))
    if len(out_keys) != count:
        raise PolicyError(f"the policy gives {count} results, but has {len(out_keys)} out_keys: {list(out_keys)}")
    return out_keys


def tensordict_callable(policy: Any, env: Any, trust_policy: bool = False) -> Callable[[TensorDictBase], Any]:
    """Any policy as a function from TensorDict to TensorDict; convenient rather than fast."""
    if isinstance(policy, TensorDictModuleBase):
        return policy
    (call,) = policy_calls(policy, env, trust_policy)
    if isinstance(call, TensorDictCall):

        def merged(tensordict: TensorDictBase) -> TensorDictBase:
            result = call.function(tensordict)
            return tensordict if result is tensordict else tensordict.update(result)

        return merged
    assert isinstance(call, TensorCall)
    action_keys = [as_key(key) for key in env.action_keys]

    def call_on_tensors(tensordict: TensorDictBase) -> TensorDictBase:
        _, result, _ = call_first(call.function, [tensordict.get(key) for key in call.in_keys])
        results = result if isinstance(result, tuple) else (result,)
        for key, value in zip(name_outputs(result, call.out_keys, action_keys), results, strict=True):
            tensordict.set(key, value)
        return tensordict

    return call_on_tensors


__all__ = [
    "PolicyCall",
    "SampleCall",
    "TensorCall",
    "TensorDictCall",
    "as_unknown",
    "declared_keys",
    "module_calls",
    "name_outputs",
    "policy_calls",
    "refuse_rand_step",
    "tensordict_callable",
    "whole_call",
]
