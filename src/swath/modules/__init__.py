"""Policies that swath brings, and servers for policies."""

from swath.modules.inference_server import (
    InferenceClient,
    InferenceDeviceConfig,
    InferenceFuture,
    InferenceServer,
    InferenceServerConfig,
    InferenceTransport,
    MPTransport,
    PolicyClientModule,
    ProcessInferenceServer,
    ProcessSlotTransport,
    RayInferenceServer,
    RayTransport,
    SharedMemoryTransport,
    SlotTransport,
    ThreadingTransport,
    Transport,
)
from swath.modules.random_policy import RandomPolicy

__all__ = [
    "InferenceClient",
    "InferenceDeviceConfig",
    "InferenceFuture",
    "InferenceServer",
    "InferenceServerConfig",
    "InferenceTransport",
    "MPTransport",
    "PolicyClientModule",
    "ProcessInferenceServer",
    "ProcessSlotTransport",
    "RandomPolicy",
    "RayInferenceServer",
    "RayTransport",
    "SharedMemoryTransport",
    "SlotTransport",
    "ThreadingTransport",
    "Transport",
]
