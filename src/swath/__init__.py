"""Collects reinforcement-learning data."""

from swath.dataset import load

__version__ = "0.1.0"

__all__ = ["__version__", "load"]
