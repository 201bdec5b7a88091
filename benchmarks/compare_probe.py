"""One row of compare.py, in a process of its own: measures when it is told to, over standard input and output.

python compare_probe.py ROW, with the swath to be measured first in PYTHONPATH. It says `ready` and the file of the
swath that it measures; then each line that it reads is a number of seconds, and each line that it writes a rate.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import swath
from contenders import swath_env, swath_policy
from setting import Setting

#: Measures for at least so many seconds; returns how many a second.
Measure = Callable[[float], float]


class Agent(nn.Module):
    """As CleanRL writes it: a distribution and a critic in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        distribution = torch.distributions.Categorical(logits=self.actor(observation))
        action = distribution.sample()
        return action, distribution.log_prob(action), self.critic(observation)


def _envs(setting: Setting) -> Any:
    from swath.envs import SerialEnv

    if setting.num_envs == 1:
        return swath_env(setting)
    return SerialEnv(setting.num_envs, partial(swath_env, setting))


def _rate(collector: Any, ahead: int) -> Measure:
    """`ahead`: batches that may have been collected while nobody asked; they do not count."""
    batches = iter(collector)

    def measure(seconds: float) -> float:
        for _ in range(ahead):
            next(batches)
        frames, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            frames += next(batches).numel()
        return frames / (time.perf_counter() - started)

    return measure


def single(env_id: str, num_envs: int) -> Measure:
    from swath.collectors import Collector

    setting = Setting.rounded_up(env_id, num_envs, 1000)
    policy = swath_policy(setting, setting.make_network())
    return _rate(Collector(_envs(setting), policy, frames_per_batch=setting.frames_per_batch), 2)


def agent() -> Measure:
    from swath.collectors import Collector
    from swath.envs import GymEnv

    keys: list[Any] = ["action", "sample_log_prob", "state_value"]
    policy = TensorDictModule(Agent(), in_keys=["observation"], out_keys=keys)
    return _rate(Collector(GymEnv("CartPole-v1", categorical_action_encoding=True), policy, frames_per_batch=1000), 2)


def multi(sync: bool, num_envs: int, frames: int) -> Measure:
    from swath.collectors import MultiAsyncCollector, MultiSyncCollector

    setting = Setting("CartPole-v1", num_envs, frames)
    policy = swath_policy(setting, setting.make_network())
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    collector = kind([partial(swath_env, setting)] * num_envs, policy, frames_per_batch=frames)
    return _rate(collector, 2 if sync else 2 * num_envs)


def batched(num_envs: int) -> Measure:
    from swath.collectors import AsyncBatchedCollector

    setting = Setting("CartPole-v1", num_envs, 50)
    policy = swath_policy(setting, setting.make_network())
    envs = [partial(swath_env, setting)] * num_envs
    return _rate(AsyncBatchedCollector(envs, policy, frames_per_batch=setting.frames_per_batch), 2)


def parallel() -> Measure:
    from swath.collectors import Collector
    from swath.envs import ParallelEnv

    setting = Setting("Pendulum-v1", 4, 50)
    env = ParallelEnv(4, partial(swath_env, setting))
    policy = swath_policy(setting, setting.make_network())
    return _rate(Collector(env, policy, frames_per_batch=setting.frames_per_batch), 2)


def nodes() -> Measure:
    from swath.collectors import Collector

    setting = Setting("CartPole-v1", 8, 125)
    policy = swath_policy(setting, setting.make_network())
    collector = Collector(
        partial(_envs, setting), policy, frames_per_batch=1000, num_collectors=2, backend="distributed", sync=True
    )
    return _rate(collector, 2)


