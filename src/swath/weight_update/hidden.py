"""Weights that a policy uses and its ``state_dict()`` does not know of.

A ``TensorDictModule`` over a bound method, a lambda over a network, a ``functools.partial``, an object with a
``__call__``: the network is not registered anywhere, but what calls it has a way to it, and that way is gone here. The
same way leads to the worker's copy of it, so that weights can be named after it.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

#: Whose functions and objects have no weights of the user, or are modules.
_LIBRARIES = frozenset({"torch", "tensordict", "torchrl", "numpy", "gymnasium", "swath", "ray"})
_PLAIN = (
    *(str, bytes, bool, int, float, complex, type(None), type, types.ModuleType, range, slice, set, frozenset),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.optim.Optimizer),
)
#: Of a module: what it has besides its own attributes.
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})
#: Where a policy has no end: so many things are looked at, and so many entries of a container.
_MOST_THINGS = 10_000
_MOST_ENTRIES = 1_000


class HiddenWeights:
    """What was found beyond a policy's registered tensors.

    >>> sorted(HiddenWeights(nn.Linear(1, 1).forward).tensors)
    ['self.bias', 'self.weight']
    """

    def __init__(self, policy: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        #: Paths of the modules, each with a dot at its end.
        self.roots: list[str] = []
        #: What could not be looked into.
        self.opaque: list[str] = []
        self._seen: set[int] = set()
        #: What was made only to be looked at, so that no number is used twice.
        self._alive: list[Any] = []
        if isinstance(policy, nn.Module):
            self._look_into_module(policy, "")
        else:
            self._look_at(policy, "")

    def _look_at(self, thing: Any, path: str) -> None:
        if isinstance(thing, _PLAIN) or id(thing) in self._seen or len(self._seen) > _MOST_THINGS:
            return
        self._seen.add(id(thing))
        self._alive.append(thing)
        if _is_env(thing):
            return
        if isinstance(thing, nn.Module):
            self._add(_registered(thing), path)
            self.roots.append(f"{path}." if path else "")
            self._look_into_module(thing, path)
        elif isinstance(thing, torch.Tensor):
            if thing.requires_grad:
                self._add({"": thing}, path)
        else:
            for name, inner in self._inside(thing, path):
                self._look_at(inner, f"{path}.{name}" if path else name)

    def _look_into_module(self, module: nn.Module, path: str) -> None:
        """What its submodules have as plain attributes."""
        for name, each in module.named_modules():
            self._seen.add(id(each))
            prefix = ".".join(filter(None, (path, name)))
            for attribute, value in list(vars(each).items()):
                if attribute not in _OF_MODULES and not attribute.endswith("_hooks"):
                    self._look_at(value, f"{prefix}.{attribute}" if prefix else attribute)

    def _add(self, tensors: Mapping[str, torch.Tensor], path: str) -> None:
        for name, tensor in tensors.items():
            full = ".".join(filter(None, (path, name)))
            while full in self.tensors:
                full += "_"
            self.tensors[full] = tensor

    def _inside(self, thing: Any, path: str) -> Iterator[tuple[str, Any]]:
        """The parts of something, by name."""
        if isinstance(thing, functools.partial):
            return iter({"func": thing.func, "args": thing.args, "keywords": thing.keywords}.items())
        if isinstance(thing, types.MethodType):
            return iter({"self": thing.__self__, "function": thing.__func__}.items())
        if isinstance(thing, types.FunctionType):
            return _of_function(thing)
        if isinstance(thing, (list, tuple)):
            return ((str(index), entry) for index, entry in enumerate(thing[:_MOST_ENTRIES]))
        if isinstance(thing, TensorDictBase):
            return ((".".join((key,) if isinstance(key, str) else key), leaf) for key, leaf in thing.items(True, True))
        if isinstance(thing, Mapping):
            return ((str(key), entry) for key, entry in itertools.islice(thing.items(), _MOST_ENTRIES))
        return self._of_object(thing, path)

    def _of_object(self, thing: Any, path: str) -> Iterator[tuple[str, Any]]:
        kind = type(thing)
        root = kind.__module__.partition(".")[0]
        if hasattr(thing, "__wrapped__"):
            yield "__wrapped__", thing.__wrapped__
        if isinstance(thing, (types.BuiltinFunctionType, types.MethodWrapperType)):
            if not isinstance(thing.__self__, types.ModuleType):
                yield "self", thing.__self__
            return
        if root in _LIBRARIES or (root in sys.stdlib_module_names and kind is not types.SimpleNamespace):
            return
        names = [name for base in kind.__mro__ for name in _slots(base)]
        if not hasattr(thing, "__dict__") and not names and callable(thing):
            self.opaque.append(f"{path or 'the policy'} ({kind.__module__}.{kind.__qualname__})")
        for name in names:
            if hasattr(thing, name):
                yield name, getattr(thing, name)
        yield from list(getattr(thing, "__dict__", {}).items())
        call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
        if isinstance(call, types.FunctionType):
            yield "__call__", call


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", function.__defaults__ or ()
    yield "keyword_defaults", function.__kwdefaults__ or {}
    yield from list(vars(function).items())
    root = (function.__module__ or "").partition(".")[0]
    if root not in _LIBRARIES and (root == "__main__" or root not in sys.stdlib_module_names):
        for name in sorted(_globals_used(function.__code__)):
            if name in function.__globals__:
                yield name, function.__globals__[name]


def _globals_used(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_used(constant)
    return names


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")]


def _is_env(thing: Any) -> bool:
    """Envs may be modules, too, and what they have in them is their own."""
    kind = type(thing)
    return callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))


def _registered(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
