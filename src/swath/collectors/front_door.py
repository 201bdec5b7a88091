"""Constructors that tell all that they take: to ``inspect.signature``, to ``help()``, and to who misspells a name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from swath import hints
from swath.hints import parameters_of

P = ParamSpec("P")
R = TypeVar("R")

#: Arguments of TorchRL's collectors that are not here yet, and the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "local_init_rb": (None, True, False),
    "weight_recv_schemes": (None,),
    **dict.fromkeys(["backend", "backend_options", "num_collectors", "sync"], (None,)),
}
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): ")


def explains_unknown(init: Callable[P, R]) -> Callable[P, R]:
    """A collector's constructor whose caller is told what was probably meant by a name that it does not know."""
    return hints.explains_unknown(init, _refused)


def _refused(collector: type, unknown: dict[str, Any]) -> dict[str, Any]:
    """All but those of TorchRL's that ask for nothing."""
    refused = {name: value for name, value in unknown.items() if not _asks_nothing(name, value)}
    for name in refused:
        if name in _NOT_YET and hints.argument_hint(collector, name) is None:
            raise TypeError(f"{collector.__name__}: {name} is not supported by this version of swath")
    return refused


def _asks_nothing(name: str, value: Any) -> bool:
    return any(value is nothing for nothing in _NOT_YET.get(name, ()))


def needs_sync(kind: type, kwargs: Mapping[str, Any]) -> TypeError:
    """Of a call without it: which is for what, and what else is wrong with the call."""
    needs = (
        f"{kind.__name__} needs sync=True or sync=False: True for batches of all envs, collected with the same weights "
        "(PPO, A2C), False for one worker's at a time, as they come (DQN, SAC)"
    )
    unknown = kwargs.keys() - parameters_of(kind)
    return TypeError(f"{hints.unknown_arguments(kind, sorted(unknown))}; and {needs}" if unknown else needs)


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
