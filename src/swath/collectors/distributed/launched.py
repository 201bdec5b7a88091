"""LaunchedCollector: nodes that a launcher starts, on this machine or elsewhere, and that listen to an address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from swath.collectors.distributed.arguments import NodesArguments
from swath.collectors.distributed.driver import NodesCollector
from swath.collectors.distributed.launch_options import LaunchOptions


class LaunchedArguments(NodesArguments, total=False):
    """What ``LaunchedCollector`` takes besides envs and policy, for type checkers. (A test keeps the two alike.)"""

    node_timeout_s: float
    launcher: str | None
    slurm_kwargs: Mapping[str, Any] | None
    folder: str | Path | None
    address: str | None
    tcp_port: int | str | None
    mp_start_method: str | None


class LaunchedCollector(NodesCollector):
    """Collects on nodes that are started for it. Arguments are those of ``NodesCollector``, and:

    Args:
        launcher: "mp" (the default) for processes of this machine; "submitit" for Slurm jobs; "submitit_delayed" in a
            function that ``submitit_delayed_launcher`` decorates; "folder" for nodes that ``swath node`` starts.
        slurm_kwargs: submitit's parameters for jobs.
        folder: where jobs keep their files, and where nodes find their tickets.
        address: of this machine, for nodes of others; by default only this machine can reach the collector.
        tcp_port: to listen on; by default the environment's ``TCP_PORT``, or one that is free.
        node_timeout_s: after how long without a sign of life a node, or the driver, is given up.
        mp_start_method: of "mp".
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        node_timeout_s: float = 8.0,
        launcher: str | None = None,
        slurm_kwargs: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        address: str | None = None,
        tcp_port: int | str | None = None,
        mp_start_method: str | None = None,
        **common: Unpack[NodesArguments],
    ) -> None:
        self._node_timeout_s = float(node_timeout_s)
        self._launch = LaunchOptions.resolve(launcher, slurm_kwargs, folder, address, tcp_port, mp_start_method)
        super().__init__(create_env_fn, policy, **common)
