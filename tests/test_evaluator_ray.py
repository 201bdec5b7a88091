"""Evaluations in Ray actors, and a served policy for collectors there: real clusters of this machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from leaks import wait_until
from swath.collectors import Collector, Evaluator
from swath.collectors.distributed import RayCollector, RayEvalWorker
from swath.envs import SerialEnv
from swath.errors import CollectorClosed, NodeLost
from swath.integrations.ray import start_ray
from swath.modules import InferenceServer, RayTransport
from test_evaluator import Broken, EchoEnv, StuckEnv, echo_policy

ray: Any = importlib.import_module("ray") if importlib.util.find_spec("ray") else None
pytestmark = [pytest.mark.ray, pytest.mark.skipif(ray is None, reason="needs the extra `ray`")]


@pytest.fixture(autouse=True, scope="module")
def _cluster() -> Any:
    start_ray({"num_cpus": 4})
    yield
    ray.shutdown()


def make(env: Any, value: float = 1.0, **kwargs: Any) -> Evaluator:
    return Evaluator(env, policy_factory=lambda env: echo_policy(value), backend="ray", num_gpus=0, **kwargs)


# -- Evaluator(backend="ray") ----------------------------------------------------------------------------------------


class PidEnv(EchoEnv):
    """Whose process it is, and what was imported when it was made."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0] * os.getpid(), {}


def test_evaluator_backend_ray() -> None:
    seen: list[float] = []
    with make(
        lambda: SerialEnv(2, [lambda: EchoEnv(2), lambda: EchoEnv(10)]),
        num_trajectories=4,
        busy_policy="queue",
        on_result=lambda result: seen.append(result["eval/reward"].item()),
        metrics_fn=lambda episodes: {"pid": os.getpid()},
    ) as evaluator:
        assert "Ray" in repr(evaluator)
        result = evaluator.evaluate(step=7)
        assert result.pop("eval/fps") > 0
        assert result.pop("eval/pid") != os.getpid()
        assert result == {
            "eval/reward": 6.0,
            "eval/reward_std": 4.0,
            "eval/num_episodes": 4,
            "eval/episode_length": 6.0,
            "eval/step": 7,
        }
        for number in range(3):
            assert evaluator.trigger_eval(echo_policy(float(number)), step=number)
        results = [evaluator.wait(60) for _ in range(3)]
        assert [result and (result["eval/step"], result["eval/reward"]) for result in results] == [
            *((number, 6.0 * number) for number in range(3))
        ]
        evaluator.set_seed(0)
        with pytest.raises(KeyError, match="do not fit"):
            evaluator.evaluate({"x": torch.ones(1)})
    assert seen == [6.0, 0.0, 6.0, 12.0]
    evaluator.shutdown()
    with pytest.raises(CollectorClosed):
        evaluator.evaluate()


def test_init_fn_comes_before_torch() -> None:
    def init() -> None:
        os.environ["SWATH_TEST_LATE"] = str("torch" in sys.modules)

    with make(EchoEnv, init_fn=init, metrics_fn=lambda _: {"late": os.environ["SWATH_TEST_LATE"]}) as evaluator:
        assert evaluator.evaluate()["eval/late"] == "False"


def test_what_is_raised_in_the_actor_keeps_its_type() -> None:
    def fail(*_: Any) -> Any:
        raise Broken("not today")

    with pytest.raises(Broken, match="not today"):
        make(fail)
    with make(EchoEnv, metrics_fn=fail) as evaluator, pytest.raises(Broken, match="not today"):
        evaluator.evaluate()


def test_gpus_that_do_not_exist_are_not_waited_for() -> None:
    with pytest.raises(ValueError, match=r"num_gpus=1, and the Ray cluster has 0: give num_gpus=0"):
        Evaluator(EchoEnv, policy_factory=lambda env: echo_policy(1.0), backend="ray")


def test_shutdown_ends_an_actor_that_does_not_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "begun")
    evaluator = make(lambda: StuckEnv(path))
    evaluator.trigger_eval()
    assert wait_until(lambda: os.path.exists(path))
    evaluator.shutdown(timeout=2)
    assert not evaluator.pending
    assert evaluator.wait() is None


