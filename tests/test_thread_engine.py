"""The example of another engine: what every collector must do, and what happens when its nodes are lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from counting import CountingEnv, assert_consistent, make_counting
from leaks import wait_until
from policies_for_tests import deterministic
from swath.errors import NodeLost
from test_contract import Kind, all_on_nodes, check_contract
from test_distributed import take
from thread_engine import ThreadCollector
from warned import warned_here

pytestmark = [pytest.mark.processes]


@pytest.fixture(autouse=True)
def _nodes_are_in_this_process() -> Iterator[None]:
    """What they set is put back."""
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(numbers)


def make(**kwargs: Any) -> ThreadCollector:
    given: dict[str, Any] = {"policy": deterministic(), "frames_per_batch": 20, **kwargs}
    return ThreadCollector([make_counting] * 2, **given)


@pytest.mark.parametrize("kind", all_on_nodes(ThreadCollector), ids=str)
def test_contract(kind: Kind) -> None:
    check_contract(kind)
    assert wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("node-", "weights-"))], 10)


@pytest.mark.parametrize("sync", [True, False])
def test_a_node_that_is_lost(sync: bool) -> None:
    """An error that names it; or it is started again; or the rest goes on. Every frame is there once."""
    with make(sync=sync) as collector:
        batches = iter(collector)
        take(batches, 2)
        collector._engine.nodes[1].lose("a cable")
        assert [line["alive"] for line in collector.stats()["nodes"]] == [True, False]
        with pytest.raises(NodeLost, match=r"node 1 \(.*\) was lost: a cable"):
            take(batches, 1000)
    for kwargs, told in (({"restart_nodes": 1}, "It was started again"), ({"on_node_loss": "continue"}, "with 1 of 2")):
        with make(sync=sync, total_frames=600, **kwargs) as collector:
            batches = iter(collector)
            got = take(batches, 3)
            collector._engine.nodes[0].lose("a cable")
            with warned_here(match=told):
                got += list(batches)
            assert sum(batch.numel() for batch in got) == 600
            assert_consistent(got)


def test_a_restarted_node_has_the_newest_weights() -> None:
    policy = deterministic()
    with make(policy=policy, sync=True, restart_nodes=1) as collector:
        batches = iter(collector)
        assert any(batch["action"].any() for batch in take(batches, 3))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
        collector.update_policy_weights_()
        collector._engine.nodes[0].lose("a cable")
        with warned_here(match="It was started again"):
            got = take(batches, 3)
        assert not any(batch["action"].any() for batch in got)


class Breaks(CountingEnv):
    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("in an env")


def test_what_an_env_raises_comes_out_as_it_is() -> None:
    with ThreadCollector([make_counting, Breaks], frames_per_batch=20) as collector:
        with pytest.raises(ZeroDivisionError, match="in an env") as raised:
            for _ in collector:  # as long as it takes: nobody knows how fast the other node is
                pass
        assert "raised in node 1" in "".join(raised.value.__notes__)
