"""What holds for every collector, whatever it runs on: one suite, run on each of them.

A new collector is done when it passes. ``CountingEnv`` foretells every number; each env's data must be its own plain
loop's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import CountingEnv, CountingTensorDictEnv, assert_consistent, make_counting, plain_loop
from policies_for_tests import deterministic
from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from swath.collectors.distributed import DistributedCollector
from swath.envs import AsyncEnvPool, ParallelEnv, SerialEnv, next_seed
from swath.errors import CollectorClosed

pytestmark = pytest.mark.processes
SEED = 7
STEPS = 40


@dataclass(frozen=True)
class Kind:
    """A collector, how many envs it has, and how to see its batches as ``{env: frames in order}``."""

    name: str
    make: Callable[..., BaseCollector]
    envs: int
    frames_per_batch: int
    #: Batches are ``[frames]``, with ``env_index``.
    is_flat: bool = False

    def __str__(self) -> str:
        return self.name


def single(envs: int) -> Kind:
    def make(policy: Any, **kwargs: Any) -> BaseCollector:
        env = make_counting() if envs == 1 else SerialEnv(envs, make_counting)
        return Collector(env, policy, frames_per_batch=STEPS * envs, **kwargs)

    return Kind(f"Collector, {envs} envs", make, envs, STEPS * envs)


def several(kind: type, envs: int, workers: int, method: str) -> Kind:
    frames = STEPS * envs if kind is MultiSyncCollector else STEPS

    def make(policy: Any, **kwargs: Any) -> BaseCollector:
        return kind(
            [make_counting] * envs,
            policy,
            frames_per_batch=frames,
            num_workers=workers,
            mp_start_method=method,
            track_env=True,
            **kwargs,
        )

    return Kind(f"{kind.__name__}, {envs} envs in {workers}, {method}", make, envs, frames)


def one_worker(method: str) -> Kind:
    def make(policy: Any, **kwargs: Any) -> BaseCollector:
        return AsyncCollector(make_counting, policy, frames_per_batch=STEPS, mp_start_method=method, **kwargs)

    return Kind(f"AsyncCollector, {method}", make, 1, STEPS)


def parallel(envs: int, workers: int, make_env: Callable[[], Any] = make_counting) -> Kind:
    def make(policy: Any, **kwargs: Any) -> BaseCollector:
        env = ParallelEnv(envs, make_env, num_workers=workers)
        return Collector(env, policy, frames_per_batch=STEPS * envs, **kwargs)

    name = "" if make_env is make_counting else ", TensorDicts"
    return Kind(f"Collector, ParallelEnv, {envs} envs in {workers}{name}", make, envs, STEPS * envs)


def pooled(envs: int, backend: str) -> Kind:
    def make(policy: Any, **kwargs: Any) -> BaseCollector:
        env = AsyncEnvPool([make_counting] * envs, backend=backend)
        return Collector(env, policy, frames_per_batch=STEPS * envs, **kwargs)

    return Kind(f"Collector, AsyncEnvPool, {envs} envs, {backend}", make, envs, STEPS * envs)


def batched(
    envs: int, workers: int, backend: str = "multiprocessing", make_env: Callable[[], Any] = make_counting
) -> Kind:
    def make(policy: Any, **kwargs: Any) -> BaseCollector:
        return AsyncBatchedCollector(
            [make_env] * envs,
            policy,
            frames_per_batch=STEPS * envs + 1,  # need not be whole steps
            num_workers=workers,
            env_backend=backend,
            **kwargs,
        )

    name = "" if make_env is make_counting else ", TensorDicts"
    return Kind(
        f"AsyncBatchedCollector, {envs} envs in {workers}, {backend}{name}", make, envs, STEPS * envs + 1, is_flat=True
    )


def on_nodes(kind: type, nodes: int, sync: bool, workers: int = 1, envs: int = 1, **kwargs: Any) -> Kind:
    """``envs`` of each node in this many workers, or in the node itself."""
    each = envs * workers
    frames = STEPS * each * nodes if sync else STEPS * each
    name = f"{kind.__name__}, {nodes} nodes x {workers} workers x {envs} envs, {'sync' if sync else 'async'}"

    def make(policy: Any, **others: Any) -> BaseCollector:
        make_env = make_counting if envs == 1 else lambda: SerialEnv(envs, make_counting)
        return kind(
            [make_env] * nodes,
            policy,
            frames_per_batch=frames,
            sync=sync,
            num_workers_per_collector=workers,
            track_env=True,
            **kwargs,
            **others,
        )

    return Kind(name, make, each * nodes, frames)


def all_on_nodes(kind: type, **kwargs: Any) -> list[Kind]:
    return [
        on_nodes(kind, nodes, sync, workers, envs, **kwargs)
        for sync in (True, False)
        for nodes, workers, envs in ((1, 1, 1), (2, 1, 3), (2, 2, 1))
    ]


CENTRAL = [
    parallel(1, 1),
    parallel(3, 3),
    parallel(5, 2),
    parallel(3, 2, CountingTensorDictEnv),
    pooled(3, "threading"),
    pooled(3, "multiprocessing"),
    batched(1, 1),
    batched(3, 3),
    batched(5, 2),
    batched(6, 1),
    batched(3, 2, make_env=CountingTensorDictEnv),
    batched(3, 3, "threading"),
    batched(4, 2, "threading"),
]

#: {1, 2, 3 workers} × {packed, not} × {fork server, spawn}.
LAYOUTS = [(1, 1), (2, 2), (3, 3), (2, 1), (4, 2), (6, 3)]


def all_multi(method: str) -> list[Kind]:
    kinds = (MultiSyncCollector, MultiAsyncCollector)
    made = [several(kind, envs, workers, method) for kind in kinds for envs, workers in LAYOUTS]
    return [*made, one_worker(method)]


DISTRIBUTED = [
    pytest.param(kind, marks=pytest.mark.slow if i == 5 else ())
    for i, kind in enumerate(all_on_nodes(DistributedCollector))
]
KINDS = [single(1), single(3), *all_multi("forkserver"), *CENTRAL]
#: A new interpreter takes seconds to import torch, so most of these are run by `make test-all` only.
SPAWNED = [
    pytest.param(kind, marks=() if kind.name.startswith("MultiSyncCollector, 2 envs in 1") else pytest.mark.slow)
    for kind in all_multi("spawn")
]


def by_env(kind: Kind, batches: list[TensorDict]) -> dict[int, TensorDict]:
    """Each env's frames in order."""
    pieces: dict[int, list[TensorDict]] = {}
    for batch in batches:
        batch = batch.copy()
        collector = batch.pop("collector")
        if kind.is_flat:
            index = batch["env_index"]
            for env in index.unique().tolist():
                pieces.setdefault(env, []).append(batch[index == env])
            continue
        rows = batch.reshape(-1, batch.shape[-1])
        numbers = collector.get("env", None)
        for index, row in enumerate(rows):
            env = index if numbers is None else int(numbers.reshape(rows.shape)[index, 0])
            pieces.setdefault(env, []).append(row)
    return {env: torch.cat(each) for env, each in pieces.items()}  # type: ignore[arg-type]


