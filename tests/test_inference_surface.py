"""The inference server as users of TorchRL know it: names, arguments, transports of their own."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from asking import ask
from counting import make_counting
from leaks import wait_until
from swath.collectors import AsyncBatchedCollector, Collector
from swath.errors import InferenceError, ServerClosed
from swath.modules import RandomPolicy
from swath.modules.inference_server import (
    InferenceClient,
    InferenceDeviceConfig,
    InferenceServer,
    InferenceServerConfig,
    InferenceTransport,
    MPTransport,
    PolicyClientModule,
    ProcessInferenceServer,
    ProcessSlotTransport,
    SharedMemoryTransport,
    SlotTransport,
    ThreadingTransport,
)


def make_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def observed(*batch: int) -> TensorDict:
    return TensorDict(observation=torch.randn(*batch, 4), batch_size=batch)


class ListTransport(InferenceTransport):
    """A transport as a user writes it."""

    def __init__(self) -> None:
        self._asked: list[tuple[TensorDictBase, Future[TensorDictBase]]] = []
        self._lock = threading.Lock()
        self._there_is_work = threading.Event()

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        future: Future[TensorDictBase] = Future()
        with self._lock:
            self._asked.append((td, future))
        self._there_is_work.set()
        return future

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
        with self._lock:
            taken, self._asked = self._asked[:max_items], self._asked[max_items:]
        return [td for td, _ in taken], [future for _, future in taken]

    def wait_for_work(self, timeout: float) -> None:
        self._there_is_work.wait(timeout)
        self._there_is_work.clear()

    def resolve(self, callback: Future[TensorDictBase], result: TensorDictBase) -> None:
        callback.set_result(result)

    def resolve_exception(self, callback: Future[TensorDictBase], exc: BaseException) -> None:
        callback.set_exception(exc)


# -- transports --------------------------------------------------------------------------------------------------------


def test_a_transport_of_the_users_own() -> None:
    with pytest.raises(TypeError):
        InferenceTransport()  # type: ignore[abstract]
    transport, policy = ListTransport(), make_policy()
    asked = [observed() for _ in range(20)]
    early = [transport.submit(td) for td in asked]
    sizes: list[int] = []

    def collate(items: list[TensorDictBase]) -> TensorDictBase:
        sizes.append(len(items))
        return lazy_stack(items)

    with InferenceServer(policy, transport, max_batch_size=4, collate_fn=collate) as server:
        for td, future in zip(asked, early, strict=True):
            torch.testing.assert_close(future.result(5)["action"], policy(td.clone())["action"])
        assert isinstance(transport.client(), InferenceClient)
        assert isinstance(server.client(), InferenceClient)
        assert server.transport is transport
        assert server.transport_kind == "custom"
        assert InferenceClient(transport)(observed())["action"].shape == (2,)
        assert server.stats()["requests"] == 21
    assert max(sizes) <= 4
    with InferenceServer(make_policy(), ListTransport()) as server:
        future = server.client().submit(observed(3))
        assert future.result(5)["policy_version"].tolist() == [0, 0, 0]


def test_what_a_users_transport_has_when_the_server_ends_fails() -> None:
    class Slow(ListTransport):
        def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
            return super().drain(max_items) if may_drain.is_set() else ([], [])

    may_drain = threading.Event()
    transport = Slow()
    server = InferenceServer(make_policy(), transport, max_batch_size=1).start()
    futures = [transport.submit(observed()) for _ in range(3)]
    may_drain.set()
    server.shutdown()
    for future in futures:
        error = future.exception(5)  # or it was answered before
        assert error is None or isinstance(error, ServerClosed)


def test_an_answer_that_a_users_transport_cannot_deliver() -> None:
    class Refuses(ListTransport):
        def resolve(self, callback: Future[TensorDictBase], result: TensorDictBase) -> None:
            raise OSError("the line is dead")

    with InferenceServer(make_policy(), Refuses()) as server:
        with pytest.raises(OSError, match="line is dead"):
            server.client()(observed())
        with pytest.raises(OSError, match="line is dead"):  # the server goes on
            server.client()(observed())


@pytest.mark.parametrize("kind", [ThreadingTransport, MPTransport, SlotTransport])
def test_a_server_of_the_users_own_over_a_transport_of_swath(kind: type) -> None:
    """submit, wait_for_work, drain, resolve, resolve_exception: without an InferenceServer."""
    transport = kind()
    client = transport.client()
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            transport.wait_for_work(0.05)
            for td, callback in zip(*transport.drain(2), strict=True):
                if td["observation"].isnan().any():
                    transport.resolve_exception(callback, ValueError("not a number"))
                else:
                    transport.resolve(callback, td.set("action", td["observation"] * 2))

    early = transport.submit(observed())
    assert not early.done()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert torch.equal(early.result(5)["action"], early.result()["observation"] * 2)
        for _ in range(3):
            answer = client(observed(3))
            assert torch.equal(answer["action"], answer["observation"] * 2)
        with pytest.raises(ValueError, match="not a number"):
            client(TensorDict(observation=torch.full((4,), torch.nan)))
        futures = [client.submit(observed()) for _ in range(5)]
        assert all(future.result(5)["action"].shape == (4,) for future in futures)
    finally:
        is_over.set()
        thread.join()
        transport.close(ServerClosed("over"))


def test_requests_may_be_submitted_before_there_is_a_server() -> None:
    transport, policy = ThreadingTransport(), make_policy()
    asked = [observed() for _ in range(8)]
    futures = [transport.submit(td) for td in asked]
    with InferenceServer(policy, transport, max_batch_size=4):
        for td, future in zip(asked, futures, strict=True):
            torch.testing.assert_close(future.result(5)["action"], policy(td.clone())["action"])
    with pytest.raises(ServerClosed):
        transport.submit(observed())


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_mp_transport_takes_a_context(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    transport = MPTransport(ctx=context, use_manager=True)
    client = transport.client()
    assert MPTransport(context).num_slots == MPTransport().num_slots
    with InferenceServer(make_policy(), transport):
        process = context.Process(target=ask, args=(client, 5))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        client(observed())


@pytest.mark.parametrize("kind", [ThreadingTransport, MPTransport, SlotTransport, SharedMemoryTransport])
def test_a_transport_may_be_closed_by_its_user_before_and_after_its_server(kind: Any) -> None:
    transport = kind(REQUEST, ANSWER) if kind is SharedMemoryTransport else kind()
    with InferenceServer(make_policy(), transport) as server:
        client = server.client()
        client(observed())
    transport.close()
    with pytest.raises(InferenceError, match="shut down"):
        client(observed())
    unused = ThreadingTransport()
    unused.close()
    with pytest.raises(ServerClosed, match="was closed"):
        unused.client()(observed())


@pytest.mark.parametrize("kind", [ThreadingTransport, MPTransport, SlotTransport])
def test_a_transport_that_is_closed_under_its_server_fails_who_waits(kind: Any) -> None:
    with InferenceServer(make_policy(), transport := kind()) as server:
        client = server.client()
        client(observed())
        transport.close()
        with pytest.raises(InferenceError):
            client(observed())


REQUEST, ANSWER = TensorDict(observation=torch.zeros(4)), TensorDict(action=torch.zeros(2))


@pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessSlotTransport])
def test_transports_of_declared_requests(kind: Any) -> None:
    transport = kind(REQUEST, ANSWER, num_slots=2)
    policy = make_policy()
    with InferenceServer(policy, transport) as server:
        client = transport.client()
        for _ in range(3):  # the first goes through the connection, others through the slot
            asked = observed().set("other", torch.ones(1))
            answer = client(asked)
            torch.testing.assert_close(answer["action"], policy(asked.clone())["action"])
            assert "policy_version" not in answer  # it is not declared
        with pytest.raises(KeyError, match="observation"):
            client(TensorDict(other=torch.ones(1)))
        with pytest.raises(ValueError, match="shape"):
            client(TensorDict(observation=torch.ones(5)))
        with pytest.raises(ValueError, match="float64"):
            client(TensorDict(observation=torch.ones(4, dtype=torch.float64)))
        client(observed())
        clients = [transport.client()]
        if kind is ProcessSlotTransport:
            with pytest.raises(RuntimeError, match="2 slots"):
                transport.client()
        else:
            clients.append(transport.client())
        futures = [each.submit(observed()) for each in clients]
        assert all(future.result(5)["action"].shape == (2,) for future in futures)
        assert server.transport_kind == ("shared_memory" if kind is SharedMemoryTransport else "process_slot")
    with pytest.raises(ValueError, match="meta"):
        kind(REQUEST.to("meta"), ANSWER, num_slots=1)


def test_an_answer_without_what_is_declared() -> None:
    transport = SharedMemoryTransport(REQUEST, TensorDict(value=torch.zeros(2)), num_slots=1)
    with InferenceServer(make_policy(), transport) as server, pytest.raises(KeyError, match="value"):
        server.client()(observed())


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["thread", "slots", "mp"])
def test_clients_return_concurrent_futures(transport: str) -> None:
    with InferenceServer(make_policy(), transport) as server:
        client = server.client()
        futures = [client.submit(observed()) for _ in range(6)]
        assert all(isinstance(future, Future) for future in futures)
        done, rest = concurrent.futures.wait(futures, timeout=10)
        assert len(done) == 6
        assert not rest
        called: list[TensorDictBase] = []
        is_called = threading.Event()

        def callback(future: Future[TensorDictBase]) -> None:
            called.append(future.result())
            is_called.set()

        future = client.submit(observed())
        future.add_done_callback(callback)
        assert is_called.wait(10)
        assert called[0]["action"].shape == (2,)
        assert not future.cancel()
        assert [f.result()["action"].shape for f in concurrent.futures.as_completed(futures)] == [(2,)] * 6


def test_policy_client_module_of_a_server_a_transport_or_a_function() -> None:
    transport, policy = ThreadingTransport(), make_policy()
    with InferenceServer(policy, transport) as server:
        for client in (server, transport, server.client(), policy):
            asked = observed(2)
            module = PolicyClientModule(client)
            answer = module(asked)
            torch.testing.assert_close(answer["action"], policy(asked.clone())["action"])
            assert "action" not in asked
            assert "action" in module.submit(asked).result(5)
        for lifecycle in ("start", "shutdown"):
            assert not hasattr(module, lifecycle)


def test_policy_client_module_in_a_collector_without_keys() -> None:
    from swath.envs import GymEnv

    policy = TensorDictModule(
        nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), in_keys=["observation"], out_keys=["action"]
    )
    with InferenceServer(policy) as server:
        collector = Collector(
            lambda: GymEnv("CartPole-v1"), PolicyClientModule(server), frames_per_batch=20, total_frames=20
        )
        (batch,) = collector
    torch.testing.assert_close(batch["action"], policy(batch.select("observation"))["action"])


def test_policy_client_module_of_other_keys() -> None:
    policy = TensorDictModule(nn.Linear(4, 2), in_keys=[("agents", "observation")], out_keys=[("agents", "action")])
    with InferenceServer(policy) as server:
        asked = TensorDict({"agents": {"observation": torch.randn(4)}})
        assert PolicyClientModule(server)(asked)["agents", "action"].shape == (2,)
        module = PolicyClientModule(server, in_keys=[("agents", "observation")], out_keys=[("agents", "action")])
        assert module(asked)["agents", "action"].shape == (2,)


def test_policy_client_module_of_a_function_that_raises() -> None:
    def fails(td: TensorDictBase) -> TensorDictBase:
        raise ValueError("not today")

    future = PolicyClientModule(fails).submit(observed())
    assert future.done()
    with pytest.raises(ValueError, match="not today"):
        future.result()


def echo(td: TensorDictBase) -> TensorDictBase:
    return td


def test_policy_client_module_is_pickled_with_its_limit() -> None:
    module = pickle.loads(pickle.dumps(PolicyClientModule(echo, max_inflight=2)))
    assert module.max_inflight == 2
    assert "observation" in module(observed())


class Manual:
    """A client whose answers come when a test says so."""

    def __init__(self) -> None:
        self.futures: list[Any] = []

    def submit(self, td: TensorDictBase) -> Any:
        self.futures.append(Future())
        return self.futures[-1]


class Pulled:
    """A future without callbacks."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def done(self) -> bool:
        return self._event.is_set()

    def result(self, timeout: float | None = None) -> TensorDictBase:
        if not self._event.wait(timeout):
            raise TimeoutError
        return TensorDict()

    def set_result(self, _: TensorDictBase) -> None:
        self._event.set()


