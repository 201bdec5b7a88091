"""Weights that a policy uses and its ``state_dict()`` does not know of.

A ``TensorDictModule`` over a bound method, a lambda over a network, a ``functools.partial``, an object with a
``__call__``, a ``forward`` that uses a global: the network is not registered anywhere, but what calls it has a way to
it, and that way is gone here. The same way leads to the worker's copy of it, so that weights can be named after it.

What is found by the name of a module is another object where that module is imported, even if it is the same here as
something that is copied. So each module is a home of its own: what is found in two of them has two names.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from swath.weight_update.inside import cells, class_parts, imported, is_closed, is_env, parts, unordered_parts
from swath.weight_update.loads import is_read, loads_of

_PLAIN = (
    *(str, bytes, bool, int, float, complex, type(None), range, slice, types.CodeType, types.FrameType),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.TracebackType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.optim.Optimizer),
)
#: Of a module: what it has besides its own attributes; and of its hooks, those that act.
_OF_MODULES = frozenset(vars(nn.Module()))
_ACTING_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONTAINERS = frozenset({list, tuple, dict})
#: Where a policy has no end.
_MOST_THINGS = 100_000


class Place(NamedTuple):
    """Where something was found: its name, and the module by whose name; none for what is copied with the policy."""

    path: str = ""
    home: str = ""

    def at(self, name: str) -> Place:
        return Place(f"{self.path}.{name}" if self.path and name else self.path or name, self.home)

    @classmethod
    def in_module(cls, module: str, name: str) -> Place:
        return cls(f"{module}:{name}", module)


class HiddenWeights:
    """What was found beyond a policy's registered tensors.

    >>> sorted(HiddenWeights(nn.Linear(1, 1).forward).tensors)
    ['self.bias', 'self.weight']
    """

    def __init__(self, policy: Any) -> None:
        #: Paths of the modules, each with a dot at its end.
        self.roots: list[str] = []
        #: What could not be looked into.
        self.opaque: list[str] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._seen: set[tuple[str, int]] = set()
        #: What was made only to be looked at, so that no number is used twice.
        self._alive: list[Any] = []
        self._todo: collections.deque[tuple[Any, Place]] = collections.deque()
        #: Classes and modules that code can get at, and what it may take of them.
        self._classes: dict[type, bool] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._names: set[str] = set()
        #: Of kinds of things, what takes time to find out.
        self._envs: dict[type, bool] = {}
        self._plain: dict[type, bool] = {}
        self._sets: list[tuple[list[Any], Place]] = []
        self._unordered: list[str] = []
        if isinstance(policy, nn.Module):
            self._is_new(policy, Place())
            self._look_into_module(policy, Place())
        else:
            self._look_at(policy, Place())
        self._finish()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that were found, by path.

        Raises:
            ValueError: which is which cannot be told in another process.
        """
        if self._unordered:
            raise ValueError(
                f"the policy uses several networks of {self._unordered[0]}, which has another order in every process, "
                "so that their weights cannot be told apart: keep them in a list, a dict or an nn.ModuleList"
            )
        return self._tensors

    @property
    def is_cut(self) -> bool:
        """Whether there was more than is looked at."""
        return len(self._seen) >= _MOST_THINGS

    # -- the way ---------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        while not self.is_cut and (self._todo or self._follow_names() or self._open_set()):
            self._drain()

    def _drain(self) -> None:
        while self._todo:
            self._look_at(*self._todo.popleft())

    def _is_new(self, thing: Any, place: Place) -> bool:
        mark = (place.home, id(thing))
        if mark in self._seen:
            return False
        if self.is_cut:
            return False
        self._seen.add(mark)
        self._alive.append(thing)
        return True

    def _look_at(self, thing: Any, place: Place) -> None:
        if self._is_plain(thing) or not self._is_new(thing, place):
            return
        if type(thing) in _CONTAINERS:
            self._look_later(parts(thing), place)
        elif self._is_env(type(thing)):
            return
        elif isinstance(thing, nn.Module):
            self._add(_registered(thing), place)
            self.roots.append(f"{place.path}." if place.path else "")
            self._look_into_module(thing, place)
        elif isinstance(thing, torch.Tensor):
            if thing.requires_grad:
                self._add({"": thing}, place)
        elif isinstance(thing, types.ModuleType):
            self._reach_module(thing)
        elif isinstance(thing, type):
            self._reach_class(thing, is_made=True)
        else:
            self._look_into(thing, place)

    def _is_plain(self, thing: Any) -> bool:
        kind = type(thing)
        if kind not in self._plain:
            self._plain[kind] = isinstance(thing, _PLAIN)
        return self._plain[kind]

    def _is_env(self, kind: type) -> bool:
        if kind not in self._envs:
            self._envs[kind] = is_env(kind)
        return self._envs[kind]

    def _look_into(self, thing: Any, place: Place) -> None:
        kind = type(thing)
        if is_closed(thing):
            self.opaque.append(f"{place.path or 'the policy'} ({kind.__module__}.{kind.__qualname__})")
        if isinstance(thing, types.FunctionType):
            if "<" not in thing.__qualname__:  # it may be imported there, with all that it has
                place = Place.in_module(thing.__module__ or "", thing.__qualname__)
            self._read(thing)
        else:
            self._reach_class(kind, is_made=False)
        if entries := unordered_parts(thing):
            self._sets.append((entries, place))
        self._look_later(parts(thing), place)

    def _look_later(self, named: Iterable[tuple[str, Any]], place: Place) -> None:
        self._todo.extend((part, place.at(name)) for name, part in named if not self._is_plain(part))

    def _look_into_module(self, module: nn.Module, place: Place) -> None:
        """What its submodules have as plain attributes, and what their code uses."""
        for name, each in module.named_modules():
            if each is not module and not self._is_new(each, place):
                continue
            self._reach_class(type(each), is_made=False)
            inner = place.at(name)
            own = vars(each)
            self._look_later([(name, own[name]) for name in own if name not in _OF_MODULES], inner)
            for hooks in _ACTING_HOOKS:  # their keys are numbers that each process counts for itself
                self._look_later([(f"{hooks}.{n}", hook) for n, hook in enumerate(own.get(hooks, {}).values())], inner)

    def _add(self, tensors: Mapping[str, torch.Tensor], place: Place) -> None:
        for name, tensor in tensors.items():
            full = place.at(name).path
            while full in self._tensors:
                full += "_"
            self._tensors[full] = tensor

    # -- code ------------------------------------------------------------------------------------------------------

    def _read(self, function: types.FunctionType) -> None:
        """What a function gets by name: globals, attributes of modules, what it imports."""
        module = str(function.__globals__.get("__name__"))
        if not is_read(module):
            return
        loads, closure = loads_of(function.__code__), cells(function)
        self._names |= loads.names
        for name, *attributes in loads.chains:
            if name in closure:
                if isinstance(closure[name], types.ModuleType):
                    self._follow(closure[name], attributes, Place())
            elif name in function.__globals__:
                self._follow(function.__globals__[name], attributes, Place.in_module(module, name))
        for level, name in loads.imports:
            self._reach_module(imported(function, level, name))

    def _follow(self, thing: Any, attributes: list[str], place: Place) -> None:
        """Through modules; what is in objects and classes is found without."""
        while isinstance(thing, types.ModuleType) and attributes:
            if not is_read(thing.__name__):
                return
            name, *attributes = attributes
            place = Place.in_module(thing.__name__, name)
            thing = vars(thing).get(name, vars(thing).get("__getattr__"))
        self._todo.append((thing, place))

    def _reach_module(self, module: types.ModuleType | None) -> None:
        if module is not None and is_read(module.__name__):
            self._modules[module.__name__] = module

    def _reach_class(self, kind: type, *, is_made: bool) -> None:
        if is_read(kind.__module__) and not self._is_env(kind):
            self._classes[kind] = self._classes.get(kind, False) or is_made

    def _follow_names(self) -> bool:
        """Methods and attributes of classes, and what modules have, that the code read so far may ask for."""
        for kind, is_made in self._classes.items():
            for base, name, value in class_parts(kind, self._names, is_made=is_made):
                self._todo.append((value, Place.in_module(base.__module__, f"{base.__qualname__}.{name}")))
        for name, module in self._modules.items():
            for attribute in sorted(self._names & vars(module).keys()):
                self._todo.append((vars(module)[attribute], Place.in_module(name, attribute)))
        self._todo = collections.deque(entry for entry in self._todo if not self._is_done(*entry))
        return bool(self._todo)

    def _is_done(self, thing: Any, place: Place) -> bool:
        return self._is_plain(thing) or (place.home, id(thing)) in self._seen

    def _open_set(self) -> bool:
        """When all else was found: one network that nothing else leads to can be told, more cannot."""
        if not self._sets:
            return False
        entries, place = self._sets.pop(0)
        num_hiding = 0
        for entry in entries:
            before = len(self._tensors)
            self._look_at(entry, place.at("entry"))
            self._drain()
            num_hiding += len(self._tensors) > before
        if num_hiding > 1:
            self._unordered.append(place.path or "the policy")
        return True


def _registered(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
