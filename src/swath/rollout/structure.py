"""Structure: how the flat fields of a layout are nested TensorDicts for those who read them.

Rows, blocks and buffers know tensors of fixed shape, under keys that are tuples of strings. Some envs give more than
that: agents of different shapes (a lazy stack, whose members get their number as part of the key), nested TensorDicts
with a batch size of their own, and what is no tensor at all, or a tensor of another size each time (which becomes a
number, under which the thing itself is kept). Here is the way there and back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict import is_tensor_collection as is_node
from tensordict.utils import is_non_tensor

from swath.errors import EnvError
from swath.keys import Key, leaves_of, nested, show


class Objects:
    """Things that are no rows of numbers, each under a number that is used once."""

    def __init__(self) -> None:
        self._next = 1  # 0 is nothing, which is what padding is
        self._stride = 1
        self.kept: dict[int, Any] = {}

    def number_from(self, first: int, stride: int) -> None:
        """Several that number things by ``stride`` from different firsts never use the same number."""
        self._next = first + -(-self._next // stride) * stride
        self._stride = stride

    def put(self, thing: Any) -> int:
        number, self._next = self._next, self._next + self._stride
        self.kept[number] = thing
        return number

    def forget_before(self, number: int) -> None:
        self.kept = {each: thing for each, thing in self.kept.items() if each >= number}


@dataclass(frozen=True)
class Structure:
    """Which keys are more than leaves of nested TensorDicts. Keys are those of a root; those of "next" are alike.

    >>> structure = Structure(stacks={("agents",): 0})
    >>> flat = {("agents", "0", "x"): torch.zeros(5, 2), ("agents", "1", "x"): torch.zeros(5, 3)}
    >>> structure.build(flat, torch.Size([5]))["agents"].shape
    torch.Size([5, 2])
    """

    #: Lazy stacks: along which dimension, counted from the first that is not the env's batch size.
    stacks: Mapping[Key, int] = field(default_factory=dict)
    #: Nested TensorDicts with further batch dimensions.
    sizes: Mapping[Key, torch.Size] = field(default_factory=dict)
    #: Nested tensorclasses.
    classes: Mapping[Key, type] = field(default_factory=dict)
    #: What is no tensor.
    objects: frozenset[Key] = frozenset()
    #: Tensors whose size changes from step to step.
    ragged: frozenset[Key] = frozenset()

    @classmethod
    def of(cls, data: TensorDictBase, ragged: frozenset[Key] = frozenset()) -> Structure:
        """That of an env's TensorDict, at the root and under "next"."""
        stacks: dict[Key, int] = {}
        sizes: dict[Key, torch.Size] = {}
        classes: dict[Key, type] = {}
        objects: set[Key] = set()
        lead = data.batch_dims

        def look(node: Any, path: Key) -> None:
            name: Any
            if isinstance(node, LazyStackedTensorDict) and node.stack_dim >= lead:
                stacks[path] = node.stack_dim - lead
                for number, member in enumerate(node.tensordicts):
                    look(member, (*path, str(number)))
                return
            if not isinstance(node, TensorDictBase):
                classes[path] = type(node)
            if node.batch_dims > lead:
                sizes[path] = node.batch_size[lead:]
            for name in list(node.keys()):
                value = node.get(name)
                if _is_thing(value):
                    objects.add((*path, name))
                elif is_node(value):
                    look(value, (*path, name))

        look(data.exclude("next"), ())
        after = data.get("next", None)
        if after is not None:
            look(after, ())
        return cls(stacks, sizes, classes, frozenset(objects), ragged)

    def to_json(self) -> dict[str, Any]:
        """As text can have it; tensorclasses become TensorDicts."""
        if self.has_objects:
            raise EnvError(
                f"{show(min(self.things))} is no tensor of a fixed shape, which nodes cannot send; leave it out of the "
                "env's specs, or collect on this machine"
            )
        return {
            "stacks": [[list(key), dim] for key, dim in self.stacks.items()],
            "sizes": [[list(key), list(size)] for key, size in self.sizes.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Structure:
        return cls(
            stacks={tuple(key): dim for key, dim in data["stacks"]},
            sizes={tuple(key): torch.Size(size) for key, size in data["sizes"]},
        )

    @property
    def is_plain(self) -> bool:
        return not (self.stacks or self.sizes or self.classes or self.has_objects)

    @property
    def has_objects(self) -> bool:
        return bool(self.objects or self.ragged)

    @property
    def things(self) -> frozenset[Key]:
        """The keys under which there are numbers of objects."""
        return self.objects | self.ragged

    def objects_of(self, leaves: Mapping[Key, torch.Tensor], objects: Objects) -> dict[int, Any]:
        """What the steps ``[envs, time]`` of a batch have by number; what only they have is forgotten."""
        numbers: set[int] = set()
        last: list[int] = []
        for key in self.things:
            for place in (key, ("next", *key)):
                if place in leaves:
                    numbers.update(leaves[place].unique().tolist())
            # What comes after the last step is the root of the next one.
            after = leaves.get(("next", *key), leaves.get(key))
            if after is not None:
                last.append(int(after[..., -1].min()))
        found = {number: objects.kept[number] for number in numbers if number in objects.kept}
        objects.forget_before(min(last, default=0))
        return found

    # -- from TensorDicts to fields ----------------------------------------------------------------------------------

    def flatten(self, data: Any, objects: Objects, lead: int | None = None) -> dict[Key, torch.Tensor]:
        """The leaves of a TensorDict whose first ``lead`` dimensions (all of its batch size) are those of the envs."""
        return dict(self._leaves(data, (), data.batch_dims if lead is None else lead, objects))

    def _leaves(self, node: Any, path: Key, lead: int, objects: Objects) -> Iterator[tuple[Key, Any]]:
        name: Any
        place = _in_root(path)
        if isinstance(node, LazyStackedTensorDict) and node.stack_dim < lead:
            # Envs side by side: those of each first, then all of them.
            dim = node.stack_dim
            members = [dict(self._leaves(member, path, lead - 1, objects)) for member in node.tensordicts]
            for key in members[0]:
                yield key, torch.stack([member[key] for member in members], dim)
            return
        if place in self.stacks:
            dim = lead + self.stacks[place]
            lazy = isinstance(node, LazyStackedTensorDict) and node.stack_dim == dim
            for number, member in enumerate(node.tensordicts if lazy else node.unbind(dim)):
                yield from self._leaves(member, (*path, str(number)), lead, objects)
            return
        for name in list(node.keys()):
            value = node.get(name)
            key = (*path, name)
            if _is_thing(value) or (*place, name) in self.ragged:
                yield key, _numbers(value, node.batch_size[:lead], objects)
            elif is_node(value):
                yield from self._leaves(value, key, lead, objects)
            else:
                yield key, value

    # -- and back ----------------------------------------------------------------------------------------------------

    def restore(self, batch: TensorDictBase, objects: Mapping[int, Any]) -> TensorDictBase:
        """A batch of flat leaves, as its readers expect it."""
        return self.build(dict(leaves_of(batch)), batch.batch_size, objects, batch.device, batch.names)

    def build(
        self,
        flat: Mapping[Key, torch.Tensor],
        lead: torch.Size,
        objects: Mapping[int, Any] | None = None,
        device: torch.device | None = None,
        names: Sequence[str | None] | None = None,
    ) -> TensorDictBase:
        """Leaves ``[*lead, *shape]`` as a TensorDict of that batch size."""
        kept = {} if objects is None else objects
        dense: dict[Key, Any] = {}
        ragged: dict[Key, torch.Tensor] = {}
        for key, leaf in flat.items():
            place = _in_root(key)
            if place in self.ragged:
                ragged[key] = leaf
            else:
                dense[key] = _non_tensor(leaf.tolist(), kept) if place in self.objects else leaf
        built = self._node(nested(dense), (), lead, device)
        if ragged:
            return _with_ragged(built, ragged, kept, names[-1] if names else None)
        if names:
            built.names = names
        return built

    def _node(self, tree: dict[str, Any], path: Key, lead: torch.Size, device: torch.device | None) -> Any:
        place = _in_root(path)
        if place in self.stacks:
            members = [self._node(tree[str(i)], (*path, str(i)), lead, device) for i in range(len(tree))]
            return LazyStackedTensorDict(*members, stack_dim=len(lead) + self.stacks[place])
        inner = {
            name: self._node(value, (*path, name), lead, device) if isinstance(value, dict) else value
            for name, value in tree.items()
        }
        node = TensorDict(inner, batch_size=(*lead, *self.sizes.get(place, ())), device=device)
        kind: Any = self.classes.get(place)
        return node if kind is None else kind.from_tensordict(node)


def maybe_dense_stack(entries: Sequence[TensorDictBase], dim: int = 0) -> TensorDictBase:
    """A dense stack, or a lazy one where shapes differ; for which tensordict changes the program's environment."""
    name = "LAZY_LEGACY_OP"
    before = os.environ.get(name)
    try:
        return LazyStackedTensorDict.maybe_dense_stack(list(entries), dim)
    finally:
        if before is None:
            os.environ.pop(name, None)  # else it is "None", with which no program started from here can stack
        else:
            os.environ[name] = before


def _in_root(key: Key) -> Key:
    return key[1:] if key[:1] == ("next",) else key


def _is_thing(value: Any) -> bool:
    """Whether this is no tensor; a tensorclass gives such fields as they are."""
    return is_non_tensor(value) or not (isinstance(value, torch.Tensor) or is_node(value))


def _numbers(value: Any, lead: torch.Size, objects: Objects) -> torch.Tensor:
    """The things of all envs, kept; their numbers ``[*lead]``."""
    if isinstance(value, NonTensorStack):
        return torch.tensor(_apply(value.tolist(), len(lead), objects.put))
    if not isinstance(value, torch.Tensor):  # one for all of them
        return torch.full(lead, objects.put(value.data if is_non_tensor(value) else value))
    if not lead:
        return torch.tensor(objects.put(value.clone()))
    return torch.tensor([objects.put(row.clone()) for row in value.flatten(0, len(lead) - 1)]).reshape(lead)


def _apply(tree: Any, depth: int, function: Any) -> Any:
    return function(tree) if not depth else [_apply(each, depth - 1, function) for each in tree]


def _non_tensor(numbers: Any, kept: Mapping[int, Any]) -> Any:
    if isinstance(numbers, int):
        return NonTensorData(kept.get(numbers))
    return NonTensorStack(*[_non_tensor(each, kept) for each in numbers])  # type: ignore[abstract]


def _with_ragged(
    dense: TensorDictBase, ragged: Mapping[Key, torch.Tensor], kept: Mapping[int, Any], last_name: str | None = None
) -> TensorDictBase:
    """Steps whose leaves differ in shape can only be stacked lazily."""
    if not dense.batch_dims:
        for key, number in ragged.items():
            dense.set(key, kept.get(int(number), torch.empty(0)))
        return dense
    members = [
        _with_ragged(member, {key: numbers[..., i] for key, numbers in ragged.items()}, kept)
        for i, member in enumerate(dense.unbind(-1))
    ]
    return LazyStackedTensorDict(*members, stack_dim=dense.batch_dims - 1, stack_dim_name=last_name)
