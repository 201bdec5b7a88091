"""Transforms of what envs give and are given."""

from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.env import TransformedEnv

__all__ = ["Compose", "InitTracker", "RewardSum", "StepCounter", "Transform", "TransformedEnv"]
