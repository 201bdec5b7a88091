"""Servers whose policy is elsewhere, as ``InferenceServer(service_backend=)`` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swath.modules.inference_server.config import InferenceServerConfig
from swath.modules.inference_server.process_server import ProcessInferenceServer
from swath.modules.inference_server.ray_server import RayInferenceServer
from swath.modules.inference_server.service import PolicyService

_OPTIONS = {"process": {"mp_context", "startup_timeout", "num_threads"}, "ray": {"ray_init_config", "remote_config"}}


def serve_elsewhere(
    model: Any = None,
    transport: Any = "auto",
    *,
    policy_factory: Any = None,
    service_backend: str | None = None,
    service_backend_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> PolicyService | None:
    """A server in a process or an actor of its own; None where it is to be a thread of this process."""
    config = settings.get("server_config")
    configured = config.service_backend if isinstance(config, InferenceServerConfig) else None
    backend = service_backend or configured or "thread"
    if backend not in ("thread", *_OPTIONS):
        raise ValueError(f"service_backend must be 'thread', 'process' or 'ray', got {backend!r}")
    if configured not in (None, "thread", backend):
        raise ValueError(f"service_backend={backend!r}, but server_config says {configured!r}")
    if backend == "thread":
        return None
    if model is not None or policy_factory is None:
        raise ValueError(
            f"service_backend={backend!r} needs policy_factory, which makes the policy where it is served, instead of "
            "a model"
        )
    options = dict(service_backend_options or {})
    unknown = sorted(options.keys() - _OPTIONS[backend])
    if unknown:
        raise ValueError(
            f"service_backend_options of {backend!r} may be {sorted(_OPTIONS[backend])}, not {unknown[0]!r}"
        )
    made = ProcessInferenceServer if backend == "process" else RayInferenceServer
    return made(policy_factory, transport, **options, **settings)
