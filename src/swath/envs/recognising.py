"""Whether an object is TorchRL's own, and as TorchRL wrote it: the very class, its own methods, no hooks.

What is not is never lowered (``lowering.py``).
"""

from __future__ import annotations

import abc
import operator
import sys
from pathlib import Path
from typing import Any


class NotLowered(Exception):
    """Why an env stays a guest."""


def name_of(thing: Any) -> str | None:
    """The class by the name that TorchRL gives it; None for classes of others."""
    kind = type(thing)
    if not kind.__module__.startswith("torchrl.envs."):
        return None
    return kind.__name__ if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind else None


def require_unchanged(thing: Any) -> None:
    """That nothing of this object was replaced: a method, in it or in its class, or a hook added."""
    kind = type(thing)
    own = vars(thing)
    for name in own:
        if name.startswith("_") and name.endswith("hooks") and own[name]:
            raise NotLowered(f"{kind.__name__} has {name.strip('_').replace('_', ' ')}")
        of_class = getattr(kind, name, None)
        if callable(of_class) and not isinstance(of_class, type) and getattr(own[name], "__self__", None) is not thing:
            raise NotLowered(f"{kind.__name__}.{name} was replaced")
    for owner in kind.__mro__:
        if owner.__module__.startswith("torchrl."):
            _require_unchanged_class(owner)


def _require_unchanged_class(owner: type) -> None:
    methods = list(vars(owner).values())
    known = _UNCHANGED.get(owner)
    if known is not None and len(known) == len(methods) and all(map(operator.is_, known, methods)):
        return
    for name, method in vars(owner).items():
        if not is_written_by_torchrl(method):
            raise NotLowered(f"{owner.__name__}.{name} was replaced")
    _UNCHANGED[owner] = methods


#: Classes that were looked at, and what was in them.
_UNCHANGED: dict[type, list[Any]] = {}


def is_written_by_torchrl(method: Any) -> bool:
    """Whether a function was written there. Not by its ``__module__``: who replaces one often copies that."""
    for part in (method, getattr(method, "__func__", None), getattr(method, "fget", None)):
        code = getattr(part, "__code__", None)
        if code is not None and not code.co_filename.startswith((*_homes(), "<string>")):
            return False
    return True


def _homes() -> tuple[str, ...]:
    """The folders of packages whose functions are TorchRL's own: also decorators, and ``nn.Module``."""
    packages = (sys.modules.get(name) for name in ("torchrl", "tensordict", "torch"))
    files = [package.__file__ for package in packages if package is not None and package.__file__]
    return (*[str(Path(file).parent) for file in files], *_STANDARD_LIBRARY)


#: Of decorators such as ``abc`` and ``contextlib`` have.
_STANDARD_LIBRARY = (str(Path(abc.__file__).parent) + "/", "<frozen ")