class ManualPulled(Manual):
    def submit(self, td: TensorDictBase) -> Any:
        self.futures.append(Pulled())
        return self.futures[-1]


@pytest.mark.parametrize("kind", [Manual, ManualPulled])
def test_max_inflight_is_of_requests_that_are_not_answered(kind: type[Manual]) -> None:
    client: Any = kind()
    module = PolicyClientModule(client, max_inflight=1)
    first = module.submit(TensorDict())
    with pytest.raises(TimeoutError):
        first.result(timeout=0.01)  # it is still under way
    is_second_there = threading.Event()

    def submit_second() -> None:
        module.submit(TensorDict())
        is_second_there.set()

    thread = threading.Thread(target=submit_second, daemon=True)
    thread.start()
    assert not is_second_there.wait(0.1)
    client.futures[0].set_result(TensorDict())
    assert is_second_there.wait(5)
    thread.join()


class SaysItsType(nn.Module):
    def forward(self, td: TensorDictBase) -> TensorDictBase:
        value = float(interaction_type() is InteractionType.RANDOM)
        return TensorDict({"action": torch.full(td.batch_size, value)}, batch_size=td.batch_size)


@pytest.mark.parametrize("transport", [ThreadingTransport, ListTransport, MPTransport])
def test_policy_client_module_sends_the_interaction_type(transport: type) -> None:
    with InferenceServer(SaysItsType(), transport()) as server:
        asked = TensorDict(observation=torch.zeros(1, 1), batch_size=[1])
        module = PolicyClientModule(server, out_keys=["action"])
        with set_interaction_type(InteractionType.RANDOM):
            assert module(asked)["action"].item() == 1
            assert module.submit(asked).result(5)["action"].item() == 1
            fixed = PolicyClientModule(server, interaction_type=InteractionType.MEAN)
            assert fixed(asked)["action"].item() == 0
            assert fixed.submit(asked).result(5)["action"].item() == 0
        assert module(asked)["action"].item() == 0
        assert PolicyClientModule(server, interaction_type=InteractionType.RANDOM)(asked)["action"].item() == 1
        assert "_interaction_type" not in module(asked)


