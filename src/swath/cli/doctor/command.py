"""``swath doctor``: runs the probes, prints what they found; the exit code."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

from swath import __version__
from swath.cli.doctor import cluster, machine, packages
from swath.cli.doctor.findings import Finding, Result, run
from swath.cli.doctor.trial import Trial
from swath.cli.errors import FAILED
from swath.cli.streams import StatusLine, is_terminal, reader_may_leave

_WIDTH = 80
_NAME = 19  # the columns of a finding's name
_COLOURS = {"ok": "32", "warning": "33", "error": "31;1"}
_MARKS = {"ok": "ok", "warning": "WARN", "error": "ERROR"}


def examine(*, as_json: bool) -> int:
    """The command; its exit code."""
    stdout, screen = sys.stdout, StatusLine(sys.stderr)
    try:
        with reader_may_leave(stdout):
            levels = _as_json(stdout, screen) if as_json else _as_lines(stdout, screen)
            return FAILED if "error" in levels else 0
    except KeyboardInterrupt:
        screen.clear()
        print("swath: stopped", file=sys.stderr)
        return 130
    return 0  # whoever read the first lines knows enough


def results(screen: StatusLine) -> Iterator[tuple[str, Result]]:
    """All that was found out, as it comes. What takes long is begun first, and told last."""
    trial = Trial()
    try:
        for probe in (*machine.PROBES, *packages.PROBES, *cluster.PROBES):
            screen.show(f"looking at {probe.name}")
            yield probe.name, run(probe)
        yield from trial.results(screen.show)
    finally:
        trial.close()
        screen.clear()


def _as_lines(stdout: TextIO | None, screen: StatusLine) -> list[str]:
    levels: list[str] = []
    colours = _has_colours(stdout)
    print("swath doctor\n", file=stdout)
    for _, result in results(screen):
        screen.clear()
        for finding in result.findings:
            levels.append(finding.level)
            print("\n".join(lines_of(finding, colours)), file=stdout, flush=True)
    print(f"\n{summary(levels)}", file=stdout)
    return levels


def _as_json(stdout: TextIO | None, screen: StatusLine) -> list[str]:
    levels: list[str] = []
    findings: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for name, result in results(screen):
        facts[name] = result.facts_for_json
        for found in result.findings:
            levels.append(found.level)
            findings.append({**vars(found), "mend": list(found.mend)})
    counts = {"errors": levels.count("error"), "warnings": levels.count("warning")}
    told = {"swath": __version__, "ok": not counts["errors"], **counts, "findings": findings, "facts": facts}
    print(json.dumps(told, allow_nan=False), file=stdout)
    return levels


def summary(levels: list[str]) -> str:
    errors, warnings = levels.count("error"), levels.count("warning")
    if not errors and not warnings:
        return "Nothing is wrong."
    named = ((errors, "error"), (warnings, "warning"))
    counts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in named if count]
    follows = "collecting would fail" if errors else "collecting works"
    return f"{' and '.join(counts)}; {follows}."


def lines_of(finding: Finding, colours: bool = False) -> list[str]:
    """A finding in 80 columns; commands are not broken, so that they can be copied."""
    mark = f"{_MARKS[finding.level]:<6}"
    if colours:
        mark = f"\x1b[{_COLOURS[finding.level]}m{mark}\x1b[0m"
    indent = " " * (6 + _NAME)
    first, *rest = _wrapped(finding.value, _WIDTH - len(indent)) or [""]
    lines = [f"{mark}{finding.name:<{_NAME}}{first}".rstrip(), *(indent + line for line in rest)]
    if finding.level != "ok":
        lines += ["      " + line for line in _wrapped(finding.follows, _WIDTH - 6)]
        lines += [f"      -> {command}" for command in finding.mend]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _has_colours(stream: TextIO | None) -> bool:
    return is_terminal(stream) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
