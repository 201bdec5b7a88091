"""What TorchRL's collectors, buffers and envs have, and whether swath has it: ``make surface``.

Both packages are asked: every public class, method, property and argument of TorchRL's is looked up in swath, with its
default and its position. What swath has under the same name, with the same default, is present. All else is explained
in ``peer_surface.toml``, or this fails. What comes out is a page of the docs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from peer_introspection import (
    arguments_of,
    attribute_of_module,
    attributes_of,
    counterpart,
    difference,
    kind_differs,
    members_of,
    named,
    parameters_of,
    public_names,
    resolve,
    static_attribute,
)

ROOT = Path(__file__).parent.parent
EXPLANATIONS = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "peer-surface.md"

PRESENT, OTHER, ABSENT, UNEXPLAINED = "present", "other meaning", "absent", "unexplained"
_BRACES = re.compile(r"\{([^{}]*)\}")
_MENTION = re.compile(r"`(swath(?:\.\w+)+)`")


@dataclass(frozen=True)
class Area:
    """Modules whose public names are compared, under one heading."""

    key: str
    title: str
    #: TorchRL's, and where swath has the same names.
    modules: Mapping[str, str]
    #: The only names that are compared; all, if there are none.
    only: Sequence[str] = ()


@dataclass
class Explanation:
    """Why some things are not here, or not as they are there."""

    status: str
    note: str
    patterns: tuple[str, ...]
    #: What swath has instead.
    instead: str | None = None
    #: Whether it also is one for what inherits this.
    is_inherited: bool = True
    used: set[str] = field(default_factory=set)

    def covers(self, key: str, in_full: bool) -> str | None:
        """The pattern that is for this name; ``in_full``: without a wildcard."""
        fitting = (pattern for pattern in self.patterns if fnmatchcase(key, pattern))
        return next((pattern for pattern in fitting if not in_full or "*" not in pattern), None)


@dataclass
class Explanations:
    areas: tuple[Area, ...]
    out_of_scope: list[dict[str, Any]]
    #: Of what here is called like a class but makes objects of another: which.
    objects: dict[str, str]
    entries: list[Explanation]

    @classmethod
    def read(cls, path: Path = EXPLANATIONS) -> Explanations:
        data = tomllib.loads(path.read_text())
        entries = [
            Explanation(status, each["why"], tuple(itertools.chain.from_iterable(map(_expanded, each["names"]))),
                        each.get("instead"), each.get("is_inherited", True))
            for status, table in ((OTHER, "other"), (ABSENT, "absent"))
            for each in data.get(table, ())
        ]  # fmt: skip
        return cls(
            tuple(Area(**area) for area in data["area"]), data.get("out_of_scope", []), data.get("objects", {}), entries
        )

    def explain(self, keys: Sequence[str], is_there: bool | None, differs: bool = False) -> Explanation | None:
        """The first explanation of something, the most particular name first.

        ``is_there``: None, if ``**`` may take it. What does not differ by its looks is explained by its full name only.
        """
        for key in keys:
            for entry in self.entries:
                if is_there and entry.status is ABSENT:
                    continue
                if is_there is False and entry.status is OTHER and entry.instead is None:
                    continue
                if not entry.is_inherited and key != keys[0]:
                    continue
                if pattern := entry.covers(key, in_full=bool(is_there) and not differs):
                    entry.used.add(pattern)
                    return entry
        return None

    def idle(self) -> list[str]:
        """Patterns that explained nothing."""
        return [p for entry in self.entries for p in entry.patterns if p not in entry.used]

    def mentioned(self) -> Iterator[str]:
        """Things of swath that are spoken of, with their dotted names."""
        texts = [entry.note for entry in self.entries] + [group["why"] for group in self.out_of_scope]
        yield from (name for text in texts for name in _MENTION.findall(text))
        yield from (entry.instead for entry in self.entries if entry.instead)
        yield from self.objects.values()

    def claimed(self) -> Iterator[str]:
        """Names that are explained as being here with another meaning, those that have no wildcard."""
        for entry in self.entries:
            if entry.status is OTHER and entry.instead is None:
                yield from (pattern for pattern in entry.patterns if "*" not in pattern)


def _expanded(pattern: str) -> list[str]:
    """
    >>> _expanded("data.{Storage,Sampler}.{save,load}")
    ['data.Storage.save', 'data.Storage.load', 'data.Sampler.save', 'data.Sampler.load']
    """
    if not (found := _BRACES.search(pattern)):
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [each for choice in found[1].split(",") for each in _expanded(f"{before}{choice.strip()}{after}")]


class Item(NamedTuple):
    """Something public of TorchRL's, and what became of it here."""

    #: Of which class or function, of which method, which argument.
    owner: str
    member: str
    argument: str
    status: str
    note: str
    #: The listed class that it is of, if it is inherited.
    inherited: str = ""


