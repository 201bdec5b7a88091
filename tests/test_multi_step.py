"""n-step transitions: of batches, and of what is written to replay buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from counting import CountingEnv
from numbered import ENV, EPISODE, TICK, make_numbered, numbered_envs
from sequence_checks import FLAGS, assert_same, looped, random_batch
from swath.collectors import AsyncBatchedCollector, Collector, MultiCollector
from swath.data import (
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    MultiStepTransform,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from swath.envs import Compose, GymEnv, GymWrapper, RewardScaling, SerialEnv, TransformedEnv
from swath.modules import RandomPolicy


def counting() -> GymWrapper:
    return GymWrapper(CountingEnv(longest=9))


def cat(parts: list[Any], dim: int = -1) -> Any:
    return torch.cat(parts, dim)


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_steps", [1, 2, 3, 5, 8, 40])
def test_as_a_loop_would(n_steps: int, seed: int) -> None:
    chance = [0.0, 0.1, 0.3, 0.6, 1.0][seed % 5]
    batch = random_batch(3, 1 + 4 * seed, seed=seed, chance=chance, ids=bool(seed % 2))
    before = batch.clone()
    assert_same(MultiStep(gamma=0.9, n_steps=n_steps)(batch), looped(batch, n_steps, 0.9))
    assert_same(batch, before)


def test_of_one_env_and_of_more_dimensions() -> None:
    batch = random_batch(2, 3, 11)
    expected = looped(batch.reshape(6, 11), 4, 0.9)
    made = MultiStep(0.9, 4)(batch)
    assert_same(made.reshape(6, 11), expected)
    assert_same(MultiStep(0.9, 4)(batch[1, 2]), expected[5])
    transposed = batch[0].transpose(0, 1)
    transposed.names = ["time", None]
    turned = MultiStep(0.9, 4)(transposed)
    assert turned.names == ["time", None]
    assert_same(turned.transpose(0, 1), expected[:3])


def test_nothing_is_nothing() -> None:
    made = MultiStep(0.9, 4)(random_batch(2, 7)[:, :0])
    assert made.shape == (2, 0)
    assert made["steps_to_next_obs"].shape == (2, 0)


def test_one_step_copies_nothing_and_more_steps_copy_only_what_moves() -> None:
    batch = random_batch(2, 7)
    made = MultiStep(0.9, 1)(batch)
    assert made["next", "pixels"].data_ptr() == batch["next", "pixels"].data_ptr()
    made = MultiStep(0.9, 3)(batch)
    assert made["observation"].data_ptr() == batch["observation"].data_ptr()
    assert made["next", "original_reward"].data_ptr() == batch["next", "reward"].data_ptr()


def test_what_is_learned_from_a_terminal_step_is_its_reward() -> None:
    """A chain of 4 states with a reward of 1 at its end: with flags of single steps, values grow beyond it."""
    steps = torch.arange(4)
    done = (steps == 3).unsqueeze(-1)
    after = {"observation": steps + 1, "reward": done * 1.0, "done": done, "terminated": done}
    chain = TensorDict(observation=steps, next=TensorDict(after, batch_size=4), batch_size=4)
    for done_keys, expected in ((None, [0.9**3, 0.9**2, 0.9, 1.0]), (FLAGS, None)):
        made = MultiStep(0.9, 3, done_keys=done_keys)(chain)
        values = torch.zeros(5)
        values[4] = 5.0  # a network says anything of a terminal state
        for _ in range(20):
            bootstrap = ~made["next", "terminated"].squeeze(-1) * made["gamma"] * values[made["next", "observation"]]
            values[:4] = made["next", "reward"].squeeze(-1) + bootstrap
        if expected is None:
            assert values[1] > 1
        else:
            torch.testing.assert_close(values[:4], torch.tensor(expected))


def test_a_truncated_step_is_bootstrapped_and_not_crossed() -> None:
    batch = random_batch(1, 6, chance=0)
    for flag in ("done", "truncated"):
        batch["next", flag][0, 2] = True
    made = MultiStep(1.0, 3)(batch)
    assert made["steps_to_next_obs"].tolist() == [[3, 2, 1, 3, 2, 1]]
    assert made["next", "truncated"].reshape(-1).tolist() == [True] * 3 + [False] * 3
    assert not made["next", "terminated"].any()
    assert made["next", "observation"].reshape(-1).tolist() == [3, 3, 3, 6, 6, 6]


def test_flags_that_are_named_stay() -> None:
    batch = random_batch(2, 20)
    made = MultiStep(0.9, 3, done_keys=["done", "truncated"])(batch)
    moved = MultiStep(0.9, 3)(batch)
    for flag in ("done", "truncated"):
        assert torch.equal(made["next", flag], batch["next", flag])
        assert not torch.equal(moved["next", flag], batch["next", flag])
    assert torch.equal(made["next", "terminated"], moved["next", "terminated"])


def test_a_trajectory_that_was_cut_ends_where_its_id_does() -> None:
    batch = random_batch(1, 6, chance=0)
    batch["collector", "traj_ids"] = torch.tensor([[4, 4, 4, 7, 7, 7]])
    ends = torch.tensor([[False, False, True, False, False, True]])
    assert_same(MultiStep(0.9, 3)(batch), looped(batch, 3, 0.9, ends))


def test_what_only_fills_up_is_no_step() -> None:
    """Of trajectories in rows, also the one that goes on in the next batch."""
    for batch in Collector(counting, frames_per_batch=40, total_frames=80, split_trajs=True):
        made, mask = MultiStep(0.9, 4)(batch), batch["collector", "mask"]
        left = mask.flip(-1).long().cumsum(-1).flip(-1)
        assert torch.equal(made["steps_to_next_obs"][mask], left.clamp_max(4)[mask])
        assert torch.equal(made["nonterminal"], mask & (left > 1))
        there: Any = made[mask]
        assert (there["next", "observation"][:, 0] == there["observation"][:, 0]).all()
        steps = there["next", "observation"][:, 1] - there["observation"][:, 1]
        assert torch.equal(steps, there["steps_to_next_obs"].float())


def test_what_only_fills_up_needs_no_ids_to_be_told() -> None:
    batch = random_batch(2, 6, chance=0, ids=False)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    ends = torch.zeros(2, 6, dtype=torch.bool)
    ends[1, 2] = True
    expected = looped(batch, 4, 0.9, ends)
    expected["nonterminal"] &= mask
    for key, make in (
        (("collector", "mask"), MultiStep(0.9, 4)),
        ("mask", MultiStep(0.9, 4, mask_key="mask")),
        (("other", "mask"), MultiStep(0.9, 4, mask_key=("other", "mask"))),
    ):
        padded = batch.clone().set(key, mask)
        assert_same(make(padded), expected.clone().set(key, mask))


def test_in_a_collector_s_postproc() -> None:
    torch.manual_seed(0)
    plain = list(Collector(counting, frames_per_batch=30, total_frames=90))
    CountingEnv.made = 0
    torch.manual_seed(0)
    postproc = MultiStep(0.9, 3)
    batches = list(Collector(counting, frames_per_batch=30, total_frames=90, postproc=postproc))
    for batch, raw in zip(batches, plain, strict=True):
        assert_same(batch, postproc(raw))


def test_keys_of_other_names_and_several_rewards() -> None:
    batch = random_batch(2, 15)
    expected = looped(batch, 3, 0.9)
    after = batch["next"]
    over, cost = after["done"].clone(), 2 * after["reward"]
    renamed = batch.clone()
    renamed["next"] = TensorDict(
        {"over": over, "observation": after["observation"], "team": {"gain": after["reward"], "cost": cost}},
        batch_size=batch.shape,
    )
    made = MultiStep(0.9, 3, reward_keys=[("team", "gain"), ("team", "cost")], done_key="over")(renamed)
    torch.testing.assert_close(made["next", "team", "gain"], expected["next", "reward"])
    torch.testing.assert_close(made["next", "team", "cost"], 2 * expected["next", "reward"])
    assert torch.equal(made["next", "team", "original_cost"], cost)
    assert torch.equal(made["next", "over"], expected["next", "done"])
    one = MultiStep(0.9, 3, reward_keys=[("team", "gain")], done_key="over")(renamed)
    assert torch.equal(one["next", "original_reward"], after["reward"])
    assert torch.equal(one["next", "team", "cost"][:, 0], cost[torch.arange(2), one["steps_to_next_obs"][:, 0] - 1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16, torch.float16])
def test_rewards_of_every_dtype(dtype: torch.dtype) -> None:
    batch = random_batch(2, 9)
    batch["next", "reward"] = (batch["next", "reward"] * 3).abs().to(dtype)
    made = MultiStep(0.5, 3)(batch)["next", "reward"]
    assert made.dtype == (dtype if dtype.is_floating_point else torch.float32)
    as_double = batch.clone()
    as_double["next", "reward"] = batch["next", "reward"].double()
    expected = MultiStep(0.5, 3)(as_double)["next", "reward"]
    torch.testing.assert_close(made.double(), expected, rtol=1e-2, atol=1e-2)


def test_what_is_no_number_stays_in_its_episode() -> None:
    batch = random_batch(1, 6, chance=0)
    batch["next", "done"][0, 2] = True
    batch["next", "reward"][0, 3] = torch.inf
    batch["next", "reward"][0, 5] = torch.nan
    assert MultiStep(0.9, 3)(batch)["next", "reward"].reshape(-1).isfinite().tolist() == [True] * 3 + [False] * 3


def test_rewards_of_many_agents_with_one_end() -> None:
    batch = random_batch(2, 12, reward_shape=(4, 1))
    made = MultiStep(0.9, 3)(batch)
    for agent in range(4):
        one = batch.clone()
        one["next", "reward"] = batch["next", "reward"][:, :, agent]
        torch.testing.assert_close(made["next", "reward"][:, :, agent], looped(one, 3, 0.9)["next", "reward"])


def test_agents_whose_episodes_end_one_by_one() -> None:
    agents = [random_batch(2, 12, seed=seed, ids=False) for seed in range(3)]
    after = {"agents": torch.stack([each["next"].exclude("pixels") for each in agents], 2)}
    batch = TensorDict(next=TensorDict(after, batch_size=(2, 12)), batch_size=(2, 12))  # type: ignore[arg-type]
    make = MultiStep(0.9, 3, reward_keys=[("agents", "reward")], done_key=("agents", "done"))
    made = make(batch)
    assert made["next", "agents"].batch_size == (2, 12, 3)
    for number, each in enumerate(agents):
        expected = looped(each, 3, 0.9)
        for key in ("observation", "reward", *FLAGS):
            torch.testing.assert_close(made["next", "agents", key][:, :, number], expected["next", key])
        assert torch.equal(made["steps_to_next_obs"][:, :, number, 0], expected["steps_to_next_obs"])
    batch["next", "state"] = torch.zeros(2, 12, 5)
    with pytest.raises(RuntimeError, match="one by one, and something in 'next' has shape"):
        make(batch)


def test_what_is_no_tensor_moves_too() -> None:
    batch = random_batch(1, 6, chance=0)[0].exclude(("next", "pixels"))
    stack: Any = NonTensorStack
    batch["next", "text"] = stack(*"abcdef")
    batch["next", "agents"] = LazyStackedTensorDict(
        *[TensorDict(x=torch.full((t + 1,), t), batch_size=()) for t in range(6)], stack_dim=0
    )
    made: Any = MultiStep(0.9, 3)(batch)
    assert list(made["next", "text"]) == list("cdefff")
    assert [int(each["x"][0]) for each in made["next", "agents"].unbind(0)] == [2, 3, 4, 5, 5, 5]


def test_bad_arguments_and_batches() -> None:
    for gamma in (0, 1.1, -1):
        with pytest.raises(ValueError, match="gamma is a discount"):
            MultiStep(gamma, 3)
    for n_steps in (0, -1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="n_steps is a number of steps, 1 or more"):
            MultiStepTransform(n_steps, 0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reward_keys is empty"):
        MultiStep(0.9, 3, reward_keys=[])(random_batch(2, 3))
    with pytest.raises(KeyError, match=r"no \('next', 'over'\) in this batch, which says where episodes end"):
        MultiStep(0.9, 3, done_key="over")(random_batch(2, 3))
    with pytest.raises(KeyError, match=r"no \('next', 'gain'\) in this batch, which is summed"):
        MultiStep(0.9, 3, reward_keys=["gain"])(random_batch(2, 3))
    with pytest.raises(TypeError, match="takes a batch as a TensorDict, got Tensor"):
        MultiStep(0.9, 3)(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no batch size"):
        MultiStep(0.9, 3)(TensorDict())
    with pytest.raises(ValueError, match="as postproc or MultiStepTransform in the buffer, not both"):
        MultiStep(0.9, 3)(MultiStep(0.9, 3)(random_batch(2, 9)))


def test_not_for_envs() -> None:
    for transform in (MultiStep(0.9, 3), MultiStepTransform(3, 0.9)):
        with pytest.raises(TypeError, match="is for batches of steps, and an env gives one: write"):
            TransformedEnv(GymEnv("CartPole-v1"), transform)
        with pytest.raises(TypeError, match="is for batches of steps"):
            Compose(transform)
    with pytest.raises(TypeError, match=r"there is swath.data.MultiStep\(gamma, n_steps\)"):
        list(Collector("CartPole-v1", frames_per_batch=5, total_frames=5, postproc=MultiStepTransform(3, 0.9)))
    with pytest.raises(TypeError, match=r"write TransformedEnv\(env, RewardScaling"):
        ReplayBuffer(storage=LazyTensorStorage(10)).append_transform(RewardScaling(0, 1))


# -- buffers, extended by hand -----------------------------------------------------------------------------------------


def buffer(n_steps: int = 3, size: int = 10_000, ndim: int = 1, **kwargs: Any) -> Any:
    storage = LazyTensorStorage(size, ndim=ndim)
    return TensorDictReplayBuffer(storage=storage, transform=MultiStepTransform(n_steps, 0.9), **kwargs)


@pytest.mark.parametrize("sizes", [[50], [10, 20, 20], [1] * 50, [2, 1, 30, 1, 16], [3, 47], [4, 46]])
@pytest.mark.parametrize("n_steps", [1, 3, 7])
def test_batches_make_no_difference(n_steps: int, sizes: list[int]) -> None:
    whole = random_batch(2, 50, chance=0.1)
    rb = buffer(n_steps, ndim=2)
    written = 0
    for part in whole.split(sizes, 1):
        index = rb.extend(part)
        written += part.shape[1]
        assert len(rb) == 2 * max(0, written - n_steps)
        assert index.numel() == 2 * min(part.shape[1], max(0, written - n_steps))
    expected = looped(whole, n_steps, 0.9)[:, :-n_steps]
    assert_same(rb[:].exclude("index").reshape(2, -1), expected)


def test_frames_one_by_one_and_in_lists() -> None:
    whole = random_batch(20)
    expected = looped(whole.unsqueeze(0), 3, 0.9)[0, :-3]
    rb = buffer()
    indices = [rb.add(frame) for frame in whole.unbind(0)]
    assert indices[:3] == [None] * 3
    assert_same(rb[:], expected)
    rb = ReplayBuffer(storage=ListStorage(100), transform=MultiStepTransform(3, 0.9))
    rb.extend(whole)
    assert_same(rb[:], expected)


def test_rows_with_time_first() -> None:
    whole = random_batch(2, 20)
    rb = buffer(ndim=2, dim_extend=0)
    for part in whole.split(10, 1):
        rb.extend(part.transpose(0, 1))
    assert_same(rb[:].reshape(2, -1), looped(whole, 3, 0.9)[:, :-3])


def test_what_is_held_is_a_copy() -> None:
    first, second = random_batch(20).split(10)
    expected = looped(cat([first, second]).unsqueeze(0), 3, 0.9)[0, :-3]
    rb = buffer()
    rb.extend(first)
    first.apply_(lambda leaf: leaf.zero_())  # as memory that was lent is written again
    rb.extend(second)
    assert torch.equal(rb[:]["next", "observation"], expected["next", "observation"])


def test_other_steps_from_now_on() -> None:
    whole = random_batch(60, chance=0)
    rb = buffer(3)
    (transform,) = rb.transform
    rb.extend(whole[:20])
    transform.n_steps = 6
    rb.extend(whole[20:40])
    transform.n_steps = 2
    rb.extend(whole[40:])
    assert rb[:]["observation"].reshape(-1).tolist() == list(range(58))
    assert rb[:]["steps_to_next_obs"].tolist() == [3] * 17 + [6] * 17 + [2] * 24


def test_other_rows_than_before() -> None:
    rb = buffer(ndim=2)
    rb.extend(random_batch(2, 20))
    with pytest.raises(ValueError, match="holds the last frames of 2 rows"):
        rb.extend(random_batch(3, 20))


def test_rows_cannot_be_stored_as_they_are() -> None:
    rb = buffer()
    rb.extend(random_batch(2, 20))
    with pytest.raises(ValueError, match=r"Store frames: LazyTensorStorage\(max_size, ndim=2\)"):
        rb.extend(random_batch(2, 20))


def test_an_emptied_or_loaded_buffer_has_nothing_held() -> None:
    rb = buffer()
    rb.extend(random_batch(10))
    rb.empty()
    rb.extend(random_batch(10, seed=1))
    assert len(rb) == 7
    other = buffer()
    other.extend(random_batch(20))
    other.load_state_dict(rb.state_dict())
    other.extend(random_batch(10, seed=2))
    rb.extend(random_batch(10, seed=2))
    assert_same(other[:], rb[:])
    assert len(other) == 17


def test_what_is_held_is_saved(tmp_path: Any) -> None:
    whole = random_batch(30)
    rb = buffer()
    rb.extend(whole[:20])
    rb.dumps(tmp_path / "buffer")
    transform = copy.deepcopy(rb.transform[0])
    state = transform.state_dict()
    other = buffer()
    other.loads(tmp_path / "buffer")
    other.transform[0].load_state_dict(state)
    other.extend(whole[20:])
    rb.extend(whole[20:])
    assert_same(other[:], rb[:])
    with pytest.raises(ValueError, match="the state of a MultiStepTransform"):
        transform.load_state_dict({})


def test_samples_are_as_they_are_stored() -> None:
    rb = buffer(batch_size=32)
    rb.extend(random_batch(200, chance=0.05))
    sample = rb.sample()
    assert_same(sample.exclude("index"), rb[sample["index"]].exclude("index"))


# -- buffers, filled by collectors -------------------------------------------------------------------------------------


def check_filled(frames: Any, n_steps: int, num_envs: int, gamma: float = 0.9) -> None:
    """Frames of numbered envs, whose rewards are their ticks."""
    before, after = frames["observation"], frames["next", "observation"]
    steps = frames["steps_to_next_obs"]
    assert torch.equal(after[:, ENV], before[:, ENV])
    assert torch.equal(after[:, EPISODE], before[:, EPISODE])
    assert torch.equal(after[:, TICK], before[:, TICK] + steps)
    for k in range(1, n_steps + 1):
        mine = frames[steps == k]
        expected = sum(gamma**j * (mine["observation"][:, TICK] + 1 + j) for j in range(k))
        torch.testing.assert_close(mine["next", "reward"].reshape(-1), expected.to(torch.float32))
    assert steps.min() >= 1
    assert steps.max() == n_steps
    short = frames[steps < n_steps]
    assert short["next", "done"].all()
    assert frames["next", "done"].sum() > len(short)
    for env in range(num_envs):
        mine = frames[before[:, ENV] == env]
        ticks, episodes = mine["observation"][:, TICK], mine["observation"][:, EPISODE]
        assert torch.equal(ticks - episodes, torch.arange(len(mine)) + ticks[0] - episodes[0])  # none is missing


def collecting(kind: str, rb: Any, **kwargs: Any) -> Any:
    kwargs = {"frames_per_batch": 30, "replay_buffer": rb, **kwargs}
    if kind == "single":
        return Collector(SerialEnv(3, numbered_envs(3)), **kwargs)
    if kind == "batched":
        return AsyncBatchedCollector(numbered_envs(3), RandomPolicy(), num_workers=2, **kwargs)
    if kind == "in time":
        return MultiCollector(numbered_envs(3), sync=True, cat_results=-1, num_workers=2, **kwargs)
    return MultiCollector(numbered_envs(3), sync=kind == "sync", num_workers=2, **kwargs)


@pytest.mark.parametrize("how", ["iterated", "started"])
@pytest.mark.parametrize(
    "kind",
    ["single", *(pytest.param(kind, marks=pytest.mark.processes) for kind in ("sync", "async", "batched", "in time"))],
)
def test_filled(kind: str, how: str) -> None:
    rb = buffer(4)
    collector = collecting(kind, rb, total_frames=600)
    if how == "iterated":
        assert set(collector) == {None}
    else:
        with collector:
            collector.start()
            rb.sample(64, wait=True, timeout=60)
            while collector.is_running():
                rb.sample(64)
    assert len(rb) == 600 - 3 * 4
    check_filled(rb[:], 4, 3)


@pytest.mark.parametrize("n_steps", [1, 6])
def test_filled_by_batches_that_are_shorter(n_steps: int) -> None:
    rb = buffer(n_steps)
    for _ in Collector(make_numbered, frames_per_batch=2, total_frames=100, replay_buffer=rb):
        pass
    frames = rb[:]
    assert len(frames) == 100 - n_steps
    ticks = frames["observation"][:, TICK]
    assert torch.equal(frames["next", "observation"][:, TICK], ticks + frames["steps_to_next_obs"])


def test_what_was_reset_ends() -> None:
    """The tail that was held back is of an episode that does not go on, and is written with the next frames."""
    rb = buffer(3)
    collector = Collector(SerialEnv(3, numbered_envs(3)), frames_per_batch=60, replay_buffer=rb)
    batches = iter(collector)
    for _ in range(3):
        next(batches)
        collector.reset()
    next(batches)
    collector.shutdown()
    frames = rb[:]
    assert len(frames) == 240 - 9
    check_filled(frames, 3, 0)
    ids = frames["collector", "traj_ids"].reshape(3, -1)
    last = torch.zeros_like(ids, dtype=torch.bool)
    last[:, :-1] = ids[:, 1:] != ids[:, :-1]
    flags = frames["next"].reshape(3, -1)
    assert (flags["done"].squeeze(-1) | ~last).all()
    assert flags["truncated"][last].any()
    assert not (flags["truncated"] & flags["terminated"]).any()


def test_another_collector_and_no_ids() -> None:
    """Without ids, what ends an episode is that another collector writes."""
    rb = buffer(3)
    for _ in range(2):
        make = lambda: GymWrapper(CountingEnv(longest=1000))  # noqa: E731
        for _ in Collector(make, frames_per_batch=20, total_frames=20, replay_buffer=rb, track_traj_ids=False):
            pass
    frames = rb[:]
    assert len(frames) == 37
    assert torch.equal(
        frames["next", "observation"][:, 1] - frames["observation"][:, 1], frames["steps_to_next_obs"].float()
    )
    assert frames["next", "truncated"].reshape(-1).nonzero().reshape(-1).tolist() == [17, 18, 19]


@pytest.mark.parametrize("sampler", [{}, {"end_key": ("next", "done")}, {"traj_key": ("collector", "traj_ids")}])
@pytest.mark.parametrize("ids", [True, False])
def test_slices_reach_the_ends_of_episodes(sampler: dict[str, Any], ids: bool) -> None:
    """Flags are those of several steps ahead, and so say that before it is there."""
    if not ids and "traj_key" in sampler:
        return
    rb = buffer(3, sampler=SliceSampler(slice_len=4, **sampler), batch_size=400)
    envs = SerialEnv(3, numbered_envs(3, longest=9))
    for _ in Collector(envs, frames_per_batch=90, total_frames=900, replay_buffer=rb, track_traj_ids=ids):
        pass
    rows = rb.sample().reshape(-1, 4)
    assert (rows["observation"][:, 1:, TICK] == rows["observation"][:, :-1, TICK] + 1).all()
    assert (rows["observation"][:, 1:, EPISODE] == rows["observation"][:, :-1, EPISODE]).all()
    assert rows["nonterminal"][:, :-1].all()
    assert (~rows["nonterminal"][:, -1]).any()


def test_slices_and_whole_episodes() -> None:
    rb = buffer(3, sampler=SliceSampler(slice_len=4), batch_size=40)
    for _ in Collector(SerialEnv(3, numbered_envs(3)), frames_per_batch=90, total_frames=900, replay_buffer=rb):
        rows = rb.sample().reshape(-1, 4)["observation"]
        assert (rows[:, 1:, TICK] == rows[:, :-1, TICK] + 1).all()
    rb = buffer(3)
    for _ in Collector(make_numbered, frames_per_batch=90, trajs_per_batch=2, total_frames=900, replay_buffer=rb):
        pass
    check_filled(rb[:], 3, 0)
    rb = buffer(3)
    for _ in Collector(make_numbered, frames_per_batch=90, split_trajs=True, total_frames=900, replay_buffer=rb):
        pass
    frames = rb[:]
    assert len(frames) == 900
    ticks = frames["observation"][:, TICK]
    assert torch.equal(frames["next", "observation"][:, TICK], ticks + frames["steps_to_next_obs"])


def test_inverses_are_called_with_what_collectors_write() -> None:
    class Double:
        def __call__(self, data: Any) -> Any:
            return data

        def inv(self, data: Any) -> Any:
            return data.set("doubled", 2 * data["observation"])

    rb = buffer(3)
    rb.append_transform(Double())
    for _ in Collector(SerialEnv(3, numbered_envs(3)), frames_per_batch=90, total_frames=90, replay_buffer=rb):
        pass
    assert torch.equal(rb[:]["doubled"], 2 * rb[:]["observation"])
    assert len(rb) == 81


@pytest.mark.processes
def test_no_inverse_while_workers_write() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=10)
    with MultiCollector(numbered_envs(2), frames_per_batch=20, replay_buffer=rb, sync=False) as collector:
        collector.start()
        rb.sample(wait=True, timeout=60)
        with pytest.raises(RuntimeError, match=r"append it before collector.start\(\)"):
            rb.append_transform(MultiStepTransform(3, 0.9))
        rb.append_transform(lambda sample: sample.select("observation"))
        assert set(rb.sample().keys()) == {"observation"}
