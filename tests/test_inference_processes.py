"""Inference over process borders: clients in workers, servers in processes of their own, and the death of each."""

from __future__ import annotations

import copy
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from counting import make_counting
from leaks import children, wait_until
from policies_for_tests import deterministic, stochastic
from programs import WarmProgram
from swath.collectors import MultiCollector
from swath.errors import InferenceError, NoFreeSlot, ServerClosed, ServerDied, WorkerDied
from swath.modules import InferenceServer, MPTransport, PolicyClientModule, ProcessInferenceServer, SlotTransport
from swath.process import pickling

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:the envs wait rather than compute"),  # for the server
]
TRANSPORTS = [SlotTransport, MPTransport]


def observed(*batch_size: int) -> TensorDict:
    return TensorDict({"observation": torch.randn(*batch_size, 4)}, batch_size=batch_size)


def make_policy() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(4, 3), in_keys=["observation"], out_keys=["action"])


class Asking:
    """A thread that asks until it gets an error."""

    def __init__(self, client: Any) -> None:
        self.error: BaseException | None = None
        self._client = client
        self.was_answered = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._client(observed())
                self.was_answered.set()
        except BaseException as error:
            self.error = error

    def join(self, timeout_s: float) -> BaseException | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "a client waits for ever"
        return self.error


# -- clients in workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sync", [True, False])
def test_collectors_in_workers_ask_a_server_here(transport: type, sync: bool) -> None:
    policy = deterministic()
    with InferenceServer(policy, transport()) as server:
        remote = PolicyClientModule(server.client(), ["observation"], ["action", "policy_version"])
        collector = MultiCollector(
            [make_counting] * 4, remote, frames_per_batch=80, total_frames=1600, num_workers=2, sync=sync
        )
        policies = [policy, copy.deepcopy(policy)]
        with torch.no_grad():
            for parameter in policies[1].parameters():
                parameter.mul_(0.5)
        frames = 0
        versions: set[int] = set()
        for number, batch in enumerate(collector):
            frames += batch.numel()
            for version in batch["policy_version"].unique().tolist():
                chosen = batch[batch["policy_version"] == version]
                torch.testing.assert_close(chosen["action"], policies[version](chosen.clone())["action"])
                versions.add(version)
            if number == 0:
                server.update_policy_weights_(policies[1])
        assert frames == 1600
        assert versions == {0, 1}
        stats = server.stats()
        assert stats["avg_batch_size"] >= 2  # the two envs of a worker are one request


def test_the_interaction_type_of_a_worker_reaches_the_server() -> None:
    with InferenceServer(stochastic(), SlotTransport()) as server:
        remote = PolicyClientModule(server.client(), ["observation"], ["action", "logits"])
        for kind, is_greedy in (("deterministic", True), ("random", False)):
            collector = MultiCollector(
                [make_counting] * 2, remote, frames_per_batch=100, total_frames=100, exploration_type=kind, sync=True
            )
            (batch,) = collector
            greedy = batch["action"].argmax(-1) == batch["logits"].argmax(-1)
            assert bool(greedy.all()) == is_greedy


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_the_policy_raises_reaches_the_workers_owner(transport: type) -> None:
    def refuse(observation: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("not today")

    with InferenceServer(refuse, transport()) as server:
        remote = PolicyClientModule(server.client(), ["observation"], ["action"])
        with pytest.raises(FloatingPointError, match="not today") as caught:
            MultiCollector([make_counting] * 2, remote, frames_per_batch=10, num_workers=2, sync=True)
        assert any("raised in the inference server" in note for note in caught.value.__notes__)
        assert server.is_alive


def test_a_killed_worker_gives_its_slot_back() -> None:
    with InferenceServer(deterministic(), SlotTransport(num_slots=2)) as server:
        remote = PolicyClientModule(server.client(), ["observation"], ["action"])
        for _ in range(2):  # the second one finds free slots
            collector = MultiCollector([make_counting] * 2, remote, frames_per_batch=20, num_workers=2, sync=True)
            batches = iter(collector)
            next(batches)
            os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
            with pytest.raises(WorkerDied):
                for _ in batches:
                    pass
            collector.shutdown()
            assert wait_until(lambda: len(server.transport._free) == 2)  # type: ignore[attr-defined]


# -- slots -----------------------------------------------------------------------------------------------------------


def test_nothing_is_pickled_after_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with InferenceServer(make_policy(), SlotTransport()) as server:
        client = server.client()
        client(observed())
        monkeypatch.setattr(pickle, "dumps", lambda *_: pytest.fail("pickled"))
        for _ in range(5):
            asked = observed().set("undeclared", torch.ones(1))
            torch.testing.assert_close(client(asked)["action"], make_policy()(asked)["action"])


def test_other_layouts_get_other_slots() -> None:
    def policy(td: TensorDict) -> TensorDict:
        return td.set("action", td["observation"] * 2)

    with InferenceServer(policy, SlotTransport(request_spec=["observation"])) as server:
        client = server.client()
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool):
            for batch_size in [(), (3,), (2, 2), (3,)]:
                for _ in range(2):
                    asked = TensorDict({"observation": torch.ones(*batch_size, 2), "other": torch.ones(batch_size)})
                    asked["observation"] = asked["observation"].to(dtype)
                    asked.batch_size = batch_size
                    answer = client(asked)
                    assert torch.equal(answer["action"], asked["observation"] * 2)


