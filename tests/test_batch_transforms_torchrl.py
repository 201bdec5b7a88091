"""n-step transitions, rewards to go and burning in beside TorchRL's own; needs the extra `torchrl`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from numbered import numbered_envs
from sequence_checks import FLAGS, assert_same, random_batch
from swath.collectors import Collector
from swath.data import (
    BurnInTransform,
    LazyTensorStorage,
    MultiStep,
    MultiStepTransform,
    ReplayBuffer,
    Reward2GoTransform,
)
from swath.envs import SerialEnv

pytestmark = [pytest.mark.torchrl, pytest.mark.filterwarnings("ignore")]
data = pytest.importorskip("torchrl.data")
transforms = pytest.importorskip("torchrl.envs.transforms")
modules = pytest.importorskip("torchrl.modules")


def as_torchrl(batch: Any, n_steps: int, **kwargs: Any) -> Any:
    return MultiStep(0.9, n_steps, done_keys=FLAGS, **kwargs)(batch)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_steps", [2, 3, 5, 30])
@pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 3, 20), (1, 1), (2, 2)])
def test_multi_step(shape: tuple[int, ...], n_steps: int, seed: int) -> None:
    """With the flags left where they are: in every key."""
    batch = random_batch(*shape, seed=seed, chance=[0, 0.1, 0.4][seed % 3])
    expected = data.MultiStep(0.9, n_steps)(batch.clone())
    assert_same(as_torchrl(batch, n_steps), expected)
    assert_same(
        MultiStep(0.9, n_steps)(batch).exclude(*[("next", f) for f in FLAGS]),
        expected.exclude(*[("next", f) for f in FLAGS]),
    )


def test_multi_step_of_one_step() -> None:
    """There every frame is TorchRL's last; here, the last of episodes and of the batch."""
    batch = random_batch(3, 20)
    expected = data.MultiStep(0.9, 1)(batch.clone())
    assert not expected["nonterminal"].any()
    assert_same(as_torchrl(batch, 1).exclude("nonterminal"), expected.exclude("nonterminal"))


def test_rewards_of_agents() -> None:
    batch = random_batch(3, 20, reward_shape=(4,))
    assert_same(as_torchrl(batch, 3), data.MultiStep(0.9, 3)(batch.clone()))


def test_agents_that_end_one_by_one() -> None:
    agents = [random_batch(2, 12, seed=seed, ids=False)["next"].exclude("pixels") for seed in range(3)]
    after = torch.stack(agents, 2)
    batch = TensorDict(next=TensorDict({key: after[key] for key in after.keys()}, (2, 12)), batch_size=(2, 12))  # noqa: SIM118
    assert_same(as_torchrl(batch, 3), data.MultiStep(0.9, 3)(batch.clone()))
    nested = TensorDict(next=TensorDict(agents=after, batch_size=(2, 12)), batch_size=(2, 12))
    theirs = data.MultiStep(0.9, 3)
    theirs.done_key, theirs.reward_keys = ("agents", "done"), [("agents", "reward")]
    theirs.done_keys = flags = [("agents", flag) for flag in FLAGS]
    ours = MultiStep(0.9, 3, done_key=("agents", "done"), reward_keys=[("agents", "reward")], done_keys=flags)
    assert_same(ours(nested), theirs(nested.clone()))


@pytest.mark.parametrize("n_steps", [1, 3, 7])
@pytest.mark.parametrize("sizes", [[50], [10, 20, 20], [2, 1, 30, 1, 16], [1] * 50])
def test_multi_step_transform(sizes: list[int], n_steps: int) -> None:
    whole = random_batch(2, 50, chance=0.1)
    ours = MultiStepTransform(n_steps, 0.9, done_keys=FLAGS)
    theirs = transforms.MultiStepTransform(n_steps, 0.9)
    for part in whole.split(sizes, 1):
        made, expected = ours.inv(part), theirs.inv(part.clone())
        assert (made is None) == (expected is None)
        if made is not None:
            dropped = ["nonterminal"] if n_steps == 1 else []
            assert_same(made.exclude(*dropped), expected.exclude(*dropped))


