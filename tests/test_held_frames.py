"""What a MultiStepTransform holds back: saved with its buffer, kept apart by env, and nobody else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from counting import CountingEnv
from numbered import ENV, TICK, numbered_envs
from sequence_checks import assert_same, random_batch
from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    MultiStepTransform,
    ReplayBuffer,
    Reward2GoTransform,
    TensorDictMaxValueWriter,
)
from swath.envs import GymWrapper, SerialEnv
from swath.modules import RandomPolicy
from warned import warned_here


def buffer(n_steps: int = 3, storage: Any = None, **kwargs: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(1000) if storage is None else storage
    return ReplayBuffer(storage=storage, transform=MultiStepTransform(n_steps, 0.9), **kwargs)


def collect(rb: ReplayBuffer, num_envs: int = 3, total_frames: int = 300, **kwargs: Any) -> None:
    envs = SerialEnv(num_envs, numbered_envs(num_envs))
    for _ in Collector(envs, frames_per_batch=30, total_frames=total_frames, replay_buffer=rb, **kwargs):
        pass


def require_own_env(frames: Any) -> None:
    """Every transition leads to the same env, as many ticks later as it says."""
    before, after = frames["observation"], frames["next", "observation"]
    assert torch.equal(before[:, ENV], after[:, ENV])
    assert torch.equal(after[:, TICK], before[:, TICK] + frames["steps_to_next_obs"])


# -- saved ---


@pytest.mark.parametrize("kind", ["tensors", "memmap", "list"])
@pytest.mark.parametrize("count", [2, 20])
def test_what_is_held_is_in_the_folder(kind: str, count: int, tmp_path: Path) -> None:
    """Also where nothing was stored yet."""

    def make() -> ReplayBuffer:
        storages = {"tensors": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
        return buffer(storage=storages[kind](1000))

    whole = random_batch(30)
    rb, other = make(), make()
    rb.extend(whole[:count])
    rb.dumps(tmp_path)
    other.extend(random_batch(10, seed=3))  # which is replaced
    other.loads(tmp_path, allow_pickle=kind == "list")
    rb.extend(whole[count:])
    other.extend(whole[count:])
    assert len(rb) == 27
    assert_same(other[:], rb[:])


def test_what_collectors_wrote_is_in_the_folder(tmp_path: Path) -> None:
    rb, other = buffer(), buffer()
    collect(rb, total_frames=60)
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    for each in (rb, other):
        collect(each, total_frames=60)
    assert_same(other[:].exclude("action"), rb[:].exclude("action"))  # which is drawn
    assert len(rb) == 120 - 9


def test_frames_of_every_kind(tmp_path: Path) -> None:
    """bfloat16, which NumPy has not; batch sizes of their own; no elements."""
    frames = random_batch(5)
    frames["half"] = torch.rand(5, 2).bfloat16()
    frames["agents"] = TensorDict({"x": torch.arange(15).view(5, 3), "none": torch.zeros(5, 3, 0)}, [5, 3])
    rb, other = buffer(8), buffer(8)
    rb.extend(frames)
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    for each in (rb, other):
        each.extend(torch.cat([frames] * 3))
    assert len(rb) == 12
    assert_same(other[:], rb[:])
    assert other[:]["agents"].batch_size == rb[:]["agents"].batch_size == (12, 3)


def test_a_buffer_without_the_transform_says_what_it_leaves_out(tmp_path: Path) -> None:
    rb, plain = buffer(), ReplayBuffer(storage=LazyTensorStorage(1000))
    rb.extend(random_batch(10))
    rb.dumps(tmp_path)
    with warned_here(match="3 frames that a MultiStepTransform held back"):
        plain.loads(tmp_path)
    with warned_here(match="Append the same transforms before loading"):
        plain.load_state_dict(rb.state_dict())
    assert len(plain) == 7


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update(of="/etc"),
        lambda held: held.update(of=["row", 1.5]),
        lambda held: held.update(layout="{}"),
        lambda held: held["bytes"].pop("0"),
        lambda held: held["bytes"].update({"0": held["bytes"]["1"]}),
        lambda held: held.pop("bytes"),
    ],
)
def test_a_folder_that_holds_something_else(change: Any, tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(random_batch(10))
    rb.dumps(tmp_path)
    (path,) = tmp_path.glob("data-*/content.json")
    content = json.loads(path.read_text())
    change(content["held"]["0"]["held"]["0"])
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"held back|does not hold a buffer|no layout"):
        rb.loads(tmp_path)
    assert len(rb) == 7


# -- kept apart ---


@pytest.mark.parametrize("ids", [True, False])
def test_a_writer_that_chooses_places(ids: bool) -> None:
    """Frames of different envs lie behind one another there, and are no neighbours for that."""
    rb = buffer(writer=TensorDictMaxValueWriter())
    collect(rb, track_traj_ids=ids)
    assert len(rb) == 300 - 9
    require_own_env(rb[:])
    assert rb[:]["steps_to_next_obs"].float().mean() > 2.5


@pytest.mark.parametrize("num_envs", [1, 3])
def test_no_ends_are_made_up_where_places_are_chosen(num_envs: int) -> None:
    expected = ReplayBuffer(storage=LazyTensorStorage(1000))
    chosen = ReplayBuffer(storage=LazyTensorStorage(1000), writer=TensorDictMaxValueWriter())
    for rb in (expected, chosen):
        collect(rb, num_envs)
    assert not expected[:]["next", "truncated"].any()
    assert not chosen[:]["next", "truncated"].any()
    assert chosen[:]["next", "done"].sum() == expected[:]["next", "done"].sum()


@pytest.mark.parametrize("ids", [True, False])
def test_another_collector_before_anything_is_stored(ids: bool) -> None:
    """All of the first one's frames are held back still; its episode does not go on in the second one's."""
    rb = buffer(12)
    for _ in range(2):
        env = GymWrapper(CountingEnv(longest=1000))
        for _ in Collector(env, frames_per_batch=10, total_frames=10, replay_buffer=rb, track_traj_ids=ids):
            pass
    frames = rb[:]
    assert len(frames) == 8
    assert frames["steps_to_next_obs"].tolist() == [10, 9, 8, 7, 6, 5, 4, 3]
    assert frames["next", "truncated"].all()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["in time", "batched"])
@pytest.mark.parametrize("postproc", [MultiStep(0.9, 3), Reward2GoTransform().inv])
def test_batches_in_which_envs_cannot_be_told_apart(kind: str, postproc: Any) -> None:
    options: dict[str, Any] = {"frames_per_batch": 60, "track_traj_ids": False, "postproc": postproc}
    if kind == "batched":
        collector = AsyncBatchedCollector(numbered_envs(3), RandomPolicy(), num_workers=1, **options)
    else:
        collector = MultiSyncCollector(numbered_envs(3), num_workers=1, cat_results=-1, **options)
    with pytest.raises(ValueError, match=r"frames of one env for the next ones of another.*track_traj_ids=True"):
        next(iter(collector))


def test_a_flat_batch_in_which_envs_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match="MultiStepTransform would take frames of one env"):
        collect(buffer(), track_traj_ids=False, postproc=lambda batch: batch.reshape(-1))
    rb = buffer()
    collect(rb, postproc=lambda batch: batch.reshape(-1))
    require_own_env(rb[:])


# -- one buffer's ---


def test_a_transform_is_one_buffer_s() -> None:
    transform = MultiStepTransform(3, 0.9)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    with pytest.raises(ValueError, match=r"is a buffer's already.*make another one"):
        ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    with pytest.raises(ValueError, match="is a buffer's already"):
        rb.append_transform(transform)
    del rb
    ReplayBuffer(storage=LazyTensorStorage(100)).append_transform(transform)


@pytest.mark.parametrize("name", ["reward_keys", "done_keys"])
def test_one_key_is_no_list(name: str) -> None:
    for make in (lambda **keys: MultiStep(0.9, 3, **keys), lambda **keys: MultiStepTransform(3, 0.9, **keys)):
        with pytest.raises(TypeError, match=rf"{name}=\['done'\]"):
            make(**{name: "done"})


def test_flags_that_are_not_there() -> None:
    with pytest.raises(KeyError, match=r"no \('next', 'doen'\).*done_keys"):
        MultiStep(0.9, 3, done_keys=["doen"])(random_batch(5))
