"""``Collector``: counts, delivery, parameters, seeds, weights, state, errors."""

from __future__ import annotations

import gc
import pickle
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn

from counting import CountingEnv, CountingTensorDictEnv, assert_same, make_counting
from policies_for_tests import Marking, actor_critic, deterministic, recurrent, stochastic
from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector, RandomPolicy
from swath.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, Unbounded
from swath.errors import CollectorClosed, EnvDataError, NonFiniteData
from warned import warned_here


def make_env(num_envs: int | None = None, longest: int = 50) -> EnvBase:
    if num_envs is None:
        return GymWrapper(CountingEnv(longest))
    return SerialEnv(num_envs, lambda: GymWrapper(CountingEnv(longest)))


def collect(env: Any, policy: Any = None, **kwargs: Any) -> list[Any]:
    return list(Collector(env, policy, **{"frames_per_batch": 12, "total_frames": 36, **kwargs}))


# -- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:frames_per_batch=")
@settings(max_examples=150, deadline=None)
@given(
    num_envs=st.one_of(st.none(), st.integers(1, 7)),
    frames_per_batch=st.integers(1, 40),
    total_frames=st.integers(0, 150),
    init_random_frames=st.integers(0, 160),
)
def test_frame_counts_are_exact(
    num_envs: int | None, frames_per_batch: int, total_frames: int, init_random_frames: int
) -> None:
    policy = TensorDictModule(Marking(), in_keys=["observation"], out_keys=["action", "mark"])
    collector = Collector(
        make_env(num_envs, longest=9),
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        init_random_frames=init_random_frames,
    )
    expected_len = len(collector)
    batches = list(collector)
    assert len(batches) == expected_len
    assert sum(batch.numel() for batch in batches) == total_frames == collector.stats()["frames"]
    assert all(batch.names[-1] == "time" for batch in batches)
    chosen_by_policy = sum(int(batch["mark"].sum()) for batch in batches)
    assert total_frames - chosen_by_policy == min(init_random_frames, total_frames)
    # Random frames come first: within a batch, no frame of a later step is random unless all of the step before are.
    for batch in batches:
        by_step = batch["mark"].reshape(-1, batch.shape[-1]).T.reshape(-1)
        assert torch.equal(by_step, by_step.sort().values)


def test_rounding_up_warns_once_with_the_number_used() -> None:
    with warned_here(match=r"frames_per_batch=10 does not divide over 3 envs; 12 will be used") as caught:
        collector = Collector(make_env(3), frames_per_batch=10, total_frames=24)
    assert len(caught) == 1
    assert (collector.frames_per_batch, collector.requested_frames_per_batch) == (4, 12)
    assert [batch.shape for batch in collector] == [torch.Size([3, 4])] * 2


def test_what_fills_no_step_comes_from_the_first_envs() -> None:
    batches = collect(make_env(3), frames_per_batch=12, total_frames=23)
    assert [tuple(batch.shape) for batch in batches] == [(3, 4), (3, 3), (2, 1)]


def test_endless() -> None:
    collector = Collector(make_env(), frames_per_batch=3)
    batches = iter(collector)
    assert [next(batches).numel() for _ in range(4)] == [3] * 4
    assert collector.total_frames == float("inf")
    for error in (RuntimeError, TypeError):
        with pytest.raises(error, match="never ends"):
            len(collector)
    frames: Any = np.int64(3)  # which is no int to a type checker
    assert Collector(make_env(), frames_per_batch=frames, total_frames=float("inf")).rollout().numel() == 3


# -- delivery --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 4])
def test_kept_batches_stay_right(num_envs: int | None) -> None:
    env = make_env(num_envs)
    policy = actor_critic()
    copies, kept = [], []
    for batch in collect(env, policy, frames_per_batch=40, total_frames=2000):
        kept.append(batch)
        copies.append(batch.clone())
    assert len(kept) == 50
    for batch, copy in zip(kept, copies, strict=True):
        assert (batch == copy).all()
    memory = [leaf.untyped_storage().data_ptr() for batch in kept for leaf in batch.values(True, True)]
    assert len(set(memory)) == len(memory)


def test_memory_does_not_grow_when_batches_are_dropped() -> None:
    collector = Collector(make_env(8), stochastic(), frames_per_batch=8000)
    batches = iter(collector)
    sizes = []
    for round_ in range(24):
        next(batches)
        if round_ in (11, 23):
            gc.collect()
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sizes[1] - sizes[0] < 4 * 1024, f"{sizes} KiB"  # twelve batches more are 8 MiB


def test_batches_train_reshape_and_pickle() -> None:
    policy = actor_critic()
    (batch,) = collect(make_env(4), policy, total_frames=12)
    assert batch.view(-1).shape == batch.reshape(-1).shape == (12,)
    assert all(leaf.is_contiguous() for leaf in batch.values(True, True))
    output = policy(batch.select("observation"))
    loss = (output["state_value"] - batch["next", "reward"]).pow(2).mean()
    loss.backward()
    assert all(p.grad is not None for p in policy.module[2].parameters())
    weight = torch.ones(4, requires_grad=True)
    (batch["observation"] @ weight).sum().backward()
    assert weight.grad is not None
    batch["observation"].add_(1)
    again = pickle.loads(pickle.dumps(batch))
    assert (again == batch).all()


