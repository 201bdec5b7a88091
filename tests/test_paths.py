"""get_distant_attr, cascade_execute and map_fn take the paths that weights take, in every collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from swath.collectors.distributed import DistributedCollector
from swath.envs import Compose, GymEnv, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from swath.paths import parts_of_path, resolve_path

PATHS = ["env.transform[0].max_steps", "env.transform.0.max_steps", "env.transform[-2].max_steps"]


def make() -> Any:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(7), RewardSum()))


def serial() -> Any:
    return SerialEnv(2, make)


def several(kind: Callable[..., Any], fn: Any, count: int, **kwargs: Any) -> Callable[[], Any]:
    return lambda: kind([fn] * count, frames_per_batch=8, **kwargs)


#: How each is made, and what is found at a path of its envs' transform.
KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Collector": (lambda: Collector(make, frames_per_batch=8), 7),
    "of a SerialEnv": (lambda: Collector(serial, frames_per_batch=8), [7, 7]),
    "of a ParallelEnv": (lambda: Collector(ParallelEnv(2, make), frames_per_batch=8), [7, 7]),
    "MultiSync": (several(MultiSyncCollector, make, 2, num_workers=2), [7, 7]),
    "MultiSync, one worker": (several(MultiSyncCollector, make, 2, num_workers=1), [[7, 7]]),
    "MultiSync, one worker, two batches": (several(MultiSyncCollector, serial, 2, num_workers=1), [[[7, 7]] * 2]),
    "MultiAsync": (several(MultiAsyncCollector, make, 2, num_workers=2), [7, 7]),
    "AsyncCollector": (lambda: AsyncCollector(make, frames_per_batch=8), [7]),
    "AsyncBatched": (several(AsyncBatchedCollector, make, 2, policy_factory=RandomPolicy), [7, 7]),
    "AsyncBatched, threads": (
        several(AsyncBatchedCollector, make, 2, policy_factory=RandomPolicy, env_backend="threading"),
        [7, 7],
    ),
    "Distributed": (several(DistributedCollector, make, 2), [7, 7]),
    "Distributed, workers": (several(DistributedCollector, make, 1, num_workers_per_collector=2), [7, 7]),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_the_paths_of_weights_in_every_collector(kind: str) -> None:
    make_collector, found = KINDS[kind]
    with make_collector() as collector:
        next(iter(collector))
        for path in PATHS:
            assert collector.get_distant_attr(path) == found
        calls = collector.cascade_execute("env.transform[0].state_dict")
        assert str(calls).count("{}") == str(found).count("7")
        assert str(collector.cascade_execute("env.transform[0].max_steps")).count("7") == str(found).count("7")
        for path, error, told in (
            ("env.transform[9]", IndexError, "no 9 in this Compose, which has 2"),
            ("env.trnsform[0].loc", AttributeError, "did you mean 'transform'"),
            ("env.transform[0].max_step", AttributeError, "did you mean 'max_steps'"),
            ("env.transform[", ValueError, "no path"),
            ("", ValueError, "no path"),
        ):
            with pytest.raises(error, match=told):
                collector.get_distant_attr(path)
        with pytest.raises(TypeError, match="a path is a string"):
            collector.get_distant_attr(3)
        with pytest.raises(TypeError, match="cannot be called with arguments"):
            collector.cascade_execute("env.transform[0].max_steps", 3)
        assert next(iter(collector)).numel() == 8  # after all that


def test_a_path_is_names_and_items() -> None:
    data = {"a b": [{"c.d": 5}], "e": 6}
    assert resolve_path(data, "['a b'][0]['c.d']") == 5
    assert resolve_path(data, '["a b"].0["c.d"]') == 5
    assert resolve_path(data, "[e]") == 6
    for path in ("a.", ".", "a..b", "a[]", "a]", "[0", "a['b]"):
        with pytest.raises(ValueError, match="no path"):
            parts_of_path(path)
    with pytest.raises(KeyError, match="no 'f' in this dict"):
        resolve_path(data, "[f]")


def test_a_single_collector_answers_without_a_list() -> None:
    with Collector(make, frames_per_batch=8) as collector:
        assert collector.get_distant_attr("policy_version") == 0
        assert collector.get_distant_attr("env.batch_size") == ()
        assert collector.map_fn("env.set_seed", [(1, True), (2, True)]) == [1, 2]
        assert collector.map_fn("env.set_seed", list_of_kwargs=[{"seed": 1, "static_seed": True}]) == [1]
        assert collector.map_fn("increment_version") == [None]
        assert collector.map_fn("increment_version", []) == []
        assert collector.policy_version == 1
        with pytest.raises(ValueError, match="list_of_args has 1 entries, list_of_kwargs 2"):
            collector.map_fn("env.set_seed", [(1,)], [{}, {}])
        with pytest.raises(TypeError, match=r"is a tuple of arguments: \(3,\)"):
            collector.map_fn("env.set_seed", [3])
        with pytest.raises(TypeError, match="list_of_args must be a list"):
            collector.map_fn("env.set_seed", "ab")


@pytest.mark.torchrl
def test_what_torchrl_answers() -> None:
    theirs = pytest.importorskip("torchrl.collectors")
    envs = pytest.importorskip("torchrl.envs")

    def guest() -> Any:
        return envs.TransformedEnv(envs.GymEnv("CartPole-v1"), envs.Compose(envs.StepCounter(7), envs.InitTracker()))

    def asked(collector: Any) -> list[Any]:
        return [
            *(collector.get_distant_attr(path) for path in (PATHS[0], PATHS[2], "env.batch_size", "worker_idx")),
            collector.get_distant_attr("env.transform.transforms[0].max_steps"),
            collector.get_distant_attr("env.transform[0]._modules"),
            collector.map_fn("env.set_seed", [(1, True), (2, True)]),
            collector.cascade_execute("env.transform[0].max_steps"),
        ]

    one = theirs.Collector(guest, frames_per_batch=8, total_frames=80)
    with Collector(guest, frames_per_batch=8) as two:
        assert asked(two) == asked(one)
    one.shutdown()
