"""Collectors: policies run in envs, experience comes out in batches."""

from swath.collectors.base import BaseCollector
from swath.collectors.profiling import ProfileConfig
from swath.collectors.single import Collector
from swath.collectors.trajectories import split_trajectories
from swath.modules.random_policy import RandomPolicy

__all__ = ["BaseCollector", "Collector", "ProfileConfig", "RandomPolicy", "split_trajectories"]
