"""Weights: how they reach workers, whole or not at all, and nothing that was not sent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from counting import make_counting
from leaks import wait_until
from policies_for_tests import deterministic
from slow_envs import receive_in_a_process
from swath.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import ParallelEnv
from swath.errors import CollectorClosed, WeightSyncError, WorkerDied
from swath.modules import InferenceServer
from swath.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from warned import warned_here

pytestmark = pytest.mark.processes
SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


class SaysItsVersion(nn.Module):
    """Writes its weights, which are all its version, into the action; a torn update would show."""

    last: torch.Tensor

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(3))
        self.ballast = nn.Parameter(torch.zeros(size))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        assert bool((self.ballast == self.version[0]).all()), "half of an update"
        return self.version.expand(*observation.shape[:-1], 3) + 0 * self.last

    def set(self, version: float) -> None:
        with torch.no_grad():
            for tensor in (self.version, self.ballast, self.last):
                tensor.fill_(version)


def versioned(size: int = 3) -> tuple[SaysItsVersion, TensorDictModule]:
    network = SaysItsVersion(size)
    return network, TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_thousand_updates_while_workers_collect(scheme: type[WeightSyncScheme]) -> None:
    network, policy = versioned(100_000)
    collector = MultiAsyncCollector(
        [make_counting] * 4,
        policy,
        frames_per_batch=50,
        num_workers=4,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme()},
    )
    batches = iter(collector)
    updates = 1000 if scheme is SharedMemWeightSyncScheme else 100
    seen: set[int] = set()
    for version in range(1, updates + 1):
        network.set(version)
        collector.update_policy_weights_()
        network.set(-1)  # an optimizer step that nobody published
        before = len(seen)
        while version % 5 == 0 and len(seen) == before:  # until a batch was begun, or went on, after the update
            batch = next(batches)
            stamps = batch["policy_version"]
            assert torch.equal(stamps, batch["next", "policy_version"])
            assert torch.equal(batch["action"], stamps.unsqueeze(-1).expand(-1, 3).to(torch.float32))
            assert bool((stamps.diff() >= 0).all())
            seen.update(stamps.tolist())
    assert collector.policy_version == updates
    assert [line["policy_version"] for line in collector.stats()["workers"]] == [updates] * 4
    assert len(seen) >= updates // 5
    collector.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_way_to_hand_weights_over(scheme: type[WeightSyncScheme], method: str) -> None:
    network, policy = versioned()
    collector = MultiSyncCollector(
        [make_counting] * 2,
        policy,
        frames_per_batch=8,
        num_workers=2,
        weight_sync_schemes={"policy": scheme()},
        mp_start_method=method,
    )
    batches = iter(collector)

    def acts() -> list[float]:
        return next(batches)["action"][:, 0, 0].tolist()

    def weights(version: float) -> dict[str, torch.Tensor]:
        other, module = versioned()
        other.set(version)
        return dict(module.state_dict())

    network.set(5)
    assert acts() == [0, 0]  # not published
    collector.update_policy_weights_()
    assert acts() == [5, 5]
    collector.update_policy_weights_(weights(6))
    assert acts() == [6, 6]
    collector.update_policy_weights_(TensorDict(weights(7)).unflatten_keys("."))
    assert acts() == [7, 7]
    other, module = versioned()
    other.set(8)
    collector.update_policy_weights_(policy=module)
    assert acts() == [8, 8]
    collector.update_policy_weights_(weights_dict={"policy": weights(9)})
    assert acts() == [9, 9]
    collector.update_policy_weights_(weights=weights(10), worker_ids=1)
    assert acts() == [9, 10]
    collector.update_policy_weights_({0: weights(11), 1: weights(12)})
    assert acts() == [11, 12]
    collector.update_policy_weights_(weights(13), model_id="policy", worker_ids=[0, 1])
    assert acts() == [13, 13]
    assert network.version[0] == 5
    arguments: dict[str, Any]
    for arguments, error, match in (
        ({"weights": weights(1), "policy": module}, ValueError, "not both"),
        ({"weights_dict": {}, "model_id": "policy"}, ValueError, "goes alone"),
        ({"model_id": "critic"}, KeyError, "no model 'critic'"),
        ({"worker_ids": 2}, ValueError, "there is no worker 2"),
        ({"weights": {"wrong": torch.zeros(3)}}, KeyError, "do not fit the policy"),
        ({"weights": {**weights(1), "module.version": torch.zeros(4)}}, ValueError, r"shape \(4,\)"),
    ):
        with pytest.raises(error, match=match):
            collector.update_policy_weights_(**arguments)
        with pytest.raises(ValueError, match="there is no worker 7"):
            collector.update_policy_weights_({0: weights(1), 7: weights(1)})
    assert collector.policy_version == 8
    assert acts() == [13, 13]
    collector.shutdown()


class Counts(nn.Module):
    """Has a weight of whole numbers beside its others."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(1, dtype=torch.int64))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (self.version * self.scale).expand(*observation.shape[:-1], 3)


