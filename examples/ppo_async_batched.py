"""PPO on CartPole, with one policy for envs that never wait for each other: AsyncBatchedCollector.

    python examples/ppo_async_batched.py
    python examples/ppo_async_batched.py --seed 1 --plot ppo.png --json ppo.json

The target is a mean return of 475 over 100 evaluation episodes. This way of collecting is for envs whose steps take
long, or vary; CartPole's do not, but it fits on a page. Batches are flat: an env that was quicker has more frames in
them, and the first frames may be of the weights before the last update. PPO corrects for that: it divides by the
probability that an action had when it was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from common import STOPPING_SEED, Returns, Run, evaluate, read_options
from swath.collectors import AsyncBatchedCollector
from swath.envs import GymEnv

TARGET, ENOUGH = 475, 490  # the training ends when 100 evaluation episodes have this mean return
STEPS_PER_EPISODE = 500
FRAMES = 150_000
NUM_ENVS, FRAMES_PER_BATCH = 8, 512
EPOCHS, MINIBATCH = 10, 256
GAMMA, LAMBDA = 0.98, 0.8
LEARNING_RATE, CLIP = 1e-3, 0.2  # both fall to zero, in a straight line
VALUE_WEIGHT, MAX_GRAD_NORM = 0.5, 0.5


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_network(num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def make_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    logits = TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"])
    action = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential([logits, action])


def by_env(batch: TensorDictBase) -> TensorDictBase:
    """The frames of each env behind one another. Within an env they are in order already, and stay so."""
    return batch[batch["env_index"].argsort(stable=True)]


@torch.no_grad()
def advantages_and_targets(frames: TensorDictBase, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages of frames in the order of ``by_env``, and what the critic should have said."""
    value = critic(frames["observation"]).squeeze(-1)
    next_value = critic(frames["next", "observation"]).squeeze(-1)
    goes_on = ~frames["next", "terminated"].squeeze(-1)
    error = frames["next", "reward"].squeeze(-1) + GAMMA * next_value * goes_on - value
    # Nothing is carried over from the next frame where that is of another episode, or of another env.
    traj_ids = frames["collector", "traj_ids"]
    is_last = torch.ones(len(traj_ids), dtype=torch.bool)
    is_last[:-1] = traj_ids[:-1] != traj_ids[1:]
    advantage, ahead = [], 0.0
    for its_error, is_end in zip(reversed(error.tolist()), reversed(is_last.tolist()), strict=True):
        ahead = its_error if is_end else its_error + GAMMA * LAMBDA * ahead
        advantage.append(ahead)
    result = torch.tensor(advantage[::-1])
    return result, result + value


def learn(
    frames: TensorDictBase, actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, clip: float
) -> None:
    advantage, target = advantages_and_targets(frames, critic)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation, action, old_log_prob = frames["observation"], frames["action"], frames["action_log_prob"]
    for _ in range(EPOCHS):
        for some in torch.randperm(len(frames)).split(MINIBATCH):
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
    collector = AsyncBatchedCollector(
        [make_env] * NUM_ENVS,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=total_frames,
        max_batch_size=NUM_ENVS,
    )
    collector.set_seed(seed)
    frames = 0
    with collector:
        for batch in collector:  # [frames]
            remaining = 1 - frames / total_frames
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * remaining
            learn(by_env(batch), actor, critic, optimizer, CLIP * remaining)
            collector.update_policy_weights_()
            frames += len(batch)
            yield frames, policy, batch


def main() -> None:
    torch.set_num_threads(1)  # the cores are for the envs
    options = read_options(__doc__, FRAMES)
    returns, frames, next_look, policy = Returns(last=20), 0, 0, None
    with Run("PPO, CartPole, AsyncBatchedCollector", options, TARGET, "return, last 20 training episodes") as run:
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
