"""auto_register_policy_transforms=: envs get what a policy module needs of them, in every collector."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from counting import make_counting
from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import GymEnv, ParallelEnv, SerialEnv, TensorDictPrimer, TransformedEnv, Unbounded
from swath.errors import PolicyInputError


class Counts(nn.Module):
    """A recurrent policy: counts its steps in an episode, from a first value that it asks its env for."""

    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", ("next", "count"))

    def __init__(self, first: float = 5.0) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.zeros(()))

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer(count=Unbounded((1,)), default_value=self.first, expand_specs=True)

    def forward(
        self, observation: torch.Tensor, count: torch.Tensor, is_init: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left = torch.zeros(*observation.shape[:-1], 2) + torch.tensor([1.0, 0.0]) + 0 * is_init
        return left, count + 1


def own() -> Any:
    return GymEnv("CartPole-v1")


def gymnasiums() -> Any:
    return gymnasium.make("CartPole-v1")


def serial() -> Any:
    return SerialEnv(2, own)


def parallel() -> Any:
    return ParallelEnv(2, own)


def one(env: Any, policy: Any, **kwargs: Any) -> Any:
    return Collector(env, policy, frames_per_batch=60, **kwargs)


def several(kind: Any, **options: Any) -> Callable[..., Any]:
    def make(env: Any, policy: Any, **kwargs: Any) -> Any:
        return kind([env] * 2, policy, frames_per_batch=60, **options, **kwargs)

    return make


KINDS = {
    "Collector": one,
    "MultiSync": several(MultiSyncCollector),
    "MultiSync, one worker": several(MultiSyncCollector, num_workers=1),
    "MultiAsync": several(MultiAsyncCollector),
    "Distributed": several(DistributedCollector),
    "Distributed, workers": several(DistributedCollector, num_workers_per_collector=2),
}


def check(collector: Any, first: float = 5.0) -> None:
    """The flag is set where episodes begin, and nowhere else; the state begins with its first value there."""
    with collector:
        stream = iter(collector)
        for _ in range(2):
            batch = next(stream)
            for row in batch.reshape(-1, batch.shape[-1]).unbind(0):
                starts, count = row["is_init"].squeeze(-1), row["count"].squeeze(-1)
                assert (count[starts] == first).all()
                assert (count[1:][~starts[1:]] == count[:-1][~starts[1:]] + 1).all()
                assert torch.equal(starts[1:], row["next", "done"].squeeze(-1)[:-1])
                assert not row["next", "is_init"].any()


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_policy_finds_its_keys(kind: str) -> None:
    check(KINDS[kind](own, Counts(), auto_register_policy_transforms=True))


@pytest.mark.processes
@pytest.mark.parametrize("env", [gymnasiums, serial, parallel])
def test_whatever_the_env_is(env: Callable[[], Any]) -> None:
    check(one(env, Counts(), auto_register_policy_transforms=True))


@pytest.mark.parametrize("env", [own, serial])
def test_with_a_policy_factory(env: Callable[[], Any]) -> None:
    check(one(env, None, policy_factory=Counts, auto_register_policy_transforms=True))


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_in_an_async_batched_collector_a_state_begins_with_zero(backend: str) -> None:
    make = partial(AsyncBatchedCollector, [own] * 2, frames_per_batch=60, env_backend=backend)
    check_rows = make(Counts(0.0), auto_register_policy_transforms=True)
    with check_rows as collector:
        batch = next(iter(collector))
        starts = batch["is_init"].squeeze(-1)
        assert starts.any()
        assert (batch["count"].squeeze(-1)[starts] == 0).all()
        assert (batch["count"].squeeze(-1)[~starts] > 0).all()
    with pytest.raises(ValueError, match="begins with something else than zero"):
        make(Counts(), auto_register_policy_transforms=True)


def test_what_is_there_is_left_alone() -> None:
    env = own().append_transform(TensorDictPrimer(count=Unbounded((1,)), default_value=7.0, expand_specs=True))
    check(one(env, Counts(), auto_register_policy_transforms=True), first=7.0)
    assert [type(each).__name__ for each in env.transform] == ["TensorDictPrimer", "InitTracker"]
    again = TransformedEnv(own(), env.transform)
    before = len(again.transform)
    check(one(again, Counts(), auto_register_policy_transforms=True), first=7.0)
    assert len(again.transform) == before


@pytest.mark.parametrize("flag", [None, False])
def test_nothing_is_added_unasked_and_what_is_missing_is_named(flag: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with one(own, nn.Linear(4, 2), auto_register_policy_transforms=flag) as collector:
            assert "is_init" not in next(iter(collector)).keys()  # noqa: SIM118 (a TensorDict)
        with pytest.raises(PolicyInputError, match="auto_register_policy_transforms=True, or the env the transform In"):
            one(own, Counts(), auto_register_policy_transforms=flag)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("yes", "must be True or False, got the string 'yes'"),
        (2, "must be True, False or None; got 2"),
        ([True], r"must be True, False or None; got \[True\]"),
    ],
)
def test_a_flag_that_is_none_is_refused(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        one(own, Counts(), auto_register_policy_transforms=given)


def test_a_policy_that_is_no_module_needs_nothing() -> None:
    def act(observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*observation.shape[:-1], 3)

    for policy in (act, None):
        with Collector(make_counting, policy, frames_per_batch=8, auto_register_policy_transforms=True) as collector:
            assert "is_init" not in next(iter(collector)).keys()  # noqa: SIM118 (a TensorDict)


class Cannot(nn.Identity):
    def make_tensordict_primer(self) -> TensorDictPrimer:
        raise RuntimeError("no shape yet")


def test_a_module_that_cannot_say_what_it_needs_is_named() -> None:
    policy = nn.Sequential(nn.Linear(4, 2), Cannot())
    with (
        pytest.warns(UserWarning, match=r"Cannot of the policy could not say .*no shape yet"),
        one(own, policy, auto_register_policy_transforms=True) as collector,
    ):
        assert "is_init" not in next(iter(collector)).keys()  # noqa: SIM118 (a TensorDict)


def test_a_module_of_tensors_is_not_given_another_observation() -> None:
    with one(own, nn.Linear(4, 2), auto_register_policy_transforms=True) as collector:
        assert "is_init" not in next(iter(collector)).keys()  # noqa: SIM118 (a TensorDict)


@pytest.mark.processes
def test_after_a_reset_a_state_and_other_weights() -> None:
    kwargs: dict[str, Any] = {"auto_register_policy_transforms": True}
    for make in (one, several(MultiSyncCollector)):
        collector = make(own, Counts(), **kwargs)
        with make(own, Counts(), **kwargs) as other:
            next(iter(other))
            state = other.state_dict()
        next(iter(collector))
        collector.reset()
        collector.update_policy_weights_(Counts())
        collector.load_state_dict(state)
        collector.set_seed(3)
        check(collector)


# -- beside TorchRL ------------------------------------------------------------------------------------------------


def recurrent(kind: str) -> Any:
    modules = pytest.importorskip("torchrl.modules")
    from tensordict.nn import TensorDictModule, TensorDictSequential

    torch.manual_seed(0)
    head: Any = TensorDictModule(nn.Linear(8, 2), in_keys=["e"], out_keys=["action"])
    if kind == "MLP":
        return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    make = getattr(modules, kind)
    return TensorDictSequential(make(input_size=4, hidden_size=8, in_key="observation", out_key="e"), head)


def guest() -> Any:
    return pytest.importorskip("torchrl.envs").GymEnv("CartPole-v1")


@pytest.mark.torchrl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env", [own, guest])
@pytest.mark.parametrize("kind", ["MLP", "LSTMModule", "GRUModule"])
def test_what_torchrl_adds(kind: str, env: Callable[[], Any]) -> None:
    theirs = pytest.importorskip("torchrl.collectors")
    batches: list[TensorDict] = []
    for make, base in ((theirs.Collector, guest), (Collector, env)):
        collector = make(
            base, recurrent(kind), frames_per_batch=50, total_frames=50, auto_register_policy_transforms=True
        )
        batches.append(next(iter(collector)))
        collector.shutdown()
    expected, got = (dict(each.items(True, True)) for each in batches)
    if env is own:  # TorchRL's keep what is between two modules; so does a policy of swath's own envs, but for copies
        assert got.keys() >= expected.keys() - {"e"}
    else:
        assert got.keys() == expected.keys()
    for key in got.keys() & expected.keys():
        assert got[key].shape == expected[key].shape, key
        assert got[key].dtype == expected[key].dtype, key
    for each in (expected, got):
        starts = each["is_init"].squeeze(-1)
        assert starts[0]
        for key in each:
            if str(key).startswith("recurrent"):
                assert not each[key][starts].any()


@pytest.mark.torchrl
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["MultiSync, one worker", "MultiAsync", "Distributed, workers"])
def test_guests_elsewhere(kind: str) -> None:
    with KINDS[kind](guest, recurrent("LSTMModule"), auto_register_policy_transforms=True) as collector:
        batch = next(iter(collector))
        assert batch["recurrent_state_h"].shape[-2:] == (1, 8)
        assert batch["is_init"].any()
