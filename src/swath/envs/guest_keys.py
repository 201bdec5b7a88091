"""What a guest reads and gives, learned from its specs and its fake TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swath.envs.torchrl_internals import has_dynamic_specs
from swath.keys import Key, as_key
from swath.rollout.layout import CPU, Field
from swath.rollout.structure import Objects, Structure
from swath.specs import Categorical, OneHot, Spec


class GuestSpec(Spec):
    """A leaf of the guest's action spec, which draws by itself."""

    def __init__(self, whole: Any, field: Field, structure: Structure, batch_size: torch.Size) -> None:
        super().__init__((*batch_size, *field.shape), field.dtype, field.device)
        self._whole = whole
        self._key = field.key
        self._structure = structure
        self._lead = len(batch_size)
        self._own_shape = self.shape

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        added = self.shape[: len(self.shape) - len(self._own_shape)]
        size = torch.Size([*shape, *added])
        drawn = self._whole.rand(size)
        return self._structure.flatten(drawn, Objects(), len(size) + self._lead)[self._key]


@dataclass(frozen=True)
class GuestKeys:
    """What a guest reads and gives, as fields."""

    structure: Structure
    carried: tuple[Field, ...]
    actions: tuple[Field, ...]
    outcomes: tuple[Field, ...]
    #: Those of the carried keys that say that something is over.
    flags: frozenset[Key]
    #: Those that end an episode, as the guest calls them: its own where it has such, else those of any group of agents.
    ends: tuple[Key, ...]
    #: Carried keys that a step does not give.
    root_only: frozenset[Key]

    @classmethod
    def of(cls, guest: Any) -> GuestKeys:
        lead = len(guest.batch_size)
        fake = guest.fake_tensordict()
        structure = Structure.of(fake, _ragged_keys(guest))
        root = structure.flatten(fake.exclude("next"), Objects(), lead)
        after = structure.flatten(fake.get("next"), Objects(), lead)
        action_keys, done_keys = (set(map(as_key, keys)) for keys in (guest.action_keys, guest.done_keys))

        def is_one_of(key: Key, keys: set[Key]) -> bool:
            return _without_numbers(key, structure) in keys

        def fields(leaves: Mapping[Key, torch.Tensor], wanted: Callable[[Key], bool]) -> tuple[Field, ...]:
            device = guest.device or CPU
            return tuple(
                Field(key, leaf.shape[lead:], leaf.dtype, device) for key, leaf in leaves.items() if wanted(key)
            )

        carried = fields(root, lambda key: not is_one_of(key, action_keys))
        own_flags = [key for key in done_keys if len(key) == 1]
        return cls(
            structure=structure,
            carried=carried,
            actions=fields(root, lambda key: is_one_of(key, action_keys)),
            outcomes=fields(after, lambda key: key not in root),
            flags=frozenset(field.key for field in carried if is_one_of(field.key, done_keys)),
            ends=tuple(sorted(own_flags or done_keys)),
            root_only=frozenset(field.key for field in carried if field.key not in after),
        )


def action_spec_of(whole: Any, field: Field, structure: Structure, batch_size: torch.Size) -> Spec:
    """One of ours where there is one like it, which knows masks; else the guest's own."""
    leaf = None if structure.stacks else whole[field.key]
    kind = {"OneHot": OneHot, "Categorical": Categorical}.get(type(leaf).__name__)
    if leaf is not None and kind is not None and getattr(leaf, "n", 0) > 0:
        return kind(int(leaf.n), leaf.shape, leaf.dtype)
    return GuestSpec(whole, field, structure, batch_size)


def _ragged_keys(guest: Any) -> frozenset[Key]:
    """Keys whose spec leaves a dimension open."""
    if not has_dynamic_specs(guest):
        return frozenset()
    specs = [guest.full_observation_spec, guest.full_state_spec]
    return frozenset(as_key(key) for spec in specs for key, leaf in spec.items(True, True) if -1 in leaf.shape)


def _without_numbers(key: Key, structure: Structure) -> Key:
    """A flat key as the guest writes it: without the numbers of a stack's members."""
    name: list[str] = []
    path: list[str] = []
    for part in key:
        if tuple(path) not in structure.stacks:
            name.append(part)
        path.append(part)
    return tuple(name)
