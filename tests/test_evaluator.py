"""Evaluator: exact quotas, snapshots of weights, results in order, errors with their type, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from counting import CountingTensorDictEnv, make_counting
from leaks import children, wait_until
from policies_for_tests import deterministic
from swath.collectors import Collector, Evaluator, MultiSyncCollector, RandomPolicy
from swath.collectors.evaluation import EpisodeLedger, episode_quotas
from swath.envs import Composite, EnvBase, GymWrapper, ParallelEnv, SerialEnv, Unbounded
from swath.errors import CollectorClosed, WorkerDied

pytestmark = pytest.mark.processes

BACKENDS = ["thread", "process"]


class EchoEnv(gymnasium.Env):
    """The reward is the action; an episode has ``length`` steps, and none ends if that is None."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(self, length: int | None = 4) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.num_steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.num_steps += 1
        return np.ones(1, np.float32), float(action[0]), self.num_steps == self.length, False, {}


class GatedEnv(EchoEnv):
    """Every step waits for the gate."""

    def __init__(self, length: int = 1) -> None:
        super().__init__(length)
        self.is_in_step = threading.Event()
        self.gate = threading.Event()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.is_in_step.set()
        assert self.gate.wait(60)
        return super().step(action)


class Broken(Exception):
    """What a simulator of a user raises."""


class BrokenOnceEnv(EchoEnv):
    """Raises in its third step."""

    total_steps = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.total_steps += 1
        if self.total_steps == 3:
            raise Broken("out of order")
        return super().step(action)


class StuckEnv(EchoEnv):
    """A step that does not end, and a file that tells that it has begun."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        Path(self.path).touch()
        time.sleep(600)
        raise AssertionError


def echo_policy(value: float) -> Any:  # a TensorDictModule, whose ``module`` is typed as any function
    """Always the same action."""
    net = nn.Linear(1, 1)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, value)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def make(backend: str, env: Any, value: float = 1.0, **kwargs: Any) -> Evaluator:
    return Evaluator(env, policy_factory=lambda env: echo_policy(value), backend=backend, **kwargs)


@contextlib.contextmanager
def gated(**kwargs: Any) -> Iterator[tuple[Evaluator, GatedEnv]]:
    """An evaluation in a thread, that waits until it may go on."""
    env = GatedEnv()
    evaluator = Evaluator(env, echo_policy(1.0), num_trajectories=1, **kwargs)
    try:
        yield evaluator, env
    finally:
        env.gate.set()
        evaluator.shutdown()


# -- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_result(backend: str) -> None:
    with make(backend, lambda: EchoEnv(4), 2.0, num_trajectories=3) as evaluator:
        result = evaluator.evaluate(step=70)
        assert result.pop("eval/fps") > 0
        assert result == {
            "eval/reward": 8.0,
            "eval/reward_std": 0.0,
            "eval/num_episodes": 3,
            "eval/episode_length": 4.0,
            "eval/step": 70,
        }


def uneven_envs(*lengths: int) -> SerialEnv:
    return SerialEnv(len(lengths), [lambda length=length: EchoEnv(length) for length in lengths])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frames_per_batch", [1, 7, 1000])
@pytest.mark.parametrize(
    ("num_trajectories", "expected"),
    [
        (10, [2] * 5 + [10] * 5),
        (5, [2] * 3 + [10] * 2),
        (1, [2]),
    ],
)
def test_short_episodes_do_not_count_more(
    backend: str, frames_per_batch: int, num_trajectories: int, expected: list[int]
) -> None:
    """Of the first 10 episodes that end, 9 are of the env with short ones: their mean reward would be 2.8, not 6."""
    evaluator = make(
        backend,
        lambda: uneven_envs(2, 10),
        num_trajectories=num_trajectories,
        frames_per_batch=frames_per_batch,
    )
    with evaluator:
        result = evaluator.evaluate()
        again = evaluator.evaluate()
    lengths = torch.tensor(expected, dtype=torch.float64)
    for each in (result, again):
        assert each["eval/reward"] == each["eval/episode_length"] == pytest.approx(lengths.mean().item())
        assert each["eval/reward_std"] == pytest.approx(lengths.std(correction=0).item())
        assert each["eval/num_episodes"] == num_trajectories


def test_fewer_episodes_than_envs() -> None:
    assert episode_quotas(2, 4) == [1, 1, 0, 0]
    with make("thread", uneven_envs(2, 4, 1, 1), num_trajectories=2) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == 3.0


def test_the_first_episodes_of_each_env_count() -> None:
    """Whatever the batches are: the oracle cuts the whole run at once."""
    done = torch.rand(3, 200, 1, generator=torch.Generator().manual_seed(0)) < 0.15
    number = torch.arange(600).reshape(3, 200)
    quotas = [4, 1, 3]
    expected = []
    for env, quota in enumerate(quotas):
        start = 0
        for end in done[env, :, 0].nonzero().reshape(-1).tolist()[:quota]:
            expected.append(number[env, start : end + 1].tolist())
            start = end + 1
    for num_steps in (1, 3, 200):
        ledger = EpisodeLedger(quotas, ("next", "done"))
        for start in range(0, 200, num_steps):
            if ledger.is_full:
                break
            steps = slice(start, start + num_steps)
            after = TensorDict(done=done[:, steps], batch_size=done[:, steps].shape[:2])
            ledger.add(TensorDict(number=number[:, steps], next=after, batch_size=after.batch_size))
        assert ledger.is_full
        assert [episode["number"].tolist() for episode in ledger.episodes()] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_truncation_ends_an_episode(backend: str) -> None:
    with make(backend, lambda: EchoEnv(None), num_trajectories=4, max_steps=6) as evaluator:
        result = evaluator.evaluate()
    assert (result["eval/reward"], result["eval/episode_length"], result["eval/num_episodes"]) == (6.0, 6.0, 4)


def test_every_evaluation_begins_with_new_episodes() -> None:
    """A batch goes on behind the last episode that counts; what is left of it must not be the next one's first."""
    with make("thread", EchoEnv(10), num_trajectories=1, frames_per_batch=7) as evaluator:
        assert [evaluator.evaluate()["eval/episode_length"] for _ in range(3)] == [10.0] * 3