def test_return_same_td_reuses_memory() -> None:
    batches = collect(make_env(), deterministic(), return_same_td=True)
    assert len({batch["observation"].data_ptr() for batch in batches}) == 1
    assert all(batch is batches[0] for batch in batches)
    assert len({batch["observation"].data_ptr() for batch in collect(make_env(), deterministic())}) == 3


def test_keys_of_pendulum() -> None:
    (batch,) = collect(GymEnv("Pendulum-v1"), total_frames=12)
    flags = {"done", "terminated", "truncated"}
    assert set(batch.keys()) == {"action", "observation", "collector", "next", *flags}
    assert set(batch["next"].keys()) == {"observation", "reward", *flags}
    assert batch["collector", "traj_ids"].shape == batch.shape


def test_one_traj_id_for_each_episode_over_batches() -> None:
    batches = collect(make_env(3, longest=9), total_frames=360)
    data: Any = torch.cat(batches, 1)
    ids, ends = data["collector", "traj_ids"], data["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], ends[:, :-1])
    assert len(ids.unique()) == int(ends[:, :-1].sum()) + 3


# -- parameters ------------------------------------------------------------------------------------------------------


def test_max_frames_per_traj() -> None:
    policy = deterministic()
    batches = collect(make_env(3), policy, max_frames_per_traj=7, frames_per_batch=33, total_frames=330)
    data: Any = torch.cat(batches, 1)
    count = data["step_count"].squeeze(-1)
    assert int(count.max()) == 6
    assert torch.equal(data["next", "step_count"], data["step_count"] + 1)
    assert torch.equal(data["step_count"], data["observation"][..., 1:2].long())  # the env counts, too
    at_limit = data["next", "step_count"] == 7
    assert bool(data["next", "truncated"][at_limit].all())
    assert bool(data["next", "done"][at_limit].all())
    assert int(data["next", "terminated"].sum()) > 0
    ends = data["next", "done"].squeeze(-1)
    assert bool((count[:, 1:][ends[:, :-1]] == 0).all())


def test_max_frames_per_traj_of_one() -> None:
    (batch,) = collect(make_env(2), max_frames_per_traj=1, total_frames=12)
    assert bool(batch["next", "truncated"].all())
    assert batch["collector", "traj_ids"].unique().numel() == 12


def test_init_random_frames_leave_other_outputs_zero() -> None:
    (batch,) = collect(make_env(2), actor_critic(), frames_per_batch=20, total_frames=20, init_random_frames=8)
    assert torch.equal(batch["action"][:, :4].sum(-1), torch.ones(2, 4))
    assert not batch["features"][:, :4].any()
    assert bool(batch["features"][:, 4:].any(-1).all())


def test_random_frames_leave_recurrent_state_zero() -> None:
    (batch,) = collect(make_env(2), recurrent(), frames_per_batch=20, total_frames=20, init_random_frames=9)
    assert not batch["hidden"][:, :5].any()
    assert torch.equal(batch["hidden"][0, 5], torch.zeros(8))
    assert bool(batch["next", "hidden"][:, 5:].any())


def test_reset_at_each_iter_gives_fresh_ids_and_observations() -> None:
    batches = collect(make_env(2), reset_at_each_iter=True)
    assert all(bool((batch["observation"][:, 0, 1] == 0).all()) for batch in batches)
    ids = [set(batch["collector", "traj_ids"].reshape(-1).tolist()) for batch in batches]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]


def test_set_truncated_marks_the_last_step_and_does_not_reset() -> None:
    batches = collect(make_env(2, longest=10**6), set_truncated=True)
    for batch in batches:
        assert bool(batch["next", "truncated"][:, -1].all())
        assert bool(batch["next", "done"][:, -1].all())
        assert not batch["next", "terminated"].any()
        assert not batch["next", "done"][:, :-1].any()
    assert torch.equal(batches[1]["observation"][:, 0], batches[0]["next", "observation"][:, -1])
    assert torch.equal(batches[1]["collector", "traj_ids"][:, 0], batches[0]["collector", "traj_ids"][:, -1])


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: MultiSyncCollector(cat_results=-1, num_workers=2, **kwargs),
        lambda **kwargs: MultiSyncCollector(cat_results=-1, num_workers=2, preemptive_threshold=0.5, **kwargs),
        lambda **kwargs: AsyncBatchedCollector(policy=RandomPolicy(), **kwargs),
        lambda **kwargs: AsyncBatchedCollector(policy=RandomPolicy(), env_backend="threading", **kwargs),
    ],
    ids=["joined in time", "preemptive", "batched", "in threads"],
)
def test_set_truncated_marks_the_last_step_of_each_env_where_they_are_in_one_row(make: Any) -> None:
    envs = [partial(make_counting, longest=10**6)] * 4
    for batch in make(create_env_fn=envs, frames_per_batch=40, total_frames=162, set_truncated=True):
        ids = batch["collector", "traj_ids"].tolist()
        lasts = [frame for frame, name in enumerate(ids) if name not in ids[frame + 1 :]]
        for flag in ("truncated", "done"):
            assert batch["next", flag].reshape(-1).nonzero().reshape(-1).tolist() == lasts
        assert not batch["next", "terminated"].any()


def test_set_truncated_needs_the_key() -> None:
    env = CountingTensorDictEnv()
    del env.done_spec["truncated"]
    with pytest.raises(RuntimeError, match="add_truncated_keys"):
        Collector(env, frames_per_batch=4, set_truncated=True)


