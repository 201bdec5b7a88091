"""Policies that swath brings, and servers for policies."""

from swath.modules import inference_server
from swath.modules.inference_server import *  # noqa: F403 -- all of its own __all__, which stands once
from swath.modules.random_policy import RandomPolicy

__all__ = ["RandomPolicy"]
__all__ += inference_server.__all__
