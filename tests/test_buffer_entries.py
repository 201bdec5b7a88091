"""What ``extend`` and ``add`` take for a frame, and for many: parts of frames, steps of several envs, dimensions."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict

from swath.data import (
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


class Transition(NamedTuple):
    obs: torch.Tensor
    reward: float


def of_two_envs(steps: int = 5) -> Any:
    """``[2, steps]``; an env's frames count on from its first."""
    x = torch.stack([torch.arange(steps), torch.arange(10, 10 + steps)])
    no = torch.zeros(2, steps, 1, dtype=torch.bool)
    return TensorDict(x=x, env=x // 10, next=TensorDict(done=no, truncated=no.clone()), batch_size=(2, steps))


# -- entries of a list ------------------------------------------------------------------------------------------------


def test_namedtuples_in_a_list_storage() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=3)
    rb.extend([Transition(torch.ones(2), 0.5)] * 4)
    rb.add(Transition(torch.ones(2), 0.5))
    for found in (rb.sample(), rb[:3], rb[[0, 4, 1]]):
        assert type(found) is Transition
        assert torch.equal(found.obs, torch.ones(3, 2))
        assert torch.equal(torch.as_tensor(found.reward), torch.full((3,), 0.5, dtype=torch.float64))


def test_dicts_in_a_list_storage() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=3)
    rb.extend([{"obs": torch.ones(2), "info": {"lives": 3, "name": "a"}}] * 4)
    for found in (rb.sample(), rb[:3]):
        assert found["obs"].shape == (3, 2)
        assert found["info"]["lives"].tolist() == [3, 3, 3]
        assert found["info"]["name"] == ["a", "a", "a"]
    assert rb[0]["info"] == {"lives": 3, "name": "a"}


def test_dicts_that_differ_are_not_put_together() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    rb.extend([{"obs": 1}, {"obs": 1, "reward": 2}])
    assert rb[:] == [{"obs": 1}, {"obs": 1, "reward": 2}]
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([{"obs": 1}, {"obs": 1, "reward": 2}])
    with pytest.raises(ValueError, match=r"different keys.*collate_fn="):
        rb[:]


# -- parts of frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tuple, Transition._make])
def test_a_tuple_of_parts_is_refused_by_a_tensor_storage(kind: Any) -> None:
    """Taken for a list, it would be as many frames as it has parts, of whatever is in a part."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(TypeError, match=r"(?s)a list is of frames.*extend\(\{.*ListStorage"):
        rb.extend(kind([torch.arange(6), torch.arange(6)]))
    assert len(rb) == 0
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend((torch.arange(6), torch.arange(6)))
    assert len(rb) == 6


# -- dimensions -------------------------------------------------------------------------------------------------------


def test_dim_extend_of_rows() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), dim_extend=1)
    assert rb.extend(of_two_envs()).tolist() == [0, 1, 2, 3, 4]
    assert rb[:]["x"].tolist() == [[step, step + 10] for step in range(5)]
    assert rb.sample(3).batch_size == (3, 2)
    assert int(rb.add(of_two_envs()[:, 1])) == 5
    assert rb[5]["x"].tolist() == [1, 11]


@pytest.mark.parametrize("ndim", [1, 2])
def test_dim_extend_beyond_the_data_is_refused(ndim: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, ndim=ndim), dim_extend=2)
    with pytest.raises(ValueError, match=r"dim_extend=2.*\(2, 5\)"):
        rb.extend(of_two_envs())


@pytest.mark.parametrize("dim_extend", [None, 0, 1])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_add_takes_one_step_of_all_envs(storage: Any, dim_extend: int | None) -> None:
    """As ``extend`` does of several: an env's frames are behind each other, and nobody else's are between them."""
    whole = of_two_envs()
    rb = TensorDictReplayBuffer(storage=storage(20, ndim=2), dim_extend=dim_extend)
    written = [rb.add(step).tolist() for step in whole.unbind(1)]
    assert rb[:]["x"].tolist() == whole["x"].flatten().tolist()
    assert [rb[index]["x"].tolist() for index in written] == whole["x"].T.tolist()


def test_slices_of_what_was_added_step_by_step() -> None:
    sampler = SliceSampler(slice_len=3, traj_key="env")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), sampler=sampler, batch_size=30)
    for step in of_two_envs().unbind(1):
        rb.add(step)
    found = rb.sample()["x"].reshape(10, 3)
    assert (found.diff(dim=1) == 1).all()


def test_add_of_less_than_a_step_is_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    with pytest.raises(ValueError, match="add takes one step, of 1 or more dimensions"):
        rb.add(of_two_envs()[0, 0])


def test_a_plain_dict_has_as_many_dimensions_as_the_storage() -> None:
    whole = of_two_envs()
    rb = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2))
    rb.extend({"x": whole["x"]})
    rb.add({"x": torch.tensor([5, 15])})
    assert rb[:]["x"].tolist() == [*range(6), *range(10, 16)]


# -- priorities that frames bring --------------------------------------------------------------------------------------


def with_priorities(*priorities: float) -> Any:
    return TensorDict(x=torch.arange(len(priorities)), td_error=torch.tensor(priorities), batch_size=len(priorities))


def drawn(rb: ReplayBuffer) -> set[int]:
    return set(rb.sample(2_000)["x"].flatten().tolist())


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_extend_and_add_take_the_priority_that_frames_bring(storage: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=storage(10))
    rb.extend(with_priorities(0, 3, 0, 1))
    assert drawn(rb) == {1, 3}
    rb.add(with_priorities(0, 0, 0)[2])
    assert drawn(rb) == {1, 3}
    rb.extend(with_priorities(0, 0, 0), update_priority=False)
    assert drawn(rb) == {0, 1, 2, 3}


def test_priorities_of_frames_of_several_envs_and_of_rows() -> None:
    data = of_two_envs(3)
    data["td_error"] = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    sampler = PrioritizedSampler(12, alpha=1.0, beta=1.0, eps=0.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=sampler)
    rb.extend(data)
    assert drawn(rb) == {1, 12}
    data["td_error"] = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(12))
    rb.extend(data)  # a row's is the highest of its steps
    assert drawn(rb) == {0, 1, 2}


def test_priorities_of_frames_that_go_round_and_of_those_that_a_transform_holds_back() -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(3))
    rb.extend(with_priorities(1, 1, 1, 0, 2))
    assert drawn(rb) == {2, 4}
    data = of_two_envs(4)[0]
    data["td_error"] = torch.tensor([0.0, 1.0, 1.0, 1.0])
    data["next", "reward"] = torch.ones(4, 1)
    data["next", "terminated"] = data["next", "done"].clone()
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(9), transform=MultiStepTransform(2, 0.9)
    )
    rb.extend(data)  # the last two steps are held back
    assert drawn(rb) == {1}
