"""What owns processes, threads or shared memory is neither copied nor pickled; it says what to do, and works on."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, TensorDictReplayBuffer
from swath.envs import GymEnv, ParallelEnv, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool
from swath.errors import CannotCopy, SwathError
from swath.modules import InferenceServer, MPTransport, ProcessInferenceServer, SlotTransport, ThreadingTransport
from swath.weight_update import MultiProcessWeightSyncScheme

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps]
FRAMES: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 40}


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


def make_policy() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """Closes what a test has made. (That nothing is left then is looked at after every test.)"""
    with ExitStack() as stack:
        yield stack


COLLECTORS: dict[str, Callable[[], Any]] = {
    "Collector": lambda: Collector(make_env, RandomPolicy(), **FRAMES),
    "Collector of a ParallelEnv": lambda: Collector(lambda: ParallelEnv(2, make_env), RandomPolicy(), **FRAMES),
    "MultiSyncCollector": lambda: MultiSyncCollector([make_env] * 2, RandomPolicy(), **FRAMES),
    "MultiAsyncCollector": lambda: MultiAsyncCollector([make_env] * 2, RandomPolicy(), **FRAMES),
    "AsyncCollector": lambda: AsyncCollector(make_env, RandomPolicy(), **FRAMES),
    "AsyncBatchedCollector": lambda: AsyncBatchedCollector([make_env] * 2, RandomPolicy(), **FRAMES),
    "DistributedCollector": lambda: DistributedCollector([make_env], RandomPolicy(), launcher="mp", **FRAMES),
}


def assert_not_copied(owner: Any) -> None:
    for way in WAYS:
        with pytest.raises(CannotCopy, match=f"^{type(owner).__name__} cannot be copied.*(make another one|client)"):
            way(owner)
    gc.collect()  # a half-made copy would close what it was made of


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_collector_is_not_copied_and_goes_on(kind: str, ending: ExitStack) -> None:
    collector = COLLECTORS[kind]()
    ending.callback(collector.shutdown)
    assert collector.next().numel() == 10
    assert_not_copied(collector)
    assert sum(batch.numel() for batch in collector) == 30


@pytest.mark.parametrize("kind", [ParallelEnv, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool])
def test_envs_elsewhere_are_not_copied_and_go_on(kind: type, ending: ExitStack) -> None:
    env = ParallelEnv(2, make_env) if kind is ParallelEnv else kind([make_env] * 2)
    ending.callback(env.close)
    assert_not_copied(env)
    assert env.rollout(3).shape == (2, 3)


@pytest.mark.parametrize("kind", [InferenceServer, ProcessInferenceServer])
def test_a_server_is_not_copied_and_goes_on(kind: type, ending: ExitStack) -> None:
    server = ending.enter_context(InferenceServer(make_policy()) if kind is InferenceServer else kind(make_policy))
    assert_not_copied(server)
    client = server.client()
    assert client(TensorDict(observation=torch.zeros(4)))["action"].shape == (2,)
    if kind is InferenceServer:  # for threads of one process: another client, or an error that says what can be sent
        assert copy.copy(client)(TensorDict(observation=torch.zeros(4)))["action"].shape == (2,)
        with pytest.raises(CannotCopy, match="transport=SlotTransport"):
            pickle.dumps(client)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_is_not_copied_and_goes_on(backend: str, ending: ExitStack) -> None:
    evaluator = ending.enter_context(
        Evaluator(make_env, policy_factory=lambda env: RandomPolicy(), backend=backend, num_trajectories=1, max_steps=3)
    )
    assert_not_copied(evaluator)
    assert evaluator.evaluate()["eval/num_episodes"] == 1


@pytest.mark.parametrize("kind", [ThreadingTransport, SlotTransport, MPTransport])
def test_a_transport_is_not_copied(kind: type) -> None:
    assert_not_copied(kind())


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_buffer_and_its_parts_are_not_copied(kind: type, prefetch: int | None) -> None:
    """A copy of a storage had the number of a descriptor, and closed it: whosever it was by then."""
    sampler = PrioritizedSampler(10, alpha=0.5, beta=0.5)
    rb = TensorDictReplayBuffer(storage=kind(10), sampler=sampler, batch_size=4, prefetch=prefetch)
    rb.extend(TensorDict(x=torch.arange(10), batch_size=10))
    rb.sample()
    for part in (rb, rb.storage, sampler):
        assert_not_copied(part)
    if kind is not ListStorage:
        assert_not_copied(rb.storage.memory)  # type: ignore[attr-defined]
    assert rb.sample().shape == (4,)


def test_what_owns_nothing_yet_is_copied() -> None:
    """A storage without data is no more than its arguments; a weight scheme's copy has no connections."""
    for way in (copy.copy, copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))):
        assert way(LazyTensorStorage(10)).max_size == 10
        assert way(ListStorage(10)).max_size == 10


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_weight_scheme_closes_nothing(way: Callable[[Any], Any]) -> None:
    scheme = MultiProcessWeightSyncScheme(timeout_s=7.0)
    scheme.init_on_sender(model=torch.nn.Linear(1, 1), num_workers=1)
    copied = way(scheme)
    assert copied.timeout_s == 7.0
    del copied
    gc.collect()
    half = scheme.for_worker(0)
    assert not half._worker_ends[0].closed
    half.shutdown()
    scheme.shutdown()


def test_the_error_is_typed() -> None:
    assert issubclass(CannotCopy, SwathError)
    assert issubclass(CannotCopy, TypeError)  # as pickle's own


@pytest.mark.parametrize("kind", ["MultiSyncCollector", "DistributedCollector"])
def test_what_schemes_may_hold_is_not_assigned(kind: str, ending: ExitStack) -> None:
    collector = COLLECTORS[kind]()
    ending.callback(collector.shutdown)
    with pytest.raises(AttributeError):
        collector.lock = None
    assert "weight schemes" in (type(collector).lock.__doc__ or "")
