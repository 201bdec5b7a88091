"""RayCollector and RayReplayBuffer: a real Ray cluster on this machine; one of two nodes at the end."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import assert_consistent, make_counting
from leaks import wait_until, warned
from policies_for_tests import deterministic
from swath.collectors import Collector
from swath.collectors.distributed import RayCollector
from swath.data import LazyTensorStorage, PrioritizedSampler, RayReplayBuffer, SliceSampler, TensorDictReplayBuffer
from swath.errors import BackgroundFailed, NodeLost
from swath.weight_update import RayWeightSyncScheme
from test_contract import Kind, all_on_nodes, check_contract
from test_distributed import FailingEnv, check_that_stats_notice_a_loss, is_gone, pids, take
from warned import warned_here

ray: Any = importlib.import_module("ray") if importlib.util.find_spec("ray") else None
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(ray is None, reason="needs the extra `ray`"),
    pytest.mark.timeout(180),
]
#: Two cores; actors must not wait for each other.
SMALL = {"num_cpus": 0.25}


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No actor of a test lives on, and none of its processes."""
    started: list[Any] = []
    original = RayCollector._start

    def remember(self: Any, plans: Any) -> Any:
        new = original(self, plans)
        started.extend(pids_of(self))
        return new

    RayCollector._start = remember  # type: ignore[method-assign]
    yield
    RayCollector._start = original  # type: ignore[method-assign]
    gc.collect()
    assert wait_until(lambda: all(is_gone(pid) for pid in started), 10), started


def pids_of(collector: Any) -> list[int]:
    return [member.about.pid for member in collector._nodes.handles]


def make(**kwargs: Any) -> RayCollector:
    given = {"policy": deterministic(), "frames_per_batch": 20, "remote_configs": SMALL, **kwargs}
    return RayCollector([make_counting] * 2, **given)


RAY_KINDS = all_on_nodes(RayCollector, remote_configs=SMALL)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if i == 1 else pytest.mark.slow) for i, kind in enumerate(RAY_KINDS)],
    ids=str,
)
def test_contract(kind: Kind) -> None:
    check_contract(kind)


def take_while(condition: Callable[[], bool], batches: Any) -> list[Any]:
    got = []
    while condition():
        got.append(next(batches))
    return got


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_killed_actor(sync: bool) -> None:
    """Started again within a budget; then an error, or the rest goes on."""
    policy = torch.nn.Linear(4, 3)
    collector = make(
        policy=policy,
        sync=sync,
        restart_nodes=1,
        on_node_loss="continue",
        total_frames=8000,  # Ray may need a while to notice
        track_policy_version=True,
        track_worker=True,
    )
    with collector:
        collector.update_policy_weights_()
        batches, got = iter(collector), []
        got += take(batches, random.Random(sync).randrange(3, 8))
        os.kill(pids(collector)[1], signal.SIGKILL)
        with warned_here(match="started again"):
            got += take_while(lambda: collector.stats()["nodes"][1]["restarts"] == 0, batches)
        assert all((batch["policy_version"] == 1).all() for batch in got)
        os.kill(pids(collector)[1], signal.SIGKILL)
        with warned_here(match="goes on with 1 of 2"):
            got += list(batches)
        assert sum(batch.numel() for batch in got) == 8000
        assert got[-2]["collector", "worker"].unique().tolist() == [0]
        ids = torch.cat([batch["collector", "traj_ids"].reshape(-1) for batch in got])
        starts = sum(int((batch["observation"][..., 1] == 0).sum()) for batch in got)
        assert len(ids.unique()) == starts


