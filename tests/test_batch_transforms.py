"""Rewards to go, and recurrent states that are brought up to date, in batches and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from numbered import TICK, make_numbered, numbered_envs
from sequence_checks import assert_same, random_batch
from swath.collectors import Collector
from swath.data import (
    BurnInTransform,
    LazyTensorStorage,
    MultiStepTransform,
    ReplayBuffer,
    Reward2GoTransform,
    SliceSampler,
    TensorDictReplayBuffer,
)
from swath.envs import GymEnv, SerialEnv, TransformedEnv
from warned import warned_here

# -- rewards to go -----------------------------------------------------------------------------------------------------


def ended(*lead: int, **kwargs: Any) -> Any:
    """A batch whose every row ends with an episode."""
    batch = random_batch(*lead, **kwargs)
    for flag in ("done", "terminated"):
        batch["next", flag][..., -1, :] = True
    batch["next", "truncated"][..., -1, :] = False
    return batch


def looped_to_go(reward: torch.Tensor, ends: torch.Tensor, gamma: float) -> torch.Tensor:
    """Of ``[envs, time, *more]``, frame by frame."""
    to_go = reward.double().clone()
    for row in range(reward.shape[0]):
        for t in reversed(range(reward.shape[1] - 1)):
            if not ends[row, t]:
                to_go[row, t] += gamma * to_go[row, t + 1]
    return to_go.to(reward.dtype)


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_to_go_as_a_loop_would(seed: int, gamma: float) -> None:
    batch = ended(3, 1 + 13 * seed, seed=seed, chance=[0.02, 0.3, 1.0][seed % 3], ids=bool(seed % 2))
    before = batch.clone()
    made = Reward2GoTransform(gamma, out_keys=["to_go"]).inv(batch)
    ends = batch["next", "done"].squeeze(-1)
    torch.testing.assert_close(made["to_go"], looped_to_go(batch["next", "reward"], ends, gamma))
    assert_same(made.exclude("to_go"), before)
    assert_same(batch, before)
    assert torch.equal(Reward2GoTransform(gamma).inv(batch)["next", "reward"], made["to_go"])
    one = Reward2GoTransform(torch.tensor(gamma), out_keys=["to_go"]).inv(batch[1])
    torch.testing.assert_close(one["to_go"], made["to_go"][1])


def test_to_go_of_a_million_frames_in_a_row() -> None:
    """Sums are made of sums: what a loop over so many floats loses is not lost."""
    length = 2**20
    flags = {flag: torch.zeros(length, 1, dtype=torch.bool) for flag in ("done", "terminated")}
    flags["done"][-1] = True
    batch = TensorDict(next=TensorDict({"reward": torch.full((length, 1), 0.1), **flags}, length), batch_size=length)
    to_go = Reward2GoTransform().inv(batch)["next", "reward"]
    torch.testing.assert_close(to_go[0, 0], torch.tensor(0.1 * length))


def test_to_go_of_other_keys_shapes_and_dtypes() -> None:
    batch = ended(2, 15, reward_shape=(4, 1))
    batch["next", "team", "gain"] = (batch["next", "reward"] * 5).long()
    batch["next", "over"] = batch["next", "done"].clone()
    keys = [("next", "reward"), ("next", "team", "gain")]
    made = Reward2GoTransform(0.9, in_keys=keys, out_keys=["a", ("b", "c")], done_key="over").inv(batch)
    ends = batch["next", "done"].squeeze(-1)
    torch.testing.assert_close(made["a"], looped_to_go(batch["next", "reward"], ends, 0.9))
    assert made["b", "c"].dtype == torch.float32
    torch.testing.assert_close(made["b", "c"], looped_to_go(batch["next", "team", "gain"].float(), ends, 0.9))
    flat = batch.clone()
    flat["next", "reward"] = batch["next", "reward"][:, :, 0, 0]
    flat["next", "done"] = ends
    torch.testing.assert_close(Reward2GoTransform(0.9).inv(flat)["next", "reward"], made["a"][:, :, 0, 0])


def test_to_go_stays_in_its_trajectory() -> None:
    batch = ended(1, 6, chance=0)
    batch["collector", "traj_ids"] = torch.tensor([[4, 4, 4, 7, 7, 7]])
    ends = torch.tensor([[False, False, True, False, False, True]])
    made = Reward2GoTransform(0.9).inv(batch)
    torch.testing.assert_close(made["next", "reward"], looped_to_go(batch["next", "reward"], ends, 0.9))


def test_episodes_that_do_not_end() -> None:
    batch = ended(2, 6, chance=0)
    batch["next", "done"][1] = False
    with pytest.raises(RuntimeError, match=r"no episode ends in some rows of this batch \(2, 6\)"):
        Reward2GoTransform().inv(batch)
    batch["next", "done"][1, 2] = True
    with warned_here(match="the batch ends in the middle of episodes"):
        Reward2GoTransform().inv(batch)


def test_to_go_in_collectors_and_buffers() -> None:
    to_go = Reward2GoTransform(0.9, out_keys=["to_go"])
    plain = Collector(make_numbered, frames_per_batch=90, trajs_per_batch=3, total_frames=900)
    other = Collector(make_numbered, frames_per_batch=90, trajs_per_batch=3, total_frames=900, postproc=to_go.inv)
    for raw, batch in zip(plain, other, strict=True):
        expected = looped_to_go(raw["next", "reward"], raw["next", "done"].squeeze(-1), 0.9)
        torch.testing.assert_close(batch["to_go"], expected)
    rb = ReplayBuffer(storage=LazyTensorStorage(2000), transform=to_go)
    for _ in Collector(make_numbered, frames_per_batch=90, trajs_per_batch=3, total_frames=900, replay_buffer=rb):
        pass
    frames = rb[:].unsqueeze(0)
    expected = looped_to_go(frames["next", "reward"], frames["next", "done"].squeeze(-1), 0.9)
    torch.testing.assert_close(frames["to_go"], expected)
    rb = ReplayBuffer(storage=LazyTensorStorage(2000, ndim=2), transform=Reward2GoTransform(0.9))
    whole = ended(3, 20)
    rb.extend(whole)
    assert_same(rb[:].reshape(3, 20), Reward2GoTransform(0.9).inv(whole))


def test_to_go_of_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write rb.append_transform\(Reward2GoTransform"):
        TransformedEnv(GymEnv("CartPole-v1"), Reward2GoTransform())
    with pytest.raises(TypeError, match=r"give its inv: postproc=transform.inv"):
        list(Collector("CartPole-v1", frames_per_batch=5, total_frames=5, postproc=Reward2GoTransform()))
    with pytest.raises(ValueError, match="in_keys and out_keys are pairs"):
        Reward2GoTransform(in_keys=["a", "b"], out_keys=["c"])
    with pytest.raises(ValueError, match="gamma is one number for all"):
        Reward2GoTransform(torch.ones(3))
    with pytest.raises(KeyError, match="there is no 'gain' in this batch, which is to be summed"):
        Reward2GoTransform(in_keys=["gain"]).inv(ended(2, 3))
    with pytest.raises(KeyError, match=r"there is no \('next', 'over'\) in this batch"):
        Reward2GoTransform(done_key="over").inv(ended(2, 3))
    agents = ended(2, 5)
    agents["next", "done"] = torch.ones(2, 5, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="does not fit what is summed"):
        Reward2GoTransform().inv(agents)


# -- burning in --------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """A recurrent module on ``[slices, time]``: its state is the weighted sum of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return state[:, :1] + self.weight * x.cumsum(1)


