"""The first call of a policy: made on real data, it shows what the policy writes."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from swath.errors import PolicyInputError, PolicyOutputError
from swath.keys import Key, as_key, show
from swath.rollout.layout import Field, Layout
from swath.rollout.numpy_policy import call_first
from swath.rollout.operations import RETURNED_NONE, Surroundings
from swath.rollout.policies import PolicyCall, SampleCall, TensorCall, TensorDictCall, name_outputs
from swath.rollout.torch_internals import buffers_of


def first_call(
    call: PolicyCall,
    available: dict[Key, torch.Tensor],
    action_keys: list[Key],
    surroundings: Surroundings,
    replaceable: frozenset[Key] = frozenset(),
) -> tuple[PolicyCall, dict[Key, torch.Tensor]]:
    """Make a call on real data; returns the call with its out_keys known, and what it wrote.

    ``replaceable`` are keys of the env that the policy may write, too.
    """
    if isinstance(call, TensorCall):
        inputs = [available[key] for key in call.in_keys]
        if call.whole is None:
            function, result, is_numpy = call_first(call.function, inputs)
            call = replace(call, function=function, is_numpy=is_numpy)
        else:
            result = call.function(*inputs)
        if result is None:
            raise PolicyOutputError("the policy returned None; it must return its action")
        if isinstance(result, list):
            result = tuple(result)
        if isinstance(result, (torch.Tensor, tuple)):
            out_keys = name_outputs(result, call.out_keys, action_keys)
            results = result if isinstance(result, tuple) else (result,)
            # A result named "_" is thrown away.
            written = {k: v for k, v in zip(out_keys, results, strict=True) if k != ("_",)}
            returns_tuple = isinstance(result, tuple)
            return replace(call, out_keys=out_keys, returns_tuple=returns_tuple), written
        if call.whole is not None:  # a dictionary, say, which TensorDictModule knows how to unpack
            whole = TensorDictCall(call.whole, call.in_keys, call.out_keys)
            return first_call(whole, available, action_keys, surroundings, replaceable)
        raise PolicyOutputError(
            f"the policy returned {type(result).__name__}; it must return a tensor or a tuple of tensors (or take a "
            "parameter named tensordict, and return a TensorDict)"
        )
    given = surroundings.tensordict(available)
    before = {as_key(key): given.get(key) for key in given.keys(True, True)}
    result = (call.module if isinstance(call, SampleCall) else call.function)(given)
    if result is None:
        raise PolicyOutputError(RETURNED_NONE)
    if not isinstance(result, TensorDictBase):
        raise PolicyOutputError(
            f"the policy returned {type(result).__name__}, not a TensorDict; a function of tensors names its "
            "parameters after observation keys instead of tensordict"
        )
    found = {as_key(key): result.get(key) for key in result.keys(True, True)}
    if call.out_keys is not None:
        # What is declared must be there; what is written besides is the policy's own business.
        missing = [key for key in call.out_keys if key not in found]
        if missing:
            raise PolicyOutputError(
                f"the policy declares {show(missing[0])} among its out_keys, but did not write it (it wrote "
                f"{[show(key) for key in found if key not in before]})"
            )
        return call, {key: found[key] for key in call.out_keys}
    written = {key: value for key, value in found.items() if key not in before}
    written |= {key: found[key] for key in replaceable if key in found and found[key] is not before.get(key)}
    assert isinstance(call, TensorDictCall)
    return TensorDictCall(call.function, call.in_keys, tuple(written)), written


_HOW_TO_KNOW_STARTS = (
    ". It says where an episode begins: give the collector auto_register_policy_transforms=True, or the env the "
    "transform InitTracker"
)


def require_inputs(call: PolicyCall, available: dict[Key, torch.Tensor]) -> None:
    """Raise for a key that the call asks for and nobody writes."""
    flags = {("done",), ("terminated",), ("truncated",)}
    for key in call.in_keys or ():
        if key in available or (key in flags and isinstance(call, TensorDictCall)):
            continue
        if isinstance(call, TensorDictCall) and ("next", *key) in (call.out_keys or ()):
            continue  # its own state, absent on the first call
        known = [show(k) for k in available]
        near = difflib.get_close_matches(show(key), known, n=1)
        raise PolicyInputError(
            f"the policy asks for {show(key)}, which nobody writes; there is {', '.join(known)}"
            + (f". Did you mean {near[0]}?" if near else "")
            + (_HOW_TO_KNOW_STARTS if key[-1] == "is_init" else "")
        )


def output_fields(
    written: dict[Key, torch.Tensor], layout: Layout, given: dict[Key, torch.Tensor], env: Any
) -> tuple[list[Field], list[Field]]:
    """What the policy wrote, as fields: outputs, and state that is carried on (written under "next")."""
    lead = layout.batch_size
    outputs, state = [], []
    for key, value in written.items():
        if not isinstance(value, torch.Tensor):
            raise PolicyOutputError(f"the policy's {show(key)} is a {type(value).__name__}, not a tensor")
        if value.shape[: len(lead)] != lead:
            raise PolicyOutputError(
                f"the policy's {show(key)} has shape {tuple(value.shape)}, which does not start with the env's batch "
                f"size {tuple(lead)}"
            )
        field = Field(key, value.shape[len(lead) :], value.dtype, value.device)
        if key[0] == "next":
            state.append(Field(key[1:], field.shape, field.dtype, field.device))
            root = given.get(key[1:])
            if root is not None and (root.shape != value.shape or root.dtype != value.dtype):
                raise PolicyOutputError(
                    f"the policy's state {show(key[1:])} goes in with shape {tuple(root.shape)} and dtype "
                    f"{root.dtype}, and comes out with {tuple(value.shape)} and {value.dtype}"
                )
        else:
            outputs.append(field)
    by_key = {field.key: field for field in outputs}
    for wanted in layout.outputs:
        got = by_key.get(wanted.key)
        if got is None:
            raise PolicyOutputError(
                f"the policy does not write {show(wanted.key)}, which the env needs; it writes "
                f"{[show(key) for key in written]}. Name its output with out_keys=[{show(wanted.key)}]"
            )
        _check_action(got, wanted, env)
        # Actions are read where the env steps, which is in main memory.
        outputs[outputs.index(got)] = Field(got.key, wanted.shape, got.dtype, wanted.device)
    return outputs, state


def _check_action(got: Field, wanted: Field, env: Any) -> None:
    spec = env.full_action_spec[wanted.key]
    if wanted.shape not in (got.shape, (*got.shape, 1)):
        hint = ""
        if type(spec).__name__ in ("OneHot", "MultiOneHot"):
            hint = (
                "; for integer actions, make the env with categorical_action_encoding=True (an argument of GymEnv, and "
                "of GymWrapper, which takes any gymnasium env)"
            )
        elif type(spec).__name__ == "Categorical":
            hint = "; for one-hot actions, make the env with categorical_action_encoding=False"
        raise PolicyOutputError(
            f"the policy's {show(got.key)} has shape {tuple(got.shape)} per env, the env takes {tuple(wanted.shape)} "
            f"({spec}){hint}"
        )
    if got.dtype is torch.bfloat16:
        raise PolicyOutputError(
            f"the policy's {show(got.key)} is bfloat16, which envs cannot read; return action.float()"
        )
    integers = type(spec).__name__ in ("Categorical", "MultiCategorical", "Binary")
    if integers and (got.dtype.is_floating_point or got.dtype.is_complex):
        raise PolicyOutputError(
            f"the policy's {show(got.key)} is {got.dtype}, but the env takes integers ({spec}); return "
            "logits.argmax(-1), or make the env with categorical_action_encoding=False, which takes a float vector"
        )


@contextlib.contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Put random state, and the policy's buffers, back as they were."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    before = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in before:
                    buffers_of(module)[name] = buffer.copy_(value)
