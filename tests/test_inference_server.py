"""InferenceServer: answers are the policy's, batches are as asked for, and nobody waits for ever."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from counting import make_counting
from policies_for_tests import actor_critic, deterministic, recurrent, stochastic
from swath.collectors import Collector
from swath.errors import InferenceError, PolicyInputError, PolicyOutputError, ServerClosed, ServerDied
from swath.modules import InferenceServer, PolicyClientModule, ThreadingTransport
from swath.specs import Unbounded
from swath.weight_update import SharedMemWeightSyncScheme

pytestmark = pytest.mark.processes
TRANSPORTS = ["threads", "slots", "mp"]


def observed(*batch_size: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    return TensorDict({"observation": torch.randn(*batch_size, 4, generator=generator)}, batch_size=batch_size)


class Recorder(nn.Module):
    """Doubles its observation, and knows the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.sizes: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.was_called = threading.Event()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.sizes.append(observation.shape[0])
        self.was_called.set()
        assert self.may_go.wait(20)
        return observation * self.factor


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.may_go.set()


def serving(recorder: Recorder, **kwargs: Any) -> InferenceServer:
    policy = TensorDictModule(recorder, in_keys=["observation"], out_keys=["action"])
    return InferenceServer(policy, share_weights=True, **kwargs)


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call all at the same time: what each returned, or raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a client waits for ever"
    return results


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make_policy", [deterministic, actor_critic])
def test_answers_are_the_policys(transport: str, make_policy: Callable[[], Any]) -> None:
    policy = make_policy()
    with InferenceServer(policy, transport) as server:
        client = server.client()
        for batch_size in [(), (), (8,), (8,), (2, 3), (), (1,), (0,)]:
            asked = observed(*batch_size)
            answer = client(asked)
            expected = policy(asked.clone())
            assert answer.batch_size == asked.batch_size
            for key in ("observation", *policy.out_keys):
                torch.testing.assert_close(answer[key], expected[key])
            assert torch.equal(answer["policy_version"], torch.zeros(batch_size, dtype=torch.int64))
            assert set(asked.keys()) == {"observation"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_clients_at_once_each_get_their_own(transport: str, recorder: Recorder) -> None:
    with serving(recorder, transport=transport) as server:

        def ask_often(number: int) -> None:
            client = server.client()
            for step in range(50):
                asked = TensorDict(
                    {"observation": torch.full((number % 3 + 1, 4), number + step / 100)}, [number % 3 + 1]
                )
                assert torch.equal(client(asked)["action"], asked["observation"] * 2)

        assert in_threads([lambda number=number: ask_often(number) for number in range(8)]) == [None] * 8
        assert server.stats()["requests"] == 400
        assert sum(recorder.sizes) == server.stats()["rows"]


def test_a_client_may_be_shared() -> None:
    with InferenceServer(lambda observation: observation + 1, "slots") as server:
        client = server.client()
        asked = [observed(seed=number) for number in range(8)]
        answers = in_threads([lambda td=td: [client(td) for _ in range(20)][-1] for td in asked])
        for td, answer in zip(asked, answers, strict=True):
            assert torch.equal(answer["action"], td["observation"] + 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_futures(transport: str, recorder: Recorder) -> None:
    with serving(recorder, transport=transport) as server:
        client = server.client()
        client(observed())
        recorder.may_go.clear()
        asked = [observed(seed=number) for number in range(3)]
        futures = [client.submit(td) for td in asked]
        wanted = [td["observation"] * 2 for td in asked]
        for td in asked:
            td["observation"].zero_()  # what was asked is asked
        assert not futures[0].done()
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.01 s"):
            futures[0].result(timeout=0.01)
        recorder.may_go.set()
        for future, action in zip(reversed(futures), reversed(wanted), strict=True):
            assert torch.equal(future.result(timeout=5)["action"], action)
            assert future.done()
            assert future.exception() is None
            assert future.result() is future.result()


def test_any_policy_is_served() -> None:
    def with_tensordict(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["observation"] + 1)

    for policy in (
        lambda observation: observation + 1,
        with_tensordict,
        lambda td: TensorDict({"action": td["observation"] + 1}, td.batch_size),
    ):
        with InferenceServer(policy) as server:
            answer = server.client()(observed())
            assert torch.equal(answer["action"], observed()["observation"] + 1)
            assert set(answer.keys()) == {"observation", "action", "policy_version"}
    with InferenceServer(recurrent()) as server:
        asked = observed(3).set("hidden", torch.zeros(3, 8))
        assert server.client()(asked)["next", "hidden"].shape == (3, 8)


class Chooser(nn.Module):
    """As people write it: a distribution in forward, and an attribute that decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.sign = 1.0

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        choice = torch.distributions.Categorical(logits=self.layer(observation) * self.sign)
        action = choice.sample()
        return action, choice.log_prob(action)


def test_a_captured_policy_answers_as_it_would_when_called() -> None:
    module = Chooser()
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action", "log_prob"])
    with InferenceServer(policy, share_weights=True) as server:
        client = server.client()
        for size in [(), (5,), ()] * 12:
            request = observed(*size)
            torch.manual_seed(1)
            answer = client(request)
            torch.manual_seed(1)
            expected = policy(observed(*(size or (1,))))  # a server's rows are a batch
            assert torch.equal(answer["action"].view(-1), expected["action"])
            assert torch.equal(answer["log_prob"].view(-1), expected["log_prob"])
        assert server.policy_plan() == "captured, 15 operations, 1 values looked at"
        module.sign = -1.0
        torch.manual_seed(1)
        answer = client(observed(5))
        torch.manual_seed(1)
        assert torch.equal(answer["log_prob"], policy(observed(5))["log_prob"])
        with pytest.raises(ValueError, match="Expected parameter logits"):
            client(TensorDict({"observation": torch.full((5, 4), torch.nan)}, [5]))


def test_the_callers_interaction_type_is_sent_and_types_are_not_mixed() -> None:
    seen: list[tuple[Any, int]] = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        seen.append((interaction_type(), observation.shape[0]))
        return observation

    kinds = [InteractionType.RANDOM, InteractionType.DETERMINISTIC, None]
    server = InferenceServer(policy, exploration_type="mode")
    client, futures = server.client(), []
    for kind in kinds * 2:
        with set_interaction_type(kind):
            futures.append(client.submit(observed()))
    with server:
        for future in futures:
            future.result(5)
    assert seen == [(InteractionType.RANDOM, 2), (InteractionType.DETERMINISTIC, 2), (InteractionType.MODE, 2)]
    assert interaction_type() is None


def test_what_cannot_share_a_forward_gets_its_own(recorder: Recorder) -> None:
    server = serving(recorder)
    client = server.client()
    asked = [observed(), observed(2), observed().double(), TensorDict({"observation": torch.ones(7)})]
    futures = [client.submit(td) for td in asked]
    with server:
        for td, future in zip(asked, futures, strict=True):
            assert torch.equal(future.result(5)["action"], td["observation"] * 2)
            assert future.result()["action"].dtype == td["observation"].dtype
    assert recorder.sizes == [3, 1, 1]


def test_collate_fn_and_what_is_no_tensor() -> None:
    def greet(tensordict: TensorDictBase) -> TensorDictBase:
        names = tensordict.get("name").tolist() if tensordict.batch_size else [tensordict["name"]]
        return tensordict.set("length", torch.tensor([len(name) for name in names]))

    for transport in ("threads", "mp", "slots"):
        with InferenceServer(greet, transport) as server:
            asked = TensorDict({"name": NonTensorData("swath")})
            assert [server.client()(asked)["length"].item() for _ in range(2)] == [5, 5]
    collated: list[int] = []

    def collate(tensordicts: list[TensorDictBase]) -> TensorDictBase:
        collated.append(len(tensordicts))
        return lazy_stack(tensordicts)

    server = InferenceServer(deterministic(), collate_fn=collate)
    futures = [server.client().submit(observed()) for _ in range(3)]
    with server:
        assert all(future.result(5)["action"].shape == (3,) for future in futures)
    assert collated == [3]


def test_an_answer_is_the_clients_for_good() -> None:
    kept = torch.zeros(64, 4)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.add(observation, 1, out=kept[: len(observation)])

    with InferenceServer(policy) as server:
        first = server.client()(observed(seed=1))
        before = first["action"].clone()
        server.client()(observed(seed=2))
        assert torch.equal(first["action"], before)
        assert first["action"].requires_grad is False


# -- batches ---------------------------------------------------------------------------------------------------------


def test_no_batch_has_more_rows_than_asked_for(recorder: Recorder) -> None:
    server = serving(recorder, max_batch_size=4)
    futures = [server.client().submit(observed()) for _ in range(10)]
    futures.append(server.client().submit(observed(9)))
    with server:
        for future in futures:
            future.result(5)
    assert recorder.sizes == [4, 4, 2, 9]


def test_a_small_batch_waits_for_more(recorder: Recorder) -> None:
    with serving(recorder, min_batch_size=4, timeout=20) as server:
        clients = server.clients(5)
        futures = [client.submit(observed()) for client in clients[:3]]
        assert not recorder.was_called.wait(0.05)
        futures.append(clients[3].submit(observed()))
        for future in futures:
            future.result(5)
    assert recorder.sizes == [4]


def test_but_not_for_longer_than_the_timeout(recorder: Recorder) -> None:
    with serving(recorder, min_batch_size=4, timeout=0.05) as server:
        idle = server.client()
        start = time.perf_counter()
        server.client()(observed())
        assert time.perf_counter() - start >= 0.05
        del idle
    assert recorder.sizes == [1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nor_when_all_clients_wait(transport: str, recorder: Recorder) -> None:
    with serving(recorder, transport=transport, min_batch_size=3, timeout=20) as server:
        results = in_threads([lambda client=client: client(observed()) for client in server.clients(2)])
        assert [result["action"].shape for result in results] == [(4,), (4,)]


def test_stats(recorder: Recorder) -> None:
    server = serving(recorder)
    futures = [server.client().submit(observed(2)) for _ in range(3)]
    with server:
        for future in futures:
            future.result(5)
        stats = server.stats(reset=True)
        expected = {"requests": 3, "rows": 6, "batches": 1, "avg_batch_size": 6.0, "failed_requests": 0}
        assert {name: stats[name] for name in expected} == expected
        assert 0 < stats["queue_p50_ms"] <= stats["queue_p95_ms"]
        assert 0 < stats["forward_p50_ms"] <= stats["forward_p95_ms"]
        assert server.stats()["requests"] == 0
    with serving(recorder, collect_stats=False) as server:
        server.client()(observed())
        assert server.stats()["requests"] == 0


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_is_seen_when_it_is_published(transport: str) -> None:
    policy = deterministic()
    with InferenceServer(policy, transport, policy_version=5) as server:
        client = server.client()
        before = client(observed())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        assert torch.equal(client(observed())["action"], before["action"])
        server.update_policy_weights_()
        after = client(observed())
        torch.testing.assert_close(after["action"], policy(observed())["action"])
        assert (before["policy_version"], after["policy_version"]) == (5, 6)
        server.update_policy_weights_({name: torch.zeros_like(p) for name, p in policy.named_parameters()})
        assert not client(observed())["action"].any()
        with pytest.raises(KeyError, match="do not fit"):
            server.update_policy_weights_({"weight": torch.ones(1)})
        with pytest.raises(KeyError, match="there is no model 'critic'"):
            server.update_policy_weights_(policy, model_id="critic")
        assert server.policy_version == 7 == server.stats()["policy_version"]
        assert server.stats()["weight_updates"] == 2


def test_weights_are_not_exchanged_in_the_middle_of_a_batch(recorder: Recorder) -> None:
    with serving(recorder) as server:
        recorder.may_go.clear()
        future = server.client().submit(observed())
        assert recorder.was_called.wait(5)
        update = threading.Thread(target=server.update_model, args=(lambda model: model.module.factor.data.fill_(3),))
        update.start()
        update.join(0.05)
        assert update.is_alive()
        recorder.may_go.set()
        assert torch.equal(future.result(5)["action"], observed()["observation"] * 2)
        assert future.result()["policy_version"] == 0
        update.join(5)
        answer = server.client()(observed())
        assert torch.equal(answer["action"], observed()["observation"] * 3)
        assert answer["policy_version"] == 1


def test_a_layer_that_is_exchanged_is_served() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    with InferenceServer(TensorDictModule(net, in_keys=["observation"], out_keys=["action"])) as server:
        client = server.client()
        client(observed())

        def exchange(model: Any) -> None:
            model.module[0] = nn.Identity()

        server.update_model(exchange)
        assert torch.equal(client(observed())["action"], observed()["observation"])


def test_a_weight_scheme_brings_weights() -> None:
    policy = deterministic()
    sender = SharedMemWeightSyncScheme(timeout_s=5)
    sender.init_on_sender(model=policy, num_workers=1)
    with InferenceServer(copy.deepcopy(policy), weight_sync=sender.for_worker(0)) as server:
        client = server.client()
        sender.connect()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        before = client(observed())["policy_version"].item()
        sender.send()
        answer = client(observed())
        torch.testing.assert_close(answer["action"], policy(observed())["action"])
        assert answer["policy_version"].item() == before + 1
    sender.shutdown()


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_policy_that_raises_fails_its_batch_only(transport: str) -> None:
    class Refusal(ValueError):
        pass

    def policy(observation: torch.Tensor) -> torch.Tensor:
        if (observation < 0).any():
            raise Refusal("too cold")
        return observation

    cold, warm = TensorDict({"observation": -torch.ones(4)}), TensorDict({"observation": torch.ones(4)})
    with InferenceServer(policy, transport) as server:
        clients = server.clients(2)
        for _ in range(2):
            errors = in_threads([lambda client=client: client(cold) for client in clients])
            for error in errors:
                assert isinstance(error, Refusal)
                assert str(error) == "too cold"
                assert any("the server goes on" in note for note in error.__notes__)
            assert errors[0] is not errors[1]
            assert torch.equal(clients[0](warm)["action"], torch.ones(4))
        future = clients[0].submit(cold)
        assert isinstance(future.exception(5), Refusal)
        assert server.is_alive
        assert server.stats()["failed_requests"] == 5


def test_policies_that_break_their_contract() -> None:
    with InferenceServer(lambda observation: observation[:0]) as server, pytest.raises(PolicyOutputError, match="rows"):
        server.client()(observed())
    with InferenceServer(lambda observation: None) as server, pytest.raises(PolicyOutputError, match="returned None"):
        server.client()(observed())
    with InferenceServer(deterministic()) as server, pytest.raises(PolicyInputError, match="'observation'"):
        server.client()(TensorDict({"obs": torch.ones(4)}))


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pending_requests_fail_at_shutdown(transport: str, recorder: Recorder) -> None:
    server = serving(recorder, transport=transport, max_batch_size=1).start()
    clients = server.clients(3)
    clients[0](observed())
    recorder.was_called.clear()
    recorder.may_go.clear()
    futures = [client.submit(observed()) for client in clients]
    assert recorder.was_called.wait(5)
    start = time.monotonic()
    server.shutdown(timeout=0.2)  # the policy does not return
    for future in futures:
        with pytest.raises(ServerClosed, match="was shut down"):
            future.result(2)
    assert time.monotonic() - start < 2
    assert not server.is_alive
    recorder.may_go.set()
    server.shutdown()
    with pytest.raises(InferenceError):
        clients[0](observed())


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_when_the_servers_thread_dies_nobody_waits(transport: str, recorder: Recorder) -> None:
    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        recorder(tensordict["observation"])
        raise SystemExit("out of here")

    server = InferenceServer(policy, transport, max_batch_size=1).start()
    recorder.may_go.clear()
    clients = server.clients(3)
    results: list[Any] = []
    waiting = [
        threading.Thread(target=lambda c=c: results.extend(in_threads([lambda: c(observed())]))) for c in clients
    ]
    for thread in waiting:
        thread.start()
    assert recorder.was_called.wait(5)
    recorder.may_go.set()
    start = time.monotonic()
    for thread in waiting:
        thread.join(5)
    assert time.monotonic() - start < 2
    # A client that had not even connected finds nobody.
    assert all(isinstance(result, InferenceError) for result in results)
    assert any(isinstance(result, ServerDied) for result in results)
    assert not server.is_alive
    with pytest.raises(InferenceError):
        clients[0](observed())
    server.shutdown()


def test_life(recorder: Recorder) -> None:
    server = serving(recorder)
    client = server.client()
    with pytest.raises(ServerClosed, match="was not started"):
        client(observed())
    assert not server.is_alive
    assert server.start() is server
    assert server.is_alive
    with pytest.raises(RuntimeError, match="already running"):
        server.start()
    server.shutdown()
    server.shutdown()
    assert not server.is_alive
    with pytest.raises(RuntimeError, match="started before"):
        server.start()
    with pytest.raises(ServerClosed, match="was shut down"):
        client(observed())
    with pytest.raises(RuntimeError, match="make a new one"):
        serving(recorder, transport=server.transport).start()
    serving(recorder).shutdown()  # never started


def test_a_server_that_nobody_can_ask_ends(recorder: Recorder) -> None:
    client = serving(recorder).start().client()
    gc.collect()
    client(observed())  # a client keeps its server
    thread = next(thread for thread in threading.enumerate() if thread.name == "swath-inference")
    del client
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_arguments() -> None:
    refused: list[dict[str, Any]] = [{"max_batch_size": 0}, {"min_batch_size": 9, "max_batch_size": 8}, {"timeout": -1}]
    for wrong in refused:
        with pytest.raises(ValueError, match="must"):
            InferenceServer(deterministic(), **wrong)
    with pytest.raises(TypeError, match="either model or policy_factory"):
        InferenceServer()
    with pytest.raises(ValueError, match="transport must be"):
        InferenceServer(deterministic(), "carrier pigeon")
    with pytest.raises(TypeError, match="server_config has 'colour'"):
        InferenceServer(deterministic(), server_config={"colour": 1})
    with InferenceServer(policy_factory=deterministic, num_clients=1, policy_version_key=None) as server:
        assert "policy_version" not in server.client()(observed())
        with pytest.raises(RuntimeError, match="num_clients=1"):
            server.client()
        with pytest.raises(ValueError, match="policy_factory"):
            server.update_policy_weights_()


# -- a remote policy is a policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_policy", [deterministic, recurrent])
def test_a_collector_with_a_client_collects_the_same(make_policy: Callable[[], Any]) -> None:
    policy = make_policy()
    with InferenceServer(policy) as server:
        remote = PolicyClientModule(server.client(), policy.in_keys, policy.out_keys)
        remote.state_spec = {"hidden": Unbounded((8,))}
        batches = []
        for each in (policy, remote):
            collector = Collector(make_counting, each, frames_per_batch=40, total_frames=80)
            collector.set_seed(0)
            batches.append(torch.cat(list(collector)))
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    for key in batches[0].keys(True, True):
        torch.testing.assert_close(batches[0][key], batches[1][key], msg=str(key))


def test_exploration_type_reaches_the_server() -> None:
    with InferenceServer(stochastic()) as server:
        remote = PolicyClientModule(server.client(), ["observation"], ["action", "logits", "policy_version"])
        collector = Collector(
            make_counting, remote, frames_per_batch=50, total_frames=50, exploration_type="deterministic"
        )
        (batch,) = collector
        assert torch.equal(batch["action"].argmax(-1), batch["logits"].argmax(-1))
        assert not batch["policy_version"].any()


def test_the_module_itself(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="max_inflight must be at least 1"):
        PolicyClientModule(None, ["observation"], ["action"], max_inflight=0)  # type: ignore[arg-type]
    with serving(recorder, max_batch_size=1) as server:
        module = PolicyClientModule(server.client(), ["observation"], ["action"], max_inflight=1)
        first = module.submit(observed())
        second = module.submit(observed())  # waits for the first, which nobody asks for
        assert first.done()
        assert second.result(5)["action"].shape == (4,)
        asked = observed(2)
        answer = module(asked)
        assert set(answer.keys()) == {"observation", "action"}
        assert "action" not in asked
        assert torch.equal(copy.deepcopy(module)(asked)["action"], answer["action"])
        with pytest.raises(TypeError, match="SlotTransport"):
            pickle.dumps(module)
        with pytest.raises(PolicyOutputError, match="does not answer with 'value'"):
            PolicyClientModule(server.client(), ["observation"], ["value"])(asked)
    assert isinstance(server.transport, ThreadingTransport)
