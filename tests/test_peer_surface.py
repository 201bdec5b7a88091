"""The table of TorchRL's surface (``docs/peer-surface.md``) is true, and so is what explains it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from peer_introspection import (
    attributes_of,
    counterpart,
    difference,
    kind_differs,
    parameters_of,
    resolve,
    static_attribute,
)
from peer_surface import PAGE, Comparison, Explanations


@pytest.mark.torchrl
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_is_there() -> None:
    pytest.importorskip("torchrl")
    from peer_page import render

    comparison = Comparison(Explanations.read())
    assert comparison.problems == [], "explain it in tools/peer_surface.toml, then run: make surface"
    assert render(comparison) == PAGE.read_text(), "run: make surface"


def test_what_is_said_of_swath_is_there() -> None:
    for name in Explanations.read().mentioned():
        resolve(name)


def test_what_has_another_meaning_is_there() -> None:
    """The names that are explained as being here, as far as they are written out."""
    explanations = Explanations.read()
    modules = {area.key: list(area.modules.values()) for area in explanations.areas}
    gone = []
    for claimed in explanations.claimed():
        area, _, rest = claimed.partition(".")
        path, _, argument = rest.removesuffix(")").partition("(")
        owner, _, member = path.partition(".")
        kind = next(getattr(resolve(module), owner) for module in modules[area] if hasattr(resolve(module), owner))
        found: Any = static_attribute(kind, member) if member else kind
        if member and found is None and member not in attributes_of(kind):
            gone.append(claimed)
        elif argument and inspect.isclass(kind) and not member:
            taken = {name: parameter for name, (_, parameter) in parameters_of(kind).items()}
            if argument not in taken and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
                gone.append(claimed)
    assert not gone


class Theirs:
    def method(self, a: int, b: int = 1, *, c: float = 2.0, d: Any = (1,), e: int = 5) -> None: ...


class Ours:
    def method(self, a: int, *, b: int = 1, c: float = 3.0, d: Any = [1], **rest: Any) -> None: ...  # noqa: B006


def test_how_a_member_differs() -> None:
    def theirs(self: Any, a: int, b: int = 1) -> None: ...
    def renamed(self: Any, first: int, b: int = 1, more: int = 2) -> None: ...
    def wants_more(self: Any, a: int, window: Any, b: int = 1, *, rng: Any) -> None: ...
    def anything(self: Any, *args: Any) -> None: ...

    assert kind_differs(theirs, theirs) == kind_differs(theirs, renamed) == kind_differs(anything, wants_more) == ""
    assert kind_differs(theirs, wants_more) == "needs `window`, `rng` here, too"
    value: Any = property(lambda self: 0)
    assert kind_differs(theirs, value) == "a method, here a property"
    assert kind_differs(value, theirs) == "a property, here a method"


def test_how_an_argument_differs() -> None:
    theirs = list(inspect.signature(Theirs.method).parameters.values())[1:]
    ours = {name: each for name, each in inspect.signature(Ours.method).parameters.items() if name != "self"}
    found = {each.name: difference(theirs, ours, each.name) for each in theirs}
    assert found == {
        "a": "",
        "b": "by keyword here",
        "c": "default `2.0`, here `3.0`",
        "d": "",
        "e": "one of `**rest`",
    }
    del ours["rest"]
    assert counterpart(theirs, ours, "e") is None


def test_explanations_are_of_what_is_there_or_not(tmp_path: Any) -> None:
    file = tmp_path / "some.toml"
    file.write_text(
        """
        [[area]]
        key = "data"
        title = "Data"
        modules = {}
        [[absent]]
        why = "no"
        names = ["data.Buffer({a,b})"]
        [[other]]
        why = "otherwise"
        names = ["data.*(*)", "data.Buffer(c)"]
        """
    )
    explanations = Explanations.read(file)

    def explained(name: str, is_there: bool | None, differs: bool = False) -> str | None:
        entry = explanations.explain([f"data.Buffer({name})"], is_there, differs)
        return entry and entry.status

    assert explained("a", False) == "absent"
    assert explained("a", True) is None
    assert explained("a", True, differs=True) == "other meaning"
    assert explained("c", True) == "other meaning"
    assert explained("c", False) is None
    assert explanations.idle() == ["data.Buffer(b)"]
