"""Part `tuning`: is what `swath tune` suggests about as fast as the best of all that come into question?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from interleaved import order_of
from machine import wait_until_idle
from report import markdown_table
from sleeping import SleepingEnv
from swath.costs.arrangement import Arrangement, Form
from swath.tuning.trying import Contestant
from swath.tuning.tuner import Tuner
from swath.tuning.tuning import Trial, Tuning

#: The suggestion is to reach so much of the best.
WANTED = 0.9
#: So many are open at a time, and measured in turns; the best of each heat meet again, with what was suggested.
_HEAT = 6
_FINALISTS = 6
#: With more workers than this, each contestant is started for each of its measurements.
_MOST_WORKERS = 400
#: A sweep has powers of four only, but for those near to what was suggested.
_NUMBERS_OF_ENVS = (1, 4, 16, 64)
_STEP_S = 0.005


class FiveMilliseconds(SleepingEnv):
    """A step waits for something else, as for a simulator or a network."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(_STEP_S)
        self._steps += 1
        return self._obs(), 0.0, False, False, {}


class Pixels(gymnasium.Env):
    """Four frames of 84 × 84 pixels, and some work for each step."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def __init__(self) -> None:
        self._stack = np.zeros((4, 84, 84), np.uint8)
        self._screen = np.random.default_rng(0).integers(0, 255, (210, 160), np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        self._stack[:] = 0
        return self._stack.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        screen = np.roll(self._screen, self._steps, axis=0)
        small = screen[::2, ::2][:84, :80].astype(np.float32) * 0.5 + 64.0
        self._stack[:-1] = self._stack[1:]
        self._stack[-1, :, :80] = small.astype(np.uint8)
        return self._stack.copy(), 1.0, self._steps >= 500, False, {}


class _Scaled(nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float() / 255.0


def _mlp(num_inputs: int, num_outputs: int, *activation: nn.Module) -> TensorDictModule:
    network = nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, num_outputs), *activation)
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def _cnn() -> TensorDictModule:
    network = nn.Sequential(
        _Scaled(),
        nn.Conv2d(4, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.Flatten(-3),
        nn.Linear(2592, 256),
        nn.ReLU(),
        nn.Linear(256, 6),
    )
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


CASES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "CartPole-v1": ("CartPole-v1", partial(_mlp, 4, 2)),
    "Pendulum-v1": ("Pendulum-v1", partial(_mlp, 3, 1, nn.Tanh())),
    "a step sleeps 5 ms": (FiveMilliseconds, partial(_mlp, 4, 2)),
    "pixels, a CNN": (Pixels, _cnn),
}
_WAYS = {"takes turns": True, "goes on": False}
_HEADER = ["env", "way", "suggested", "frames/s", "best of the sweep", "frames/s", "ratio", "tuned in"]


@dataclass
class Evaluation:
    """Of one env: what was suggested, and what a sweep found."""

    case: str
    tuned_s: float
    sweep_s: float
    tuning: Tuning
    #: By arrangement; those that met in the finals have several samples of the same rounds.
    fps: dict[Arrangement, list[float]]
    finals: dict[Arrangement, list[float]] = field(default_factory=dict)
    errors: dict[Arrangement, str] = field(default_factory=dict)

    def of_way(self, takes_turns: bool) -> tuple[Trial, Arrangement, float] | None:
        """The suggestion, the best of the finals, and their ratio: the median of the rounds."""
        trial = self.tuning.best_of(takes_turns)
        way = {each: found for each, found in self.finals.items() if each.form.takes_turns == takes_turns}
        if trial is None or trial.arrangement not in way:
            return None
        best = max(way, key=lambda each: median(way[each]))
        pairs = zip(way[trial.arrangement], way[best], strict=True)
        return trial, best, median(ours / theirs for ours, theirs in pairs)

    def rows(self) -> list[list[str]]:
        rows = []
        for name, takes_turns in _WAYS.items():
            found = self.of_way(takes_turns)
            if found is not None:
                trial, best, ratio = found
                ours, theirs = (median(self.finals[each]) for each in (trial.arrangement, best))
                row = [self.case, name, _shown(trial.arrangement), f"{ours:,.0f}", _shown(best), f"{theirs:,.0f}"]
                rows.append([*row, f"{ratio:.2f}", f"{self.tuned_s:.0f} s"])
        return rows

    def table(self) -> str:
        lines = [
            f"{self.case}: tuned in {self.tuned_s:.0f} s, {len(self.fps)} arrangements swept in {self.sweep_s:.0f} s"
        ]
        costs = self.tuning.costs
        policy = " and ".join(f"{1e6 * costs.policy_s(count):,.0f} µs for {count}" for count in (1, 64))
        lines.append(
            f"  step {1e6 * costs.step_s:,.1f} µs, sleeps {costs.sleeps:.0%}; policy {policy}; "
            f"kept from the core {costs.kept_off:.0%}"
        )
        for _, way, ours, our_fps, best, best_fps, ratio, _ in self.rows():
            short = "" if float(ratio) >= WANTED else f"   LESS THAN {WANTED}"
            lines.append(f"  {way:<12}suggested {ours:<34}{our_fps:>10}")
            lines.append(f"  {'':<12}best      {best:<34}{best_fps:>10}   ratio {ratio}{short}")
        ranked = sorted(self.fps, key=lambda each: median(self.fps[each]), reverse=True)
        lines += [f"    {_shown(each):<40}{median(self.fps[each]):>12,.0f}" for each in ranked[:6]]
        lines += [f"    {_shown(each):<40} failed: {error}" for each, error in self.errors.items()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        ways = {name: found for name, takes_turns in _WAYS.items() if (found := self.of_way(takes_turns))}
        return {
            "case": self.case,
            "tuned_s": self.tuned_s,
            "sweep_s": self.sweep_s,
            "suggested": {
                name: {"arrangement": _shown(trial.arrangement), "best": _shown(best), "ratio": ratio}
                for name, (trial, best, ratio) in ways.items()
            },
            "trials": {_shown(t.arrangement): [t.predicted, *t.samples] for t in self.tuning.trials},
            "sweep": {_shown(each): found for each, found in self.fps.items()},
            "finals": {_shown(each): found for each, found in self.finals.items()},
            "errors": {_shown(each): error for each, error in self.errors.items()},
        }


def _shown(arrangement: Arrangement) -> str:
    return f"{arrangement.form}, {arrangement}"


def heading(options: argparse.Namespace) -> str:
    return f"swath tune against a sweep of all arrangements; {WANTED} of the best is wanted"


def run(options: argparse.Namespace) -> Iterator[Evaluation]:
    """One case after another. A sample of a heat is a part of ``--seconds``, one of the finals a larger part."""
    seconds = options.seconds or 1.0
    for case in CASES:
        yield evaluate(case, tune_s=10.0 if seconds >= 1.0 else 4.0, heat_s=0.15 * seconds, final_s=0.35 * seconds)


def evaluate(case: str, tune_s: float, heat_s: float, final_s: float, rounds: int = 5) -> Evaluation:
    create_env_fn, make_policy = CASES[case]
    torch.manual_seed(0)
    tuner = Tuner.of(create_env_fn, make_policy(), seconds=tune_s)
    started = time.perf_counter()
    with tuner.trying():
        tuner.run()
    tuning = tuner.result()
    result = Evaluation(case, time.perf_counter() - started, 0.0, tuning, {})
    suggested = [trial.arrangement for takes_turns in (True, False) if (trial := tuning.best_of(takes_turns))]
    started = time.perf_counter()
    waiting = list(dict.fromkeys([*suggested, *_swept(tuner)]))
    while waiting:
        _race(tuner, waiting[:_HEAT], heat_s, 2, result.fps, result.errors)
        fastest = max(max(found) for found in result.fps.values())
        waiting = [each for each in waiting[_HEAT:] if _bound(each, tuning) > fastest / 3]
    finalists = [*suggested]
    for takes_turns in (True, False):
        way = [each for each in result.fps if each.form.takes_turns == takes_turns]
        way.sort(key=lambda each: max(result.fps[each]), reverse=True)
        finalists += [each for each in way if each not in finalists][: (_FINALISTS - len(suggested)) // 2]
    _race(tuner, finalists, final_s, rounds, result.finals, result.errors)
    result.sweep_s = time.perf_counter() - started
    return result


def _swept(tuner: Tuner) -> list[Arrangement]:
    """All, with fewer numbers of envs than `tune` chooses from; and all that `tune` has tried. First those with most
    workers: what comes later may be left out where so few cannot be nearly as fast.
    """
    every = [each for each in tuner.candidates() if each.num_envs in _NUMBERS_OF_ENVS]
    every += [trial.arrangement for trial in tuner.result().trials]
    return sorted(every, key=lambda each: each.num_workers, reverse=True)


def _bound(arrangement: Arrangement, tuning: Tuning) -> float:
    """Whatever else it does, a worker steps one env after another."""
    at_once = arrangement.num_workers if arrangement.form != Form.SINGLE else 1
    return at_once / tuning.costs.step_s


def _race(
    tuner: Tuner,
    arrangements: Sequence[Arrangement],
    seconds: float,
    rounds: int,
    fps: dict[Arrangement, list[float]],
    errors: dict[Arrangement, str],
) -> None:
    contestants = {str((each.form, each)): tuner.contestant(each) for each in arrangements}
    closes = sum(each.num_workers for each in arrangements if each.form.has_processes) > _MOST_WORKERS
    try:
        for number in range(rounds):
            for name in order_of(list(contestants), number):
                contestant: Contestant = contestants[name]
                each = contestant.arrangement
                if each in errors:
                    continue
                try:
                    fps.setdefault(each, []).append(contestant.measure(seconds))
                except Exception as error:
                    errors[each] = f"{type(error).__name__}: {error}"
                    fps.pop(each, None)
                if closes:
                    contestant.close()
    finally:
        for contestant in contestants.values():
            contestant.close()
    wait_until_idle()


def markdown(results: Sequence[Evaluation]) -> str:
    return markdown_table(_HEADER, [row for result in results for row in result.rows()])
