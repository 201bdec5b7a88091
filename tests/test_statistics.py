"""Statistics of ``VecNorm`` and ``VecNormV2``: copied, saved, and shared over processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from counting import CountingEnv
from leaks import wait_until
from swath.collectors import AsyncBatchedCollector, Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import (
    Compose,
    GymWrapper,
    NoopResetEnv,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    SharedStatistics,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from swath.envs.transforms.shared_statistics import Statistic
from swath.errors import EnvError
from swath.weight_update import DistributedWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from transform_envs import FloatsEnv

KEYS = ["position", "reward"]
#: Ways to normalise both keys, under other names.
NORMS: dict[str, Any] = {
    "VecNorm": partial(VecNorm, KEYS, ["p", "r"], decay=0.9),
    "VecNorm, all alike": partial(VecNorm, KEYS, ["p", "r"], decay=1.0),
    "VecNormV2": partial(VecNormV2, KEYS, ["p", "r"], decay=0.9),
    "VecNormV2, all alike": partial(VecNormV2, KEYS, ["p", "r"], decay=1.0),
    "VecNormV2, reduced": partial(VecNormV2, KEYS, ["p", "r"], decay=0.9, reduce_batch_dims=True),
    "VecNormV2, reduced, all alike": partial(VecNormV2, KEYS, ["p", "r"], decay=1.0, reduce_batch_dims=True),
}
PATH = "env.transform[0]"


def floats(norm: Any, num_envs: int = 0) -> TransformedEnv:
    env: Any = GymWrapper(FloatsEnv()) if num_envs == 0 else SerialEnv(num_envs, lambda: GymWrapper(FloatsEnv()))
    return TransformedEnv(env, norm)


def collected(env: Any, steps: int = 30) -> Any:
    torch.manual_seed(0)
    env.set_seed(3)  # a collector resets once when it is made, which counts
    frames = steps * max(1, env.batch_size.numel())
    with Collector(env, frames_per_batch=frames, total_frames=frames) as collector:
        collector.set_seed(3)
        return next(iter(collector)).clone()


def assert_close(mine: Any, expected: Any, tolerance: float = 1e-4) -> None:
    mine, expected = TensorDict(mine), TensorDict(expected)
    assert set(mine.keys(True, True)) == set(expected.keys(True, True))
    for key in mine.keys(True, True):
        torch.testing.assert_close(mine[key], expected[key], rtol=tolerance, atol=tolerance)


# -- copied, saved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_copies_normalise_as_the_original_did(name: str, is_shared: bool) -> None:
    norm = NORMS[name]()
    if is_shared:
        norm.share_memory()
    collected(floats(norm))
    frozen, static = norm.frozen_copy(), norm.to_observation_norm()
    assert not frozen.is_shared()
    copies = [frozen, static, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), copy.copy(frozen)]
    assert [type(each) for each in static] == [ObservationNorm] * 2
    state = norm.state_dict()
    expected = collected(floats(copies[0]), 8)
    loc, scale = norm.loc["position"], norm.scale["position"]
    torch.testing.assert_close(expected["p"], (expected["position"] - loc) / scale)
    for other in copies[1:]:
        got = collected(floats(other), 8)
        for key in ("p", ("next", "p"), ("next", "r")):
            torch.testing.assert_close(got[key], expected[key], rtol=1e-5, atol=1e-5)
    assert_close(norm.state_dict(), state, 0)
    unfrozen = norm.clone()
    collected(floats(unfrozen))
    assert not torch.equal(unfrozen.loc["position"], norm.loc["position"])
    assert_close(frozen.state_dict(), state, 0)
    assert_close(norm.state_dict(), state, 0)


@pytest.mark.parametrize("name", NORMS)
def test_a_copy_of_a_bound_one_has_statistics_of_its_own(name: str) -> None:
    norm = NORMS[name]()
    collected(floats(norm, 2))
    for other in (copy.deepcopy(norm), pickle.loads(cloudpickle.dumps(norm))):
        assert other.container is None
        before = norm.state_dict()
        collected(floats(other, 2))
        assert_close(norm.state_dict(), before, 0)
        assert not torch.equal(other.loc["position"], norm.loc["position"])


@pytest.mark.parametrize("goes_to", ["private", "shared"])
@pytest.mark.parametrize("name", NORMS)
def test_a_saved_state_goes_anywhere(name: str, goes_to: str) -> None:
    """Also to one that has no env yet; and in TorchRL's form."""
    norm = NORMS[name]()
    collected(floats(norm, 2))
    state = pickle.loads(pickle.dumps(norm.state_dict()))
    for form in (state, {"_extra_state": norm.get_extra_state()}, norm):
        other = NORMS[name]()
        if goes_to == "shared":
            other.share_memory()
        if form is norm:
            other.set_extra_state(norm.get_extra_state())
        else:
            other.load_state_dict(form)
        assert_close(other.state_dict(), state, 1e-6)
        for part in ("loc", "scale"):
            assert_close(getattr(other, part), getattr(norm, part))


