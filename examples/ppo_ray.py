"""PPO on CartPole, with envs in Ray actors, on one machine or many: RayCollector.

    pip install 'swath[ray]'
    python examples/ppo_ray.py
    python examples/ppo_ray.py --seed 1 --plot ppo.png --json ppo.json

The target is a mean return of 475 over 100 evaluation episodes. Without a cluster, one is started on this machine and
ended with the collector; the seconds that this takes are in the result. Call ``ray.init(address=...)`` first to use
yours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from common import STOPPING_SEED, Returns, Run, evaluate, read_options
from swath.collectors.distributed import RayCollector
from swath.envs import GymEnv, SerialEnv

TARGET, ENOUGH = 475, 490  # the training ends when 100 evaluation episodes have this mean return
STEPS_PER_EPISODE = 500
FRAMES = 200_000
NUM_ACTORS, ENVS_PER_ACTOR, STEPS_PER_BATCH = 2, 8, 64  # longer batches than in other examples: fewer messages
EPOCHS, MINIBATCH = 10, 256
GAMMA, LAMBDA = 0.98, 0.9
LEARNING_RATE, CLIP = 1e-3, 0.2  # both fall to zero, in a straight line
VALUE_WEIGHT, MAX_GRAD_NORM = 0.5, 0.5


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_envs() -> SerialEnv:
    """What one actor has: several envs, and one call of the policy for all of them."""
    return SerialEnv(ENVS_PER_ACTOR, make_env)


def make_network(num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def make_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    logits = TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"])
    action = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential([logits, action])


@torch.no_grad()
def advantages_and_targets(rows: TensorDictBase, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages of rows ``[envs, time]``, and what the critic should have said."""
    value = critic(rows["observation"]).squeeze(-1)
    next_value = critic(rows["next", "observation"]).squeeze(-1)
    goes_on = ~rows["next", "terminated"].squeeze(-1)
    error = rows["next", "reward"].squeeze(-1) + GAMMA * next_value * goes_on - value
    decay = ~rows["next", "done"].squeeze(-1) * (GAMMA * LAMBDA)
    advantage = torch.empty_like(error)
    ahead = torch.zeros(len(error))
    for t in reversed(range(error.shape[1])):
        ahead = error[:, t] + decay[:, t] * ahead
        advantage[:, t] = ahead
    return advantage, advantage + value


def learn(
    rows: TensorDictBase, actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, clip: float
) -> None:
    advantage, target = (x.flatten() for x in advantages_and_targets(rows, critic))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation, action = rows["observation"].reshape(-1, 4), rows["action"].reshape(-1)
    old_log_prob = rows["action_log_prob"].reshape(-1)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(action)).split(MINIBATCH):
            log_probs = actor(observation[some]).log_softmax(-1)
            log_prob = log_probs.gather(-1, action[some].unsqueeze(-1)).squeeze(-1)
            ratio = (log_prob - old_log_prob[some]).exp()
            better = advantage[some]
            gain = torch.min(ratio * better, ratio.clamp(1 - clip, 1 + clip) * better).mean()
            value_loss = nn.functional.mse_loss(critic(observation[some]).squeeze(-1), target[some])
            optimizer.zero_grad()
            (VALUE_WEIGHT * value_loss - gain).backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], MAX_GRAD_NORM)
            optimizer.step()


def train(seed: int, total_frames: int) -> Iterator[tuple[int, ProbabilisticTensorDictSequential, TensorDictBase]]:
    """Yields after each batch: the frames so far, the policy as it is now, and the batch."""
    torch.manual_seed(seed)
    actor, critic = make_network(2), make_network(1)
    policy = make_policy(actor)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE, eps=1e-5, fused=True)
    collector = RayCollector(
        [make_envs] * NUM_ACTORS,
        policy,
        frames_per_batch=NUM_ACTORS * ENVS_PER_ACTOR * STEPS_PER_BATCH,
        total_frames=total_frames,
        sync=True,
    )
    collector.set_seed(seed)
    frames = 0
    with collector:
        for batch in collector:  # [actors, envs, time]
            remaining = 1 - frames / total_frames
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * remaining
            learn(batch.flatten(0, 1), actor, critic, optimizer, CLIP * remaining)
            collector.update_policy_weights_()
            frames += batch.numel()
            yield frames, policy, batch


def main() -> None:
    torch.set_num_threads(1)  # the cores are for the actors
    options = read_options(__doc__, FRAMES)
    returns, frames, next_look, policy = Returns(last=20), 0, 0, None
    with Run("PPO, CartPole, RayCollector", options, TARGET, "return, last 20 training episodes") as run:
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
