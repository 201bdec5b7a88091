"""Arguments of collectors, resolved once: what was given becomes what is used, or an error that says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swath.collectors.devices import parameter_devices
from swath.collectors.numbers import count_or_none, positive_int
from swath.data.trajectories import TrajectoryAssembler
from swath.envs.base import EnvBase
from swath.keys import as_key
from swath.modules.random_policy import RandomPolicy


def step_limit(max_frames_per_traj: Any) -> int | None:
    """After how many steps episodes are truncated; None: never."""
    return count_or_none("max_frames_per_traj", max_frames_per_traj, "no limit") or None


def random_frames(init_random_frames: Any) -> int:
    """How many of the first frames get random actions."""
    if init_random_frames == float("inf"):
        raise ValueError("init_random_frames=inf: for random actions only, leave the policy out")
    return count_or_none("init_random_frames", init_random_frames, "none") or 0


def prepare_for_limit(env: EnvBase) -> None:
    taken = [key for key in env.observation_keys if "step_count" in as_key(key)]
    if taken:
        raise ValueError(f"max_frames_per_traj would add 'step_count', but the env has {taken[0]!r} already")
    if "truncated" not in env.done_keys:
        env.add_truncated_keys()


def make_assembler(
    trajs_per_batch: int | None,
    traj_format: str | None,
    replay_buffer: Any = None,
    trajs_per_write: int | None = None,
) -> TrajectoryAssembler | None:
    """Into a buffer, each episode is written by itself, or up to ``trajs_per_write`` at a time."""
    if trajs_per_write is not None:
        positive_int("trajs_per_write", trajs_per_write)
        if trajs_per_batch is None or replay_buffer is None:
            raise ValueError(
                "trajs_per_write says how many whole episodes go into the replay buffer at a time: it needs "
                "trajs_per_batch= and replay_buffer="
            )
    traj_format = "padded" if traj_format is None else traj_format
    if traj_format not in ("padded", "cat"):
        raise ValueError(f"traj_format must be 'padded' or 'cat', got {traj_format!r}")
    if trajs_per_batch is None:
        if traj_format != "padded":
            raise ValueError("traj_format goes with trajs_per_batch")
        return None
    count = positive_int("trajs_per_batch", trajs_per_batch)
    if replay_buffer is not None:
        return TrajectoryAssembler(1, "cat", trajs_per_write or 1)
    return TrajectoryAssembler(count, traj_format)  # type: ignore[arg-type]


def policy_wrapper(compile_policy: Any, cudagraph_policy: Any) -> Callable[[Any], Any] | None:
    if compile_policy and cudagraph_policy:
        raise ValueError("give either compile_policy or cudagraph_policy, not both")
    if cudagraph_policy:
        if not torch.cuda.is_available():
            raise RuntimeError("cudagraph_policy needs CUDA, which this machine (or this build of torch) has not")
        from tensordict.nn import CudaGraphModule

        kwargs = cudagraph_policy if isinstance(cudagraph_policy, dict) else {}
        return lambda function: CudaGraphModule(function, **kwargs)
    if compile_policy:
        kwargs = compile_policy if isinstance(compile_policy, dict) else {}
        return lambda function: torch.compile(function, **kwargs)
    return None


def on_device(policy: Any, device: torch.device | None) -> Any:
    """The user's own policy where it is on the right device already, else a copy there."""
    if policy is None:
        return RandomPolicy()
    if type(policy).__name__ == "RandomPolicy" and not isinstance(policy, RandomPolicy):  # TorchRL's
        return RandomPolicy(policy.action_spec, policy.action_key)
    if device is None or parameter_devices(policy) <= {device}:
        return policy
    return copy.deepcopy(policy).requires_grad_(False).to(device)


def casting_device(policy_device: torch.device | None, env: EnvBase) -> torch.device | None:
    """Where observations must be moved for the policy; None if they are there already."""
    if policy_device is None:
        return None
    where = {field.device for field in env.row_layout().carried}
    return None if where == {policy_device} else policy_device


def random_specs(policy: Any) -> dict[Any, Any] | None:
    if not isinstance(policy, RandomPolicy) or policy.action_spec is None:
        return None
    if hasattr(policy.action_spec, "items"):
        return dict(policy.action_spec.items(True, True))
    return {policy.action_key: policy.action_spec}


def alike_or_each(answers: Sequence[str | Sequence[str]], who: str) -> str:
    """What all say; or what each says, with its number. (A place with places of its own says several things.)

    >>> alike_or_each(["yes", "no"], "worker")
    'worker 0: yes; worker 1: no'
    >>> alike_or_each([["yes", "no"]], "node")
    'env 0: yes; env 1: no'
    """
    answers = [answer if isinstance(answer, str) else alike_or_each(answer, "env") for answer in answers]
    if len(set(answers)) == 1:
        return answers[0]
    return "; ".join(f"{who} {number}: {answer}" for number, answer in enumerate(answers))
