"""swath and its rivals, each written as its users would write it.

All collect the same: observation, next observation (the true last one at an episode's end), action, reward,
terminated, truncated; in whole batches. The hand-written loops write every batch into the same arrays, the two
collectors deliver memory that later batches leave alone.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict.nn import TensorDictModule
from torch import nn

from setting import ENV_SEED, Setting


@dataclass(frozen=True)
class Transitions:
    """A batch as arrays ``[T, E, ...]``; actions as the env got them."""

    obs: np.ndarray
    next_obs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    @classmethod
    def empty(cls, setting: Setting) -> Transitions:
        lead = (setting.steps_per_batch, setting.num_envs)
        obs_shape, obs_dtype = (*lead, *setting.obs_space.shape), setting.obs_space.dtype
        actions = np.empty(lead, np.int64)
        if not setting.discrete:
            actions = np.empty((*lead, setting.num_outputs), np.float32)
        return cls(
            obs=np.empty(obs_shape, obs_dtype),
            next_obs=np.empty(obs_shape, obs_dtype),
            actions=actions,
            rewards=np.empty(lead, np.float32),
            terminated=np.empty(lead, np.bool_),
            truncated=np.empty(lead, np.bool_),
        )

    @classmethod
    def of(cls, batch: Any, discrete: bool) -> Transitions:
        """A TensorDict ``[T, E]``."""
        actions = batch["action"].numpy()
        if discrete and actions.ndim == 3:  # swath stores what the policy said, and acts on its argmax
            actions = actions.argmax(-1)
        return cls(
            obs=batch["observation"].numpy(),
            next_obs=batch["next", "observation"].numpy(),
            actions=actions,
            rewards=batch["next", "reward"].squeeze(-1).numpy(),
            terminated=batch["next", "terminated"].squeeze(-1).numpy(),
            truncated=batch["next", "truncated"].squeeze(-1).numpy(),
        )


class Contender(ABC):
    #: What one of its batches holds: so many steps of so many envs.
    batches: Setting
    #: Frames until every env has delivered: those of a batch, unless each env has batches of its own.
    frames_per_round: int
    #: Whether actions are the network's.
    by_network = True

    @abstractmethod
    def collect(self, frames: int) -> int:
        """Collect at least so many frames, in whole batches; how many transitions were delivered."""

    @abstractmethod
    def last_batch(self) -> Transitions:
        """What the last batch held, for the check that all contenders do the same."""

    def checked(self) -> Iterator[tuple[Transitions, Setting]]:
        """The last batch as the check wants it, in pieces where all envs are stepped together."""
        yield self.last_batch(), self.batches

    @abstractmethod
    def close(self) -> None: ...

    def rest(self) -> None:  # noqa: B027  most need no telling
        """Work no more until ``wake``: another one's turn."""

    def wake(self) -> None:  # noqa: B027
        """Undo ``rest``."""


# -- collectors --------------------------------------------------------------------------------------------------------


class CollectorContender(Contender):
    """A collector of TensorDicts; swath's and torchrl's differ in their constructors only."""

    def __init__(self, batches: Setting, collector: Any, num_turns: int = 1) -> None:
        self.batches = batches
        self.frames_per_round = num_turns * batches.frames_per_batch
        self.collector: Any = collector
        self._iterator: Iterator[Any] = iter(collector)
        self._batch: Any = None

    def collect(self, frames: int) -> int:
        delivered = 0
        while delivered < frames:
            self._batch = next(self._iterator)
            delivered += self._batch.numel()
        return delivered

    def last_batch(self) -> Transitions:
        # [T] for one env, [E, T] for several.
        batch = self._batch.unsqueeze(0) if self._batch.dim() == 1 else self._batch
        return Transitions.of(batch.transpose(0, 1), self.batches.discrete)

    def close(self) -> None:
        self.collector.shutdown()
        # Those of torchrl must not live until the interpreter ends: a finalizer would start a thread then, and hang.
        self.collector = self._batch = None
        self._iterator = iter(())
        gc.collect()


def swath_env(setting: Setting) -> Any:
    from swath.envs import GymWrapper

    return GymWrapper(setting.make_env())


def swath_policy(setting: Setting, network: nn.Sequential) -> TensorDictModule:
    # A float vector in a one-hot slot is decoded by argmax, so the network needs no last layer.
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def swath_collector(setting: Setting) -> Contender:
    from swath.collectors import Collector
    from swath.envs import SerialEnv

    make_env = partial(swath_env, setting)
    env = make_env() if setting.num_envs == 1 else SerialEnv(setting.num_envs, make_env)
    env.set_seed(ENV_SEED)
    policy = swath_policy(setting, setting.make_network())
    return CollectorContender(setting, Collector(env, policy, frames_per_batch=setting.frames_per_batch))


