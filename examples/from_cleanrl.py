"""PPO as CleanRL writes it, on CartPole; swath collects.

    python from_cleanrl.py
    python from_cleanrl.py --workers 4 --total-timesteps 200000
    python from_cleanrl.py --resume runs/from_cleanrl/checkpoint.pt --total-timesteps 80000
    tensorboard --logdir runs

What is what: docs/coming-from-cleanrl.md.
"""

import argparse
from pathlib import Path

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

from swath import Collector, GymWrapper, MultiCollector, SerialEnv


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-timesteps", type=int, default=60_000)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=128, help="of each env, in a batch")
    parser.add_argument("--workers", type=int, default=0, help="so many processes step the envs; 0: this one does")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/from_cleanrl"))
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    return parser.parse_args()


def make_env():
    env = gym.make("CartPole-v1")
    env = gym.wrappers.RecordEpisodeStatistics(env)
    return GymWrapper(env, categorical_action_encoding=True, info_keys=["episode"])


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Not changed: swath calls ``get_action_and_value``."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(4, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(4, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 2), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


@torch.no_grad()
def advantages_of(batch, agent, gamma, gae_lambda):
    """GAE, ``[envs, steps]``. ``next`` is the true next observation, at an episode's last step too."""
    values = batch["value"].squeeze(-1)
    next_values = agent.get_value(batch["next", "observation"]).squeeze(-1)
    rewards = batch["next", "reward"].squeeze(-1)
    terminated = batch["next", "terminated"].squeeze(-1)  # nothing comes after it: no bootstrap
    done = batch["next", "done"].squeeze(-1)  # terminated or truncated: the next step is another episode's
    delta = rewards + gamma * next_values * ~terminated - values
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        advantages[:, t] = lastgaelam = delta[:, t] + gamma * gae_lambda * ~done[:, t] * lastgaelam
    return advantages


def update(batch, agent, optimizer, args):
    """The same as ever, on ``[envs * steps]``; returns the losses of the last minibatch."""
    advantages = advantages_of(batch, agent, args.gamma, args.gae_lambda)
    b_returns = (advantages + batch["value"].squeeze(-1)).reshape(-1)
    b_advantages = advantages.reshape(-1)
    losses = {}
    b_obs, b_actions, b_logprobs = (batch[key].flatten(0, 1) for key in ("observation", "action", "logprob"))
    for _ in range(args.update_epochs):
        for mb in torch.randperm(len(b_obs)).chunk(args.num_minibatches):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            adv = b_advantages[mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
            v_loss = 0.5 * (newvalue.view(-1) - b_returns[mb]).pow(2).mean()
            loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            losses = {"losses/policy_loss": pg_loss, "losses/value_loss": v_loss, "losses/entropy": entropy.mean()}
    return losses


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # small networks are not faster with more, and workers want the cores
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    policy = TensorDictModule(
        agent.get_action_and_value, in_keys=["observation"], out_keys=["action", "logprob", "entropy", "value"]
    )
    amount = {"frames_per_batch": args.num_envs * args.num_steps, "total_frames": args.total_timesteps}
    if args.workers:
        collector = MultiCollector([make_env] * args.num_envs, policy, num_workers=args.workers, sync=True, **amount)
    else:
        collector = Collector(SerialEnv(args.num_envs, make_env), policy, **amount)
    collector.set_seed(args.seed)

    global_step = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        collector.load_state_dict(checkpoint["collector"])  # counts, ids, random streams; new episodes begin
        global_step = checkpoint["global_step"]
    writer = SummaryWriter(args.run_dir, purge_step=global_step)

    episodic_returns = []  # of the episodes that ended since the last line was printed
    with collector:
        for iteration, batch in enumerate(collector, start=1):  # [num_envs, num_steps]
            global_step += batch.numel()
            done = batch["next", "done"].squeeze(-1)
            for episodic_return in batch["next", "episode", "r"][done].tolist():
                episodic_returns.append(episodic_return)
                writer.add_scalar("charts/episodic_return", episodic_return, global_step)

            remaining = 1 - (global_step - batch.numel()) / args.total_timesteps
            optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
            losses = update(batch, agent, optimizer, args)
            collector.update_policy_weights_()  # workers have a copy of the agent
            for name, loss in losses.items():
                writer.add_scalar(name, loss.item(), global_step)

            is_last = global_step >= args.total_timesteps
            if iteration % 10 == 0 or is_last:
                mean = sum(episodic_returns) / len(episodic_returns) if episodic_returns else float("nan")
                print(f"global_step={global_step}, episodic_return={mean:.1f} ({len(episodic_returns)} episodes)")
                episodic_returns.clear()
                torch.save(
                    {
                        "agent": agent.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "collector": collector.state_dict(),
                        "global_step": global_step,
                    },
                    args.run_dir / "checkpoint.pt",
                )
    writer.close()


if __name__ == "__main__":
    main()
