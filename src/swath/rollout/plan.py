"""Policy plan: a policy bound once to the memory of a strip, so that the step only calls it.

``PolicyPlan.resolve`` finds out how to call the policy and, from one real call on a real observation, what it
writes. ``bind`` ties that to a strip. ``prepare`` is called before every batch: it reads the layers' parameters and
the exploration type anew, so that whatever was replaced in between is seen.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from swath.errors import PolicyError, PolicyInputError, PolicyOutputError
from swath.rollout.functional import is_known_stack, layers_of, linear_into, stack_fingerprint, stack_functions
from swath.rollout.layout import Field, Key, Layout, as_key, nested, show
from swath.rollout.policies import (
    PolicyCall,
    SampleCall,
    TensorCall,
    TensorDictCall,
    as_unknown,
    module_calls,
    name_outputs,
    policy_calls,
    whole_call,
)
from swath.rollout.recurrence import first_states, unknown_state
from swath.rollout.sampling import sampler_for
from swath.rollout.strip import Strip

#: A step of the plan: reads and writes entries of a list of values, one entry a key.
Operation = Callable[[list[Any]], None]


class Slots:
    """Numbers for keys: a list index is cheaper than a dictionary's tuple."""

    def __init__(self) -> None:
        self.of: dict[Key, int] = {}

    def __getitem__(self, key: Key) -> int:
        return self.of.setdefault(key, len(self.of))

    def many(self, keys: Sequence[Key]) -> tuple[int, ...]:
        return tuple(self[key] for key in keys)


@dataclass(frozen=True)
class PolicyPlan:
    """How a policy is called on rows, and what it writes."""

    policy: Any
    #: How each call was found, and what the first call showed it to be.
    found: tuple[PolicyCall, ...]
    calls: tuple[PolicyCall, ...]
    #: Whether the calls are those of the policy itself, not of something that wraps them.
    are_its_own: bool
    slots: Slots
    layout: Layout
    #: Keys that are given to the policy, and the device it wants them on (None: where they are).
    in_keys: tuple[Key, ...]
    device: torch.device | None
    has_truncated: bool

    @classmethod
    def resolve(
        cls,
        policy: Any,
        env: Any,
        first_row: dict[Key, torch.Tensor],
        *,
        device: torch.device | None = None,
        trust_policy: bool = False,
        wrap: Callable[[Any], Any] | None = None,
    ) -> PolicyPlan:
        """Find out how to call ``policy``, by calling it once on ``first_row``, a real observation of every env.

        ``wrap`` is applied to each function that is called (``torch.compile``). The call leaves no trace: random
        state and the policy's buffers are put back.
        """
        layout: Layout = env.row_layout()
        calls = policy_calls(policy, env, trust_policy)
        if wrap is not None:
            calls = [_wrapped(call, wrap) for call in calls]
        # A module may write keys for its own use and select what it gives away.
        selected = set(map(as_key, policy.out_keys)) if isinstance(policy, TensorDictModuleBase) else None
        state_keys, candidates = first_states(policy, calls, layout)
        errors: list[Exception] = []
        for state in candidates:
            try:
                with untouched(policy):
                    plan = cls._try(policy, tuple(calls), layout, {**first_row, **state}, device, env, selected)
                return replace(plan, are_its_own=wrap is None)
            except Exception as error:  # another candidate may fit
                errors.append(error)
        if state_keys and not getattr(policy, "state_spec", None):
            raise unknown_state(state_keys) from (errors[-1] if errors else None)
        error = errors[0]
        if not isinstance(error, PolicyError):
            error.add_note(
                f"swath: raised by the policy when it was called on the first observation (batch size "
                f"{tuple(layout.batch_size)}, keys {', '.join(map(show, first_row))})"
            )
        raise error

    @classmethod
    def _try(
        cls,
        policy: Any,
        calls: tuple[PolicyCall, ...],
        layout: Layout,
        given: dict[Key, torch.Tensor],
        device: torch.device | None,
        env: Any,
        selected: set[Key] | None,
    ) -> PolicyPlan:
        available = {key: tensor.clone() if device is None else tensor.to(device) for key, tensor in given.items()}
        action_keys = [as_key(key) for key in env.action_keys]
        resolved: list[PolicyCall] = []
        written: dict[Key, torch.Tensor] = {}
        has_truncated = layout.has_truncated
        for call in calls:
            _require(call, available, layout)
            call, results = _first_call(call, available, layout, action_keys, device, has_truncated)
            resolved.append(call)
            available.update(results)
            written.update(results)
        # The env's own keys stay the env's: a policy may change them for itself, not in the data.
        own = {f.key for f in layout.carried}
        kept = {
            key: value
            for key, value in written.items()
            if (selected is None or key in selected)
            and key not in own
            and not (key[0] == "next" and key[1:] in own)
            and not any(part.startswith("_") for part in key)
        }
        outputs, state = _fields(kept, layout, given, env)
        # A policy that can start without its state is given zeros from its second call on.
        in_keys = tuple(dict.fromkeys((*given, *(field.key for field in state))))
        return cls(
            policy=policy,
            found=calls,
            calls=tuple(resolved),
            are_its_own=True,
            slots=Slots(),
            layout=layout.with_policy(outputs, state),
            in_keys=in_keys,
            device=device,
            has_truncated=has_truncated,
        )

    def calls_now(self) -> tuple[PolicyCall, ...]:
        """The calls, with what was exchanged in the policy since: a module's network, a hook on a module."""
        if not (self.are_its_own and isinstance(self.policy, TensorDictModuleBase)):
            return self.calls
        now = module_calls(self.policy)
        if len(now) != len(self.found):
            return (whole_call(self.policy),)
        return tuple(
            known if new == old else as_unknown(new)
            for new, old, known in zip(now, self.found, self.calls, strict=True)
        )

    def bind(self, strip: Strip) -> BoundPolicy:
        return BoundPolicy(self, strip)