def filling() -> Measure:
    from swath.collectors import MultiAsyncCollector
    from swath.data import LazyTensorStorage, TensorDictReplayBuffer

    setting = Setting("CartPole-v1", 4, 250)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(200_000), batch_size=256)
    policy = swath_policy(setting, setting.make_network())
    envs = [partial(swath_env, setting)] * 4
    collector = MultiAsyncCollector(envs, policy, frames_per_batch=250, total_frames=-1, replay_buffer=rb)
    collector.start()
    never = threading.Event()

    def measure(seconds: float, collector: Any = collector) -> float:
        before, started = rb.write_count, time.perf_counter()
        never.wait(seconds)
        return (rb.write_count - before) / (time.perf_counter() - started)

    return measure


def sampling() -> Measure:
    from swath.data import LazyTensorStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
    frames = TensorDict({"observation": torch.randn(100_000, 4), "reward": torch.randn(100_000, 1)}, [100_000])
    rb.extend(frames)

    def measure(seconds: float) -> float:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            rb.sample()
            count += 1
        return count / (time.perf_counter() - started)

    return measure


def updates() -> Measure:
    from swath.collectors import MultiSyncCollector

    setting = Setting("CartPole-v1", 4, 64)
    policy = swath_policy(setting, setting.make_network())
    collector = MultiSyncCollector([partial(swath_env, setting)] * 4, policy, frames_per_batch=64)
    next(iter(collector))

    def measure(seconds: float) -> float:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            collector.update_policy_weights_()
            count += 1
        return count / (time.perf_counter() - started)

    return measure


def server() -> Measure:
    from swath.modules import InferenceServer

    setting = Setting("CartPole-v1", 1, 1)
    policy = TensorDictModule(setting.make_network(), in_keys=["observation"], out_keys=["action"])
    served = InferenceServer(policy, max_batch_size=64).start()
    request = TensorDict({"observation": torch.zeros(4)})

    def ask(client: Any, until: float) -> Iterator[int]:
        while time.perf_counter() < until:
            client(request)
            yield 1

    def measure(seconds: float) -> float:
        answers: list[int] = []
        started = time.perf_counter()
        clients = [served.client() for _ in range(16)]
        threads = [
            threading.Thread(target=lambda c=client: answers.append(sum(ask(c, started + seconds))))
            for client in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(answers) / (time.perf_counter() - started)

    return measure


ROWS: dict[str, Callable[[], Measure]] = {
    "Collector, 1 CartPole": partial(single, "CartPole-v1", 1),
    "Collector, 8 CartPoles": partial(single, "CartPole-v1", 8),
    "Collector, 1 Pendulum": partial(single, "Pendulum-v1", 1),
    "Collector, 1 CartPole, an agent's own forward": agent,
    "Collector(ParallelEnv), 4 Pendulums": parallel,
    "MultiSync, 4 CartPoles, batches of 1000": partial(multi, True, 4, 1000),
    "MultiSync, 4 CartPoles, batches of 64": partial(multi, True, 4, 64),
    "MultiAsync, 4 CartPoles": partial(multi, False, 4, 1000),
    "MultiSync, 64 CartPoles": partial(multi, True, 64, 16_000),
    "AsyncBatched, 8 CartPoles": partial(batched, 8),
    "AsyncBatched, 64 CartPoles": partial(batched, 64),
    "DistributedSync (gloo), 2 nodes": nodes,
    "MultiAsync fills a buffer, start()": filling,
    "sample(256) of a buffer": sampling,
    "update_policy_weights_(), 4 workers": updates,
    "InferenceServer, 16 threads": server,
}
#: Nodes whose driver says nothing for a while take it for lost; they rest by themselves when they are not asked.
NOT_STOPPED = ("DistributedSync (gloo), 2 nodes",)


def main(row: str) -> None:
    torch.set_num_threads(1)
    measure = ROWS[row]()
    measure(0.5)
    print("ready", swath.__file__, flush=True)
    for line in sys.stdin:
        print(measure(float(line)), flush=True)
    os._exit(0)  # what is left running ends with its owner


if __name__ == "__main__":
    main(sys.argv[1])
