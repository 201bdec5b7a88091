"""The contract of multi-process collectors: counts, shapes, boundaries, ids, seeds, weights, state, parameters."""

from __future__ import annotations

import io
import itertools
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from counting import CountingEnv, CountingTensorDictEnv, assert_consistent, assert_same, make_counting, plain_loop
from leaks import wait_until
from policies_for_tests import Marking, actor_critic, deterministic, recurrent, stochastic
from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from swath.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv, next_seed
from swath.errors import CollectorClosed, EnvError, NoLength
from swath.process import start
from swath.workers.layout import WorkerLayout, available_cores, cgroup_cores
from warned import warned_here

pytestmark = pytest.mark.processes
SEED = 7
POLICIES: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]]]] = {
    "deterministic": (deterministic, {}),
    "recurrent": (recurrent, {"hidden": (8,)}),
    "actor-critic": (actor_critic, {}),
}
#: (envs, workers): one env in a worker, several, uneven.
LAYOUTS = [(1, 1), (2, 2), (3, 3), (2, 1), (4, 2), (5, 3)]


def multi(kind: type, envs: int = 3, workers: int | None = None, policy: Any = None, **kwargs: Any) -> Any:
    arguments: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 36, "num_workers": workers, **kwargs}
    return kind([make_counting] * envs, policy, **arguments)


def seeds(count: int) -> list[int]:
    chain = [SEED]
    while len(chain) < count:
        chain.append(next_seed(chain[-1]))
    return chain


def without_ids(data: TensorDict) -> TensorDict:
    data = data.copy()
    data.pop("collector")
    return data


# -- the oracle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_kind", POLICIES)
@pytest.mark.parametrize(("envs", "workers"), LAYOUTS)
def test_sync_equals_the_plain_loop(envs: int, workers: int, policy_kind: str) -> None:
    make_policy, state_shapes = POLICIES[policy_kind]
    policy = make_policy()
    # A worker's policy sees the envs of that worker, so that is how the oracle must call it.
    layout = WorkerLayout.spread(envs, workers)
    parts = []
    for members in layout.members:
        own = seeds(envs)[members.start : members.stop]
        parts.append(
            plain_loop(
                [CountingEnv() for _ in own], own, policy, 37 * 3, batched=len(own) > 1, state_shapes=state_shapes
            )
        )
    oracle: Any = torch.cat(parts)
    collector = multi(MultiSyncCollector, envs, workers, policy, frames_per_batch=37 * envs, total_frames=37 * 3 * envs)
    collector.set_seed(SEED)
    got: Any = torch.cat(list(collector), 1)
    ids = got["collector", "traj_ids"]
    ends = got["next", "done"].squeeze(-1)
    assert_same(without_ids(got), without_ids(oracle))
    assert torch.equal(ids[:, 1:] != ids[:, :-1], ends[:, :-1])
    assert len(ids.unique()) == int(ends[:, :-1].sum()) + envs