@pytest.mark.parametrize("transport", [ThreadingTransport, ListTransport, MPTransport])
def test_a_request_without_keys_has_as_many_rows_as_its_batch_size(transport: type) -> None:
    with InferenceServer(SaysItsType(), transport(), max_batch_size=4) as server:
        client = server.client()
        assert client(TensorDict(batch_size=[3]))["action"].shape == (3,)
        assert client(TensorDict())["action"].shape == ()
        futures = [client.submit(TensorDict(batch_size=[1])) for _ in range(4)]
        assert [future.result(5)["policy_version"].shape for future in futures] == [(1,)] * 4


# -- configuration -----------------------------------------------------------------------------------------------------


def test_server_config_and_device_config() -> None:
    config = InferenceServerConfig(max_batch_size=2, timeout=0.001)
    devices = InferenceDeviceConfig(policy_device="cpu", env_device="cpu")
    with InferenceServer(make_policy(), server_config=config, device_config=devices) as server:
        assert (server.max_batch_size, server.min_batch_size, server.timeout) == (2, 1, 0.001)
        assert server.policy_device == server.device == server.output_device == torch.device("cpu")
        assert server.client()(observed())["action"].device == torch.device("cpu")
    with pytest.raises(ValueError, match="mutually exclusive"):  # also where it is the default
        InferenceServer(make_policy(), max_batch_size=64, server_config=config)
    with pytest.raises(ValueError, match="mutually exclusive"):
        InferenceServer(make_policy(), device="cpu", device_config=devices)
    with pytest.raises(ValueError, match="storing_device is a collector-level"):
        InferenceServer(make_policy(), device_config=InferenceDeviceConfig(storing_device="cpu"))
    assert InferenceDeviceConfig(env_device="cpu", output_device="meta").server_output_device() == torch.device("meta")
    wrong: list[dict[str, Any]] = [{"service_backend": "cloud"}, {"max_inflight_per_env": 0}, {"static_batch_size": 8}]
    for each in wrong:
        with pytest.raises(ValueError, match=next(iter(each))):
            InferenceServerConfig(**each)
    with pytest.raises(ValueError, match="CUDA graphs"):
        InferenceServer(make_policy(), static_batch_size=64)


