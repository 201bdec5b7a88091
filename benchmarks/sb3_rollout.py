"""Stable-Baselines3: PPO's rollout, without its training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from contenders import Contender, Transitions
from setting import ENV_SEED, Setting

#: PPO samples its actions. Logits so far apart make every sample the greedy one: the others' episodes.
_SHARPNESS = 1e6


class Sb3Rollout(Contender):
    """``PPO.collect_rollouts``: it also computes values, log-probabilities and advantages, which PPO cannot do without.

    Its buffer drops the last observation of an episode. A callback keeps the ``infos``, where it is.
    """

    def __init__(self, setting: Setting, vec_env_name: str) -> None:
        from stable_baselines3 import PPO
        from stable_baselines3.common import vec_env
        from stable_baselines3.common.callbacks import BaseCallback

        class KeepInfos(BaseCallback):
            infos: list[Any]

            def _on_rollout_start(self) -> None:
                self.infos = []

            def _on_step(self) -> bool:
                self.infos.append(self.locals["infos"])
                return True

        self.batches = setting
        self.frames_per_round = setting.frames_per_batch
        self._envs = getattr(vec_env, vec_env_name)([setting.make_env] * setting.num_envs)
        self._model = PPO(
            "MlpPolicy",
            self._envs,
            n_steps=setting.steps_per_batch,
            batch_size=setting.frames_per_batch,
            policy_kwargs={"net_arch": [64], "activation_fn": nn.ReLU},
            seed=ENV_SEED,
            device="cpu",
        )
        _copy_network(setting.make_network(), self._model.policy)
        # What `learn` does before its first rollout.
        _, self._callback = self._model._setup_learn(total_timesteps=0, callback=KeepInfos())

    def collect(self, frames: int) -> int:
        model, delivered = self._model, 0
        while delivered < frames:
            model.collect_rollouts(self._envs, self._callback, model.rollout_buffer, self.batches.steps_per_batch)
            delivered += self.batches.frames_per_batch
        return delivered

    def last_batch(self) -> Transitions:
        model: Any = self._model
        buffer = model.rollout_buffer
        next_obs = np.concatenate([buffer.observations[1:], model._last_obs[None]])
        done = np.concatenate([buffer.episode_starts[1:], model._last_episode_starts[None]]).astype(np.bool_)
        truncated = np.zeros_like(done)
        for t, index in np.argwhere(done):
            info = self._callback.infos[t][index]
            next_obs[t, index] = info["terminal_observation"]
            truncated[t, index] = info["TimeLimit.truncated"]
        return Transitions(
            obs=buffer.observations,
            next_obs=next_obs,
            actions=buffer.actions[..., 0].astype(np.int64),
            rewards=buffer.rewards,
            terminated=done & ~truncated,
            truncated=truncated,
        )

    def close(self) -> None:
        self._envs.close()


def _copy_network(network: nn.Sequential, policy: Any) -> None:
    """The weights that all contenders have, into a policy of the same form."""
    with torch.no_grad():
        policy.mlp_extractor.policy_net[0].load_state_dict(network[0].state_dict())
        policy.action_net.load_state_dict({name: _SHARPNESS * value for name, value in network[2].state_dict().items()})
