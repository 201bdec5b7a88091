"""DistributedCollector: real processes, real gloo. What all collectors of nodes share is tested here, too."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from counting import CountingEnv, assert_consistent, make_counting
from leaks import wait_until, warned
from numbered import ENV, EPISODE, PID, make_numbered
from policies_for_tests import deterministic
from swath.addresses import is_loopback, own_address
from swath.collectors import Collector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector, DistributedSyncCollector
from swath.collectors.distributed.wire import pack_value, unpack_value
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import SerialEnv
from swath.errors import BackgroundFailed, CollectorClosed, EnvError, NodeLost
from swath.process import pickling
from swath.weight_update import DistributedWeightSyncScheme, SharedMemWeightSyncScheme
from warned import warned_here

pytestmark = pytest.mark.processes


def make(**kwargs: Any) -> DistributedCollector:
    given: dict[str, Any] = {"policy": deterministic(), "frames_per_batch": 20, **kwargs}
    return DistributedCollector([make_counting] * 2, **given)


def pids(collector: Any) -> list[int]:
    return [node["pid"] for node in collector.stats()["nodes"]]


def named(collector: Any, node: int) -> str:
    """How a message names a node, as a pattern."""
    about = collector.stats()["nodes"][node]
    return re.escape(f"node {node} ({about['host']}, pid {about['pid']})")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


def len_of(tensor: torch.Tensor) -> int:
    return tensor.numel()


def take(batches: Any, count: int) -> list[Any]:
    return [next(batches) for _ in range(count)]


class FailingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        if self.step_count == 7:
            raise ArithmeticError("seven is too much")
        return super().step(action)


class SleepingEnv(CountingEnv):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


# -- data ------------------------------------------------------------------------------------------------------------


def test_same_bytes_as_worker_processes() -> None:
    """The same seed gives the same data wherever it is collected, also with a policy that draws."""
    from policies_for_tests import stochastic

    collected: list[Any] = []
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (MultiSyncCollector, {"num_workers": 2}),
        (DistributedCollector, {"sync": True}),
    ]
    for kind, kwargs in kinds:
        torch.manual_seed(3)
        collector = kind([make_counting] * 2, stochastic(), frames_per_batch=40, total_frames=120, **kwargs)
        collector.set_seed(5)
        collected.append(torch.cat(list(collector), -1))
    mine, theirs = (batch.exclude(("collector", "traj_ids")) for batch in collected)
    assert mine.shape == theirs.shape == (2, 60)
    assert (mine == theirs).all()


def test_endless_by_default() -> None:
    with make() as collector:
        assert collector.total_frames == float("inf")
        batches = iter(collector)
        assert sum(next(batches).numel() for _ in range(30)) == 600


@pytest.mark.parametrize("sync", [True, False])
def test_random_frames_are_exact(sync: bool) -> None:
    policy = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    collector = make(policy=policy, sync=sync, init_random_frames=53, total_frames=200)
    actions = torch.cat([batch["action"].reshape(-1, 3) for batch in collector])
    assert int(actions.any(-1).sum()) == 53


def test_every_frame_has_its_version() -> None:
    with make(policy=torch.nn.Linear(4, 3), track_policy_version=True, update_after_each_batch=True) as collector:
        batches = iter(collector)
        versions = torch.cat([next(batches)["policy_version"].reshape(-1) for _ in range(12)])
        assert versions.min() == 0
        assert versions.max() >= 6
        assert collector.policy_version == 12


@pytest.mark.parametrize(("rule", "expected"), [({"max_weight_update_interval": 3}, 4), ({"update_interval": 2}, 6)])
def test_weights_are_sent_by_rule(rule: dict[str, Any], expected: int) -> None:
    with DistributedCollector([make_counting], torch.nn.Linear(4, 3), frames_per_batch=10, **rule) as collector:
        batches = iter(collector)
        for _ in range(12):
            next(batches)
        assert collector.policy_version == expected


@pytest.mark.alone
def test_weights_arrive_in_the_middle_of_a_batch() -> None:
    """A batch of 100 steps of 20 ms takes two seconds; an update must not wait for it."""
    policy = torch.nn.Linear(4, 3)
    with DistributedCollector(
        [lambda: SleepingEnv(0.02)], policy, frames_per_batch=100, track_policy_version=True
    ) as collector:
        batches = iter(collector)
        taking = threading.Thread(target=lambda: got.append(next(batches)))
        got: list[Any] = []
        taking.start()
        assert wait_until(lambda: collector.stats()["nodes"][0]["orders_under_way"] > 0)
        started = time.monotonic()
        collector.update_policy_weights_()
        assert time.monotonic() - started < 1.0
        taking.join()
        assert got[0]["policy_version"].unique().tolist() in ([0, 1], [1])


def test_sync_collector_sends_weights_with_every_batch() -> None:
    policy = torch.nn.Linear(4, 3)
    collector = DistributedSyncCollector(
        [make_counting] * 2, policy, frames_per_batch=20, total_frames=80, track_policy_version=True
    )
    collector.set_seed(0)
    assert [batch["policy_version"].unique().tolist() for batch in collector] == [[0], [1], [2], [3]]


def test_trajs_per_batch_and_postproc() -> None:
    collector = make(trajs_per_batch=3, total_frames=400, postproc=lambda batch: batch.set("seen", batch["action"] * 0))
    for batch in collector:
        assert batch.shape[0] == 3
        assert batch.get("seen", None) is not None
        assert (batch["observation"][:, 0, 1] == 0).all()


def test_scheme_of_one_machine_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a DistributedWeightSyncScheme"):
        make(weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})
    with make(weight_sync_schemes={"policy": DistributedWeightSyncScheme(sync=False)}) as collector:
        for _ in range(3):
            collector.update_policy_weights_()
        next(iter(collector))
        assert collector.policy_version == 3


def test_policy_factory_and_weights_from_here() -> None:
    policy = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    collector = make(policy=policy, policy_factory=lambda: torch.nn.Linear(4, 3), total_frames=40)
    assert not torch.cat([batch["action"].reshape(-1) for batch in collector]).any()


def test_arguments_that_contradict_each_other() -> None:
    with pytest.raises(RuntimeError, match="does not divide over 2 nodes"):
        make(frames_per_batch=21, sync=True)
    with pytest.raises(RuntimeError, match="not both"):
        make(update_after_each_batch=True, max_weight_update_interval=2)
    with pytest.raises(TypeError, match="did you mean 'launcher'"):
        make(luncher="mp")
    with pytest.raises(ValueError, match="launcher must be one of mp, submitit"):
        make(launcher="kubernetes")
    with pytest.raises(ValueError, match="backend must be one of gloo, nccl"):
        make(backend="mpi")
    with pytest.raises(ValueError, match="on_node_loss"):
        make(on_node_loss="hope")
    with pytest.raises(ValueError, match="an argument of DistributedCollector"):
        make(collector_kwargs={"total_frames": 3})
    with pytest.raises(ValueError, match="Collector itself"):
        Collector(make_counting, backend="process", backend_options={"sync": True}, frames_per_batch=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda() -> None:
    with pytest.raises(RuntimeError, match="use 'gloo'"):
        make(backend="nccl")


def test_nodes_must_be_alike() -> None:
    with pytest.raises(EnvError, match=r"node 1 .* delivers other data than node 0"):
        DistributedCollector([make_counting, lambda: SerialEnv(2, make_counting)], frames_per_batch=20)


def test_values_that_can_be_sent() -> None:
    import numpy as np

    state = {"a": [1, (2.5, "x")], "rng": {"big": 2**100, "key": np.arange(4, dtype=np.uint32)}, "t": torch.ones(2)}
    got = unpack_value(pack_value(state))
    assert got["a"] == [1, (2.5, "x")]
    assert got["rng"]["big"] == 2**100
    assert got["rng"]["key"].dtype == np.uint32
    assert got["rng"]["key"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="a RayCollector can"):
        pack_value(object())


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_killed_node_is_an_error_that_names_it(sync: bool) -> None:
    with make(sync=sync) as collector:
        batches = iter(collector)
        next(batches)
        os.kill(pids(collector)[1], signal.SIGKILL)
        started = time.monotonic()
        who = named(collector, 1)
        with pytest.raises(NodeLost, match=rf"{who} was lost: killed by SIGKILL") as caught:
            take(batches, 100)
        assert time.monotonic() - started < 15
        assert (caught.value.worker, caught.value.host) == (1, socket.gethostname())
        assert caught.value.pid == collector.stats()["nodes"][1]["pid"]
        assert "restart_nodes=1" in caught.value.__notes__[0]
        with pytest.raises(CollectorClosed):
            next(iter(collector))


@pytest.mark.parametrize("sync", [True, False])
def test_collection_goes_on_with_the_rest(sync: bool) -> None:
    with make(sync=sync, on_node_loss="continue", total_frames=2000, track_worker=True) as collector:
        batches = iter(collector)
        got = [next(batches) for _ in range(2)]
        os.kill(pids(collector)[0], signal.SIGKILL)
        with warned_here(match="goes on with 1 of 2"):
            got += list(batches)
        assert sum(batch.numel() for batch in got) == 2000
        assert got[-2]["collector", "worker"].unique().tolist() == [1]
        assert_consistent(got)
        assert collector.stats()["nodes"][0]["alive"] is False


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_node_is_started_again(sync: bool, workers: int) -> None:
    """At random instants; ids are not used again, and the newest weights are there before the first new frame."""
    policy = torch.nn.Linear(4, 3)
    frames = 20 * workers
    with make(
        policy=policy,
        sync=sync,
        frames_per_batch=frames,
        restart_nodes=2,
        num_workers_per_collector=workers,
        total_frames=frames * 60,
        track_policy_version=True,
        track_worker=True,
    ) as collector:
        batches, got = iter(collector), []
        dice = random.Random(sync)
        kills = {dice.randrange(5, 25): 0, dice.randrange(26, 50): 1}
        collector.update_policy_weights_()
        collector.update_policy_weights_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for number in range(60):
                if number in kills:
                    os.kill(pids(collector)[kills[number]], signal.SIGKILL)
                batch = next(batches, None)
                if batch is None:
                    break
                got.append(batch)
        assert sum(batch.numel() for batch in got) == frames * 60
        assert all((batch["policy_version"] == 2).all() for batch in got)
        assert [node["restarts"] for node in collector.stats()["nodes"]] == [1, 1]
        # A trajectory that was cut by a kill is a beginning of one; its id never comes again.
        by_id: dict[int, list[torch.Tensor]] = {}
        for batch in got:
            for row in batch.reshape(-1, batch.shape[-1]):
                ids = row["collector", "traj_ids"]
                for traj_id in ids.unique().tolist():
                    by_id.setdefault(traj_id, []).append(row["observation"][ids == traj_id][:, 1])
        for pieces in by_id.values():
            steps = torch.cat(pieces)
            assert torch.equal(steps, torch.arange(len(steps), dtype=steps.dtype))


def test_what_an_env_raises_keeps_its_type() -> None:
    with (
        DistributedCollector([make_counting, FailingEnv], frames_per_batch=20) as collector,
        pytest.raises(ArithmeticError, match="seven is too much") as caught,
    ):
        list(collector)
    notes = "\n".join(caught.value.__notes__)
    assert "in step 7 of this batch" in notes
    assert "raised in node 1" in notes
    assert "FailingEnv" in str(caught.value.__cause__) or "seven" in str(caught.value.__cause__)


def test_an_env_that_cannot_be_made() -> None:
    def broken() -> Any:
        raise FileNotFoundError("no such level")

    with pytest.raises(FileNotFoundError, match="no such level") as caught:
        DistributedCollector([make_counting, broken], frames_per_batch=20)
    assert "while node 1" in "\n".join(caught.value.__notes__)


def test_ctrl_c_leaves_the_collector_usable() -> None:
    with DistributedCollector(
        [lambda: SleepingEnv(0.01)] * 2, torch.nn.Linear(4, 3), frames_per_batch=60, sync=True
    ) as collector:
        batches = iter(collector)
        next(batches)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        again = next(iter(collector))
        assert again.shape == (2, 30)


def test_nodes_end_with_their_driver() -> None:
    """Also if it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            collector = make()
            next(iter(collector))
            os.write(write, " ".join(map(str, pids(collector))).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    text = os.read(read, 100)
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    nodes = [int(pid) for pid in text.split()]
    assert len(nodes) == 2
    assert wait_until(lambda: all(is_gone(pid) for pid in nodes), 15)


def test_a_node_that_hears_nothing_gives_up() -> None:
    """The driver stops (as Ctrl-Z does): nodes take it for gone after node_timeout_s, and leave."""
    with make(node_timeout_s=1.0) as collector:
        next(iter(collector))
        stopped = pids(collector)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.raises(NodeLost, match=r"node 0 \(.*, pid \d+\) was lost"):
                for _ in collector:  # as long as it takes: nobody knows how fast the other node is
                    pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)


