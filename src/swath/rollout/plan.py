"""Policy plan: a policy bound once to the memory of a strip, so that the step only calls it.

``PolicyPlan.resolve`` finds out how to call the policy and, from one real call on a real observation, what it
writes. ``bind`` ties that to a strip. ``prepare`` is called before every batch: it reads the layers' parameters and
the exploration type anew, so that whatever was replaced in between is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from swath.errors import PolicyError, PolicyInputError, PolicyOutputError, add_note
from swath.keys import Key, as_key, show
from swath.rollout.capture.captured import Called, CapturedPolicy
from swath.rollout.first_call import first_call, output_fields, require_inputs, untouched
from swath.rollout.functional import is_known_stack, layers_of, linear_into, stack_fingerprint, stack_functions
from swath.rollout.layout import Field, Layout
from swath.rollout.operations import (
    Operation,
    Remembered,
    Slots,
    Surroundings,
    is_private,
    kept_keys,
    operation,
)
from swath.rollout.policies import (
    PolicyCall,
    SampleCall,
    TensorCall,
    TensorDictCall,
    as_unknown,
    declared_keys,
    module_calls,
    policy_calls,
    whole_call,
)
from swath.rollout.recurrence import first_states, unknown_state
from swath.rollout.strip import Strip
from swath.rollout.structured_policy import needs_structure, structured_call


@dataclass(frozen=True)
class CallOptions:
    """What a user says about how a policy is to be called.

    Args:
        trust_policy: call it with a TensorDict without looking at its signature.
        wrap: applied to each function that is called (``torch.compile``).
        capture: whether its calls may be captured.
    """

    trust_policy: bool = False
    wrap: Callable[[Any], Any] | None = None
    capture: bool = True


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
    #: Keys that are given to the policy.
    in_keys: tuple[Key, ...]
    #: Flags that the policy asks for; none is ever set at a root.
    flags: dict[Key, torch.Tensor]
    #: Among others: the device that the policy wants its inputs on (None: where they are).
    surroundings: Surroundings
    #: Actions that the policy gives without the last dimension, of size one, that their spec has.
    without_last: frozenset[Key] = frozenset()
    #: Whether its calls may be captured.
    captures: bool = True

    @classmethod
    def resolve(
        cls,
        policy: Any,
        env: Any,
        first_row: dict[Key, torch.Tensor],
        *,
        device: torch.device | None = None,
        casts: bool = True,
        options: CallOptions | None = None,
    ) -> PolicyPlan:
        """Find out how to call ``policy``, by calling it once on ``first_row``, a real observation of every env.

        ``device`` is where the policy wants its inputs; ``casts``: they are somewhere else, and are copied there.
        The call leaves no trace: random state and the policy's buffers are put back.
        """
        options = CallOptions() if options is None else options
        trust_policy, wrap = options.trust_policy, options.wrap
        layout: Layout = env.row_layout()
        calls = policy_calls(policy, env, trust_policy)
        adapted = layout.structure is not None and needs_structure(calls, layout.structure)
        if adapted:
            calls = [structured_call(policy, env, layout, trust_policy)]
        if wrap is not None:
            calls = [_wrapped(call, wrap) for call in calls]
        # A module may write keys for its own use and select what it gives away.
        declared = (
            None if adapted or not isinstance(policy, TensorDictModuleBase) else declared_keys(policy, "out_keys")
        )
        selected = None if declared is None else set(declared)
        surroundings = Surroundings(layout.batch_size, device if casts else None, layout.flags, device)
        state_keys, candidates = first_states(policy, calls, layout)
        errors: list[Exception] = []
        for state in candidates:
            try:
                with untouched(policy):
                    given = {**first_row, **state}
                    plan = cls._try(policy, tuple(calls), layout, given, surroundings, env, selected)
                are_its_own = wrap is None and not adapted
                return replace(plan, are_its_own=are_its_own, captures=options.capture)
            except Exception as error:  # another candidate may fit
                errors.append(error)
        is_input_missing = bool(errors) and isinstance(errors[-1], PolicyInputError)  # whatever the state is
        if state_keys and not is_input_missing and not getattr(policy, "state_spec", None):
            raise unknown_state(state_keys) from (errors[-1] if errors else None)
        error = errors[-1] if is_input_missing else errors[0]
        if not isinstance(error, PolicyError):
            add_note(
                error,
                f"swath: raised by the policy when it was called on the first observation (batch size "
                f"{tuple(layout.batch_size)}, keys {', '.join(map(show, first_row))})",
            )
        raise error

    @classmethod
    def _try(
        cls,
        policy: Any,
        calls: tuple[PolicyCall, ...],
        layout: Layout,
        given: dict[Key, torch.Tensor],
        surroundings: Surroundings,
        env: Any,
        selected: set[Key] | None,
    ) -> PolicyPlan:
        device = surroundings.device
        available = {key: tensor.clone() if device is None else tensor.to(device) for key, tensor in given.items()}
        action_keys = [as_key(key) for key in env.action_keys]
        resolved: list[PolicyCall] = []
        written: dict[Key, torch.Tensor] = {}
        asked_for = {key for call in calls for key in call.in_keys or ()}
        flags = {key: flag for key, flag in surroundings.flags().items() if key in asked_for and key not in available}
        available.update(flags)
        for call in calls:
            require_inputs(call, available)
            call, results = first_call(call, available, action_keys, surroundings, layout.root_only)
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
            and not is_private(key)
        }
        primed = [key[1:] for key in written if key[0] == "next" and key[1:] in layout.primable]
        # What is under "next", too, cannot be changed at the root alone: there it is the same memory.
        overridden = [key for key in written if key in layout.root_only]
        if (primed or overridden) and env.is_given_actions_only:
            raise PolicyError(
                f"the policy writes {show((*primed, *overridden)[0])}, which is the env's, and this env is in a "
                "process that is given actions only. Leave the env's primer out: a policy's state is zero at an "
                "episode's start; or use a Collector or a MultiCollector"
            )
        outputs, state = output_fields(kept, layout, given, env)
        # A policy that can start without its state is given zeros from its second call on.
        in_keys = tuple(dict.fromkeys((*given, *(field.key for field in state))))
        return cls(
            policy=policy,
            found=calls,
            calls=tuple(resolved),
            are_its_own=True,
            slots=Slots(),
            layout=layout.with_policy(outputs, state, primed, overridden),
            in_keys=in_keys,
            flags=flags,
            surroundings=surroundings,
            without_last=frozenset(f.key for f in outputs if kept[f.key].ndim < len(layout.batch_size) + len(f.shape)),
        )

    @property
    def private_keys(self) -> list[Key]:
        """What the policy writes for its own use, and reads at its next call."""
        return [key for call in self.calls for key in call.out_keys or () if is_private(key)]

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

    def resized(self, num_rows: int) -> PolicyPlan:
        """The same for another number of envs."""
        size = torch.Size([num_rows])
        surroundings = replace(self.surroundings, batch_size=size)
        flags = {key: flag for key, flag in surroundings.flags().items() if key in self.flags}
        return replace(self, layout=replace(self.layout, batch_size=size), surroundings=surroundings, flags=flags)

    def bind(self, strip: Strip, remembers: bool = True) -> BoundPolicy:
        return BoundPolicy(self, strip, remembers)


class BoundPolicy:
    """A plan on a strip: ``act(t)`` reads row t and writes the policy's outputs."""

    def __init__(self, plan: PolicyPlan, strip: Strip, remembers: bool = True) -> None:
        self._plan = plan
        #: Whether a call finds what it wrote last time, as it does in the TensorDicts of a guest.
        self._remembers = remembers and not plan.layout.has_flags
        self._device = plan.surroundings.device
        slots = plan.slots
        self._inputs = [(slots[key], strip.carried[key].rows) for key in plan.in_keys]
        self._flags = [(slots[key], flag) for key, flag in plan.flags.items()]
        self._outputs = []
        for key, column in strip.outputs.items():
            rows = [row.squeeze(-1) for row in column.rows] if key in plan.without_last else column.rows
            self._outputs.append((slots[key], rows, rows[0].shape, column.field))
        for key in plan.layout.overridden:
            column = strip.carried[key]
            self._outputs.append((slots[key], column.rows, column.rows[0].shape, column.field))
        for key in plan.layout.written_by_policy:
            column = strip.carried[key]
            # Written under "next": that is the root of the following row.
            self._outputs.append((slots["next", *key], column.rows[1:], column.rows[0].shape, column.field))
        self._operations: list[Operation] = []
        self._prepared_for: list[Any] | None = None
        #: By the call's number: what it wrote for its own use.
        self._memories: dict[int, dict[Key, torch.Tensor]] = {}
        self._copies_inputs = True
        #: The quickest way to call it without a program.
        self._called: Callable[[int], None] = self._act
        self._captured: CapturedPolicy | None = None
        self._why_not_captured = ""
        self.act: Callable[[int], None] = self._act

    def prepare(self) -> None:
        """Read parameters, hooks and exploration type as they are now."""
        self._prepare_calls()
        self.act = self._called if self._captured is None else self._captured.prepared()

    def describe(self) -> str:
        """How the policy is called, in words."""
        if self._captured is not None:
            return self._captured.describe()
        return self._why_not_captured or "not called yet"

    def _prepare_calls(self) -> None:
        plan = self._plan
        calls = plan.calls_now()
        now = [(call, fingerprint(call)) for call in calls]
        if now == self._prepared_for:
            return
        self._prepared_for = None  # until all is there: Ctrl-C may come at any line of this
        for call in calls:  # every key gets its number before the operations are made
            plan.slots.many((*(call.in_keys or ()), *(call.out_keys or ())))
        # Code that is not ours may keep what it is given, or change it: it gets copies. Where there is none, rows are
        # given as they are, and what goes from call to call lies in reused memory.
        ours = all(
            isinstance(c, SampleCall) or (isinstance(c, TensorCall) and is_known_stack(c.function)) for c in calls
        )
        self._copies_inputs = not ours or self._device is not None
        if (
            len(calls) == 1
            and isinstance(calls[0], TensorCall)
            and len(calls[0].in_keys) == 1
            and calls[0].in_keys[0] in plan.in_keys
            and not calls[0].returns_tuple
            and len(self._outputs) == 1
            and plan.surroundings.device is None
        ):
            self._called = self._act_on_one_tensor(calls[0])
        else:
            self._operations = [self._operation(index, call, reuse_memory=ours) for index, call in enumerate(calls)]
            self._called = self._act
        self._no_values: list[Any] = [None] * len(plan.slots.of)
        self._captured = self._to_capture(calls)
        self._prepared_for = now

    def _to_capture(self, calls: tuple[PolicyCall, ...]) -> CapturedPolicy | None:
        self._why_not_captured = self._why_never(calls)
        if self._why_not_captured:
            return None
        operations = [self._operation(i, call, reuse_memory=False, plain=True) for i, call in enumerate(calls)]
        slots = [slot for slot, *_ in self._outputs]
        remembered = [
            Remembered(self._memories.setdefault(index, {}), key)
            for index, call in enumerate(calls)
            for key in kept_keys(call, self._remembers)
        ]

        def call(inputs: list[torch.Tensor]) -> list[Any]:
            values = self._values(inputs[: len(self._inputs)])
            for memory, value in zip(remembered, inputs[len(self._inputs) :], strict=True):
                memory.put(value)
            for operate in operations:
                operate(values)
            return [*(values[slot] for slot in slots), *(memory[0] for memory in remembered)]

        def write(t: int, results: list[Any]) -> None:
            self._write(t, results[: len(slots)])
            for memory, value in zip(remembered, results[len(slots) :], strict=True):
                memory.put(value.clone())

        called = Called(
            roots={
                "policy": self._plan.policy,
                "its function": [call.module if isinstance(call, SampleCall) else call.function for call in calls],
                "its flags": [flag for _, flag in self._flags],
            },
            inputs_at=lambda t: [*self._inputs_at(t), *(memory[0].clone() for memory in remembered)],
            call=call,
            write=write,
            input_rows=[*(rows for _, rows in self._inputs), *remembered],
            output_rows=[*(rows for _, rows, _, _ in self._outputs), *remembered],
            remembered=remembered,
            act=self._called,
        )
        return CapturedPolicy(called)

    def _why_never(self, calls: tuple[PolicyCall, ...]) -> str:
        """Why a program would be no gain, or cannot be; empty if it can."""
        if self._called != self._act and not self._copies_inputs:
            return "a stack of layers, called as a flat list of functions"
        if not self._plan.captures:
            return "called as it is: capture_policy=False"
        if any(isinstance(call, TensorCall) and call.is_numpy for call in calls):
            return "called as it is: it is written with NumPy"
        if not self._plan.are_its_own:
            return "called as it is: it is compiled, or given TensorDicts of the env's own structure"
        return ""

    def _operation(self, index: int, call: PolicyCall, *, reuse_memory: bool, plain: bool = False) -> Operation:
        return operation(
            call,
            self._plan.slots,
            self._plan.surroundings,
            reuse_memory=reuse_memory,
            memory=self._memories.setdefault(index, {}),
            remembers=self._remembers,
            plain=plain,
        )

    def _inputs_at(self, t: int) -> list[torch.Tensor]:
        """Copies of row t."""
        device = self._device
        return [rows[t].clone() if device is None else rows[t].to(device, copy=True) for _, rows in self._inputs]

    def _values(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        values = self._no_values.copy()
        for slot, flag in self._flags:
            values[slot] = flag
        for (slot, _), value in zip(self._inputs, inputs, strict=True):
            values[slot] = value
        return values

    def _act(self, t: int) -> None:
        values = self._values(self._inputs_at(t) if self._copies_inputs else [rows[t] for _, rows in self._inputs])
        for operate in self._operations:
            operate(values)
        self._write(t, [values[slot] for slot, *_ in self._outputs])

    def _write(self, t: int, results: Sequence[Any]) -> None:
        for (_, rows, shape, field), value in zip(self._outputs, results, strict=True):
            try:
                fits = value.shape == shape and value.dtype is field.dtype
            except AttributeError:  # not a tensor
                fits = False
            if not fits:
                refuse(field, value, shape)
            rows[t].copy_(value)

    def _act_on_one_tensor(self, call: TensorCall) -> Callable[[int], None]:
        """``act`` for the commonest policies: one tensor in, one out."""
        slot = self._plan.slots[call.in_keys[0]]
        inputs = next(rows for number, rows in self._inputs if number == slot)
        _, outputs, shape, field = self._outputs[0]
        *before, last = layers_of(call.function)
        write = linear_into(last, outputs[0])
        if write is not None:
            functions = stack_functions(torch.nn.Sequential(*before), inputs[0].shape, result_leaves=False)
            if self._copies_inputs:
                functions.insert(0, torch.clone)

            def act_into(t: int) -> None:
                value = inputs[t]
                for function in functions:
                    value = function(value)
                write(value, outputs[t])

            return act_into
        functions = stack_functions(call.function, inputs[0].shape)
        if self._copies_inputs:
            functions.insert(0, torch.clone)
        dtype = field.dtype

        def act(t: int) -> None:
            value = inputs[t]
            for function in functions:
                value = function(value)
            try:
                fits = value.shape == shape and value.dtype is dtype
            except AttributeError:  # not a tensor
                fits = False
            if not fits:
                refuse(field, value, shape)
            outputs[t].copy_(value)

        return act


def fingerprint(call: PolicyCall) -> Any:
    """Changes whenever what was bound for a call may no longer be what calling it would use."""
    if isinstance(call, TensorCall):
        return stack_fingerprint(call.function)
    if isinstance(call, SampleCall):
        return call.draws_at_random
    return None


def refuse(field: Field, value: Any, shape: torch.Size) -> None:
    got = (
        f"shape {tuple(value.shape)} and dtype {value.dtype}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    raise PolicyOutputError(
        f"the policy's {show(field.key)} is {got}; on its first call it was of shape {tuple(shape)} and dtype "
        f"{field.dtype}"
    )


def _wrapped(call: PolicyCall, wrap: Callable[[Any], Any]) -> PolicyCall:
    if isinstance(call, TensorCall):
        return replace(call, function=wrap(call.function), whole=None)
    if isinstance(call, TensorDictCall):
        return replace(call, function=wrap(call.function))
    return call
