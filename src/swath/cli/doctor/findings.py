"""What a probe is, and what it finds."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from swath.cli.errors import without_paths
from swath.errors import message_of

Facts = TypeVar("Facts")
Level = Literal["ok", "warning", "error"]

#: A probe of this process that takes longer hangs: on a folder of a server that is gone, say.
SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """One line, and where something is wrong what follows from it, and the command that mends it."""

    name: str
    value: str
    level: Level = "ok"
    follows: str = ""
    #: Commands, or what else to do; one a line.
    mend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe(Generic[Facts]):
    """``conclude`` is a function of facts alone."""

    name: str
    gather: Callable[[], Facts]
    conclude: Callable[[Facts], Sequence[Finding]]


@dataclass(frozen=True)
class Result:
    """Facts are None where the probe failed."""

    findings: tuple[Finding, ...]
    facts: Any = None

    @property
    def facts_for_json(self) -> Any:
        return dataclasses.asdict(self.facts) if dataclasses.is_dataclass(self.facts) else self.facts  # type: ignore[call-overload]


def run(probe: Probe[Any], seconds: float = SECONDS) -> Result:
    """A probe that raises, or does not answer, is a line like any other."""
    results: list[Result] = []
    # A daemon: what hangs must not keep the program from ending.
    thread = threading.Thread(target=lambda: results.append(_run(probe)), name=f"probe-{probe.name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread to be had: that is one of the things to find out
        results.append(_run(probe))
    else:
        thread.join(seconds)
    if not results:
        return Result((unknown(probe.name, f"no answer within {seconds:.0f} s"),))
    return results[0]


def _run(probe: Probe[Any]) -> Result:
    try:
        facts = probe.gather()
        return Result(tuple(probe.conclude(facts)), facts)
    except Exception as error:
        return Result((unknown(probe.name, told(error)),))


def unknown(name: str, why: str) -> Finding:
    return Finding(name, f"cannot be told: {why}", "warning")


def told(error: BaseException) -> str:
    return tidy(f"{type(error).__name__}: {message_of(error)}")


def tidy(text: str) -> str:
    """The first line that says something, without paths and control characters: it may be pasted into an issue.

    >>> tidy("OSError: cannot open '/home/me/x.so'")
    "OSError: cannot open 'x.so'"
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if (home := _home()) is not None:  # it may have spaces in it, which end a path elsewhere
        line = line.replace(home, "/~")
    return re.sub(r"[\x00-\x1f\x7f]", "", without_paths(line))[:400]


def _home() -> str | None:
    try:
        home = str(Path.home())
    except RuntimeError:
        return None
    return home if len(home) > 1 else None
