"""Envs: Gymnasium's, those of other packages, several side by side, vector envs, and your own."""

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
from swath.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Unbounded,
)
from swath.envs.step import step_mdp
from swath.envs.transforms import (
    CatFrames,
    CenterCrop,
    Compose,
    EndOfLifeTransform,
    FrameSkipTransform,
    GrayScale,
    InitTracker,
    NoopResetEnv,
    RandomTruncationTransform,
    Resize,
    RewardSum,
    StepCounter,
    TimeMaxPool,
    ToTensorImage,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from swath.envs.vector import VectorEnv

__all__ = [
    "AsyncEnvPool",
    "Binary",
    "Bounded",
    "CatFrames",
    "Categorical",
    "CenterCrop",
    "Compose",
    "Composite",
    "DMControlEnv",
    "DMControlWrapper",
    "EndOfLifeTransform",
    "EnvBase",
    "EnvPoolEnv",
    "EnvPoolWrapper",
    "ExplorationType",
    "FrameSkipTransform",
    "GrayScale",
    "GuestEnv",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "MultiCategorical",
    "MultiOneHot",
    "NoopResetEnv",
    "OneHot",
    "ParallelEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "ProcessorAsyncEnvPool",
    "RandomTruncationTransform",
    "Resize",
    "RewardSum",
    "SerialEnv",
    "Spec",
    "StepCounter",
    "ThreadingAsyncEnvPool",
    "TimeMaxPool",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "Unbounded",
    "VecNorm",
    "VecNormV2",
    "VectorEnv",
    "exploration_type",
    "next_seed",
    "set_exploration_type",
    "step_mdp",
]
