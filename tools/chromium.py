"""A page in a real browser: Chromium without a window, told what to do through a pipe (the DevTools protocol).

with Chromium() as browser:
    page = browser.open(path, width=390, dark=True)
    assert not page.errors
    page.screenshot(picture)
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 60.0


def find_chromium() -> str | None:
    """The program, if there is one."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """A page that was opened.

    Args:
        errors: what the console said of errors and warnings, and exceptions that nobody caught.
        requests: every address that was asked for.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._browser = browser
        self._session = session

    def evaluate(self, expression: str) -> Any:
        """The value of some JavaScript."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path, selector: str | None = None, height: int | None = None) -> Path:
        """Of the whole page, or its first pixels, or one element of it."""
        area = "document.documentElement" if selector is None else f"document.querySelector({json.dumps(selector)})"
        box = self.evaluate(f"(({area}).getBoundingClientRect()).toJSON()")
        clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": height or box["height"], "scale": 1}
        found = self.tell("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def move_mouse(self, x: float, y: float) -> None:
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.tell(method, self._session, **parameters)

    def note(self, event: dict[str, Any]) -> None:
        """Something that the browser tells of this page."""
        what, said = event["method"], event["params"]
        if what == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"]["exception"].get("description", "an exception"))
        elif what == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif what == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value")) for each in said["args"]))
        elif what == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])


class Chromium:
    """A browser of its own, with a new profile, until the end of a ``with`` block."""

    def __init__(self) -> None:
        program = find_chromium()
        if program is None:
            raise FileNotFoundError("there is no Chromium here: apt-get install --no-install-recommends chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="swath-chromium-", ignore_cleanup_errors=True)
        self._pages: dict[str, Page] = {}
        self._numbers = itertools.count(1)
        self._left = b""
        told, self._to = os.pipe()
        self._from, tells = os.pipe()
        # It reads from descriptor 3 and writes to 4. (A shell puts them there: they may be taken in this process.)
        command = [program, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{told} 4>&{tells}', "bash", *command],
            pass_fds=(told, tells), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(told)
        os.close(tells)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1.0) -> Page:
        """A file, once it has loaded and drawn itself."""
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.tell(f"{domain}.enable")
        page.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        page.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.tell("Page.navigate", url=path.resolve().as_uri())
        page.evaluate(
            "new Promise(done => { const drawn = () => requestAnimationFrame(() => requestAnimationFrame(done));"
            "document.readyState === 'complete' ? drawn() : addEventListener('load', drawn); })"
        )
        return page

    def tell(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Let it do something; what it answers."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer and answer.get("sessionId") in self._pages:
                self._pages[answer["sessionId"]].note(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._left:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has not answered for {_SECONDS:.0f} s")
            read = os.read(self._from, 1 << 16)
            if not read:
                raise ConnectionError(f"the browser has ended, with exit code {self._process.wait()}")
            self._left += read
        first, _, self._left = self._left.partition(b"\0")
        return json.loads(first)

    def close(self) -> None:
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


if __name__ == "__main__":  # where it is; fails if there is none
    print(find_chromium() or "there is no Chromium here")
    sys.exit(find_chromium() is None)
