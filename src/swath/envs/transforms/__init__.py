"""Transforms of what envs give and are given."""

from swath.envs.transforms.actions import ActionMask, ActionScaling, DiscreteActionProjection
from swath.envs.transforms.base import Transform
from swath.envs.transforms.casting import DoubleToFloat, DTypeCastTransform
from swath.envs.transforms.clipping import ClipTransform, RewardClipping, SignTransform
from swath.envs.transforms.compose import Compose
from swath.envs.transforms.counting import InitTracker, RewardSum, StepCounter
from swath.envs.transforms.discretize import ActionDiscretizer
from swath.envs.transforms.driving import (
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RandomTruncationTransform,
)
from swath.envs.transforms.env import TransformedEnv
from swath.envs.transforms.frames import CatFrames, TimeMaxPool
from swath.envs.transforms.images import CenterCrop, GrayScale, Resize, ToTensorImage
from swath.envs.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from swath.envs.transforms.primer import TensorDictPrimer
from swath.envs.transforms.scaling import ObservationNorm, RewardScaling
from swath.envs.transforms.shapes import (
    CatTensors,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
from swath.envs.transforms.shared_statistics import SharedStatistics
from swath.envs.transforms.vec_norm import VecNorm
from swath.envs.transforms.vec_norm_v2 import VecNormV2

__all__ = [
    "ActionDiscretizer",
    "ActionMask",
    "ActionScaling",
    "CatFrames",
    "CatTensors",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "DTypeCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "ExcludeTransform",
    "FlattenObservation",
    "FrameSkipTransform",
    "GrayScale",
    "InitTracker",
    "NoopResetEnv",
    "ObservationNorm",
    "PermuteTransform",
    "RandomTruncationTransform",
    "RenameTransform",
    "Resize",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SharedStatistics",
    "SignTransform",
    "SqueezeTransform",
    "StepCounter",
    "TensorDictPrimer",
    "TimeMaxPool",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "UnsqueezeTransform",
    "VecNorm",
    "VecNormV2",
]
