"""Envs: Gymnasium's, those of other packages, several side by side, vector envs, and your own."""

from typing import TYPE_CHECKING, Any

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from swath.envs.base import EnvBase, next_seed
from swath.envs.dm_control import DMControlEnv, DMControlWrapper
from swath.envs.envpool import EnvPoolEnv, EnvPoolWrapper
from swath.envs.guest import GuestEnv
from swath.envs.gym import GymEnv, GymWrapper
from swath.envs.parallel import ParallelEnv
from swath.envs.pettingzoo import PettingZooEnv, PettingZooWrapper
from swath.envs.pool import AsyncEnvPool, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool
from swath.envs.serial import SerialEnv
from swath.envs.step import step_mdp
from swath.envs.transforms import (
    ActionDiscretizer,
    ActionMask,
    ActionScaling,
    CatFrames,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    EndOfLifeTransform,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    GrayScale,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    PermuteTransform,
    RandomTruncationTransform,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SharedStatistics,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TensorDictPrimer,
    TimeMaxPool,
    ToTensorImage,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from swath.envs.vector import VectorEnv
from swath.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Spec, Unbounded

if TYPE_CHECKING:
    from swath.data import BurnInTransform, MultiStepTransform, Reward2GoTransform

__all__ = [
    "ActionDiscretizer",
    "ActionMask",
    "ActionScaling",
    "AsyncEnvPool",
    "Binary",
    "Bounded",
    "BurnInTransform",
    "CatFrames",
    "CatTensors",
    "Categorical",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "Composite",
    "DMControlEnv",
    "DMControlWrapper",
    "DTypeCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "EnvBase",
    "EnvPoolEnv",
    "EnvPoolWrapper",
    "ExcludeTransform",
    "ExplorationType",
    "FlattenObservation",
    "FrameSkipTransform",
    "GrayScale",
    "GuestEnv",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "MultiCategorical",
    "MultiOneHot",
    "MultiStepTransform",
    "NoopResetEnv",
    "ObservationNorm",
    "OneHot",
    "ParallelEnv",
    "PermuteTransform",
    "PettingZooEnv",
    "PettingZooWrapper",
    "ProcessorAsyncEnvPool",
    "RandomTruncationTransform",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SerialEnv",
    "SharedStatistics",
    "SignTransform",
    "Spec",
    "SqueezeTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ThreadingAsyncEnvPool",
    "TimeMaxPool",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "Unbounded",
    "UnsqueezeTransform",
    "VecNorm",
    "VecNormV2",
    "VectorEnv",
    "exploration_type",
    "next_seed",
    "set_exploration_type",
    "step_mdp",
]


def __getattr__(name: str) -> Any:
    # Of batches, not of envs; scripts for TorchRL look for them here.
    if name in ("BurnInTransform", "MultiStepTransform", "Reward2GoTransform"):
        import swath.data

        return getattr(swath.data, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
