"""The same training on this process, on worker processes, on Ray, or on torch.distributed: one argument says where.

    python examples/one_argument.py --backend direct
    python examples/one_argument.py --backend process
    python examples/one_argument.py --backend ray
    python examples/one_argument.py --backend distributed

Actor-critic (A2C with several passes, clipped as in PPO) on CartPole, a minute or so on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from swath.collectors import Collector
from swath.envs import GymEnv

GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_actor(network: nn.Module) -> ProbabilisticTensorDictSequential:
    logits = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    action = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential([logits, action])


def advantages(batch: TensorDict, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows ``[envs, time]``: how much better each action was than expected, and what the critic should have said."""
    with torch.no_grad():
        value = critic(batch["observation"]).squeeze(-1)
        following = critic(batch["next", "observation"]).squeeze(-1)
    reward = batch["next", "reward"].squeeze(-1)
    goes_on = (~batch["next", "terminated"].squeeze(-1)).float()
    same_episode = (~batch["next", "done"].squeeze(-1)).float()
    error = reward + GAMMA * following * goes_on - value
    advantage = torch.zeros_like(error)
    running = torch.zeros(len(error))
    for t in reversed(range(error.shape[1])):
        running = error[:, t] + GAMMA * LAMBDA * same_episode[:, t] * running
        advantage[:, t] = running
    return advantage, advantage + value


def learn(batch: TensorDict, network: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rows = batch.reshape(-1, batch.shape[-1])
    advantage, target = advantages(rows, critic)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation, action = rows["observation"].reshape(-1, 4), rows["action"].reshape(-1)
    before = rows["action_log_prob"].reshape(-1)
    advantage, target = advantage.flatten(), target.flatten()
    for _ in range(8):
        for chosen in torch.randperm(len(action)).split(256):
            chances = Categorical(logits=network(observation[chosen]))
            ratio = (chances.log_prob(action[chosen]) - before[chosen]).exp()
            gain = torch.min(ratio * advantage[chosen], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[chosen])
            error = (critic(observation[chosen]).squeeze(-1) - target[chosen]).pow(2)
            loss = (0.5 * error - gain - ENTROPY * chances.entropy()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train(backend: str, total_frames: int, seed: int = 0) -> float:
    """The mean return of the last 50 episodes."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    actor = make_actor(network)
    critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    collector = Collector(
        make_env,
        actor,
        num_collectors=2,
        backend=backend,
        frames_per_batch=1024,
        total_frames=total_frames,
    )
    collector.set_seed(seed)
    returns: deque[float] = deque(maxlen=50)
    lengths: dict[int, int] = {}
    started = time.perf_counter()
    with collector:
        for number, batch in enumerate(collector):
            for traj_id, count in zip(*batch["collector", "traj_ids"].unique(return_counts=True), strict=True):
                lengths[int(traj_id)] = lengths.get(int(traj_id), 0) + int(count)
            ended = batch["collector", "traj_ids"][batch["next", "done"].squeeze(-1)]
            returns.extend(lengths.pop(traj_id) for traj_id in ended.tolist())
            learn(batch, network, critic, optimizer)
            collector.update_policy_weights_()
            if number % 10 == 0:
                mean = sum(returns) / max(1, len(returns))
                seconds = time.perf_counter() - started
                print(f"{backend}: {collector.stats()['frames']:>7,} frames, {seconds:5.1f} s, return {mean:5.1f}")
    return sum(returns) / len(returns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="direct", choices=["direct", "process", "ray", "distributed", "rpc"])
    parser.add_argument("--frames", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"mean return of the last 50 episodes: {train(options.backend, options.frames, options.seed):.1f}")
