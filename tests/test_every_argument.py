"""Every argument of every collector, and every attribute of that name, has an effect or raises: none is swallowed.

Each is tried beside a collector that was not given it: what comes out must differ, or an error must say why not. An
argument that this file does not know fails it, so a new one brings its proof along.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule

from counting import CountingEnv, make_counting
from policies_for_tests import deterministic, stochastic
from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from swath.collectors.changeable import arguments_of
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymWrapper, SerialEnv
from swath.rollout.boundaries import TrajectoryIds
from swath.weight_update import NoWeightSyncScheme, SharedMemWeightSyncScheme

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]


class Seen(Exception):
    """Whoever was given was called."""


def is_called(*_: Any, **__: Any) -> Any:
    raise Seen


class NaNEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.full_like(observation, np.nan), *rest


class Asked:
    collection_stopped = is_called


class Buffer:
    """As others have it: what was called of it, and how often."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def extend(self, batch: Any) -> None:
        self.calls.append("extend")

    def add(self, step: Any) -> None:
        self.calls.append("add")


class Updater:
    def register_collector(self, collector: Any) -> None: ...

    def push_weights(self, *_: Any) -> None:
        raise Seen


class Scheme(SharedMemWeightSyncScheme):
    def send(self, *_: Any, **__: Any) -> None:
        raise Seen


class OtherCollector(Collector):
    def collect_into(self, *_: Any, **__: Any) -> int:
        raise Seen

    def rollout(self) -> Any:
        raise Seen


def threads_as_action(observation: torch.Tensor) -> torch.Tensor:
    """One-hot: how many threads torch has; and whether ``init_fn`` was called."""
    return torch.nn.functional.one_hot(torch.tensor(min(2, torch.get_num_threads())), 3).expand(
        *observation.shape[:-1], 3
    )


def say_threads() -> TensorDictModule:
    return TensorDictModule(threads_as_action, ["observation"], ["action"])


def tells_parent() -> TensorDictModule:
    """One-hot: whether the process that collects was forked by this one."""
    me = os.getpid()

    def act(observation: torch.Tensor) -> torch.Tensor:
        forked = int(os.getppid() == me)
        return torch.nn.functional.one_hot(torch.tensor(forked), 3).expand(*observation.shape[:-1], 3)

    return TensorDictModule(act, ["observation"], ["action"])


def takes_a_tensordict(data: Any, *, mode: str = "by keys") -> Any:
    return data.set("action", torch.zeros(3))


def one_of_three(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*observation.shape[:-1], 3)


# -- what is looked at ---------------------------------------------------------------------------------------------


def delivered(collector: Any) -> Any:
    """All that is in the batches; and how many there are."""
    collector.set_seed(0)
    seen = []
    for batch in collector:
        if batch is None:
            seen.append(None)
            continue
        leaves = sorted(batch.items(True, True), key=lambda item: str(item[0]))
        seen.append(
            (
                tuple(batch.shape),
                str(batch.device),
                [(key, leaf.dtype, leaf.numpy().tobytes()) for key, leaf in leaves if "worker" not in key],
            )
        )
    return seen


def keys(collector: Any) -> Any:
    batch = next(iter(collector))
    return sorted(map(str, batch.keys(True, True)))


def plan_of_policy(collector: Any) -> Any:
    next(iter(collector))
    return collector.policy_plan()


def same_memory(collector: Any) -> Any:
    stream = iter(collector)
    return next(stream) is next(stream)


def layout(collector: Any) -> Any:
    return collector.stats()["layout"]


def calls_of_buffer(collector: Any) -> Any:
    list(collector)
    return getattr(collector.replay_buffer, "calls", None)


def updated(collector: Any) -> Any:
    collector.update_policy_weights_()


def versions_with_no_update(collector: Any) -> Any:
    return [int(batch["policy_version"].max()) for batch in collector]


def versions_after_an_update(collector: Any) -> Any:
    collector.update_policy_weights_()
    return collector.policy_version


def number(collector: Any) -> Any:
    return collector.worker_idx


def mean_batch_size(collector: Any) -> Any:
    list(collector)
    return collector.stats()["mean_batch_size"]


def kind_of_pool(collector: Any) -> Any:
    return type(collector.env).__name__


def threads_here(collector: Any) -> Any:
    return torch.get_num_threads()


@dataclass(frozen=True)
class Trial:
    """An argument, what else both collectors are given, and what is looked at."""

    given: Any
    look: Callable[[Any], Any] = delivered
    beside: Mapping[str, Any] = field(default_factory=dict)
    #: Further arguments that the one needs to make sense.
    along: Mapping[str, Any] = field(default_factory=dict)


def nan_env() -> Any:
    return GymWrapper(NaNEnv())


