"""Devices, resolved once: where the env steps, where the policy runs, where batches go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DeviceLike = torch.device | str | int | None


def resolve_device(device: DeviceLike) -> torch.device | None:
    """``"cuda"`` becomes ``cuda:<current>``; None stays None.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if device is None:
        return None
    resolved = torch.device(device)
    if resolved.type == "cuda" and resolved.index is None:
        if not torch.cuda.is_available():
            raise RuntimeError("device 'cuda' was asked for, but this machine (or this build of torch) has no CUDA")
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


@dataclass(frozen=True)
class Devices:
    """None means: where it is."""

    env: torch.device | None
    policy: torch.device | None
    storing: torch.device | None

    @classmethod
    def resolve(
        cls, device: DeviceLike, env_device: DeviceLike, policy_device: DeviceLike, storing_device: DeviceLike
    ) -> Devices:
        """``device`` fills whatever was not given; data is stored where env and policy agree to be."""
        common = resolve_device(device)
        env = resolve_device(env_device) or common
        policy = resolve_device(policy_device) or common
        storing = resolve_device(storing_device) or common
        if storing is None and env == policy:
            storing = env
        return cls(env, policy, storing)

    def synchronize(self) -> None:
        """Wait for copies to finish, so that what is handed over is there."""
        for device in {self.env, self.policy, self.storing}:
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)


def parameter_devices(policy: Any) -> set[torch.device]:
    """Where a policy's parameters and buffers are."""
    if not isinstance(policy, torch.nn.Module):
        return set()
    return {tensor.device for tensor in (*policy.parameters(), *policy.buffers())}