@pytest.mark.usefixtures("cluster")
def test_stats_say_which_node_is_lost() -> None:
    with make() as collector:
        check_that_stats_notice_a_loss(collector, 60)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_errors_keep_their_type() -> None:
    with make() as collector:
        os.kill(pids(collector)[0], signal.SIGKILL)
        with pytest.raises(
            NodeLost, match=r"node 0 \(.*, pid \d+\) was lost.*Ray's folder \(/tmp/ray/session_latest/logs"
        ):
            for _ in collector:  # as long as it takes: nobody knows how fast the other node is
                pass
    with (
        RayCollector([make_counting, FailingEnv], frames_per_batch=20, remote_configs=SMALL) as collector,
        pytest.raises(ArithmeticError, match="seven is too much") as caught,
    ):
        list(collector)
    assert "in step 7 of this batch" in "\n".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_nodes_are_added() -> None:
    policy = torch.nn.Linear(4, 3)
    with make(policy=policy, sync=True, track_policy_version=True) as collector:
        collector.update_policy_weights_()
        before = take(iter(collector), 3)
        collector.add_collectors(make_counting, 1)
        after = take(iter(collector), 3)
        assert [batch.shape for batch in (before[-1], after[-1])] == [(2, 10), (3, 10)]
        assert (after[0]["policy_version"] == 1).all()
        assert_consistent([*before, *after])
        assert collector.num_collectors == 3
        assert len(collector.remote_collectors) == 3
        assert collector.local_policy is policy
        collector.stop_remote_collectors()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_arguments() -> None:
    with make(
        update_after_each_batch=True,
        max_weight_update_interval=2,
        policy=torch.nn.Linear(4, 3),
        weight_sync_schemes={"policy": RayWeightSyncScheme()},
        remote_configs=[SMALL, {"num_cpus": 0.5}],
    ) as collector:
        take(iter(collector), 3)
        assert collector.policy_version == 3
        assert collector.getattr_env("action_spec") is not None
    with pytest.raises(NodeLost, match="did not start within"):
        make(remote_configs={"num_cpus": 64}, start_timeout_s=3)


@pytest.mark.usefixtures("cluster")
def test_frames_of_a_buffer_in_ray_are_changed_in_place() -> None:
    buffer = RayReplayBuffer(storage=lambda: LazyTensorStorage(8), batch_size=4)
    try:
        buffer.extend(TensorDict(x=torch.arange(4), batch_size=4))
        buffer[1] = TensorDict(x=torch.tensor(30))
        assert buffer[:]["x"].tolist() == [0, 30, 2, 3]
        buffer[torch.tensor([0, 3])] = TensorDict(x=torch.tensor([10, 40]), batch_size=2)
        assert buffer[:]["x"].tolist() == [10, 30, 2, 40]
        with pytest.raises(IndexError):
            buffer[7] = TensorDict(x=torch.tensor(1))
        assert buffer.write_count == 4
    finally:
        buffer.close()


def contents(buffer: RayReplayBuffer) -> Any:
    return buffer[:]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.slow), False])