class BoundPolicy:
    """A plan on a strip: ``act(t)`` reads row t and writes the policy's outputs."""

    def __init__(self, plan: PolicyPlan, strip: Strip) -> None:
        self._plan = plan
        self._strip = strip
        slots = plan.slots
        self._inputs = [(slots[key], strip.carried[key].rows) for key in plan.in_keys]
        self._outputs = []
        for key, column in strip.outputs.items():
            self._outputs.append((slots[key], column.rows, column.rows[0].shape, column.field))
        for key in plan.layout.policy_state:
            column = strip.carried[key]
            # Written under "next": that is the root of the following row.
            self._outputs.append((slots["next", *key], column.rows[1:], column.rows[0].shape, column.field))
        self._operations: list[Operation] = []
        self._prepared_for: list[Any] | None = None
        self._copies_inputs = True
        self.act: Callable[[int], None] = self._act

    def prepare(self) -> None:
        """Read parameters, hooks and exploration type as they are now."""
        plan = self._plan
        calls = plan.calls_now()
        now = [(call, fingerprint(call)) for call in calls]
        if now == self._prepared_for:
            return
        self._prepared_for = now
        for call in calls:  # every key gets its number before the operations are made
            plan.slots.many((*(call.in_keys or ()), *(call.out_keys or ())))
        # Code that is not ours may keep what it is given, or change it: it gets copies. Where there is none, rows are
        # given as they are, and what goes from call to call lies in reused memory.
        ours = all(
            isinstance(c, SampleCall) or (isinstance(c, TensorCall) and is_known_stack(c.function)) for c in calls
        )
        self._copies_inputs = not ours
        if (
            len(calls) == 1
            and isinstance(calls[0], TensorCall)
            and len(calls[0].in_keys) == 1
            and not calls[0].returns_tuple
            and len(self._outputs) == 1
            and plan.device is None
        ):
            self.act = self._act_on_one_tensor(calls[0])
            return
        self._operations = [_operation(call, plan, reuse_memory=ours) for call in calls]
        self._no_values: list[Any] = [None] * len(plan.slots.of)
        self.act = self._act

    def _act(self, t: int) -> None:
        plan = self._plan
        values = self._no_values.copy()
        for slot, rows in self._inputs:
            row = rows[t]
            if plan.device is not None:
                values[slot] = row.to(plan.device, copy=True)
            else:
                values[slot] = row.clone() if self._copies_inputs else row
        for operation in self._operations:
            operation(values)
        for slot, rows, shape, field in self._outputs:
            value = values[slot]
            if value.shape != shape or value.dtype is not field.dtype:
                refuse(field, value, shape, t)
            rows[t].copy_(value)

    def _act_on_one_tensor(self, call: TensorCall) -> Callable[[int], None]:
        """``act`` for the commonest policies: one tensor in, one out."""
        slot = self._plan.slots[call.in_keys[0]]
        inputs = next(rows for number, rows in self._inputs if number == slot)
        _, outputs, shape, field = self._outputs[0]
        *before, last = layers_of(call.function)
        write = linear_into(last, outputs[0])
        if write is not None:
            functions = stack_functions(torch.nn.Sequential(*before), result_leaves=False)

            def act_into(t: int) -> None:
                value = inputs[t]
                for function in functions:
                    value = function(value)
                write(value, outputs[t])

            return act_into
        functions = stack_functions(call.function)
        if self._copies_inputs:
            functions.insert(0, torch.clone)
        dtype = field.dtype

        def act(t: int) -> None:
            value = inputs[t]
            for function in functions:
                value = function(value)
            if value.shape != shape or value.dtype is not dtype:
                refuse(field, value, shape, t)
            outputs[t].copy_(value)

        return act


