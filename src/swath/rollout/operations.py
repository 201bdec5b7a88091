"""Operations: the calls of a plan as functions on a list of values, one entry a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from swath.errors import PolicyOutputError
from swath.keys import Key, as_key, nested, show
from swath.rollout.functional import stack_functions
from swath.rollout.policies import PolicyCall, SampleCall, TensorCall
from swath.rollout.sampling import sampler_for

#: Reads and writes entries of a list of values.
Operation = Callable[[list[Any]], None]

RETURNED_NONE = "the policy returned None; it must return the TensorDict that it wrote to, or a new one"


class Slots:
    """Numbers for keys: a list index is cheaper than a dictionary's tuple."""

    def __init__(self) -> None:
        self.of: dict[Key, int] = {}

    def __getitem__(self, key: Key) -> int:
        return self.of.setdefault(key, len(self.of))

    def many(self, keys: Sequence[Key]) -> tuple[int, ...]:
        return tuple(self[key] for key in keys)


@dataclass(frozen=True)
class Surroundings:
    """What a policy that takes a TensorDict finds there besides its inputs."""

    batch_size: torch.Size
    device: torch.device | None
    flag_names: tuple[str, ...]
    #: What the TensorDict says of its device, where the user said where the policy is; its leaves are there already.
    policy_device: torch.device | None = None

    def flags(self) -> dict[Key, torch.Tensor]:
        """The flags of a running episode: none is set."""
        flag = torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device)
        return {(name,): flag.clone() for name in self.flag_names}

    def tensordict(self, leaves: dict[Key, torch.Tensor]) -> TensorDict:
        """The leaves and the flags."""
        return TensorDict(nested({**self.flags(), **leaves}), batch_size=self.batch_size, device=self.policy_device)


def is_private(key: Key) -> bool:
    """Whether a key is for the policy's own use: it is given back to it at its next call, and not delivered."""
    return any(part.startswith("_") for part in key)


def operation(
    call: PolicyCall,
    slots: Slots,
    surroundings: Surroundings,
    *,
    reuse_memory: bool,
    memory: dict[Key, torch.Tensor],
    remembers: bool,
    plain: bool = False,
) -> Operation:
    """A call as an operation; ``reuse_memory`` if nothing but operations of ours sees its result.

    ``memory`` has what its last call wrote for its own use or, if it ``remembers``, all that it wrote at the root.
    ``plain`` if the policy's own functions and distributions are to be called, with nothing written out.
    """
    if isinstance(call, SampleCall) and call.draws_at_random:
        return _sampling(call, slots, plain)
    if isinstance(call, TensorCall):
        assert call.out_keys is not None
        ins, outs = slots.many(call.in_keys), slots.many(call.out_keys)
        if len(ins) == 1 and len(outs) == 1 and not call.returns_tuple and not plain:
            return _stack(call.function, ins[0], outs[0], result_leaves=not reuse_memory)
        return _tensors(call.function, ins, outs)
    return _tensordict(call, slots, surroundings, memory, remembers)


def _stack(function: Any, source: int, target: int, *, result_leaves: bool) -> Operation:
    functions: list[Any] | None = None

    def run(values: list[Any]) -> None:
        nonlocal functions
        value = values[source]
        if functions is None:  # the shape of what it is given is known from now on
            functions = stack_functions(function, value.shape, result_leaves=result_leaves)
        for call in functions:
            value = call(value)
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


def _sampling(call: SampleCall, slots: Slots, plain: bool) -> Operation:
    module = call.module
    kind: Any = module.distribution_class
    constants: dict[str, Any] = dict(module.distribution_kwargs)
    names: list[str] = [as_key(name)[-1] for name in module.dist_keys]
    sources = list(zip(names, slots.many(call.in_keys), strict=True))
    sample = slots[as_key(module.dist_sample_keys[0])]
    log_prob = slots[as_key(module.log_prob_key)] if module.return_log_prob else None

    direct = None if plain else sampler_for(kind, names, constants)

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


def kept_keys(call: PolicyCall, remembers: bool) -> list[Key]:
    """What a call finds in its TensorDict because its last call wrote it there."""
    if isinstance(call, TensorCall) or (isinstance(call, SampleCall) and call.draws_at_random):
        return []
    return [key for key in call.out_keys or () if key[0] != "next" and (remembers or is_private(key))]


class Remembered(Sequence[torch.Tensor]):
    """What a call wrote for its next one, as rows: the same one for every step."""

    def __init__(self, memory: dict[Key, torch.Tensor], key: Key) -> None:
        self._memory, self._key = memory, key

    @property
    def is_there(self) -> bool:
        return self._key in self._memory

    def __getitem__(self, t: Any) -> Any:
        return self._memory[self._key]

    def __len__(self) -> int:
        return 1

    def put(self, value: torch.Tensor) -> None:
        self._memory[self._key] = value


def _tensordict(
    call: PolicyCall, slots: Slots, surroundings: Surroundings, memory: dict[Key, torch.Tensor], remembers: bool
) -> Operation:
    function = call.module if isinstance(call, SampleCall) else call.function  # type: ignore[union-attr]
    assert call.out_keys is not None
    visible = [(key, slot) for key, slot in slots.of.items() if key[0] != "next"]
    outs = [(key, slots[key]) for key in call.out_keys if not is_private(key)]
    kept = kept_keys(call, remembers)

    def run(values: list[Any]) -> None:
        leaves = {key: values[slot] for key, slot in visible if values[slot] is not None}
        if kept:  # copies: the policy may keep what it is given, and what is remembered is written again
            leaves = {**{key: value.clone() for key, value in memory.items()}, **leaves}
        result = function(surroundings.tensordict(leaves))
        if result is None:
            raise PolicyOutputError(RETURNED_NONE)
        for key in kept:
            value = result.get(key, None)
            if value is not None:
                memory[key] = value.clone()
        for key, slot in outs:
            value = result.get(key, None)
            if value is None:
                raise PolicyOutputError(f"the policy wrote {show(key)} on its first call, but not now")
            values[slot] = value

    return run
