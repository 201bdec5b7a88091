"""Transforms of what envs give and are given."""

from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.driving import (
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RandomTruncationTransform,
)
from swath.envs.transforms.env import TransformedEnv
from swath.envs.transforms.frames import CatFrames, TimeMaxPool
from swath.envs.transforms.images import CenterCrop, GrayScale, Resize, ToTensorImage
from swath.envs.transforms.statistics import VecNorm, VecNormV2

__all__ = [
    "CatFrames",
    "CenterCrop",
    "Compose",
    "EndOfLifeTransform",
    "FrameSkipTransform",
    "GrayScale",
    "InitTracker",
    "NoopResetEnv",
    "RandomTruncationTransform",
    "Resize",
    "RewardSum",
    "StepCounter",
    "TimeMaxPool",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "VecNorm",
    "VecNormV2",
]