def test_states_that_do_not_fit_change_nothing() -> None:
    for make in NORMS.values():
        for norm in (make(), make().share_memory()):
            env = floats(norm)
            fresh = env.state_dict()
            collected(env)
            before = norm.state_dict()
            bad: list[Any] = [{"other": torch.ones(3)}, {}, None]
            wide = copy.deepcopy(before)
            leaf = TensorDict(wide)
            first = next(key for key in leaf.keys(True, True) if "position" in str(key) and "count" not in str(key))
            bad.append({**wide, **TensorDict({first: torch.zeros(4).double()}).to_dict()})
            bad.append({**wide, **TensorDict({first: torch.zeros(3)}).to_dict()})
            for state in bad:
                with pytest.raises(ValueError, match="state"):
                    norm.load_state_dict(state)
                with pytest.raises(ValueError, match="state"):
                    env.check_state_dict({**fresh, "transforms": {"0": state}})
            assert_close(norm.state_dict(), before, 0)


def test_checking_a_state_loads_nothing() -> None:
    """A collector checks the states of all workers before it loads one."""
    norm = VecNorm(KEYS)
    env = floats(norm)
    other = floats(VecNorm(KEYS))
    collected(other)
    env.check_state_dict(other.state_dict())
    assert norm.state_dict() == {}
    with pytest.raises(ValueError, match="StepCounter"):
        floats(StepCounter()).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="Compose"):
        floats(Compose()).load_state_dict(other.state_dict())


def test_a_copy_goes_with_other_envs() -> None:
    """What the original's env looks like is nothing to it."""
    norm = VecNormV2(KEYS)
    env = floats(norm, 3)
    collected(env)
    other = norm.clone()
    other.load_state_dict(seen("VecNormV2").state_dict())
    collected(floats(other))
    with pytest.raises(ValueError, match="statistics of"):
        floats(norm.frozen_copy())  # of three envs
    assert norm.loc["position"].shape == (3, 3)
    env.load_state_dict(env.state_dict())
    other.load_state_dict({**other.state_dict(), "more": torch.ones(1)}, strict=False)
    assert "more" not in other.state_dict()


def test_nothing_was_seen_yet() -> None:
    for norm in (VecNorm(KEYS), VecNorm(KEYS).share_memory(), VecNormV2(KEYS), VecNormV2(KEYS).share_memory()):
        assert norm.state_dict() == {}
        for use in (norm.frozen_copy, norm.to_observation_norm, lambda norm=norm: norm.loc):
            with pytest.raises(RuntimeError, match="nothing was seen"):
                use()