@pytest.mark.parametrize("method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("envs", "workers"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_every_start_method_delivers_the_same_episodes(kind: type, envs: int, workers: int, method: str) -> None:
    policy = deterministic()
    collector = multi(
        kind, envs, workers, policy, total_frames=240, frames_per_batch=24, mp_start_method=method, track_env=True
    )
    collector.set_seed(SEED)
    batches = list(collector)
    assert sum(batch.numel() for batch in batches) == 240
    assert_consistent(batches)
    for env in range(envs):
        if kind is MultiSyncCollector:
            got: Any = torch.cat([batch[env] for batch in batches])
        else:
            got = torch.cat(
                [batch for batch in batches if int(batch["collector", "env"][0]) == env] or [batches[0][:0]]
            )
        own = seeds(envs)[env]
        oracle: Any = plain_loop([CountingEnv()], [own], policy, max(1, len(got)), batched=False)[0, : len(got)]
        for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done")):
            torch.testing.assert_close(got[key], oracle[key])


@pytest.mark.parametrize(("envs", "workers"), LAYOUTS)
@pytest.mark.parametrize("policy", [deterministic, stochastic, recurrent, actor_critic])
def test_async_is_consistent(envs: int, workers: int, policy: Callable[[], Any]) -> None:
    batches = list(multi(MultiAsyncCollector, envs, workers, policy(), frames_per_batch=40, total_frames=1000))
    assert [batch.shape for batch in batches] == [torch.Size([40])] * 25
    assert_consistent(batches)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_env_kind(kind: type, workers: int) -> None:
    factories: dict[str, tuple[Callable[[], EnvBase], tuple[int, ...]]] = {
        "serial": (lambda: SerialEnv(3, make_counting), (3,)),
        "on TensorDicts": (CountingTensorDictEnv, ()),
        "vector": (lambda: GymEnv("CartPole-v1", num_envs=2), (2,)),
    }
    for make, size in factories.values():
        collector = kind([make] * 2, frames_per_batch=24, total_frames=72, num_workers=workers)
        batches = list(collector)
        count = 24 // max(1, torch.Size(size).numel()) // (2 if kind is MultiSyncCollector else 1)
        lead = (2, *size) if kind is MultiSyncCollector else size
        assert [tuple(batch.shape) for batch in batches] == [(*lead, count)] * 3


# -- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:frames_per_batch=")
@settings(max_examples=25, deadline=None)
@given(
    sync=st.booleans(),
    envs=st.integers(1, 5),
    workers=st.integers(1, 3),
    children=st.integers(0, 3),
    frames_per_batch=st.integers(1, 40),
    total_frames=st.integers(0, 150),
    init_random_frames=st.integers(0, 160),
)
def test_frame_counts_are_exact(
    sync: bool,
    envs: int,
    workers: int,
    children: int,
    frames_per_batch: int,
    total_frames: int,
    init_random_frames: int,
) -> None:
    policy = TensorDictModule(Marking(), in_keys=["observation"], out_keys=["action", "mark"])
    make = (lambda: SerialEnv(children, make_counting)) if children else make_counting
    collector = MultiCollector(
        [make] * envs,
        policy,
        num_workers=min(envs, workers),
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        init_random_frames=init_random_frames,
        sync=sync,
    )
    expected_len = len(collector)
    batches = list(collector)
    assert len(batches) == expected_len
    assert sum(batch.numel() for batch in batches) == total_frames == collector.stats()["frames"]
    assert all(batch.names[-1] == "time" for batch in batches)
    by_policy = sum(int(batch["mark"].sum()) for batch in batches)
    assert total_frames - by_policy == min(init_random_frames, total_frames)


def test_rounding_up_warns_once_with_the_number_used() -> None:
    with warned_here(match=r"frames_per_batch=10 does not divide over 3 envs; 12 will be used") as caught:
        collector = multi(MultiSyncCollector, frames_per_batch=10, total_frames=24)
    assert len(caught) == 1
    assert (collector.frames_per_batch, collector.requested_frames_per_batch) == (4, 12)
    assert [batch.shape for batch in collector] == [torch.Size([3, 4])] * 2


def test_endless() -> None:
    with multi(MultiAsyncCollector, total_frames=-1) as collector:
        batches = iter(collector)
        assert [next(batches).numel() for _ in range(5)] == [12] * 5
        with pytest.raises(NoLength, match="never ends"):
            len(collector)


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("children", "cat_results", "shape"),
    [
        (0, "stack", (2, 6)),
        (0, None, (2, 6)),
        (0, 0, (12,)),
        (0, -1, (12,)),
        (3, "stack", (2, 3, 2)),
        (3, 0, (6, 2)),
        (3, -1, (3, 4)),
        (3, 1, (3, 4)),
    ],
)
def test_cat_results(workers: int, children: int, cat_results: Any, shape: tuple[int, ...]) -> None:
    make = (lambda: SerialEnv(children, make_counting)) if children else make_counting
    collector = MultiSyncCollector(
        [make] * 2,
        deterministic(),
        frames_per_batch=12,
        total_frames=41,
        cat_results=cat_results,
        num_workers=workers,
        track_env=True,
        track_worker=True,
    )
    collector.set_seed(SEED)
    batches = list(collector)
    assert [tuple(batch.shape) for batch in batches[:3]] == [shape] * 3
    assert sum(batch.numel() for batch in batches) == 41
    assert all(leaf.is_contiguous() for leaf in batches[0].values(True, True))
    assert batches[0].view(-1).shape == (12,)
    for batch in batches[:3]:
        env = batch["collector", "env"]
        for number in range(2 * max(children, 1)):
            own = batch[env == number]
            assert (
                torch.equal(own["observation"][1:, 1], own["next", "observation"][:-1, 1]) or own["next", "done"].any()
            )
        assert torch.equal(batch["collector", "worker"], env // max(children, 1) // (2 // workers))


def test_stacked_batch_is_one_block_in_worker_order() -> None:
    collector = multi(MultiSyncCollector, 4, 2, total_frames=24, track_worker=True)
    (first, _second) = list(collector)
    places = sorted(leaf.data_ptr() for key, leaf in first.items(True, True) if key[-1] != "worker")
    assert places[-1] - places[0] < collector._layout.num_bytes
    buffer = io.BytesIO()
    torch.save(first["next", "reward"], buffer)  # and yet each key stands alone
    assert buffer.tell() < 4096
    buffer.seek(0)
    torch.save(first, buffer)
    assert first["collector", "worker"][:, 0].tolist() == [0, 0, 1, 1]


def test_frames_per_batch_as_a_sequence() -> None:
    collector = multi(MultiSyncCollector, 2, frames_per_batch=[4, 8], total_frames=40, cat_results=-1, track_env=True)
    batches = list(collector)
    assert [tuple(batch.shape) for batch in batches] == [(12,)] * 3 + [(4,)]
    assert batches[0]["collector", "env"].tolist() == [0] * 4 + [1] * 8
    with pytest.raises(ValueError, match="cannot be stacked"):
        multi(MultiSyncCollector, 2, frames_per_batch=[4, 8])
    with pytest.raises(ValueError, match="3 entries for 2 envs"):
        multi(MultiSyncCollector, 2, frames_per_batch=[4, 8, 9])
    collector = multi(MultiAsyncCollector, 2, frames_per_batch=[4, 8], total_frames=200, track_env=True)
    for batch in collector:
        if collector.stats()["frames"] < 180:
            assert batch.numel() == (4 if int(batch["collector", "env"][0]) == 0 else 8)


# -- delivery --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_kept_batches_stay_right(kind: type) -> None:
    kept, copies = [], []
    for batch in multi(kind, 4, 2, actor_critic(), frames_per_batch=40, total_frames=2000):
        kept.append(batch)
        copies.append(batch.clone())
    assert len(kept) == 50
    for batch, copy in zip(kept, copies, strict=True):
        assert (batch == copy).all()


def test_blocks_are_used_again_once_they_are_free() -> None:
    collector = multi(MultiSyncCollector, 2, 2, total_frames=-1, frames_per_batch=20)
    batches = iter(collector)
    places = {next(batches)["observation"].data_ptr() for _ in range(20)}
    assert len(places) <= 2
    kept = [next(batches) for _ in range(40)]
    assert len({batch["observation"].data_ptr() for batch in kept}) == 40
    collector.shutdown()


def test_batches_train_and_pickle() -> None:
    policy = actor_critic()
    (batch,) = multi(MultiSyncCollector, 4, 2, policy, total_frames=12)
    output = policy(batch.select("observation"))
    (output["state_value"] - batch["next", "reward"]).pow(2).mean().backward()
    assert all(p.grad is not None for p in policy.module[2].parameters())
    batch["observation"].add_(1)
    assert (pickle.loads(pickle.dumps(batch)) == batch).all()


# -- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envs", [1, 3, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_same_seed_same_bytes(envs: int, packed: bool) -> None:
    runs = []
    policy = stochastic()
    for _ in range(2):
        workers = min(2, envs) if packed else envs
        collector = multi(
            MultiSyncCollector,
            envs,
            workers,
            policy,
            frames_per_batch=40 * envs,
            total_frames=200 * envs,
            init_random_frames=17 * envs + 1,
        )
        following = collector.set_seed(SEED)
        runs.append((following, torch.cat(list(collector), 1)))
    assert runs[0][0] == runs[1][0] == next_seed(seeds(envs)[-1])
    assert_same(runs[0][1], runs[1][1])
    noise = runs[0][1]["observation"][:, :30, 3]
    assert len({tuple(row.tolist()) for row in noise}) == envs
    if envs > 1:  # the random warm-up differs from env to env, too
        actions = runs[0][1]["action"][:, :16].argmax(-1)
        assert len({tuple(row.tolist()) for row in actions}) == envs


def test_static_seed_and_torchs_own_seed() -> None:
    collector = multi(MultiSyncCollector, 2, 2, stochastic(), frames_per_batch=40, total_frames=80)
    assert collector.set_seed(SEED, static_seed=True) == SEED
    batch = next(iter(collector))
    assert torch.equal(batch["observation"][0, 0], batch["observation"][1, 0])
    assert not torch.equal(batch["action"][0], batch["action"][1])
    collector.shutdown()
    actions = []
    for _ in range(2):
        torch.manual_seed(3)
        (batch,) = multi(MultiSyncCollector, 2, 2, total_frames=12)
        actions.append(batch["action"])
    assert torch.equal(*actions)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_seeding_in_the_middle_discards_what_is_under_way(kind: type) -> None:
    collector = multi(kind, 2, 1, deterministic(), total_frames=-1)
    batches = iter(collector)
    collector.set_seed(SEED)
    first = next(batches)["observation"].clone()
    for _ in range(5):
        next(batches)
    collector.set_seed(SEED)
    again = next(batches)["observation"]
    assert torch.equal(first, again)
    collector.reset()
    assert bool((next(batches)["observation"][..., 0, 1] == 0).all())
    collector.shutdown()


def test_reset_of_some_envs() -> None:
    collector = MultiSyncCollector([lambda: make_counting(10**6)] * 3, frames_per_batch=12, num_workers=2)
    batches = iter(collector)
    before = next(batches)
    collector.reset([False, True, False])
    after = next(batches)
    assert after["observation"][:, 0, 1].tolist() == [4.0, 0.0, 4.0]
    same = before["collector", "traj_ids"][:, -1] == after["collector", "traj_ids"][:, 0]
    assert same.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="2 entries for 3 envs"):
        collector.reset([True, False])
    collector.shutdown()


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_parameters_of_the_single_collector(kind: type) -> None:
    called: list[Any] = []
    collector = multi(
        kind,
        2,
        1,
        actor_critic(),
        total_frames=120,
        max_frames_per_traj=7,
        set_truncated=True,
        check_finite=True,
        compact_obs=True,
        track_policy_version=True,
        pre_collect_hook=lambda: called.append("before"),
        post_collect_hook=lambda batch: called.append(batch.shape),
        postproc=lambda batch: batch.set("extra", torch.ones(batch.shape)),
    )
    batches = list(collector)
    assert called[0] == "before"
    assert len(called) == 2 * len(batches)
    for batch in batches:
        assert int(batch["step_count"].max()) <= 6
        assert bool(batch["next", "truncated"][..., -1, :].all())
        assert "observation" not in batch["next"].keys()  # noqa: SIM118
        assert bool((batch["policy_version"] == 0).all())
        assert bool(batch["extra"].all())