def test_actors_write_to_a_buffer_in_ray(sync: bool) -> None:
    buffer = RayReplayBuffer(storage=lambda: LazyTensorStorage(4000), batch_size=32)
    # Through the front door.
    collector = Collector(
        make_counting,
        num_collectors=2,
        backend="ray",
        backend_options={"remote_configs": SMALL},
        sync=sync,
        policy=deterministic(),
        frames_per_batch=20,
        replay_buffer=buffer,
        total_frames=1000,
    )
    assert isinstance(collector, RayCollector)
    assert all(batch is None for batch in collector)
    assert len(buffer) == buffer.write_count == 1000
    assert buffer.sample().shape == (32,)
    frames = contents(buffer)
    starts = int((frames["observation"][..., 1] == 0).sum())
    assert len(frames["collector", "traj_ids"].unique()) == starts
    assert_consistent([frames])
    buffer.close()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_in_the_background_with_slices_and_a_kill() -> None:
    buffer = RayReplayBuffer(
        storage=lambda: LazyTensorStorage(2000),
        sampler=lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=True),
        batch_size=64,
    )
    collector = make(replay_buffer=buffer, restart_nodes=1)
    collector.start()
    for _ in range(20):
        sample = buffer.sample(wait=True, timeout=60).reshape(16, 4)
        steps = sample["observation"][..., 1]
        assert (steps[:, 1:] == steps[:, :-1] + 1).all()
    with collector.pause():
        written = buffer.write_count
        assert collector.stats()["frames"] == written
        time.sleep(0.1)  # were it not still, this is when it would write
        assert buffer.write_count == written
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.kill(pids(collector)[0], signal.SIGKILL)
        assert wait_until(lambda: collector.stats()["nodes"][0]["restarts"] == 1, 60)
        assert wait_until(lambda: buffer.write_count > written + 500, 60)
    for _ in range(20):
        steps = buffer.sample(wait=True, timeout=60).reshape(16, 4)["observation"][..., 1]
        assert (steps[:, 1:] == steps[:, :-1] + 1).all()
    with warned(r"node 0 \(.*, pid \d+\) was lost"):
        os.kill(pids(collector)[0], signal.SIGKILL)
        with pytest.raises((BackgroundFailed, NodeLost), match=r"node 0 \(.*, pid \d+\) was lost"):
            wait_until(lambda: collector.update_policy_weights_() is not None, 30)
        with pytest.raises(BackgroundFailed):
            collector.async_shutdown()
    with pytest.raises(BackgroundFailed):
        buffer.sample(wait=True, timeout=60)
    buffer.close()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_buffer_in_ray_by_itself(tmp_path: Path) -> None:
    from tensordict import TensorDict

    buffer = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=lambda: LazyTensorStorage(100),
        sampler=lambda: PrioritizedSampler(100, alpha=1.0, beta=1.0),
        batch_size=8,
    )
    assert buffer.extend(TensorDict(x=torch.arange(10), batch_size=10)).tolist() == list(range(10))
    sample = buffer.sample()
    sample["td_error"] = torch.where(sample["x"] == 3, 1.0, 0.0)
    buffer.update_tensordict_priority(sample)
    data, info = buffer.sample(5, return_info=True)
    assert data.shape == (5,)
    assert "index" in info
    state = buffer.state_dict()
    buffer.save(tmp_path / "saved")
    written = buffer.write_count
    assert buffer.can_sample(1)
    buffer.empty(empty_write_count=False)
    assert not buffer.can_sample(1)
    assert (len(buffer), buffer.write_count) == (0, written)
    buffer.load(tmp_path / "saved")
    assert buffer.can_sample(1)
    buffer.empty()
    assert len(buffer) == 0
    buffer.load_state_dict(state)
    assert buffer[:]["x"].tolist() == list(range(10))
    with pytest.raises(TimeoutError):
        RayReplayBuffer(storage=lambda: LazyTensorStorage(10)).sample(5, wait=True, timeout=0.2)
    with pytest.raises(TypeError, match="rate_limiter"):
        RayReplayBuffer(rate_limiter=object())
    buffer.close()


def test_a_cluster_of_two_nodes_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's raylet is killed, and with it the actor; the one on the node that is left goes on."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1, resources={"away": 1})
    try:
        # Whether it has tokens depends on whether this process has started Ray before.
        monkeypatch.setattr("swath.integrations.ray.has_token_authentication", lambda: False)
        with warned_here(match="takes orders from whoever reaches it"):
            collector = RayCollector(
                [make_counting] * 2,
                deterministic(),
                frames_per_batch=20,
                ray_init_config={"address": cluster.address, "log_to_driver": False},
                remote_configs=[{"num_cpus": 0.5}, {"num_cpus": 0.5, "resources": {"away": 0.01}}],
                on_node_loss="continue",
                track_worker=True,
            )
        with collector:
            batches = iter(collector)
            got = take(batches, 6)
            cluster.remove_node(other, allow_graceful=False)
            with warned_here(match="goes on with 1 of 2"):
                got += take_while(lambda: collector.num_nodes == 2, batches)
            rest = take(batches, 20)
            assert {int(batch["collector", "worker"].max()) for batch in rest} == {0}
            assert collector.stats()["frames"] == sum(batch.numel() for batch in [*got, *rest])
    finally:
        ray.shutdown()
        cluster.shutdown()