def test_split_trajs_pads_and_masks() -> None:
    policy = deterministic()
    (plain,) = collect(seeded(3, 6), policy, total_frames=12)
    (split,) = collect(seeded(3, 6), policy, total_frames=12, split_trajs=True)
    mask = split["collector", "mask"]
    assert int(mask.sum()) == 12
    assert torch.equal(split["observation"][mask], plain["observation"].reshape(-1, 4))
    assert not split["observation"][~mask].any()
    assert split.shape[0] == plain["collector", "traj_ids"].unique().numel()


def seeded(num_envs: int | None, longest: int = 50, seed: int = 0) -> EnvBase:
    env = make_env(num_envs, longest)
    env.set_seed(seed)
    return env


@pytest.mark.parametrize("traj_format", ["padded", "cat"])
def test_trajs_per_batch_delivers_whole_episodes_each_once(traj_format: Any) -> None:
    policy = deterministic()
    plain: Any = torch.cat(collect(seeded(3, 9), policy, total_frames=240), 1)
    batches = collect(seeded(3, 9), policy, total_frames=240, trajs_per_batch=4, traj_format=traj_format)
    seen = []
    for batch in batches:
        if traj_format == "padded":
            assert batch.shape[0] == 4
            rows = [row[row["collector", "mask"]] for row in batch]
        else:
            ids = batch["collector", "traj_ids"]
            rows = [batch[ids == i] for i in ids.unique_consecutive()]
            assert len(rows) == 4
        for row in rows:
            (traj_id,) = row["collector", "traj_ids"].unique().tolist()
            seen.append(traj_id)
            assert bool(row["next", "done"][-1])
            assert not row["next", "done"][:-1].any()
            assert torch.equal(row["observation"], plain["observation"][plain["collector", "traj_ids"] == traj_id])
    assert len(set(seen)) == len(seen)
    complete = plain["collector", "traj_ids"][plain["next", "done"].squeeze(-1)]
    assert set(seen) <= set(complete.tolist())
    assert len(complete) - len(seen) < 4


def test_trajs_per_batch_delivers_every_episode_of_the_last_rollout() -> None:
    batches = collect(make_env(None, longest=1), frames_per_batch=100, total_frames=100, trajs_per_batch=2)
    assert [batch.numel() for batch in batches] == [2] * 50