def test_an_answer_that_outgrows_its_slot_arrives() -> None:
    calls = 0

    def policy(observation: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return observation.repeat(1, 1 + calls % 2)

    with InferenceServer(policy, SlotTransport()) as server:
        client = server.client()
        shapes = [client(observed())["action"].shape for _ in range(4)]
        assert shapes == [(8,), (4,), (8,), (4,)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_more_clients_than_slots(transport: type) -> None:
    with InferenceServer(make_policy(), transport(num_slots=1)) as server:
        client = server.client()
        with pytest.raises(NoFreeSlot, match="has 1 slots") as caught:
            server.client()
        assert isinstance(caught.value, RuntimeError)
        client(observed())
        copied = pickle.loads(pickling.dumps(client))
        with pytest.raises(NoFreeSlot, match="has 1 slots"):
            copied(observed())
        client.close()
        assert wait_until(lambda: len(server.transport._free) == 1)  # type: ignore[attr-defined]
        copied(observed())


def test_an_answer_for_who_is_gone_does_not_reach_the_next_one_in_its_slot() -> None:
    may_go, was_called = threading.Event(), threading.Event()
    may_go.set()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        was_called.set()
        assert may_go.wait(20)
        return observation * 2

    with InferenceServer(policy, SlotTransport(num_slots=1)) as server:
        client = server.client()
        client(observed())
        was_called.clear()
        may_go.clear()
        gone = client._free_connection()  # type: ignore[attr-defined]
        gone.ask(observed(), waits=False)
        assert was_called.wait(5)
        gone.close()
        assert wait_until(lambda: len(server.transport._free) == 1)  # type: ignore[attr-defined]
        successor = pickle.loads(pickle.dumps(client))._free_connection()
        successor.ask(observed(), waits=False)
        assert wait_until(lambda: len(server.transport._free) == 0)  # type: ignore[attr-defined]
        may_go.set()
        assert successor.wait(5)
        successor.take()
        for _ in range(3):
            asked = observed()
            successor.ask(asked, waits=True)
            assert successor.wait(5)
            assert torch.equal(successor.take()[1][0], asked["observation"] * 2)


def test_a_client_that_is_stopped_holds_up_nobody() -> None:
    """Its answer, an exception with a long text, waits to be fetched."""

    def policy(observation: torch.Tensor) -> torch.Tensor:
        if (observation > 1e6).any():
            raise ValueError("x" * 10_000_000)
        return observation

    with InferenceServer(policy, SlotTransport(), max_batch_size=1) as server:  # an exception is of a whole batch
        slow, quick = server.clients(2)
        slow(observed())
        future = slow.submit(TensorDict({"observation": torch.full((4,), 1e9)}))
        for _ in range(10):
            quick(observed())
        with pytest.raises(ValueError, match="xxx"):
            future.result(5)


# -- who may come in -------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (66,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_unpickled_of_who_does_not_know_the_secret(transport: type) -> None:
    with InferenceServer(make_policy(), transport()) as server:
        path = server.transport.address.path  # type: ignore[attr-defined]
        assert b"secret" not in repr(server.transport.address).encode()  # type: ignore[attr-defined]
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as stranger:
            silent.connect(path)  # and says nothing, which keeps nobody waiting
            stranger.connect(path)
            data = pickle.dumps(Bomb())
            stranger.sendall(len(data).to_bytes(4, "big") + data)
            with pytest.raises(AuthenticationError):
                multiprocessing.connection.Client(path, authkey=b"a guess")
            server.client()(observed())


# -- a server in a process of its own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["slots", "mp"])
def test_a_server_in_its_own_process(transport: str) -> None:
    server = ProcessInferenceServer(make_policy, transport)
    client = server.client()
    with pytest.raises(ServerClosed, match="not started"):
        client(observed())
    assert server.health() == {
        "process_alive": False,
        "alive": False,
        "serving": False,
        "pid": None,
        "exitcode": None,
    }
    with server:
        assert server.health()["serving"]
        with pytest.raises(RuntimeError, match="already running"):
            server.start()
        asked = observed(3)
        policy: Any = make_policy()
        torch.testing.assert_close(client(asked)["action"], policy(asked.clone())["action"])
        with torch.no_grad():
            policy.module.weight.add_(1)
        server.update_policy_weights_(policy)
        answer = client(asked)
        torch.testing.assert_close(answer["action"], policy(asked.clone())["action"])
        assert answer["policy_version"].tolist() == [1, 1, 1]
        server.update_model(lambda model: model.module.weight.data.zero_().sum().item())
        assert server.policy_version == 2
        with pytest.raises(KeyError, match="do not fit"):
            server.update_policy_weights_({"weight": torch.ones(1)})
        with pytest.raises(ValueError, match="none here to take weights from"):
            server.update_policy_weights_()
        assert server.stats()["requests"] == 2
    ended = {"process_alive": False, "alive": False, "serving": False, "pid": server.pid, "exitcode": 0}
    assert server.health() == ended
    server.shutdown()
    with pytest.raises(InferenceError):
        client(observed())
    with pytest.raises(ServerClosed, match="was shut down"):
        server.stats()


def test_workers_ask_a_server_in_its_own_process() -> None:
    with ProcessInferenceServer(deterministic) as server:
        remote = PolicyClientModule(server.client(), ["observation"], ["action"])
        collector = MultiCollector(
            [make_counting] * 2, remote, frames_per_batch=40, total_frames=80, num_workers=2, sync=True
        )
        assert sum(batch.numel() for batch in collector) == 80
        assert server.stats()["rows"] >= 80


def test_a_factory_that_fails() -> None:
    def fail() -> Any:
        raise FileNotFoundError("policy.pt")

    with pytest.raises(RuntimeError, match=r"could not start: FileNotFoundError: policy\.pt") as caught:
        ProcessInferenceServer(fail).start()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        ProcessInferenceServer(lambda: time.sleep(60), startup_timeout=0.2).start()
    with pytest.raises(ServerDied, match="was killed by SIGKILL"):
        ProcessInferenceServer(lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to a process"):
        ProcessInferenceServer(lambda: lock)


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["slots", "mp"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_server_leaves_nobody_waiting(transport: str, number: signal.Signals) -> None:
    server = ProcessInferenceServer(make_policy, transport).start()
    asking = [Asking(client) for client in server.clients(3)]
    remote = PolicyClientModule(server.client(), ["observation"], ["action"])
    collector = MultiCollector([make_counting] * 2, remote, frames_per_batch=40, num_workers=2, sync=True)
    batches = iter(collector)
    next(batches)
    assert all(each.was_answered.wait(5) for each in asking)
    pid = server.pid
    assert pid is not None
    start = time.monotonic()
    os.kill(pid, number)
    for each in asking:
        assert isinstance(each.join(5), InferenceError)
    with pytest.raises(InferenceError):
        for _ in batches:
            pass
    assert time.monotonic() - start < 2
    assert server.health() == {
        "alive": False,
        "process_alive": False,
        "serving": False,
        "pid": pid,
        "exitcode": -number,
    }
    with pytest.raises(ServerDied, match=number.name):
        server.stats()
    server.shutdown()
    collector.shutdown()


@pytest.mark.alone
def test_a_policy_that_ends_its_process() -> None:
    with ProcessInferenceServer(lambda: lambda observation: os._exit(7)) as server:
        start = time.monotonic()
        with pytest.raises(ServerDied):
            server.client()(observed())
        assert time.monotonic() - start < 2
        assert wait_until(lambda: server.health()["exitcode"] == 7)


@pytest.mark.alone
def test_a_policy_that_does_not_return_is_ended() -> None:
    server = ProcessInferenceServer(lambda: lambda observation: time.sleep(60)).start()
    future = server.client().submit(observed())
    start = time.monotonic()
    server.shutdown(timeout=1)
    assert time.monotonic() - start < 3
    assert isinstance(future.exception(2), InferenceError)


SCRIPT = """
import os, signal, sys, torch
from swath.modules import ProcessInferenceServer
server = ProcessInferenceServer(lambda: lambda observation: observation).start()
print(server.pid, flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
        pytest.param("raise KeyError('x')", 1, marks=pytest.mark.slow),
        pytest.param("", 0, marks=pytest.mark.slow),
    ],
)
def test_when_the_owner_ends_the_server_leaves(ending: str, code: int) -> None:
    if code == -signal.SIGKILL:
        with WarmProgram(SCRIPT.format(ending=ending)) as program:
            pid = int(program.stdout.readline())
            assert program.wait() == code
    else:
        command = [sys.executable, "-c", SCRIPT.format(ending=ending)]
        script = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert script.returncode == code, script.stderr
        pid = int(script.stdout)
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists() or "zombie" in _state(pid), 5)


def _state(pid: int) -> str:
    try:
        return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("State"))
    except OSError:
        return "zombie"


def test_garbage_ends_the_process() -> None:
    server = ProcessInferenceServer(make_policy).start()
    pid = server.pid
    del server
    assert wait_until(lambda: pid not in children())


@pytest.mark.slow
def test_an_in_process_server_at_exit() -> None:
    """A thread that is in the middle of a forward does not crash the interpreter."""
    code = """
import threading, torch
from tensordict import TensorDict
from swath.modules import InferenceServer
server = InferenceServer(lambda observation: observation, "slots").start()
client = server.client()
def ask():
    try:
        while True: client(TensorDict({"observation": torch.ones(4)}))
    except Exception as error:
        print(type(error).__name__, flush=True)
thread = threading.Thread(target=ask, daemon=True); thread.start()
client(TensorDict({"observation": torch.ones(4)}))
"""
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert script.returncode == 0, script.stderr
    assert script.stderr == ""
