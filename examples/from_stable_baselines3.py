"""What PPO("MlpPolicy", env).learn() does, with the loop in sight: PPO on CartPole; swath collects.

    python from_stable_baselines3.py
    python from_stable_baselines3.py --total-timesteps 50000 --resume runs/from_stable_baselines3/checkpoint.pt
    tensorboard --logdir runs

What is what: docs/coming-from-stable-baselines3.md.
"""

import argparse
from collections import deque
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

from swath import Collector, Evaluator, GymEnv, SerialEnv, TransformedEnv
from swath.envs import Compose, ExplorationType, RewardSum, VecNorm, exploration_type


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class ActorCriticPolicy(nn.Module):
    """ "MlpPolicy": two networks of 64 and 64 units."""

    def __init__(self):
        super().__init__()
        self.action_net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value_net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs):
        """What a collector calls. An Evaluator asks for the likeliest action, as predict(deterministic=True) does."""
        logits = self.action_net(obs)
        if exploration_type() is ExplorationType.DETERMINISTIC:
            action = logits.argmax(-1)
        else:
            action = Categorical(logits=logits).sample()
        return action, logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def evaluate_actions(self, obs, action):
        logits = self.action_net(obs)
        distribution = Categorical(logits=logits)
        return self.value_net(obs).squeeze(-1), distribution.log_prob(action), distribution.entropy()


class PPO:
    """The arguments, defaults and `train` of an algorithm. What is not here any more is collecting."""

    def __init__(self, net, learning_rate=1e-3, n_epochs=10, batch_size=256, gamma=0.98, gae_lambda=0.8,
                 clip_range=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5):  # fmt: skip
        self.net, self.optimizer = net, torch.optim.Adam(net.parameters(), lr=learning_rate, eps=1e-5)
        self.learning_rate, self.clip_range = learning_rate, clip_range
        self.n_epochs, self.batch_size, self.gamma, self.gae_lambda = n_epochs, batch_size, gamma, gae_lambda
        self.ent_coef, self.vf_coef, self.max_grad_norm = ent_coef, vf_coef, max_grad_norm

    @torch.no_grad()
    def compute_returns_and_advantage(self, batch):
        """Of ``[n_envs, n_steps]``. Where SB3 adds ``gamma * value(terminal_observation)`` to the reward of an episode
        that was truncated, ``next`` has that observation, and only ``terminated`` ends what is to come."""
        values = self.net.value_net(batch["observation"]).squeeze(-1)
        next_values = self.net.value_net(batch["next", "observation"]).squeeze(-1)
        rewards, terminated, done = (batch["next", key].squeeze(-1) for key in ("reward", "terminated", "done"))
        delta = rewards + self.gamma * next_values * ~terminated - values
        advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
        for step in reversed(range(rewards.shape[1])):
            advantages[:, step] = last = delta[:, step] + self.gamma * self.gae_lambda * ~done[:, step] * last
        return (advantages + values).reshape(-1), advantages.reshape(-1)

    def train(self, batch, progress_remaining):
        self.optimizer.param_groups[0]["lr"] = self.learning_rate * progress_remaining
        clip_range = self.clip_range * progress_remaining
        returns, advantages = self.compute_returns_and_advantage(batch)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        obs, actions, old_log_prob = (batch[key].flatten(0, 1) for key in ("observation", "action", "log_prob"))
        losses = {}
        for _ in range(self.n_epochs):
            for rows in torch.randperm(len(obs)).split(self.batch_size):
                values, log_prob, entropy = self.net.evaluate_actions(obs[rows], actions[rows])
                ratio = (log_prob - old_log_prob[rows]).exp()
                clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
                policy_loss = -torch.min(advantages[rows] * ratio, advantages[rows] * clipped).mean()
                value_loss = nn.functional.mse_loss(values, returns[rows])
                loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy.mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), self.max_grad_norm)
                self.optimizer.step()
                losses = {"train/policy_gradient_loss": policy_loss, "train/value_loss": value_loss}
        return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-timesteps", type=int, default=40_000)
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--n-steps", type=int, default=32, help="of each env, in a batch")
    parser.add_argument("--eval-freq", type=int, default=10_000, help="timesteps, of all envs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensorboard-log", type=Path, default=Path("runs/from_stable_baselines3"))
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # small networks are not faster with more
    norm = VecNorm(in_keys=["observation"])  # VecNormalize(norm_obs=True, norm_reward=False)
    env = TransformedEnv(  # make_vec_env("CartPole-v1", n_envs), VecMonitor
        SerialEnv(args.n_envs, make_env), Compose(RewardSum(), norm)
    )
    env.set_seed(args.seed)  # before the first reset, which counts in VecNorm's statistics
    net = ActorCriticPolicy()
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action", "log_prob"])
    model = PPO(net)
    collector = Collector(env, policy, frames_per_batch=args.n_envs * args.n_steps, total_frames=args.total_timesteps)
    collector.set_seed(args.seed)

    num_timesteps, best_mean_reward = 0, -float("inf")
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        net.load_state_dict(checkpoint["policy"])
        model.optimizer.load_state_dict(checkpoint["optimizer"])
        collector.load_state_dict(checkpoint["collector"])  # counts, random streams, the statistics of VecNorm
        num_timesteps, best_mean_reward = checkpoint["num_timesteps"], checkpoint["best_mean_reward"]
    writer = SummaryWriter(args.tensorboard_log, purge_step=num_timesteps)

    ep_rewards = deque(maxlen=100)  # ep_info_buffer
    next_eval = num_timesteps + args.eval_freq
    for batch in collector:  # collect_rollouts(): [n_envs, n_steps]
        num_timesteps += batch.numel()
        ep_rewards.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
        losses = model.train(batch, progress_remaining=1 - (num_timesteps - batch.numel()) / args.total_timesteps)
        collector.update_policy_weights_()

        # From here on: what callbacks were for.
        ep_rew_mean = sum(ep_rewards) / len(ep_rewards) if ep_rewards else float("nan")
        writer.add_scalar("rollout/ep_rew_mean", ep_rew_mean, num_timesteps)
        for name, loss in losses.items():
            writer.add_scalar(name, loss.item(), num_timesteps)

        if num_timesteps >= next_eval or num_timesteps >= args.total_timesteps:  # EvalCallback, CheckpointCallback
            next_eval += args.eval_freq
            eval_env = TransformedEnv(SerialEnv(10, make_env), norm.frozen_copy())  # sync_envs_normalization
            with Evaluator(eval_env, policy, num_trajectories=10) as evaluator:
                result = evaluator.evaluate(step=num_timesteps)
            print(
                f"num_timesteps={num_timesteps}, ep_rew_mean={ep_rew_mean:.1f}, "
                f"episode_reward={result['eval/reward']:.1f} +/- {result['eval/reward_std']:.1f}"
            )
            writer.add_scalar("eval/mean_reward", result["eval/reward"], num_timesteps)
            is_best = result["eval/reward"] > best_mean_reward
            best_mean_reward = max(best_mean_reward, result["eval/reward"])
            checkpoint = {
                "policy": net.state_dict(),
                "optimizer": model.optimizer.state_dict(),
                "collector": collector.state_dict(),
                "num_timesteps": num_timesteps,
                "best_mean_reward": best_mean_reward,
            }
            torch.save(checkpoint, args.tensorboard_log / "checkpoint.pt")
            if is_best:
                torch.save(checkpoint, args.tensorboard_log / "best_model.pt")
    writer.close()


if __name__ == "__main__":
    main()
