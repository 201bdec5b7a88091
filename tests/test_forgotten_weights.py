"""A policy that is trained, and whose weights nobody sends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swath.collectors import Collector, MultiCollector, WeightUpdaterBase
from swath.collectors.distributed import DistributedCollector
from swath.weight_update import NoWeightSyncScheme, SharedMemWeightSyncScheme

pytestmark = pytest.mark.processes
FORGOTTEN = r"changed 2 times between batches, .* call collector.update_policy_weights_\(\)"


def train(policy: nn.Module) -> None:
    loss = sum(parameter.square().sum() for parameter in policy.parameters())
    assert isinstance(loss, torch.Tensor)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()


def collect_and_train(collector: Any, policy: nn.Module) -> None:
    for _ in collector:
        train(policy)


def workers(policy: nn.Module, batches: int, **more: Any) -> Any:
    return MultiCollector(["CartPole-v1"] * 2, policy, frames_per_batch=20, total_frames=20 * batches, **more)


@pytest.mark.parametrize("sync", [True, False])
def test_it_is_said_once_and_at_the_users_line(sync: bool) -> None:
    policy = nn.Linear(4, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in workers(policy, 40, sync=sync):
            train(policy)
    (found,) = [each for each in caught if "parameters changed" in str(each.message)]
    assert found.filename == __file__


def test_also_of_few_batches_when_they_are_over() -> None:
    policy = nn.Linear(4, 2)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        collect_and_train(workers(policy, 3, sync=True), policy)


def test_also_with_nodes() -> None:
    policy = nn.Linear(4, 2)
    collector = DistributedCollector(["CartPole-v1"], policy, frames_per_batch=20, total_frames=60)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        collect_and_train(collector, policy)


WAYS: dict[str, tuple[dict[str, Any], Callable[[nn.Module, int, Any], None]]] = {
    "each batch": ({}, lambda policy, batch, collector: collector.update_policy_weights_()),
    "now and then": ({}, lambda policy, batch, collector: None if batch % 7 else collector.update_policy_weights_()),
    "by itself": ({"update_at_each_batch": True}, lambda policy, batch, collector: None),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_sends_them_hears_nothing(way: str) -> None:
    arguments, send = WAYS[way]
    policy = nn.Linear(4, 2)
    collector = workers(policy, 20, sync=True, **arguments)
    for batch, _ in enumerate(collector, 1):
        train(policy)
        send(policy, batch, collector)


def test_who_sends_them_with_a_scheme_of_his_own_hears_nothing() -> None:
    policy, scheme = nn.Linear(4, 2), SharedMemWeightSyncScheme()
    for _ in workers(policy, 20, sync=True, weight_sync_schemes={"policy": scheme}):
        train(policy)
        scheme.send(policy)


@pytest.mark.filterwarnings("ignore:.*WeightUpdaterBase is deprecated", "ignore:weight_updater= is deprecated")
def test_who_sends_them_in_a_way_of_his_own_hears_nothing() -> None:
    class BesideTheCollector(WeightUpdaterBase):
        def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
            """Through a file, say: the collector knows nothing of it."""

    policy = nn.Linear(4, 2)
    collector = workers(policy, 20, sync=True, weight_updater=BesideTheCollector())
    for _ in collector:
        train(policy)
        collector.update_policy_weights_()


@pytest.mark.parametrize("schemes", [{}, {"policy": NoWeightSyncScheme()}])
def test_who_asked_for_weights_that_stay_hears_nothing(schemes: Any) -> None:
    policy = nn.Linear(4, 2)
    collect_and_train(workers(policy, 20, sync=True, weight_sync_schemes=schemes), policy)


def test_what_is_trained_on_the_last_batch_is_for_nobody() -> None:
    policy = nn.Linear(4, 2)
    collect_and_train(workers(policy, 1, sync=True), policy)


def test_who_trains_nothing_or_something_else_hears_nothing() -> None:
    policy, other = nn.Linear(4, 2), nn.Linear(4, 2)
    for _ in workers(policy, 20, sync=True):
        policy(torch.zeros(4))
        train(other)


def test_weights_that_were_made_for_inference_are_not_looked_at() -> None:
    with torch.inference_mode():
        policy = nn.Linear(4, 2)
    assert sum(batch.numel() for batch in workers(policy, 2, sync=True)) == 40


def test_where_the_trained_policy_collects_there_is_nothing_to_send() -> None:
    policy = nn.Linear(4, 2)
    for _ in Collector("CartPole-v1", policy, frames_per_batch=20, total_frames=400):
        train(policy)
