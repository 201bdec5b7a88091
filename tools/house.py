"""How big the house is, and how its rooms hang together: ``make house``.

Counts code (lines without blanks, comments and docstrings), the longest functions and files, places that touch a
private attribute of another object, and folders that import each other in a circle.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "swath"
MOST_LINES_OF_A_FUNCTION = 100
MOST_LINES_OF_A_FILE = 500
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> set[int]:
    """The numbers of lines that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            doc = node.body[0]
            lines -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return lines


@dataclass
class Found:
    code: Counter[str] = field(default_factory=Counter)
    long_functions: list[str] = field(default_factory=list)
    long_files: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    imports: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def room_of(module: str) -> str:
    """The folder that a module of swath is in; a module of no folder is a room of its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "swath"


def look(found: Found, path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    name = path.relative_to(SOURCE).as_posix()
    room = name.split("/")[0].removesuffix(".py")
    lines = code_lines(source)
    found.code["/".join(name.split("/")[:-1]) or "(top)"] += len(lines)
    if (count := source.count("\n")) > MOST_LINES_OF_A_FILE:
        found.long_files.append(f"{name}: {count}")
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = len(lines & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1)))
            if body > MOST_LINES_OF_A_FUNCTION:
                found.long_functions.append(f"{name}:{node.lineno} {node.name}: {body}")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            # What the module's own classes have is its own business, whichever of their objects it is of.
            if not _is_self(node.value) and node.attr not in own:
                found.private.append(f"{name}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("swath."):
            found.imports[room].add(room_of(node.module))


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return True
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Rooms that reach each other, each group once."""
    reach = {room: {room} for room in imports}
    changed = True
    while changed:
        changed = False
        for room in imports:
            wider = set().union(*(reach.get(other, {other}) for other in (imports[room] | reach[room])))
            changed |= not wider <= reach[room]
            reach[room] |= wider
    groups = {frozenset(b for b in reach if b in reach[a] and a in reach[b]) for a in reach}
    return [sorted(group) for group in groups if len(group) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="each place, not only how many")
    arguments = parser.parse_args()
    found = Found()
    for path in sorted(SOURCE.rglob("*.py")):
        look(found, path)
    print("lines of code")
    for folder, count in sorted(found.code.items(), key=lambda item: -item[1]):
        print(f"  {folder:28}{count:7,}")
    print(f"  {'all':28}{sum(found.code.values()):7,}")
    for title, places in (
        (f"functions of more than {MOST_LINES_OF_A_FUNCTION} lines", found.long_functions),
        (f"files of more than {MOST_LINES_OF_A_FILE} lines", found.long_files),
        ("private attributes of other objects", found.private),
    ):
        print(f"{title}: {len(places)}")
        for place in places if arguments.all or len(places) < 15 else ():
            print(f"  {place}")
    for circle in circles(found.imports):
        print(f"folders that import each other: {', '.join(circle)}")


if __name__ == "__main__":
    main()