def test_parallel_env() -> None:
    env = ParallelEnv(2, [lambda: EchoEnv(2), lambda: EchoEnv(10)])
    with make("thread", env, num_trajectories=4) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 6.0
    assert env.is_closed


class AccountingEnv(CountingTensorDictEnv):
    """Tells an episode's reward and length by itself; and has videos."""

    def __init__(self) -> None:
        super().__init__(longest=5)
        self.observation_spec = Composite(
            observation=Unbounded((4,)), episode_reward=Unbounded((1,)), step_count=Unbounded((1,))
        )
        self.num_dumped = 0

    def _with_account(self, data: TensorDict, number: float) -> TensorDict:
        return data.set("episode_reward", torch.full((1,), number)).set("step_count", torch.full((1,), 2 * number))

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        return self._with_account(super()._reset(tensordict, **kwargs), 0.0)

    def _step(self, tensordict: Any) -> TensorDict:
        return self._with_account(super()._step(tensordict), 100.0)

    def dump(self) -> None:
        self.num_dumped += 1


@pytest.mark.parametrize("dump_video", [True, False])
def test_an_env_that_keeps_account_is_believed(dump_video: bool) -> None:
    env = AccountingEnv()
    with Evaluator(env, deterministic(), num_trajectories=3, dump_video=dump_video) as evaluator:
        result = evaluator.evaluate()
        assert (result["eval/reward"], result["eval/episode_length"]) == (100.0, 200.0)
        assert env.num_dumped == int(dump_video)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_fn_sees_whole_episodes(backend: str) -> None:
    def metrics(episodes: TensorDictBase) -> dict[str, Any]:
        mask = episodes["collector", "mask"]
        return {
            "shape": tuple(episodes.shape),
            "lengths": mask.sum(1).tolist(),
            "largest": episodes["next", "reward"].max().item(),
            "ends": episodes["next", "done"].squeeze(-1).sum(1).tolist(),
        }

    env = lambda: uneven_envs(2, 5)  # noqa: E731
    with make(backend, env, num_trajectories=3, metrics_fn=metrics, log_prefix="test") as evaluator:
        result = evaluator.evaluate()
    assert result["test/shape"] == (3, 5)
    assert result["test/lengths"] == [2, 2, 5]
    assert result["test/ends"] == [1, 1, 1]
    assert result["test/largest"] == 1.0
    assert result["test/reward"] == 3.0


