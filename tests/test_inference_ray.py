"""Inference over Ray: servers in actors, clients in tasks, and the death of each."""

from __future__ import annotations

import importlib
import importlib.util
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from swath.errors import ServerClosed, ServerDied
from swath.integrations.ray import start_ray
from swath.modules import InferenceServer, PolicyClientModule, RayInferenceServer, RayTransport

ray: Any = importlib.import_module("ray") if importlib.util.find_spec("ray") else None
pytestmark = [pytest.mark.ray, pytest.mark.skipif(ray is None, reason="needs the extra `ray`")]


@pytest.fixture(autouse=True, scope="module")
def _cluster() -> Any:
    start_ray({"num_cpus": 2})
    yield
    ray.shutdown()


def make_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def observed() -> TensorDict:
    return TensorDict(observation=torch.randn(4))


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def raise_unsendable(observation: torch.Tensor) -> torch.Tensor:
    if observation.isnan().any():
        raise Unsendable("not today")
    return observation * 2


def ask(client: Any, count: int) -> list[torch.Size]:
    return [client(observed())["action"].shape for _ in range(count)]


def test_service_backend_ray() -> None:
    server: Any = InferenceServer(policy_factory=make_policy, service_backend="ray", max_batch_size=4)
    assert isinstance(server, RayInferenceServer)
    with pytest.raises(ServerClosed, match="not started"):
        server.client()
    with server:
        assert server.is_alive
        assert (server.service_backend, server.transport_kind) == ("ray", "ray")
        client = server.client()
        policy = make_policy()
        server.update_policy_weights_(policy)
        asked = observed()
        answer = client(asked)
        torch.testing.assert_close(answer["action"], policy(asked.clone())["action"])
        assert answer["policy_version"].item() == server.policy_version == 1
        future = client.submit(asked)
        assert isinstance(future, Future)
        torch.testing.assert_close(future.result(30)["action"], answer["action"])
        assert ray.get(ray.remote(ask).remote(client, 3)) == [(2,)] * 3
        assert PolicyClientModule(server)(asked)["action"].shape == (2,)
        server.update_model_weights(policy, mark_weight_update=False)
        assert server.stats()["policy_version"] == 1
        assert server.stats()["requests"] == 6
        with pytest.raises(KeyError, match="do not fit"):
            server.update_policy_weights_({"weight": torch.ones(1)})
        assert server.health() == {"actor_alive": True}
    assert server.health() == {"actor_alive": False}
    server.shutdown()
    with pytest.raises((ServerDied, ServerClosed)):
        client(observed())
    with pytest.raises(ServerClosed):
        server.stats()


class SaysItsType(nn.Module):
    def forward(self, td: TensorDictBase) -> TensorDictBase:
        value = float(interaction_type() is InteractionType.RANDOM)
        return TensorDict({"action": torch.full(td.batch_size, value)}, batch_size=td.batch_size)


@pytest.mark.parametrize("where", ["actor", "transport"])
def test_interaction_types_and_exceptions_travel(where: str) -> None:
    for policy, checks in ((SaysItsType, _check_type), (lambda: raise_unsendable, _check_exception)):
        if where == "actor":
            server: Any = InferenceServer(policy_factory=policy, service_backend="ray")
        else:
            server = InferenceServer(policy(), RayTransport())
        with server:
            checks(server)


def _check_type(server: Any) -> None:
    client = server.client()
    asked = TensorDict(observation=torch.zeros(1, 1), batch_size=[1])
    with set_interaction_type(InteractionType.RANDOM):
        assert client(asked)["action"].item() == 1
    assert client(asked)["action"].item() == 0


def _check_exception(server: Any) -> None:
    client = server.client()
    with pytest.raises(Exception, match="not today"):
        client(TensorDict(observation=torch.full((4,), torch.nan)))
    assert client(observed())["action"].shape == (4,)


def test_ray_transport() -> None:
    transport = RayTransport()
    client = transport.client()
    policy = make_policy()
    with InferenceServer(policy, transport, max_batch_size=4) as server:
        assert server.transport_kind == "ray"
        asked = observed()
        torch.testing.assert_close(client(asked)["action"], policy(asked.clone())["action"])
        assert ray.get(ray.remote(ask).remote(client, 3)) == [(2,)] * 3
        futures = [transport.submit(observed()) for _ in range(5)]
        assert all(future.result(30)["action"].shape == (2,) for future in futures)
    with pytest.raises(ServerClosed):
        client(observed())


def test_an_actor_that_is_killed_leaves_nobody_waiting() -> None:
    server: Any = InferenceServer(policy_factory=make_policy, service_backend="ray").start()
    client = server.client()
    client(observed())
    future = client.submit(observed())
    future.result(30)
    ray.kill(server._actor)
    with pytest.raises(ServerDied):
        client(observed())
    assert not server.is_alive
    server.shutdown()
