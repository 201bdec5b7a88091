"""Watch: everything that a policy's code may have read, and whether any of it is something else now.

Values are compared by identity with what was there, so an unchanged one costs a look-up, and a changed one is never
missed; containers are compared item by item. What cannot be watched (a generator, an array, a socket) is refused, if
code that ran spells its name.
"""

from __future__ import annotations

import collections
import dis
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MappingView
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from swath.rollout.capture.recording import LIBRARIES, PURE_MODULES, NotCapturable, Recording, names_in
from swath.rollout.torch_internals import Operation, OperationPacket

_MISSING = object()
#: More than this is not watched: looking at it before every batch would cost more than it gains.
MAX_VALUES = 50_000

#: Values that cannot change, and lead nowhere.
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.generic, np.dtype),
    *(BuiltinFunctionType, CodeType, type(len), type(str.join), type([].append), type(object.__init__)),
    *(type(torch.Tensor.shape), Operation, OperationPacket),  # type: ignore[attr-defined]
)
#: Values that change, or lead elsewhere, without an attribute that shows it.
_BLIND = (bytearray, memoryview, Iterator, MappingView, operator.attrgetter, operator.methodcaller)
#: Compiled code has its own ways to look at things.
_COMPILED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
_NUMBERS = (bool, int, float, str, type(None))
#: As many are looked at in each step, some 50 ns each.
MAX_NUMBERS = 16
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Watch:
    """What was found; ``changed()`` names the first thing that is different."""

    def __init__(self) -> None:
        #: Mapping, key, value, where it stands.
        self._slots: list[tuple[Mapping[Any, Any], Any, Any, str]] = []
        #: Read the value, the value, where it stands.
        self._readings: list[tuple[Callable[[], Any], Any, str]] = []
        #: Mapping, its keys in order, where it stands.
        self._keys: list[tuple[Mapping[Any, Any], tuple[Any, ...], str]] = []
        self._sequences: list[tuple[Any, tuple[Any, ...], str]] = []
        self._tensors: list[tuple[torch.Tensor, tuple[Any, ...], str]] = []
        #: Numbers and the like that the user's own code reads, to be looked at in each step: a mapping and a key, or a
        #: cell and None, and the value.
        self.numbers: list[tuple[Any, Any, Any]] = []
        self.tensor_ids: set[int] = set()

    def changed(self) -> str | None:
        for mapping, key, value, place in self._slots:
            if mapping.get(key, _MISSING) is not value:
                return place
        for tensor, facts, place in self._tensors:
            if _facts(tensor) != facts:
                return place
        for mapping, keys, place in self._keys:
            if tuple(mapping) != keys:
                return place
        for sequence, items, place in self._sequences:
            if len(sequence) != len(items) or any(a is not b for a, b in zip(sequence, items, strict=True)):
                return place
        for read, value, place in self._readings:
            if read() is not value:
                return place
        return None

    def slot(self, mapping: Mapping[Any, Any], key: Any, place: str) -> Any:
        value = mapping.get(key, _MISSING)
        self._slots.append((mapping, key, value, place))
        return value

    def number(self, owner: Any, key: Any, value: Any) -> None:
        if type(value) in _NUMBERS and len(self.numbers) < MAX_NUMBERS:
            self.numbers.append((owner, key, value))

    def reading(self, read: Callable[[], Any], place: str) -> Any:
        value = read()
        self._readings.append((read, value, place))
        return value

    def keys(self, mapping: Mapping[Any, Any], place: str) -> None:
        self._keys.append((mapping, tuple(mapping), place))

    def sequence(self, sequence: Any, place: str) -> None:
        self._sequences.append((sequence, tuple(sequence), place))

    def tensor(self, tensor: torch.Tensor, place: str) -> None:
        self._tensors.append((tensor, _facts(tensor), place))
        self.tensor_ids.add(id(tensor))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def watch(roots: Mapping[str, Any], recording: Recording) -> Watch:
    """Watch what can be reached from ``roots`` (by name) and from the code that ran."""
    return _Walk(recording).all_from(roots)


