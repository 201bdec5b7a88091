"""What a function's code loads, and whose code is read at all: from bytecode, nothing is run."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

import torch

#: Whose functions and classes have no weights of the user in them.
_LIBRARIES = frozenset(
    {
        "torch",
        "tensordict",
        "torchrl",
        "numpy",
        "gymnasium",
        "swath",
        "ray",
        "torchvision",
        "transformers",
        "accelerate",
    }
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = sysconfig.get_path("stdlib")
_OF_NAMES = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"}
    | {"LOAD_FROM_DICT_OR_DEREF"}
)
_OF_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


@dataclass(frozen=True, slots=True)
class Loads:
    """Of one function, with those that are written inside of it."""

    #: Globals and variables of the closure, each with the attributes that are taken of it at once.
    chains: tuple[tuple[str, ...], ...]
    #: Modules that are imported in the function: by how many dots, and name.
    imports: tuple[tuple[int, str], ...]
    #: Names of all attributes that it may take of anything, those in strings (``getattr``) as well.
    names: frozenset[str]


@functools.lru_cache(maxsize=4096)
def loads_of(code: types.CodeType) -> Loads:
    """
    >>> loads_of((lambda: nn.functional(nets.actor)).__code__).chains
    (('nets', 'actor'), ('nn', 'functional'))
    """
    every = list(_with_inner(code))
    chains = {chain for each in every for chain in _chains(each)}
    imports = {found for each in every for found in _imports(each)}
    strings = {part for each in every for text in each.co_consts if isinstance(text, str) for part in text.split(".")}
    names = {name for each in every for name in each.co_names} | {text for text in strings if text.isidentifier()}
    return Loads(tuple(sorted(chains)), tuple(sorted(imports)), frozenset(names))


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def _chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in _OF_ATTRIBUTES and chain:
            chain += (step.argval,)
        elif step.opname != "EXTENDED_ARG":
            if chain:
                yield chain
            chain = (step.argval,) if step.opname in _OF_NAMES else ()


def _imports(code: types.CodeType) -> Iterator[tuple[int, str]]:
    level = from_list = None
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield level if isinstance(level, int) else 0, step.argval or ""
        elif step.opname != "EXTENDED_ARG":
            level, from_list = from_list, step.argval


@functools.lru_cache(maxsize=4096)
def may_hold(module: str | None) -> bool:
    """Whether objects of a module's classes may have networks of the user in them.

    >>> may_hold("__main__"), may_hold("torch.nn"), may_hold("json")
    (True, False, False)
    """
    root = (module or "").partition(".")[0]
    if root in _LIBRARIES or root in sys.builtin_module_names:
        return root == "__main__"
    if root not in sys.stdlib_module_names or root not in sys.modules:
        return True
    return not _folder(root).startswith(_STANDARD)  # a program's own folder may be called "test"


@functools.lru_cache(maxsize=4096)
def is_read(module: str | None) -> bool:
    """Whether the code of a module is read: not that of packages that are installed and have nothing to do with torch.

    From one of those, names lead on and on.
    """
    root = (module or "").partition(".")[0]
    return may_hold(module) and (not _INSTALLED & set(PurePath(_folder(root)).parts) or _has_torch(root))


def _folder(root: str) -> str:
    module = sys.modules.get(root)
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), ""))


def _has_torch(root: str) -> bool:
    inside = [module for name, module in list(sys.modules.items()) if name == root or name.startswith(f"{root}.")]
    return any(value is torch or value is torch.nn for module in inside for value in list(vars(module).values()))
