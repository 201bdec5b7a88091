"""PPO with a recurrent policy, on CartPole without velocities: what cannot be seen has to be remembered.

    python examples/recurrent_ppo_masked_cartpole.py
    python examples/recurrent_ppo_masked_cartpole.py --seed 1 --plot recurrent.png --json recurrent.json

The target is a mean return of 450 over 100 evaluation episodes. The collector carries the policy's state from step to
step, sets it to zero where an episode starts, and writes it into the data. With ``split_trajs`` it delivers pieces of
episodes ``[pieces, longest]``, each with the state that it started in: what an ``nn.GRU`` takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from common import STOPPING_SEED, Returns, Run, evaluate, read_options
from swath.collectors import MultiSyncCollector
from swath.envs import GymWrapper

TARGET, ENOUGH = 450, 475  # the training ends when 100 evaluation episodes have this mean return
STEPS_PER_EPISODE = 500
FRAMES = 150_000
NUM_ENVS, STEPS_PER_BATCH = 16, 32
EPOCHS = 10  # each with the whole batch at once
GAMMA, LAMBDA = 0.99, 0.95
LEARNING_RATE, CLIP = 1e-3, 0.2  # the first falls to zero, in a straight line
VALUE_WEIGHT, MAX_GRAD_NORM = 0.5, 0.5
HIDDEN = 64


class WithoutVelocities(gymnasium.ObservationWrapper):
    """Where the cart is, and how the pole leans; not how fast either moves. An episode ends where either is 1."""

    LIMITS = np.array([2.4, 0.2095], dtype=np.float32)

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[::2] / self.LIMITS


def make_env() -> GymWrapper:
    return GymWrapper(WithoutVelocities(gymnasium.make("CartPole-v1")), categorical_action_encoding=True)


class Network(nn.Module):
    """Logits of the two actions and a value, from all observations of an episode so far."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, HIDDEN), nn.Tanh())
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.actor, self.critic = nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def features(self, observation: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Of pieces ``[pieces, time, 2]`` that start in states ``[pieces, HIDDEN]``."""
        return self.gru(self.encoder(observation), hidden.unsqueeze(0))[0]

    def forward(self, observation: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step; a GRU's output is its next state."""
        hidden = self.features(observation.unsqueeze(-2), hidden).squeeze(-2)
        return self.actor(hidden), self.critic(hidden), hidden


def make_policy(network: Network) -> ProbabilisticTensorDictSequential:
    step = TensorDictModule(
        network, in_keys=["observation", "hidden"], out_keys=["logits", "value", ("next", "hidden")]
    )
    action = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential([step, action])


@torch.no_grad()
def advantages(pieces: TensorDictBase, network: Network) -> torch.Tensor:
    """Generalised advantages ``[pieces, time]``; zero where a piece is over."""
    value = pieces["value"].squeeze(-1)
    next_hidden = network.features(
        pieces["next", "observation"].unsqueeze(-2).flatten(0, 1), pieces["next", "hidden"].flatten(0, 1)
    )
    next_value = network.critic(next_hidden).reshape(value.shape)
    goes_on = ~pieces["next", "terminated"].squeeze(-1)
    # So values are at most 1. The GRU is the actor's too, whose gradient would be lost beside that of larger ones.
    reward = (1 - GAMMA) * pieces["next", "reward"].squeeze(-1)
    error = reward + GAMMA * next_value * goes_on - value
    error = error * pieces["collector", "mask"]
    advantage = torch.empty_like(error)
    ahead = torch.zeros(len(error))
    for t in reversed(range(error.shape[1])):
        ahead = error[:, t] + GAMMA * LAMBDA * ahead  # what is behind a piece is zero
        advantage[:, t] = ahead
    return advantage


def learn(pieces: TensorDictBase, network: Network, optimizer: torch.optim.Optimizer) -> None:
    mask = pieces["collector", "mask"]
    advantage = advantages(pieces, network)
    target = advantage + pieces["value"].squeeze(-1)
    advantage, target = advantage[mask], target[mask]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    action, old_log_prob = pieces["action"][mask].unsqueeze(-1), pieces["action_log_prob"][mask]
    for _ in range(EPOCHS):
        features = network.features(pieces["observation"], pieces["hidden"][:, 0])[mask]
        log_prob = network.actor(features).log_softmax(-1).gather(-1, action).squeeze(-1)
        ratio = (log_prob - old_log_prob).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        value_loss = nn.functional.mse_loss(network.critic(features).squeeze(-1), target)
        optimizer.zero_grad()
        (VALUE_WEIGHT * value_loss - gain).backward()
        nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
        optimizer.step()


def train(seed: int, total_frames: int) -> Iterator[tuple[int, ProbabilisticTensorDictSequential, TensorDictBase]]:
    """Yields after each batch: the frames so far, the policy as it is now, and the batch."""
    torch.manual_seed(seed)
    network = Network()
    policy = make_policy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=True)
    collector = MultiSyncCollector(
        [make_env] * NUM_ENVS,
        policy,
        frames_per_batch=NUM_ENVS * STEPS_PER_BATCH,
        total_frames=total_frames,
        split_trajs=True,
    )
    collector.set_seed(seed)
    frames = 0
    with collector:
        for pieces in collector:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - frames / total_frames)
            learn(pieces, network, optimizer)
            collector.update_policy_weights_()
            real = pieces[pieces["collector", "mask"]]
            frames += len(real)
            yield frames, policy, real


def main() -> None:
    torch.set_num_threads(1)  # the cores are for the workers
    options = read_options(__doc__, FRAMES)
    returns, frames, next_look, policy = Returns(last=20), 0, 0, None
    name = "recurrent PPO, CartPole without velocities, MultiSyncCollector"
    with Run(name, options, TARGET, "return, last 20 training episodes") as run:
        for frames, policy, batch in train(options.seed, options.frames):
            returns.add(batch)
            run.show(frames, returns.mean)
            if returns.mean > 0.6 * TARGET and frames >= next_look:
                next_look = frames + 5_000
                if evaluate(make_env, policy, STEPS_PER_EPISODE, STOPPING_SEED).mean() >= ENOUGH:
                    break
    run.finish(frames, lambda seed: evaluate(make_env, policy, STEPS_PER_EPISODE, seed))


if __name__ == "__main__":
    main()
