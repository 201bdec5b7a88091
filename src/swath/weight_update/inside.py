"""What something consists of, by name: where networks may be that nobody has registered."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase

from swath.weight_update.loads import is_read, may_hold

#: So many entries of a container are looked at.
_MOST_ENTRIES = 1_000
#: What the standard library has that holds things of others. (Not, say, loggers, which hold the whole program.)
_HOLDERS = frozenset({"builtins", "types", "collections", "functools", "itertools", "operator", "argparse", "_thread"})
#: Whose classes with ``reset`` and ``step`` are envs; and what those of others have.
_LIBRARIES_OF_ENVS = frozenset({"gymnasium", "gym", "torchrl", "swath", "pettingzoo", "dm_env", "dm_control"})
_OF_ENVS = ("observation_space", "observation_spec", "observation_spaces")
#: Methods that nobody calls while a policy acts.
_NOT_FOR_ACTING = frozenset(
    {"__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__init_subclass__", "__copy__"}
    | {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__sizeof__", "__dir__"}
)
#: What a class makes its objects with.
_FOR_MAKING = frozenset({"__init__", "__new__", "__post_init__"})


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """The parts of something that have an order, or a name."""
    kind = type(thing)
    if kind in (list, tuple, dict):  # most things are
        yield from _entries(thing)
    elif isinstance(thing, functools.partial):
        yield from {"func": thing.func, "args": thing.args, "keywords": thing.keywords}.items()
    elif isinstance(thing, types.MethodType):
        yield from {"self": thing.__self__, "function": thing.__func__}.items()
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, TensorDictBase):
        yield from ((".".join((key,) if isinstance(key, str) else key), leaf) for key, leaf in thing.items(True, True))
    elif isinstance(thing, (types.BuiltinFunctionType, types.MethodWrapperType)):
        if not isinstance(thing.__self__, types.ModuleType):
            yield "self", thing.__self__
    elif isinstance(thing, (staticmethod, classmethod)):
        yield "function", thing.__func__
    elif isinstance(thing, property):
        yield "get", thing.fget
    else:
        yield from _entries(thing)
        if may_hold(kind.__module__) or kind.__module__ in _HOLDERS:
            yield from _attributes(thing)


def unordered_parts(thing: Any) -> list[Any]:
    """Those whose order is another one in every process."""
    if isinstance(thing, (set, frozenset, weakref.WeakSet)):
        return list(itertools.islice(thing, _MOST_ENTRIES))
    if isinstance(thing, functools._lru_cache_wrapper):
        cached = (each for each in gc.get_referents(thing) if each is not vars(thing))
        inner = (each.values() if isinstance(each, dict) else (each,) for each in cached)
        return list(itertools.islice(itertools.chain.from_iterable(inner), _MOST_ENTRIES))
    return []


def is_closed(thing: Any) -> bool:
    """Whether something that acts is written in another language, and shows nothing of itself."""
    kind = type(thing)
    return (
        callable(thing)
        and may_hold(kind.__module__)
        and not isinstance(thing, (types.FunctionType, types.MethodType))
        and not hasattr(thing, "__dict__")
        and not any(_slots(base) for base in kind.__mro__)
    )


def _entries(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, (set, frozenset)):
        return
    if isinstance(thing, dict) or type(thing) is types.MappingProxyType:
        entries = dict.items(thing) if isinstance(thing, dict) else thing.items()
        for index, (key, entry) in enumerate(itertools.islice(entries, _MOST_ENTRIES)):
            is_name = isinstance(key, (str, int))
            yield str(key) if is_name else str(index), entry
            if not is_name:
                yield f"key{index}", key
        return
    ordered: Any = next((kind for kind in (list, tuple, collections.deque) if isinstance(thing, kind)), None)
    if ordered is not None:
        entries = itertools.islice(ordered.__iter__(thing), _MOST_ENTRIES)
        yield from ((str(index), entry) for index, entry in enumerate(entries))
    elif type(thing).__module__ in ("itertools", "operator", "builtins") and not hasattr(thing, "__dict__"):
        # Written in C: iterators, getters of attributes.
        yield from ((str(index), each) for index, each in enumerate(gc.get_referents(thing)[:_MOST_ENTRIES]))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    for base in type(thing).__mro__:
        for name in _slots(base):
            try:
                yield name, vars(base)[name].__get__(thing)
            except (AttributeError, KeyError):  # not set
                continue
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from cells(function).items()
    yield "defaults", function.__defaults__ or ()
    yield "keyword_defaults", function.__kwdefaults__ or {}
    yield from list(vars(function).items())


def cells(function: types.FunctionType) -> dict[str, Any]:
    """Variables of its closure."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found


def class_parts(kind: type, names: set[str], *, is_made: bool) -> Iterator[tuple[type, str, Any]]:
    """What code that takes these names gets from a class, or has called for it by others."""
    bases = [base for base in kind.__mro__ if is_read(base.__module__)]
    foreign = {
        name for base in kind.__mro__ if base not in bases and base is not object for name in vars(base)
    } - _NOT_FOR_ACTING
    for base in bases:
        for name, value in sorted(vars(base).items()):
            is_special = name.startswith("__") and name.endswith("__") and name not in _NOT_FOR_ACTING
            if name in names or name in foreign or is_special or (is_made and name in _FOR_MAKING):
                yield base, name, value
    if isinstance(kind, enum.EnumMeta):
        yield from ((kind, name, member) for name, member in kind.__members__.items() if name in names)


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
        for name in ([slots] if isinstance(slots, str) else slots)
        if name not in ("__dict__", "__weakref__")
    ]


def is_env(kind: type) -> bool:
    """What envs have in them is their own. A network may have a ``reset`` and a ``step``, too, but no specs."""
    if not (callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))):
        return False
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return bool(roots & _LIBRARIES_OF_ENVS) or any(hasattr(kind, name) for name in _OF_ENVS)


def imported(function: types.FunctionType, level: int, name: str) -> types.ModuleType | None:
    """A module that a function imports when it is called, if anybody has imported it yet."""
    package = function.__globals__.get("__package__") or ""
    if level:
        parents = package.split(".")
        package = ".".join(parents[: len(parents) - level + 1])
        name = f"{package}.{name}" if name else package
    return sys.modules.get(name)
