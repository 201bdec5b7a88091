"""Futures, and what may happen while they are under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from leaks import wait_until
from swath.errors import ServerClosed, ServerDied
from swath.modules import InferenceServer, PolicyClientModule, ProcessInferenceServer

TRANSPORTS = ["thread", "slots", "mp"]


def observed() -> TensorDict:
    return TensorDict(observation=torch.randn(4))


class Unsendable(Exception):
    def __init__(self, handle: Any) -> None:
        super().__init__("not today")
        self.handle = handle


def raises(observation: torch.Tensor) -> torch.Tensor:
    if observation.isnan().any():
        raise Unsendable(threading.Lock())
    return observation * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_that_cannot_be_pickled_reaches_a_future(transport: str) -> None:
    with InferenceServer(raises, transport) as server:
        client = server.client()
        assert client(observed())["action"].shape == (4,)
        for _ in range(2):
            future = client.submit(TensorDict(observation=torch.full((4,), torch.nan)))
            with pytest.raises(Exception, match="not today"):
                future.result(10)
            assert client.submit(observed()).result(10)["action"].shape == (4,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_futures_under_way_when_the_server_is_shut_down(transport: str) -> None:
    may_go, was_called = threading.Event(), threading.Event()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        was_called.set()
        may_go.wait(20)
        return observation

    server = InferenceServer(policy, transport, max_batch_size=1).start()
    client = server.client()
    futures = [client.submit(observed()) for _ in range(3)]
    assert was_called.wait(10)
    server.shutdown(timeout=0.1)
    done, rest = wait(futures, timeout=10)
    assert not rest
    for future in done:
        assert isinstance(future.exception(), (ServerClosed, ServerDied))
    may_go.set()
    server.shutdown()
    with pytest.raises((ServerClosed, ServerDied)):
        client.submit(observed()).result(10)


class SaysItsVersion(nn.Module):
    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(*observation.shape[:-1], 1000)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_whole_while_futures_are_under_way(transport: str) -> None:
    with InferenceServer(SaysItsVersion(), transport) as server:
        client = server.client()
        futures: list[Future[Any]] = []
        for number in range(1, 40):
            futures.append(client.submit(observed()))
            server.update_policy_weights_({"weight": torch.full((1000,), float(number))})
            futures.append(client.submit(observed()))
        for future in futures:
            answer = future.result(10)
            assert answer["action"].unique().tolist() == [answer["policy_version"].item()]


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["slots", "mp"])
def test_futures_under_way_when_the_servers_process_is_killed(transport: str) -> None:
    def make_policy() -> Any:
        def policy(observation: torch.Tensor) -> torch.Tensor:
            if observation[0, 0] == 7:
                time.sleep(60)
            return observation

        return policy

    with ProcessInferenceServer(make_policy, transport) as server:
        client = server.client()
        client(observed())
        module = PolicyClientModule(client, max_inflight=2)
        futures = [module.submit(TensorDict(observation=torch.full((4,), 7.0))) for _ in range(2)]
        assert wait_until(lambda: all(not future.done() for future in futures))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        for future in futures:
            with pytest.raises(ServerDied):
                future.result(10)
        with pytest.raises((ServerClosed, ServerDied)):
            module(observed())


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["slots", "mp"])
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_copy_of_a_client_with_futures_under_way(transport: str) -> None:
    with InferenceServer(raises, transport) as server:
        client = server.client()
        futures = [client.submit(observed()) for _ in range(4)]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                asked = observed()
                answers = [client(asked), client.submit(asked).result(20)]
                code = 0 if all(torch.equal(each["action"], asked["observation"] * 2) for each in answers) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(future.result(10)["action"].shape == (4,) for future in futures)
        client(observed())


@pytest.mark.parametrize("transport", ["slots", "mp"])
def test_threads_that_wait_for_answers_are_used_again_and_end(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swath.modules.inference_server.waiter_threads._SECONDS_IDLE", 0.2)

    before = set(threading.enumerate())

    def waiting() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "swath-answers" and each not in before]

    with InferenceServer(raises, transport) as server:
        client = server.client()
        for _ in range(50):
            client.submit(observed()).result(10)
        assert len(waiting()) < 25  # one that has just answered may not be free yet
        assert wait_until(lambda: not waiting())
        client.submit(observed()).result(10)
