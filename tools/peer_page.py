"""The page of the docs that says what of TorchRL's surface is here: one table a class, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torchrl

from peer_surface import ABSENT, OTHER, PRESENT, UNEXPLAINED, Comparison, Item, Section

_HERE = {PRESENT: "yes", OTHER: "otherwise", ABSENT: "no", UNEXPLAINED: "?"}
_ORDER = list(_HERE)


def own_items(comparison: Comparison) -> dict[tuple[str, str], list[Item]]:
    """What is not as in the class that it is inherited from, by section."""
    known = {
        (f"{section.area}.{section.name}", item.member, item.argument): (item.status, item.note)
        for section in comparison.sections
        for item in section.items
    }
    return {
        (section.area, section.name): [
            item
            for item in section.items
            if known.get((item.inherited, item.member, item.argument)) != (item.status, item.note)
            and (section.items[0].status is not ABSENT or item is section.items[0])
        ]
        for section in comparison.sections
    }


def _kind(item: Item) -> str:
    if item.argument:
        return "arguments"
    return "methods and properties" if item.member and not item.member.startswith("(") else "classes and functions"


def counts(items: Iterable[Item]) -> dict[str, Counter[str]]:
    """How many of each kind there are, by status."""
    found: dict[str, Counter[str]] = {}
    for item in items:
        found.setdefault(_kind(item), Counter())[item.status] += 1
    return found


def render(comparison: Comparison) -> str:
    """The page."""
    own = own_items(comparison)
    lines = [
        "# TorchRL's surface",
        "",
        "<!-- Written by `make surface` (tools/peer_surface.py), with what tools/peer_surface.toml explains. -->",
        "",
        f"Every public class, method, property and argument of torchrl {torchrl.__version__}, in the areas below, and",
        "whether swath has it. Both packages were asked. What is present has the same name; an argument also the same",
        "default, and the same position where it can be given by position. What is inherited, and is here as in the",
        "class that it is of, is counted and named once; of a class that is not here the class alone is counted. What",
        "these things do is on the other pages, and where TorchRL does something else, in",
        "[differences](differences.md).",
        "",
        *_summary(comparison, own),
    ]
    for area in comparison.explanations.areas:
        lines += ["", f"## {area.title}", ""]
        lines += [f"`{theirs}`, here `{ours}`  " for theirs, ours in area.modules.items()]
        groups = [group for group in comparison.explanations.out_of_scope if group["area"] == area.key]
        if groups:
            lines += ["", "Not compared:", ""]
            lines += [f"- {_names(group['names'])}: {group['why']}" for group in groups]
        sections = [section for section in comparison.sections if section.area == area.key]
        for section in sections:
            lines += _table(section, own[section.area, section.name])
    return "\n".join(lines) + "\n"


def _summary(comparison: Comparison, own: Mapping[tuple[str, str], list[Item]]) -> Iterator[str]:
    yield "| | there are | present | otherwise | not here, with a reason |"
    yield "|---|---:|---:|---:|---:|"
    everything = [item for items in own.values() for item in items]
    for area in comparison.explanations.areas:
        items = [item for (key, _), found in own.items() if key == area.key for item in found]
        for kind, found in counts(items).items():
            yield _counted(f"{area.title}: {kind}", found)
    yield _counted("**all**", Counter(item.status for item in everything))


def _counted(title: str, found: Counter[str]) -> str:
    return (
        f"| {title} | {found.total():,} | " + " | ".join(f"{found[each]:,}" for each in (PRESENT, OTHER, ABSENT)) + " |"
    )


def _table(section: Section, items: Sequence[Item]) -> Iterator[str]:
    whole = section.items[0]
    yield from ("", f"### {section.name}", "")
    if whole.status is not PRESENT:
        yield f"{_HERE[whole.status].capitalize()}: {whole.note}"
        if whole.status is ABSENT or len(items) == 1:
            return
        yield ""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        if item is not whole:
            groups.setdefault((item.status, item.note), []).append(item)
    inherited = Counter(item.inherited for item in section.items if item not in items)
    if not groups and not inherited:
        yield "Here, with nothing to be given and no public methods of its own." if whole.status is PRESENT else ""
        return
    yield "| here | arguments | methods and properties |"
    yield "|---|---|---|"
    for (status, note), found in sorted(groups.items(), key=lambda each: _ORDER.index(each[0][0])):
        there = f"{_HERE[status]}: {note}" if note else _HERE[status]
        given = [item.argument for item in found if not item.member]
        yield f"| {there} | {_names(given)} | {', '.join(_members(item for item in found if item.member))} |"
    for base, count in inherited.items():
        yield f"| as in `{base.partition('.')[2]}` | | {count} more |"


def _members(items: Iterable[Item]) -> Iterator[str]:
    """Methods with those of their arguments that belong to the same row."""
    arguments: dict[str, list[str]] = {}
    itself: set[str] = set()
    for item in items:
        found = arguments.setdefault(item.member, [])
        if item.argument:
            found.append(item.argument)
        else:
            itself.add(item.member)
    for member, given in arguments.items():
        text = member if member in itself and not given else f"{member}({', '.join(given)})"
        yield text if text.startswith("(") else f"`{text}`"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