def test_trajs_per_batch_with_a_reset_of_some_envs() -> None:
    class Seven(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            out = super().reset(**kwargs)
            self.length = 7
            return out

    env = SerialEnv(2, lambda: GymWrapper(Seven()))
    collector = Collector(env, frames_per_batch=10, trajs_per_batch=1, traj_format="cat")
    batches = iter(collector)
    next(batches)
    collector.reset([0])
    for _ in range(6):
        assert next(batches)["observation"][:, 1].tolist() == list(range(7))


def test_trajs_per_batch_with_reused_memory() -> None:
    collector = Collector(
        make_env(), frames_per_batch=3, total_frames=300, trajs_per_batch=1, traj_format="cat", return_same_td=True
    )
    for episode in collector:
        assert episode["observation"][:, 1].tolist() == list(range(len(episode)))


def test_interruptor_makes_the_batch_shorter() -> None:
    class After5:
        asked = 0

        def collection_stopped(self) -> bool:
            self.asked += 1
            return self.asked % 5 == 0

    batches = collect(make_env(2), interruptor=After5(), frames_per_batch=14, total_frames=28)
    assert [tuple(batch.shape) for batch in batches] == [(2, 5), (2, 5), (2, 4)]
    data: Any = torch.cat(batches, 1)
    same = ~data["next", "done"].squeeze(-1)[:, :-1]
    assert torch.equal(data["observation"][:, 1:][same], data["next", "observation"][:, :-1][same])


def test_hooks_and_postproc() -> None:
    calls = []
    collect(
        make_env(),
        postproc=lambda batch: batch.set("mine", batch["next", "reward"] * 2),
        pre_collect_hook=lambda: calls.append("before"),
        post_collect_hook=lambda batch: calls.append("mine" in batch),
    )
    assert calls == ["before", True] * 3


def test_policy_version_is_that_of_the_frame() -> None:
    collector = Collector(make_env(2), deterministic(), frames_per_batch=8, total_frames=24, track_policy_version=True)
    versions = []
    for batch in collector:
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
        versions += batch["policy_version"].unique().tolist()
        collector.update_policy_weights_()
    assert versions == [0, 1, 2]
    assert collector.policy_version == 3


def test_compact_obs_and_no_ids() -> None:
    (batch,) = collect(make_env(), recurrent(), total_frames=12, compact_obs=True, track_traj_ids=False)
    assert ("next", "observation") not in batch.keys(True)
    assert ("next", "hidden") in batch.keys(True)
    assert "collector" not in batch.keys()  # noqa: SIM118


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_devices(device: str) -> None:
    # "cpu:0" is another device than "cpu" to everything that compares, so it takes the paths of a foreign device.
    policy = deterministic()
    collector = Collector(seeded(2), policy, frames_per_batch=12, total_frames=12, policy_device=device)
    assert (collector.policy is policy) == (device == "cpu")
    (batch,) = collector
    assert batch.device is None
    (expected,) = collect(seeded(2), policy, total_frames=12)
    assert_same(batch, expected)
    (stored,) = collect(seeded(2), policy, total_frames=12, device="cpu")
    assert stored.device == torch.device("cpu")
    assert all(leaf.device.type == "cpu" for leaf in stored.values(True, True))


def test_policy_copied_to_another_device_gets_its_weights_by_update() -> None:
    policy: Any = deterministic()
    collector = Collector(make_env(2), policy, frames_per_batch=12, policy_device="cpu:0")
    batches = iter(collector)
    with torch.no_grad():
        policy.module[0].weight.zero_()
    first = next(batches)
    assert not torch.allclose(policy(first.select("observation"))["action"], first["action"])
    collector.update_policy_weights_()
    second = next(batches)
    assert torch.allclose(policy(second.select("observation"))["action"], second["action"], atol=1e-5)


def test_cuda_without_cuda_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(RuntimeError, match="no CUDA"):
        Collector(make_env(), frames_per_batch=4, device="cuda")
    with pytest.raises(RuntimeError, match="cudagraph_policy needs CUDA"):
        Collector(make_env(), deterministic(), frames_per_batch=4, cudagraph_policy=True)


def test_policy_factory_and_random_policies() -> None:
    collect(make_env(), policy_factory=deterministic)
    narrow = RandomPolicy(GymEnv("Pendulum-v1").action_spec)
    narrow.action_spec.low = narrow.action_spec.low * 0.1
    narrow.action_spec.high = narrow.action_spec.high * 0.1
    (batch,) = collect(GymEnv("Pendulum-v1"), narrow, total_frames=12)
    assert float(batch["action"].abs().max()) <= 0.2
    assert float(batch["action"].abs().max()) > 0.01


def test_exploration_type() -> None:
    collector = Collector(
        seeded(2), stochastic(), frames_per_batch=20, total_frames=20, exploration_type=InteractionType.MODE
    )
    (batch,) = collector
    assert torch.equal(batch["action"].argmax(-1), batch["logits"].argmax(-1))


def test_check_finite_names_key_step_and_env() -> None:
    class Broken(CountingEnv):
        def _observe(self, action: float) -> Any:
            observation = super()._observe(action)
            if self.step_count == 3:
                observation[2] = float("nan")
            return observation

    def env() -> EnvBase:
        return SerialEnv(2, [lambda: GymWrapper(CountingEnv(10**6)), lambda: GymWrapper(Broken(10**6))])

    collect(env(), total_frames=12)  # passed on by default
    with pytest.raises(NonFiniteData, match=r"\('next', 'observation'\) holds NaN at step 2 .* env 1"):
        collect(env(), check_finite=True)


def test_replay_buffer_gets_every_batch() -> None:
    class Buffer(list):
        def extend(self, batch: Any) -> None:
            self.append(batch)

    buffer = Buffer()
    assert collect(make_env(), replay_buffer=buffer) == [None] * 3
    assert sum(batch.numel() for batch in buffer) == 36


# -- seeds and state -------------------------------------------------------------------------------------------------


def test_same_seed_same_bytes() -> None:
    def run(seed: int) -> Any:
        collector = Collector(make_env(3), policy, frames_per_batch=30, total_frames=90, init_random_frames=31)
        collector.set_seed(seed)
        batches = []
        for batch in collector:
            torch.rand(7)  # the program's own randomness does not matter
            batches.append(batch)
        return torch.cat(batches, 1)

    policy = stochastic()
    first, again, other = run(5), run(5), run(6)
    assert (first == again).all()
    assert not (first["observation"] == other["observation"]).all()
    assert torch.equal(first["collector", "traj_ids"][:, 0], torch.arange(3))


def test_seeded_collectors_in_threads_give_what_they_give_alone() -> None:
    policy = stochastic()

    def run(seed: int) -> Any:
        collector = Collector(make_env(2), policy, frames_per_batch=20, total_frames=400)
        collector.set_seed(seed)
        return torch.cat(list(collector), 1)

    alone = [run(1), run(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, [1, 2]))
    for one, other in zip(alone, together, strict=True):
        assert (one == other).all()


def test_set_seed_follows_the_convention() -> None:
    collector = Collector(make_env(3), frames_per_batch=3)
    assert collector.set_seed(0) == SerialEnv(3, lambda: GymWrapper(CountingEnv())).set_seed(0)
    assert collector.set_seed(0, static_seed=True) == 0


def test_reset_of_some_envs() -> None:
    collector = Collector(make_env(3, longest=10**6), frames_per_batch=12)
    batches = iter(collector)
    first = next(batches)
    collector.reset([1])
    second = next(batches)
    assert second["observation"][:, 0, 1].tolist() == [4, 0, 4]
    ids, new_ids = first["collector", "traj_ids"][:, -1], second["collector", "traj_ids"][:, 0]
    assert new_ids.tolist() == [0, 3, 2]
    assert ids.tolist() == [0, 1, 2]
    with pytest.raises(IndexError, match="there is no env 3 to reset: there are 3"):
        collector.reset([3])


def test_resume() -> None:
    policy = stochastic()

    def new() -> Collector:
        return Collector(make_env(3, longest=9), policy, frames_per_batch=12, total_frames=96, init_random_frames=50)

    collector = new()
    collector.set_seed(1)
    batches = iter(collector)
    ids = {i for _ in range(3) for i in next(batches)["collector", "traj_ids"].reshape(-1).tolist()}
    collector.update_policy_weights_()
    state = pickle.loads(pickle.dumps(collector.state_dict()))
    ahead = [next(batches)["next", "reward"].numel() for _ in range(2)]
    assert ahead == [12, 12]

    def resumed() -> tuple[Collector, list[Any]]:
        other = new()
        other.load_state_dict(state)
        assert other.stats()["frames"] == 36
        assert other.policy_version == 1
        return other, list(other)

    (one, data), (_, again) = resumed(), resumed()
    assert one.stats()["frames"] == 96
    assert sum(batch.numel() for batch in data) == 60
    assert not {i for batch in data for i in batch["collector", "traj_ids"].reshape(-1).tolist()} & ids
    whole: Any = torch.cat(data, 1)
    assert bool((whole == torch.cat(again, 1)).all())  # envs, actions and ids go on as they would
    random_frames = int((~whole["logits"].any(-1)).sum())
    assert random_frames == 14


def test_a_finished_collector_stays_finished() -> None:
    collector = Collector(make_env(), deterministic(), frames_per_batch=12, total_frames=12)
    list(collector)
    other = Collector(make_env(), deterministic(), frames_per_batch=12, total_frames=12)
    other.load_state_dict(collector.state_dict())
    assert list(other) == []


# -- weights ---------------------------------------------------------------------------------------------------------


def test_update_policy_weights_in_every_way() -> None:
    policy, other = deterministic(), deterministic()
    collector = Collector(make_env(), policy, frames_per_batch=4)

    def zero() -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()

    sources = {
        "module": other,
        "TensorDict": TensorDict.from_module(other).data,
        "state dict": other.state_dict(),
        "nested dict": TensorDict.from_module(other).data.to_dict(),
    }
    for name, source in sources.items():
        for call in (
            lambda s: collector.update_policy_weights_(s),
            lambda s: collector.update_policy_weights_(weights=s),
            lambda s: collector.update_policy_weights_(weights_dict={"policy": s}),
            lambda s: collector.update_policy_weights_(s, model_id="policy"),
        ):
            zero()
            call(source)
            assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True)), name
    collector.update_policy_weights_(policy=other)
    collector.update_policy_weights_()
    assert collector.policy_version == 18


