"""weight_sync_schemes= and weight_recv_schemes= of a single Collector."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
import torch
from torch import nn

from counting import make_counting
from receiving import Constant, serve
from swath.collectors import AsyncBatchedCollector, Collector
from swath.envs import GymEnv, ObservationNorm, TransformedEnv
from swath.errors import WeightSyncError
from swath.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)


def values(collector: Any) -> list[float]:
    return next(iter(collector))["action"][..., 0].unique().tolist()


KINDS = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_in_somebody_elses_process_receives(kind: type[WeightSyncScheme]) -> None:
    policy, scheme = Constant(1.0), kind()
    scheme.init_on_sender(model=policy, num_workers=1)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(scheme.for_worker(0), theirs))
    process.start()
    scheme.started(0)
    theirs.close()
    try:
        scheme.connect()
        assert ours.recv() == ([1.0], [0])
        with torch.no_grad():
            policy.value.fill_(2.0)
        scheme.send()  # while nothing is collected there
        ours.send("go on")
        assert ours.recv() == ([2.0], [1])
        scheme.send({"value": torch.tensor(3.0)}, version=7)
        ours.send("go on")
        assert ours.recv() == ([3.0], [7])
        with pytest.raises(KeyError, match="do not fit"):
            scheme.send({"colour": torch.tensor(3.0)})
        ours.send("go on")
        assert ours.recv() == ([3.0], [7])
        ours.send("stop")
    finally:
        process.join(20)
        ours.close()
        scheme.shutdown()
    assert process.exitcode == 0


@pytest.mark.processes
def test_a_sender_learns_that_the_receivers_process_died() -> None:
    scheme, policy = SharedMemWeightSyncScheme(timeout_s=30), Constant(1.0)
    scheme.init_on_sender(model=policy, num_workers=1)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(scheme.for_worker(0), theirs))
    process.start()
    scheme.started(0)
    theirs.close()
    scheme.connect()
    ours.recv()
    process.kill()
    process.join()
    ours.close()
    with pytest.raises(WeightSyncError, match="worker 0 is gone"):
        scheme.send()
    scheme.shutdown()


@pytest.fixture
def sender() -> Any:
    scheme, policy = MultiProcessWeightSyncScheme(timeout_s=20), Constant(1.0)
    scheme.init_on_sender(model=policy, num_workers=1)
    yield scheme
    del policy
    scheme.shutdown()


def receiving(scheme: WeightSyncScheme, **kwargs: Any) -> Collector:
    given = {"policy": Constant(-1.0), "frames_per_batch": 4, "track_policy_version": True, **kwargs}
    return Collector(make_counting, weight_recv_schemes={"policy": scheme}, **given)


def test_in_one_process_and_between_two_steps(sender: Any) -> None:
    with receiving(sender.for_worker(0), frames_per_batch=1000) as collector:
        sender.connect()
        assert values(collector) == [1.0]
        stop = threading.Event()

        def send() -> None:
            value = 2.0
            while not stop.is_set():
                sender.send({"value": torch.tensor(value)})
                value += 1.0

        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(5):
            batch = next(iter(collector))
            assert torch.equal(batch["action"][..., 0], batch["policy_version"].reshape(-1) + 1.0)
        stop.set()
        thread.join()


def test_first_weights_are_waited_for(sender: Any) -> None:
    half = sender.for_worker(0)
    half.timeout_s = 0.05
    with receiving(half) as collector, pytest.raises(WeightSyncError, match=r"no weights have come .*connect\(\)"):
        next(iter(collector))


def test_a_sender_that_hangs_up(sender: Any) -> None:
    with receiving(sender.for_worker(0)) as collector:
        sender.shutdown()
        with pytest.raises(WeightSyncError, match="hung up before"):
            next(iter(collector))


def test_a_sender_that_hangs_up_later_leaves_its_weights(sender: Any) -> None:
    with receiving(sender.for_worker(0)) as collector:
        sender.connect()
        sender.shutdown()
        assert values(collector) == [1.0]
        assert values(collector) == [1.0]
        state = collector.state_dict()
        collector.reset()
        collector.load_state_dict(state)
        collector.update_policy_weights_(Constant(5.0))
        assert values(collector) == [5.0]


def test_a_receiver_that_the_user_initialised(sender: Any) -> None:
    policy, half = Constant(-1.0), sender.for_worker(0)
    half.init_on_receiver(model=policy)
    with receiving(half, policy=policy) as collector:
        sender.connect()
        assert values(collector) == [1.0]
    sender.replace_worker(0)
    half = sender.for_worker(0)
    half.init_on_receiver(model=Constant())
    with pytest.raises(ValueError, match="another model than the collector's policy"):
        receiving(half)


def test_a_part_of_the_env_receives_by_its_path() -> None:
    scheme = MultiProcessWeightSyncScheme(timeout_s=20)
    scheme.init_on_sender(model_id="env.transform[0]", weights=norm(3.0).state_dict(), num_workers=1)
    with Collector(
        make_norm, None, frames_per_batch=4, weight_recv_schemes={"env.transform[0]": scheme.for_worker(0)}
    ) as collector:
        scheme.connect()
        next(iter(collector))
        assert (collector.get_distant_attr("env.transform[0].loc") == 3.0).all()
    scheme.shutdown()


def norm(loc: float) -> ObservationNorm:
    return ObservationNorm(torch.full((4,), loc), torch.ones(4), in_keys=["observation"])


def make_norm() -> Any:
    return TransformedEnv(GymEnv("CartPole-v1"), norm(0.0))


@pytest.mark.parametrize("kind", [*KINDS, NoWeightSyncScheme])
def test_a_sender_for_what_is_in_the_env(kind: type[WeightSyncScheme]) -> None:
    scheme, path = kind(), "env.transform[0]"
    with Collector(make_norm, None, frames_per_batch=4, weight_sync_schemes={path: scheme}) as collector:
        assert scheme.synchronized_on_sender
        assert scheme.context is collector
        for send in (lambda w: scheme.send(w), lambda w: collector.update_policy_weights_(w, model_id=path)):
            for loc in (2.0, 3.0):
                send(norm(loc).state_dict())
                next(iter(collector))
                expected = 0.0 if kind is NoWeightSyncScheme else loc
                assert (collector.get_distant_attr(f"{path}.loc") == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_updates_go_on_to_receivers_elsewhere(kind: type[WeightSyncScheme]) -> None:
    """As a cascade: somebody sends to one collector, which sends to the next."""
    first, second = kind(timeout_s=20), kind(timeout_s=20)
    source, middle = Constant(1.0), Constant(1.0)
    first.init_on_sender(model=source, num_workers=1)
    second.init_on_sender(model=middle, num_workers=1)
    end = receiving(second.for_worker(0))
    with (
        end,
        receiving(first.for_worker(0), policy=middle, weight_sync_schemes={"policy": second}) as between,
    ):
        first.connect()
        assert values(between) == values(end) == [1.0]
        first.send({"value": torch.tensor(4.0)})
        between.update_policy_weights_  # noqa: B018 (there)
        assert values(between) == [4.0]
        assert middle.value.item() == 4.0
        between.update_policy_weights_({"value": torch.tensor(6.0)})
        assert values(between) == values(end) == [6.0]
    first.shutdown()


def test_something_elsewhere_that_is_no_part_of_the_collector() -> None:
    critic, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    scheme = MultiProcessWeightSyncScheme(timeout_s=20)
    scheme.init_on_sender(model_id="critic", model=critic, num_workers=1)
    half = scheme.for_worker(0)
    half.init_on_receiver(model_id="critic", model=theirs)
    thread = threading.Thread(target=lambda: (half.connect(), half.receive(timeout=20)))
    thread.start()
    with Collector(make_counting, Constant(), frames_per_batch=4, weight_sync_schemes={"critic": scheme}) as collector:
        with torch.no_grad():
            critic.weight.fill_(9.0)
        collector.update_policy_weights_(model_id="critic")
        thread.join()
        assert theirs.weight.item() == 9.0
        assert values(collector) == [0.0]


def test_no_scheme_at_all_keeps_the_policy() -> None:
    with Collector(
        make_counting, Constant(1.0), frames_per_batch=4, weight_sync_schemes={"policy": NoWeightSyncScheme()}
    ) as collector:
        collector.update_policy_weights_(Constant(2.0))
        assert values(collector) == [1.0]


@pytest.mark.parametrize("name", ["weight_sync_schemes", "weight_recv_schemes"])
@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ([SharedMemWeightSyncScheme], TypeError, "must be a dict of schemes by model id"),
        ({"policy": "shared"}, TypeError, "must be a WeightSyncScheme, got str"),
        ({"policy": DistributedWeightSyncScheme}, TypeError, "must be a WeightSyncScheme, got type"),
    ],
)
def test_what_is_no_scheme_is_refused(name: str, given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Collector(make_counting, Constant(), frames_per_batch=4, **{name: given})


def test_schemes_that_are_for_something_else_are_refused() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"weight_sync_schemes": {"env.transfrom[0]": SharedMemWeightSyncScheme()}}, KeyError, "nothing of this coll"),
        ({"weight_sync_schemes": {"policy": DistributedWeightSyncScheme()}}, ValueError, "a distributed collector"),
        ({"weight_recv_schemes": {"policy": SharedMemWeightSyncScheme()}}, ValueError, "no connection for worker 0"),
    ]
    for given, error, told in cases:
        with pytest.raises(error, match=told):
            Collector(make_counting, Constant(), frames_per_batch=4, **given)


def test_an_async_batched_collector_receives(sender: Any) -> None:
    with AsyncBatchedCollector(
        [make_counting] * 2,
        Constant(-1.0),
        frames_per_batch=8,
        env_backend="threading",
        weight_recv_schemes={"policy": sender.for_worker(0)},
    ) as collector:
        sender.connect()
        assert values(collector) == [1.0]
        sender.send({"value": torch.tensor(2.0)})
        next(iter(collector))
        assert values(collector) == [2.0]
