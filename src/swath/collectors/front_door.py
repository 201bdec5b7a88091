"""Constructors that tell all that they take: to ``inspect.signature``, to ``help()``, and to who misspells a name."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

#: Arguments of TorchRL's collectors that are not here yet, and the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "local_init_rb": (None, True, False),
    **dict.fromkeys(
        ["weight_sync_schemes", "weight_recv_schemes", "auto_register_policy_transforms", "trajs_per_write"], (None,)
    ),
    **dict.fromkeys(["backend", "backend_options", "num_collectors", "sync"], (None,)),
}
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): ")


def explains_unknown(init: Callable[P, R]) -> Callable[P, R]:
    """A constructor whose caller is told what was probably meant by a name that it does not know.

    (Without ``**kwargs`` in its signature, which would keep type checkers from seeing a misspelt name.)
    """
    known = frozenset(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known:
            unknown = {name: kwargs.pop(name) for name in list(kwargs) if name not in known}
            _refuse(type(self), {name: value for name, value in unknown.items() if not _asks_nothing(name, value)})
        return init(self, *args, **kwargs)  # type: ignore[call-arg]

    return cast("Callable[P, R]", checked)


def _asks_nothing(name: str, value: Any) -> bool:
    return any(value is nothing for nothing in _NOT_YET.get(name, ()))


def _refuse(collector: type, unknown: Iterable[str]) -> None:
    hints = []
    for name in unknown:
        if name in _NOT_YET:
            raise TypeError(f"{collector.__name__}: {name} is not supported by this version of swath")
        near = difflib.get_close_matches(name, parameters_of(collector), n=1)
        hints.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if hints:
        raise TypeError(f"{collector.__name__} got an unknown argument: {', '.join(hints)}")


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """What a class can be made with: of its constructor, and of those that it hands further names on to."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        found = {**{each.name: each for each in own if each.kind is not each.VAR_KEYWORD}, **found}
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            break
    return found


def show_arguments(kind: type, documented_by: Sequence[type]) -> None:
    """Let ``inspect.signature`` and ``help`` know all arguments of a class."""
    parameters = parameters_of(kind)
    kind.__signature__ = inspect.Signature(sorted(parameters.values(), key=lambda each: each.kind))  # type: ignore[attr-defined]
    if not kind.__doc__ or not kind.__module__.startswith("swath."):
        return
    docs = documentation(inspect.cleandoc(kind.__doc__))
    for base in documented_by:
        docs = {**documentation(inspect.cleandoc(base.__doc__ or "")), **docs}
    kind.__doc__ = _with_arguments(kind.__doc__, {name: docs[name] for name in parameters if name in docs})


def documentation(doc: str) -> dict[str, str]:
    """The lines of a docstring about each argument.

    >>> documentation('''Says.
    ...
    ... Args:
    ...     a, b: two
    ...         things
    ...     c: one
    ... ''')
    {'a': 'two\\n        things', 'b': 'two\\n        things', 'c': 'one'}
    """
    _, _, section = doc.partition("Args:\n")
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section.split("\n"):
        if not line.startswith("    "):
            break
        if found := _ENTRY.match(line):
            names = [name.strip() for name in found[1].split(",")]
            entries |= dict.fromkeys(names, line[found.end() :])
        else:
            entries |= {name: f"{entries[name]}\n{line}" for name in names}
    return entries


def _with_arguments(doc: str, entries: dict[str, str]) -> str:
    """A docstring whose section on arguments has these."""
    doc = inspect.cleandoc(doc)
    section = "Args:\n" + "".join(f"    {name}: {text}\n" for name, text in entries.items())
    before, found, rest = doc.partition("Args:\n")
    if not found:
        before, _, rest = doc.partition("\n\n")
        return f"{before}\n\n{section}\n{rest}"
    lines = rest.split("\n")
    own = next((i for i, line in enumerate(lines) if not line.startswith("    ")), len(lines))
    return before + section + "\n".join(lines[own:])