def counts() -> TensorDictModule:
    return TensorDictModule(Counts(), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("make", ["Collector", "MultiSyncCollector", "policy_factory", "InferenceServer"])
def test_weights_of_another_dtype_are_exact_or_refused(make: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "Collector": lambda: Collector(make_counting(), counts(), frames_per_batch=8),
        "MultiSyncCollector": lambda: MultiSyncCollector([make_counting] * 2, counts(), frames_per_batch=8),
        "policy_factory": lambda: MultiSyncCollector([make_counting] * 2, policy_factory=counts, frames_per_batch=8),
        "InferenceServer": lambda: InferenceServer(counts()),
    }
    version, scale = torch.full((3,), 2.0), torch.full((1,), 3)

    def weights(version: torch.Tensor = version, scale: Any = scale) -> dict[str, Any]:
        return {"module.version": version, "module.scale": scale}

    with makers[make]() as updated:
        updated.update_policy_weights_(weights(version.half(), scale.int()))  # nothing is lost
        before = updated.policy_version
        for wrong in (
            weights(version.double()),
            weights(version.long()),
            weights(scale=scale.float() + 0.7),
            weights(version.to(torch.complex64)),
        ):
            with pytest.raises(ValueError, match=r"cannot hold all of its values; if that is meant.*\.to\(torch\."):
                updated.update_policy_weights_(wrong)
        with pytest.raises(TypeError, match=r"'module\.scale' is an ndarray"):
            updated.update_policy_weights_(weights(scale=scale.numpy()))
        if make != "policy_factory":  # whose weights are known in the workers only
            assert updated.policy_version == before
            with pytest.raises(TypeError, match=r"'module\.scale' is a list, not a tensor"):
                updated.update_policy_weights_(weights(scale=[3]))
        if make != "InferenceServer":
            assert bool((next(iter(updated))["action"] == 6).all())


def test_a_strategy_refuses_what_does_not_fit_before_it_copies_anything() -> None:
    strategy = WeightStrategy()
    for wrong in ({"a": torch.ones(2), "b": torch.ones(2).double()}, {"a": torch.ones(2), "b": torch.ones(1)}):
        into = {"a": torch.zeros(2), "b": torch.zeros(2)}
        with pytest.raises(ValueError, match="'b'"):
            strategy.apply_weights(into, wrong)
        assert not into["a"].any()


def test_update_at_each_batch() -> None:
    for sync in (True, False):
        network, policy = versioned()
        collector = MultiCollector(
            [make_counting] * 2,
            policy,
            frames_per_batch=8,
            total_frames=80,
            update_at_each_batch=True,
            sync=sync,
            track_policy_version=True,
        )
        for index, batch in enumerate(collector):
            network.set(index + 1)
            assert torch.equal(batch["action"][..., 0], batch["policy_version"].to(torch.float32))
        assert collector.policy_version == 9


def test_policy_made_in_the_workers() -> None:
    def factory() -> Any:
        network, policy = versioned()
        network.set(3)
        return policy

    with MultiSyncCollector([make_counting] * 2, policy_factory=factory, frames_per_batch=8) as collector:
        batches = iter(collector)
        assert next(batches)["action"][0, 0, 0] == 3
        with pytest.raises(RuntimeError, match="made by policy_factory in the workers"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(versioned()[1])
        assert next(batches)["action"][0, 0, 0] == 0
    network, policy = versioned()
    network.set(4)
    collector = MultiSyncCollector([make_counting] * 2, policy, policy_factory=factory, frames_per_batch=8)
    assert next(iter(collector))["action"][0, 0, 0] == 4  # the factory's structure, the policy's weights
    collector.shutdown()


def test_lazy_policies_are_told_of() -> None:
    policy = TensorDictModule(nn.LazyLinear(3), in_keys=["observation"], out_keys=["action"])
    with MultiSyncCollector([make_counting] * 2, policy, frames_per_batch=8) as collector:
        next(iter(collector))
        with pytest.raises(ValueError, match="Call the policy once"):
            collector.update_policy_weights_()


def test_policies_without_weights() -> None:
    with MultiSyncCollector([make_counting] * 2, frames_per_batch=8) as collector:
        collector.update_policy_weights_()  # as every training loop does
        with pytest.raises(TypeError, match="no weights to update"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
    with MultiSyncCollector(
        [make_counting] * 2, versioned()[1], frames_per_batch=8, weight_sync_schemes={"policy": NoWeightSyncScheme()}
    ) as collector:
        collector.update_policy_weights_()
        assert next(iter(collector))["action"][0, 0, 0] == 0


def make_env_with_module() -> Any:
    env = make_counting()
    env.transform = [nn.Linear(2, 1)]
    return env


@pytest.mark.parametrize("workers", [1, 2])
def test_a_module_in_the_env_by_its_path(workers: int) -> None:
    path = "env.transform[0]"
    collector = MultiSyncCollector(
        [make_env_with_module] * 2,
        deterministic(),
        frames_per_batch=8,
        num_workers=workers,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(), path: SharedMemWeightSyncScheme()},
    )
    trained = nn.Linear(2, 1)
    collector.update_policy_weights_(trained, model_id=path)
    assert torch.equal(collector.getattr_env("transform")[0].weight, trained.weight)
    trained.weight.data.fill_(9)
    collector.update_policy_weights_(weights_dict={"policy": deterministic(), path: trained})
    assert bool((collector.getattr_env("transform")[0].weight == 9).all())
    collector.shutdown()


def test_async_sends_return_at_once_and_arrive() -> None:
    network, policy = versioned()
    scheme = SharedMemWeightSyncScheme(sync=False)
    collector = MultiSyncCollector(
        [make_counting] * 2, policy, frames_per_batch=8, weight_sync_schemes={"policy": scheme}
    )
    batches = iter(collector)
    for version in range(1, 20):
        network.set(version)
        collector.update_policy_weights_()
        assert next(batches)["action"][0, 0, 0] == version  # orders come after weights
    collector.shutdown()


def test_a_worker_that_does_not_answer_is_named() -> None:
    scheme = SharedMemWeightSyncScheme(timeout_s=0.3)
    collector = MultiSyncCollector(
        [make_counting] * 2,
        deterministic(),
        frames_per_batch=8,
        num_workers=2,
        weight_sync_schemes={"policy": scheme},
    )
    pid = collector.stats()["workers"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WeightSyncError, match=r"worker 1 did not apply the weights within 0\.3 s"):
        collector.update_policy_weights_()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"worker 1 .*SIGKILL"):
        collector.update_policy_weights_()
    collector.shutdown()


def ended_in_time(deed: Callable[[], Any], timeout_s: float = 30.0) -> bool:
    """Whether something comes to its end; in a thread, which is left behind if it does not."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            deed()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    return not thread.is_alive()


@pytest.mark.filterwarnings("ignore:worker")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_answer_that_came_before_another_worker_was_found_dead(scheme: type[WeightSyncScheme]) -> None:
    """The worker that is started again is sent weights while those of the others are waited for."""
    network, policy = versioned()
    collector = MultiSyncCollector(
        [make_counting] * 3,
        policy,
        frames_per_batch=12,
        num_workers=3,
        restart_workers=3,
        weight_sync_schemes={"policy": scheme(sync=False)},
    )
    batches = iter(collector)
    next(batches)
    for victim in range(3):
        pid = collector.stats()["workers"][victim]["pid"]
        os.kill(pid, signal.SIGSTOP)
        network.set(victim + 1)
        collector.update_policy_weights_()
        others = [line for line in range(3) if line != victim]

        def have(version: int, others: list[int] = others) -> bool:
            return all(collector.stats()["workers"][other]["policy_version"] == version for other in others)

        assert wait_until(lambda version=2 * victim + 1: have(version), 30)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda victim=victim: not collector.stats()["workers"][victim]["alive"], 30)
        assert ended_in_time(collector.update_policy_weights_)
        assert next(batches)["action"][:, 0, 0].tolist() == [victim + 1] * 3
    collector.shutdown()


def test_a_worker_that_is_named_twice_gets_weights_once() -> None:
    network, policy = versioned()
    collector = MultiAsyncCollector([make_counting] * 2, policy, frames_per_batch=10, num_workers=2)
    network.set(1)
    assert ended_in_time(lambda: collector.update_policy_weights_(worker_ids=[0] * 20 + [1] * 20))
    assert ended_in_time(lambda: collector.update_policy_weights_(worker_ids=[1, 0, 1]))
    assert collector.policy_version == 2
    assert [line["policy_version"] for line in collector.stats()["workers"]] == [2, 2]
    assert ended_in_time(lambda: next(iter(collector)))  # nobody waits for what does not come
    collector.shutdown()


# -- lag -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["hold", "drop"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_no_frame_is_older_than_allowed(when: str, lag: int) -> None:
    network, policy = versioned()
    collector = MultiAsyncCollector(
        [make_counting] * 3,
        policy,
        frames_per_batch=20,
        total_frames=1200,
        num_workers=3,
        track_policy_version=True,
        max_policy_lag=lag,
        on_policy_lag=when,
    )
    frames = 0
    for version, batch in enumerate(collector):
        assert int(batch["policy_version"].min()) >= collector.policy_version - lag
        frames += batch.numel()
        network.set(version + 1)
        collector.update_policy_weights_()
    assert frames == 1200
    if when == "hold":
        assert collector.stats()["dropped_frames"] == 0


# -- schemes on their own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_life_of_a_scheme(kind: type[WeightSyncScheme], method: str) -> None:
    model = nn.Linear(2, 1)
    scheme = kind("state_dict")
    with pytest.raises(RuntimeError, match="init_on_sender"):
        scheme.connect()
    with pytest.raises(RuntimeError, match="not connected"):
        scheme.send(model)
    with pytest.raises(ValueError, match="to how many workers"):
        scheme.init_on_sender(model=model)
    with pytest.raises(ValueError, match="not both"):
        scheme.init_on_sender(model=model, weights={}, num_workers=1)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    with pytest.raises(RuntimeError, match="sender already"):
        scheme.init_on_receiver(model=model)
    context: Any = multiprocessing.get_context(method)
    pipes, processes = [], []
    for index in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=receive_in_a_process, args=(scheme.for_worker(index), index, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    with pytest.raises(ValueError, match="for receivers"):
        scheme.connect(worker_idx=0)
    scheme.connect()
    with pytest.raises(RuntimeError, match="connected already"):
        scheme.connect()
    assert [pipe.recv() for pipe in pipes] == [model.weight.tolist()] * 2
    model.weight.data.fill_(3)
    scheme.send()
    assert [pipe.recv() for pipe in pipes] == [[[3.0, 3.0]]] * 2
    scheme.send({"weight": torch.full((1, 2), 4.0), "bias": torch.zeros(1)}, worker_ids=[1])
    assert pipes[1].recv() == [[4.0, 4.0]]
    assert not pipes[0].poll(0)
    model.weight.data.fill_(99)
    scheme.send()
    for pipe, process in zip(pipes, processes, strict=True):
        assert pipe.recv() == [[99.0, 99.0]]
        process.join(10)
        assert process.exitcode == 0
        process.close()
        pipe.close()
    scheme.shutdown()
    scheme.shutdown()


def test_strategies() -> None:
    with pytest.raises(ValueError, match="'tensordict' or 'state_dict'"):
        WeightStrategy("pickle")  # type: ignore[arg-type]
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for form in ("tensordict", "state_dict"):
        strategy = WeightStrategy(form)  # type: ignore[arg-type]
        weights = strategy.extract_weights(model)
        model[0].weight.data.add_(1)
        strategy.apply_weights(other, weights)
        assert torch.equal(other[0].weight + 1, model[0].weight)
        strategy.apply_weights(weights, model)
        assert torch.equal(
            strategy.extract_weights(weights)["0.weight" if form == "state_dict" else ("0", "weight")], model[0].weight
        )
        with pytest.raises(KeyError, match="do not fit"):
            strategy.apply_weights(weights, {"0.weight": torch.zeros(2, 2)})


# -- updaters --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_updaters() -> None:
    network, policy = versioned()
    collector = Collector(make_counting(), policy, frames_per_batch=4, weight_updater=VanillaWeightUpdater)
    given, _ = versioned(), None
    given[0].set(3)
    collector.update_policy_weights_(given[1])
    assert network.version[0] == 3
    assert collector.policy_version == 1
    collector.shutdown()
    called: list[int] = []
    updater = MultiProcessedWeightUpdater()
    updater.register_post_hook(lambda: called.append(1))
    collector = MultiSyncCollector([make_counting] * 2, policy, frames_per_batch=8, weight_updater=updater)
    assert updater.collector is collector
    network.set(4)
    collector.update_policy_weights_()
    assert next(iter(collector))["action"][0, 0, 0] == 4
    assert called == [1]
    with pytest.raises(ValueError, match="one model"):
        collector.update_policy_weights_(model_id="policy")
    collector.shutdown()
    collector = MultiSyncCollector(
        [make_counting] * 2, policy, frames_per_batch=8, weight_updater=RemoteModuleWeightUpdater()
    )
    with pytest.raises(RuntimeError, match="give update_policy_weights_ the weights"):
        collector.update_policy_weights_()
    network.set(5)
    collector.update_policy_weights_(policy)
    assert next(iter(collector))["action"][0, 0, 0] == 5
    collector.shutdown()
    with pytest.raises(TypeError, match="must be a WeightUpdaterBase"):
        Collector(make_counting(), policy, frames_per_batch=4, weight_updater=3)


def test_subclassing_an_updater_warns() -> None:
    with warned_here(DeprecationWarning, match="WeightSyncScheme"):
        type("Mine", (WeightUpdaterBase,), {})


def test_updates_from_another_thread_do_not_get_lost() -> None:
    """A trainer's thread updates while the main thread iterates."""
    network, policy = versioned()
    collector = MultiAsyncCollector([make_counting] * 2, policy, frames_per_batch=20, track_policy_version=True)
    failures: list[BaseException] = []

    def update() -> None:
        try:
            for version in range(1, 51):
                network.set(version)
                collector.update_policy_weights_()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=update)
    batches = iter(collector)
    next(batches)
    thread.start()
    while thread.is_alive():
        batch = next(batches)
        assert torch.equal(batch["action"][..., 0], batch["policy_version"].to(torch.float32))
    thread.join()
    assert not failures
    assert collector.policy_version == 50
    collector.shutdown()


