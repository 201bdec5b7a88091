"""From options to a collector: in this process or in workers is decided here, and nowhere else."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swath.cli.metadata import describe_env
from swath.cli.options import CollectOptions
from swath.cli.policy import find_factory, make_policy
from swath.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.envs import EnvBase, GymEnv

#: By default a batch has about so many frames: enough that its cost is small beside the steps' …
_FRAMES_PER_BATCH = 2048
#: … at least so many steps, where envs are many (of one env alone, where each comes in batches of its own), …
_LEAST_STEPS = 16
_LEAST_STEPS_ALONE = 256
#: … and not much more memory than this, where observations are images.
_BYTES_PER_BATCH = 64_000_000


@dataclass(frozen=True)
class Setup:
    """A collector, seeded, and what is known of its envs."""

    collector: Collector | MultiCollector
    bytes_per_frame: int
    specs: dict[str, Any]


def set_up(options: CollectOptions, interruptor: Any = None) -> Setup:
    """Make the collector that ``options`` ask for."""
    # Imported before seeding and called after: what a module draws while it is imported must not matter.
    factory = None if options.policy is None else find_factory(options.policy)
    random.seed(options.seed)
    np.random.seed(options.seed)  # noqa: NPY002 (policies may draw from it)
    torch.manual_seed(options.seed)

    def policy_for(env: EnvBase) -> Any:
        return None if factory is None else make_policy(factory, options.policy or "", env)

    arguments: dict[str, Any] = {
        "total_frames": options.frames,
        "max_frames_per_traj": options.max_frames_per_traj,
        "interruptor": interruptor,
    }
    make = _set_up_here if options.workers is None else _set_up_workers
    return make(options, policy_for, arguments)


def _set_up_here(options: CollectOptions, policy_for: Callable[[EnvBase], Any], arguments: dict[str, Any]) -> Setup:
    several = {"num_envs": options.envs} if options.envs > 1 else {}
    env: Any = GymEnv(options.env_id, categorical_action_encoding=options.categorical, **several)
    try:
        frames = frames_per_batch(options, bytes_per_frame(env))
        collector = Collector(env, policy_for(env), frames_per_batch=frames, **arguments)
        collector.set_seed(options.seed)
    except BaseException:
        env.close(raise_if_closed=False)
        raise
    return Setup(collector, bytes_per_frame(env), describe_env(env))


def _set_up_workers(options: CollectOptions, policy_for: Callable[[EnvBase], Any], arguments: dict[str, Any]) -> Setup:
    make_env = functools.partial(GymEnv, options.env_id, categorical_action_encoding=options.categorical)
    env = make_env()  # to look at; those that are stepped are made in the workers
    try:
        policy, size, specs = policy_for(env), bytes_per_frame(env), describe_env(env)
    finally:
        env.close(raise_if_closed=False)
    kind = MultiSyncCollector if options.sync else MultiAsyncCollector
    collector = kind(
        [make_env] * options.envs,
        policy,
        num_workers=options.workers,
        frames_per_batch=frames_per_batch(options, size),
        track_env=not options.evenly,
        **arguments,
    )
    try:
        collector.set_seed(options.seed)
    except BaseException:
        collector.shutdown(raise_on_error=False)
        raise
    return Setup(collector, size, specs)


def bytes_per_frame(env: EnvBase) -> int:
    """Of what the env writes; a policy may add to it."""
    return env.fake_tensordict().bytes() // env.batch_size.numel()


def frames_per_batch(options: CollectOptions, frame_size: int) -> int:
    """Of all envs together, or of each where they do not advance evenly."""
    if options.frames_per_batch is not None:
        return options.frames_per_batch
    least = _LEAST_STEPS if options.evenly else _LEAST_STEPS_ALONE
    steps = max(_FRAMES_PER_BATCH // options.envs, least)
    steps = min(steps, _BYTES_PER_BATCH // (frame_size * options.envs), options.frames // options.envs)
    return max(steps, 1) * (options.envs if options.evenly else 1)