#: For every collector.
COMMON: dict[str, Trial] = {
    "policy": Trial(deterministic()),
    "policy_factory": Trial(is_called, beside={"policy": None}),
    "frames_per_batch": Trial(5),
    "total_frames": Trial(30),
    "create_env_kwargs": Trial({"longest": 2}),
    "device": Trial("cuda:7"),
    "storing_device": Trial("cuda:7"),
    "policy_device": Trial("cuda:7"),
    "env_device": Trial("cuda:7"),
    "max_frames_per_traj": Trial(3),
    "init_random_frames": Trial(7),
    "reset_at_each_iter": Trial(True),
    "postproc": Trial(is_called),
    "exploration_type": Trial(InteractionType.DETERMINISTIC),
    "replay_buffer": Trial(Buffer),
    "track_policy_version": Trial(True, keys),
    "trajs_per_batch": Trial(2, beside={"create_env_kwargs": {"longest": 3}}),
    "trajs_per_write": Trial(3, calls_of_buffer),
    "auto_register_policy_transforms": Trial(True, keys, beside={"policy": stochastic()}),
    "traj_format": Trial("cat"),
    "split_trajs": Trial(True),
    "set_truncated": Trial(True),
    "track_traj_ids": Trial(False),
    "compact_obs": Trial(True),
    "check_finite": Trial(True),
    "pre_collect_hook": Trial(is_called),
    "post_collect_hook": Trial(is_called),
    "extend_buffer": Trial(False, calls_of_buffer),
    "trust_policy": Trial(True, beside={"policy": takes_a_tensordict}),
    "capture_policy": Trial(False, plan_of_policy, beside={"policy": one_of_three}),
    "compile_policy": Trial(True, along={"cudagraph_policy": True}),
    "cudagraph_policy": Trial(True),
    "weight_updater": Trial(Updater(), updated),
}
_MULTI: dict[str, Trial] = {
    "create_env_fn": Trial([make_counting] * 3),
    "reset_when_done": Trial(False),
    "num_workers": Trial(1, layout, beside={"create_env_fn": [make_counting] * 2, "num_workers": 2}),
    "envs_per_worker": Trial(2, layout, beside={"create_env_fn": [make_counting] * 2, "num_workers": None}),
    "collector_class": Trial(OtherCollector),
    "track_worker": Trial(True, keys),
    "track_env": Trial(True, keys),
    "interruptor": Trial(Asked()),
    "update_at_each_batch": Trial(True, versions_with_no_update, beside={"track_policy_version": True}),
    "weight_sync_schemes": Trial({"policy": Scheme()}, updated),
    "num_threads": Trial(2, threads_here),
    "num_sub_threads": Trial(2, beside={"policy": say_threads()}),
    "init_fn": Trial(is_called),
    "mp_start_method": Trial("fork", beside={"policy": tells_parent()}),
    "restart_workers": Trial(-1),
    "step_timeout_s": Trial(-1.0),
    "sync": Trial("neither"),
    "cat_results": Trial("neither"),
    "preemptive_threshold": Trial(7.0),
    "max_policy_lag": Trial(-1),
    "on_policy_lag": Trial("neither"),
}
_SYNC = {
    **_MULTI,
    "sync": Trial(False),
    "cat_results": Trial(0),
}
_ASYNC = {
    **_MULTI,
    "create_env_fn": Trial([lambda: make_counting(longest=2)]),
    "sync": Trial(True),
}
_SINGLE: dict[str, Trial] = {
    "create_env_fn": Trial(lambda longest=2: make_counting(longest)),
    "reset_when_done": Trial(False),
    "return_same_td": Trial(True, same_memory),
    "interruptor": Trial(Asked()),
    "worker_idx": Trial(3, number),
    "weight_sync_schemes": Trial({"policy": NoWeightSyncScheme()}, versions_after_an_update),
    "weight_recv_schemes": Trial({"policy": SharedMemWeightSyncScheme()}),
    "traj_pool": Trial(TrajectoryIds(7)),
    "control": Trial(object()),
}
_TWO_AT_A_TIME = {"create_env_fn": [make_counting] * 2, "min_batch_size": 2, "server_timeout": 10.0}
_BATCHED: dict[str, Trial] = {
    **_SINGLE,
    "create_env_fn": Trial([make_counting] * 3),
    "init_random_frames": Trial(8),
    "policy_factory": Trial(is_called),
    "max_batch_size": Trial(1, mean_batch_size, beside=_TWO_AT_A_TIME),
    "min_batch_size": Trial(9, beside={"max_batch_size": 4}),
    "server_timeout": Trial("soon"),
    "backend": Trial("multiprocessing", kind_of_pool, beside={"env_backend": None, "backend": "threading"}),
    "env_backend": Trial("multiprocessing", kind_of_pool),
    "policy_backend": Trial("multiprocessing"),
    "envs_per_worker": Trial(2, layout, beside=_TWO_AT_A_TIME),
    "num_workers": Trial(1, layout, beside=_TWO_AT_A_TIME),
    "server_config": Trial({"max_batch_size": 1, "no_such_entry": 2}),
    "device_config": Trial({"storing_device": "cuda:7"}),
    "yield_completed_trajectories": Trial(True),
    "policy_version": Trial(5),
    "track_policy_version": Trial(False, keys),
    "mp_start_method": Trial("spawn"),
    "num_sub_threads": Trial(2),
    "step_timeout_s": Trial(-1.0),
    "policy_version_key": Trial("version"),
    "weight_sync": Trial(object()),
    "weight_sync_model_id": Trial("critic"),
    "transport": Trial(object()),
    "verbose": Trial(True),
}
_NODES: dict[str, Trial] = {
    "create_env_fn": Trial([lambda longest=2: make_counting(longest)]),
    "sync": Trial(True),
    "num_collectors": Trial(3),
    "collector_class": Trial("neither"),
    "collector_kwargs": Trial({"no_such_argument": 1}),
    "num_workers_per_collector": Trial(0),
    "track_worker": Trial(True, keys),
    "track_env": Trial(True, keys),
    "update_after_each_batch": Trial(True, versions_with_no_update, beside={"track_policy_version": True}),
    "max_weight_update_interval": Trial(0, versions_with_no_update, beside={"track_policy_version": True}),
    "update_interval": Trial(0),
    "weight_sync_schemes": Trial({}, updated),
    "num_sub_threads": Trial(2, beside={"policy": say_threads()}),
    "restart_nodes": Trial(-1),
    "on_node_loss": Trial("neither"),
    "start_timeout_s": Trial(-1.0),
    "launcher": Trial("neither"),
    "slurm_kwargs": Trial({"partition": "any"}),
    "folder": Trial("somewhere"),
    "address": Trial("no.such.host.invalid"),
    "tcp_port": Trial(-1),
    "secret": Trial(3),
    "node_timeout_s": Trial(-1.0),
    "mp_start_method": Trial("neither"),
    "backend": Trial("neither"),
}