# -- one process -----------------------------------------------------------------------------------------------------


class SaysItsWeights(nn.Module):
    """Writes the smallest and the largest of its weights, which are all the same, beside its action."""

    def __init__(self, size: int = 100_000) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(4)])

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lead = observation.shape[:-1]
        found = torch.stack([weights.aminmax()[end] for weights in self.many for end in (0, 1)])
        return torch.zeros(*lead, 3), torch.stack(found.aminmax()).expand(*lead, 2)


IN_THIS_PROCESS: dict[str, Callable[..., Any]] = {
    "Collector": lambda policy, **kwargs: Collector(make_counting(), policy, **kwargs),
    "an interruptor": lambda policy, **kwargs: Collector(make_counting(), policy, interruptor=NeverStops(), **kwargs),
    "ParallelEnv": lambda policy, **kwargs: Collector(ParallelEnv(2, make_counting), policy, **kwargs),
    "AsyncBatchedCollector": lambda policy, **kwargs: AsyncBatchedCollector(
        [make_counting] * 4, policy, num_workers=2, **kwargs
    ),
    "threads": lambda policy, **kwargs: AsyncBatchedCollector(
        [make_counting] * 4, policy, env_backend="threading", **kwargs
    ),
}


class NeverStops:
    def collection_stopped(self) -> bool:
        return False


