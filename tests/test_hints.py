"""What people guess gets an answer that is true: each guess, on each public class."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from counting import make_counting
from policies_for_tests import deterministic
from swath import hints
from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    BaseCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from swath.collectors.distributed import DistributedCollector, DistributedSyncCollector, RayCollector, RPCCollector
from swath.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from swath.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from swath.modules import InferenceClient, InferenceServer, ProcessInferenceServer, RayInferenceServer

COLLECTORS: list[Any] = [
    *(Collector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector, AsyncBatchedCollector),
    *(DistributedCollector, DistributedSyncCollector, RayCollector, RPCCollector),
]
BUFFERS: list[Any] = [
    *(ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer)
]
STORAGES: list[Any] = [TensorStorage, LazyTensorStorage, LazyMemmapStorage, ListStorage]
SAMPLERS: list[Any] = [PrioritizedSampler, SliceSampler, SamplerWithoutReplacement]
SERVERS: list[Any] = [InferenceServer, ProcessInferenceServer, RayInferenceServer]
MADE = [*COLLECTORS, MultiCollector, *BUFFERS, *STORAGES, *SAMPLERS, Evaluator, *SERVERS]
ENVS: list[Any] = [SerialEnv, ParallelEnv]

#: What a class cannot do without, so that only the guess is wrong.
NEEDED: dict[Any, dict[str, Any]] = {
    **{kind: {"create_env_fn": [make_counting], "frames_per_batch": 4} for kind in COLLECTORS},
    MultiCollector: {"create_env_fn": [make_counting], "frames_per_batch": 4, "sync": True},
    Collector: {"create_env_fn": make_counting, "frames_per_batch": 4},
    PrioritizedReplayBuffer: {"alpha": 0.5, "beta": 0.5},
    TensorDictPrioritizedReplayBuffer: {"alpha": 0.5, "beta": 0.5},
    **{kind: {"max_size": 3} for kind in STORAGES},
    TensorStorage: {"storage": None, "max_size": 3},
    PrioritizedSampler: {"max_capacity": 3, "alpha": 0.5, "beta": 0.5},
    SliceSampler: {"num_slices": 2},
    Evaluator: {"env": make_counting},
    InferenceServer: {"model": torch.nn.Identity()},
    **{kind: {"policy_factory": torch.nn.Identity} for kind in SERVERS[1:]},
    ParallelEnv: {"num_envs": 2, "create_env_fn": make_counting},
    SerialEnv: {"num_workers": 2, "create_env_fn": make_counting},
}


def guesses_of(kind: type, tables: dict[str, dict[str, str]]) -> dict[str, str]:
    """All guesses about a class, and what is said: of its own family first."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for names, sentence in tables.get(base.__name__, {}).items():
            found |= dict.fromkeys(names.split(), sentence)
    return found


def parameters(kind: type) -> set[str]:
    return {*inspect.signature(kind).parameters, *hints.parameters_of(kind)}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_guessed_for_a_constructor_is_explained(kind: Any) -> None:
    guesses = {name: told for name, told in guesses_of(kind, hints._ARGUMENTS).items() if name not in parameters(kind)}
    assert len(guesses) > 4
    for name, told in guesses.items():
        with pytest.raises(TypeError, match=re.escape(f"{name!r} ({told})")):
            kind(**NEEDED.get(kind, {}), **{name: 3})


@pytest.mark.parametrize("kind", ENVS)
def test_what_is_guessed_for_several_envs_is_explained(kind: Any) -> None:
    names = ["seed", "n_envs", "env_fns", "env_kwargs", "start_method", "wrapper_class"]
    for name in set(names) - parameters(kind):
        told = hints.argument_hint(EnvBase, name)
        with pytest.raises(TypeError, match=re.escape(f"{kind.__name__} got an unknown argument: {name!r} ({told})")):
            kind(**NEEDED[kind], **{name: 3})