def test_shutdown_stops_an_evaluation_that_would_not_end() -> None:
    evaluator = make(lambda: EchoEnv(None))
    evaluator.trigger_eval()
    evaluator.shutdown()
    assert not evaluator.pending


def test_a_killed_actor_is_named() -> None:
    with make(EchoEnv, metrics_fn=lambda _: os._exit(3)) as evaluator:
        with pytest.raises(NodeLost, match="the Ray actor of the Evaluator is gone"):
            evaluator.evaluate()
        with pytest.raises(NodeLost):
            evaluator.evaluate()


# -- RayEvalWorker ---------------------------------------------------------------------------------------------------


class Filmed(EchoEnv):
    """Renders its step."""

    render_mode = "rgb_array"
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (as Gymnasium has it)

    def render(self) -> Any:
        return np.full((4, 6, 3), self.num_steps, np.uint8)


def test_ray_eval_worker() -> None:
    worker = RayEvalWorker(None, lambda: Filmed(5), lambda env: echo_policy(2.0), num_gpus=0)
    assert worker.poll() is None
    worker.submit(None, max_steps=100)
    result = worker.poll(timeout=None)
    assert result is not None
    assert result["reward"] == 10.0
    assert result["frames"].shape == (1, 5, 3, 4, 6)
    assert result["frames"].dtype == torch.uint8
    assert result["frames"][0, :, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert worker.poll() is None  # it was read
    worker.submit(TensorDict.from_module(echo_policy(3.0)).data, max_steps=3)
    assert (worker.poll(timeout=60) or {})["reward"] == 9.0
    worker.submit(echo_policy(1.0), max_steps=12, break_when_any_done=False)
    assert (worker.poll(timeout=60) or {})["reward"] == 5.0  # two episodes that ended
    worker.submit({"x": torch.ones(1)}, max_steps=3)
    with pytest.raises(KeyError, match="do not fit"):
        worker.poll(timeout=60)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(CollectorClosed):
        worker.submit(None, max_steps=1)


def test_ray_eval_worker_from_name() -> None:
    worker = RayEvalWorker(None, lambda: EchoEnv(4), lambda env: echo_policy(1.0), num_gpus=0, name="judge")
    other = RayEvalWorker.from_name("judge")
    other.submit(echo_policy(3.0), max_steps=10)
    result = other.poll(timeout=60)
    assert result == {"reward": 12.0, "frames": None}
    worker.submit(None, max_steps=10)  # with the weights that it has from the other
    assert (worker.poll(timeout=60) or {})["reward"] == 12.0
    worker.shutdown()
    other.submit(None, max_steps=1)
    with pytest.raises(NodeLost, match="the Ray actor of a RayEvalWorker is gone"):
        other.poll(timeout=60)
    other.shutdown()
    with pytest.raises(ValueError, match="nobody"):
        RayEvalWorker.from_name("nobody")


# -- a served policy -------------------------------------------------------------------------------------------------


def make_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("where", ["actor", "transport"])
def test_served_policy_on_ray(where: str) -> None:
    server: Any = (
        InferenceServer(policy_factory=make_policy, service_backend="ray")
        if where == "actor"
        else InferenceServer(make_policy(), RayTransport())
    )
    policy = make_policy()
    with server:
        server.update_policy_weights_(policy)
        collector: Any = Collector(
            ["CartPole-v1"] * 2, server, backend="ray", frames_per_batch=20, total_frames=40, sync=True
        )
        assert isinstance(collector, RayCollector)
        versions = []
        for batch in collector:
            versions += batch["policy_version"].unique().tolist()
            torch.testing.assert_close(batch["action"], policy(batch.select("observation"))["action"])
            if len(versions) == 1:
                collector.update_policy_weights_  # noqa: B018 (the server has the weights)
                nn.init.constant_(policy.get_parameter("module.bias"), 9.0)
                server.update_policy_weights_(policy)
        assert versions == [1, 2]
        assert server.stats()["requests"] >= 40


def test_a_server_that_nodes_cannot_reach_is_refused() -> None:
    with InferenceServer(make_policy()) as server, pytest.raises(TypeError, match="nodes cannot reach this"):
        RayCollector(["CartPole-v1"], server, frames_per_batch=20, total_frames=40)
