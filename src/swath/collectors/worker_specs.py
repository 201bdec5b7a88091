"""What each worker of a collector is made from."""

from __future__ import annotations

from collections.abc import Sequence

from swath.collectors.assignment import Assignment, RequestedEnv
from swath.collectors.config import WorkersConfig
from swath.envs.making import make_env_beside
from swath.envs.policy_transforms import complete_env
from swath.process.seeding import draw_base_seed
from swath.remote.requests import WorkerSpec
from swath.workers.layout import WorkerLayout


class SpecMaker:
    """Makes them from what a collector was asked for.

    Args:
        stride_over: how many ids of trajectories are drawn by others than workers, in each round of all envs.
    """

    def __init__(self, config: WorkersConfig, stride_over: int) -> None:
        self._config = config
        self._stride_over = stride_over
        self._common = config.for_workers()
        self._base_seed = draw_base_seed()

    def of_first(self, members: Sequence[RequestedEnv]) -> list[WorkerSpec]:
        """Of one worker with the first env, to see how it spends its time."""
        return self.of_all(Assignment(tuple(members[:1]), WorkerLayout.spread(1, 1)))

    def of_all(self, assignment: Assignment) -> list[WorkerSpec]:
        return [self._of_worker(worker, assignment) for worker in range(assignment.layout.num_workers)]

    def _of_worker(self, worker: int, assignment: Assignment) -> WorkerSpec:
        config, own = self._config, assignment.of_worker(worker)
        first, num_members = own[0], len(assignment.members)
        devices = {"env_device": first.devices.env, "policy_device": first.devices.policy}
        return WorkerSpec(
            worker=worker,
            members=assignment.layout.members[worker],
            num_members=num_members,
            id_stride=num_members + self._stride_over,
            factories=[member.factory for member in own],
            env_kwargs=[member.kwargs for member in own],
            make_env=make_env_beside,
            policy=None if first.policy_factory is not None else config.policy,
            policy_factory=first.policy_factory,
            frames=first.frames,
            collector_class=config.collector_class,
            collector_kwargs={**self._common, **devices},
            base_seed=self._base_seed,
            num_threads=config.num_sub_threads,
            init_fn=config.init_fn,
            complete_env=complete_env if config.auto_register_policy_transforms else None,
        )