# -- shared, in one process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [0, 3])
@pytest.mark.parametrize("name", NORMS)
def test_shared_statistics_of_one_are_its_own(name: str, num_envs: int) -> None:
    private, shared = NORMS[name](), NORMS[name]().share_memory()
    assert shared.is_shared()
    expected, got = (collected(floats(norm, num_envs)) for norm in (private, shared))
    made = ["p", ("next", "p"), ("next", "r")]
    assert_close(got.select(*made), expected.select(*made), 1e-3)
    assert_close(shared.state_dict(), private.state_dict())
    # Loaded, they go on from there.
    state = private.state_dict()
    for norm in (private, shared):
        norm.load_state_dict(state)
        collected(floats(norm, num_envs))
    assert_close(shared.state_dict(), private.state_dict())


@pytest.mark.parametrize("num_envs", [0, 2])
@pytest.mark.parametrize("name", NORMS)
def test_taking_turns(name: str, num_envs: int) -> None:
    """Three that share are as one that sees all of it, in the same order; what is old counts less for each of them."""
    shared = SharedStatistics()
    given = "shared_td" if name.startswith("VecNorm,") or name == "VecNorm" else "shared_data"
    norms = [NORMS[name](**{given: pickle.loads(pickle.dumps(shared))}) for _ in range(3)]
    one = NORMS[name]()
    envs: list[Any] = [floats(norm, num_envs) for norm in norms]
    same: list[Any] = [floats(one, num_envs) for _ in norms]
    order = np.random.default_rng(0).integers(0, 3, 40).tolist()
    for number, env in enumerate([*envs, *same]):
        env.set_seed(number % 3)
    for of in (envs, same):
        roots = {number: of[number].reset() for number in range(3)}
        last = None
        for number in order:
            action = torch.full(of[0].full_action_spec["action"].shape, 0.5).double()
            last, root = of[number].step_and_maybe_reset(roots[number].set("action", action))
            roots[number] = root
        of.append(last)
    assert_close(envs.pop()["next"].select("p", "r"), same.pop()["next"].select("p", "r"), 1e-3)
    for norm in norms:
        assert_close(norm.state_dict(), one.state_dict())


def test_what_is_loaded_is_loaded_for_all() -> None:
    shared = SharedStatistics()
    norms = [VecNorm(KEYS, shared_td=pickle.loads(pickle.dumps(shared)), decay=1.0) for _ in range(2)]
    envs = [floats(norm) for norm in norms]
    collected(envs[0])
    state = norms[0].state_dict()
    collected(envs[1])
    norms[0].load_state_dict(state)
    for norm in norms:
        assert_close(norm.state_dict(), state, 0)
    collected(envs[1], 10)
    count = float(norms[0].state_dict()["reward_count"])
    assert count == float(norms[1].state_dict()["reward_count"]) == float(state["reward_count"]) + 10
    norms[1].freeze()
    seen = norms[0].state_dict()
    collected(envs[1], 10)
    assert_close(norms[0].state_dict(), seen, 0)


def test_some_envs_step() -> None:
    for norm in (VecNorm(KEYS, decay=1.0), VecNormV2(KEYS, decay=1.0, reduce_batch_dims=True)):
        env = floats(norm.share_memory(), 3)
        root = env.reset().update(env.full_action_spec.rand())
        root["_step"] = torch.tensor([True, False, True])
        before: Any = norm.get_extra_state()
        after: Any = env.step(root)["next"]
        assert torch.equal(after["position"][1], root["position"][1])
        assert not torch.equal(after["position"][0], root["position"][0])
        name = next(name for name in before if "count" in name and "position" in name)
        after_it: Any = norm.get_extra_state()
        assert float(after_it[name]) == float(before[name]) + 2
    env = floats(VecNormV2(KEYS).share_memory(), 3)
    root = env.reset().update(env.full_action_spec.rand())
    root["_step"] = torch.tensor([True, False, True])
    with pytest.raises(EnvError, match="reduce_batch_dims"):
        env.step(root)