def test_split_trajs_and_whole_episodes() -> None:
    (batch,) = multi(MultiSyncCollector, 2, 1, frames_per_batch=100, total_frames=100, split_trajs=True)
    assert int(batch["collector", "mask"].sum()) == 100
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        collector = kind(
            [lambda: make_counting(9)] * 3, frames_per_batch=30, total_frames=600, trajs_per_batch=4, traj_format="cat"
        )
        for batch in collector:
            assert int(batch["next", "done"].sum()) == 4
            assert_consistent([batch])


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("rows", [1, 2])
def test_whole_episodes_of_envs_that_are_joined_in_time(rows: int, threshold: float | None) -> None:
    """Where one env's frames end another's begin: an episode that goes on in the next batch is not cut there."""

    def make() -> EnvBase:
        return make_counting(9) if rows == 1 else SerialEnv(rows, lambda: make_counting(9))

    collector = MultiSyncCollector(
        [make] * 3,
        frames_per_batch=30 * rows,
        total_frames=600 * rows + 1,
        num_workers=3,
        cat_results=-1,
        trajs_per_batch=1,
        traj_format="cat",
        preemptive_threshold=threshold,
    )
    num_frames = 0
    for batch in collector:
        assert batch["observation"][:, 1].tolist() == list(range(len(batch)))
        assert batch["next", "done"].reshape(-1).tolist() == [False] * (len(batch) - 1) + [True]
        num_frames += len(batch)
    assert num_frames > 600 * rows - 3 * rows * 9 - 2  # all but those under way at the end
    assert num_frames == collector.episodes().lengths.sum()


