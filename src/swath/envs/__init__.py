"""Envs: Gymnasium's, those of other packages, several side by side, vector envs, and your own."""

from typing import TYPE_CHECKING, Any

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from swath.envs import transforms
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
from swath.envs.transforms import *  # noqa: F403 -- all of its own __all__, which stands once
from swath.envs.vector import VectorEnv
from swath.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Spec, Unbounded

if TYPE_CHECKING:
    from swath.data import BurnInTransform, MultiStepTransform, Reward2GoTransform

__all__ = [
    "AsyncEnvPool",
    "Binary",
    "Bounded",
    "BurnInTransform",
    "Categorical",
    "Composite",
    "DMControlEnv",
    "DMControlWrapper",
    "EnvBase",
    "EnvPoolEnv",
    "EnvPoolWrapper",
    "ExplorationType",
    "GuestEnv",
    "GymEnv",
    "GymWrapper",
    "MultiCategorical",
    "MultiOneHot",
    "MultiStepTransform",
    "OneHot",
    "ParallelEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "ProcessorAsyncEnvPool",
    "Reward2GoTransform",
    "SerialEnv",
    "Spec",
    "ThreadingAsyncEnvPool",
    "Unbounded",
    "VectorEnv",
    "exploration_type",
    "next_seed",
    "set_exploration_type",
    "step_mdp",
]
__all__ += transforms.__all__

if not TYPE_CHECKING:  # for whom every name would be one of ours

    def __getattr__(name: str) -> Any:
        # Of batches, not of envs; scripts for TorchRL look for them here.
        if name in ("BurnInTransform", "MultiStepTransform", "Reward2GoTransform"):
            import swath.data

            return getattr(swath.data, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
