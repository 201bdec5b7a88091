"""RPCCollector: real torch RPC, real processes."""

from __future__ import annotations

import pytest
from torch.distributed import rpc

from leaks import no_leaks  # noqa: F401
from swath.collectors.distributed import RPCCollector
from test_contract import Kind, all_on_nodes, check_contract

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True, scope="module")
def _what_stays_open_is_open() -> None:
    """The first agent of a process opens descriptors that torch never closes."""
    with RPCCollector("CartPole-v1", frames_per_batch=10, total_frames=10) as collector:
        list(collector)
    assert not rpc._is_current_rpc_agent_set()


@pytest.mark.parametrize("kind", all_on_nodes(RPCCollector), ids=str)
def test_contract(kind: Kind) -> None:
    check_contract(kind)