def fingerprint(call: PolicyCall) -> Any:
    """Changes whenever what was bound for a call may no longer be what calling it would use."""
    if isinstance(call, TensorCall):
        return stack_fingerprint(call.function)
    if isinstance(call, SampleCall):
        return call.draws_at_random
    return None


def refuse(field: Field, value: Any, shape: torch.Size, t: int) -> None:
    got = (
        f"shape {tuple(value.shape)} and dtype {value.dtype}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    raise PolicyOutputError(
        f"the policy's {show(field.key)} at step {t} of this strip is {got}; on its first call it was of shape "
        f"{tuple(shape)} and dtype {field.dtype}"
    )


# -- operations ----------------------------------------------------------------------------------------------------


def _operation(call: PolicyCall, plan: PolicyPlan, *, reuse_memory: bool) -> Operation:
    slots = plan.slots
    if isinstance(call, SampleCall) and call.draws_at_random:
        return _sampling(call, slots)
    if isinstance(call, TensorCall):
        assert call.out_keys is not None
        ins, outs = slots.many(call.in_keys), slots.many(call.out_keys)
        if len(ins) == 1 and len(outs) == 1 and not call.returns_tuple:
            return _stack(stack_functions(call.function, result_leaves=not reuse_memory), ins[0], outs[0])
        return _tensors(call.function, ins, outs)
    return _tensordict(call, plan)


def _stack(functions: list[Any], source: int, target: int) -> Operation:
    def run(values: list[Any]) -> None:
        value = values[source]
        for function in functions:
            value = function(value)
        values[target] = value

    return run


def _tensors(function: Callable[..., Any], ins: tuple[int, ...], outs: tuple[int, ...]) -> Operation:
    def run(values: list[Any]) -> None:
        result = function(*[values[slot] for slot in ins])
        if len(outs) == 1:
            values[outs[0]] = result[0] if isinstance(result, (tuple, list)) else result
            return
        for slot, value in zip(outs, result, strict=True):
            values[slot] = value

    return run


def _sampling(call: SampleCall, slots: Slots) -> Operation:
    module = call.module
    kind: Any = module.distribution_class
    constants: dict[str, Any] = dict(module.distribution_kwargs)
    names: list[str] = [as_key(name)[-1] for name in module.dist_keys]
    sources = list(zip(names, slots.many(call.in_keys), strict=True))
    sample = slots[as_key(module.dist_sample_keys[0])]
    log_prob = slots[as_key(module.log_prob_key)] if module.return_log_prob else None

    direct = sampler_for(kind, names, constants)

    def run(values: list[Any]) -> None:
        if direct is not None:
            drawn = direct(**{name: values[slot] for name, slot in sources})
            if drawn is not None:
                values[sample] = drawn[0]
                if log_prob is not None:
                    values[log_prob] = drawn[1]
                return
        distribution = kind(**{name: values[slot] for name, slot in sources}, **constants)
        drawn = distribution.rsample() if distribution.has_rsample else distribution.sample()
        values[sample] = drawn
        if log_prob is not None:
            values[log_prob] = distribution.log_prob(drawn)

    return run


