"""PPO on CartPole, with envs in worker processes that wait for each other: MultiSyncCollector.

    python examples/ppo_cartpole.py
    python examples/ppo_cartpole.py --seed 1 --plot ppo.png --json ppo.json

The target is a mean return of 475 over 100 evaluation episodes. Proximal Policy Optimization Algorithms, Schulman et
al., 2017. The settings are those that RL Baselines3 Zoo has for CartPole, but for 10 passes over a batch
instead of 20.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from common import STOPPING_SEED, Returns, Run, evaluate, read_options
from swath.collectors import MultiSyncCollector
from swath.envs import GymEnv

TARGET, ENOUGH = 475, 490  # the training ends when 100 evaluation episodes have this mean return
STEPS_PER_EPISODE = 500
FRAMES = 120_000
NUM_ENVS, STEPS_PER_BATCH = 8, 32
EPOCHS = 10  # each with the whole batch at once
GAMMA, LAMBDA = 0.98, 0.8
LEARNING_RATE, CLIP = 1e-3, 0.2  # both fall to zero, in a straight line
VALUE_WEIGHT, MAX_GRAD_NORM = 0.5, 0.5


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_network(num_outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers, orthogonal weights. A small ``gain`` lets the first policy prefer no action."""
    layers = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)
    for layer, its_gain in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, its_gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    logits = TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"])
    action = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential([logits, action])


def as_one_tensor(*modules: nn.Module) -> torch.Tensor:
    """Make all parameters, and their gradients, parts of one tensor: clipped and updated at once, not one by one."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    whole = torch.cat([parameter.detach().flatten() for parameter in parameters]).requires_grad_()
    whole.grad = torch.zeros_like(whole)
    start = 0
    for parameter in parameters:
        part = slice(start, start := start + parameter.numel())
        parameter.data, parameter.grad = whole.data[part].view_as(parameter), whole.grad[part].view_as(parameter)
    return whole


@torch.no_grad()
def advantages_and_targets(batch: TensorDictBase, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages of a batch ``[envs, time]``, and what the critic should have said.

    ``next`` has an episode's true last observation: one that was cut by its time limit goes on in the critic's eyes.
    """
    observations = torch.stack([batch["observation"], batch["next", "observation"]])
    value, next_value = critic(observations).squeeze(-1)
    goes_on = ~batch["next", "terminated"].squeeze(-1)
    error = batch["next", "reward"].squeeze(-1) + GAMMA * next_value * goes_on - value
    decay = ~batch["next", "done"].squeeze(-1) * (GAMMA * LAMBDA)
    advantage = torch.empty_like(error)
    ahead = torch.zeros(len(error))
    for t in reversed(range(error.shape[1])):
        ahead = torch.addcmul(error[:, t], decay[:, t], ahead)
        advantage[:, t] = ahead
    return advantage, advantage + value


def learn(
    batch: TensorDictBase, actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, clip: float
) -> None:
    """Plain tensors ``[frames, 1]``, and whatever is the same in every pass before the first one."""
    gradient = optimizer.param_groups[0]["params"][0].grad  # of everything
    advantage, target = (x.reshape(-1, 1) for x in advantages_and_targets(batch, critic))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    # What an action may gain is bounded from above only, so this is all that clipping the ratio comes to.
    bound = advantage * (1 + clip * advantage.sign())
    observation, action = batch["observation"].flatten(0, 1), batch["action"].reshape(-1, 1)
    old_log_prob = batch["action_log_prob"].reshape(-1, 1)
    for _ in range(EPOCHS):
        log_prob = actor(observation).log_softmax(-1).gather(-1, action)
        gain = torch.min((log_prob - old_log_prob).exp() * advantage, bound).mean()
        value_loss = nn.functional.mse_loss(critic(observation), target)
        gradient.zero_()
        (VALUE_WEIGHT * value_loss - gain).backward()
        gradient.mul_((MAX_GRAD_NORM / (gradient.norm() + 1e-6)).clamp(max=1))
        optimizer.step()


def train(seed: int, total_frames: int) -> Iterator[tuple[int, ProbabilisticTensorDictSequential, TensorDictBase]]:
    """Yields after each batch: the frames so far, the policy as it is now, and the batch."""
    torch.manual_seed(seed)
    actor, critic = make_network(2, gain=0.01), make_network(1, gain=1.0)
    policy = make_policy(actor)
    optimizer = torch.optim.Adam([as_one_tensor(actor, critic)], lr=LEARNING_RATE, eps=1e-5, fused=True)
    collector = MultiSyncCollector(
        [make_env] * NUM_ENVS,
        policy,
        frames_per_batch=NUM_ENVS * STEPS_PER_BATCH,
        total_frames=total_frames,
        # A copy of this program starts at once, and is safe as long as there are no other threads. The default waits
        # seconds for a server that imports torch; it is safe always, and wherever fork is not.
        mp_start_method="fork" if sys.platform == "linux" else None,
    )
    collector.set_seed(seed)
    frames = 0
    with collector:
        for batch in collector:  # [envs, time]
            remaining = 1 - frames / total_frames
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * remaining
            learn(batch, actor, critic, optimizer, CLIP * remaining)
            collector.update_policy_weights_()
            frames += batch.numel()
            yield frames, policy, batch


def main() -> None:
    torch.set_num_threads(1)  # the cores are for the workers
    options = read_options(__doc__, FRAMES)
    returns, frames, next_look, policy = Returns(last=20), 0, 0, None
    with Run("PPO, CartPole, MultiSyncCollector", options, TARGET, "return, last 20 training episodes") as run:
        for frames, policy, batch in train(options.seed, options.frames):
            returns.add(batch)
            run.show(frames, returns.mean)
            if returns.mean > 0.9 * TARGET and frames >= next_look:
                next_look = frames + 5_000
                if evaluate(make_env, policy, STEPS_PER_EPISODE, STOPPING_SEED).mean() >= ENOUGH:
                    break
    run.finish(frames, lambda seed: evaluate(make_env, policy, STEPS_PER_EPISODE, seed))


if __name__ == "__main__":
    main()
