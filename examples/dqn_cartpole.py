"""Double DQN on CartPole: workers fill a prioritised replay buffer in the background, the learner samples it.

    python examples/dqn_cartpole.py
    python examples/dqn_cartpole.py --seed 1 --plot dqn.png --json dqn.json

The target is a mean return of 475 over 100 evaluation episodes. Deep Reinforcement Learning with Double Q-learning,
van Hasselt et al., 2016; Prioritized Experience Replay, Schaul et al., 2016.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from common import STOPPING_SEED, Run, evaluate, read_options
from swath.collectors import MultiAsyncCollector
from swath.data import LazyTensorStorage, PrioritizedSampler, SamplesPerInsert, TensorDictReplayBuffer
from swath.envs import GymEnv

TARGET, ENOUGH = 475, 490  # the training ends when 100 evaluation episodes have this mean return
STEPS_PER_EPISODE = 500
FRAMES = 100_000
NUM_ENVS = 4
BUFFER_SIZE, BATCH_SIZE = 50_000, 64
FRAMES_PER_UPDATE = 2  # whoever is ahead of this, collector or learner, waits for the other
FIRST_FRAMES = 1_000  # before the first update
GAMMA, LEARNING_RATE, MAX_GRAD_NORM = 0.99, 2e-3, 10.0
TARGET_RATE = 0.05  # how much of the network goes into the target network at each update
EPSILON_FIRST, EPSILON_LAST, EPSILON_FRAMES = 1.0, 0.05, 10_000
UPDATES_PER_SYNC, FRAMES_PER_EVALUATION = 10, 2_000


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


class EpsilonGreedy(nn.Module):
    """The best action, or any with probability epsilon: a buffer, so it goes to the workers with the weights."""

    epsilon: torch.Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("epsilon", torch.tensor(EPSILON_FIRST))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        best = self.network(observation).argmax(-1)
        return torch.where(torch.rand(best.shape) < self.epsilon, torch.randint_like(best, 2), best)

    def anneal(self, frames: int) -> None:
        progress = min(1.0, frames / EPSILON_FRAMES)
        self.epsilon.fill_(EPSILON_FIRST + progress * (EPSILON_LAST - EPSILON_FIRST))


def as_policy(choose: nn.Module) -> TensorDictModule:
    return TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])


class Greedy(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.network(observation).argmax(-1)


def td_errors(batch: TensorDictBase, network: nn.Module, target_network: nn.Module) -> torch.Tensor:
    """Double DQN: the network says which action would be next, the target network what it is worth."""
    with torch.no_grad():
        next_observation = batch["next", "observation"]
        next_action = network(next_observation).argmax(-1, keepdim=True)
        next_value = target_network(next_observation).gather(-1, next_action)
        goes_on = ~batch["next", "terminated"]  # an episode that its time limit cut would have gone on
        target = batch["next", "reward"] + GAMMA * next_value * goes_on
    value = network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    return (value - target).squeeze(-1)


def learn(
    buffer: TensorDictReplayBuffer, network: nn.Module, target_network: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    batch = buffer.sample()  # waits for frames, if the learner is ahead
    error = td_errors(batch, network, target_network)
    loss = (
        batch["priority_weight"] * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
    ).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    buffer.update_priority(batch["index"], error.detach().abs())
    with torch.no_grad():
        for slow, fast in zip(target_network.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, TARGET_RATE)


def train(seed: int, total_frames: int) -> Iterator[tuple[int, nn.Module]]:
    """Yields every 2,000 frames, and at the end: the frames so far, and the network."""
    torch.manual_seed(seed)
    network = make_network()
    target_network = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
    explorer = EpsilonGreedy(network)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(BUFFER_SIZE),
        sampler=PrioritizedSampler(BUFFER_SIZE, alpha=0.6, beta=0.4, eps=0.01),
        batch_size=BATCH_SIZE,
        rate_limiter=SamplesPerInsert(BATCH_SIZE / FRAMES_PER_UPDATE, min_size=FIRST_FRAMES, slack=8 * BATCH_SIZE),
        generator=torch.Generator().manual_seed(seed),
    )
    collector = MultiAsyncCollector(
        [make_env] * NUM_ENVS, as_policy(explorer), frames_per_batch=8, total_frames=total_frames, replay_buffer=buffer
    )
    collector.set_seed(seed)
    next_yield = FIRST_FRAMES
    with collector:
        collector.start()
        num_updates = (total_frames - FIRST_FRAMES) // FRAMES_PER_UPDATE
        for update in range(num_updates):
            learn(buffer, network, target_network, optimizer)
            if update % UPDATES_PER_SYNC == 0:
                explorer.anneal(buffer.write_count)
                collector.update_policy_weights_()
            if buffer.write_count >= next_yield or update == num_updates - 1:
                next_yield += FRAMES_PER_EVALUATION
                with collector.pause():
                    yield buffer.write_count, network


def main() -> None:
    torch.set_num_threads(1)  # the other cores are for the workers
    options = read_options(__doc__, FRAMES)
    frames, policy = 0, None
    with Run("DQN, CartPole, MultiAsyncCollector", options, TARGET, "return, 10 evaluation episodes") as run:
        for frames, network in train(options.seed, options.frames):
            policy = as_policy(Greedy(network))
            few = evaluate(make_env, policy, STEPS_PER_EPISODE, STOPPING_SEED, num_episodes=10).mean()
            run.show(frames, float(few))
            if few >= ENOUGH and evaluate(make_env, policy, STEPS_PER_EPISODE, STOPPING_SEED).mean() >= ENOUGH:
                break
    run.finish(frames, lambda seed: evaluate(make_env, policy, STEPS_PER_EPISODE, seed))


if __name__ == "__main__":
    main()