class _Walk:
    def __init__(self, recording: Recording) -> None:
        self._names = recording.names
        self._any_name = recording.looks_up_any_name
        self._user_code = recording.user_code
        #: Those that a user's code spells.
        self._user_names = {name for code in self._user_code for name in names_in(code)}
        self._watch = Watch()
        #: What was seen; kept, so that an identity is not used again.
        self._seen: dict[int, Any] = {}
        self._waiting: list[tuple[Any, str, bool]] = []
        self._functions: set[CodeType] = set()
        self._owners: set[type] = set()

    def all_from(self, roots: Mapping[str, Any]) -> Watch:
        self._waiting = [(value, name, True) for name, value in roots.items()]
        for code, namespace in self._user_code.items():
            self._globals(code, namespace)
        while self._waiting:
            self._visit(*self._waiting.pop())
            if len(self._seen) > MAX_VALUES:
                raise NotCapturable("it refers to more values than can be watched")
        self._require_functions()
        return self._watch

    def _require_functions(self) -> None:
        """Code with free variables, of which the function was not found: its cells cannot be watched."""
        nested = {constant for code in self._user_code for constant in code.co_consts if isinstance(constant, CodeType)}
        for code in self._user_code:
            if code.co_freevars and code not in self._functions and code not in nested:
                raise NotCapturable(f"the function {code.co_qualname} that it calls cannot be found")

    def _globals(self, code: CodeType, namespace: dict[str, Any]) -> None:
        for name in code.co_names:
            value = self._watch.slot(namespace, name, f"the global {name}")
            self._watch.number(namespace, name, value)
            if value is not _MISSING:
                self._waiting.append((value, f"the global {name}", True))
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                module = sys.modules.get(instruction.argval)
                self._waiting.append((module, instruction.argval, True))

    # -- one value --------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, place: str, users: bool) -> None:
        """``users`` if a user's code may have read it, so that it must be something that can be watched."""
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._tensor(value, place)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, FunctionType):
            self._function(value, place)
        elif isinstance(value, (dict, MappingProxyType, tuple, frozenset, list, set, collections.deque)):
            self._container(value, place, users)
        elif not self._wrapper(value, place, users):
            self._object(value, place, users)

    def _container(self, value: Any, place: str, users: bool) -> None:
        if isinstance(value, (dict, MappingProxyType)):
            self._watch.keys(value, place)
            for key in value:
                self._later(self._watch.slot(value, key, f"{place}[{key!r}]"), f"{place}[{key!r}]", users)
        else:
            if not isinstance(value, (tuple, frozenset)):
                self._watch.sequence(value, place)
            for index, item in enumerate(value):
                self._later(item, f"{place}[{index}]", users)
        if hasattr(value, "__dict__") and not _is_predictable(type(value)):
            self._later(type(value), type(value).__name__)
            self._attributes(vars(value), place, users)

    def _later(self, value: Any, place: str, users: bool = True) -> None:
        self._waiting.append((value, place, users))

    def _tensor(self, tensor: torch.Tensor, place: str) -> None:
        if type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided:
            self._watch.tensor(tensor, place)
        if "grad" in self._user_names:
            grad = self._watch.reading(functools.partial(getattr, tensor, "grad"), f"{place}.grad")
            self._later(grad, f"{place}.grad")
        self._attributes(vars(tensor), place, True)

    def _wrapper(self, value: Any, place: str, users: bool) -> bool:
        """Things that hold a function."""
        if isinstance(value, MethodType):
            parts = (value.__self__, value.__func__)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            parts = (value.__func__,)
        elif isinstance(value, property):
            parts = (value.fget, value.fset)
        elif isinstance(value, functools.cached_property):
            parts = (value.func,)
        elif isinstance(value, weakref.ref):
            parts = (self._watch.reading(value, place),)
        else:
            return False
        for part in parts:
            self._later(part, place, users)
        return True

    def _function(self, function: FunctionType, place: str) -> None:
        self._functions.add(function.__code__)
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            value = self._watch.reading(functools.partial(getattr, function, part), place)
            if not isinstance(value, CodeType):
                self._later(value, f"a default of {place}")
        self._attributes(vars(function), place, True)
        # A library's function may be around one of the user's: torch.no_grad()(forward).
        is_library = _root(function.__globals__.get("__name__")) in LIBRARIES | PURE_MODULES
        if not is_library and function.__code__ not in self._user_code:
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = self._watch.reading(functools.partial(_contents, cell), f"{name}, which {place} closes over")
            self._later(value, name, users=not is_library)
            if not is_library:
                self._watch.number(cell, None, value)

    def _class(self, kind: type) -> None:
        if type(kind) is not type:
            self._later(type(kind), type(kind).__name__)
        for owner in kind.__mro__:
            if owner in self._owners or owner is object:
                continue
            self._owners.add(owner)
            if _is_predictable(owner):  # as long as nobody puts something else there
                for name in self._names & vars(owner).keys():
                    self._watch.slot(vars(owner), name, f"{owner.__name__}.{name}")
                continue
            self._watch.keys(vars(owner), owner.__name__)
            for name in tuple(vars(owner)):
                if name in self._names or self._any_name or name.startswith("__"):
                    if name in ("__dict__", "__weakref__", "__doc__", "__annotations__", "__module__"):
                        continue
                    value = self._watch.slot(vars(owner), name, f"{owner.__name__}.{name}")
                    self._later(value, f"{owner.__name__}.{name}", users=not name.startswith("__"))

    def _module(self, module: ModuleType) -> None:
        root = _root(module.__name__)
        if root in LIBRARIES or root in PURE_MODULES:
            for name in self._user_names & vars(module).keys():
                value = self._watch.slot(vars(module), name, f"{module.__name__}.{name}")
                if isinstance(value, (type, ModuleType)):
                    self._later(value, f"{module.__name__}.{name}")
            return
        if root == "numpy":
            if "random" in self._names or "random" in module.__name__:
                raise NotCapturable("it uses numpy.random")
            return
        if root in sys.stdlib_module_names:
            raise NotCapturable(f"it uses the module {module.__name__}")
        for name in self._names & vars(module).keys():
            self._later(self._watch.slot(vars(module), name, f"{module.__name__}.{name}"), f"{module.__name__}.{name}")

    def _object(self, value: Any, place: str, users: bool) -> None:
        kind = type(value)
        is_library = _is_predictable(kind)
        attributes = getattr(value, "__dict__", None)
        slots = [name for owner in kind.__mro__ for name in _slot_names(owner)]
        if not isinstance(attributes, dict) and not slots:
            if users and (not is_library or isinstance(value, _BLIND)) and value is not _MISSING:
                raise NotCapturable(
                    f"it reads {place}, a {kind.__module__}.{kind.__qualname__}, which cannot be watched"
                )
            return
        if isinstance(value, _COMPILED):
            raise NotCapturable(f"it calls {place}, which TorchScript has compiled")
        if isinstance(value, torch.Generator):
            raise NotCapturable(f"it reads {place}, a random generator")
        if users and _has_more_than_attributes(kind, len(slots)):
            raise NotCapturable(f"it reads {place}, a {kind.__module__}.{kind.__qualname__}, which cannot be watched")
        self._watch.reading(functools.partial(type, value), f"the class of {place}")
        self._later(kind, kind.__name__)
        if isinstance(attributes, dict):
            self._attributes(attributes, place, not is_library)
        for name in slots:
            if name in self._names or self._any_name:
                found = self._watch.reading(functools.partial(getattr, value, name, _MISSING), f"{place}.{name}")
                self._later(found, f"{place}.{name}", not is_library or name in self._user_names)

    def _attributes(self, attributes: Mapping[str, Any], place: str, users: bool) -> None:
        self._watch.keys(attributes, place)
        for name in attributes:
            if name in self._names or self._any_name:
                found = self._watch.slot(attributes, name, f"{place}.{name}")
                self._later(found, f"{place}.{name}", users or name in self._user_names)
                if users and name in self._user_names:
                    self._watch.number(attributes, name, found)


def _is_predictable(kind: type) -> bool:
    return _root(kind.__module__) in LIBRARIES or _root(kind.__module__) in PURE_MODULES


def _has_more_than_attributes(kind: type, num_slots: int) -> bool:
    """Whether C keeps something in it besides attributes: an array, a counter."""
    places = (num_slots + 2) * object.__basicsize__ // 2  # a pointer each; __dict__ and __weakref__
    return kind.__basicsize__ > object.__basicsize__ + places or kind.__itemsize__ > 0


def _slot_names(owner: type) -> Iterator[str]:
    slots = owner.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if name not in ("__dict__", "__weakref__"):
            yield f"_{owner.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _root(name: str | None) -> str:
    return (name or "").partition(".")[0]