def test_stats_have_torchrls_names() -> None:
    with InferenceServer(make_policy()) as server:
        server.client()(observed())
        stats = server.stats(reset=True)
        wanted = {"requests", "batches", "requests_per_s", "batches_per_s", "avg_batch_size", "policy_version"}
        wanted |= {f"p{percent}_{what}_ms" for percent in (50, 95) for what in ("queue", "forward")} | {
            "weight_updates"
        }
        assert wanted <= stats.keys()
        assert 0 < stats["p50_queue_ms"] <= stats["p95_queue_ms"]
        assert server.stats()["requests"] == 0


def test_policy_version_key() -> None:
    with InferenceServer(make_policy(), policy_version=12, policy_version_key=("meta", "version")) as server:
        assert server.client()(observed())["meta", "version"].item() == 12
    with InferenceServer(make_policy(), policy_version_key=None) as server:
        assert "policy_version" not in server.client()(observed())


def test_update_model_counted_or_not() -> None:
    with InferenceServer(make_policy()) as server:

        def zero(model: Any) -> str:
            with torch.no_grad():
                model.module.weight.zero_()
                model.module.bias.fill_(1.0)
            return "done"

        assert server.update_model(zero, mark_weight_update=False) == "done"
        assert server.policy_version == 0
        assert torch.equal(server.client()(observed())["action"], torch.ones(2))
        server.update_model(update_fn=zero)
        assert server.policy_version == 1