def test_weights_that_do_not_fit_change_nothing() -> None:
    policy = deterministic()
    before = [p.clone() for p in policy.parameters()]
    collector = Collector(make_env(), policy, frames_per_batch=4)
    with pytest.raises(KeyError, match=r"module.0.weigth.*the policy has 'module.0.weight'"):
        collector.update_policy_weights_({"module.0.weigth": torch.zeros(16, 4)})
    wrong = policy.state_dict()
    wrong["module.0.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'module.0.weight' has shape \(2, 2\)"):
        collector.update_policy_weights_(wrong)
    wrong_calls: list[dict[str, Any]] = [{"weights": 1, "policy": 2}, {"model_id": "policy", "weights_dict": {}}]
    for bad in wrong_calls:
        with pytest.raises(ValueError, match="update_policy_weights_"):
            collector.update_policy_weights_(**bad)
    with pytest.raises(KeyError, match="no model 'critic'"):
        collector.update_policy_weights_(model_id="critic")
    with pytest.raises(ValueError, match="no worker 3"):
        collector.update_policy_weights_(worker_ids=3)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), before, strict=True))
    assert collector.policy_version == 0


def test_update_of_tied_layers() -> None:
    layer = nn.Linear(4, 4)
    policy = TensorDictModule(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)), ["observation"], ["action"])
    collector = Collector(make_env(), policy, frames_per_batch=4)
    for source in (policy.state_dict(), TensorDict.from_module(policy).data, policy):
        collector.update_policy_weights_(source)
    Collector(make_env(), frames_per_batch=4).update_policy_weights_()


def test_update_without_weights_is_harmless_for_a_function() -> None:
    collector = Collector(make_env(), lambda observation: observation[:3], frames_per_batch=4)
    collector.update_policy_weights_()
    with pytest.raises(TypeError, match="no weights"):
        collector.update_policy_weights_(deterministic())


# -- life cycle ------------------------------------------------------------------------------------------------------


def test_the_end_closes_the_env_and_break_does_not() -> None:
    env = make_env()
    collector = Collector(env, frames_per_batch=4, total_frames=12)
    for _ in collector:
        break
    assert not env.is_closed
    assert sum(batch.numel() for batch in collector) == 8
    assert env.is_closed
    assert list(collector) == []
    assert collector.next() is None
    collector.shutdown()


def test_next_and_rollout() -> None:
    collector = Collector(make_env(), frames_per_batch=4, total_frames=12)
    assert collector.rollout().numel() == 4
    assert collector.stats()["frames"] == 0
    count = 0
    while (batch := collector.next()) is not None:
        count += batch.numel()
    assert count == 12


def test_context_manager_and_use_after_shutdown() -> None:
    with Collector(make_env(), frames_per_batch=4) as collector:
        next(iter(collector))
    collector.shutdown()
    with pytest.raises(CollectorClosed, match="shut down after 4 frames"):
        next(iter(collector))
    with pytest.raises(CollectorClosed):
        collector.rollout()