def summing(state: Any = "state") -> TensorDictModule:
    after = ("next", *state) if isinstance(state, tuple) else ("next", state)
    return TensorDictModule(Sums(), in_keys=["x", state], out_keys=[after])


def slices(*lead: int) -> Any:
    return TensorDict(x=torch.ones(*lead), state=torch.full(lead, 10.0), batch_size=lead)


def test_the_state_is_that_of_the_steps_before() -> None:
    sample = slices(3, 7)
    before = sample.clone()
    made = BurnInTransform(summing(), burn_in=4)(sample)
    assert made.shape == (3, 3)
    assert made["state"].tolist() == [[18.0, 10.0, 10.0]] * 3
    assert not made["state"].requires_grad
    assert_same(sample, before)
    assert BurnInTransform(summing(), burn_in=0)(sample) is sample


def test_states_that_were_not_stored_and_nested_ones() -> None:
    start = TensorDictModule(lambda x: torch.zeros_like(x), in_keys=["x"], out_keys=[("core", "state")])
    modules: list[Any] = [start, summing(("core", "state"))]
    for given in (modules, TensorDictSequential(*modules)):
        transform = BurnInTransform(given, burn_in=2)
        assert transform.out_keys == [("core", "state")]
        made = transform(slices(3, 5))
        assert made["core", "state"].tolist() == [[4.0, 0.0, 0.0]] * 3


