"""DQN as one writes it by hand, on CartPole; swath steps the env and fills the buffer.

    python from_own_loop.py
    python from_own_loop.py --resume runs/from_own_loop --steps 12000
    tensorboard --logdir runs

What is what: docs/coming-from-own-loop.md.
"""

import argparse
import copy
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from swath import Collector, Evaluator, GymEnv, LazyTensorStorage, ReplayBuffer, SerialEnv, TransformedEnv
from swath.envs import RewardSum

START_TRAINING, BATCH_SIZE, GAMMA = 1_000, 128, 0.99
STEPS, UPDATES = 32, 16  # in turns
EPSILON_START, EPSILON_END, EPSILON_STEPS = 1.0, 0.05, 5_000


def make_env():
    return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())


class QNetwork(nn.Module):
    epsilon: torch.Tensor

    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.register_buffer("epsilon", torch.tensor(EPSILON_START))  # a buffer: it is saved, and sent to workers

    def act(self, obs):
        """``env.action_space.sample() if random.random() < epsilon else q(obs).argmax()``, for any number of envs."""
        best = self.q(obs).argmax(-1)
        return torch.where(torch.rand(best.shape) < self.epsilon, torch.randint_like(best, 2), best)


def train_step(batch, net, target, optimizer):
    with torch.no_grad():
        next_obs = batch["next", "observation"]
        best = net.q(next_obs).argmax(-1, keepdim=True)
        # terminated, not done: an episode that was cut by its time limit would have gone on.
        goal = batch["next", "reward"] + GAMMA * target.q(next_obs).gather(-1, best) * ~batch["next", "terminated"]
    value = net.q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    loss = nn.functional.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, 0.02)
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/from_own_loop"))
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # small networks are not faster with more
    net = QNetwork()
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=BATCH_SIZE)
    policy = TensorDictModule(net.act, in_keys=["observation"], out_keys=["action"])
    greedy = TensorDictModule(lambda obs: net.q(obs).argmax(-1), in_keys=["observation"], out_keys=["action"])
    returns = []  # of the episodes that ended since the last line was printed
    step = 0

    writer = SummaryWriter(args.run_dir)

    def note_returns(batch):  # called with each batch, before it goes into the buffer
        for episode_return in batch["next", "episode_reward"][batch["next", "done"]].tolist():
            returns.append(episode_return)
            writer.add_scalar("episode/return", episode_return, step)

    collector = Collector(
        make_env,
        policy,
        frames_per_batch=STEPS,
        total_frames=args.steps,
        replay_buffer=buffer,
        post_collect_hook=note_returns,
    )
    collector.set_seed(args.seed)
    if args.resume:
        checkpoint = torch.load(args.resume / "checkpoint.pt", weights_only=True)
        net.load_state_dict(checkpoint["net"])
        target.load_state_dict(checkpoint["target"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        collector.load_state_dict(checkpoint["collector"])
        buffer.loads(args.resume / "buffer")
        step = buffer.write_count

    next_print = step + 2_000
    for _ in collector:  # STEPS steps, with their resets, and buffer.add
        step = buffer.write_count
        if step >= START_TRAINING:
            net.epsilon.fill_(max(EPSILON_END, EPSILON_START + step / EPSILON_STEPS * (EPSILON_END - EPSILON_START)))
            losses = [train_step(buffer.sample(), net, target, optimizer) for _ in range(UPDATES)]
            collector.update_policy_weights_()
            writer.add_scalar("train/loss", sum(losses) / UPDATES, step)
            writer.add_scalar("train/epsilon", net.epsilon.item(), step)
        if step >= next_print or step >= args.steps:
            next_print += 2_000
            mean = sum(returns) / len(returns) if returns else float("nan")
            print(f"step {step}: return {mean:.1f} over {len(returns)} episodes, epsilon {net.epsilon:.2f}")
            returns.clear()
            checkpoint = {
                "net": net.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "collector": collector.state_dict(),
            }
            torch.save(checkpoint, args.run_dir / "checkpoint.pt")
            buffer.dumps(args.run_dir / "buffer")
    with Evaluator(SerialEnv(10, make_env), greedy, num_trajectories=10) as evaluator:
        print(f"without exploration: {evaluator.evaluate()['eval/reward']:.1f} over 10 episodes")
    writer.close()


if __name__ == "__main__":
    main()
