"""Weights sent from a thread while workers die and are started again: it ends, and no frame lies about its weights.

The schedule is drawn from a seed: who is killed, after how many batches and updates, and which of the workers are sent
weights. Kills come at events (so many batches were seen, so many updates were acknowledged), not at times.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from leaks import wait_until
from numbered import NumberedEnv, assert_frames_whole
from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymWrapper
from swath.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:worker")]
KINDS = [MultiSyncCollector, MultiAsyncCollector]
SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
_BALLAST = 20_000
_SECONDS = 60.0


class Weighs(nn.Module):
    """All its weights are one number, which it writes beside its action: half of an update would show."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.ballast = nn.Parameter(torch.zeros(_BALLAST))
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lead = observation.shape[:-1]
        low, high = torch.stack([self.first[0], *self.ballast.aminmax(), self.last[0]]).aminmax()
        action = torch.nn.functional.one_hot(torch.zeros(lead, dtype=torch.int64), 2)
        return action, torch.stack([low, high]).expand(*lead, 2)

    def weights(self, value: float) -> dict[str, torch.Tensor]:
        return {f"module.{name}": torch.full_like(tensor, value) for name, tensor in self.named_parameters()}


def make_policy() -> tuple[Weighs, TensorDictModule]:
    network = Weighs()
    return network, TensorDictModule(network, in_keys=["observation"], out_keys=["action", "weighs"])


def make_numbered(number: int) -> Any:
    return GymWrapper(NumberedEnv(number))


def assert_versions_are_true(frames: TensorDictBase) -> None:
    """What chose the action is what the stamp says: all of the weights of a version are its number."""
    weighs = frames["weighs"].reshape(-1, 2)
    stamps = frames["policy_version"].reshape(-1).to(torch.float32)
    assert torch.equal(weighs[:, 0], weighs[:, 1]), "half of an update"
    assert torch.equal(weighs[:, 0], stamps), f"{weighs[weighs[:, 0] != stamps][:5]} under another version"


class Updates:
    """A thread that sends weights, to all workers or to some, until it is told to stop."""

    def __init__(self, collector: Any, network: Weighs, seed: int) -> None:
        self._collector, self._network = collector, network
        self._random = random.Random(seed)
        self._done = threading.Event()
        self.count = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        workers = range(self._collector.num_workers)
        try:
            while not self._done.is_set():
                version = self._collector.policy_version + 1  # nobody else counts
                chosen = None if self._random.random() < 0.7 else self._random.sample(workers, 1)
                self._collector.update_policy_weights_(self._network.weights(version), worker_ids=chosen)
                assert self._collector.policy_version == version
                self.count += 1
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Updates:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive(), "update_policy_weights_() hangs"
        if self.failure is not None:
            raise self.failure

    def await_more(self, number: int) -> None:
        goal = self.count + number
        assert wait_until(lambda: self.count >= goal or self.failure is not None, _SECONDS), "no update gets through"


def kill(collector: Any, worker: int) -> None:
    """Whoever it is now; nobody, if it is being started again."""
    line = collector.stats()["workers"][worker]
    if line["alive"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(line["pid"], signal.SIGKILL)


def make_collector(kind: type, network: Weighs, policy: Any, scheme: type, **kwargs: Any) -> Any:
    return kind(
        [lambda number=number: make_numbered(number) for number in range(3)],
        policy,
        frames_per_batch=30,
        num_workers=3,
        restart_workers=10_000,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme()},
        **kwargs,
    )


def run_rounds(kind: type, scheme: type, background: bool, seed: int, num_kills: int) -> None:
    network, policy = make_policy()
    buffer = ReplayBuffer(storage=LazyTensorStorage(200_000)) if background else None
    collector = make_collector(kind, network, policy, scheme, replay_buffer=buffer)
    schedule = random.Random(seed)
    batches = None
    if background:
        collector.start()
    else:
        batches = iter(collector)
    with Updates(collector, network, seed) as updates:
        for _ in range(num_kills):
            if batches is not None:
                for _ in range(schedule.randrange(1, 4)):
                    batch = next(batches)
                    assert_versions_are_true(batch)
                    assert_frames_whole(batch.reshape(-1))
            if schedule.random() < 0.5:
                updates.await_more(schedule.randrange(1, 3))
            for worker in schedule.sample(range(3), schedule.choice([1, 1, 1, 2, 3])):
                kill(collector, worker)
        if batches is not None:
            for _ in range(6):  # whoever was killed last is back
                assert_versions_are_true(next(batches))
        updates.await_more(2)
    versions = [line["policy_version"] for line in collector.stats()["workers"]]
    assert max(versions) == collector.policy_version
    if buffer is not None:
        with collector.pause():
            frames = buffer[:]
        assert_versions_are_true(frames)
        assert_frames_whole(frames)
        collector.async_shutdown()
    collector.shutdown()


@pytest.mark.parametrize(
    ("kind", "scheme", "background"),
    [
        (MultiSyncCollector, SharedMemWeightSyncScheme, False),
        (MultiAsyncCollector, MultiProcessWeightSyncScheme, False),
        (MultiSyncCollector, MultiProcessWeightSyncScheme, True),
        (MultiAsyncCollector, SharedMemWeightSyncScheme, True),
    ],
)
def test_no_hang_and_no_lie_while_weights_are_sent_and_workers_die(kind: type, scheme: type, background: bool) -> None:
    run_rounds(kind, scheme, background, seed=1, num_kills=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_series_of_kills_while_weights_are_sent(kind: type, scheme: type, background: bool, seed: int) -> None:
    run_rounds(kind, scheme, background, seed, num_kills=30)
