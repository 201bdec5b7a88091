"""Pickling for other processes: what they could not import travels by value.

Cloudpickle does that for lambdas, closures and the main module. A module that was loaded from a file which is not on
``sys.path`` (a test module, a script that another one ran) is the same case, but cloudpickle cannot know.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import ModuleType
from typing import Any

import cloudpickle

#: What to do with what cannot be pickled.
INSIDE_OF_FACTORIES = "Make what cannot be pickled inside of the factories"


def dumps(value: Any) -> bytes:
    """Pickle anything that a worker may need."""
    registered = []
    for module in _modules_not_importable(len(sys.modules)):
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            with suppress(ValueError):  # gone from sys.modules meanwhile
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
    try:
        return cloudpickle.dumps(value)
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def to_be_sent(what: str, where: str, advice: str) -> Iterator[None]:
    """Where something is pickled that is its user's: what cannot be is a TypeError that says what to do instead."""
    try:
        yield
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to {where}: {type(error).__name__}: {error}. {advice}") from error


def dumps_with_path(value: Any) -> bytes:
    """For a process that was not started from here: it is told where the program's own modules are, too."""
    return pickle.dumps((sys.path, dumps(value)))


def loads_with_path(data: bytes) -> Any:
    """What ``dumps_with_path`` made. Its folders are searched last: on another machine they may be others."""
    folders, pickled = pickle.loads(data)
    sys.path += [folder for folder in folders if folder not in sys.path]
    return cloudpickle.loads(pickled)


@functools.lru_cache(maxsize=1)
def _modules_not_importable(num_modules: int) -> list[ModuleType]:
    """Looked up again when modules were imported."""
    paths = set(sys.path)
    found: list[ModuleType] = []
    importable: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(module, ModuleType) or not file or module.__name__ != name:
            continue
        parts = PurePath(file).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        depth = name.count(".") + 1
        if ".".join(parts[-depth:]) == name and str(PurePath(*parts[:-depth])) in paths:
            continue
        top = name.partition(".")[0]
        if top not in importable:
            importable[top] = any(_finds(finder, top) for finder in sys.meta_path)
        if not importable[top]:
            found.append(module)
    return found


def _finds(finder: Any, name: str) -> bool:
    try:
        return finder.find_spec(name, None) is not None
    except Exception:
        return False
