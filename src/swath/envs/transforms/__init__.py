"""Transforms of what envs give and are given."""

from swath.envs.transforms.actions import ActionMask, ActionScaling, DiscreteActionProjection
from swath.envs.transforms.base import Compose, Transform
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.env import TransformedEnv
from swath.envs.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from swath.envs.transforms.shapes import (
    CatTensors,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
from swath.envs.transforms.values import (
    ClipTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    SignTransform,
)

__all__ = [
    "ActionMask",
    "ActionScaling",
    "CatTensors",
    "ClipTransform",
    "Compose",
    "DTypeCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "ExcludeTransform",
    "FlattenObservation",
    "InitTracker",
    "ObservationNorm",
    "PermuteTransform",
    "RenameTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SignTransform",
    "SqueezeTransform",
    "StepCounter",
    "Transform",
    "TransformedEnv",
    "UnsqueezeTransform",
]