_BASE = {"frames_per_batch": 10, "total_frames": 40}
KINDS: dict[type, tuple[dict[str, Any], dict[str, Trial]]] = {
    Collector: ({**_BASE, "create_env_fn": make_counting}, _SINGLE),
    MultiSyncCollector: ({**_BASE, "create_env_fn": [make_counting] * 2, "num_workers": 1}, _SYNC),
    MultiAsyncCollector: ({**_BASE, "create_env_fn": [make_counting]}, _ASYNC),
    AsyncCollector: (
        {**_BASE, "create_env_fn": make_counting},
        {
            **_ASYNC,
            **_SINGLE,
            "weight_sync_schemes": _ASYNC["weight_sync_schemes"],
            "num_workers": Trial(3, layout),
            "envs_per_worker": Trial(3, layout),
        },
    ),
    # One env: what several give depends on which is ready first.
    AsyncBatchedCollector: ({**_BASE, "create_env_fn": [make_counting], "env_backend": "threading"}, _BATCHED),
    DistributedCollector: ({**_BASE, "create_env_fn": [make_counting]}, _NODES),
}

#: What cannot be seen here, and why it may be given.
NO_EFFECT_HERE = {
    "use_buffers": "says how TorchRL keeps its memory; what is delivered is the same",
    "no_cuda_sync": "there is no CUDA here: see test_devices_are_waited_for_unless_told_otherwise",
}


