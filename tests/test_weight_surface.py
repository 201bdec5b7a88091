"""Weight synchronization as users of TorchRL know it: schemes of their own making, backends, extra state, updaters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from counting import make_counting
from swath.collectors import Collector, MultiCollector
from swath.collectors.distributed import DistributedCollector, DistributedWeightUpdater, RPCWeightUpdater
from swath.collectors.weight_update import RayWeightUpdater
from swath.errors import WeightSyncError
from swath.modules import InferenceServer, ProcessInferenceServer
from swath.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)


class WithExtraState(nn.Module):
    """Acts by a number that is no tensor, and by one that is."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.scale = 1
        self.offsets = {"a.b": torch.zeros(())}

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "offsets": self.offsets}

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.offsets = state["scale"], state["offsets"]

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        value = self.scale * 10 + self.offsets["a.b"] + self.weight
        return torch.stack([value, -value, -value]).expand(*observation.shape[:-1], 3)


class Holder(nn.Module):
    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = WithExtraState()
        self.net = nn.Linear(1, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.inner(observation)


def changed(policy: Any) -> Any:
    inner = getattr(policy, "inner", policy)
    inner.scale, inner.offsets = 3, {"a.b": torch.full((), 0.5)}
    with torch.no_grad():
        inner.weight.fill_(0.25)
    return policy


@pytest.mark.parametrize("kind", [WithExtraState, Holder])
@pytest.mark.parametrize("form", ["module", "state_dict", "extracted"])
def test_extra_state_is_applied(kind: type, form: str) -> None:
    source, policy = changed(kind()), kind()
    strategy = WeightStrategy()
    given = {"module": source, "state_dict": source.state_dict(), "extracted": strategy.extract_weights(source)}[form]
    strategy.apply_weights(policy, given)
    assert policy(torch.zeros(1))[0].item() == 30.75
    other = kind()
    strategy.apply_weights(other, given, inplace=False)
    assert other(torch.zeros(1))[0].item() == 30.75


@pytest.mark.processes
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize("form", ["own", "module"])
def test_extra_state_travels_to_workers(scheme: type[WeightSyncScheme], form: str) -> None:
    policy = Holder()
    collector = MultiCollector(
        [make_counting] * 2, policy, sync=True, frames_per_batch=8, weight_sync_schemes={"policy": scheme()}
    )
    try:
        assert set(next(iter(collector))["action"][..., 0].unique().tolist()) == {10.0}
        if form == "own":
            changed(policy)
            collector.update_policy_weights_()
        else:
            collector.update_policy_weights_(changed(Holder()))
        assert set(next(iter(collector))["action"][..., 0].unique().tolist()) == {30.75}
    finally:
        collector.shutdown()


def test_extra_state_in_one_process_and_on_a_server() -> None:
    collector = Collector(make_counting, Holder(), frames_per_batch=8)
    collector.update_policy_weights_(changed(Holder()))
    assert set(next(iter(collector))["action"][..., 0].unique().tolist()) == {30.75}
    collector.shutdown()
    policy = Holder()
    with InferenceServer(policy) as server:
        client = server.client()
        assert client(TensorDict(observation=torch.zeros(1)))["action"][0].item() == 10
        changed(policy)
        server.update_policy_weights_()
        assert client(TensorDict(observation=torch.zeros(1)))["action"][0].item() == 30.75


@pytest.mark.processes
def test_extra_state_travels_to_a_server_in_its_own_process() -> None:
    with ProcessInferenceServer(Holder) as server:
        server.update_policy_weights_(changed(Holder()))
        assert server.client()(TensorDict(observation=torch.zeros(1)))["action"][0].item() == 30.75


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_extra_state_travels_to_nodes(workers: int) -> None:
    policy = Holder()
    with DistributedCollector(
        [make_counting] * 2, policy, frames_per_batch=8, sync=True, num_workers_per_collector=workers
    ) as collector:
        assert set(next(iter(collector))["action"][..., 0].unique().tolist()) == {10.0}
        changed(policy)
        collector.update_policy_weights_()
        next(iter(collector))  # some of which may have been under way
        assert set(next(iter(collector))["action"][..., 0].unique().tolist()) == {30.75}


@pytest.mark.processes
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_weight_sync_of_a_server_in_its_own_process(kind: type[WeightSyncScheme]) -> None:
    policy, scheme = Holder(), kind(timeout_s=30)
    scheme.init_on_sender(model=policy, num_workers=1)
    with ProcessInferenceServer(Holder, weight_sync=scheme.for_worker(0)) as server:
        scheme.started(0)
        scheme.connect()
        client = server.client()
        assert client(TensorDict(observation=torch.zeros(1)))["action"][0].item() == 10
        changed(policy)
        scheme.send()
        answer = client(TensorDict(observation=torch.zeros(1)))
        assert answer["action"][0].item() == 30.75
        with pytest.raises(KeyError, match="do not fit"):
            scheme.send({"colour": torch.ones(1)})
        assert client(TensorDict(observation=torch.zeros(1)))["action"][0].item() == 30.75
    with pytest.raises(WeightSyncError, match="worker 0 is gone"):
        scheme.send()
    scheme.shutdown()


class Unsendable(WithExtraState):
    def get_extra_state(self) -> Any:
        return lambda: None


def test_extra_state_that_cannot_travel_is_refused() -> None:
    policy = Unsendable()
    with pytest.raises(TypeError, match="extra state of Unsendable"):
        WeightStrategy().extract_weights(policy)
    with pytest.raises(KeyError, match="_extra_state"):
        WeightStrategy().apply_weights(nn.Linear(1, 1), {**nn.Linear(1, 1).state_dict(), "_extra_state": torch.ones(1)})


# -- schemes -----------------------------------------------------------------------------------------------------------


def test_from_backend() -> None:
    kinds: dict[Any, type] = {
        "none": NoWeightSyncScheme,
        "direct": NoWeightSyncScheme,
        "shared": SharedMemWeightSyncScheme,
        "thread": SharedMemWeightSyncScheme,
        "process": MultiProcessWeightSyncScheme,
        "multiprocessing": MultiProcessWeightSyncScheme,
        "distributed": DistributedWeightSyncScheme,
        "rpc": RPCWeightSyncScheme,
        "ray": RayWeightSyncScheme,
    }
    for name, kind in kinds.items():
        assert type(WeightSyncScheme.from_backend(name)) is kind
    assert WeightSyncScheme.from_backend("process", sync=False).sync is False
    assert DistributedWeightSyncScheme(backend="gloo", timeout=7.0).timeout_s == 7.0
    with pytest.raises(ValueError, match="no weight scheme for 'pigeon'"):
        WeightSyncScheme.from_backend("pigeon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="to the collector"):
        RayWeightSyncScheme(backend="nccl")


@pytest.mark.processes
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_scheme_that_the_user_initialised(kind: type[WeightSyncScheme]) -> None:
    policy = Holder()
    scheme = kind()
    scheme.init_on_sender(model_id="policy", model=policy, devices=[torch.device("cpu")] * 2)
    assert scheme.initialized_on_sender
    assert not scheme.synchronized_on_sender
    assert scheme.model is policy
    collector = MultiCollector(
        [make_counting] * 2, policy, sync=True, frames_per_batch=8, weight_sync_schemes={"policy": scheme}
    )
    try:
        next(iter(collector))
        assert scheme.synchronized_on_sender
        assert scheme.context is collector
        changed(policy)
        collector.update_policy_weights_()
        assert set(next(iter(collector))["action"][..., 0].unique().tolist()) == {30.75}
    finally:
        collector.shutdown()


@pytest.mark.processes
def test_a_scheme_that_the_user_initialised_for_something_else() -> None:
    policy = Holder()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model": policy, "devices": ["cpu"] * 3}, "3 workers"),
        ({"model": policy, "num_workers": 2, "model_id": "critic"}, "'critic'"),
        ({"model": Holder(), "num_workers": 2}, "another model"),
    ]
    for arguments, told in refused:
        scheme = SharedMemWeightSyncScheme()
        kept = arguments["model"]
        scheme.init_on_sender(**arguments)
        with pytest.raises(ValueError, match=told):
            MultiCollector(
                [make_counting] * 2, policy, sync=True, frames_per_batch=8, weight_sync_schemes={"policy": scheme}
            )
        scheme.shutdown()
        del kept


def test_apply_weights_of_a_scheme() -> None:
    model = nn.Linear(2, 1)
    sender = MultiProcessWeightSyncScheme()
    sender.init_on_sender(model=nn.Linear(2, 1), num_workers=1)
    with pytest.raises(RuntimeError, match="no receiver"):
        sender.apply_weights({})
    scheme = sender.for_worker(0)
    scheme.init_on_receiver(model=model)
    assert scheme.initialized_on_receiver
    assert scheme.worker_idx == 0
    before = model.weight
    scheme.apply_weights({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    assert model.weight is before
    assert model.weight.tolist() == [[1, 1]]
    scheme.apply_weights(TensorDict(weight=torch.zeros(1, 2), bias=torch.ones(1)), inplace=False)
    assert model.weight is not before
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.tolist() == [[0, 0]]
    assert scheme.weights["weight"].tolist() == [[0, 0]]
    with pytest.raises(KeyError, match="colour"):
        scheme.apply_weights({"colour": torch.ones(1)}, inplace=False)
    with pytest.raises(ValueError, match="modules and TensorDicts"):
        WeightStrategy().apply_weights({"weight": torch.ones(1)}, {"weight": torch.ones(1)}, inplace=False)
    held = TensorDict(weight=torch.ones(2))
    WeightStrategy().apply_weights(held, {"weight": torch.ones(3)}, inplace=False)
    assert held["weight"].shape == (3,)
    scheme.shutdown()
    sender.shutdown()


# -- updaters ----------------------------------------------------------------------------------------------------------


class Nodes:
    """What an updater knows of a distributed collector."""

    num_workers = 2

    def __init__(self) -> None:
        self.policy = nn.Linear(1, 1)
        self.sent: list[tuple[Any, Any]] = []

    def send_weights(self, weights: Any, worker_ids: Any = None) -> None:
        self.sent.append((weights, worker_ids))


@pytest.mark.parametrize("kind", [RayWeightUpdater, DistributedWeightUpdater, RPCWeightUpdater])
def test_updaters_of_nodes(kind: Any) -> None:
    collector = Nodes()
    updater = kind()
    updater.register_collector(collector)
    updater.push_weights()
    updater.push_weights({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, 1)
    (own, everybody), (given, one) = collector.sent
    assert torch.equal(own["weight"], collector.policy.weight)
    assert everybody == [0, 1]
    assert given["weight"].item() == 1
    assert one == [1]
    updater = kind(policy_weights={"weight": torch.zeros(1)})
    updater.register_collector(collector)
    updater()
    assert collector.sent[-1][0]["weight"].item() == 0


def test_updaters_with_an_interval() -> None:
    collector = Nodes()
    updater = RayWeightUpdater(max_interval=2)
    updater.register_collector(collector)
    for _ in range(6):
        updater.push_weights()
    assert len(collector.sent) == 2
    with pytest.raises(ValueError, match="leave store out"):
        DistributedWeightUpdater(store={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave collector_infos"):
        RPCWeightUpdater(collector_infos=[])  # type: ignore[arg-type]
