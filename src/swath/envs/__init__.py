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
    ActionMask,
    ActionScaling,
    CatTensors,
    ClipTransform,
    Compose,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    InitTracker,
    ObservationNorm,
    PermuteTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
)
from swath.envs.vector import VectorEnv

__all__ = [
    "ActionMask",
    "ActionScaling",
    "AsyncEnvPool",
    "Binary",
    "Bounded",
    "CatTensors",
    "Categorical",
    "ClipTransform",
    "Compose",
    "Composite",
    "DMControlEnv",
    "DMControlWrapper",
    "DTypeCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "EnvBase",
    "EnvPoolEnv",
    "EnvPoolWrapper",
    "ExcludeTransform",
    "ExplorationType",
    "FlattenObservation",
    "GuestEnv",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "MultiCategorical",
    "MultiOneHot",
    "ObservationNorm",
    "OneHot",
    "ParallelEnv",
    "PermuteTransform",
    "PettingZooEnv",
    "PettingZooWrapper",
    "ProcessorAsyncEnvPool",
    "RenameTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SerialEnv",
    "SignTransform",
    "Spec",
    "SqueezeTransform",
    "StepCounter",
    "ThreadingAsyncEnvPool",
    "Transform",
    "TransformedEnv",
    "Unbounded",
    "UnsqueezeTransform",
    "VectorEnv",
    "exploration_type",
    "next_seed",
    "set_exploration_type",
    "step_mdp",
]