class OfAUser(Collector):
    def __init__(self, *args: Any, policy_name: str = "mine", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy_name = policy_name


def test_what_a_users_subclass_adds_is_its_own() -> None:
    with OfAUser(make_counting, frames_per_batch=10, policy_name="best") as collector:
        collector.policy_name += " of all"
        assert collector.policy_name == "best of all"
        with pytest.raises(AttributeError, match="policy of OfAUser cannot be changed"):
            collector.policy = None


def test_an_env_cannot_be_exchanged_and_a_hook_is_a_function() -> None:
    with Collector(make_counting, frames_per_batch=10) as collector:
        with pytest.raises(AttributeError, match="env of Collector cannot be changed"):
            collector.env = make_counting()
        with pytest.raises(TypeError, match="post_collect_hook must be a function, or None; got 7"):
            collector.post_collect_hook = 7


def test_a_state_of_other_envs_changes_nothing() -> None:
    policies = [deterministic(), deterministic()]
    one, several = (
        Collector(SerialEnv(count, make_counting), policy, frames_per_batch=10)
        for count, policy in zip((1, 2), policies, strict=True)
    )
    before = {name: tensor.clone() for name, tensor in policies[0].state_dict().items()}
    with one, several, pytest.raises(ValueError, match="state of 2 Gymnasium envs; it takes"):
        one.load_state_dict(several.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policies[0].state_dict().items())


def trials(kind: type) -> dict[str, Trial]:
    return {**COMMON, **KINDS[kind][1]}


def cases() -> list[Any]:
    """All of them; those of which another kind has its twin, and those that start nodes, only in `make test-all`."""
    slow = (AsyncCollector, DistributedCollector)
    return [
        pytest.param(kind, name, id=f"{kind.__name__}-{name}", marks=[pytest.mark.slow] if kind in slow else [])
        for kind in KINDS
        for name in sorted(arguments_of(kind) - NO_EFFECT_HERE.keys() - {"env"})
    ]


def base(kind: type, name: str, trial: Trial) -> dict[str, Any]:
    torch.manual_seed(0)
    given = {**KINDS[kind][0], "policy": stochastic(), **trial.beside}
    if name == "check_finite":
        nan = [nan_env] if isinstance(given["create_env_fn"], list) else nan_env
        given |= {"create_env_fn": nan, "policy": RandomPolicy()}
    if name == "traj_format":
        given |= {"trajs_per_batch": 2, "create_env_kwargs": {"longest": 3}}
    if name in ("extend_buffer", "trajs_per_write"):
        given["replay_buffer"] = Buffer
    if name == "trajs_per_write":
        given |= {"trajs_per_batch": 2, "create_env_kwargs": {"longest": 2}}
    return given


def outcome(kind: type, given: dict[str, Any], look: Callable[[Any], Any], change: Callable[[Any], None]) -> Any:
    """What is seen of a collector; or what it raises."""
    CountingEnv.made = 0
    torch.manual_seed(1)
    given = {name: value() if value is Buffer else value for name, value in given.items()}
    try:
        with kind(**given) as collector:
            change(collector)
            return look(collector)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(("kind", "name"), cases())
def test_an_argument_has_an_effect_or_raises(kind: type, name: str) -> None:
    assert name in trials(kind), f"{kind.__name__}({name}=...) is new: add what it does to this file"
    trial = trials(kind)[name]
    given = base(kind, name, trial)
    without = outcome(kind, given, trial.look, lambda _: None)
    is_error = isinstance(without, tuple) and isinstance(without[0], type)
    assert is_error == (name == "trust_policy"), without  # that one is for policies that fail without it
    tried = outcome(kind, {**given, name: trial.given, **trial.along}, trial.look, lambda _: None)
    assert tried != without


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector])
def test_an_argument_that_is_assigned_later_has_an_effect_or_raises(kind: type) -> None:
    silent = []
    with kind(**base(kind, "", Trial(None))) as fixed:
        for name in sorted(arguments_of(kind) - kind._assignable):  # type: ignore[attr-defined]
            try:
                setattr(fixed, name, trials(kind)[name].given if name in trials(kind) else 1)
            except AttributeError as error:
                assert "cannot be changed: " in str(error)  # noqa: PT017
            else:
                silent.append(name)
    assert not silent
    for name in kind._assignable:  # type: ignore[attr-defined]
        trial = trials(kind)[name]
        given = base(kind, name, trial)
        without = outcome(kind, given, trial.look, lambda _: None)
        tried = outcome(kind, given, trial.look, lambda made, name=name, trial=trial: setattr(made, name, trial.given))
        assert tried != without, name


def test_what_is_assigned_to_what_workers_do_by_themselves_is_refused() -> None:
    """They were sent what to do when they were started."""
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    with MultiSyncCollector([make_counting], deterministic(), frames_per_batch=10, replay_buffer=rb) as collector:
        collector.post_collect_hook = None  # nobody writes by himself yet
        collector.start()
        for name in ("postproc", "pre_collect_hook", "post_collect_hook", "check_finite"):
            with pytest.raises(RuntimeError, match=rf"{name}: .*assign it before start\(\)"):
                setattr(collector, name, is_called)


@pytest.mark.parametrize("name", ["total_frames", "init_random_frames", "max_frames_per_traj"])
@pytest.mark.parametrize("value", [-5, float("nan"), "many", True, 1.5])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_number_that_makes_no_sense_is_refused(kind: type, name: str, value: Any) -> None:
    given = KINDS[kind][0]
    with pytest.raises((TypeError, ValueError), match=rf"{name} must be .* or -1 \(.*\); got"):
        kind(**{**given, name: value})


def test_devices_are_waited_for_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from swath.collectors.devices import Devices

    waits: list[Devices] = []
    monkeypatch.setattr(Devices, "synchronize", lambda devices: waits.append(devices))
    for no_wait, expected in ((False, 4), (True, 0)):
        waits.clear()
        list(Collector(make_counting, frames_per_batch=10, total_frames=40, no_cuda_sync=no_wait))
        assert len(waits) == expected