class _Greedy(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


def torchrl_env(setting: Setting) -> Any:
    from torchrl.envs import GymWrapper

    # Integer actions: in a one-hot slot, torchrl 0.14.1 casts logits to integers before it takes their argmax
    # (0.4 and 0.9 both become 0), which would not be the greedy action.
    return GymWrapper(setting.make_env(), categorical_action_encoding=setting.discrete)


def torchrl_policy(setting: Setting, network: nn.Sequential) -> TensorDictModule:
    layers = nn.Sequential(*network, _Greedy()) if setting.discrete else network
    return TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])


def torchrl_collector(setting: Setting) -> Contender:
    from torchrl.collectors import Collector
    from torchrl.envs import SerialEnv

    make_env = partial(torchrl_env, setting)
    env = make_env() if setting.num_envs == 1 else SerialEnv(setting.num_envs, make_env)
    env.set_seed(ENV_SEED)
    collector = Collector(
        env,
        torchrl_policy(setting, setting.make_network()),
        frames_per_batch=setting.frames_per_batch,
        total_frames=-1,
        auto_register_policy_transforms=False,  # as by default; said, it does not warn
    )
    return CollectorContender(setting, collector)


# -- hand-written loops ------------------------------------------------------------------------------------------------


class _Loop(Contender):
    """What the hand-written loops share: the network, the arrays, whole batches."""

    def __init__(self, setting: Setting) -> None:
        self.batches = setting
        self.frames_per_round = setting.frames_per_batch
        self._network = setting.make_network()
        self._stored = Transitions.empty(setting)

    def collect(self, frames: int) -> int:
        delivered = 0
        with torch.no_grad():
            while delivered < frames:
                self._collect_batch()
                delivered += self.batches.frames_per_batch
        return delivered

    @abstractmethod
    def _collect_batch(self) -> None: ...

    def last_batch(self) -> Transitions:
        return self._stored


class VectorLoop(_Loop):
    """One of Gymnasium's own vector envs.

    SAME_STEP has no filler steps, so every step of every env is a transition; the true last observation comes in
    ``infos``. ``copy=False``, since the loop copies into its arrays anyway.
    """

    def __init__(self, setting: Setting, make_vector_env: Callable[..., VectorEnv]) -> None:
        super().__init__(setting)
        self._envs = make_vector_env(
            [setting.make_env] * setting.num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self._obs, _ = self._envs.reset(seed=ENV_SEED)

    def _collect_batch(self) -> None:
        stored, envs, network, discrete = self._stored, self._envs, self._network, self.batches.discrete
        obs = self._obs
        for t in range(self.batches.steps_per_batch):
            stored.obs[t] = obs
            output = network(torch.from_numpy(obs))
            actions = (output.argmax(-1) if discrete else output).numpy()
            stored.actions[t] = actions
            obs, stored.rewards[t], stored.terminated[t], stored.truncated[t], infos = envs.step(actions)
            stored.next_obs[t] = obs
            if "final_obs" in infos:
                ended = infos["_final_obs"]
                stored.next_obs[t, ended] = np.stack(infos["final_obs"][ended])
        self._obs = obs

    def close(self) -> None:
        self._envs.close()


class PlainLoop(_Loop):
    """A list of envs, stepped one after the other; one call of the network for all of them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._envs = [setting.make_env() for _ in range(setting.num_envs)]
        self._obs = np.stack([env.reset(seed=ENV_SEED + index)[0] for index, env in enumerate(self._envs)])

    def _collect_batch(self) -> None:
        stored, envs, network, discrete = self._stored, self._envs, self._network, self.batches.discrete
        obs = self._obs
        for t in range(self.batches.steps_per_batch):
            stored.obs[t] = obs
            output = network(torch.from_numpy(obs))
            actions = (output.argmax(-1) if discrete else output).numpy()
            stored.actions[t] = actions
            next_obs, rewards = stored.next_obs[t], stored.rewards[t]
            all_terminated, all_truncated = stored.terminated[t], stored.truncated[t]
            # Python's own integers are cheaper for an env than NumPy's.
            for index, action in enumerate(actions.tolist() if discrete else actions):
                env_obs, reward, terminated, truncated, _ = envs[index].step(action)
                next_obs[index] = env_obs
                rewards[index] = reward
                all_terminated[index] = terminated
                all_truncated[index] = truncated
                if terminated or truncated:
                    env_obs, _ = envs[index].reset()
                obs[index] = env_obs
        self._obs = obs

    def close(self) -> None:
        for env in self._envs:
            env.close()


#: By the names of the command line and of the results.
CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "swath": swath_collector,
    "torchrl": torchrl_collector,
    "sync-vector": partial(VectorLoop, make_vector_env=SyncVectorEnv),
    "plain-loop": PlainLoop,
}

TITLES = {
    "swath": "swath Collector",
    "torchrl": "torchrl Collector",
    "sync-vector": "SyncVectorEnv loop",
    "plain-loop": "plain loop",
}