@pytest.mark.parametrize("kind", IN_THIS_PROCESS)
@pytest.mark.parametrize("background", [False, True])
def test_weights_from_another_thread_are_whole_and_as_the_stamp_says(kind: str, background: bool) -> None:
    policy = TensorDictModule(SaysItsWeights(), ["observation"], ["action", "weighs"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000)) if background else None
    collector = IN_THIS_PROCESS[kind](policy, frames_per_batch=20, track_policy_version=True, replay_buffer=buffer)
    done = threading.Event()
    failures: list[BaseException] = []

    def update() -> None:
        try:
            version = 0
            while not done.is_set():
                version += 1
                collector.update_policy_weights_(
                    {name: torch.full_like(tensor, version) for name, tensor in policy.state_dict().items()}
                )
        except BaseException as error:
            failures.append(error)

    def check(frames: Any) -> set[int]:
        weighs, stamps = frames["weighs"].reshape(-1, 2), frames["policy_version"].reshape(-1)
        assert torch.equal(weighs, stamps.unsqueeze(1).expand(-1, 2).to(weighs.dtype))
        return set(stamps.tolist())

    thread = threading.Thread(target=update, daemon=True)
    seen: set[int] = set()
    if buffer is not None:
        collector.start()
        thread.start()
        assert wait_until(lambda: len(buffer) >= 1000 and collector.policy_version >= 20, 60)
        with collector.pause():
            seen = check(buffer[:])
    else:
        batches = iter(collector)
        seen |= check(next(batches))
        thread.start()
        for _ in range(2000):
            seen |= check(next(batches))
            if len(seen) > 20:
                break
    done.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not failures
    assert len(seen) > 5
    collector.shutdown()


