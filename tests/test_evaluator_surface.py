"""Evaluator beside TorchRL's: what its arguments mean, what its users bring, and what they do to it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from leaks import wait_until
from swath.collectors import Evaluator, RandomPolicy
from swath.envs import Compose, EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv, VecNorm
from swath.envs.transforms import Transform
from swath.errors import CollectorClosed, WorkerDied
from swath.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from test_evaluator import BACKENDS, Broken, EchoEnv, echo_policy, gated, is_evaluating, make

pytestmark = pytest.mark.processes


# -- dump(step=None) -------------------------------------------------------------------------------------------------


class Recorder(Transform):
    """A transform that has videos."""

    def __init__(self) -> None:
        super().__init__(["observation"])
        self.steps: list[int | None] = []

    def _apply_transform(self, value: Any) -> Any:
        return value

    def dump(self, step: int | None = None) -> None:
        self.steps.append(step)


class SuffixRecorder(Transform):
    def __init__(self) -> None:
        super().__init__(["observation"])
        self.suffixes: list[str | None] = []

    def _apply_transform(self, value: Any) -> Any:
        return value

    def dump(self, suffix: str | None = None) -> None:
        self.suffixes.append(suffix)


def test_dump_gets_the_step_and_reaches_every_recorder() -> None:
    first, second, inside, other = Recorder(), Recorder(), Recorder(), SuffixRecorder()
    env = TransformedEnv(
        SerialEnv(1, lambda: TransformedEnv(GymWrapper(EchoEnv(2)), inside)), Compose(first, Compose(second), other)
    )
    with Evaluator(env, echo_policy(1.0), num_trajectories=2) as evaluator:
        evaluator.evaluate(step=70)
        evaluator.evaluate()
    assert first.steps == second.steps == inside.steps == [70, 0]
    assert other.suffixes == [None, None]


def test_dump_video_false() -> None:
    recorder = Recorder()
    env = TransformedEnv(GymWrapper(EchoEnv(2)), recorder)
    with Evaluator(env, echo_policy(1.0), num_trajectories=1, dump_video=False) as evaluator:
        evaluator.evaluate(step=70)
    assert recorder.steps == []


# -- traj_format -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_traj_format_cat_is_what_metrics_fn_gets(backend: str) -> None:
    def metrics(episodes: TensorDictBase) -> dict[str, Any]:
        ids = episodes["collector", "traj_ids"]
        return {"shape": tuple(episodes.shape), "counts": ids.unique(return_counts=True)[1].tolist()}

    env = lambda: SerialEnv(2, [lambda: EchoEnv(2), lambda: EchoEnv(5)])  # noqa: E731
    kwargs = {"num_trajectories": 3, "metrics_fn": metrics}
    with make(backend, env, collector_kwargs={"traj_format": "cat"}, **kwargs) as evaluator:
        result = evaluator.evaluate()
    assert result["eval/shape"] == (9,)
    assert sorted(result["eval/counts"]) == [2, 2, 5]
    assert (result["eval/num_episodes"], result["eval/reward"]) == (3, 3.0)
    with pytest.raises(ValueError, match="traj_format must be 'padded' or 'cat'"):
        make("thread", EchoEnv(1), collector_kwargs={"traj_format": "nested"})


@pytest.mark.parametrize("name", ["postproc", "init_random_frames", "set_truncated", "post_collect_hook", "backend"])
def test_what_would_have_no_effect_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no effect on whole episodes"):
        make("thread", EchoEnv(1), collector_kwargs={name: 1})
    make("thread", EchoEnv(1), collector_kwargs={name: None}).shutdown()


def test_collector_cls_by_name() -> None:
    with make("thread", EchoEnv(3), collector_cls="Collector") as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 3.0
    with pytest.raises(TypeError, match="collector_cls must be"):
        make("thread", EchoEnv(3), collector_cls="Collecter")


# -- factories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_policy_factory_partial_random_policy(backend: str) -> None:
    spec = GymEnv("CartPole-v1").action_spec
    factory = partial(RandomPolicy, spec)
    with Evaluator("CartPole-v1", policy_factory=factory, num_trajectories=2, backend=backend) as evaluator:
        assert evaluator.evaluate()["eval/num_episodes"] == 2


class Factory:
    def __call__(self, env: EnvBase, value: float = 2.0) -> Any:
        assert isinstance(env, EnvBase)
        return echo_policy(value)

    def method(self, env: EnvBase) -> Any:
        return self(env)


FACTORIES: dict[str, Any] = {
    "nothing": lambda: echo_policy(2.0),
    "env": lambda env: echo_policy(2.0),
    "any name": lambda e: Factory()(e),
    "env=None": lambda env=None: Factory()(env),  # type: ignore
    "keyword only": lambda *, env: Factory()(env),
    "a default": lambda value=2.0: echo_policy(value),
    "*args": lambda *args: Factory()(*args),
    "**kwargs": lambda **kwargs: echo_policy(2.0),
    "object": Factory(),
    "method": Factory().method,
    "partial": partial(Factory(), value=2.0),
    "partial with all": partial(echo_policy, 2.0),
    "class": type("Doubling", (nn.Module,), {"forward": lambda self, observation: 2 * observation}),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_policy_factories_of_all_kinds(kind: str) -> None:
    with Evaluator(EchoEnv(1), policy_factory=FACTORIES[kind], num_trajectories=1) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 2.0


class Twice:
    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return 2 * observation

    def method(self, observation: torch.Tensor) -> torch.Tensor:
        return 2 * observation


@pytest.mark.parametrize(
    "policy",
    [
        Twice(),
        Twice().method,
        lambda observation: 2 * observation,
        partial(lambda scale, observation: scale * observation, 2),
    ],
    ids=["object", "method", "lambda", "partial"],
)
def test_policies_without_weights(policy: Any) -> None:
    with Evaluator(EchoEnv(3), policy, num_trajectories=1) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 6.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "env",
    ["CartPole-v1", lambda: GymEnv("CartPole-v1"), partial(GymEnv, "CartPole-v1"), EchoEnv, [lambda: EchoEnv(1)]],
    ids=["id", "lambda", "partial", "class", "list of one"],
)
def test_env_factories_of_all_kinds(backend: str, env: Any) -> None:
    if backend == "process" and isinstance(env, list):
        env = env[0]
    with Evaluator(env, policy_factory=RandomPolicy, num_trajectories=2, max_steps=5, backend=backend) as evaluator:
        assert evaluator.evaluate()["eval/num_episodes"] == 2


def test_a_thread_makes_envs_and_policies_where_it_evaluates() -> None:
    """A window, or a database, may belong to the thread that made it."""
    threads: list[str] = []

    class Watching(EchoEnv):
        def __init__(self) -> None:
            threads.append(threading.current_thread().name)
            super().__init__(1)

        def step(self, action: Any) -> Any:
            threads.append(threading.current_thread().name)
            return super().step(action)

        def close(self) -> None:
            threads.append(threading.current_thread().name)

    def make_policy(env: Any) -> Any:
        threads.append(threading.current_thread().name)
        return echo_policy(1.0)

    with Evaluator(Watching, policy_factory=make_policy, num_trajectories=1) as evaluator:
        evaluator.evaluate()
    assert len(threads) >= 4
    assert set(threads) == {"swath-evaluator"}


def test_a_thread_makes_policies_on_the_programs_default_device() -> None:
    devices: list[str] = []

    def make_policy(env: Any) -> Any:
        devices.append(torch.empty(1).device.type)
        with torch.device("cpu"):
            return echo_policy(1.0)

    with torch.device("meta"):
        evaluator = Evaluator(EchoEnv(1), policy_factory=make_policy, num_trajectories=1)
    with evaluator:
        assert evaluator.evaluate()["eval/reward"] == 1.0
    assert devices == ["meta"]


def test_a_factory_that_raises_leaves_no_thread() -> None:
    def fail() -> Any:
        raise Broken("no simulator")

    with pytest.raises(Broken, match="no simulator"):
        Evaluator(fail, policy_factory=lambda env: echo_policy(1.0))
    assert wait_until(lambda: not is_evaluating())


# -- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_do_not_learn_from_evaluations() -> None:
    norm = VecNorm(["observation"])
    env = TransformedEnv(GymEnv("CartPole-v1"), norm)
    env.rollout(20)
    before = {name: torch.as_tensor(value).clone() for name, value in norm.state_dict().items()}
    with Evaluator(env, RandomPolicy(), num_trajectories=2) as evaluator:
        evaluator.evaluate()
        assert norm.frozen
        after = norm.state_dict()
    assert before
    assert all(torch.equal(torch.as_tensor(after[name]), value) for name, value in before.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", [None, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_weights_dict_reaches_a_transform(backend: str, scheme: Any) -> None:
    """The statistics of training are those of the evaluation."""

    def metrics(episodes: TensorDictBase) -> dict[str, Any]:
        return {"first": episodes["observation"][0, 0].tolist()}

    def env_of(norm: VecNorm) -> TransformedEnv:
        return TransformedEnv(GymWrapper(EchoEnv(3)), Compose(norm))

    trained = VecNorm(["observation"])
    env_of(trained).rollout(30, lambda td: td.set("action", torch.randn(1)))
    state = {name: torch.as_tensor(value) for name, value in trained.state_dict().items()}
    moved = {
        name: value + number if value.is_floating_point() else value
        for number, (name, value) in enumerate(state.items(), 1)
    }
    path = "env.transform[0]"

    def seen() -> TransformedEnv:
        norm = VecNorm(["observation"])
        env = env_of(norm)
        env.rollout(2, lambda td: td.set("action", torch.zeros(1)))
        return env

    schemes = None if scheme is None else {"policy": scheme(), path: scheme()}
    with Evaluator(
        seen,
        policy_factory=lambda env: echo_policy(1.0),
        num_trajectories=1,
        metrics_fn=metrics,
        backend=backend,
        weight_sync_schemes=schemes,
    ) as evaluator:
        before = evaluator.evaluate(echo_policy(2.0))
        after = evaluator.evaluate(echo_policy(2.0), weights_dict={path: moved})
    expected = VecNorm(["observation"])
    other = env_of(expected)
    other.rollout(2, lambda td: td.set("action", torch.zeros(1)))
    expected.load_state_dict(moved)
    expected.freeze()
    assert after["eval/first"] == pytest.approx(other.reset()["observation"].tolist())
    assert before["eval/first"] != after["eval/first"]


# -- weight_sync_schemes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, NoWeightSyncScheme])
@pytest.mark.parametrize("sync", [True, False])
def test_weight_sync_schemes(backend: str, scheme: Any, sync: bool) -> None:
    with make(
        backend, lambda: EchoEnv(1), weight_sync_schemes={"policy": scheme(sync=sync)}, busy_policy="queue"
    ) as evaluator:
        assert "Process" in repr(evaluator)
        for number in range(3):
            evaluator.trigger_eval(echo_policy(float(number)))
        rewards = [(evaluator.wait() or {})["eval/reward"] for _ in range(3)]
        last = evaluator.evaluate()["eval/reward"]
    if scheme is NoWeightSyncScheme:
        assert [*rewards, last] == [1.0] * 4
    else:
        assert [*rewards, last] == [0.0, 1.0, 2.0, 2.0]


def test_a_scheme_carries_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    post = MultiProcessWeightSyncScheme._publish
    monkeypatch.setattr(
        MultiProcessWeightSyncScheme, "_publish", lambda self, weights: (sent.append(weights), post(self, weights))
    )
    with make("process", EchoEnv, weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()}) as evaluator:
        evaluator.evaluate(echo_policy(3.0))
        evaluator.evaluate()
    assert len(sent) == 1


def test_weights_without_a_scheme_are_refused() -> None:
    with make("process", EchoEnv, weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()}) as evaluator:
        with pytest.raises(KeyError, match=r"no scheme for 'env.transform\[0\]'; it has 'policy'"):
            evaluator.evaluate(weights_dict={"env.transform[0]": {}})
        with pytest.raises(KeyError, match="do not fit"):
            evaluator.evaluate({"x": torch.ones(1)})
        assert evaluator.evaluate(echo_policy(2.0))["eval/reward"] == 8.0


def test_a_process_that_dies_while_weights_are_sent() -> None:
    with make("process", EchoEnv, weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()}) as evaluator:
        evaluator._backend.kill()
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            evaluator.evaluate(echo_policy(2.0))


@pytest.mark.parametrize(
    ("kind", "message", "schemes", "kwargs"),
    [
        (TypeError, "takes a SharedMemWeightSyncScheme", {"policy": RayWeightSyncScheme()}, {}),
        (TypeError, "takes a SharedMemWeightSyncScheme", {"policy": "shared"}, {}),
        (TypeError, "is a dict", [MultiProcessWeightSyncScheme()], {}),
        (KeyError, "no model 'critic'", {"critic": MultiProcessWeightSyncScheme()}, {}),
        (TypeError, "to a Ray actor Ray brings", {"policy": MultiProcessWeightSyncScheme()}, {"backend": "ray"}),
        (ValueError, "makes the env elsewhere", {"policy": MultiProcessWeightSyncScheme()}, {"env": EchoEnv()}),
    ],
)
def test_weight_sync_schemes_that_do_not_fit(kind: Any, message: str, schemes: Any, kwargs: dict) -> None:
    given: dict[str, Any] = {"env": EchoEnv, "policy_factory": lambda env: echo_policy(1.0), **kwargs}
    with pytest.raises(kind, match=message):
        Evaluator(given.pop("env"), weight_sync_schemes=schemes, **given)


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_and_weights_dict_are_merged() -> None:
    with make("thread", EchoEnv(1)) as evaluator:
        assert evaluator.evaluate(echo_policy(4.0), weights_dict={})["eval/reward"] == 4.0
        assert evaluator.evaluate(echo_policy(5.0), weights_dict={"policy": None})["eval/reward"] == 5.0
        with pytest.raises(ValueError, match="not both"):
            evaluator.evaluate(echo_policy(1.0), weights_dict={"policy": echo_policy(1.0)})


def test_extract_weights_is_on_the_cpu() -> None:
    weights = Evaluator.extract_weights(nn.Linear(1, 1))
    assert isinstance(weights, TensorDict)
    assert weights.device == torch.device("cpu")


# -- what users do to it ---------------------------------------------------------------------------------------------


def test_skip_is_the_default() -> None:
    with gated() as (evaluator, env):
        assert evaluator.trigger_eval()
        assert not evaluator.trigger_eval()
        env.gate.set()


def test_on_result_may_evaluate_again() -> None:
    """From the evaluator's own thread it can trigger, and must not wait for itself."""
    caught: list[BaseException] = []

    def again(result: TensorDictBase) -> None:
        if result["eval/step"] == 0:
            for wait in (evaluator.evaluate, evaluator.wait):
                try:
                    wait()
                except RuntimeError as error:
                    caught.append(error)
            evaluator.trigger_eval(step=2)

    with make("thread", EchoEnv(1), on_result=again, busy_policy="queue") as evaluator:
        evaluator.trigger_eval(step=0)
        results = [evaluator.wait(20), evaluator.wait(20)]
    assert [result and result["eval/step"] for result in results] == [0, 2]
    assert ["waits for itself" in str(error) for error in caught] == [True, True]


def test_shutdown_twice_and_from_another_thread() -> None:
    with gated() as (evaluator, env):
        evaluator.trigger_eval()
        assert env.is_in_step.wait(10)
        env.gate.set()
        threads = [threading.Thread(target=evaluator.shutdown) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert wait_until(lambda: not is_evaluating())
        with pytest.raises(CollectorClosed):
            evaluator.trigger_eval()
