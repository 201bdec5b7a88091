"""Contracts, as checks that anyone can run on their own: of an env, and of a transform.

>>> from swath.envs import GymEnv, RewardSum
>>> check_env(GymEnv("CartPole-v1"))
>>> check_transform(RewardSum())
"""

from swath.testing.envs import check_env
from swath.testing.transforms import check_transform

__all__ = ["check_env", "check_transform"]