def test_reset_at_each_iter_and_async_collector() -> None:
    collector = AsyncCollector(
        lambda: make_counting(10**6), frames_per_batch=10, total_frames=50, reset_at_each_iter=True
    )
    batches = list(collector)
    assert len({int(batch["collector", "traj_ids"][0]) for batch in batches}) == 5
    assert all(int(batch["observation"][0, 1]) == 0 for batch in batches)
    with pytest.raises(ValueError, match="AsyncCollector has one env, got 2"):
        AsyncCollector([make_counting] * 2, frames_per_batch=10)


def test_kwargs_devices_and_policy_factories_for_each_env() -> None:
    def constant(action: int) -> Callable[[], Any]:
        return lambda: TensorDictModule(
            lambda observation: nn.functional.one_hot(torch.tensor(action), 3).expand(*observation.shape[:-1], 3),
            in_keys=["observation"],
            out_keys=["action"],
        )

    collector = MultiSyncCollector(
        [make_counting] * 3,
        policy_factory=[constant(2), constant(0), constant(1)],
        create_env_kwargs=[{"longest": 1}, {"longest": 2}, {"longest": 10**6}],
        device=["cpu", "cpu", "cpu"],
        frames_per_batch=30,
        total_frames=30,
    )
    (batch,) = collector
    assert batch.device == torch.device("cpu")
    assert collector.stats()["num_workers"] == 3
    assert batch["action"].argmax(-1)[:, 0].tolist() == [2, 0, 1]
    assert bool(batch["next", "done"][0].all())
    assert not batch["next", "done"][2].any()


