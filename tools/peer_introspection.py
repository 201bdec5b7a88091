"""What classes and functions of two packages have, by introspection, and how an argument of one differs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NOTHING = inspect.Parameter.empty


def resolve(dotted: str) -> Any:
    """What a dotted name is: a module, something of it, something of a class."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if inspect.isclass(found) and not _has_static(found, part) and part in attributes_of(found):
                return None
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def _has_static(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__)


@functools.cache
def attributes_of(kind: type) -> frozenset[str]:
    """What objects of a class have that the class has not: what its methods assign, and fields."""
    names: set[str] = set()
    for base in kind.__mro__:
        names |= set(vars(base).get("__annotations__", ()))
        if not base.__module__.startswith(("swath", "torchrl", __name__, "test")):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
        }
    return frozenset(names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def public_names(module: Any) -> list[str]:
    return sorted(getattr(module, "__all__", None) or (n for n in dir(module) if not n.startswith("_")))


def members_of(kind: type, package: str) -> dict[str, tuple[type, Any]]:
    """Public members that a class has of its package's classes, and of which class each is."""
    found: dict[str, tuple[type, Any]] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if not name.startswith("_") and name not in found:
                found[name] = (base, value)
    foreign = _foreign_names(kind, package)
    return {
        name: found[name] for name in sorted(found)
        if found[name][0].__module__.startswith(package) and name not in foreign
    }  # fmt: skip


def _foreign_names(kind: type, package: str) -> set[str]:
    """What a tensorclass has of TensorDict, written into the class itself; its fields stay."""
    if not any(base.__name__ == "TensorClass" for base in kind.__mro__):
        return set()
    base = next(each for each in kind.__mro__ if each.__name__ == "TensorClass")
    return {name for name in dir(base) if name not in getattr(kind, "__annotations__", ())} | {
        "fields",
        "from_dataclass",
    }


def parameters_of(kind: type) -> dict[str, tuple[type, inspect.Parameter]]:
    """What a class can be made with, and whose constructor takes it: handed on by name to the next one, too."""
    found: dict[str, tuple[type, inspect.Parameter]] = {}
    makers = [name for base in kind.__mro__[:-1] for name in ("__init__", "__new__") if name in vars(base)]
    if "__signature__" in vars(kind) or makers[:1] == ["__new__"]:
        return {each.name: (kind, each) for each in inspect.signature(kind).parameters.values()}
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object or base.__module__.startswith(("torch.", "typing")):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for each in own:
            found.setdefault(each.name, (base, _with_default_of_field(base, each)))
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            break
    return found


def _with_default_of_field(kind: type, parameter: inspect.Parameter) -> inspect.Parameter:
    fields = vars(kind).get("__dataclass_fields__", {})
    if parameter.name not in fields or fields[parameter.name].default_factory is dataclasses.MISSING:
        return parameter
    return parameter.replace(default=fields[parameter.name].default_factory())


def arguments_of(function: Any) -> dict[str, inspect.Parameter] | None:
    """The arguments of a method or function, without `self`; None of what cannot be called."""
    bound = isinstance(function, (classmethod, staticmethod))
    if bound:
        function = function.__func__
    if not inspect.isroutine(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls", "_self"):
        parameters = parameters[1:]
    return {each.name: each for each in parameters}


def named(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def counterpart(
    theirs: Sequence[inspect.Parameter], ours: Mapping[str, inspect.Parameter], name: str
) -> inspect.Parameter | None:
    """Ours of that name; or what stands in its position, if that has a name that is not theirs."""
    positional = [each.name for each in theirs if each.kind is not each.KEYWORD_ONLY]
    of_ours = [each for each in named(ours.values()) if each.kind is not each.KEYWORD_ONLY]
    if name in ours:
        return ours[name]
    if name in positional and positional.index(name) < len(of_ours):
        there = of_ours[positional.index(name)]
        if there.name not in [each.name for each in theirs]:
            return there
    return next((each for each in ours.values() if each.kind is each.VAR_KEYWORD), None)


def difference(theirs: Sequence[inspect.Parameter], ours: Mapping[str, inspect.Parameter], name: str) -> str:
    """What differs between an argument of theirs and its counterpart; nothing, if calls of theirs mean the same."""
    their, our = next(each for each in theirs if each.name == name), counterpart(theirs, ours, name)
    if our is None:
        return ""
    if our.kind is our.VAR_KEYWORD:
        return f"one of `**{our.name}`"
    found = [] if our.name == name else [f"`{our.name}` here"]
    if their.default is not _NOTHING and not _same(their.default, our.default):
        found.append(f"default {_shown(their.default)}, here {_shown(our.default)}")
    positional = [each.name for each in theirs if each.kind is not each.KEYWORD_ONLY]
    of_ours = [each.name for each in named(ours.values()) if each.kind is not each.KEYWORD_ONLY]
    if name in positional and (our.name not in of_ours or of_ours.index(our.name) != positional.index(name)):
        found.append("at another position here" if our.name in of_ours else "by keyword here")
    if our.kind is our.POSITIONAL_ONLY and their.kind is not their.POSITIONAL_ONLY:
        found.append("by position here")
    return ", ".join(found)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if inspect.isclass(one) and inspect.isclass(other):
        return one.__name__ == other.__name__
    one, other = (tuple(each) if isinstance(each, list) else each for each in (one, other))
    if {type(one), type(other)} <= {int, float}:
        return one == other
    return type(one) is type(other) and (repr(one) == repr(other) or bool(one == other))


def _shown(default: Any) -> str:
    if default is _NOTHING:
        return "required"
    if inspect.isclass(default):
        return f"`{default.__name__}`"
    text = repr(default)
    if found := re.match(r"<(\w+\.\w+): ", text):  # an enum's member
        text = found[1]
    return f"`{re.sub(r' at 0x[0-9a-f]+', '', text)}`"


def attribute_of_module(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def static_attribute(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def kind_differs(theirs: Any, ours: Any) -> str:
    """What differs between a member of theirs and ours, whatever it is called with."""
    taken, given = arguments_of(theirs), None if ours is None else arguments_of(ours)
    if taken is not None and ours is not None and given is None:
        return "a method, here a property"
    if given is None:
        return ""
    return "a property, here a method" if taken is None else _also_needs(taken, given)


def _also_needs(theirs: Mapping[str, inspect.Parameter], ours: Mapping[str, inspect.Parameter]) -> str:
    """What has to be given to ours and is none of theirs: a call of theirs is a `TypeError` here."""
    listed = named(theirs.values())
    known = {each.name for name in theirs if (each := counterpart(listed, ours, name)) is not None}
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in theirs.values())
    extra = [each.name for each in named(ours.values()) if each.default is _NOTHING and each.name not in known]
    return "" if takes_any or not extra else f"needs {', '.join(f'`{name}`' for name in extra)} here, too"
