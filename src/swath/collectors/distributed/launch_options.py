"""Where nodes run and how they are started, as a collector was asked for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swath.addresses import LOOPBACK, is_loopback
from swath.collectors.distributed.launchers import Launcher, make_launcher


@dataclass(frozen=True)
class LaunchOptions:
    """See ``LaunchedCollector``."""

    name: str
    slurm_kwargs: Mapping[str, Any] | None
    folder: str | Path | None
    address: str
    tcp_port: int
    mp_start_method: str | None

    @classmethod
    def resolve(
        cls,
        launcher: str | None,
        slurm_kwargs: Mapping[str, Any] | None,
        folder: str | Path | None,
        address: str | None,
        tcp_port: int | str | None,
        mp_start_method: str | None,
    ) -> LaunchOptions:
        port = os.environ.get("TCP_PORT", 0) if tcp_port is None else tcp_port
        return cls(launcher or "mp", slurm_kwargs, folder, address or LOOPBACK, int(port), mp_start_method)

    def launcher(self, who: str) -> Launcher:
        made = make_launcher(
            self.name, folder=self.folder, slurm_kwargs=self.slurm_kwargs, start_method=self.mp_start_method
        )
        if made.leaves_machine and self.name == "submitit" and is_loopback(self.address):
            raise ValueError(
                f"{who}: jobs of a Slurm cluster cannot reach {self.address}; give address=, the name or address of "
                "this machine that they can reach, and secret="
            )
        return made