def test_sharing_is_refused() -> None:
    shared = SharedStatistics()
    floats(VecNorm(KEYS, shared_td=shared))
    for other, message in (
        (VecNorm(KEYS, shared_td=shared, decay=0.5), "decay"),
        (VecNorm(["position"], shared_td=shared), "statistics is"),
        (VecNormV2(KEYS, shared_data=shared), "another kind"),
    ):
        with pytest.raises(ValueError, match=message):
            floats(other)
    with pytest.raises(ValueError, match="lock"):
        VecNorm(KEYS, shared_td=shared, lock=object())
    norm = VecNorm(KEYS)
    floats(norm).reset()
    with pytest.raises(RuntimeError, match="before"):
        norm.share_memory()
    gone = pickle.dumps(SharedStatistics())
    with pytest.raises(EnvError, match="let go"):
        floats(VecNorm(KEYS, shared_td=pickle.loads(gone)))
    with pytest.raises(ValueError, match="max_writers"):
        SharedStatistics(0)


def test_slots_are_used_again() -> None:
    shared = SharedStatistics(max_writers=2)
    norms = [VecNorm(["reward"], shared_td=pickle.loads(pickle.dumps(shared)), decay=1.0) for _ in range(3)]
    reader = VecNorm(["reward"], shared_td=shared, decay=1.0)
    collected(floats(norms[0]), 5)
    collected(floats(norms[1]), 5)
    with pytest.raises(EnvError, match="max_writers=4"):
        collected(floats(norms[2]), 5)
    del norms[0]
    for _ in range(3):
        gc.collect()
        collected(floats(VecNorm(["reward"], shared_td=pickle.loads(pickle.dumps(shared)), decay=1.0)), 5)
    assert float(reader.state_dict()["reward_count"]) == 25


@pytest.mark.processes
def test_a_forked_process_has_a_slot_of_its_own() -> None:
    shared = SharedStatistics()
    norm = VecNorm(["reward"], shared_td=shared, decay=1.0)
    env = floats(norm)
    env.rollout(5, break_when_any_done=False)
    child = os.fork()
    if child == 0:
        slot = 0
        try:
            env.rollout(7, break_when_any_done=False)
            slot = shared.own_slot()
        finally:
            os._exit(slot)
    env.rollout(7, break_when_any_done=False)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == shared.own_slot() + 1
    assert float(norm.state_dict()["reward_count"]) == 19


# -- shared, over processes --------------------------------------------------------------------------------------------

#: So many that copying them takes as long as the rest.
SIZE = 30_000


def add_for_ever(pickled: bytes) -> None:
    shared = pickle.loads(pickled)
    sums, number = shared.sums[0], 0.0
    while True:
        number += 1
        sums.add(np.full(SIZE, number), 1, 1.0)


@pytest.mark.processes
def test_reads_are_whole_and_a_kill_loses_nothing() -> None:
    """Whoever is killed leaves all or nothing of its last addition, and whoever is next goes on in its slot."""
    shared = SharedStatistics()
    shared.attach([Statistic(("a",), (SIZE,), "float64", SIZE)])
    sums = shared.sums[0]

    def read() -> tuple[float, float]:
        values, added = sums.read(1.0)
        assert values.min() == values.max(), "half of an addition"
        return float(values[0]), added

    def start() -> Any:
        process = multiprocessing.get_context("fork").Process(target=add_for_ever, args=(pickle.dumps(shared),))
        process.start()
        return process

    writers = [start() for _ in range(2)]
    last = 0.0, 0.0
    try:
        for kill in range(6):
            before = read()[1]
            for _ in range(300):
                read()
            assert wait_until(lambda before=before: read()[1] > before + 50), "writers are stuck"
            os.kill(writers[kill % 2].pid, signal.SIGKILL)
            writers[kill % 2].join()
            last = read()
            assert last[1] >= before
            writers[kill % 2] = start()
        assert wait_until(lambda: read()[1] > last[1] + 50)
        assert shared.num_used() == 3
    finally:
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            writer.close()
    assert read() == read()