def test_preemption_stops_the_others_at_their_next_step(tmp_path: Path) -> None:
    from slow_envs import _Waits, released

    begun = tmp_path / "begun"

    class Slow(_Waits):
        def step(self, action: Any) -> Any:
            begun.touch()
            return super().step(action)

    class Fast(CountingEnv):
        """Is done when the slow one has begun, however busy the machine is."""

        def step(self, action: Any) -> Any:
            assert wait_until(begun.exists, 60)
            return super().step(action)

    with released() as path:
        collector = MultiSyncCollector(
            [lambda: GymWrapper(Fast(10**6)), lambda: GymWrapper(Slow(path, 3))],
            frames_per_batch=40,
            total_frames=60,
            num_workers=2,
            preemptive_threshold=0.5,
        )
        batches = list(collector)
    mask = batches[0]["collector", "mask"]
    assert mask[0].all()
    assert 1 <= int(mask[1].sum()) < 20
    assert bool((batches[0]["collector", "traj_ids"][~mask] == -1).all())
    assert not batches[0]["observation"][~mask].any()
    assert sum(int(batch["collector", "mask"].sum()) for batch in batches) == 60
    with pytest.raises(ValueError, match="from 0 to 1"):
        multi(MultiSyncCollector, preemptive_threshold=1.5)


