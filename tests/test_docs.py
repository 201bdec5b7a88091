"""Every Python block in the README and the docs runs, in order, page by page."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def with_marks(page: Path) -> Any:
    return pytest.param(page, marks=pytest.mark.ray if "RayCollector(" in page.read_text() else ())


@pytest.mark.processes
@pytest.mark.parametrize("page", [*map(with_marks, PAGES)], ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("ray") is not None:
        request.getfixturevalue("cluster")
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = "\n" * line + match.group(1)
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("module_name", "page"),
    [
        ("swath.collectors", "collectors"),
        ("swath.collectors.distributed", "distributed"),
        ("swath.envs", "envs"),
        ("swath.data", "data"),
        ("swath.weight_update", "weight_update"),
        ("swath.modules", "modules"),
        ("swath.errors", "errors"),
        ("swath.testing", "testing"),
        ("swath.tuning", "tuning"),
    ],
)
def test_every_public_name_is_in_the_reference(module_name: str, page: str) -> None:
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    if f"automodule:: {module_name}\n" in text:
        return
    names = importlib.import_module(module_name).__all__
    missing = [name for name in names if not name.startswith("_") and not re.search(rf"\b{name}\b", text)]
    assert not missing, f"docs/api/{page}.md does not have {missing}"


def test_every_page_is_in_the_site() -> None:
    indexes = [ROOT / "docs" / "index.md", ROOT / "docs" / "api" / "index.md"]
    listed = {
        (index.parent / (entry.group(1) or entry.group(0))).with_suffix(".md")
        for index in indexes
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", index.read_text(), re.DOTALL | re.MULTILINE)
        for entry in re.finditer(r"^(?:.*<(\S+)>|[\w/-]+)$", tree, re.MULTILINE)
    }
    assert set((ROOT / "docs").rglob("*.md")) - listed == {indexes[0]}


@pytest.mark.processes
def test_pictures_are_as_they_are_drawn(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "pictures"
    subprocess.run([sys.executable, folder / "draw.py", tmp_path], check=True, timeout=60)
    drawn = {picture.name: picture.read_text() for picture in tmp_path.glob("*.svg")}
    there = [picture for picture in folder.glob("*.svg") if not picture.name.startswith("learning-")]  # see make learn
    assert drawn == {picture.name: picture.read_text() for picture in there}
