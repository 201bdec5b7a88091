"""Tuning: the model, what is measured of envs and policies, what is tried, and the code that is suggested."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import Collector
from swath.costs.costs import Costs, Turn
from swath.costs.echo import EchoEnv
from swath.costs.measuring import measure
from swath.costs.model import Machine, best_workers, ideal, predict
from swath.envs import GymEnv, SerialEnv, TensorDictPrimer, TransformedEnv, Unbounded
from swath.tuning import Arrangement, Form, Trial, Tuning, candidates, tune
from swath.tuning.candidates import Room, steps_per_batch
from swath.tuning.layouts import Made
from swath.tuning.table import report
from swath.tuning.trying import Contestant
from swath.tuning.tuner import Tuner

TWO = Machine(2)
FREE = {count: Turn(0.0, 0.0) for count in (1, 64)}


def costs(step_s: float, turns: dict[int, Turn] = FREE, **others: Any) -> Costs:
    return Costs(
        **{
            "step_s": step_s,
            "step_std_s": 0.0,
            "reset_s": 0.0,
            "sleeps": 0.0,
            "turns": turns,
            "turns_here": turns,
            "frame_bytes": 100,
            "steps": 1000,
            **others,
        }
    )


def speed(known: Costs, form: Form, num_envs: int, workers: int = 1, steps: int = 128, machine: Machine = TWO) -> float:
    return predict(known, Arrangement(form, num_envs, workers), machine, steps)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_one_process_is_the_formula() -> None:
    turns = {1: Turn(20e-6, 1e-6), 4: Turn(26e-6, 2e-6)}
    known = costs(10e-6, turns)
    assert speed(known, Form.SINGLE, 1) == pytest.approx(1 / 31e-6)
    assert speed(known, Form.SINGLE, 4) == pytest.approx(4 / 68e-6)


def test_steps_that_sleep_want_a_worker_each() -> None:
    known = costs(5e-3, sleeps=1.0)
    assert speed(known, Form.ASYNC, 16, 16) == pytest.approx(16 / 5e-3, rel=0.05)
    assert speed(known, Form.ASYNC, 16, 2) == pytest.approx(2 / 5e-3, rel=0.05)
    assert best_workers(known, 16, TWO, is_sync=True, steps=100) == 16
    assert best_workers(known, 16, TWO, is_sync=False, steps=100) == 16
    assert speed(known, Form.SINGLE, 16) == pytest.approx(1 / 5e-3)


@pytest.mark.parametrize("is_sync", [True, False])
def test_steps_that_compute_want_a_worker_for_each_core(is_sync: bool) -> None:
    known = costs(1e-3)
    assert best_workers(known, 16, TWO, is_sync=is_sync, steps=100) == 2
    assert best_workers(known, 16, Machine(8), is_sync=is_sync, steps=100) == 8
    half = costs(1e-3, sleeps=0.5)
    assert best_workers(half, 16, TWO, is_sync=is_sync, steps=100) == 4


def test_a_slow_policy_wants_many_envs_in_a_call() -> None:
    slow = {1: Turn(1e-3, 0.0), 64: Turn(2e-3, 0.0)}
    known = costs(10e-6, slow)
    assert speed(known, Form.SINGLE, 64) > 10 * speed(known, Form.SINGLE, 1)
    assert speed(known, Form.SYNC, 64, 2) > 5 * speed(known, Form.SYNC, 64, 32)


def test_waiting_for_the_slowest_costs_what_steps_vary() -> None:
    steady, varies = costs(1e-3, sleeps=1.0), costs(1e-3, sleeps=1.0, step_std_s=1e-3)
    for form in (Form.PARALLEL, Form.SYNC):
        assert speed(varies, form, 16, 16) < speed(steady, form, 16, 16)
    assert speed(varies, Form.ASYNC, 16, 16) == speed(steady, Form.ASYNC, 16, 16)
    lost = {form: speed(varies, form, 16, 16) / speed(steady, form, 16, 16) for form in (Form.PARALLEL, Form.SYNC)}
    assert lost[Form.PARALLEL] < lost[Form.SYNC]  # at every step, against at every batch


def test_nothing_is_faster_than_the_ideal() -> None:
    turns = {count: Turn(20e-6 + 1e-6 * count, 2e-6) for count in (1, 8, 64)}
    known = costs(10e-6, turns)
    for form in Form:
        for num_envs, workers in ((1, 1), (8, 2), (64, 2), (64, 64)):
            if form.has_processes:
                assert speed(known, form, num_envs, workers) <= ideal(known, 2) * 1.001
    assert speed(known, Form.SINGLE, 64) <= ideal(known, 1)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Busy(gymnasium.Env):
    """A step takes this long: of sleeping, or of computing."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, sleep_s: float = 0.0, compute_s: float = 0.0) -> None:
        self.sleep_s, self.compute_s = sleep_s, compute_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.ones(3, np.float32), {}

    def step(self, action: Any) -> Any:
        until = time.thread_time() + self.compute_s
        while time.thread_time() < until:
            pass
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return np.ones(3, np.float32), 0.0, False, False, {}


