"""Ray, without starting it, and without importing it: whether somebody listens where a cluster is said to be."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from swath.cli.doctor.findings import Finding, Probe

_SECONDS = 2.0
_PORTS = {"ray://": 10001, "": 6379}


@dataclass(frozen=True)
class Ray:
    installed: bool
    #: RAY_ADDRESS.
    address: str | None
    #: Of the cluster that was last started on this machine.
    local: str | None
    #: Whether somebody listens there: at ``address``, or else at ``local``.
    answers: bool
    why_not: str | None = None


def gather_ray() -> Ray:
    installed = find_spec("ray") is not None
    address = os.environ.get("RAY_ADDRESS") or None
    local = _local_cluster()
    asked = local if address in (None, "auto", "local") else address
    if not installed or asked is None or address == "local":
        return Ray(installed, address, local, False)
    why_not = _why_nobody_answers(asked)
    return Ray(installed, address, local, why_not is None, why_not)


def _local_cluster() -> str | None:
    """Where Ray itself looks for one that runs already."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip() or None
    return None


def split_address(address: str) -> tuple[str, int]:
    """
    >>> split_address("ray://head"), split_address("10.0.0.1:6379"), split_address("[::1]:7000")
    (('head', 10001), ('10.0.0.1', 6379), ('::1', 7000))
    """
    kind = "ray://" if address.startswith("ray://") else ""
    found = re.fullmatch(r"(\[[^\]]+\]|[^:/]+)(?::(\d+))?", address.removeprefix("ray://").rstrip("/"))
    if found is None:
        raise ValueError("no address: write it as host:port, or ray://host:port")
    return found[1].strip("[]"), int(found[2] or _PORTS[kind])


def _why_nobody_answers(address: str) -> str | None:
    try:
        with socket.create_connection(split_address(address), timeout=_SECONDS):
            return None
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)


def conclude_ray(facts: Ray) -> list[Finding]:
    name = "ray"
    if not facts.installed:
        if facts.address is None:
            return []  # among what is not installed
        follows = "RAY_ADDRESS names a cluster, and RayCollector needs Ray."
        return [Finding(name, "not installed", "warning", follows, ("pip install 'swath[ray]'",))]
    if facts.address not in (None, "auto", "local"):
        if facts.answers:
            return [Finding(name, "the cluster of RAY_ADDRESS answers")]
        follows = f"RayCollector would wait for the cluster of RAY_ADDRESS, and fail ({facts.why_not})."
        mends = ("unset RAY_ADDRESS  # to start one here", "ray start --head  # on the machine that it names")
        return [Finding(name, "nobody answers at RAY_ADDRESS", "error", follows, mends)]
    if facts.local is None or facts.address == "local":
        if facts.address == "auto":
            follows = "RAY_ADDRESS=auto asks for a running cluster: RayCollector would fail."
            return [Finding(name, "no cluster", "error", follows, ("ray start --head", "unset RAY_ADDRESS"))]
        return [Finding(name, "no cluster runs here; RayCollector starts one for itself")]
    if facts.answers:
        return [Finding(name, "the cluster of this machine answers")]
    follows = f"A cluster was started here, and is gone without ray stop ({facts.why_not})."
    level = "error" if facts.address == "auto" else "warning"
    return [Finding(name, "the last cluster of this machine does not answer", level, follows, ("ray stop",))]


PROBES: tuple[Probe, ...] = (Probe("ray", gather_ray, conclude_ray),)