def test_init_fn_threads_and_start_methods() -> None:
    def first() -> None:
        import builtins

        builtins.swath_was_here = torch.get_num_threads()  # type: ignore[attr-defined]

    class Seen(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            import builtins

            return torch.full((*observation.shape[:-1], 3), float(builtins.swath_was_here))  # type: ignore[attr-defined]

    before = torch.get_num_threads()
    collector = multi(
        MultiSyncCollector,
        2,
        policy=TensorDictModule(Seen(), in_keys=["observation"], out_keys=["action"]),
        init_fn=first,
        num_threads=before + 1,
        num_sub_threads=2,
    )
    assert torch.get_num_threads() == before + 1
    (batch, *_) = list(collector)
    assert bool((batch["action"] == 2).all())
    assert torch.get_num_threads() == before


# -- looking into workers --------------------------------------------------------------------------------------------


def test_attributes_calls_and_stats() -> None:
    collector = MultiSyncCollector(
        [make_counting] * 3, actor_critic(), frames_per_batch=60, total_frames=600, num_workers=2
    )
    next(iter(collector))
    assert collector.getattr_env("batch_size") == torch.Size([])
    assert collector.getattr_policy("out_keys") == actor_critic().out_keys
    assert collector.get_distant_attr("worker_idx") == [0, 1]
    assert collector.map_fn("get_distant_attr", [("worker_idx",), ("worker_idx",)]) == [0, 1]
    with pytest.raises(ValueError, match="1 entries for 2 workers"):
        collector.map_fn("get_distant_attr", [("worker_idx",)])
    with pytest.raises(AttributeError, match="no_such_thing"):
        collector.getattr_env("no_such_thing")
    next(iter(collector))
    stats = collector.stats()
    assert stats["layout"] == "3 envs in 2 workers, 1 or 2 each"
    assert [line["envs"] for line in stats["workers"]] == [[0, 1], [2]]
    assert sum(line["frames"] for line in stats["workers"]) == stats["frames"] == 120
    for line in stats["workers"]:
        assert line["alive"]
        assert line["fps"] > 0
        assert abs(line["env"] + line["policy"] + line["waiting"] - 1) < 1e-6
        assert line["env"] > 0
        assert line["policy"] > 0
    assert "3 envs in 2 workers" in repr(collector)
    collector.shutdown()
    assert not any(line["alive"] for line in collector.stats()["workers"])


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_state(kind: type) -> None:
    def make() -> Any:
        return multi(kind, 3, 2, stochastic(), total_frames=120, init_random_frames=40)

    collector = make()
    collector.set_seed(SEED)
    seen = [next(iter(collector)) for _ in range(2)]
    state = pickle.loads(pickle.dumps(collector.state_dict()))
    collector.shutdown()
    runs = []
    for _ in range(2):
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.stats()["frames"] == sum(batch.numel() for batch in seen)
        batches = list(resumed)
        assert sum(batch.numel() for batch in [*seen, *batches]) == 120
        old = {i for batch in seen for i in batch["collector", "traj_ids"].reshape(-1).tolist()}
        new = {i for batch in batches for i in batch["collector", "traj_ids"].reshape(-1).tolist()}
        assert not old & new
        runs.append(batches)
    if kind is MultiSyncCollector:
        whole: list[Any] = [torch.cat(run, 1) for run in runs]
        assert_same(*whole)
    with multi(kind, 3, 3) as other, pytest.raises(ValueError, match=r"of 2 workers; it takes.*num_workers=2"):
        other.load_state_dict(state)


def check_that_the_own_module_is_restored(make: Callable[..., Any]) -> None:
    """What the trainer has is restored, too, be it newer than what workers have: else the next update would send them
    the weights of an untrained policy."""

    def fill(policy: torch.nn.Linear, value: float) -> torch.nn.Linear:
        with torch.no_grad():
            policy.weight.zero_()
            policy.bias.fill_(value)
        return policy

    policy = fill(torch.nn.Linear(4, 3), 1.0)
    with make(policy=policy) as collector:
        fill(policy, 2.0)
        collector.update_policy_weights_()
        next(iter(collector))
        fill(policy, 3.0)  # trained, and not sent
        state = collector.state_dict()
    fill(policy, 4.0)
    resumed = fill(torch.nn.Linear(4, 3), 5.0)
    with make(policy=resumed) as collector:
        collector.load_state_dict(state)
        assert (resumed.bias == 3.0).all()
        assert (next(iter(collector))["action"] == 2.0).all()
        collector.update_policy_weights_()
        collector.reset()
        assert (next(iter(collector))["action"] == 3.0).all()
    with make(policy_factory=lambda: fill(torch.nn.Linear(4, 3), 6.0)) as collector:
        collector.load_state_dict(state)  # there is no module here
        state = collector.state_dict()
    with make(policy=resumed) as collector:
        collector.load_state_dict(state)
        assert (resumed.bias == 2.0).all()  # what workers have is all that is known


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_the_trainers_own_module_is_restored(kind: type) -> None:
    check_that_the_own_module_is_restored(
        lambda **policy: kind([make_counting] * 2, num_workers=2, frames_per_batch=20, **policy)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_was_loaded_survives_a_restart() -> None:
    """A worker that is started again has the weights that were loaded, not those that the collector was made with."""

    def make(bias: float) -> tuple[Any, torch.nn.Linear]:
        policy = torch.nn.Linear(4, 3)
        with torch.no_grad():
            policy.weight.zero_()
            policy.bias.fill_(bias)
        kind = MultiSyncCollector([make_counting] * 2, policy, num_workers=2, frames_per_batch=20, restart_workers=1)
        return kind, policy

    collector, policy = make(1.0)
    with collector:
        with torch.no_grad():
            policy.bias.fill_(7.0)
        collector.update_policy_weights_()
        state = collector.state_dict()
    collector, _ = make(-1.0)
    with collector:
        collector.load_state_dict(state)
        batches = iter(collector)
        next(batches)
        os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
        while not collector.stats()["workers"][0]["restarts"]:
            assert (next(batches)["action"] == 7.0).all()
        assert (next(batches)["action"] == 7.0).all()


# -- layouts ---------------------------------------------------------------------------------------------------------


def test_layouts() -> None:
    assert available_cores() >= 1
    with multi(MultiSyncCollector, 12) as collector:
        assert collector.num_workers == min(12, available_cores())
    with MultiSyncCollector(make_counting, num_workers=2, envs_per_worker=3, frames_per_batch=12) as collector:
        assert collector.stats()["layout"] == "6 envs in 2 workers, 3 each"
        assert next(iter(collector)).shape == (6, 2)
    with multi(MultiSyncCollector, 4, envs_per_worker=2) as collector:
        assert collector.num_workers == 2


def test_quota_of_a_control_group(tmp_path: Any) -> None:
    assert cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_cores(tmp_path) == 2


@pytest.mark.alone
def test_envs_that_wait_are_told_of_and_auto_spreads_them() -> None:
    from slow_envs import Sleeping

    collector = MultiSyncCollector([Sleeping] * 6, frames_per_batch=120, total_frames=360, num_workers=2)
    with warned_here(match=r"wait rather than compute.*num_workers=6") as caught:
        list(collector)
    assert len(caught) == 1
    with MultiSyncCollector([Sleeping] * 6, frames_per_batch=60, num_workers="auto") as collector:
        assert collector.num_workers == 6
    with multi(MultiSyncCollector, 6, num_workers="auto", policy=deterministic()) as collector:
        assert collector.num_workers <= available_cores() + 1


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"sync": None}, TypeError, "sync=True or sync=False"),
        ({"frames_per_batch": 0}, ValueError, "at least 1"),
        ({"frames_per_batch": None}, TypeError, "needs frames_per_batch"),
        ({"cat_results": "row"}, ValueError, "'stack', 0 or -1"),
        ({"cat_results": 0, "sync": False}, ValueError, "is for MultiSyncCollector"),
        ({"device": ["cpu"]}, RuntimeError, "1 entries for 3 envs"),
        ({"create_env_kwargs": [{}]}, ValueError, "1 entries for 3 envs"),
        ({"num_workers": 4}, ValueError, "more than the 3 envs"),
        ({"num_workers": 2, "envs_per_worker": 3}, ValueError, "leave one of the two out"),
        ({"mp_start_method": "thread"}, ValueError, "forkserver, spawn, fork"),
        ({"num_worker": 2}, TypeError, "did you mean 'num_workers'"),
        ({"create_env_fn": []}, ValueError, "empty list"),
        ({"create_env_fn": [3]}, TypeError, "function that makes one"),
        ({"reset_when_done": False}, ValueError, "always reset"),
        ({"reset_when_done": False, "split_trajs": True}, RuntimeError, "always reset"),
        ({"weight_updater": 1, "weight_sync_schemes": {}}, TypeError, "not both"),
        ({"max_policy_lag": -1, "sync": False}, ValueError, "at least 0"),
        ({"max_policy_lag": 1, "on_policy_lag": "wait", "sync": False}, ValueError, "'hold' or 'drop'"),
        ({"trajs_per_batch": 0}, ValueError, "at least 1"),
        (
            {"policy": lambda observation: observation, "policy_factory": deterministic},
            TypeError,
            "must be an nn.Module",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    given = {"create_env_fn": [make_counting] * 3, "frames_per_batch": 12, "sync": True, **arguments}
    if given["sync"] is None:
        del given["sync"]
    with pytest.raises(error, match=match):
        MultiCollector(**given)


def test_envs_that_differ_are_refused() -> None:
    with pytest.raises(EnvError, match=r"worker 1 .* other data than worker 0: \('observation',\)"):
        MultiSyncCollector([make_counting, lambda: GymEnv("Pendulum-v1")], frames_per_batch=12, num_workers=2)


def test_a_closed_collector_says_so() -> None:
    collector = multi(MultiSyncCollector, total_frames=-1)
    next(iter(collector))
    collector.shutdown()
    collector.shutdown()
    for use in (lambda: next(iter(collector)), collector.update_policy_weights_, lambda: collector.set_seed(1)):
        with pytest.raises(CollectorClosed, match="was shut down after 12 frames"):
            use()
    with multi(MultiSyncCollector) as other, pytest.raises(RuntimeError, match="close_env=False"):
        other.shutdown(close_env=False)


def test_nothing_is_collected_between_two_batches() -> None:
    collector = multi(MultiSyncCollector, 2, 2, total_frames=-1)
    batches = iter(collector)
    next(batches)
    counts = [line["frames"] for line in collector.stats()["workers"]]
    collector.getattr_env("batch_size")  # a question and its answer: time enough to go on
    assert [line["frames"] for line in collector.stats()["workers"]] == counts == [6, 6]
    collector.shutdown()


def test_single_collector_has_the_same_data() -> None:
    """Packed in one worker, it is a Collector with a SerialEnv."""
    policy = deterministic()
    env = SerialEnv(3, make_counting)
    single = Collector(env, policy, frames_per_batch=90, total_frames=270)
    single.set_seed(SEED)
    expected: Any = torch.cat(list(single), 1)
    collector = multi(MultiSyncCollector, 3, 1, policy, frames_per_batch=90, total_frames=270)
    collector.set_seed(SEED)
    got: Any = torch.cat(list(collector), 1)
    assert_same(without_ids(got), without_ids(expected))


def test_whole_episodes_survive_preemption() -> None:
    """What a stopped worker did not collect is not the end of an episode."""
    from slow_envs import Sleeping

    collector = MultiSyncCollector(
        [lambda: make_counting(9), Sleeping],
        frames_per_batch=100,
        total_frames=600,
        num_workers=2,
        preemptive_threshold=0.5,
        trajs_per_batch=3,
        traj_format="cat",
    )
    for batch in collector:
        assert_consistent([batch])


def test_state_in_async_mode_counts_random_frames_under_way_as_due() -> None:
    policy = TensorDictModule(Marking(), in_keys=["observation"], out_keys=["action", "mark"])

    def make() -> Any:
        return multi(MultiAsyncCollector, 2, 1, policy, frames_per_batch=10, total_frames=200, init_random_frames=50)

    collector = make()
    seen = [next(iter(collector))]
    state = collector.state_dict()
    collector.shutdown()
    resumed = make()
    resumed.load_state_dict(state)
    seen += list(resumed)
    assert sum(int((batch["mark"] == 0).sum()) for batch in seen) == 50


@pytest.mark.parametrize("random_frames", [7, 13, 20])
def test_random_frames_of_an_env_whose_batch_a_reset_drops_are_due(random_frames: int) -> None:
    """Both envs of the worker have had their share of them, and only one batch was delivered."""
    policy = TensorDictModule(Marking(), in_keys=["observation"], out_keys=["action", "mark"])
    with multi(
        MultiAsyncCollector, 2, 1, policy, frames_per_batch=10, total_frames=100, init_random_frames=random_frames
    ) as collector:
        batches = iter(collector)
        seen = [next(batches).clone()]
        collector.reset()
        seen += [batch.clone() for batch in batches]
    assert sum(int((batch["mark"] == 0).sum()) for batch in seen) == random_frames


def test_a_forked_process_cannot_use_it() -> None:
    import os

    collector = multi(MultiSyncCollector, 2, total_frames=-1)
    pid = os.fork()
    if not pid:
        try:
            next(iter(collector))
            code = 1
        except RuntimeError as error:
            code = 0 if "belong to process" in str(error) else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert next(iter(collector)).numel() == 12
    collector.shutdown()


def test_lag_and_whole_episodes_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="max_policy_lag does not go with trajs_per_batch"):
        multi(MultiAsyncCollector, max_policy_lag=1, trajs_per_batch=2)


