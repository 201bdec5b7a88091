"""Guests: envs that are known by their methods. The one here is written without TorchRL, so it runs everywhere."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from tensordict.nn import TensorDictModule

from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv, ParallelEnv, SerialEnv, Unbounded
from swath.envs.guest import GuestEnv
from swath.errors import EnvError, PolicyError, PolicyOutputError
from swath.modules import RandomPolicy
from swath.rollout.structure import Objects, Structure, maybe_dense_stack
from team import LENGTH, Team

pytestmark = pytest.mark.processes


def act(tensordict: TensorDict) -> TensorDict:
    """Sees what the env gives, as it gives it."""
    agents: Any = tensordict["agents"]
    first = agents[..., 0]["observation"][..., :1]
    return tensordict.set("action", first * 10)


def only_tensors() -> Team:
    return Team(with_objects=False)


def expected_counts(num_steps: int) -> list[float]:
    return [float(step % LENGTH) for step in range(num_steps)]


def check(batch: Any, num_steps: int, *, with_objects: bool) -> None:
    counts = torch.tensor(expected_counts(num_steps))
    for name, shift in (("root", 0), ("next", 1)):
        data = batch if name == "root" else batch["next"]
        for agent, size in enumerate((2, 3)):
            seen = data["agents"][..., agent]["observation"]
            torch.testing.assert_close(seen, (counts + shift).unsqueeze(-1).expand(num_steps, size))
            over = data["agents"][..., agent]["done"].reshape(-1)
            assert over.tolist() == [bool(shift) and count + shift >= LENGTH for count in counts.tolist()]
        if with_objects:
            words = [data[step]["word"] for step in range(num_steps)]
            assert words == [f"count {int(count) + shift}" for count in counts.tolist()]
            grown = [data[step]["growing"].tolist() for step in range(num_steps)]
            assert grown == [list(range(int(count) + shift + 1)) for count in counts.tolist()]
    torch.testing.assert_close(batch["action"].reshape(-1), counts * 10)
    assert "done" not in batch.keys()  # noqa: SIM118  # there is no flag but the agents'
    ids = batch["collector", "traj_ids"].reshape(-1)
    assert bool((ids[1:] != ids[:-1]).eq(counts[1:] == 0).all())


@pytest.mark.parametrize("with_objects", [False, True])
def test_in_this_process(with_objects: bool) -> None:
    collector = Collector(lambda: Team(with_objects), act, frames_per_batch=12, total_frames=24)
    steps = [step for batch in collector for step in batch.unbind(0)]
    # (maybe_dense_stack would leave LAZY_LEGACY_OP in this program's environment, and so in that of other tests.)
    check(LazyStackedTensorDict(*steps, stack_dim=0), 24, with_objects=with_objects)


def test_objects_that_were_delivered_are_forgotten() -> None:
    collector = Collector(Team, act, frames_per_batch=50)
    for _, _batch in zip(range(4), collector, strict=False):
        assert len(collector.env.objects.kept) <= 4
    collector.shutdown()


@pytest.mark.parametrize("with_objects", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_in_workers(with_objects: bool, num_workers: int) -> None:
    factories = [lambda: Team(with_objects)] * 2
    collector = MultiSyncCollector(factories, act, frames_per_batch=24, total_frames=24, num_workers=num_workers)
    (batch,) = collector
    assert batch.shape == (2, 12)
    for env in range(2):
        check(batch[env], 12, with_objects=with_objects)


def test_asynchronously() -> None:
    collector = MultiAsyncCollector([Team] * 2, act, frames_per_batch=10, total_frames=80, num_workers=2)
    for batch in collector:  # 10 steps are two episodes
        check(batch, 10, with_objects=True)


def test_one_policy_for_all() -> None:
    collector = AsyncBatchedCollector([only_tensors] * 2, act, frames_per_batch=20, total_frames=40)
    data: Any = torch.cat(list(collector))
    index = data["env_index"].reshape(-1)
    for env in range(2):
        own = data[index == env]
        check(own, len(own), with_objects=False)
    with pytest.raises(EnvError, match="'growing' is no tensor of a fixed shape"):
        AsyncBatchedCollector([Team] * 2, act, frames_per_batch=20)


@pytest.mark.parametrize("workers", [0, 2])
def test_on_nodes(workers: int) -> None:
    collector = DistributedCollector(
        [only_tensors] * 2,
        act,
        frames_per_batch=20 * max(1, workers),
        total_frames=40 * max(1, workers),
        sync=True,
        num_workers_per_collector=max(1, workers),
    )
    batches = list(collector)
    assert len(batches) == 2
    for batch in batches:  # 10 steps are two episodes
        for row in batch.reshape(-1, 10):
            check(row, 10, with_objects=False)
    with pytest.raises(Exception, match="'growing' is no tensor of a fixed shape, which nodes cannot send"):
        DistributedCollector([Team], act, frames_per_batch=20)


def test_what_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(EnvError, match="trajs_per_batch cannot put together"):
        Collector(Team, act, frames_per_batch=20, trajs_per_batch=2)
    with pytest.raises(EnvError, match="a replay buffer of swath cannot store"):
        Collector(Team, act, frames_per_batch=20, replay_buffer=ReplayBuffer(storage=LazyTensorStorage(100)))


def test_episodes_and_buffers() -> None:
    batches = list(Collector(only_tensors, act, frames_per_batch=20, total_frames=40, trajs_per_batch=2))
    assert all(batch.shape == (2, LENGTH) for batch in batches)
    assert isinstance(batches[0].get("agents"), LazyStackedTensorDict)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    for _ in Collector(only_tensors, act, frames_per_batch=20, total_frames=40, replay_buffer=buffer):
        pass
    sample = buffer.sample(8)
    torch.testing.assert_close(sample["agents", "1", "observation"][:, :1] * 10, sample["action"])


def test_serial_env_of_guests() -> None:
    (batch,) = Collector(SerialEnv(3, only_tensors), act, frames_per_batch=30, total_frames=30)
    assert batch.shape == (3, 10)
    for env in range(3):
        check(batch[env], 10, with_objects=False)


def test_split_trajectories_have_nothing_where_they_are_padded() -> None:
    collector = Collector(Team, act, frames_per_batch=12, total_frames=120, split_trajs=True)
    for batch in collector:
        mask = batch["collector", "mask"]
        for row, of_row in zip(batch, mask, strict=True):
            words = [step["word"] for step in row]
            counts = [int(step["agents"][0]["observation"][0]) for step in row]
            expected = [f"count {count}" if there else None for count, there in zip(counts, of_row, strict=True)]
            assert words == expected
        assert len(collector.env.objects.kept) <= 4


class Suicidal(Team):
    """Kills its process, once, at its tenth step; so large that a batch is written in pieces."""

    def __init__(self, witness: str) -> None:
        super().__init__()
        self.witness = Path(witness)
        self.steps = 0

    def _data(self, *, is_step: bool) -> TensorDict:
        return super()._data(is_step=is_step).set("large", torch.zeros(1_000_000))

    def step_and_maybe_reset(self, tensordict: TensorDict) -> Any:
        self.steps += 1
        if self.steps == 10 and not self.witness.exists():
            self.witness.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step_and_maybe_reset(tensordict)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_objects_of_a_worker_that_was_killed_are_not_mixed_up(kind: Any, tmp_path: Path) -> None:
    witness = str(tmp_path / "witness")
    collector = kind(
        [lambda: Suicidal(witness)], act, frames_per_batch=15, total_frames=15, restart_workers=1, num_workers=1
    )
    (batch,) = collector
    assert Path(witness).exists()
    for step in batch[0] if kind is MultiSyncCollector else batch:
        count = int(step["agents"][0]["observation"][0])
        assert step["word"] == f"count {count}"
        assert step["growing"].tolist() == list(range(count + 1))


class Attentive(Team):
    """Has an input besides the action, and rewards what it finds in its TensorDict."""

    def __init__(self) -> None:
        super().__init__(with_objects=False)

    def _data(self, *, is_step: bool) -> TensorDict:
        data = super()._data(is_step=is_step)
        return data if is_step else data.set("goal", torch.zeros(1))

    def step_and_maybe_reset(self, tensordict: TensorDict) -> Any:
        goal, note = tensordict["goal"], tensordict["note"]
        stepped, root = super().step_and_maybe_reset(tensordict)
        for agent in stepped["next", "agents"].tensordicts:
            agent["reward"] = goal * 100 + note
        return stepped, root


def takes_notes(tensordict: TensorDict) -> TensorDict:
    """Writes more than the action: for itself, for the env to find, and an input of the env."""
    size = tensordict.batch_size
    before = tensordict.get("note", torch.zeros(*size, 1))  # its own, of the step before
    tensordict["note"] = before + 1
    tensordict["goal"] = before + 5
    return tensordict.set("action", before)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_env_and_a_policy_see_what_the_policy_wrote(num_envs: int) -> None:
    env = Attentive if num_envs == 1 else SerialEnv(num_envs, Attentive)
    (batch,) = Collector(env, takes_notes, frames_per_batch=12 * num_envs, total_frames=12 * num_envs)
    steps = torch.arange(12.0)
    for row in batch.reshape(num_envs, 12):
        torch.testing.assert_close(row["note"].reshape(-1), steps + 1)
        torch.testing.assert_close(row["goal"].reshape(-1), steps + 5)
        rewards = row["next", "agents"][..., 0]["reward"].reshape(-1)
        torch.testing.assert_close(rewards, (steps + 5) * 100 + steps + 1)
    assert "goal" not in batch["next"].keys()  # noqa: SIM118


def test_what_cannot_reach_an_env_in_a_process_is_refused() -> None:
    with (
        ParallelEnv(2, Attentive) as env,
        pytest.raises(PolicyError, match=r"writes 'goal', which is the env's, .* given actions only"),
    ):
        Collector(env, takes_notes, frames_per_batch=4)
    with (
        ParallelEnv(2, Team) as env,
        pytest.raises(EnvError, match=r"'growing' is no tensor .* of a ParallelEnv cannot give"),
    ):
        Collector(env, act, frames_per_batch=4)


def test_a_limit_needs_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl", None)
    with pytest.raises(ModuleNotFoundError, match=r"max_frames_per_traj for GuestEnv\(Team.*swath\[torchrl\]"):
        Collector(Team, act, frames_per_batch=4, max_frames_per_traj=3)


class Captain(Team):
    """Has flags of its own besides those of its agents, who are done long before; a group that only a step has."""

    done_keys = ("done", "terminated", *Team.done_keys)
    done_keys_groups = (("done", "terminated"), Team.done_keys)
    reset_keys = ("_reset", *Team.reset_keys)

    def __init__(self) -> None:
        super().__init__(with_objects=False)

    def _data(self, *, is_step: bool) -> TensorDict:
        data = super()._data(is_step=is_step)
        for agent in data["agents"].tensordicts:
            agent["done"] = torch.tensor([self.count >= 2])
        data["done"] = torch.tensor([self.count >= LENGTH])  # and terminated is not: it says so itself
        data["terminated"] = torch.tensor([False])
        if is_step:
            data["team"] = TensorDict(reward=torch.ones(2, 1), batch_size=[2])
        return data


def test_an_episode_ends_when_the_env_says_so_not_its_agents() -> None:
    policy = TensorDictModule(lambda h: (h, h + 1), in_keys=["h"], out_keys=["action", ("next", "h")])
    policy.state_spec = {"h": Unbounded((1,))}  # type: ignore[assignment]
    (batch,) = Collector(Captain, policy, frames_per_batch=10, total_frames=10)
    counts = expected_counts(10)
    assert batch["h"].reshape(-1).tolist() == counts  # the policy's state goes on for as long
    assert batch["next", "done"].reshape(-1).tolist() == [count + 1 >= LENGTH for count in counts]
    assert not batch["next", "terminated"].any()
    assert batch["next", "agents"][..., 0]["done"].reshape(-1).tolist() == [count + 1 >= 2 for count in counts]
    assert batch["agents"][..., 0]["done"].reshape(-1).tolist() == [count >= 2 for count in counts]
    assert len(batch["collector", "traj_ids"].unique()) == 2
    assert batch["next", "team"].batch_size == (10, 2)


def test_set_truncated_of_groups() -> None:
    with pytest.raises(RuntimeError, match="set_truncated needs an env with a truncated key"):
        Collector(only_tensors, act, frames_per_batch=4, set_truncated=True)


def test_random_actions_and_attributes() -> None:
    collector = Collector(Team, frames_per_batch=10, total_frames=10, init_random_frames=5)
    assert isinstance(collector.env, GuestEnv)
    guest = collector.env.guest
    assert collector.env.count == guest.count
    (batch,) = collector
    assert len(batch["action"].unique()) == 10
    assert guest.is_closed


def fails(tensordict: TensorDict) -> TensorDict:
    raise PolicyError("not today")


@pytest.mark.parametrize("given", ["itself", "in a list", "with a policy that fails"])
@pytest.mark.parametrize("kind", ["guest", "gymnasium"])
def test_an_env_that_was_handed_over_outlives_its_collector(kind: str, given: str) -> None:
    closed: list[bool] = []
    if kind == "guest":
        env: Any = Team()
    else:
        env = gymnasium.make("CartPole-v1")
    env.close = lambda *args, **kwargs: closed.append(True)
    if given == "with a policy that fails":
        with pytest.raises(PolicyError):
            Collector(env, fails, frames_per_batch=4)
    else:
        collector = Collector([env] if given == "in a list" else env, frames_per_batch=4)
        next(iter(collector))
        del collector
        gc.collect()
    assert not closed
    with Collector(env, frames_per_batch=4) as collector:
        next(iter(collector))
    assert closed


@pytest.mark.parametrize("thing", [3, None, object(), {"env": 1}], ids=["int", "None", "object", "dict"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, AsyncBatchedCollector])
def test_unknown_objects(thing: Any, kind: Any) -> None:
    given = thing if kind is Collector else [thing]
    with pytest.raises(TypeError, match=r"a collector takes an env, or a function that makes one: of swath.envs"):
        kind(given, RandomPolicy(), frames_per_batch=10)
    made = (lambda: thing) if kind is Collector else [lambda: thing]
    with pytest.raises(TypeError, match=r"what create_env_fn made is .*, which is no env; a collector takes"):
        kind(made, RandomPolicy(), frames_per_batch=10)


@pytest.mark.parametrize("kind", [MultiSyncCollector, AsyncBatchedCollector])
def test_a_random_policy_of_one_env_serves_several_in_a_worker(kind: Any) -> None:
    policy = RandomPolicy(GymEnv("CartPole-v1").action_spec)
    envs = [lambda: GymEnv("CartPole-v1")] * 2
    (batch,) = kind(envs, policy, frames_per_batch=20, total_frames=20, num_workers=1)
    assert bool((batch["action"].sum(-1) == 1).all())
    with pytest.raises(PolicyError, match="a random policy's spec for 'action' has shape"):
        Collector(SerialEnv(2, lambda: GymEnv("CartPole-v1")), RandomPolicy(Unbounded((3,))), frames_per_batch=4)


def test_one_object_for_a_batch_of_envs() -> None:
    data = TensorDict(word=NonTensorData("two words", batch_size=[2]), x=torch.zeros(2), batch_size=[2])
    structure, objects = Structure.of(data), Objects()
    flat = structure.flatten(data, objects)
    assert [objects.kept[number] for number in flat["word",].tolist()] == ["two words"] * 2


def test_a_policy_gives_tensors() -> None:
    def talks(tensordict: TensorDict) -> TensorDict:
        return act(tensordict).set("remark", NonTensorData("well"))

    with pytest.raises(PolicyOutputError, match="the policy's 'remark' is no tensor; only envs may give such data"):
        Collector(Team, talks, frames_per_batch=4)


def test_a_lazy_stack_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    stacked = maybe_dense_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.zeros(3))])
    assert isinstance(stacked, LazyStackedTensorDict)
    assert dict(os.environ) == before


def test_structure_there_and_back() -> None:
    data = Team()._data(is_step=True)
    data["inner"] = TensorDict(x=torch.zeros(4, 2), batch_size=[4])
    structure = Structure.of(data, ragged=frozenset({("growing",)}))
    objects = Objects()
    flat = structure.flatten(data, objects)
    assert set(flat) >= {("agents", "0", "observation"), ("agents", "1", "reward"), ("word",), ("inner", "x")}
    assert all(isinstance(leaf, torch.Tensor) for leaf in flat.values())
    back = structure.build(flat, data.batch_size, objects.kept)
    assert isinstance(back.get("agents"), LazyStackedTensorDict)
    assert back["word"] == "count 0"
    assert back["inner"].batch_size == (4,)
    assert back["growing"].tolist() == [0.0]