@dataclass
class Section:
    """A class or a function."""

    area: str
    name: str
    items: list[Item]


class Comparison:
    """All sections, and what is wrong with the explanations."""

    def __init__(self, explanations: Explanations) -> None:
        self.explanations = explanations
        self.sections: list[Section] = []
        self.problems: list[str] = []
        self._listed: dict[type, str] = {}
        for area in explanations.areas:
            self._compare(area)
        self.problems += [f"explained, but swath has it as TorchRL has it: {name}" for name in explanations.idle()]

    def _compare(self, area: Area) -> None:
        names: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for theirs, ours in area.modules.items():
            module = importlib.import_module(theirs)
            for name in public_names(module):
                value = getattr(module, name)
                if hasattr(module, "__all__") or getattr(value, "__module__", "") == theirs:
                    names.setdefault(name, (value, []))[1].append((theirs, ours))
        in_scope = {name: found for name, found in names.items() if not self._is_out(area, name)}
        # Bases first, so that what is inherited is known.
        order = sorted(in_scope, key=lambda name: (_depth(in_scope[name][0], in_scope), name))
        made = {name: self._section(area, name, *in_scope[name]) for name in order}
        self.sections += [made[name] for name in sorted(made, key=str.lower)]

    def _is_out(self, area: Area, name: str) -> bool:
        if area.only:
            return name not in area.only
        return any(name in group["names"] for group in self.explanations.out_of_scope if group["area"] == area.key)

    def _section(self, area: Area, name: str, theirs: Any, places: Sequence[tuple[str, str]]) -> Section:
        key = f"{area.key}.{name}"
        section = Section(area.key, name, [])
        if inspect.isclass(theirs):
            self._listed[theirs] = key
        ours = None
        for their_module, our_module in places:
            found = attribute_of_module(our_module, name)
            is_first = (their_module, our_module) == places[0]
            if found is None and not is_first and ours is None:
                continue
            item = self._item(name, "", "", [key if is_first else f"{their_module}.{name}"], found is not None)
            if is_first or found is None:
                section.items.append(item if is_first else item._replace(member=f"(in {their_module})"))
            ours = ours if ours is not None else found
        whole = section.items[0]
        if ours is None and self.explanations.explain([key], False) is not None:
            instead = self.explanations.explain([key], False).instead  # type: ignore[union-attr]
            ours = resolve(instead) if instead else None
        if inspect.isclass(theirs):
            section.items += self._class_items(key, theirs, ours, whole)
        elif callable(theirs) and inspect.isroutine(theirs):
            section.items += self._argument_items(name, "", [key], arguments_of(theirs), ours, whole)
        return section

    def _class_items(self, key: str, theirs: type, ours: Any, whole: Item) -> Iterator[Item]:
        name = whole.owner
        given = parameters_of(theirs)
        if inspect.isclass(ours):
            taken = {argument: parameter for argument, (_, parameter) in parameters_of(ours).items()}
        else:
            taken = arguments_of(ours)  # a function that makes one
        listed = named(parameter for _, parameter in given.values())
        for argument in (each.name for each in listed):
            base = given[argument][0]
            bases = [base] if "__init__" not in vars(theirs) or base is not theirs else []
            keys = [f"{k}({argument})" for k in self._keys(key, theirs, bases)]
            yield self._argument(name, "", argument, keys, listed, taken, whole)._replace(
                inherited=self._inherited(theirs, base) if base is not theirs else ""
            )
        made = resolve(self.explanations.objects[key]) if key in self.explanations.objects else ours
        for member, (base, value) in members_of(theirs, "torchrl").items():
            keys = [f"{k}.{member}" for k in self._keys(key, theirs, [base])]
            inherited = self._inherited(theirs, base)
            if ours is None:
                item = Item(name, member, "", whole.status, whole.note)
                our_value = None
            else:
                our_value = static_attribute(made, member) if inspect.isclass(made) else None
                is_there = our_value is not None or member in attributes_of(made)
                item = self._item(name, member, "", keys, is_there, kind_differs(value, our_value) if is_there else "")
            yield item._replace(inherited=inherited)
            arguments = arguments_of(value)
            for each in self._argument_items(name, member, keys, arguments, our_value, item):
                yield each._replace(inherited=inherited)

    def _keys(self, key: str, theirs: type, bases: Iterable[type]) -> list[str]:
        """The names under which something inherited may be explained."""
        own = {base for base in theirs.__mro__ if any(origin in base.__mro__ for origin in bases)}
        return [
            key,
            *(self._listed[base] for base in theirs.__mro__ if base in own - {theirs} and base in self._listed),
        ]

    def _inherited(self, theirs: type, origin: type) -> str:
        listed = [b for b in theirs.__mro__[1:] if b in self._listed and origin in b.__mro__]
        return self._listed[listed[0]] if listed else ""

    def _argument_items(
        self, name: str, member: str, keys: Sequence[str], theirs: Any, ours: Any, whole: Item
    ) -> Iterator[Item]:
        taken = arguments_of(ours) if ours is not None else None
        listed = named((theirs or {}).values())
        for argument in (each.name for each in listed):
            yield self._argument(name, member, argument, [f"{k}({argument})" for k in keys], listed, taken, whole)

    def _argument(
        self, name: str, member: str, argument: str, keys: Sequence[str], theirs: Any, taken: Any, whole: Item
    ) -> Item:
        if taken is None:  # of something that is not here, or has another kind, and so has been explained
            return Item(name, member, argument, whole.status, whole.note)
        ours = counterpart(theirs, taken, argument)
        is_there = None if ours is not None and ours.kind is ours.VAR_KEYWORD else ours is not None
        return self._item(name, member, argument, keys, is_there, difference(theirs, taken, argument))

    def _item(
        self, name: str, member: str, argument: str, keys: Sequence[str], is_there: bool | None, differs: str = ""
    ) -> Item:
        explained = self.explanations.explain(keys, is_there, bool(differs))
        if explained is not None:
            note = f"{differs}: {explained.note}" if differs else explained.note
            return Item(name, member, argument, explained.status, note)
        if is_there and not differs:
            return Item(name, member, argument, PRESENT, "")
        problem = f" ({differs})" if differs else " is not in swath"
        if not any(
            f"{UNEXPLAINED}: {key}{problem}" in self.problems for key in keys[1:]
        ):  # once, of the class it is of
            self.problems.append(f"{UNEXPLAINED}: {keys[0]}{problem}")
        return Item(name, member, argument, UNEXPLAINED, differs)


def _depth(value: Any, listed: Mapping[str, Any]) -> int:
    return len(value.__mro__) if inspect.isclass(value) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: is the page as it would be written?")
    check = parser.parse_args(arguments).check
    comparison = Comparison(Explanations.read())
    for problem in comparison.problems:
        print(problem, file=sys.stderr)
    from peer_page import render

    page = render(comparison)
    is_old = not PAGE.exists() or PAGE.read_text() != page
    if check and is_old:
        print(f"{PAGE.name} is not what would be written now: make surface", file=sys.stderr)
    elif is_old:
        PAGE.write_text(page)
        print(f"written: {PAGE}")
    return 1 if comparison.problems or (check and is_old) else 0


if __name__ == "__main__":
    sys.exit(main())