def test_keys_of_rewards_and_ends() -> None:
    with Evaluator(
        make_counting(longest=9),
        deterministic(),
        num_trajectories=4,
        reward_keys=("next", "observation"),
        done_keys=("next", "truncated"),
        metrics_fn=lambda episodes: {"truncated": int(episodes["next", "truncated"].sum())},
    ) as evaluator:
        assert evaluator.evaluate()["eval/truncated"] == 4


def test_collector_of_ones_own() -> None:
    class Mine(Collector):
        num_made = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            Mine.num_made += 1
            super().__init__(*args, **kwargs)

    with make("thread", EchoEnv(4), collector_cls=Mine, collector_kwargs={"check_finite": True}) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 4.0
    assert Mine.num_made == 1


# -- weights ---------------------------------------------------------------------------------------------------------


def forms_of_weights() -> dict[str, Callable[[nn.Module], dict[str, Any]]]:
    return {
        "module": lambda policy: {"weights": policy},
        "state dict": lambda policy: {"weights": policy.state_dict()},
        "TensorDict": lambda policy: {"weights": TensorDict.from_module(policy)},
        "extract_weights": lambda policy: {"weights": Evaluator.extract_weights(policy)},
        "weights_dict": lambda policy: {"weights_dict": {"policy": policy}},
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", forms_of_weights())
def test_weights_in_every_form(backend: str, form: str) -> None:
    with make(backend, lambda: EchoEnv(1), 1.0, num_trajectories=2) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 1.0
        assert evaluator.evaluate(**forms_of_weights()[form](echo_policy(5.0)))["eval/reward"] == 5.0
        # Without any, those that it had last.
        assert evaluator.evaluate()["eval/reward"] == 5.0


def test_the_policy_that_is_trained_is_evaluated_as_it_is_now() -> None:
    policy = echo_policy(1.0)
    with Evaluator(EchoEnv(1), policy, num_trajectories=1) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 1.0
        nn.init.constant_(policy.module.bias, 3.0)
        assert evaluator.evaluate()["eval/reward"] == 3.0
        assert evaluator.evaluate(echo_policy(7.0))["eval/reward"] == 7.0
        assert policy.module.bias.item() == 3.0
        assert evaluator.evaluate()["eval/reward"] == 3.0


@pytest.mark.parametrize("given", ["policy", "weights", "factory"])
def test_training_goes_on_and_what_is_evaluated_stays(given: str) -> None:
    policy, env = echo_policy(1.0), GatedEnv(length=3)
    # (A factory that gives away the very module that is trained.)
    source: dict[str, Any] = {"policy_factory": lambda env: policy} if given == "factory" else {"policy": policy}
    with Evaluator(env, num_trajectories=1, **source) as evaluator:
        evaluator.trigger_eval(policy if given == "weights" else None)
        assert env.is_in_step.wait(10)
        nn.init.constant_(policy.module.bias, 100.0)
        env.gate.set()
        result = evaluator.wait(10)
        assert result is not None
        assert result["eval/reward"] == 3.0
        assert policy.module.bias.item() == 100.0


@pytest.mark.parametrize("given", ["policy", "weights", "state dict"])
def test_what_waits_for_its_turn_has_the_weights_of_when_it_was_triggered(given: str) -> None:
    policy, env = echo_policy(1.0), GatedEnv()
    with Evaluator(env, policy, num_trajectories=1, busy_policy="queue") as evaluator:
        evaluator.trigger_eval()
        assert env.is_in_step.wait(10)
        evaluator.trigger_eval({"policy": None, "weights": policy, "state dict": policy.state_dict()}[given])
        nn.init.constant_(policy.module.bias, 100.0)
        env.gate.set()
        results = [evaluator.wait(10), evaluator.wait(10)]
        assert [result and result["eval/reward"] for result in results] == [1.0, 1.0]


def test_weights_are_never_half_updated() -> None:
    class Difference(nn.Module):
        """Zero, if both are of the same update."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return (self.left - self.right).expand_as(observation)

    net = Difference()
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    num_results = 0
    with Evaluator(EchoEnv(50), policy, num_trajectories=1, frames_per_batch=50, busy_policy="skip") as evaluator:
        while num_results < 20:
            with torch.no_grad():
                net.left += 1
                net.right += 1
            evaluator.trigger_eval()
            result = evaluator.poll()
            if result is not None:
                num_results += 1
                assert result["eval/reward"] == result["eval/reward_std"] == 0.0


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.dropout(observation * self.scale))


@pytest.mark.parametrize("is_training", [True, False])
def test_modes_are_left_alone(is_training: bool) -> None:
    network = DropoutNet()
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    policy.train(is_training)
    network.frozen.eval()
    before = [module.training for module in policy.modules()]
    with Evaluator(EchoEnv(20), policy, num_trajectories=2) as evaluator:
        for _ in range(2):
            assert evaluator.evaluate()["eval/reward"] == 20.0  # nothing was dropped
            assert [module.training for module in policy.modules()] == before


def gaussian_policy() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        [
            TensorDictModule(
                lambda observation: (observation * 3, torch.ones_like(observation)), ["observation"], ["loc", "scale"]
            ),
            ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal),
        ]
    )


def test_exploration_of_the_program_and_of_the_evaluation_are_apart() -> None:
    """Tensordict has one type for all threads: an evaluation would end exploration in the collector beside it."""
    env = GatedEnv(length=5)
    with Evaluator(env, gaussian_policy(), num_trajectories=1) as evaluator:
        with set_interaction_type(InteractionType.RANDOM):
            evaluator.trigger_eval()
            assert env.is_in_step.wait(10)
            assert interaction_type() is InteractionType.RANDOM
            env.gate.set()
            result = evaluator.wait(10)
            assert interaction_type() is InteractionType.RANDOM
        assert result is not None
        assert result["eval/reward"] == pytest.approx(15.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exploration_type(backend: str) -> None:
    with Evaluator(
        lambda: EchoEnv(5), policy_factory=lambda: gaussian_policy(), exploration_type="random", backend=backend
    ) as evaluator:
        assert evaluator.evaluate()["eval/reward_std"] > 0


def test_the_programs_random_stream_is_left_alone() -> None:
    with Evaluator(SerialEnv(2, make_counting), deterministic(), num_trajectories=4) as evaluator:
        before = torch.get_rng_state()
        evaluator.set_seed(1)
        evaluator.evaluate()
        assert torch.equal(torch.get_rng_state(), before)
    with gated() as (evaluator, env):  # nor is it exchanged for another meanwhile
        before = torch.get_rng_state()
        evaluator.set_seed(1)
        evaluator.trigger_eval()
        assert env.is_in_step.wait(10)
        assert torch.equal(torch.get_rng_state(), before)


# -- seeds -----------------------------------------------------------------------------------------------------------


def seeded_results(evaluator: Evaluator, seed: int) -> list[float]:
    evaluator.set_seed(seed)
    return [evaluator.evaluate()["eval/reward"] for _ in range(2)]


def test_the_same_seed_gives_the_same_episodes_everywhere() -> None:
    weights = deterministic().state_dict()
    results = []
    for backend in BACKENDS:
        with Evaluator(
            lambda: SerialEnv(2, make_counting), policy_factory=lambda env: deterministic(), backend=backend
        ) as evaluator:
            evaluator.evaluate(weights)
            first = seeded_results(evaluator, 1)
            other = seeded_results(evaluator, 2)
            assert seeded_results(evaluator, 1) == first != other
            assert first[0] != first[1]  # the second evaluation has other episodes
            results.append(first)
    assert results[0] == results[1]


def test_a_process_seeds_the_policys_sampling() -> None:
    with Evaluator(
        lambda: EchoEnv(5), policy_factory=lambda: gaussian_policy(), exploration_type="random", backend="process"
    ) as evaluator:
        assert seeded_results(evaluator, 1) == seeded_results(evaluator, 1) != seeded_results(evaluator, 2)


def test_set_seed_returns_the_next_one() -> None:
    with Evaluator(EchoEnv(1), RandomPolicy()) as evaluator, Collector(EchoEnv(1), frames_per_batch=1) as collector:
        assert evaluator.set_seed(5) == collector.set_seed(5) != 5
        assert evaluator.set_seed(5, static_seed=True) == 5


# -- triggered -------------------------------------------------------------------------------------------------------


def test_poll_and_wait() -> None:
    with gated() as (evaluator, env):
        assert evaluator.poll() is None
        assert evaluator.wait() is None  # nothing to wait for
        assert not evaluator.pending
        assert evaluator.trigger_eval(step=3)
        assert evaluator.pending
        assert evaluator.poll() is None
        assert evaluator.wait(timeout=0.02) is None
        env.gate.set()
        result = evaluator.wait()
        assert result is not None
        assert result["eval/step"] == 3
        assert not evaluator.pending
        assert evaluator.poll() is None


def test_busy_is_an_error() -> None:
    with gated(busy_policy="error") as (evaluator, env):
        assert evaluator.trigger_eval()
        with pytest.raises(RuntimeError, match=r"under way.*busy_policy='skip'"):
            evaluator.trigger_eval()
        env.gate.set()
        assert evaluator.wait(10) is not None
        assert evaluator.trigger_eval()  # at once: `wait` means that it is over


def test_busy_is_skipped() -> None:
    with gated(busy_policy="skip") as (evaluator, env):
        assert evaluator.trigger_eval() is True
        assert evaluator.trigger_eval() is False
        env.gate.set()
        steps = []
        while evaluator.pending or not steps:
            result = evaluator.wait(10)
            assert result is not None
            steps.append(result["eval/step"])
        evaluator.trigger_eval()
        result = evaluator.wait(10)
        assert result is not None
        assert [*steps, result["eval/step"]] == [0, 1]  # what was skipped is not counted


@pytest.mark.parametrize("backend", BACKENDS)
def test_busy_is_queued_and_results_come_in_order(backend: str) -> None:
    with make(backend, lambda: EchoEnv(30), busy_policy="queue", num_trajectories=2) as evaluator:
        for number in range(5):
            assert evaluator.trigger_eval(echo_policy(float(number)), step=10 * number)
        assert evaluator.evaluate(echo_policy(-1.0), step=-1)["eval/reward"] == -30.0  # its own, not the oldest
        results = [evaluator.poll() for _ in range(6)]
    assert [result and (result["eval/step"], result["eval/reward"]) for result in results] == [
        *((10 * number, 30.0 * number) for number in range(5)),
        None,
    ]


def test_steps_are_counted_where_none_is_given() -> None:
    with make("thread", EchoEnv(1)) as evaluator:
        assert [evaluator.evaluate(step=step)["eval/step"] for step in (None, None, 500, None)] == [0, 1, 500, 2]


def test_state() -> None:
    with gated() as (evaluator, env):
        evaluator.trigger_eval()
        with pytest.raises(RuntimeError, match="state_dict while a result is pending"):
            evaluator.state_dict()
        env.gate.set()
        assert wait_until(lambda: not evaluator.pending)
        with pytest.raises(RuntimeError, match="load_state_dict while a result is pending or unread"):
            evaluator.load_state_dict({"step": 0})
        evaluator.wait()
        state = evaluator.state_dict()
    with make("thread", EchoEnv(1)) as later:
        later.load_state_dict(state)
        assert later.evaluate()["eval/step"] == 1


def test_set_seed_while_an_evaluation_is_under_way() -> None:
    with gated() as (evaluator, _):
        evaluator.trigger_eval()
        with pytest.raises(RuntimeError, match="under way"):
            evaluator.set_seed(0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_result(backend: str) -> None:
    got: list[TensorDictBase] = []
    with make(
        backend, lambda: EchoEnv(2), on_result=got.append, metrics_fn=lambda episodes: {"name": "echo"}
    ) as evaluator:
        evaluator.evaluate(step=4)
        evaluator.trigger_eval(step=5)
        evaluator.wait(20)
    assert [result["eval/step"].item() for result in got] == [4, 5]
    assert {result["eval/reward"].item() for result in got} == {2.0}
    assert got[0]["eval/name"] == "echo"
    assert got[0].batch_size == ()


def test_what_on_result_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(result: TensorDictBase) -> None:
        raise Broken("no logger")

    with make("thread", EchoEnv(1), on_result=fail) as evaluator:
        for step in range(2):
            assert evaluator.evaluate()["eval/step"] == step
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [Broken, Broken]
    assert "on_result of an Evaluator failed, at step 1" in caplog.text


# -- errors ----------------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    policy, factory = echo_policy(1.0), lambda env: echo_policy(1.0)
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "backend must be one of thread, process, ray", EchoEnv, {"policy": policy, "backend": "fork"}),
        (ValueError, "busy_policy must be one of", EchoEnv, {"policy": policy, "busy_policy": "wait"}),
        (ValueError, "either policy or policy_factory", EchoEnv, {}),
        (ValueError, "either policy or policy_factory", EchoEnv, {"policy": policy, "policy_factory": factory}),
        (ValueError, "give a function that makes it", EchoEnv(), {"policy_factory": factory, "backend": "process"}),
        (ValueError, "give a function that makes it", EchoEnv(), {"policy_factory": factory, "backend": "ray"}),
        (ValueError, "give policy_factory", EchoEnv, {"policy": policy, "backend": "process"}),
        (ValueError, "give policy_factory", EchoEnv, {"policy": policy, "backend": "ray"}),
        (ValueError, "num_trajectories must be at least 1", EchoEnv, {"policy": policy, "num_trajectories": 0}),
        (ValueError, "max_steps must be at least 1", EchoEnv, {"policy": policy, "max_steps": 0}),
        (TypeError, "collector_cls must be", EchoEnv, {"policy": policy, "collector_cls": MultiSyncCollector}),
        (ValueError, "total_frames is for the Evaluator", EchoEnv, {
            "policy": policy, "collector_kwargs": {"total_frames": 3}
        }),
        (ValueError, "give policy_factory", EchoEnv, {"policy": policy, "weight_sync_schemes": {}}),
    ]  # fmt: skip
    for kind, message, env, kwargs in cases:
        with pytest.raises(kind, match=message):
            Evaluator(env, **kwargs)


def test_weights_that_do_not_fit() -> None:
    with make("thread", EchoEnv(1)) as evaluator:
        with pytest.raises(KeyError, match="do not fit the policy"):
            evaluator.evaluate(nn.Linear(1, 1))
        with pytest.raises(KeyError, match="there is no model 'critic'"):
            evaluator.evaluate(weights_dict={"critic": nn.Linear(1, 1)})
        with pytest.raises(ValueError, match="not both"):
            evaluator.evaluate(echo_policy(1.0), weights_dict={"policy": echo_policy(1.0)})
        assert evaluator.evaluate()["eval/reward"] == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["evaluate", "wait", "poll"])
def test_what_an_evaluation_raises_keeps_its_type(backend: str, how: str) -> None:
    with make(backend, BrokenOnceEnv, num_trajectories=2, busy_policy="queue") as evaluator:
        if how != "evaluate":
            evaluator.trigger_eval()
        ask = {"evaluate": evaluator.evaluate, "wait": evaluator.wait, "poll": lambda: evaluator.poll(timeout=20)}[how]
        with pytest.raises(Broken, match="out of order"):
            ask()
        assert evaluator.poll() is None
        # The next one has whole episodes again.
        result = evaluator.evaluate()
        assert (result["eval/reward"], result["eval/episode_length"], result["eval/num_episodes"]) == (4.0, 4.0, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_factory_raises_keeps_its_type(backend: str) -> None:
    def fail(*_: Any) -> Any:
        raise Broken("not today")

    with pytest.raises(Broken, match="not today"):
        make(backend, fail)
    with pytest.raises(Broken, match="not today"):
        Evaluator(EchoEnv, policy_factory=fail, backend=backend)


def test_what_metrics_fn_raises_keeps_its_type() -> None:
    def fail(episodes: TensorDictBase) -> dict[str, Any]:
        raise Broken("no metric")

    with make("process", EchoEnv, metrics_fn=fail) as evaluator, pytest.raises(Broken, match="no metric"):
        evaluator.evaluate()


def test_an_argument_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to a process.*Make what cannot be pickled inside"):
        Evaluator(EchoEnv, policy_factory=lambda env: lock, backend="process")


def test_init_fn_comes_first() -> None:
    def init() -> None:
        os.environ["SWATH_TEST_EVALUATOR"] = "7"

    env = lambda: EchoEnv(int(os.environ["SWATH_TEST_EVALUATOR"]))  # noqa: E731
    with make("process", env, init_fn=init) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 7.0


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["idle", "evaluating"])
def test_a_killed_process_is_named(when: str, tmp_path: Path) -> None:
    path = str(tmp_path / "begun")
    before = children()
    with make("process", (lambda: StuckEnv(path)) if when == "evaluating" else EchoEnv) as evaluator:
        (pid,) = children() - before
        if when == "evaluating":
            evaluator.trigger_eval()
            assert wait_until(lambda: os.path.exists(path))
        os.kill(pid, signal.SIGKILL)
        if when == "idle":
            evaluator.trigger_eval()
        with pytest.raises(WorkerDied, match=rf"Evaluator's process \(pid {pid}\) was killed by SIGKILL") as caught:
            evaluator.wait(5)
        assert caught.value.worker == 0
        with pytest.raises(WorkerDied):
            evaluator.evaluate()


def test_an_env_that_ends_its_process() -> None:
    class LeavingEnv(EchoEnv):
        def step(self, action: Any) -> Any:
            os._exit(3)

    with make("process", LeavingEnv) as evaluator, pytest.raises(WorkerDied, match="left with exit code 3"):
        evaluator.evaluate()


def is_evaluating() -> bool:
    return any(thread.name == "swath-evaluator" for thread in threading.enumerate())


@pytest.mark.alone
@pytest.mark.parametrize("backend", BACKENDS)
def test_shutdown_stops_an_evaluation_that_would_not_end(backend: str) -> None:
    evaluator = make(backend, lambda: EchoEnv(None), busy_policy="queue")
    caught: list[Exception] = []

    def evaluate() -> None:
        try:
            evaluator.evaluate()
        except Exception as error:
            caught.append(error)

    waiting = threading.Thread(target=evaluate)
    waiting.start()
    assert wait_until(lambda: evaluator.pending)
    evaluator.trigger_eval()
    started = time.monotonic()
    evaluator.shutdown()
    assert time.monotonic() - started < 4
    waiting.join(5)
    assert [type(error) for error in caught] == [CollectorClosed]
    assert evaluator.poll() is evaluator.wait() is None
    assert not evaluator.pending
    assert not is_evaluating()
    evaluator.shutdown()  # harmless
    for use in (evaluator.evaluate, evaluator.trigger_eval, lambda: evaluator.set_seed(0)):
        with pytest.raises(CollectorClosed, match="was shut down"):
            use()


def test_results_that_are_there_can_be_read_after_shutdown() -> None:
    evaluator = make("thread", EchoEnv(1))
    evaluator.trigger_eval()
    assert wait_until(lambda: not evaluator.pending)
    evaluator.shutdown()
    result = evaluator.poll()
    assert result is not None
    assert result["eval/reward"] == 1.0


@pytest.mark.alone
@pytest.mark.parametrize("is_stopped", [False, True])
def test_shutdown_ends_a_process_that_does_not_answer(is_stopped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "begun")
    before = children()
    evaluator = make("process", lambda: StuckEnv(path))
    (pid,) = children() - before
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
        evaluator.trigger_eval(
            {"module.weight": torch.ones(1, 1), "module.bias": torch.ones(1), "x": torch.ones(10**6)}
        )
    else:
        evaluator.trigger_eval()
        assert wait_until(lambda: os.path.exists(path))
    started = time.monotonic()
    evaluator.shutdown(timeout=2)
    assert time.monotonic() - started < 4
    assert pid not in children()


def test_shutdown_closes_the_env() -> None:
    env: EnvBase = GymWrapper(EchoEnv(1))
    with Evaluator(env, echo_policy(1.0)) as evaluator:
        evaluator.evaluate()
        assert not env.is_closed
    assert env.is_closed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forgotten_evaluator_is_shut_down(backend: str) -> None:
    evaluator = make(backend, lambda: EchoEnv(None))
    evaluator.trigger_eval()
    del evaluator
    gc.collect()
    assert wait_until(lambda: not is_evaluating())


def test_on_result_may_shut_down() -> None:
    evaluator: list[Evaluator] = []
    evaluator.append(make("thread", EchoEnv(1), on_result=lambda result: evaluator[0].shutdown()))
    evaluator[0].trigger_eval()
    assert wait_until(lambda: not is_evaluating())
    evaluator.clear()


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_evaluator import *

before = children()
evaluator = make({backend!r}, lambda: {env})
evaluator.trigger_eval()
if {begun!r}:
    assert wait_until(lambda: os.path.exists({begun!r}))
print(*(children() - before), "started", flush=True)
{ending}
"""


def run_program(**parts: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(tests=str(Path(__file__).parent), **parts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.endswith("started\n"), process.communicate()
    return process, [int(pid) for pid in line.split()[:-1]]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def end(process: subprocess.Popen[str]) -> str:
    """What it printed to stderr until it ended."""
    try:
        return process.communicate(timeout=30)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_ends_though_an_evaluation_does_not(backend: str) -> None:
    process, pids = run_program(backend=backend, env="EchoEnv(None)", begun="", ending="")
    assert len(pids) == (backend == "process")
    assert (end(process), process.returncode) == ("", 0)
    assert all(map(is_gone, pids))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_ends_a_program_that_waits(backend: str) -> None:
    process, pids = run_program(backend=backend, env="EchoEnv(None)", begun="", ending="evaluator.wait()")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    err = end(process)
    assert err.count("Traceback") - err.count("During handling of the above exception") == 1
    assert process.returncode == -signal.SIGINT
    assert wait_until(lambda: all(map(is_gone, pids)))


def test_a_process_whose_owner_was_killed_leaves_even_from_a_step_that_does_not_end(tmp_path: Path) -> None:
    begun = str(tmp_path / "begun")
    process, pids = run_program(backend="process", env=f"StuckEnv({begun!r})", begun=begun, ending="evaluator.wait()")
    try:
        process.kill()
        assert len(pids) == 1
        assert wait_until(lambda: all(map(is_gone, pids)))
    finally:
        end(process)