def test_what_is_guessed_for_gym_env_is_explained() -> None:
    for name in ("seed", "n_envs", "num_workers", "transform"):
        with pytest.raises(TypeError, match=rf"GymEnv\('CartPole-v1'\) got an unknown argument: '{name}' \("):
            GymEnv("CartPole-v1", **{name: 3})


def test_what_is_guessed_of_what_there_is_is_explained() -> None:
    with InferenceServer(torch.nn.Identity()) as server, Collector(make_counting, frames_per_batch=4) as collector:
        things = [collector, ReplayBuffer(), Evaluator(make_counting, deterministic()), server, server.client()]
        things += [GymEnv("CartPole-v1"), SerialEnv(2, "CartPole-v1"), GymEnv("CartPole-v1").action_spec]
        for thing in things:
            guesses = guesses_of(type(thing), hints._ATTRIBUTES)
            missing = {name: told for name, told in guesses.items() if not hasattr(thing, name)}
            assert missing
            for name, told in missing.items():
                with pytest.raises(AttributeError, match=re.escape(f"attribute {name!r}: {told}")):
                    getattr(thing, name)
            with pytest.raises(AttributeError, match=r"attribute 'nonsense'$"):
                thing.nonsense  # noqa: B018
        things[2].shutdown()


@pytest.mark.parametrize(
    "base", [Collector, MultiSyncCollector, RayCollector, ReplayBuffer, Evaluator, InferenceServer]
)
def test_no_guess_is_a_name_that_is_there(base: type) -> None:
    """Or the sentence would never be read."""
    assert [name for name in guesses_of(base, hints._ATTRIBUTES) if hasattr(base, name)] == []


def test_what_is_said_is_there() -> None:
    """Each ``name=`` is an argument, each ``name(`` a method or a class, of what the sentence is about or names."""
    import swath
    from swath import collectors, data, envs, modules

    names: dict[str, Any] = {}
    for module in (collectors, data, envs, modules, swath):
        names |= {name: getattr(module, name) for name in module.__all__}
    arguments = {each for kind in names.values() if inspect.isclass(kind) for each in parameters(kind)}
    arguments |= {"render_mode"}  # of gymnasium.make
    methods = {name for kind in names.values() if inspect.isclass(kind) for name in dir(kind)}
    for tables in (hints._ARGUMENTS, hints._ATTRIBUTES):
        for sentence in {told for table in tables.values() for told in table.values()}:
            for name in re.findall(r"(\w+)=", sentence):
                assert name in arguments, sentence
            for name in re.findall(r"(?<!torch\.)(?<!Generator\(\)\.)\b(\w+)\(", sentence):
                known = {"function", "client", "len", "load"} | methods | set(names)
                assert name in known, sentence


def test_multi_collector_without_sync_says_which_is_for_what_and_what_else_is_wrong() -> None:
    with pytest.raises(TypeError, match=r"needs sync=True or sync=False: True for .*PPO.*, False for .*SAC") as alone:
        MultiCollector([make_counting], frames_per_batch=4)
    assert "unknown" not in str(alone.value)
    with pytest.raises(TypeError, match=r"'frame_per_batch' \(did you mean 'frames_per_batch'\?\).* needs sync="):
        MultiCollector([make_counting], frame_per_batch=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'n_envs' \(give a list.*needs sync="):
        MultiCollector(make_counting, n_envs=4, frames_per_batch=4)  # type: ignore[call-arg]


def test_a_property_that_raises_keeps_its_words() -> None:
    class Mine(Collector):
        @property
        def colour(self) -> str:
            raise AttributeError("no paint")

    with Mine(make_counting, frames_per_batch=4) as collector:
        with pytest.raises(AttributeError, match=r"^no paint$"):
            collector.colour  # noqa: B018
        assert isinstance(collector, BaseCollector)
        assert not hasattr(collector, "learn")
    assert not hasattr(InferenceClient, "predict")
