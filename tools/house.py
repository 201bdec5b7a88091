"""How big the house is, and how its rooms hang together: ``make house``.

Counts code (lines without blanks, comments and docstrings), the longest functions and files, places that touch a
private attribute of another object, and folders that import each other in a circle (but for what only type checkers
read).

Private attributes are of two kinds: of swath's own objects, which should be none, and of other libraries, which belong
into modules named ``*_internals.py``. What such a module touches is of another library. Elsewhere a name tells: it is
swath's own if some class or module of swath has it.
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
#: Documented, in spite of the underscore.
DOCUMENTED = ("os._exit", "sys._getframe")
DOCUMENTED_OF_ALL = frozenset(("_replace", "_asdict", "_fields", "_make"))  # of a NamedTuple
_OPERATORS = "torch.ops."  # of which some have such names
_INTERNALS = "_internals.py"
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


@dataclass(frozen=True)
class Touched:
    """A place that touches a private attribute of another object."""

    file: str
    line: int
    text: str
    name: str

    def is_own(self, own_names: set[str]) -> bool:
        return not self.file.endswith(_INTERNALS) and self.name in own_names

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


@dataclass
class Found:
    code: Counter[str] = field(default_factory=Counter)
    long_functions: list[str] = field(default_factory=list)
    long_files: list[str] = field(default_factory=list)
    private: list[Touched] = field(default_factory=list)
    #: Private names that swath's own classes and modules have.
    own_names: set[str] = field(default_factory=set)
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
    is_internals = name.endswith(_INTERNALS)
    if not is_internals:
        found.own_names |= _private_names(tree)
    unread = _for_type_checkers(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = len(lines & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1)))
            if body > MOST_LINES_OF_A_FUNCTION:
                found.long_functions.append(f"{name}:{node.lineno} {node.name}: {body}")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            # What the module's own classes have is its own business, whichever of their objects it is of.
            touches = not _is_self(node.value) and (is_internals or node.attr not in own)
            if touches and not _is_documented(node):
                found.private.append(Touched(name, node.lineno, ast.unparse(node), node.attr))
        elif is_internals and isinstance(node, ast.Constant) and _is_private_name(node.value):
            found.private.append(Touched(name, node.lineno, repr(node.value), str(node.value)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swath.") and node not in unread:
            found.imports[room].add(room_of(node.module or ""))


def _private_names(tree: ast.Module) -> set[str]:
    """Private names that this module's classes and functions give to what they make."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if name.startswith("_")}


def _is_private_name(value: object) -> bool:
    """Whether a string is the name of a private attribute, to be looked up."""
    return isinstance(value, str) and value.isidentifier() and value.startswith("_") and not value.endswith("_")


def _is_documented(node: ast.Attribute) -> bool:
    text = ast.unparse(node)
    return text in DOCUMENTED or node.attr in DOCUMENTED_OF_ALL or text.startswith(_OPERATORS)


def _for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """What is below ``if TYPE_CHECKING:``, which is never run."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {below for block in blocks for statement in block.body for below in ast.walk(statement)}


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
    own = [place for place in found.private if place.is_own(found.own_names)]
    others = [place for place in found.private if not place.is_own(found.own_names)]
    for title, places in (
        (f"functions of more than {MOST_LINES_OF_A_FUNCTION} lines", found.long_functions),
        (f"files of more than {MOST_LINES_OF_A_FILE} lines", found.long_files),
        ("private attributes of other objects of swath", own),
        (f"private attributes of other libraries, in {len({place.file for place in others})} files", others),
    ):
        print(f"{title}: {len(places)}")
        for place in places if arguments.all or len(places) < 15 else ():
            print(f"  {place}")
    for circle in circles(found.imports):
        print(f"folders that import each other: {', '.join(circle)}")


if __name__ == "__main__":
    main()