def test_clients_are_counted() -> None:
    with InferenceServer(make_policy()) as server:
        assert len(server.clients(num_clients=3)) == 3
        with pytest.raises(ValueError, match="at least 1"):
            server.clients(0)
        with pytest.raises(TypeError, match="must be a number"):
            server.clients(True)


def test_shutdown_event() -> None:
    event = threading.Event()
    server = InferenceServer(make_policy(), shutdown_event=event).start()
    client = server.client()
    client(observed())
    event.set()
    assert wait_until(lambda: not server.is_alive)
    with pytest.raises(ServerClosed):
        client(observed())
    server.shutdown()


@pytest.mark.parametrize("key", ["policy_version", None])
def test_configs_and_version_key_of_an_async_batched_collector(key: str | None) -> None:
    collector = AsyncBatchedCollector(
        [make_counting] * 2,
        RandomPolicy(make_counting().action_spec),
        frames_per_batch=10,
        total_frames=20,
        env_backend="threading",
        policy_version_key=key,
        server_config=InferenceServerConfig(max_batch_size=2),
        device_config=InferenceDeviceConfig(policy_device="cpu", env_device="cpu", storing_device="cpu"),
    )
    for batch in collector:
        assert ("policy_version" in batch) == (key is not None)
    collector.shutdown()


