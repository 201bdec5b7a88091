"""From options to a collector. Another way to collect (in several workers, say) is chosen here and nowhere else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from swath.cli.options import CollectOptions
from swath.cli.policy import find_factory, make_policy
from swath.collectors import Collector
from swath.envs import EnvBase, GymEnv

#: By default a batch has about so many frames: enough that its cost is small beside the steps' …
_FRAMES_PER_BATCH = 2048
#: … at least so many steps, where envs are many, …
_LEAST_STEPS = 16
#: … and not much more memory than this, where observations are images.
_BYTES_PER_BATCH = 64_000_000


def make_collector(options: CollectOptions, interruptor: Any = None) -> Collector:
    """The collector that ``options`` ask for, seeded."""
    # Imported before seeding and called after: what a module draws while it is imported must not matter.
    factory = None if options.policy is None else find_factory(options.policy)
    random.seed(options.seed)
    np.random.seed(options.seed)  # noqa: NPY002 (policies may draw from it)
    torch.manual_seed(options.seed)
    several = {"num_envs": options.envs} if options.envs > 1 else {}
    env: Any = GymEnv(options.env_id, categorical_action_encoding=options.categorical, **several)
    try:
        collector = Collector(
            env,
            None if factory is None else make_policy(factory, options.policy or "", env),
            frames_per_batch=options.frames_per_batch or default_frames_per_batch(env, options.frames),
            total_frames=options.frames,
            max_frames_per_traj=options.max_frames_per_traj,
            interruptor=interruptor,
        )
        collector.set_seed(options.seed)
    except BaseException:
        env.close(raise_if_closed=False)
        raise
    return collector


def bytes_per_frame(env: EnvBase) -> int:
    """Of what the env writes; a policy may add to it."""
    return env.fake_tensordict().bytes() // env.batch_size.numel()


def default_frames_per_batch(env: EnvBase, total_frames: int) -> int:
    num_envs = env.batch_size.numel()
    steps = max(_FRAMES_PER_BATCH // num_envs, _LEAST_STEPS)
    steps = min(steps, _BYTES_PER_BATCH // (bytes_per_frame(env) * num_envs), total_frames // num_envs)
    return max(steps, 1) * num_envs