def _tensordict(call: PolicyCall, plan: PolicyPlan) -> Operation:
    function = call.module if isinstance(call, SampleCall) else call.function  # type: ignore[union-attr]
    assert call.out_keys is not None
    batch_size, device = plan.layout.batch_size, plan.device
    visible = [(key, slot) for key, slot in plan.slots.of.items() if key[0] != "next"]
    outs = [(key, plan.slots[key]) for key in call.out_keys]
    flags = _no_flags(batch_size, device, plan.has_truncated)

    def run(values: list[Any]) -> None:
        leaves = {key: values[slot] for key, slot in visible if values[slot] is not None}
        given = TensorDict({**flags, **nested(leaves)}, batch_size=batch_size, device=device)
        result = function(given)
        if result is None:
            raise PolicyOutputError(_RETURNED_NONE)
        for key, slot in outs:
            value = result.get(key, None)
            if value is None:
                raise PolicyOutputError(f"the policy wrote {show(key)} on its first call, but not now")
            values[slot] = value

    return run


_RETURNED_NONE = "the policy returned None; it must return the TensorDict that it wrote to, or a new one"


def _no_flags(batch_size: torch.Size, device: torch.device | None, has_truncated: bool) -> dict[str, torch.Tensor]:
    flags = ("done", "terminated", "truncated") if has_truncated else ("done", "terminated")
    return {flag: torch.zeros((*batch_size, 1), dtype=torch.bool, device=device) for flag in flags}


# -- the first call --------------------------------------------------------------------------------------------------


def _first_call(
    call: PolicyCall,
    available: dict[Key, torch.Tensor],
    layout: Layout,
    action_keys: list[Key],
    device: torch.device | None,
    has_truncated: bool,
) -> tuple[PolicyCall, dict[Key, torch.Tensor]]:
    """Make a call on real data; returns the call with its out_keys known, and what it wrote."""
    if isinstance(call, TensorCall):
        result = call.function(*(available[key] for key in call.in_keys))
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
            return _first_call(whole, available, layout, action_keys, device, has_truncated)
        raise PolicyOutputError(
            f"the policy returned {type(result).__name__}; it must return a tensor or a tuple of tensors (or take a "
            "parameter named tensordict, and return a TensorDict)"
        )
    given = TensorDict(
        {**_no_flags(layout.batch_size, device, has_truncated), **nested(available)},
        batch_size=layout.batch_size,
        device=device,
    )
    before = {as_key(key): given.get(key) for key in given.keys(True, True)}
    result = (call.module if isinstance(call, SampleCall) else call.function)(given)
    if result is None:
        raise PolicyOutputError(_RETURNED_NONE)
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
    assert isinstance(call, TensorDictCall)
    return TensorDictCall(call.function, call.in_keys, tuple(written)), written


def _require(call: PolicyCall, available: dict[Key, torch.Tensor], layout: Layout) -> None:
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
        )


def _fields(
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
        outputs[outputs.index(got)] = Field(got.key, got.shape, got.dtype, wanted.device)
    return outputs, state


def _check_action(got: Field, wanted: Field, env: Any) -> None:
    spec = env.full_action_spec[wanted.key]
    if got.shape != wanted.shape:
        hint = ""
        if type(spec).__name__ in ("OneHot", "MultiOneHot"):
            hint = "; for integer actions, make the env with categorical_action_encoding=True"
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


def _wrapped(call: PolicyCall, wrap: Callable[[Any], Any]) -> PolicyCall:
    if isinstance(call, TensorCall):
        return replace(call, function=wrap(call.function), whole=None)
    if isinstance(call, TensorDictCall):
        return replace(call, function=wrap(call.function))
    return call


@contextlib.contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Put random state, and the policy's buffers, back as they were."""
    buffers = []
    if isinstance(policy, nn.Module):
        buffers = [(buffer, buffer.detach().clone()) for buffer in policy.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
