"""DistributedCollector: nodes that are reached by ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from swath.addresses import warn_if_open
from swath.collectors.config import NodesConfig
from swath.collectors.distributed.arguments import NodesArguments
from swath.collectors.distributed.driver import NodesCollector
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.launch_options import LaunchOptions
from swath.collectors.distributed.launchers import BACKEND_VARIABLE, check_backend
from swath.collectors.distributed.meeting import body_device
from swath.collectors.distributed.process_group import ProcessGroupEngine
from swath.weight_update.nodes import DistributedWeightSyncScheme


class DistributedCollector(NodesCollector):
    """Collects on nodes that are reached by ``torch.distributed``. Arguments are those of ``NodesCollector``, and:

    Args:
        backend: "gloo", or "nccl" to let batches and weights pass through GPUs.
        launcher: "mp" (the default) for processes of this machine; "submitit" for Slurm jobs; "submitit_delayed" in a
            function that ``submitit_delayed_launcher`` decorates; "folder" for nodes that ``swath node`` starts.
        slurm_kwargs: submitit's parameters for jobs.
        folder: where jobs keep their files, and where nodes find their tickets.
        address: of this machine, for nodes of others; by default only this machine can reach the collector.
        tcp_port: to listen on; by default the environment's ``TCP_PORT``, or one that is free.
        secret: nodes must know it, too (they are told by the launcher); needed where others can reach the address.
        node_timeout_s: after how long without a sign of life a node, or the driver, is given up.
        mp_start_method: of "mp".

    >>> collector = DistributedCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=100, sync=True)
    >>> [batch.shape for batch in collector]
    [torch.Size([2, 25]), torch.Size([2, 25])]
    """

    _scheme_class = DistributedWeightSyncScheme

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        backend: str | None = None,
        secret: str | None = None,
        node_timeout_s: float = 8.0,
        launcher: str | None = None,
        slurm_kwargs: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        address: str | None = None,
        tcp_port: int | str | None = None,
        mp_start_method: str | None = None,
        **common: Unpack[NodesArguments],
    ) -> None:
        self._closed = True  # until there is something to close
        self._group_backend = backend or os.environ.get(BACKEND_VARIABLE, "gloo")
        check_backend(self._group_backend)
        self._secret = secret
        self._node_timeout_s = float(node_timeout_s)
        self._launch = LaunchOptions.resolve(launcher, slurm_kwargs, folder, address, tcp_port, mp_start_method)
        super().__init__(create_env_fn, policy, **common)

    def _make_engine(self, num_nodes: int) -> Engine:
        launch, who = self._launch, type(self).__name__
        body_device(self._group_backend, 0)
        warn_if_open(launch.address, self._secret, who, "give secret=, which all nodes must know, or use a firewall")
        return ProcessGroupEngine(
            launch.launcher(who),
            backend=self._group_backend,
            address=launch.address,
            port=launch.tcp_port,
            secret=self._secret,
            node_timeout_s=self._node_timeout_s,
            start_timeout_s=self._start_timeout_s,
        )


class DistributedSyncCollector(DistributedCollector):
    """A ``DistributedCollector`` with ``sync=True``, that sends the policy's weights after every ``update_interval``
    batches.

    >>> collector = DistributedSyncCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=50)
    >>> [batch.shape for batch in collector]
    [torch.Size([2, 25])]
    """

    def _build(self, config: NodesConfig) -> None:
        if config.sync is False:
            raise ValueError("a DistributedSyncCollector has sync=True; use DistributedCollector(..., sync=False)")
        super()._build(config.but(sync=True, update_interval=config.update_interval or 1))