def test_samples_of_a_buffer_are_burnt_in() -> None:
    storage = LazyTensorStorage(5000)
    rb = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=6), batch_size=60)
    rb.append_transform(lambda sample: sample.reshape(-1, 6))
    last = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=[("next", "seen")])
    rb.append_transform(BurnInTransform([last], burn_in=2))
    for _ in Collector(SerialEnv(3, numbered_envs(3)), frames_per_batch=300, total_frames=900, replay_buffer=rb):
        sample = rb.sample()
        assert sample.shape == (10, 4)
        assert torch.equal(sample["seen"][:, 0, TICK], sample["observation"][:, 0, TICK] - 1)
        assert not sample["seen"][:, 1:].any()


def test_burning_in_of_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write rb.append_transform\(BurnInTransform"):
        TransformedEnv(GymEnv("CartPole-v1"), BurnInTransform(summing(), 3))
    with pytest.raises(ValueError, match="modules are TensorDictModules, got a Linear"):
        BurnInTransform([nn.Linear(1, 1)], 3)  # type: ignore[list-item]
    for burn_in in (-1, 1.5, True):
        with pytest.raises(ValueError, match="burn_in is a number of steps"):
            BurnInTransform(summing(), burn_in)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the modules write 'y', and none of it to"):
        BurnInTransform(TensorDictModule(nn.Linear(1, 1), in_keys=["x"], out_keys=["y"]), 3)
    with pytest.raises(ValueError, match=r"takes samples \[slices, time\], got \(12,\)"):
        BurnInTransform(summing(), 3)(slices(12))
    with pytest.raises(ValueError, match="of slices of 3 steps nothing is left after burn_in=3"):
        BurnInTransform(summing(), 3)(slices(4, 3))
    with pytest.raises(KeyError, match=r"the modules wrote no \('next', 'other'\)"):
        BurnInTransform(summing(), 3, out_keys=["other"])(slices(4, 5))
    with warned_here(match="'state' is the same as"):
        assert BurnInTransform(summing(), 3, out_keys=[("next", "state")]).out_keys == ["state"]


def test_a_buffer_with_all_of_them() -> None:
    """Each finds what the others make, or leave: the last that was given is the first that is called on the way in."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=MultiStepTransform(3, 0.9), batch_size=8)
    rb.append_transform(Reward2GoTransform(0.9, out_keys=["to_go"]))
    whole = ended(60)
    rb.extend(whole)
    ends = whole["next", "done"].reshape(1, -1)
    expected = looped_to_go(whole["next", "reward"].unsqueeze(0), ends, 0.9)[0, :-3]
    torch.testing.assert_close(rb[:]["to_go"], expected)
    assert "steps_to_next_obs" in rb.sample().keys()  # noqa: SIM118