def fields(batch: TensorDict) -> dict[Any, torch.dtype]:
    return {key: leaf.dtype for key, leaf in batch.items(True, True) if key not in (("collector", "env"), "env_index")}


@pytest.mark.parametrize("kind", [*KINDS, *SPAWNED, *DISTRIBUTED], ids=str)
def test_contract(kind: Kind) -> None:
    check_contract(kind)


def check_contract(kind: Kind) -> None:
    """Of a collector; its tests may be elsewhere."""
    policy = deterministic()
    total = kind.frames_per_batch * 7 + 11
    collector = kind.make(policy, total_frames=total, track_policy_version=True)

    # Seeds: the following one is returned; the same seed gives the same episodes, in each env other ones.
    seeds = [SEED]
    while len(seeds) <= kind.envs:
        seeds.append(next_seed(seeds[-1]))
    assert collector.set_seed(SEED) == seeds[-1]  # type: ignore[attr-defined]

    # Counts: exact, and as many batches as foretold.
    expected = len(collector)
    batches = list(collector)
    assert len(batches) == expected
    assert sum(batch.numel() for batch in batches) == total == collector.stats()["frames"]
    assert all(batch.names[-1] == (None if kind.is_flat else "time") for batch in batches)
    assert all(leaf.is_contiguous() for batch in batches[:7] for leaf in batch.values(True, True))

    # Keys and dtypes: those of the single collector.
    (alone,) = Collector(make_counting(), policy, frames_per_batch=4, total_frames=4, track_policy_version=True)
    assert fields(batches[0]) == fields(alone)

    # Boundaries and ids: every trajectory whole and in order, an id for each, over all envs.
    assert_consistent(batches)
    starts = sum(int((batch["observation"][..., 1] == 0).sum()) for batch in batches)
    ids = torch.cat([batch["collector", "traj_ids"].reshape(-1) for batch in batches])
    assert len(ids.unique()) == starts

    # Data: each env's is its plain loop's. (A policy's matrix product of several rows may round otherwise than of one.)
    for env, got in by_env(kind, batches).items():
        oracle: Any = plain_loop([CountingEnv()], [seeds[env]], policy, len(got), batched=False)[0]
        for key in ("observation", "action", "done", ("next", "observation"), ("next", "reward"), ("next", "done")):
            torch.testing.assert_close(got[key], oracle[key], msg=lambda text, key=key: f"{key}: {text}")

    # The end: closed, and iterating again yields nothing.
    assert list(collector) == []
    collector.shutdown()

    # Weights: what was not sent is not used, what was sent is; the version says so.
    collector = kind.make(policy, track_policy_version=True)
    stream = iter(collector)
    batch = next(stream)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    collector.update_policy_weights_()  # type: ignore[attr-defined]
    # An env's worker may have taken a few batches before the update; how many others come first is up to the scheduler.
    old_batches, seen_new = Counter[int](), set[int]()
    while len(seen_new) < kind.envs:
        batch = next(stream)
        for env, rows in by_env(kind, [batch]).items():
            new = rows["policy_version"] == 1
            assert not rows["action"][new].any()
            if bool(new.any()):
                seen_new.add(env)
            else:
                old_batches[env] += 1
        assert max(old_batches.values(), default=0) <= 4, "these batches were begun after the update"

    # State: counters go on, ids are not used again.
    state = collector.state_dict()  # type: ignore[attr-defined]
    seen = collector.stats()["frames"]
    used = batch["collector", "traj_ids"].max()
    collector.shutdown()
    collector.shutdown()
    with pytest.raises(CollectorClosed, match="make a new one"):
        next(iter(collector))
    resumed = kind.make(policy, total_frames=seen + kind.frames_per_batch)
    resumed.load_state_dict(state)  # type: ignore[attr-defined]
    rest = list(resumed)
    assert sum(batch.numel() for batch in rest) == kind.frames_per_batch
    if kind.envs == 1:
        assert min(int(batch["collector", "traj_ids"].min()) for batch in rest) > int(used)
