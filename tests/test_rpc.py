"""RPCCollector: real torch RPC, real processes."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from counting import assert_consistent, make_counting
from leaks import wait_until
from policies_for_tests import deterministic
from swath.collectors.distributed import RPCCollector
from swath.errors import NodeLost
from test_contract import Kind, all_on_nodes, check_contract
from test_distributed import check_that_stats_notice_a_loss, is_gone, named, pids, take
from warned import warned_here

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("rpc"), pytest.mark.usefixtures("rpc_agent")]


def make(**kwargs: Any) -> RPCCollector:
    given: dict[str, Any] = {"policy": deterministic(), "frames_per_batch": 20, **kwargs}
    return RPCCollector([make_counting] * 2, **given)


KINDS = all_on_nodes(RPCCollector)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if i in (1, 4) else pytest.mark.slow) for i, kind in enumerate(KINDS)], ids=str
)
def test_contract(kind: Kind) -> None:
    check_contract(kind)


@pytest.mark.parametrize("sync", [True, False])
def test_a_killed_worker(sync: bool) -> None:
    """An error that names it; or the rest goes on."""
    for after in (1, random.Random(sync).randrange(2, 9)):
        with make(sync=sync) as collector:
            batches = iter(collector)
            take(batches, after)
            os.kill(pids(collector)[1], signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(NodeLost, match=f"{named(collector, 1)} was lost: killed by SIGKILL"):
                take(batches, 1000)
            assert time.monotonic() - started < 15
    with make(sync=sync, on_node_loss="continue", total_frames=3000, track_worker=True) as collector:
        batches = iter(collector)
        got = take(batches, 3)
        os.kill(pids(collector)[0], signal.SIGKILL)
        with warned_here(match="goes on with 1 of 2"):
            got += list(batches)
        assert sum(batch.numel() for batch in got) == 3000
        assert_consistent(got)


def test_stats_say_which_node_is_lost() -> None:
    with make() as collector:
        check_that_stats_notice_a_loss(collector)


def test_nodes_end_with_their_driver() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            collector = make(node_timeout_s=2.0)
            next(iter(collector))
            os.write(write, " ".join(map(str, pids(collector))).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    nodes = [int(pid) for pid in os.read(read, 100).split()]
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(nodes) == 2
    assert wait_until(lambda: all(is_gone(pid) for pid in nodes), 15)


def test_one_agent_at_a_time() -> None:
    with make() as collector, pytest.raises(RuntimeError, match="has an RPC agent already"):
        make(frames_per_batch=collector.requested_frames_per_batch)


def test_gpus_are_shared_out() -> None:
    def seen() -> Any:
        assert os.environ["CUDA_VISIBLE_DEVICES"] in ("4", "6")
        return make_counting()

    with RPCCollector([seen] * 2, frames_per_batch=20, visible_devices=[4, 6]) as collector:
        next(iter(collector))


def test_an_open_address_warns() -> None:
    with (
        warned_here(match="torch RPC runs whatever it is sent"),
        pytest.raises(ValueError, match="give tcp_port="),
    ):
        make(address="192.0.2.9")
