"""DistributedCollector: nodes that are reached by ``torch.distributed``."""

from __future__ import annotations

import os
from typing import Any, Unpack

from swath.addresses import warn_if_open
from swath.collectors.config import NodesConfig
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.launched import LaunchedArguments, LaunchedCollector
from swath.collectors.distributed.launchers import BACKEND_VARIABLE, check_backend
from swath.collectors.distributed.meeting import body_device
from swath.collectors.distributed.process_group import ProcessGroupEngine
from swath.weight_update.nodes import DistributedWeightSyncScheme


class DistributedCollector(LaunchedCollector):
    """Collects on nodes that are reached by ``torch.distributed``. Arguments are those of ``LaunchedCollector``, and:

    Args:
        backend: "gloo", or "nccl" to let batches and weights pass through GPUs.
        secret: nodes must know it, too (they are told by the launcher); needed where others can reach the address.

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
        **common: Unpack[LaunchedArguments],
    ) -> None:
        self._closed = True  # until there is something to close
        self._group_backend = backend or os.environ.get(BACKEND_VARIABLE, "gloo")
        check_backend(self._group_backend)
        self._secret = secret
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
