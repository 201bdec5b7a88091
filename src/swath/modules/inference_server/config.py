"""What a server was asked for, in two objects: how it works, and on which devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.hints import parameters_of, unknown_arguments

DeviceLike = torch.device | str | int | None
ServiceBackend = Literal["thread", "process", "ray"]


@dataclass
class InferenceServerConfig:
    """How a server works; see the arguments of ``InferenceServer``.

    Args:
        service_backend: "thread", "process" or "ray".
        max_batch_size, min_batch_size, timeout: how batches are formed.
        collect_stats, stats_window_size: what is measured.
        static_batch_size: for CUDA graphs, which swath has no use for: it must be None.
        max_inflight_per_env: how many requests an env may have under way. Envs of swath's collectors have one.

    >>> InferenceServerConfig(max_batch_size=8).timeout
    0.01
    """

    service_backend: ServiceBackend = "thread"
    max_batch_size: int = 64
    static_batch_size: int | None = None
    min_batch_size: int = 1
    timeout: float = 0.01
    collect_stats: bool = True
    stats_window_size: int = 1024
    max_inflight_per_env: int | None = None

    def __post_init__(self) -> None:
        if self.service_backend not in ("thread", "process", "ray"):
            raise ValueError(f"service_backend must be 'thread', 'process' or 'ray', got {self.service_backend!r}")
        if self.max_inflight_per_env is not None and self.max_inflight_per_env < 1:
            raise ValueError(f"max_inflight_per_env must be at least 1, got {self.max_inflight_per_env}")
        if self.static_batch_size is not None:
            raise ValueError(
                f"static_batch_size={self.static_batch_size}: swath has no CUDA graphs of fixed sizes; leave it out. "
                "(It records the policy's operations by itself: see policy_plan())"
            )
        if self.max_batch_size < 1 or not 1 <= self.min_batch_size <= self.max_batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} and min_batch_size={self.min_batch_size}: both must be at least "
                "1, and the first not smaller than the second"
            )
        if self.timeout < 0:
            raise ValueError(f"timeout must not be negative, got {self.timeout}")


@dataclass
class InferenceDeviceConfig:
    """Where things are.

    Args:
        policy_device: where the policy computes.
        output_device: where answers go; by default ``env_device``.
        env_device: where envs step.
        storing_device: where batches are; a collector's matter, so a server refuses it.

    >>> InferenceDeviceConfig(env_device="cpu").server_output_device()
    device(type='cpu')
    """

    policy_device: DeviceLike = None
    output_device: DeviceLike = None
    env_device: DeviceLike = None
    storing_device: DeviceLike = None

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            setattr(self, each.name, None if given is None else torch.device(given))

    def server_output_device(self) -> torch.device | None:
        """Where a server's answers are to go."""
        chosen = self.env_device if self.output_device is None else self.output_device
        assert chosen is None or isinstance(chosen, torch.device)
        return chosen


def resolve_server_config(
    given: InferenceServerConfig | Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> InferenceServerConfig:
    """The config that was given, or one of the arguments; None is an argument that was not given.

    Raises:
        ValueError: both were given.
    """
    chosen = {name: value for name, value in arguments.items() if value is not None}
    if given is None:
        return InferenceServerConfig(**chosen)
    if chosen:
        raise ValueError(
            f"server_config and {', '.join(chosen)} are mutually exclusive: say it in server_config, or without one"
        )
    if isinstance(given, InferenceServerConfig):
        return given
    known = [each.name for each in fields(InferenceServerConfig)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"server_config has {unknown[0]!r}; it may have {', '.join(known)}")
    return InferenceServerConfig(**given)


def resolve_devices(
    given: InferenceDeviceConfig | None, device: DeviceLike, policy_device: DeviceLike, output_device: DeviceLike
) -> tuple[torch.device | None, torch.device | None]:
    """Where the policy computes, and where answers go.

    Raises:
        ValueError: both a config and arguments were given, or what is a collector's.
    """
    chosen = {"device": device, "policy_device": policy_device, "output_device": output_device}
    explicit = [name for name, value in chosen.items() if value is not None]
    if given is None:
        given = InferenceDeviceConfig(device if policy_device is None else policy_device, output_device)
    elif explicit:
        raise ValueError(f"device_config and {', '.join(explicit)} are mutually exclusive")
    if given.storing_device is not None:
        raise ValueError("storing_device is a collector-level setting: give it to the collector, not to a server")
    where = given.policy_device
    assert where is None or isinstance(where, torch.device)
    return where, given.server_output_device()


class ServerSettings(TypedDict, total=False):
    """Settings of ``InferenceServer`` that mean the same in another process."""

    max_batch_size: int
    static_batch_size: int | None
    min_batch_size: int
    timeout: float
    collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None
    device: DeviceLike
    policy_device: DeviceLike
    output_device: DeviceLike
    weight_sync: Any
    weight_sync_model_id: str
    collect_stats: bool
    stats_window_size: int
    server_config: InferenceServerConfig | Mapping[str, Any] | None
    device_config: InferenceDeviceConfig | None
    policy_version: int
    policy_version_key: Any
    exploration_type: InteractionType | str | None


def check_settings(kind: type, settings: Any) -> None:
    """Raise here what would be raised there.

    Raises:
        TypeError, ValueError: a setting that is none, or cannot be.
    """
    unknown = [name for name in settings if name not in ServerSettings.__annotations__]
    if unknown:
        raise unknown_arguments(kind, unknown, [*ServerSettings.__annotations__, *parameters_of(kind)])
    names = {each.name for each in fields(InferenceServerConfig)}
    resolve_server_config(settings.get("server_config"), {k: v for k, v in settings.items() if k in names})
    resolve_devices(
        settings.get("device_config"), *(settings.get(name) for name in ("device", "policy_device", "output_device"))
    )