def unbroken(batches: list[Any]) -> None:
    """Frames of an id are its first ones, without a gap."""
    by_id: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for row in batch.reshape(-1, batch.shape[-1]):
            ids = row["collector", "traj_ids"]
            for traj_id in ids.unique().tolist():
                by_id.setdefault(traj_id, []).append(row["observation"][ids == traj_id][:, 1])
    for traj_id, pieces in by_id.items():
        steps = torch.cat(pieces)
        assert torch.equal(steps, torch.arange(len(steps), dtype=steps.dtype)), (traj_id, steps)


def press_ctrl_c_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_while_one_node_is_late_leaves_no_gap() -> None:
    """What the fast one had delivered is dropped, so its episode must not go on; random frames are still due."""
    with DistributedCollector(
        [lambda: CountingEnv(1000), lambda: SleepingEnv(0.02)],
        torch.nn.Linear(4, 3),
        frames_per_batch=60,
        sync=True,
        init_random_frames=120,
    ) as collector:
        batches = iter(collector)
        got = [next(batches)]
        press_ctrl_c_after(0.2)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert collector._random_frames_left <= 60
        got += take(iter(collector), 3)
        unbroken(got)
        assert collector._random_frames_left == 0


def test_ctrl_c_while_weights_are_sent_loses_nothing() -> None:
    with DistributedCollector(
        [lambda: SleepingEnv(0.3)], torch.nn.Linear(4, 3), frames_per_batch=2, update_after_each_batch=True
    ) as collector:
        got = take(iter(collector), 1)
        for _ in range(3):
            press_ctrl_c_after(0.75)
            with contextlib.suppress(KeyboardInterrupt):
                for batch in collector:
                    got.append(batch)
        got += take(iter(collector), 2)
        unbroken(got)


