"""Arrangement: what steps how many envs, and what runs the policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """What runs where."""

    #: ``Collector(SerialEnv(n, …))``: all of it in the user's process.
    SINGLE = "single"
    #: ``Collector(ParallelEnv(n, …))``: envs in processes, which wait for each other at every step.
    PARALLEL = "parallel"
    #: ``MultiSyncCollector``: envs and policy in processes, which wait for each other at every batch.
    SYNC = "sync"
    #: ``MultiAsyncCollector``: envs and policy in processes, which wait for nobody.
    ASYNC = "async"
    #: ``AsyncBatchedCollector``: envs in processes, and one policy for those that are ready.
    BATCHED = "batched"
    #: The same, with envs in threads.
    THREADED = "threaded"

    @property
    def takes_turns(self) -> bool:
        """Nothing is collected while the user trains, and a batch is of one version of the weights."""
        return self in (Form.SINGLE, Form.PARALLEL, Form.SYNC)

    @property
    def has_processes(self) -> bool:
        return self not in (Form.SINGLE, Form.THREADED)


@dataclass(frozen=True)
class Arrangement:
    """So many envs, in so many workers.

    Args:
        threads: of torch, in the user's process; None for as many as it has.

    >>> str(Arrangement(Form.SYNC, 8, 2)), str(Arrangement(Form.SINGLE, 1))
    ('8 envs in 2 workers', '1 env')
    """

    form: Form
    num_envs: int
    num_workers: int = 1
    threads: int | None = None

    @property
    def envs_per_worker(self) -> int:
        """In the worker that has most."""
        return -(-self.num_envs // self.num_workers)

    def __str__(self) -> str:
        envs = "1 env" if self.num_envs == 1 else f"{self.num_envs} envs"
        if self.form == Form.SINGLE:
            return envs
        if self.form == Form.THREADED:
            return f"{envs} in threads"
        return f"{envs} in {'1 worker' if self.num_workers == 1 else f'{self.num_workers} workers'}"