@pytest.mark.processes
def test_import_changes_nothing() -> None:
    code = """
import logging, multiprocessing, random, warnings, numpy, torch, tensordict, gymnasium
def state():
    return (
        torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True), list(warnings.filters),
        torch.get_rng_state().sum().item(), random.getstate(), logging.root.handlers, logging.root.level,
        numpy.random.get_state()[1].tolist(), torch.get_default_dtype(), torch.is_grad_enabled(),
    )
before = state()
import swath, swath.collectors, swath.envs, swath.modules, swath.testing
assert state() == before, "importing swath changed the program's state"
import sys
assert "torchrl" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1, got 0"),
        ({"frames_per_batch": 2.5}, TypeError, "frames_per_batch must be an integer"),
        ({"frames_per_batch": None}, TypeError, "needs frames_per_batch"),
        ({"frames_per_batch": None, "frame_per_batch": 3}, TypeError, "did you mean 'frames_per_batch'"),
        ({"max_frames_per_traj": 2.5}, TypeError, "max_frames_per_traj must be an integer"),
        ({"trajs_per_batch": 1.5}, TypeError, "trajs_per_batch must be an integer"),
        ({"policy": deterministic(), "policy_factory": deterministic}, TypeError, "not both"),
        ({"total_frame": 3}, TypeError, r"'total_frame' \(did you mean 'total_frames'\?\)"),
        ({"reset_when_done": False}, ValueError, "reset_when_done"),
        ({"traj_format": "cat"}, ValueError, "goes with trajs_per_batch"),
        ({"trajs_per_batch": 2, "traj_format": "ragged"}, ValueError, "'padded' or 'cat'"),
        ({"trajs_per_batch": 0}, ValueError, "at least 1"),
        ({"split_trajs": True, "track_traj_ids": False}, ValueError, "split_trajs needs"),
        ({"create_env_kwargs": {"a": 1}}, RuntimeError, "made already"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    env = make_env()
    with pytest.raises(error, match=message):
        Collector(env, **{"frames_per_batch": 4, **kwargs})
    assert not env.is_closed
    env.rollout(2)


def test_bad_envs() -> None:
    with pytest.raises(ValueError, match=r"one env, got 2; put several into SerialEnv"):
        Collector([make_env, make_env], frames_per_batch=4)
    with pytest.raises(TypeError, match="made is of type int, which is no env; a collector takes an env"):
        Collector(lambda: 3, frames_per_batch=4)
    with pytest.raises(TypeError, match="of type int; a collector takes an env, or a function"):
        Collector(3, frames_per_batch=4)


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    collect(make_env(), extend_buffer=True, weight_updater=None, weight_sync_schemes=None, use_buffers=True)


def test_envs_as_users_have_them() -> None:
    for env in (
        "CartPole-v1",
        lambda: gymnasium.make("CartPole-v1"),
        gymnasium.make("CartPole-v1"),
        [lambda: GymEnv("CartPole-v1")],
    ):
        (batch,) = collect(env, total_frames=12)
        assert batch["observation"].shape == (12, 4)
    (batch,) = collect(gymnasium.make_vec("CartPole-v1", num_envs=2), total_frames=12)
    assert batch.shape == (2, 6)


class Breaks(CountingEnv):
    """Goes wrong at its 6th step, in a way of choice."""

    def __init__(self, how: str) -> None:
        super().__init__(longest=10**6)
        self.how = how

    def step(self, action: Any) -> Any:
        rest: list[Any]
        observation, *rest = super().step(action)
        if self.step_count == 6:
            if self.how == "raises":
                raise KeyError("mine")
            if self.how == "reward":
                rest[0] = None
            if self.how == "four values":
                return observation, *rest[:2], {}
            observation = {
                "shape": observation[:2],
                "broadcastable shape": observation[:1],
                "dtype": observation.astype("float64"),
                "none": None,
                "list": observation.tolist(),
                "dict": {"observation": observation},
            }.get(self.how, observation)
        return observation, *rest


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", KeyError, "mine"),
        ("shape", EnvDataError, r"env 1 .*step.*'observation' has shape \(2,\), its space says \(4,\)"),
        ("broadcastable shape", EnvDataError, r"has shape \(1,\), its space says \(4,\)"),
        ("dtype", EnvDataError, r"has dtype float64, its space says float32"),
        ("none", EnvDataError, "env 1 .*is a NoneType, not a NumPy array"),
        ("list", EnvDataError, "is a list, not a NumPy array of float32"),
        ("dict", EnvDataError, "env 1"),
        ("reward", EnvDataError, "env 1 .*step: the reward is None, not a number"),
        ("four values", EnvDataError, r"must return \(observation, reward, terminated, truncated, info\)"),
    ],
)
def test_an_env_that_breaks_is_named_and_nothing_is_lost(how: str, error: type[Exception], message: str) -> None:
    env = SerialEnv(2, [lambda: GymWrapper(CountingEnv(10**6)), lambda: GymWrapper(Breaks(how))])
    collector = Collector(env, deterministic(), frames_per_batch=8, total_frames=80)
    batches = []
    with pytest.raises(error, match=message) as caught:
        batches.extend(collector)
    notes = "".join(getattr(caught.value, "__notes__", []))
    if how == "raises":
        assert "raised by env 1 (Breaks) in its step" in notes
    assert "collector.partial_batch" in notes
    partial = collector.partial_batch
    assert partial is not None
    assert env.is_closed
    assert sum(batch.numel() for batch in batches) == 0 or len(batches) == 1
    whole: Any = torch.cat([*batches, partial], 1) if batches else partial
    assert whole.shape == (2, 5)
    assert whole["next", "observation"][:, :, 1].tolist() == [[1, 2, 3, 4, 5]] * 2


def test_a_reset_that_raises_loses_nothing() -> None:
    class BreaksInReset(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.episode == 4:
                raise ZeroDivisionError("fifth reset")
            return super().reset(**kwargs)

    collector = Collector(seeded_env := GymWrapper(BreaksInReset(9)), deterministic(), frames_per_batch=100)
    with pytest.raises(ZeroDivisionError, match="fifth reset"):
        next(iter(collector))
    assert seeded_env.is_closed
    partial = collector.partial_batch
    assert partial is not None
    assert partial["collector", "traj_ids"].unique().tolist() == [0, 1, 2, 3]
    assert int(partial["next", "done"].sum()) == 3
    assert torch.equal(partial["next", "observation"][:, 1], partial["observation"][:, 1] + 1)


def test_an_env_that_raises_at_once_leaves_an_empty_batch() -> None:
    class BreaksAtOnce(CountingEnv):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError

    collector = Collector(GymWrapper(BreaksAtOnce()), frames_per_batch=8)
    with pytest.raises(ZeroDivisionError) as caught:
        next(iter(collector))
    assert collector.partial_batch is not None
    assert collector.partial_batch.shape == (0,)
    assert "partial_batch" not in "".join(caught.value.__notes__)


def test_a_hook_that_raises_leaves_no_batch_that_was_delivered() -> None:
    calls = []

    def hook() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    collector = Collector(make_env(), frames_per_batch=4, pre_collect_hook=hook)
    with pytest.raises(ZeroDivisionError):
        list(collector)
    assert collector.partial_batch is None


def test_a_postproc_that_raises_or_forgets_to_return_loses_nothing() -> None:
    for postproc, error in ((lambda batch: 1 // 0, ZeroDivisionError), (lambda batch: None, TypeError)):
        collector = Collector(make_env(), frames_per_batch=4, postproc=postproc)
        with pytest.raises(error) as caught:
            next(iter(collector))
        assert collector.partial_batch is not None
        assert collector.partial_batch.shape == (4,)
        assert "swath: 0 frames were delivered before this; 4 more" in "".join(caught.value.__notes__)


def test_next_after_an_error() -> None:
    collector = Collector(GymWrapper(Breaks("raises")), frames_per_batch=4)
    collector.next()
    with pytest.raises(KeyError):
        collector.next()
    with pytest.raises(CollectorClosed):
        collector.next()


def test_ctrl_c_leaves_a_collector_that_can_go_on() -> None:
    class Interrupted(CountingEnv):
        total = 0

        def step(self, action: Any) -> Any:
            self.total += 1
            if self.total == 13:
                raise KeyboardInterrupt
            return super().step(action)

    env = GymWrapper(Interrupted(10**6))
    collector = Collector(env, deterministic(), frames_per_batch=8, total_frames=24)
    batches = []
    with pytest.raises(KeyboardInterrupt):
        batches.extend(collector)
    assert collector.partial_batch is not None
    assert collector.partial_batch["next", "observation"][:, 1].tolist() == [9, 10, 11, 12]
    assert not env.is_closed
    rest = list(collector)
    assert sum(batch.numel() for batch in rest) == 16
    data: Any = torch.cat(rest)
    assert data["observation"][:, 1].tolist() == list(range(16))
    assert data["collector", "traj_ids"].unique().tolist() == [1]


def test_random_frames_are_exact_after_ctrl_c() -> None:
    """A batch longer than a strip, part of which was delivered to where it is thrown away."""

    class Interrupted(CountingEnv):
        total = 0

        def step(self, action: Any) -> Any:
            self.total += 1
            if self.total == 1700:
                raise KeyboardInterrupt
            return super().step(action)

    policy = TensorDictModule(lambda observation: torch.full((3,), -1.0), ["observation"], ["action"])
    collector = Collector(
        GymWrapper(Interrupted()), policy, frames_per_batch=1000, total_frames=4000, init_random_frames=1800
    )
    batches: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        batches.extend(collector)
    batches.extend(collector)  # (what the first loop was given is in it as well)
    data: Any = torch.cat(batches)
    assert len(data) == 4000
    assert int((data["action"] != -1).any(-1).sum()) == 1800


def test_an_env_that_raises_in_its_constructor_or_reset() -> None:
    def broken() -> EnvBase:
        raise ZeroDivisionError("constructor")

    with pytest.raises(ZeroDivisionError, match="constructor"):
        Collector(broken, frames_per_batch=4)

    class BrokenReset(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            raise ZeroDivisionError("reset")

    with pytest.raises(ZeroDivisionError, match="reset") as caught:
        Collector(GymWrapper(BrokenReset()), frames_per_batch=4)
    assert "raised by env 0 (BrokenReset) in its reset" in "".join(caught.value.__notes__)


def test_a_dtype_that_differs_from_the_space_from_the_start_is_cast_with_one_warning() -> None:
    class Doubles(CountingEnv):
        def _observe(self, action: float) -> Any:
            return super()._observe(action).astype("float64")

    with warned_here(match=r"'observation' is float64, its space says float32") as caught:
        (batch,) = collect(SerialEnv(2, lambda: GymWrapper(Doubles(10**6))), deterministic(), total_frames=12)
    assert len(caught) == 1
    assert batch["observation"].dtype == torch.float32
    assert batch["observation"][:, :2, 1].tolist() == [[0, 1], [0, 1]]


def test_a_tensordict_env_that_breaks() -> None:
    class BreaksLate(CountingTensorDictEnv):
        def _step(self, tensordict: Any) -> Any:
            out = super()._step(tensordict)
            if self.inner.step_count == 3:
                out["observation"] = out["observation"].double()
            return out

    with pytest.raises(EnvDataError, match=r"'observation' has dtype torch\.float64"):
        collect(BreaksLate(10**6))


def test_step_count_key_taken() -> None:
    env = CountingTensorDictEnv()
    env.observation_spec["step_count"] = Unbounded((1,), torch.int64)
    with pytest.raises(ValueError, match="step_count"):
        Collector(env, frames_per_batch=4, max_frames_per_traj=3)


def test_stats() -> None:
    collector = Collector(make_env(2), frames_per_batch=4, total_frames=8)
    list(collector)
    stats = collector.stats()
    assert (stats["frames"], stats["batches"], stats["completed"], stats["num_envs"]) == (8, 2, True, 2)
    assert stats["fps"] > 0


def test_random_actions_follow_the_action_mask() -> None:
    class Masked(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gymnasium.spaces.Dict(
                observation=self.observation_space, action_mask=gymnasium.spaces.MultiBinary(3)
            )

        def _observe(self, action: float) -> Any:
            mask = self.np_random.permutation([1, 1, 0]).astype("int8")
            return {"observation": super()._observe(action), "action_mask": mask}

    for categorical in (False, True):
        env = SerialEnv(2, lambda categorical=categorical: GymWrapper(Masked(), categorical))
        policy = (lambda observation, action_mask: action_mask.argmax(-1)) if categorical else None
        (batch,) = collect(env, policy, frames_per_batch=200, total_frames=200, init_random_frames=151)
        choice = batch["action"] if categorical else batch["action"].argmax(-1)
        assert bool(batch["action_mask"].gather(-1, choice.unsqueeze(-1)).all())
        assert choice.unique().tolist() == [0, 1, 2]
    data = GymWrapper(Masked(), categorical_action_encoding=True).rollout(50)
    assert bool(data["action_mask"].gather(-1, data["action"].unsqueeze(-1)).all())


def test_methods_that_reach_workers_reach_this_process() -> None:
    collector = Collector(make_env(2), deterministic(), frames_per_batch=8, replay_buffer=None)
    assert collector.get_distant_attr("env.num_workers") == 2
    assert collector.map_fn("env.set_seed", [(3,), (4,)]) == [collector.env.set_seed(3), collector.env.set_seed(4)]
    fake, real = collector.fake_tensordict(), collector.rollout()
    assert fake.shape == real.shape
    for key in real.keys(True, True):
        assert fake.get(key).dtype == real.get(key).dtype
        assert not fake.get(key).any()


def test_profile(tmp_path: Any) -> None:
    collector = Collector(make_env(2), deterministic(), frames_per_batch=8, total_frames=40)
    with pytest.raises(ValueError, match="nothing is profiled"):
        collector.enable_profile(num_rollouts=1, warmup_rollouts=1)
    collector.enable_profile(num_rollouts=3, warmup_rollouts=1, save_path=tmp_path / "trace.json")
    list(collector)
    assert "addmm" in (tmp_path / "trace.json").read_text()
    with pytest.raises(RuntimeError, match="before the first batch"):
        collector.enable_profile()


# -- the front door ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_collectors": 1.5}, TypeError, "num_collectors must be an integer, got 1.5"),
        ({"num_collectors": True}, TypeError, "num_collectors must be an integer"),
        ({"num_collectors": 0}, ValueError, "at least 1, got 0"),
        ({"num_collectors": 2, "backend": "thread"}, ValueError, "backend must be one of direct, process"),
        ({"backend": "direct", "sync": True}, ValueError, "sync goes with workers"),
        ({"backend": "direct", "backend_options": {"num_workers": 2}}, ValueError, "go with workers"),
        ({"backend": "process", "backend_options": {"policy": None}}, ValueError, "an argument of Collector itself"),
        (
            {"backend": "process", "backend_options": {"num_workers": 1}, "num_workers": 1},
            ValueError,
            "num_workers was given as an argument already",
        ),
    ],
)
def test_bad_backends(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Collector("CartPole-v1", frames_per_batch=10, **arguments)


def test_several_collectors_in_this_process_are_a_serial_env() -> None:
    collector: Any = Collector("CartPole-v1", backend="direct", num_collectors=3, frames_per_batch=30, total_frames=30)
    assert [batch.shape for batch in collector] == [(3, 10)]


def test_a_random_policy_draws_from_its_spec() -> None:
    env = GymEnv("CartPole-v1")
    policy = RandomPolicy(env.action_spec)
    assert policy(env.reset())["action"].sum() == 1
    assert RandomPolicy(env.full_action_spec)(env.reset())["action"].sum() == 1
    assert "OneHot" in repr(policy)
    with pytest.raises(RuntimeError, match=r"RandomPolicy\(env.action_spec\)"):
        RandomPolicy()(env.reset())


# -- Ctrl-C while a policy is prepared ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "step"), [(deterministic, "_act_on_one_tensor"), (actor_critic, "_operation")])
def test_ctrl_c_while_a_policy_is_prepared_leaves_nothing_old(
    monkeypatch: pytest.MonkeyPatch, policy: Any, step: str
) -> None:
    """Its parameters were replaced: after the interrupt it must not go on with the old ones, nor with none."""
    module = policy()
    collector = Collector(GymWrapper(CountingEnv()), module, frames_per_batch=10)
    next(iter(collector))
    for linear in (each for each in module.modules() if isinstance(each, nn.Linear)):
        linear.weight = nn.Parameter(torch.zeros_like(linear.weight))
        linear.bias = nn.Parameter(torch.full_like(linear.bias, 2.0))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"swath.rollout.plan.BoundPolicy.{step}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(collector))
    batch: Any = next(iter(collector))
    with torch.no_grad():
        expected = module(batch.clone())["action"]
    assert torch.equal(batch["action"], expected)
