"""The arguments that all collectors on nodes take, for type checkers: ``NodesCollector`` has them with defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.data.trajectories import TrajFormat
from swath.weight_update.nodes import NodeWeightSyncScheme


class NodesArguments(TypedDict, total=False):
    """What ``NodesCollector`` takes besides envs and policy. (A test keeps the two alike.)"""

    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None
    frames_per_batch: int | None
    total_frames: float | None
    sync: bool | None
    num_collectors: int | None
    collector_class: Any
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    num_workers_per_collector: int
    create_env_kwargs: Any
    device: Any
    storing_device: Any
    env_device: Any
    policy_device: Any
    max_frames_per_traj: int | None
    init_random_frames: int | None
    reset_at_each_iter: bool
    postproc: Callable[[TensorDictBase], Any] | None
    split_trajs: bool | None
    exploration_type: InteractionType | str | None
    set_truncated: bool
    replay_buffer: Any
    extend_buffer: bool
    trust_policy: bool | None
    compile_policy: bool | dict[str, Any] | None
    cudagraph_policy: bool | dict[str, Any] | None
    capture_policy: bool
    no_cuda_sync: bool
    track_policy_version: bool
    track_traj_ids: bool
    track_worker: bool
    track_env: bool
    compact_obs: bool
    trajs_per_batch: int | None
    trajs_per_write: int | None
    traj_format: TrajFormat | None
    check_finite: bool
    pre_collect_hook: Callable[[], Any] | None
    post_collect_hook: Callable[[Any], Any] | None
    auto_register_policy_transforms: bool | None
    update_after_each_batch: bool
    max_weight_update_interval: int
    update_interval: int | None
    weight_sync_schemes: Mapping[str, NodeWeightSyncScheme] | None
    num_sub_threads: int
    restart_nodes: int
    on_node_loss: str
    start_timeout_s: float