def test_a_hook_may_update_the_weights_of_its_own_collector() -> None:
    network, policy = versioned()
    collector: Any = None

    def after(batch: Any) -> None:
        network.set(collector.policy_version + 1)
        collector.update_policy_weights_(policy)

    collector = Collector(
        make_counting(), policy, frames_per_batch=4, total_frames=12, post_collect_hook=after, track_policy_version=True
    )
    for index, batch in enumerate(collector):
        assert bool((batch["policy_version"] == index).all())
        assert bool((batch["action"] == index).all())


# -- as collection ends ----------------------------------------------------------------------------------------------


def update_until_closed(collector: Any, policy: Any, raised: list[BaseException]) -> threading.Thread:
    def update() -> None:
        try:
            while True:
                collector.update_policy_weights_(policy)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("restarts", [0, 3])
def test_updating_as_collection_ends_says_that_it_has_ended(kind: type, restarts: int) -> None:
    for _ in range(4):
        _, policy = versioned(100_000)
        collector = kind(
            [make_counting] * 2,
            policy,
            frames_per_batch=10,
            total_frames=40,
            num_workers=2,
            restart_workers=restarts,
        )
        raised: list[BaseException] = []
        thread = update_until_closed(collector, policy, raised)
        assert sum(batch.numel() for batch in collector) == 40
        thread.join(30)
        assert not thread.is_alive()
        assert [type(error) for error in raised] == [CollectorClosed], raised
        assert "was shut down after 40 frames" in str(raised[0])