# -- processes of processes --------------------------------------------------------------------------------------------


def parents_of_envs_in_a_worker(before_envs: Callable[[], None]) -> list[int]:
    """A ParallelEnv in a worker: which process the processes of its envs were forked from."""

    class Tells(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            observation, info = super().reset(**kwargs)
            observation[3] = os.getppid()
            return observation, info

    def make() -> ParallelEnv:
        before_envs()
        return ParallelEnv(2, lambda: GymWrapper(Tells()), num_workers=2)

    with MultiSyncCollector([make], frames_per_batch=4) as collector:
        batch = next(iter(collector))
    return batch["observation"][0, :, 0, 3].int().tolist()


def test_processes_of_a_worker_come_from_the_same_server() -> None:
    """It has the imports, which another one would need seconds for."""
    above = start.server()._forkserver_pid  # type: ignore[attr-defined]
    assert parents_of_envs_in_a_worker(lambda: None) == [above, above]


def test_processes_of_a_worker_start_though_the_server_is_gone() -> None:
    def forget_the_server() -> None:
        above = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
        above._forkserver_address = "/nowhere/at/all"

    first, second = parents_of_envs_in_a_worker(forget_the_server)
    assert first == second != start.server()._forkserver_pid  # type: ignore[attr-defined]


def test_workers_have_the_environment_variables_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of when the server was started."""
    start.server().ensure_running()
    seen: list[list[float]] = []
    for value in ("3", "5", None):
        if value is None:
            monkeypatch.delenv("SWATH_TEST_LENGTH")
        else:
            monkeypatch.setenv("SWATH_TEST_LENGTH", value)
        factory = lambda: make_counting(int(os.environ.get("SWATH_TEST_LENGTH", "1")))  # noqa: E731
        with MultiSyncCollector([factory], frames_per_batch=40) as collector:
            (batch,) = itertools.islice(collector, 1)
        seen.append(batch["next", "observation"][..., 1].max().item())
    assert seen == [3, 5, 1]


class Noise(nn.Module):
    """One number of each generator that a process has."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        drawn = torch.tensor([torch.rand(()), random.random(), np.random.rand()])  # noqa: NPY002
        return drawn.expand(*observation.shape[:-1], 3).clone()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_every_worker_draws_numbers_of_its_own(seed: int | None, method: str) -> None:
    def collect() -> torch.Tensor:
        policy = TensorDictModule(Noise(), in_keys=["observation"], out_keys=["action"])
        with MultiSyncCollector(
            [make_counting] * 2, policy, frames_per_batch=20, num_workers=2, mp_start_method=method
        ) as collector:
            if seed is not None:
                collector.set_seed(seed)
            return next(iter(collector))["action"].clone()

    first, second = collect()
    assert (first != second).all()
    assert (first[1:] != first[:-1]).all()
    if seed is not None:
        assert torch.equal(collect(), torch.stack([first, second]))


@pytest.mark.filterwarnings("ignore:worker")
def test_a_worker_that_another_thread_started_again_is_asked_again(tmp_path: Path) -> None:
    """It was asked, died, and was started again by who sent weights, all while the answer of another was waited for."""
    held, go_on = tmp_path / "held", tmp_path / "go on"

    class Held(CountingEnv):
        def step(self, action: Any) -> Any:
            if held.exists():
                assert wait_until(go_on.exists, 60)
            return super().step(action)

    policy = deterministic()
    collector = MultiAsyncCollector(
        [lambda: GymWrapper(Held()), make_counting], policy, frames_per_batch=30, num_workers=2, restart_workers=2
    )
    stream = iter(collector)
    next(stream)
    held.touch()
    questions = collector._workers._num_calls
    failed: list[BaseException] = []

    def kill_and_start_again() -> None:
        try:
            assert wait_until(lambda: collector._workers._num_calls >= questions + 2, 30)
            os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
            collector.update_policy_weights_(worker_ids=[1])
        except BaseException as error:
            failed.append(error)
        finally:
            go_on.touch()

    thread = threading.Thread(target=kill_and_start_again)
    thread.start()
    collector.reset()
    thread.join()
    assert not failed
    assert collector.stats()["workers"][1]["restarts"] == 1
    next(stream)
    collector.shutdown()