@pytest.mark.parametrize("shape", [(30, 1), (3, 30, 1), (2, 3, 30, 1)])
@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.7])
def test_reward_to_go(gamma: float, shape: tuple[int, ...]) -> None:
    batch = random_batch(*shape[:-1])
    batch["next", "done"][..., -1, :] = True
    expected = transforms.Reward2GoTransform(gamma, out_keys=["to_go"]).inv(batch.clone())
    torch.testing.assert_close(Reward2GoTransform(gamma, out_keys=["to_go"]).inv(batch)["to_go"], expected["to_go"])
    batch["next", "done"].fill_(False)
    for transform in (Reward2GoTransform(gamma), transforms.Reward2GoTransform(gamma)):
        with pytest.raises(RuntimeError, match="episode ends"):
            transform.inv(batch)


@pytest.mark.parametrize("kind", ["GRUModule", "LSTMModule"])
def test_burn_in(kind: str) -> None:
    states = ["hidden"] if kind == "GRUModule" else ["hidden", "cell"]
    made = getattr(modules, kind)(
        input_size=6,
        hidden_size=5,
        in_keys=["observation", *states],
        out_keys=["features", *[("next", state) for state in states]],
        default_recurrent_mode=True,
    )
    sample = TensorDict(observation=torch.randn(2, 10, 6), is_init=torch.zeros(2, 10, 1).bool(), batch_size=(2, 10))
    for state in states:
        sample[state] = torch.randn(2, 10, 1, 5)
    sample["is_init"][1, 2] = True
    expected = transforms.BurnInTransform([made], burn_in=4)(sample.clone())
    ours = BurnInTransform([made], burn_in=4)
    assert set(ours.out_keys) == set(states)
    assert_same(ours(sample), expected)
    assert not torch.equal(ours(sample)["hidden"][:, 0], sample["hidden"][:, 4])
    with modules.set_recurrent_mode(False), pytest.raises(RuntimeError, match="is not in its recurrent mode"):
        ours(sample)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=ours)
    rb.extend(sample)
    assert rb.sample().shape == (4, 6)


def test_guests() -> None:
    """TorchRL's own in swath: what is right works, what cannot be says what to write."""
    envs: Any = SerialEnv(3, numbered_envs(3))
    kwargs: Any = {"frames_per_batch": 90, "total_frames": 90}
    (batch,) = Collector(envs, **kwargs, postproc=data.MultiStep(0.9, 3))
    assert batch["steps_to_next_obs"].max() == 3
    whole = random_batch(60)
    ours, theirs = (
        ReplayBuffer(storage=LazyTensorStorage(100), transform=each)
        for each in (MultiStepTransform(3, 0.9, done_keys=FLAGS), transforms.MultiStepTransform(3, 0.9))
    )
    for part in whole.split([2, 28, 30]):
        ours.extend(part)
        theirs.extend(part)
    assert_same(ours[:], theirs[:])
    alone, among = transforms.MultiStepTransform(3, 0.9), transforms.MultiStepTransform(3, 0.9)
    for transform in (alone, transforms.Compose(transforms.DoubleToFloat(), among)):
        rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)
        with pytest.raises(TypeError, match=r"give the buffer swath.envs.MultiStepTransform\(n_steps=3, gamma=0.9\)"):
            list(Collector(SerialEnv(3, numbered_envs(3)), **kwargs, replay_buffer=rb))
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=transforms.Reward2GoTransform(out_keys=["to_go"]))
    list(Collector(SerialEnv(3, numbered_envs(3, longest=9)), **kwargs, replay_buffer=rb))
    assert "to_go" in rb[:].keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda: transforms.ToTensorImage(), False),
        (lambda: transforms.Compose(transforms.ToTensorImage(), transforms.RewardScaling(0, 1)), False),
        (lambda: transforms.DoubleToFloat(in_keys_inv=["action"]), True),
        (lambda: transforms.Compose(transforms.DoubleToFloat(in_keys_inv=["action"])), True),
        (lambda: transforms.MultiStepTransform(3, 0.9), True),
        (lambda: transforms.Reward2GoTransform(), True),
    ],
)
def test_inverses_that_do_nothing_keep_nobody_from_writing(make: Any, changes: bool) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=make())
    assert rb.changes_what_is_written is changes


def test_ours_in_theirs_is_no_silence() -> None:
    rb = data.ReplayBuffer(storage=data.LazyTensorStorage(100), batch_size=2)
    rb.append_transform(MultiStepTransform(3, 0.9))
    rb.extend(random_batch(20))
    with pytest.raises(TypeError, match="changes what is written to a replay buffer of swath"):
        rb.sample()