def test_a_read_is_whole_however_many_additions_come_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy that is read, half is what was there before them, and half after: either nobody writes to it, or it is
    read again."""
    shared = SharedStatistics()
    shared.attach([Statistic(("a",), (2,), "float64", 2)])
    theirs = pickle.loads(pickle.dumps(shared))
    theirs.attach([Statistic(("a",), (2,), "float64", 2)])
    take, due = np.take, list[int]()

    def slow_take(records: Any, chosen: Any, out: Any, **kwargs: Any) -> None:
        take(records, chosen, out=out, **kwargs)
        if due:
            for _ in range(due.pop()):
                theirs.sums[0].add(np.ones(2), 1, 1.0)
            out[:, 4:] = records[chosen, 4:]  # from the second of the sums on

    monkeypatch.setattr(np, "take", slow_take)
    total = 0
    for additions in (1, 2, 3, 4, 5, 6, 9, 0):
        due.append(additions)
        values, added = shared.sums[0].read(1.0)
        assert values[0] == values[1] == added
        assert total <= added <= total + additions
        total += additions
    assert added == total


def make_env(norm: Any) -> Any:
    return floats(norm)


def counts_of(norm: VecNormV2) -> tuple[int, float]:
    """How many rewards were counted, and their sum."""
    state = norm.state_dict()
    count = int(state["count"]["reward"])
    return count, float(state["loc"]["reward"]) * count


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "workers"), [(MultiSyncCollector, 2), (MultiSyncCollector, 1), (MultiAsyncCollector, 2)]
)
def test_workers_share(kind: Any, workers: int) -> None:
    """Every reward counts once, whichever worker saw it; all of them normalise by it."""
    norm = VecNormV2(KEYS, ["p", "r"], decay=1.0).share_memory()
    frames, total = 0, 0.0
    per_batch = 60 if kind is MultiSyncCollector else 20
    with kind([partial(make_env, norm)] * 3, frames_per_batch=per_batch, num_workers=workers, total_frames=240) as each:
        for batch in each:
            frames += batch.numel()
            total += float(batch["next", "reward"].double().sum())
            seen = each.get_distant_attr(f"{PATH}.loc")
            assert len(seen) == workers
    count, summed = counts_of(norm)
    assert count >= frames == 240
    if kind is MultiSyncCollector:
        assert count == frames
        assert summed == pytest.approx(total, rel=1e-4)


@pytest.mark.processes
def test_envs_in_processes_share() -> None:
    norm = VecNormV2(KEYS, ["p", "r"], decay=1.0).share_memory()
    with Collector(
        ParallelEnv(3, partial(make_env, norm), num_workers=2), frames_per_batch=30, total_frames=90
    ) as collector:
        total = sum(float(batch["next", "reward"].double().sum()) for batch in collector)
    count, summed = counts_of(norm)
    assert count == 90
    assert summed == pytest.approx(total, rel=1e-4)
    norm = VecNormV2(KEYS, ["p", "r"], decay=1.0).share_memory()
    for backend in ("threading", "multiprocessing"):
        with AsyncBatchedCollector(
            [partial(make_env, norm)] * 3, Acting(), frames_per_batch=30, total_frames=60, env_backend=backend
        ) as batched:
            for _ in batched:
                pass
    assert counts_of(norm)[0] >= 120


def kill_worker(collector: Any, worker: int) -> None:
    os.kill(collector.stats()["workers"][worker]["pid"], signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:worker")
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_statistics_outlive_workers(kind: Any) -> None:
    """Those of a worker that was killed stay, and its successor has them; policies are updated meanwhile."""
    norm = VecNorm(KEYS, ["p", "r"], decay=1.0).share_memory()
    policy = Acting()
    frames = 0
    with kind([partial(make_env, norm)] * 2, policy, frames_per_batch=20, num_workers=2, restart_workers=9) as each:
        batches = iter(each)
        for number in range(8):
            if number in (2, 4, 5):
                kill_worker(each, number % 2)
            policy.scale.data.fill_(number)
            each.update_policy_weights_()
            frames += next(batches).numel()
            assert float(norm.state_dict()["reward_count"]) >= frames
        for state in each.cascade_execute(f"{PATH}.state_dict"):
            assert float(state["reward_count"]) >= frames
    assert torch.isfinite(norm.loc["position"]).all()


class Acting(nn.Module):
    in_keys = ("position",)
    out_keys = ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, tensordict: Any) -> Any:
        lead = tensordict["position"].shape[:-1]
        return tensordict.set("action", torch.full((*lead, 2), float(self.scale.detach()) / 10).double())


@pytest.mark.processes
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_is_resumed(is_shared: bool) -> None:
    def make() -> tuple[Any, Any]:
        norm = VecNormV2(KEYS, decay=1.0)
        if is_shared:
            norm.share_memory()
        return norm, MultiSyncCollector([partial(make_env, norm)] * 3, frames_per_batch=30, num_workers=2)

    norm, collector = make()
    batches = iter(collector)
    for _ in range(3):
        next(batches)
    states = collector.cascade_execute("env.state_dict")
    saved = pickle.loads(pickle.dumps(collector.state_dict()))
    collector.shutdown()
    other, resumed = make()
    with resumed:
        with pytest.raises(ValueError, match="state"):
            resumed.load_state_dict({**saved, "worker1": {**saved["worker1"], "env_state_dict": {"a": 1}}})
        assert counts_in(resumed) == [0, 0, 0]
        resumed.load_state_dict(saved)
        if is_shared:
            assert counts_of(other)[0] >= 90
            assert counts_of(other) == pytest.approx(counts_of(norm), rel=0.5)
            next(iter(resumed))
            assert counts_of(other)[0] >= 120
        else:
            assert counts_in(resumed) >= [30, 30, 30]
    assert states


def counts_in(collector: Any) -> list[int]:
    """Of rewards, of each env."""
    found = collector.cascade_execute(f"{PATH}.state_dict")
    states = [state for each in found for state in (each if isinstance(each, list) else [each])]
    return [int(state["count"]["reward"]) for state in states]


@pytest.mark.processes
def test_a_tensordict_does_not_reach_workers() -> None:
    """It would be a copy in each of them."""
    sums = VecNorm(KEYS)
    averages = VecNormV2(KEYS)
    for norm in (sums, averages):
        collected(floats(norm))
    td, data = TensorDict(sums.state_dict()).share_memory_(), TensorDict(averages.state_dict()).share_memory_()
    collected(floats(VecNorm(KEYS, shared_td=td)))  # in one process it is shared
    ready = VecNorm(KEYS, shared_td=td)
    for make in (
        lambda: floats(VecNorm(KEYS, shared_td=td)),
        lambda: floats(VecNormV2(KEYS, shared_data=data)),
        lambda: floats(ready),
    ):
        with pytest.raises(RuntimeError, match=r"share_memory\(\)"):
            MultiSyncCollector([make], frames_per_batch=10)


# -- by path -----------------------------------------------------------------------------------------------------------


def seen(name: str, steps: int = 20) -> Any:
    norm = NORMS[name]()
    collected(floats(norm), steps)
    return norm


@pytest.mark.parametrize("num_envs", [0, 2])
@pytest.mark.parametrize("name", ["VecNorm", "VecNormV2"])
def test_by_path_in_one_process(name: str, num_envs: int) -> None:
    known = seen(name)

    def make() -> Any:
        return floats(Compose(NORMS[name](), StepCounter()))

    env: Any = make() if num_envs == 0 else SerialEnv(num_envs, make)
    with Collector(env, frames_per_batch=10, total_frames=40) as collector:
        for form in (known, known.state_dict(), TensorDict(known.state_dict())):
            next(iter(collector))
            collector.update_policy_weights_(form, model_id=PATH)
            found = collector.cascade_execute(f"{PATH}.state_dict")
            for state in found if isinstance(found, list) else [found]:
                assert_close(state, known.state_dict(), 0)
        version = collector.policy_version
        assert version == 3
        with pytest.raises(ValueError, match="statistics of"):
            collector.update_policy_weights_({"a": torch.ones(1)}, model_id=PATH)
        with pytest.raises(ValueError, match="keeps none"):
            collector.update_policy_weights_(known, model_id="env.transform[1]")
        with pytest.raises(AttributeError, match="transfrom"):
            collector.update_policy_weights_(known, model_id="env.transfrom[0]")
        with pytest.raises(KeyError, match="path"):
            collector.update_policy_weights_(known, model_id="critic")
        with pytest.raises(TypeError, match="give the weights"):
            collector.update_policy_weights_(model_id=PATH)
        collector.cascade_execute(f"{PATH}.freeze")
        next(iter(collector))
        assert collector.get_distant_attr(f"{PATH}.frozen") == (True if num_envs == 0 else [True, True])
        assert collector.policy_version == version


def test_by_path_before_the_first_batch() -> None:
    """The first observation was made with the collector, and is made again."""
    known = seen("VecNorm")
    with Collector(floats(NORMS["VecNorm"]().freeze()), frames_per_batch=10, total_frames=10) as collector:
        collector.update_policy_weights_(known, model_id=PATH)
        batch = next(iter(collector))
    torch.testing.assert_close(batch["p"], (batch["position"] - known.loc["position"]) / known.scale["position"])


def test_by_path_between_two_steps() -> None:
    """Statistics that another thread, or the policy, sends are there with the next step."""
    known, norm = seen("VecNorm").freeze(), NORMS["VecNorm"]().freeze()
    norm.load_state_dict(known.state_dict())
    known.load_state_dict({name: value * 2 for name, value in known.state_dict().items()})
    with Collector(floats(norm), frames_per_batch=20, total_frames=40) as collector:
        first = next(iter(collector)).clone()
        collector.update_policy_weights_(weights_dict={PATH: known, "policy": None})
        second = next(iter(collector))
        assert collector.policy_version == 2
    for batch in (first, second):  # twice of all is the same mean
        torch.testing.assert_close(batch["p"], (batch["position"] - known.loc["position"]) / known.scale["position"])


@pytest.mark.processes
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize(
    ("kind", "workers"), [(MultiSyncCollector, 2), (MultiSyncCollector, 1), (MultiAsyncCollector, 2)]
)
@pytest.mark.filterwarnings("ignore:worker")
def test_by_path_in_workers(kind: Any, workers: int, scheme: Any) -> None:
    known = {name: seen(name) for name in ("VecNorm", "VecNormV2")}
    norms = [NORMS[name]().freeze() for name in known]
    paths = [f"env.transform[{i}]" for i in range(2)]
    norms[1].out_keys = ["p2", "r2"]
    with kind(
        [lambda: floats(Compose(*norms))] * 2,
        Acting(),
        frames_per_batch=20,
        num_workers=workers,
        restart_workers=1,
        weight_sync_schemes={"policy": scheme(), **{path: scheme() for path in paths}},
    ) as collector:
        batches = iter(collector)
        next(batches)

        def states(path: str) -> list[Any]:
            found = collector.cascade_execute(f"{path}.state_dict")
            return [state for each in found for state in (each if isinstance(each, list) else [each])]

        collector.update_policy_weights_(known["VecNorm"].state_dict(), model_id=paths[0])
        collector.update_policy_weights_(weights_dict={"policy": Acting(), paths[1]: known["VecNormV2"]})
        for path, norm in zip(paths, known.values(), strict=True):
            assert len(states(path)) == 2
            for state in states(path):
                assert_close(state, norm.state_dict(), 0)
        kill_worker(collector, workers - 1)
        for _ in range(6):  # what was under way before is among the first of them
            next(batches)
        batch = next(batches)
        for state in states(paths[0]):  # its successor was sent them again
            assert_close(state, known["VecNorm"].state_dict(), 0)
        loc, scale = known["VecNorm"].loc["position"], known["VecNorm"].scale["position"]
        torch.testing.assert_close(batch["p"], (batch["position"] - loc) / scale)
        with pytest.raises(ValueError, match="statistics of"):
            collector.update_policy_weights_({"a": torch.ones(1)}, model_id=paths[0])
        with pytest.raises(KeyError, match="weight_sync_schemes"):
            collector.update_policy_weights_(known["VecNorm"], model_id="env.transform[5]")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_by_path_on_nodes(workers: int) -> None:
    """Also of nodes that have workers of their own."""
    known = seen("VecNormV2")
    with DistributedCollector(
        [partial(make_env, NORMS["VecNormV2"]())] * 2,
        Acting(),
        frames_per_batch=20,
        num_workers_per_collector=workers,
        weight_sync_schemes={"policy": DistributedWeightSyncScheme(), PATH: DistributedWeightSyncScheme()},
    ) as collector:
        assert collector.cascade_execute(f"{PATH}.freeze") == [None if workers == 1 else [None] * workers] * 2
        with pytest.raises(ValueError, match="statistics of"):
            collector.update_policy_weights_({"a": torch.ones(1)}, model_id=PATH)
        collector.update_policy_weights_(weights_dict={PATH: known, "policy": Acting()})
        found = collector.get_distant_attr(f"{PATH}.loc")
        assert len(found) == 2 * workers
        assert all((loc == known.loc).all() for loc in found)
        with pytest.raises(TypeError, match="a VecNormV2 cannot be sent"):
            collector.get_distant_attr(PATH)


@pytest.mark.processes
def test_by_path_into_processes_of_an_env() -> None:
    norm = seen("VecNorm")
    with Collector(ParallelEnv(2, partial(make_env, NORMS["VecNorm"]())), frames_per_batch=10) as collector:
        next(iter(collector))
        with pytest.raises(EnvError, match="TransformedEnv"):
            collector.update_policy_weights_(norm, model_id=PATH)
        state = collector.state_dict()  # has those of each env, and gives them back
        collector.load_state_dict(state)
    around = TransformedEnv(ParallelEnv(2, lambda: GymWrapper(FloatsEnv())), NORMS["VecNorm"]())
    with Collector(around, frames_per_batch=10) as collector:
        collector.update_policy_weights_(norm, model_id=PATH)
        assert_close(around.transform[0].state_dict(), norm.state_dict(), 0)


def test_evaluated_by_a_frozen_copy() -> None:
    norm = VecNorm(KEYS)
    policy = Acting()
    with Collector(floats(norm), policy, frames_per_batch=20, total_frames=40) as collector:
        next(iter(collector))
        state = norm.state_dict()
        with Evaluator(floats(norm.frozen_copy()), policy, max_steps=10, backend="thread") as evaluator:
            assert evaluator.evaluate(policy)
        assert_close(norm.state_dict(), state, 0)
        next(iter(collector))


def test_noops_and_a_frame_of_many() -> None:
    """Steps that a transform takes by itself count, too."""
    env = TransformedEnv(
        GymWrapper(CountingEnv(6)), Compose(NoopResetEnv(1), VecNorm(["observation"], decay=1.0).share_memory())
    )
    collected_steps = env.rollout(9, break_when_any_done=False)
    assert collected_steps.shape == (9,)
    assert float(env.transform[1].state_dict()["observation_count"]) >= 10
