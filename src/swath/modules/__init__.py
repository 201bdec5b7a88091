"""Policies that swath brings."""

from swath.modules.random_policy import RandomPolicy

__all__ = ["RandomPolicy"]
