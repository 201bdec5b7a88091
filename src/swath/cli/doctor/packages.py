"""Versions: of what is installed, and of what swath supports, as its own metadata has it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from swath import __version__
from swath.cli.doctor.findings import Finding, Probe

#: Extras that are for who develops swath.
_NOT_FOR_USERS = ("docs", "test")
#: Other packages that people ask about; any version will do.
_ALSO = ("stable-baselines3", "tensorboard", "wandb", "mlflow", "vmas")
#: What matters only where another one is installed: ``dm_control`` does not run with MuJoCo 4, envs of Gymnasium do.
_ONLY_WITH = {"mujoco": "dm-control", "shimmy": "dm-control", "matplotlib": ""}


@dataclass(frozen=True)
class Requirement:
    """Of a package; ``extra`` is the one of swath's that has it."""

    name: str
    versions: str
    extra: str | None = None


@dataclass(frozen=True)
class Package:
    name: str
    installed: str | None
    #: Empty where any will do.
    supported: str = ""
    extra: str | None = None


@dataclass(frozen=True)
class Packages:
    swath: str
    packages: tuple[Package, ...]
    #: False where swath runs from its source, uninstalled: then nobody says what it supports.
    has_metadata: bool
    #: Files of the current folder that are imported instead of a package, where Python looks there first.
    hidden_by: tuple[str, ...] = ()


def parse_requirement(text: str) -> Requirement:
    """A requirement as metadata has it. (Only what our own has: ``packaging`` need not be there.)

    >>> parse_requirement("ray<3,>=2.60; extra == 'ray'")
    Requirement(name='ray', versions='<3,>=2.60', extra='ray')
    >>> parse_requirement("shimmy[dm-control]>=2 ; extra == 'dm-control'")
    Requirement(name='shimmy', versions='>=2', extra='dm-control')
    """
    what, _, marker = text.partition(";")
    found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(\[[^\]]*\])?\s*\(?([^)]*)\)?", what)
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    assert found is not None, text
    name = re.sub(r"[-_.]+", "-", found[1]).lower()
    return Requirement(name, found[3].replace(" ", ""), extra[1] if extra else None)


def is_within(version: str, versions: str) -> bool:
    """
    >>> is_within("2.13.0+cpu", ">=2.5"), is_within("0.15.0", "<0.15,>=0.14.1"), is_within("3.0rc1", "<3")
    (True, False, False)
    """
    have = _numbers(version)
    for part in filter(None, versions.split(",")):
        found = re.match(r"(>=|<=|==|!=|>|<)(.+)", part)
        if found is None:
            continue
        wanted = _numbers(found[2])
        length = max(len(have), len(wanted))
        a, b = (have + [0] * (length - len(have))), (wanted + [0] * (length - len(wanted)))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b}[found[1]]:
            return False
    return True


def _numbers(version: str) -> list[int]:
    """Of a release; a candidate counts as what it is one for."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else [0]


def gather_packages() -> Packages:
    try:
        lines = metadata.requires("swath")
    except metadata.PackageNotFoundError:
        lines = None
    wanted = [parse_requirement(line) for line in lines or _NAMES]
    packages: dict[str, Package] = {}
    for one in wanted:
        if one.extra in _NOT_FOR_USERS or (one.name in packages and not one.versions):
            continue
        packages[one.name] = Package(one.name, _installed(one.name), one.versions, one.extra)
    for name in _ALSO:
        packages.setdefault(name, Package(name, _installed(name), extra=""))
    return Packages(__version__, tuple(packages.values()), lines is not None, _hiding(packages))


#: Without metadata.
_NAMES = (
    *("torch", "tensordict", "gymnasium", "numpy", "cloudpickle", "rich"),
    *(f"{name}; extra == '{name}'" for name in ("torchrl", "ray", "submitit", "envpool", "ale-py", "mujoco")),
    *(f"{name}; extra == '{name}'" for name in ("dm-control", "shimmy", "pettingzoo", "mpe2")),
)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _hiding(names: Iterable[str]) -> tuple[str, ...]:
    """``random.py`` beside a script is imported wherever anybody, torch too, imports ``random``."""
    modules = {name.replace("-", "_") for name in names} | sys.stdlib_module_names | {"swath"}
    try:
        return tuple(sorted(file for file in os.listdir() if file.endswith(".py") and Path(file).stem in modules))
    except OSError:
        return ()


def conclude_packages(facts: Packages) -> list[Finding]:
    by_name = {package.name: package for package in facts.packages}
    needed = [package for package in facts.packages if package.extra is None]
    others = [package for package in facts.packages if package.extra is not None]
    source = "" if facts.has_metadata else " (not installed: what it supports is not known)"
    findings = [Finding("swath", facts.swath + source)]
    findings += _needed(needed)
    there = [package for package in others if package.installed is not None]
    findings += [found for package in there if (found := _wrong_extra(package, by_name)) is not None]
    wrong = {found.name for found in findings}
    fine = [f"{package.name} {package.installed}" for package in there if package.name not in wrong]
    if fine:
        findings.append(Finding("optional packages", ", ".join(fine)))
    missing = [package.name for package in others if package.installed is None]
    if missing:
        findings.append(Finding("not installed", ", ".join(missing)))
    if facts.hidden_by:
        files = ", ".join(facts.hidden_by[:5])
        follows = "Programs in this folder import these files instead of the modules that have the same names."
        mend = tuple(f"mv {file} my_{file}" for file in facts.hidden_by[:5])
        findings.append(Finding("hiding modules", files, "warning", follows, mend))
    return findings


def _needed(packages: Iterable[Package]) -> list[Finding]:
    """Those that are as they should be on one line."""
    wrong = {package.name: found for package in packages if (found := _wrong_need(package)) is not None}
    fine = [f"{package.name} {package.installed}" for package in packages if package.name not in wrong]
    return [*([Finding("packages", ", ".join(fine))] if fine else []), *wrong.values()]


def _wrong_need(package: Package) -> Finding | None:
    mend = (f"pip install '{package.name}{package.supported}'",)
    if package.installed is None:
        return Finding(package.name, "not installed", "error", "swath cannot be imported.", mend)
    if is_within(package.installed, package.supported):
        return None
    value = f"{package.installed}, and swath needs {package.supported}"
    return Finding(package.name, value, "error", "swath was never run with it.", mend)


def _wrong_extra(package: Package, by_name: dict[str, Package]) -> Finding | None:
    partner = by_name.get(_ONLY_WITH.get(package.name, package.name))
    is_asked_for = partner is not None and partner.installed is not None
    if not is_asked_for or is_within(package.installed or "", package.supported):
        return None
    value = f"{package.installed}, and swath supports {package.supported}"
    follows = "What swath does with it was tested with other versions."
    return Finding(package.name, value, "warning", follows, (f"pip install 'swath[{package.extra}]'",))


PROBES: tuple[Probe, ...] = (Probe("packages", gather_packages, conclude_packages),)
