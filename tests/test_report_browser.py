"""The report in a real browser: nothing in the console, nothing fetched, charts that are drawn, pages that fit.

What was seen is kept in build/report.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import Chromium, find_chromium
from swath.collectors import Collector, MultiSyncCollector
from swath.envs import GymEnv, SerialEnv
from swath.insight.report import Run, report_page
from swath.insight.report.lanes import Lanes

pytestmark = [pytest.mark.browser, pytest.mark.processes]
PICTURES = Path(__file__).parents[1] / "build" / "report"
#: Of the colours that are in a canvas, how many pixels each has.
_COLOURS_IN_CANVAS = """
(() => {
  const canvas = document.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = {};
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255) { const key = [data[i], data[i + 1], data[i + 2]]; found[key] = (found[key] || 0) + 1; }
  return found;
})()
"""
_CHARTS = """
[...document.querySelectorAll(".plot path.line, .plot path.dots")]
  .map((each) => [each.classList[0], each.getBoundingClientRect().width])
"""
#: Text that is cut, or over other text.
_CUT = """
[...document.querySelectorAll("h1, h2, p, dd, dt, b, figcaption, .entry, .tile span, button")]
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline")
  .map((each) => each.textContent)
"""
_OVERLAPPING_LABELS = """
[...document.querySelectorAll(".xs, .ys")].flatMap((axis) => {
  const boxes = [...axis.querySelectorAll("span")].map((each) => each.getBoundingClientRect());
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  const isOver = (box, at) => boxes.some((other, number) => number < at && touch(box, other));
  return boxes.filter(isOver).map(() => axis.className);
})
"""


@pytest.fixture
def browser() -> Iterator[Chromium]:
    if find_chromium() is None:
        pytest.skip("no Chromium: make test-browser installs it, or says how")
    with Chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    single = Collector(SerialEnv(4, lambda: GymEnv("CartPole-v1")), frames_per_batch=400, total_frames=8000)
    several = MultiSyncCollector(["CartPole-v1"] * 4, frames_per_batch=400, total_frames=8000, num_workers=2)
    for name, collector in (("single", single), ("workers", several)):
        with collector.report(folder / f"{name}.html"):
            for _ in collector:
                collector.update_policy_weights_()
    (folder / "empty.html").write_text(report_page(Run({"env": "CartPole-v1"}, lanes=Lanes.of_events([]))))
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["single", "workers", "empty"])
def test_it_opens_and_fits(browser: Chromium, reports: dict[str, Path], name: str) -> None:
    for width, dark in itertools.product((390, 1600), (False, True)):
        page = browser.open(reports[name], width=width, dark=dark)
        page.screenshot(PICTURES / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert page.errors == []
        assert page.requests == [reports[name].as_uri()]  # (of data: there is no request)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(_CUT) == []
        assert page.evaluate(_OVERLAPPING_LABELS) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128") == dark
        if name != "empty":
            assert {"line", "dots"} <= {kind for kind, width in page.evaluate(_CHARTS) if width > 100}
            colours = page.evaluate(_COLOURS_IN_CANVAS)
            assert len(colours) > 4
            assert max(colours.values()) > 1000


def test_the_timeline_can_be_zoomed_moved_and_pointed_at(browser: Chromium, reports: dict[str, Path]) -> None:
    page = browser.open(reports["workers"], width=1200)

    def seen() -> Any:
        return page.evaluate("document.querySelector('canvas').toDataURL()")

    def press(what: str) -> Any:
        before = seen()
        page.evaluate(f"new Promise(done => {{ {what}; requestAnimationFrame(() => requestAnimationFrame(done)); }})")
        return seen() != before

    canvas = "document.querySelector('canvas')"
    whole = seen()
    assert press("document.querySelector('[data-do=in]').click()")
    assert press(f"{canvas}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowRight'}}))")
    assert press(f"{canvas}.dispatchEvent(new WheelEvent('wheel', {{deltaY: -50, ctrlKey: true, cancelable: true}}))")
    assert not press(f"{canvas}.dispatchEvent(new WheelEvent('wheel', {{deltaY: -50}}))")  # the page scrolls
    assert press("document.querySelector('[data-do=all]').click()")
    assert seen() == whole
    page.evaluate(f"{canvas}.scrollIntoView({{block: 'center'}})")
    box = page.evaluate(f"{canvas}.getBoundingClientRect().toJSON()")
    tips = set()
    for lane in range(3):
        page.move_mouse(box["x"] + box["width"] * 0.6, box["y"] + 26 + 30 * lane + 12)
        if not page.evaluate("document.querySelector('.tip').hidden"):
            tips.add(page.evaluate("document.querySelector('.tip').textContent").split(" at ")[0])
    assert {"worker 0", "worker 1"} <= tips
    assert page.errors == []


def test_who_changes_to_dark_gets_it_at_once(browser: Chromium, reports: dict[str, Path]) -> None:
    page = browser.open(reports["workers"], width=800)
    light = page.evaluate(_COLOURS_IN_CANVAS)
    page.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert set(page.evaluate(_COLOURS_IN_CANVAS)) != set(light)


def test_text_that_looks_like_a_script_is_none(browser: Chromium, tmp_path: Path) -> None:
    evil = "</script><script>console.error('run')</script><img src=x onerror=console.error('run')>"
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": evil}},
        {"ph": "X", "name": evil, "pid": 1, "tid": 1, "ts": 0, "dur": 5000},
    ]
    (tmp_path / "run.html").write_text(report_page(Run({"env": evil, "command": evil}, lanes=Lanes.of_events(events))))
    page = browser.open(tmp_path / "run.html", width=390)
    assert page.errors == []
    assert page.requests == [(tmp_path / "run.html").as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
