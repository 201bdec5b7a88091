"""SAC on Pendulum: a worker fills a replay buffer in the background, the learner samples it.

    python examples/sac_pendulum.py
    python examples/sac_pendulum.py --seed 1 --plot sac.png --json sac.json

The target is a mean return of -200 over 100 evaluation episodes. Soft Actor-Critic Algorithms and Applications,
Haarnoja et al., 2018: two critics, and a temperature that keeps the policy's entropy near a goal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from common import STOPPING_SEED, Run, evaluate, read_options
from swath.collectors import AsyncCollector
from swath.data import LazyTensorStorage, SamplesPerInsert, TensorDictReplayBuffer
from swath.envs import ExplorationType, GymEnv, exploration_type

TARGET, ENOUGH = -200, -175  # the training ends when 100 evaluation episodes have this mean return
STEPS_PER_EPISODE = 200
FRAMES = 20_000
BUFFER_SIZE, BATCH_SIZE = 20_000, 256
FRAMES_PER_UPDATE = 1  # whoever is ahead of this, collector or learner, waits for the other
RANDOM_FRAMES = 1_000  # before the first update
GAMMA, LEARNING_RATE = 0.99, 1e-3
TARGET_RATE = 0.01  # how much of the critics goes into the target critics at each update
LARGEST_ACTION, ENTROPY_GOAL = 2.0, -1.0
UPDATES_PER_SYNC, FRAMES_PER_EVALUATION = 20, 1_000


def make_env() -> GymEnv:
    return GymEnv("Pendulum-v1")


def make_network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_outputs)
    )


class Actor(nn.Module):
    """A normal distribution, squashed by tanh into the allowed actions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network(3, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """What envs get: a random action, or the middle one where somebody asks for no exploration."""
        mean, log_std = self.network(observation).chunk(2, -1)
        if exploration_type() is ExplorationType.RANDOM:
            mean = mean + log_std.clamp(-5, 2).exp() * torch.randn_like(mean)
        return LARGEST_ACTION * mean.tanh()

    def sample(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions through which gradients flow, and their log-probabilities."""
        mean, log_std = self.network(observation).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.pow(2) - log_std - 0.9189385  # log(sqrt(2 pi))
        log_slope = 2 * (0.6931472 - raw - nn.functional.softplus(-2 * raw)) + 0.6931472  # of 2 tanh(raw)
        return LARGEST_ACTION * raw.tanh(), log_normal - log_slope


class Critics(nn.Module):
    """Two networks that say what an action is worth, ``[batch, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = nn.ModuleList([make_network(4, 1) for _ in range(2)])

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        both = torch.cat([observation, action], -1)
        return torch.cat([network(both) for network in self.networks], -1)

    def lower(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self(observation, action).min(-1, keepdim=True).values


class Learner:
    def __init__(self) -> None:
        self.actor, self.critics = Actor(), Critics()
        self.target_critics = copy.deepcopy(self.critics)
        self.log_temperature = torch.zeros((), requires_grad=True)
        self.optimizers = [
            torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True)
            for parameters in (self.critics.parameters(), self.actor.parameters(), [self.log_temperature])
        ]

    def learn(self, batch: TensorDictBase) -> None:
        observation, next_observation = batch["observation"], batch["next", "observation"]
        temperature = self.log_temperature.detach().exp()

        with torch.no_grad():
            next_action, next_log_prob = self.actor.sample(next_observation)
            next_value = self.target_critics.lower(next_observation, next_action) - temperature * next_log_prob
            goes_on = ~batch["next", "terminated"]
            # A tenth of the reward: it is as low as -16, and networks like small numbers.
            target = 0.1 * batch["next", "reward"] + GAMMA * next_value * goes_on
        values = self.critics(observation, batch["action"])
        critic_loss = (values - target).pow(2).sum(-1).mean()

        self.critics.requires_grad_(False)  # the actor's loss goes through them, and is not theirs
        action, log_prob = self.actor.sample(observation)
        actor_loss = (temperature * log_prob - self.critics.lower(observation, action)).mean()
        self.critics.requires_grad_(True)
        temperature_loss = -self.log_temperature * (log_prob.detach().mean() + ENTROPY_GOAL)

        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (critic_loss + actor_loss + temperature_loss).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target_critics.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)


def train(seed: int, total_frames: int) -> Iterator[tuple[int, TensorDictModule]]:
    """Yields every 1,000 frames, and at the end: the frames so far, and the policy."""
    torch.manual_seed(seed)
    learner = Learner()
    policy = TensorDictModule(learner.actor, in_keys=["observation"], out_keys=["action"])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(BUFFER_SIZE),
        batch_size=BATCH_SIZE,
        rate_limiter=SamplesPerInsert(BATCH_SIZE / FRAMES_PER_UPDATE, min_size=RANDOM_FRAMES, slack=64 * BATCH_SIZE),
        generator=torch.Generator().manual_seed(seed),
    )
    collector = AsyncCollector(
        make_env,
        policy,
        frames_per_batch=32,
        total_frames=total_frames,
        init_random_frames=RANDOM_FRAMES,
        replay_buffer=buffer,
    )
    collector.set_seed(seed)
    collector.start()
    next_yield, num_updates = FRAMES_PER_EVALUATION, (total_frames - RANDOM_FRAMES) // FRAMES_PER_UPDATE
    try:
        for update in range(num_updates):
            learner.learn(buffer.sample())  # waits for frames, if the learner is ahead
            if update % UPDATES_PER_SYNC == 0:
                collector.update_policy_weights_()
            if buffer.write_count >= next_yield or update == num_updates - 1:
                next_yield += FRAMES_PER_EVALUATION
                with collector.pause():
                    yield buffer.write_count, policy
    finally:
        collector.async_shutdown()


def main() -> None:
    torch.set_num_threads(1)  # the other core is for the worker
    options = read_options(__doc__, FRAMES)
    frames, policy = 0, None
    with Run("SAC, Pendulum, start()", options, TARGET, "return, 10 evaluation episodes") as run:
        for frames, policy in train(options.seed, options.frames):
            few = evaluate(make_env, policy, STEPS_PER_EPISODE, STOPPING_SEED, num_episodes=10).mean()
            run.show(frames, float(few))
            if few >= ENOUGH and evaluate(make_env, policy, STEPS_PER_EPISODE, STOPPING_SEED).mean() >= ENOUGH:
                break
    run.finish(frames, lambda seed: evaluate(make_env, policy, STEPS_PER_EPISODE, seed))


if __name__ == "__main__":
    main()