# -- where it is served ------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_service_backend_process() -> None:
    server = InferenceServer(
        policy_factory=make_policy,
        service_backend="process",
        service_backend_options={"startup_timeout": 60.0},
        max_batch_size=4,
    )
    assert isinstance(server, ProcessInferenceServer)
    with server:
        assert server.service_backend == "process"
        assert server.client()(observed())["action"].shape == (2,)
        health = server.health(timeout=5.0)
        assert health["process_alive"]
        assert health["serving"]
        weights = {name: torch.ones_like(tensor) for name, tensor in make_policy().named_parameters()}
        server.update_model_weights(TensorDict(weights).unflatten_keys("."), mark_weight_update=False)
        assert torch.equal(server.client()(TensorDict(observation=torch.ones(4)))["action"], torch.full((2,), 5.0))
        assert server.policy_version == 0
        server.update_model_weights(weights)
        assert server.stats()["policy_version"] == 1
    refused: list[dict[str, Any]] = [
        {"model": make_policy()},
        {},
        {"policy_factory": make_policy, "service_backend_options": {"colour": 1}},
        {"policy_factory": make_policy, "transport": "thread"},
        {"policy_factory": make_policy, "server_config": InferenceServerConfig(service_backend="ray")},
    ]
    for wrong in refused:
        with pytest.raises(ValueError, match=r"service_backend|transport must be"):
            InferenceServer(service_backend="process", **wrong)
    with pytest.raises(ValueError, match="service_backend must be"):
        InferenceServer(make_policy(), service_backend="cloud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="service_backend_options"):
        InferenceServer(make_policy(), service_backend_options={"startup_timeout": 1})
    with pytest.raises(TypeError, match="unknown argument: 'colour'"):
        ProcessInferenceServer(make_policy, colour=1)  # type: ignore[call-arg]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["mp", "shared_memory"])
def test_process_server_over_a_transport_that_was_made_before(kind: str) -> None:
    made: Any = MPTransport(ctx=multiprocessing.get_context("spawn"))
    if kind == "shared_memory":
        made = SharedMemoryTransport(REQUEST, ANSWER, num_slots=2)
    client = made.client()
    context: Any = multiprocessing.get_context("forkserver")
    server = ProcessInferenceServer(policy_factory=make_policy, transport=made, mp_context=context, max_batch_size=4)
    with server:
        assert client(observed())["action"].shape == (2,)
        assert PolicyClientModule(made)(observed())["action"].shape == (2,)
        assert server.client()(observed())["action"].shape == (2,)
        with pytest.raises(RuntimeError, match="in another process"):
            made.submit(observed())
        with pytest.raises(RuntimeError, match="make a new one"):
            InferenceServer(make_policy(), made).start()
        assert server.transport is made
    with pytest.raises(RuntimeError):
        client(observed())


def test_service_backend_of_a_config() -> None:
    config = InferenceServerConfig(service_backend="process", max_batch_size=2)
    server = InferenceServer(policy_factory=make_policy, server_config=config)
    assert isinstance(server, ProcessInferenceServer)


# -- weights -----------------------------------------------------------------------------------------------------------


class QueueOfWeights:
    """What receives weights, and is no scheme of swath's."""

    def __init__(self) -> None:
        self._weights: list[TensorDictBase] = []
        self._model: Any = None
        self.initialized_on_receiver = self.synchronized_on_receiver = False
        self.is_applied = threading.Event()

    def init_on_receiver(self, *, model_id: str, model: Any = None, worker_idx: int = 0, **others: Any) -> None:
        self._model = model
        self.initialized_on_receiver = True

    def connect(self, *, worker_idx: int = 0) -> None:
        self.synchronized_on_receiver = True

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        if not self._weights:
            return None
        weights = self._weights.pop(0)
        weights.to_module(self._model)
        self.is_applied.set()
        return weights

    def push(self, weights: TensorDictBase) -> None:
        self._weights.append(weights)


def test_a_thread_whose_request_failed_is_not_busy_any_more() -> None:
    transport = ThreadingTransport()
    with InferenceServer(make_policy(), transport) as server:
        client = server.client()
        with pytest.raises(KeyError):
            client(TensorDict())
        assert client(observed())["action"].shape == (2,)
        assert not client.is_shared
        assert transport.num_clients() == 1


def test_weight_sync_of_another_kind() -> None:
    policy, scheme = make_policy(), QueueOfWeights()
    with InferenceServer(policy, weight_sync=scheme) as server:
        assert scheme.initialized_on_receiver
        assert scheme.synchronized_on_receiver
        client = server.client()
        before = client(observed())
        assert before["policy_version"].item() == 0
        zeros = TensorDict.from_module(policy).apply(lambda tensor: nn.Parameter(torch.zeros_like(tensor)))
        assert zeros is not None
        scheme.push(zeros)
        assert scheme.is_applied.wait(5)
        after = client(observed())
        assert torch.equal(after["action"], torch.zeros(2))
        assert after["policy_version"].item() == 1
        assert server.stats()["weight_updates"] == 1
        assert client(observed())["action"].shape == (2,)
    with pytest.raises(TypeError, match="weight_sync must be"):
        InferenceServer(policy, weight_sync=object())