@pytest.mark.parametrize("sync", [True, False])
def test_shutdown_from_another_thread_wakes_whoever_waits(sync: bool) -> None:
    collector = DistributedCollector(
        [lambda: SleepingEnv(0.5)] * 2, torch.nn.Linear(4, 3), frames_per_batch=40, sync=sync
    )
    ended: list[BaseException] = []

    def consume() -> None:
        try:
            list(collector)
        except BaseException as error:
            ended.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert wait_until(lambda: all(node["orders_under_way"] for node in collector.stats()["nodes"]))
    collector.shutdown(timeout=1)
    consumer.join(10)
    assert [type(error) for error in ended] == [CollectorClosed]


def test_versions_do_not_overtake_each_other() -> None:
    with make(policy=torch.nn.Linear(4, 3), track_policy_version=True) as collector:
        threads = [threading.Thread(target=collector.update_policy_weights_) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert collector.get_distant_attr("policy_version") == [20, 20]


def test_a_question_that_cannot_be_answered_costs_no_restart() -> None:
    with make(restart_nodes=1) as collector:
        before = pids(collector)
        with pytest.raises(AttributeError, match="typo"):
            collector.getattr_env("typo")
        assert pids(collector) == before


@pytest.mark.parametrize("on_loss", [{"restart_nodes": 1}, {"on_node_loss": "continue"}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_questions_to_a_node_that_is_gone(on_loss: dict[str, Any]) -> None:
    from swath.envs import next_seed

    with make(policy=torch.nn.Linear(4, 3), **on_loss) as collector:
        take(iter(collector), 2)
        collector.update_policy_weights_()
        os.kill(pids(collector)[0], signal.SIGKILL)
        assert collector.set_seed(5) == next_seed(next_seed(5))
        state = collector.state_dict()
        assert state["node1"]["policy_version"] == 1
        assert ("node0" in state) == ("restart_nodes" in on_loss)
        os.kill(pids(collector)[1], signal.SIGKILL)
        if "restart_nodes" in on_loss:
            assert len(collector.get_distant_attr("worker_idx")) == 2
            unbroken(take(iter(collector), 5))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_trainers_own_module_is_restored(workers: int) -> None:
    from test_multi import check_that_the_own_module_is_restored

    check_that_the_own_module_is_restored(
        lambda **policy: DistributedCollector(
            [make_counting], frames_per_batch=20, num_workers_per_collector=workers, **policy
        )
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_was_loaded_survives_a_restart() -> None:
    """Weights, version and ids."""
    policy = torch.nn.Linear(4, 3)
    with make(policy=policy, restart_nodes=1, track_policy_version=True) as collector:
        take(iter(collector), 3)
        with torch.no_grad():
            policy.bias.fill_(7.0)
        collector.update_policy_weights_()
        used = max(int(batch["collector", "traj_ids"].max()) for batch in take(iter(collector), 3))
        state = collector.state_dict()
    with torch.no_grad():
        policy.bias.fill_(-1.0)  # trained, and not sent
    with make(policy=policy, restart_nodes=1, track_policy_version=True) as collector:
        collector.load_state_dict(state)
        os.kill(pids(collector)[0], signal.SIGKILL)
        got = take(iter(collector), 8)
        assert all((batch["policy_version"] == 1).all() for batch in got)
        assert [bias.tolist() for bias in collector.get_distant_attr("policy.bias")] == [[7.0] * 3] * 2
        assert min(int(batch["collector", "traj_ids"].min()) for batch in got) > used - 2 * 20


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_restart_that_fails_is_tried_again_within_the_budget(tmp_path: Path) -> None:
    flag = tmp_path / "broken"

    def fragile() -> Any:
        if flag.exists():
            os._exit(3)
        return make_counting()

    with DistributedCollector(
        [make_counting, fragile], frames_per_batch=20, restart_nodes=2, on_node_loss="continue", total_frames=400
    ) as collector:
        batches = iter(collector)
        got = take(batches, 2)
        flag.touch()
        os.kill(pids(collector)[1], signal.SIGKILL)
        got += list(batches)
        assert sum(batch.numel() for batch in got) == 400
        assert collector.stats()["nodes"][1]["restarts"] == 2
        assert collector.num_nodes == 1


@pytest.mark.parametrize("track_traj_ids", [True, False])
@pytest.mark.parametrize("on_loss", [{"restart_nodes": 1}, {"on_node_loss": "continue"}])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_node_that_dies_with_a_batch_on_its_way_to_the_buffer(
    sync: bool, on_loss: dict[str, Any], track_traj_ids: bool
) -> None:
    """The episode that goes on in that batch ends there, and not where the buffer had its last frame."""
    seen: list[TensorDictBase] = []

    def hook(batch: TensorDictBase) -> None:
        seen.append(batch)
        if len(seen) == 4:
            for pid in pids(collector)[: 2 if "restart_nodes" in on_loss else 1]:
                os.kill(pid, signal.SIGKILL)
            collector.update_policy_weights_()  # which notices

    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=8)
    with make(
        policy=torch.nn.Linear(4, 3),
        replay_buffer=buffer,
        sync=sync,
        total_frames=400,
        post_collect_hook=hook,
        track_traj_ids=track_traj_ids,
        **on_loss,
    ) as collector:
        for _ in collector:
            pass
    frames = buffer[:]
    # The env counts the steps of an episode, in which it is alone at each of its steps.
    count, after, done = (frames[key] for key in ("observation", ("next", "observation"), ("next", "done")))
    goes_on = (count[1:, 1] == after[:-1, 1]) & (count[1:, 0] == after[:-1, 0])
    assert not (done[:-1, 0] & goes_on).any(), "an episode goes on after its end"
    assert (done[:-1, 0] | goes_on).sum() >= len(frames) - 3, "an episode does not go on, and has no end"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_random_frames_of_workers_on_nodes(kind: str) -> None:
    policy = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    collector = make(
        policy=policy,
        collector_class=kind,
        num_workers_per_collector=1,
        init_random_frames=60,
        total_frames=400,
        track_worker=True,
    )
    got = list(collector)
    for node in (0, 1):  # half of them each, before all others
        own = [batch["action"].any(-1) for batch in got if int(batch["collector", "worker"].max()) == node]
        assert torch.cat(own, -1).reshape(-1).tolist() == [True] * 30 + [False] * (sum(map(len_of, own)) - 30)
    unbroken(got)


def test_what_makes_batches_uneven_is_refused() -> None:
    with pytest.raises(ValueError, match="not for collectors on nodes"):
        make(collector_class="sync", collector_kwargs={"preemptive_threshold": 0.5})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sync", [True, False])
def test_slices_by_end_do_not_cross_a_loss(sync: bool) -> None:
    from swath.data import SliceSampler

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(4000), sampler=SliceSampler(slice_len=4, end_key=("next", "done")), batch_size=400
    )
    with make(
        replay_buffer=buffer, sync=sync, restart_nodes=1, on_node_loss="continue", track_traj_ids=False
    ) as collector:
        batches = iter(collector)
        take(batches, 10)
        killed = pids(collector)[0]
        os.kill(killed, signal.SIGKILL)
        while pids(collector)[0] == killed:  # the other node may be faster than the restart
            take(batches, 1)
        take(batches, 10)
        os.kill(pids(collector)[0], signal.SIGKILL)
        while collector.num_nodes > 1:
            take(batches, 1)
        take(batches, 10)
    for _ in range(10):
        steps = buffer.sample().reshape(100, 4)["observation"][..., 1]
        assert (steps[:, 1:] == steps[:, :-1] + 1).all()


def check_that_stats_notice_a_loss(collector: Any, timeout_s: float = 20) -> None:
    """Without a question, an order, or an iteration that would find it out."""
    assert [node["alive"] for node in collector.stats()["nodes"]] == [True, True]
    who = named(collector, 0)
    os.kill(pids(collector)[0], signal.SIGKILL)
    assert wait_until(lambda: not collector.stats()["nodes"][0]["alive"], timeout_s)
    assert collector.stats()["nodes"][1]["alive"]
    with pytest.raises(NodeLost, match=f"{who} was lost: .*"):
        for _ in collector:  # as long as it takes: nobody knows how fast the other node is
            pass
    assert [node["alive"] for node in collector.stats()["nodes"]] == [False, False]  # it was shut down


def test_stats_say_which_node_is_lost() -> None:
    with make() as collector:
        check_that_stats_notice_a_loss(collector)


def test_stats_of_a_node_that_was_started_again() -> None:
    with make(restart_nodes=1, sync=True) as collector:
        batches = iter(collector)
        next(batches)
        os.kill(pids(collector)[0], signal.SIGKILL)
        assert wait_until(lambda: not collector.stats()["nodes"][0]["alive"])
        with warned_here(match=rf"{named(collector, 0)} was lost.*It was started again as node 0 \("):
            next(batches)
        assert [node["alive"] for node in collector.stats()["nodes"]] == [True, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_seconds_of_env_and_policy_are_those_that_a_node_was_busy(workers: int) -> None:
    with DistributedCollector(
        [lambda: SleepingEnv(0.004)],
        deterministic(),
        frames_per_batch=50,
        sync=True,
        num_workers_per_collector=workers,
    ) as collector:
        take(iter(collector), 4)
        (node,) = collector.stats()["nodes"]
    assert node["busy_s"] >= 200 / workers * 0.004
    assert node["env_s"] + node["policy_s"] == pytest.approx(node["busy_s"])
    assert node["env_s"] > node["policy_s"] > 0


# -- secrets and addresses ---------------------------------------------------------------------------------------------


def test_only_this_machine_can_reach_it() -> None:
    with make() as collector:
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port = f"{collector._engine.port:04X}"
        mine = [address for address in listening if address.endswith(":" + port)]
        assert mine
        assert all(address.startswith("0100007F") for address in mine)


def test_an_open_address_without_a_secret_warns() -> None:
    address = own_address("192.0.2.1", 9)  # of the interface that leads away from here
    if is_loopback(address):
        pytest.skip("this machine has no address but loopback")
    with warned_here(match=rf"listens on {address}.* give secret="):
        collector = make(address=address, total_frames=20)
    assert sum(batch.numel() for batch in collector) == 20
    with pytest.raises(ValueError, match="not an address of this machine"):
        make(address="192.0.2.77", secret="quince")


def test_a_secret_is_asked_for() -> None:
    collector = make(secret="quince", total_frames=40)
    assert sum(batch.numel() for batch in collector) == 40


def test_whoever_does_not_know_the_secret_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from swath.collectors.distributed import launchers

    start = launchers.MpLauncher.start
    monkeypatch.setattr(
        launchers.MpLauncher,
        "start",
        lambda self, ticket: start(self, replace(ticket, where={**ticket.where, "secret": "quine"})),
    )
    with pytest.raises(NodeLost, match="does not know the secret"):
        make(secret="quince")


# -- buffers, background, state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_into_a_replay_buffer_in_the_background(sync: bool) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    collector = make(replay_buffer=buffer, sync=sync)
    collector.start()
    assert buffer.sample(wait=True, timeout=20).shape == (16,)
    with collector.pause():
        before = buffer.write_count
        assert collector.state_dict()["frames"] == before
        assert buffer.write_count == before
    assert wait_until(lambda: buffer.write_count > before)
    with warned(r"node 0 \(.*, pid \d+\) was lost"):
        os.kill(pids(collector)[0], signal.SIGKILL)
        with pytest.raises(BackgroundFailed, match=r"node 0 \(.*, pid \d+\) was lost"):
            buffer.sample(2000, wait=True, timeout=20)  # more than it will ever have
    with pytest.raises(BackgroundFailed):
        collector.async_shutdown()


def test_looking_into_nodes() -> None:
    with make() as collector:
        next(iter(collector))
        stats = collector.stats()
        assert stats["engine"] == "torch.distributed"
        assert [node["node"] for node in stats["nodes"]] == [0, 1]
        assert all(node["fps"] > 0 for node in stats["nodes"] if node["batches"])
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert "DistributedCollector(2 nodes" in repr(collector)
        with pytest.raises(TypeError, match="a RayCollector can"):
            collector.getattr_env("action_spec")


# -- other launchers ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_submitit(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    collector = make(
        launcher="submitit", folder=tmp_path, slurm_kwargs={"cluster": "local"}, sync=True, total_frames=100
    )
    nodes = pids(collector)
    got = list(collector)
    assert_consistent(got)
    assert sum(batch.numel() for batch in got) == 100
    assert wait_until(lambda: all(is_gone(pid) for pid in nodes))


@pytest.mark.timeout(120)
def test_a_job_that_is_lost_says_where_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    collector = make(launcher="submitit", folder=tmp_path, slurm_kwargs={"cluster": "local"}, sync=True)
    batches = iter(collector)
    next(batches)
    os.kill(pids(collector)[0], signal.SIGKILL)
    with pytest.raises(NodeLost, match=r"What it printed is in .*_log\.err and .*_log\.out") as lost:
        take(batches, 10_000)
    told = re.search(r"printed is in (\S+_log\.err)", str(lost.value))
    assert told is not None
    assert Path(told[1]).is_file()
    collector.shutdown()


@pytest.mark.timeout(120)
def test_submitit_delayed(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    from swath.collectors.distributed import submitit_delayed_launcher

    local = {"cluster": "local", "timeout_min": 5}

    @submitit_delayed_launcher(
        num_jobs=2, submitit_main_conf=local, submitit_collection_conf=local, folder=tmp_path / "jobs"
    )
    def train(frames: int) -> int:
        collector = DistributedCollector(
            [make_counting] * 2, frames_per_batch=20, total_frames=frames, launcher="submitit_delayed", sync=True
        )
        return sum(batch.numel() for batch in collector)

    assert train(100) == 100
    assert not list((tmp_path / "jobs").glob("nodes-*"))
    with pytest.raises(NotImplementedError, match="framework"):
        submitit_delayed_launcher(num_jobs=1, framework="mpi")


@pytest.mark.parametrize("given", [{"slurm_kwargs": {"slurm_partition": "gpu"}}, {}])
def test_submitit_without_slurm_is_an_error(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no Slurm here \(no `srun`\).*slurm_kwargs=\{'cluster': 'local'\}"):
        make(launcher="submitit", folder=tmp_path / "jobs", **given)
    assert not (tmp_path / "jobs").exists()
    from swath.collectors.distributed import submitit_delayed_launcher

    submit = submitit_delayed_launcher(
        num_jobs=1, submitit_main_conf=given.get("slurm_kwargs"), folder=tmp_path / "jobs"
    )
    with pytest.raises(RuntimeError, match="no Slurm here"):
        submit(lambda: None)()
    with pytest.raises(ValueError, match=r"cluster='debug'.* result is asked for"):
        make(launcher="submitit", folder=tmp_path / "jobs", slurm_kwargs={"cluster": "debug"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slurm_kwargs": {"slurm_partition": "gpu"}}, "slurm_kwargs is for launcher='submitit', and this is 'mp'"),
        ({"folder": "somewhere"}, "folder is for launcher='submitit'.* and this is 'mp'"),
        ({"launcher": "folder", "folder": "x", "slurm_kwargs": {}}, "slurm_kwargs is for launcher='submitit'"),
        ({"launcher": "folder", "folder": "x", "mp_start_method": "fork"}, "mp_start_method is for launcher='mp'"),
    ],
)
def test_launch_arguments_that_would_do_nothing_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_delayed_launcher_hands_on_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swath.collectors.distributed import launchers, submitit_delayed_launcher

    with pytest.raises(ValueError, match="backend must be one of gloo, nccl"):
        submitit_delayed_launcher(num_jobs=1, backend="mpi")
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def ask_for_nccl() -> None:
        make(launcher="submitit_delayed")

    with pytest.raises(RuntimeError, match="backend='nccl' needs CUDA"):
        launchers._run_main(pickling.dumps_with_path((ask_for_nccl, (), {})), str(tmp_path), None, "nccl")


def test_restarts_where_nobody_can_start_a_node_are_refused(tmp_path: Path) -> None:
    from swath.collectors.distributed import RPCCollector

    with pytest.raises(
        ValueError, match="restart_nodes=2: DistributedCollector cannot start a node of this kind again"
    ):
        make(launcher="folder", folder=tmp_path, restart_nodes=2)
    with pytest.raises(ValueError, match=r"RPCCollector cannot start.* on_node_loss='continue'"):
        RPCCollector([make_counting], frames_per_batch=20, restart_nodes=1)


def test_delayed_launcher_outside_of_its_function() -> None:
    with pytest.raises(ValueError, match="submitit_delayed_launcher decorates"):
        make(launcher="submitit_delayed")


def test_nodes_that_are_started_by_hand(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = tmp_path / "nodes"
    commands = [
        subprocess.Popen([sys.executable, "-m", "swath.cli.main", "node", str(folder), str(i), "--wait", "60"])
        for i in range(2)
    ]
    collector = make(launcher="folder", folder=folder, sync=True, total_frames=100)
    assert sum(batch.numel() for batch in collector) == 100
    assert [command.wait(20) for command in commands] == [0, 0]
    missing = subprocess.run(
        [sys.executable, "-m", "swath.cli.main", "node", str(folder), "7", "--wait", "0.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 1
    assert "no driver has put a ticket for node 7" in missing.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_trajectory_ids_of_nodes_go_on_in_a_buffer_that_has_some(workers: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    for round_ in range(2):
        envs = [functools.partial(make_numbered, 10 * round_ + env) for env in range(2)]
        kwargs: dict[str, Any] = {"num_workers_per_collector": workers} if workers > 1 else {}
        list(DistributedCollector(envs, frames_per_batch=40, total_frames=160, replay_buffer=rb, **kwargs))
    frames = rb[:]
    episodes = frames["observation"][:, [PID, ENV, EPISODE]]
    ids = frames["collector", "traj_ids"].unsqueeze(1)
    counts = [len(each.unique(dim=0)) for each in (ids, episodes, torch.cat([ids, episodes], 1))]
    assert counts == [counts[0]] * 3
