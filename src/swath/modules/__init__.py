"""Policies that swath brings, and servers for policies."""

from swath.modules.inference.client import InferenceClient, InferenceFuture
from swath.modules.inference.pipes import MPTransport
from swath.modules.inference.policy_client import PolicyClientModule
from swath.modules.inference.process_server import ProcessInferenceServer
from swath.modules.inference.server import InferenceServer
from swath.modules.inference.slots import SlotTransport
from swath.modules.inference.threads import ThreadingTransport
from swath.modules.inference.transport import Transport
from swath.modules.random_policy import RandomPolicy

__all__ = [
    "InferenceClient",
    "InferenceFuture",
    "InferenceServer",
    "MPTransport",
    "PolicyClientModule",
    "ProcessInferenceServer",
    "RandomPolicy",
    "SlotTransport",
    "ThreadingTransport",
    "Transport",
]