def linear(num_inputs: int = 3) -> TensorDictModule:
    return TensorDictModule(nn.Linear(num_inputs, 2), in_keys=["observation"], out_keys=["action"])


def measured(env: Any, policy: Any = None, seconds: float = 0.3, **others: Any) -> Costs:
    with Collector(env, policy, frames_per_batch=1) as collector:
        return measure(
            collector,
            lambda env, steps: Collector(env, policy, frames_per_batch=steps * env.batch_size.numel()),
            seconds=seconds,
            **others,
        )


@pytest.mark.alone
def test_an_env_that_sleeps_is_told_from_one_that_computes() -> None:
    sleeps = measured(lambda: Busy(sleep_s=0.004))
    computes = measured(lambda: Busy(compute_s=0.004))
    assert sleeps.sleeps > 0.8
    assert computes.sleeps < 0.2
    assert sleeps.step_s > 0.0035
    assert computes.step_s > 0.0035
    assert measured(lambda: Busy(sleep_s=0.002, compute_s=0.002)).sleeps == pytest.approx(0.5, abs=0.25)


class Slow(nn.Module):
    """Half a millisecond for each env."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        until = time.thread_time() + 0.0005 * max(1, observation.shape[:-1].numel())
        while time.thread_time() < until:
            pass
        return torch.nn.functional.one_hot((observation[..., 0] > 0).long(), 2)


@pytest.mark.alone
def test_a_slow_policy_does_not_make_a_quick_env_sleep() -> None:
    found = measured(lambda: Busy(), Slow())
    assert found.sleeps == 0
    assert found.step_s < found.turns[1].policy_s


@pytest.mark.alone
def test_a_policy_is_measured_for_many_envs() -> None:
    with Collector(lambda: Busy(), Slow(), frames_per_batch=1, capture_policy=False) as collector:
        found = measure(
            collector,
            lambda env, steps: Collector(
                env, collector.policy, frames_per_batch=steps * env.batch_size.numel(), capture_policy=False
            ),
            seconds=1.0,
            batches=(2, 8),
        )
        assert next(iter(collector)).numel() == 1  # it goes on
    assert sorted(found.turns) == [1, 2, 8]
    assert found.turns[1].policy_s >= 0.0004
    assert found.turns[8].policy_s > 3 * found.turns[1].policy_s
    assert not found.notes


def test_a_policy_for_one_env_at_a_time_is_said() -> None:
    class One(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            if observation.ndim != 1:
                raise TypeError("one env at a time")
            return torch.nn.functional.one_hot((observation[0] > 0).long(), 2)

    found = measured(lambda: Busy(), TensorDictModule(One(), in_keys=["observation"], out_keys=["action"]))
    assert list(found.turns) == [1]
    assert "2 envs at once: TypeError: one env at a time" in found.notes[0]


def test_the_env_of_a_policy_with_a_memory_is_echoed() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 8)

        def forward(self, observation: torch.Tensor, hidden: torch.Tensor) -> Any:
            shape = observation.shape[:-1]
            hidden = self.cell(observation.reshape(-1, 4), hidden.reshape(-1, 8)).reshape(*shape, 8)
            return torch.nn.functional.one_hot(hidden[..., :2].argmax(-1), 2), hidden

    policy = TensorDictModule(Cell(), ["observation", "hidden"], ["action", ("next", "hidden")])
    env = TransformedEnv(GymEnv("CartPole-v1"), TensorDictPrimer({"hidden": Unbounded((8,))}))
    found = measured(env, policy, batches=(1, 4))
    assert sorted(found.turns) == [1, 4]
    assert not found.notes


def test_an_echo_shows_what_the_env_has_shown() -> None:
    env = GymEnv("CartPole-v1")
    shown = {("observation",): torch.arange(4.0)}
    for count, shape in ((None, (10,)), (3, (3, 10))):
        batch = next(iter(Collector(EchoEnv(env, shown, count), frames_per_batch=10 * (count or 1))))
        assert batch.shape == shape
        assert (batch["observation"] == torch.arange(4.0)).all()
        assert (batch["next", "observation"] == torch.arange(4.0)).all()
        assert not batch["next", "done"].any()


# -- candidates --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_no_candidate() -> None:
    heavy = costs(1e-3, frame_bytes=100_000_000, sleeps=1.0)
    big = Arrangement(Form.SYNC, 64, 64)
    assert Room(100, None).has_place_for(heavy, big, 16)
    assert not Room(100, 1_000_000_000).has_place_for(heavy, big, 16)
    assert not Room(63, None).has_place_for(costs(1e-3), big, 16)
    assert Room(0, None).has_place_for(costs(1e-3), Arrangement(Form.SINGLE, 64), 16)
    found = list(candidates.candidates(costs(5e-3, sleeps=1.0), list(Form), [1, 4, 64], most_workers=16))
    assert max(each.num_workers for each in found if each.form.has_processes) == 16
    assert Form.THREADED in {each.form for each in found}
    computing = list(candidates.candidates(costs(1e-3), list(Form), [64], most_workers=1000))
    assert max(each.num_workers for each in computing) < 64
    assert Form.THREADED not in {each.form for each in computing}


def test_a_batch_is_as_long_as_it_makes_sense() -> None:
    quick, slow = costs(5e-6), costs(50e-3, sleeps=1.0)
    assert steps_per_batch(quick, Arrangement(Form.SYNC, 16, 2), None) == 128
    assert steps_per_batch(quick, Arrangement(Form.ASYNC, 64, 2), None) == 256
    assert steps_per_batch(slow, Arrangement(Form.ASYNC, 64, 64), None) == 16
    assert steps_per_batch(quick, Arrangement(Form.SYNC, 3, 3), 100) == 34
    heavy = costs(5e-6, frame_bytes=1_000_000)
    assert steps_per_batch(heavy, Arrangement(Form.SYNC, 16, 2), None) == 2


def test_steps_that_take_seconds_are_tried_a_few_at_a_time() -> None:
    slow, arrangement = costs(1.0, sleeps=1.0), Arrangement(Form.SYNC, 64, 64)
    assert steps_per_batch(slow, arrangement, 6400) == 100
    assert candidates.steps_to_try(slow, arrangement, 100) == 1
    assert candidates.steps_to_try(costs(1e-3), arrangement, 100) == 100


@pytest.mark.parametrize("num_envs", [(1, 2, 64), 64])
def test_what_takes_most_of_the_time_for_a_step_is_not_tried(monkeypatch: pytest.MonkeyPatch, num_envs: Any) -> None:
    """In two workers, a step of 64 envs that take a second is half a minute: tried if nothing else was asked for."""
    monkeypatch.setattr(Room, "of_this_machine", lambda policy: Room(2, None))
    tuner = Tuner.of("CartPole-v1", None, collector="sync", num_envs=num_envs, seconds=3.0)
    tuner.costs = costs(1.0, sleeps=1.0)
    found = {(each.num_envs, each.num_workers) for each in tuner.candidates()}
    assert (64, 2) in found if num_envs == 64 else found == {(1, 1), (2, 1), (2, 2)}


@pytest.mark.processes
def test_an_env_that_can_be_in_a_process_only_once() -> None:
    class Once(Busy):
        homes: ClassVar[set[int]] = set()

        def __init__(self) -> None:
            super().__init__(compute_s=1e-5)
            if os.getpid() in self.homes:
                raise RuntimeError("there is one already")
            self.homes.add(os.getpid())

        def close(self) -> None:
            self.homes.discard(os.getpid())

    found = tune(Once, num_envs=4, collector="single", seconds=0.2, frames_per_batch=32)
    assert "there is one already" in found.costs.notes[-1]
    failed = {each.arrangement.form for each in found.trials if each.error}
    assert Form.SINGLE in failed
    assert all(each.arrangement == Arrangement(Form.PARALLEL, 4, 4) for each in found.trials if each.samples)


# -- what is suggested -------------------------------------------------------------------------------------------------


def trial(form: Form, num_envs: int, workers: int, *samples: float) -> Trial:
    return Trial(Arrangement(form, num_envs, workers), 1000, 1.0, samples)


def tuning(*trials: Trial) -> Tuning:
    return Tuning(costs(1e-5), trials, 1000.0, 2, Made("CartPole-v1"))


def test_of_those_that_are_as_fast_the_smallest_is_suggested() -> None:
    found = tuning(
        trial(Form.SYNC, 64, 2, 100.0, 102.0, 101.0),
        trial(Form.SYNC, 16, 2, 99.0),
        trial(Form.SINGLE, 8, 1, 90.0),
        trial(Form.ASYNC, 32, 4, 120.0),
        trial(Form.BATCHED, 1, 1),
    )
    best = found.best_of(takes_turns=True)
    assert best is not None
    assert best.arrangement == Arrangement(Form.SYNC, 16, 2)
    assert found.best.arrangement == Arrangement(Form.ASYNC, 32, 4)


def test_without_any_trial_there_is_no_best() -> None:
    with pytest.raises(RuntimeError, match="PolicyError: no memory"):
        _ = tuning(replace(trial(Form.SYNC, 1, 1), error="PolicyError: no memory")).best
    assert tuning().best_of(takes_turns=True) is None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "num_envs", "workers", "threads"),
    [
        (Form.SINGLE, 1, 1, None),
        (Form.SINGLE, 3, 1, 1),
        (Form.PARALLEL, 4, 2, None),
        (Form.SYNC, 4, 2, None),
        (Form.ASYNC, 2, 2, None),
        (Form.BATCHED, 4, 2, None),
        (Form.THREADED, 2, 2, None),
    ],
)
@pytest.mark.parametrize("has_policy", [True, False])
def test_the_code_runs_and_makes_the_same(
    form: Form, num_envs: int, workers: int, threads: int | None, has_policy: bool
) -> None:
    one = Trial(Arrangement(form, num_envs, workers, threads), 24, 1.0)
    policy = linear(4) if has_policy else None
    names: dict[str, Any] = {"create_env_fn": "CartPole-v1", "policy": policy}
    exec(one.code(policy="policy" if has_policy else None), names)
    with names["collector"] as collector, Made("CartPole-v1", policy).collector(one.arrangement, 24) as same:
        assert type(collector) is type(same)
        first, second = next(iter(collector)), next(iter(same))
        assert first.shape == second.shape
        assert first.numel() == 24
        if form.has_processes and form != Form.PARALLEL:
            assert collector.stats()["layout"] == same.stats()["layout"]


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_tune_tries_what_it_suggests() -> None:
    said: list[str] = []
    network = linear(4)
    before = [parameter.clone() for parameter in network.parameters()]
    found = tune("CartPole-v1", network, num_envs=2, seconds=0.3, frames_per_batch=64, say=said.append)
    assert said[0] == "measuring the env and the policy"
    assert {each.arrangement.num_envs for each in found.trials} == {2}
    assert all(each.error is None for each in found.trials)
    for takes_turns in (True, False):
        best = found.best_of(takes_turns)
        assert best is not None
        assert best.arrangement.form.takes_turns == takes_turns
        assert len(best.samples) >= 2
    assert all(torch.equal(now, then) for now, then in zip(network.parameters(), before, strict=True))
    with found.collector(total_frames=64) as collector:
        assert sum(batch.numel() for batch in collector) == 64
    assert max(map(len, report(found))) <= 80
    assert str(found).count("collector = ") == 2


@pytest.mark.processes
def test_arrangements_that_the_policy_does_not_fit_are_told_of() -> None:
    class Stays:
        def __reduce__(self) -> Any:
            raise TypeError("it stays where it is")

        def __call__(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot((observation[..., 0] > 0).long(), 2)

    found = tune("CartPole-v1", Stays(), num_envs=2, seconds=0.2, frames_per_batch=32)
    failed = [each.arrangement.form for each in found.trials if each.error]
    assert sorted(failed) == [Form.ASYNC, Form.ASYNC, Form.SYNC, Form.SYNC]  # 1 env in a worker, and 2
    assert all("it stays where it is" in (each.error or "it stays where it is") for each in found.trials)
    assert found.best.arrangement.form not in failed
    assert "failed" in found.table()


def test_an_env_that_fails_says_so() -> None:
    class Fails(Busy):
        taken = 0

        def step(self, action: Any) -> Any:
            self.taken += 1
            if self.taken == 30:
                raise RuntimeError("lost contact")
            return super().step(action)

    with pytest.raises(RuntimeError, match="lost contact"):
        tune(lambda: Fails(), collector="single", num_envs=1, seconds=0.2)


@pytest.mark.processes
def test_ctrl_c_leaves_nothing_and_what_is_known_stays() -> None:
    def press(text: str) -> None:
        if text.startswith("trying Multi"):
            pressed.append(text)
            if len(pressed) == 2:
                raise KeyboardInterrupt

    pressed: list[str] = []
    tuner = Tuner.of("CartPole-v1", num_envs=2, collector="sync", seconds=0.2, say=press)
    with pytest.raises(KeyboardInterrupt), tuner.trying():
        tuner.run()
    known = tuner.result()
    assert len(known.trials) == 1
    assert known.best.arrangement.form == Form.SYNC


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"create_env_fn": None}, TypeError, "a function that makes an env, or a Gymnasium id"),
        ({"create_env_fn": GymEnv("CartPole-v1")}, TypeError, "since it makes many of them"),
        ({"collector": "asynch"}, ValueError, "did you mean 'async'"),
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1"),
        ({"num_envs": []}, ValueError, "empty list"),
        ({"seconds": 0}, ValueError, "seconds must be a number above 0"),
        ({"frames_per_batch": 0.5}, TypeError, "frames_per_batch must be an integer"),
        ({"policy": linear(), "policy_factory": linear}, TypeError, "not both"),
        ({"create_env_fn": "CartPol-v1"}, gymnasium.error.NameNotFound, "did you mean 'CartPole-v1'"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tune(**{"create_env_fn": "CartPole-v1", **arguments})


def test_a_batched_env_is_counted_by_its_rows() -> None:
    found = tune(lambda: SerialEnv(3, "CartPole-v1"), collector="single", num_envs=1, seconds=0.2, frames_per_batch=30)
    assert found.best.frames_per_batch == 30
    with found.collector() as collector:
        assert next(iter(collector)).shape == (3, 10)


class Bursts:
    """Three envs that sleep alike: each third batch takes a second of its clock, the others come with it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def collector(self, *_: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        while True:
            self.now_s += 1.0
            for _ in range(3):
                yield torch.zeros(10)

    def stats(self) -> dict[str, Any]:
        return {"workers": [{"frames": 0}]}


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5, 2.5])
def test_of_envs_that_deliver_at_once_whole_rounds_are_measured(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bursts: Any = Bursts()
    monkeypatch.setattr("swath.tuning.trying.time.perf_counter", lambda: bursts.now_s)
    contestant = Contestant(bursts, Arrangement(Form.ASYNC, 3, 3), frames_per_batch=10, frames_per_round=30)
    assert contestant.measure(seconds) == 30
