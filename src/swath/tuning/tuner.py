"""tune(): measures an env and a policy, predicts, and tries what looks best."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from swath.collectors import Collector
from swath.collectors.numbers import positive_int, positive_number
from swath.costs.arrangement import Arrangement, Form
from swath.costs.costs import Costs
from swath.costs.measuring import measure, step_beside_others
from swath.costs.model import Machine, ideal, predict
from swath.envs import SerialEnv
from swath.envs.making import is_env, make_env, shown
from swath.errors import did_you_mean
from swath.tuning import candidates as room
from swath.tuning.layouts import Made
from swath.tuning.trying import SETTLING, Contestant
from swath.tuning.tuning import Trial, Tuning
from swath.workers.layout import available_cores

#: What ``collector=`` may be, and which forms are tried then.
FORMS: dict[str, tuple[Form, ...]] = {
    "any": tuple(Form),
    "single": (Form.SINGLE, Form.PARALLEL),
    "sync": (Form.SYNC,),
    "async": (Form.ASYNC,),
    "batched": (Form.BATCHED, Form.THREADED),
}
#: Of the time that is given, this is for measuring the parts.
_MEASURING = 0.2
_LEAST_MEASURING_S, _MOST_MEASURING_S = 0.4, 3.0
#: Shorter steps than this are measured of so many envs side by side, too.
_LONG_STEP_S = 1e-3
_SIDE_BY_SIDE = 4
#: How many are tried at first of those that take turns with the user, and of those that go on; and later.
_FIRST, _LATER = 4, 3
#: How often each is measured, and those again that are not much slower than the fastest.
_TWICE, _FINALS = 2, 3
_MUCH_SLOWER = 0.8
_LEAST_SECONDS = 0.1
#: In all the time, what is tried makes so many steps or more, if anything does.
_STEPS_AT_LEAST = 4


def tune(
    create_env_fn: Any,
    policy: Any = None,
    *,
    policy_factory: Callable[[], Any] | None = None,
    collector: str = "any",
    num_envs: int | Sequence[int] | None = None,
    frames_per_batch: int | None = None,
    seconds: float = 10.0,
    say: Callable[[str], Any] | None = None,
) -> Tuning:
    """Find out which collector is fastest for an env and a policy, with how many envs in how many workers.

    A step of the env and calls of the policy are measured here, what follows for each arrangement is predicted, and
    the best few are tried for real, in turns.

    Args:
        create_env_fn: a function that makes one env, or a Gymnasium id.
        policy: as for a ``Collector``; None for random actions. Here a copy of it is called.
        policy_factory: a function that makes it, instead.
        collector: what may collect: "single", "sync", "async", "batched", or "any".
        num_envs: how many envs there are to be, or several numbers to choose from; by default up to 64.
        frames_per_batch: of all envs together; by default about 2,048.
        seconds: about how long to measure and try. Starting workers comes in addition.
        say: called with what is being done, in words.

    >>> tuning = tune("CartPole-v1", collector="single", num_envs=1, seconds=0.5)
    >>> tuning.best.name, str(tuning.best.arrangement)
    ('Collector', '1 env')
    """
    tuner = Tuner.of(
        create_env_fn,
        policy,
        policy_factory=policy_factory,
        collector=collector,
        num_envs=num_envs,
        frames_per_batch=frames_per_batch,
        seconds=seconds,
        say=say,
    )
    with tuner.trying():
        tuner.run()
    return tuner.result()


@dataclass
class Tuner:
    """What ``tune`` does, with what is known so far."""

    made: Made
    forms: tuple[Form, ...]
    numbers_of_envs: tuple[int, ...]
    frames_per_batch: int | None
    seconds: float
    say: Callable[[str], Any]
    machine: Machine = field(default_factory=lambda: Machine(available_cores()))
    costs: Costs | None = None
    _trials: dict[Arrangement, Trial] = field(default_factory=dict)
    _contestants: dict[Arrangement, Contestant] = field(default_factory=dict)
    #: The first thing that went wrong, for when nothing went well.
    _error: Exception | None = None
    _rows: int = 1
    #: How many workers there is room for.
    _most_open: int = 0

    @classmethod
    def of(
        cls,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        collector: str = "any",
        num_envs: int | Sequence[int] | None = None,
        frames_per_batch: int | None = None,
        seconds: float = 10.0,
        say: Callable[[str], Any] | None = None,
    ) -> Tuner:
        """Checked; see ``tune``."""
        if is_env(create_env_fn) or not (callable(create_env_fn) or isinstance(create_env_fn, str)):
            raise TypeError(
                f"create_env_fn is {shown(create_env_fn)}; tune needs a function that makes an env, or a Gymnasium id, "
                "since it makes many of them"
            )
        if policy is not None and policy_factory is not None:
            raise TypeError("give either policy or policy_factory, not both")
        if collector not in FORMS:
            hint = did_you_mean(str(collector), FORMS)
            raise ValueError(f"collector must be one of {', '.join(map(repr, FORMS))}, got {collector!r}{hint}")
        numbers = room.NUMBERS_OF_ENVS if num_envs is None else num_envs
        numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        if not numbers:
            raise ValueError("num_envs is an empty list; give the numbers of envs that come into question")
        return cls(
            Made(create_env_fn, policy, policy_factory),
            FORMS[collector],
            tuple(sorted({positive_int("num_envs", number) for number in numbers})),
            None if frames_per_batch is None else positive_int("frames_per_batch", frames_per_batch),
            positive_number("seconds", seconds),
            (lambda text: None) if say is None else say,
        )

    # -- what it does --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of it."""
        self.measure()
        every = self.candidates()
        predicted = {arrangement: self._predicted(arrangement) for arrangement in every}
        self._try([choice for way in self._ways(every) for choice in best_of_each_form(way, predicted)], _TWICE)
        corrected = self._corrected(predicted)
        self._try([choice for way in self._ways(every) for choice in self._worth_trying(way, corrected)], _TWICE)
        self._try([choice for way in self._ways(every) for choice in self._leaders(way)], _FINALS)
        if not any(trial.was_measured for trial in self._trials.values()) and self._error is not None:
            raise self._error

    @cached_property
    def _copied(self) -> Made:
        """What is tried: the user's own policy keeps its random state, its statistics, and whatever calls change."""
        return replace(self.made, policy=copy_of(self.made.policy))

    def measure(self) -> Costs:
        """What the env and the policy cost, in this process."""
        self.say("measuring the env and the policy")
        made, seconds = self.made, self.seconds * _MEASURING
        policy = self._copied.policy if made.policy_factory is None else made.policy_factory()
        with _collector_of(made.create_env_fn, policy) as collector:
            self._rows = collector.env.batch_size.numel()
            self.costs = measure(
                collector,
                lambda env, steps: Collector(env, policy, frames_per_batch=steps * env.batch_size.numel()),
                seconds=min(max(seconds, _LEAST_MEASURING_S), _MOST_MEASURING_S),
                batches=sorted({*room.NUMBERS_OF_ENVS, *self.numbers_of_envs}),
                threads=torch.get_num_threads(),
            )
        self._measure_side_by_side(policy)
        return self.costs

    def _measure_side_by_side(self, policy: Any) -> None:
        """Short steps of several envs in one loop take less than those of one."""
        costs = self._measured
        if costs.step_s > _LONG_STEP_S or self.numbers_of_envs[-1] < _SIDE_BY_SIDE:
            return
        try:
            with _collector_of(partial(SerialEnv, _SIDE_BY_SIDE, self.made.create_env_fn), policy) as collector:
                step_s = step_beside_others(collector, _SIDE_BY_SIDE, _LEAST_MEASURING_S / 2)
        except Exception as error:  # some can be in a process only once
            note = f"several envs in one process do not work: {type(error).__name__}: {_first_line(error)}"
            self.costs = replace(costs, notes=(*costs.notes, note))
            return
        if step_s < costs.step_s:
            share = step_s / costs.step_s
            self.costs = replace(
                costs, step_s=step_s, step_std_s=costs.step_std_s * share, reset_s=costs.reset_s * share
            )

    def candidates(self) -> list[Arrangement]:
        """What there is room for."""
        costs = self._measured
        there = room.Room.of_this_machine(self.made.policy)
        every = room.candidates(costs, self.forms, self.numbers_of_envs, there.workers)
        fit = [each for each in every if there.has_place_for(costs, each, self._steps(each))]
        if not fit:
            raise RuntimeError(
                f"nothing fits: there is room for {there.workers} workers beside what runs here already; fewer envs "
                "(num_envs=), or collector='single', need less memory"
            )
        self._most_open = there.workers
        return self._soon_tried(fit)

    def _soon_tried(self, arrangements: Sequence[Arrangement]) -> list[Arrangement]:
        """A step of all envs is the least that can be measured: without those that take most of the time for one."""
        step_s = {each: each.num_envs * self._rows / self._predicted(each) for each in arrangements}
        most_s = max(self.seconds / _STEPS_AT_LEAST, 2 * min(step_s.values()))
        return [each for each in arrangements if step_s[each] <= most_s]

    @property
    def _measured(self) -> Costs:
        assert self.costs is not None
        return self.costs

    def _steps(self, arrangement: Arrangement) -> int:
        return room.steps_per_batch(self._measured, arrangement, self.frames_per_batch, self._rows)

    def _predicted(self, arrangement: Arrangement) -> float:
        return self._rows * predict(self._measured, arrangement, self.machine, self._steps(arrangement))

    def _ways(self, every: Sequence[Arrangement]) -> Iterator[list[Arrangement]]:
        """Those that take turns with the user, and those that go on."""
        for takes_turns in (True, False):
            way = [arrangement for arrangement in every if arrangement.form.takes_turns == takes_turns]
            if way:
                yield way

    # -- trying --------------------------------------------------------------------------------------------------------

    @contextmanager
    def trying(self) -> Iterator[None]:
        """While this lasts, collectors may be open."""
        try:
            yield
        finally:
            for contestant in self._contestants.values():
                contestant.close()

    def _try(self, arrangements: Sequence[Arrangement], rounds: int) -> None:
        """Each so often, in turns: a machine that is slow for a while is slow for all.

        Where there is no room for all of them at the same time, one after the other.
        """
        workers = sum(each.num_workers for each in arrangements if each.form.has_processes)
        fits = workers <= self._most_open
        for _ in range(rounds if fits else 1):
            for arrangement in arrangements:
                for _ in range(1 if fits else rounds):
                    if not self._fails(arrangement):
                        self._try_once(arrangement)
                if not fits and arrangement in self._contestants:
                    self._contestants[arrangement].close()
        for arrangement in arrangements:
            if arrangement in self._trials and not self._is_near(arrangement):
                self._contestants[arrangement].close()

    def _fails(self, arrangement: Arrangement) -> bool:
        """What one of this form has said would be said of all; but for envs that have a process each."""
        return any(trial.error is not None for each, trial in self._trials.items() if _alike(each, arrangement))

    def _try_once(self, arrangement: Arrangement) -> None:
        trial = self._trials.get(arrangement) or self._new_trial(arrangement)
        self.say(f"trying {trial.name}: {arrangement}")
        contestant = self._contestants[arrangement]
        try:
            fps = contestant.measure(self._seconds_each())
        except Exception as error:
            self._error = self._error or error
            trial = replace(trial, samples=(), error=f"{type(error).__name__}: {_first_line(error)}")
            contestant.close()
        else:
            trial = replace(trial, samples=(*trial.samples, fps))
        self._trials[arrangement] = trial

    def _seconds_each(self) -> float:
        """Of the whole time, each measurement has about the same."""
        ways = len({form.takes_turns for form in self.forms})
        measurements = ways * (_TWICE * (_FIRST + _LATER) + _FINALS * 2)
        return max(_LEAST_SECONDS, self.seconds * (1 - _MEASURING) / measurements / (1 + SETTLING))

    def _new_trial(self, arrangement: Arrangement) -> Trial:
        self._contestants[arrangement] = self.contestant(arrangement)
        frames = room.frames_of(arrangement, self._steps(arrangement), self._rows)
        return Trial(arrangement, frames, self._predicted(arrangement))

    def contestant(self, arrangement: Arrangement) -> Contestant:
        """What tries it; whoever has it closes it."""
        steps = room.steps_to_try(self._measured, arrangement, self._steps(arrangement))
        frames = room.frames_of(arrangement, steps, self._rows)
        return Contestant(self._copied, arrangement, frames, steps * self._rows * arrangement.num_envs)

    def _corrected(self, predicted: dict[Arrangement, float]) -> dict[Arrangement, float]:
        """What the model says, times how wrong it was of others of this form."""
        factors: dict[Form, float] = {}
        for form in self.forms:
            tried = [trial for trial in self._trials.values() if trial.arrangement.form == form and trial.samples]
            if tried:
                factors[form] = max(max(trial.samples) / trial.predicted for trial in tried)
        return {each: fps * factors.get(each.form, 1.0) for each, fps in predicted.items()}

    def _worth_trying(self, way: Sequence[Arrangement], corrected: dict[Arrangement, float]) -> list[Arrangement]:
        """Of those that were not tried, the best: they might be as fast as the fastest that was."""
        fastest = self._fastest(way)
        new = [each for each in way if each not in self._trials and corrected[each] > _MUCH_SLOWER * fastest]
        return sorted(new, key=corrected.__getitem__, reverse=True)[:_LATER]

    def _leaders(self, way: Sequence[Arrangement]) -> list[Arrangement]:
        return [each for each in way if each in self._trials and self._is_near(each)]

    def _is_near(self, arrangement: Arrangement) -> bool:
        trial = self._trials[arrangement]
        way = [each for each in self._trials if each.form.takes_turns == arrangement.form.takes_turns]
        return trial.was_measured and max(trial.samples) >= _MUCH_SLOWER * self._fastest(way)

    def _fastest(self, way: Sequence[Arrangement]) -> float:
        """By what each was at best: others who want the cores only make it slower."""
        tried = [self._trials[each] for each in way if each in self._trials]
        return max((max(trial.samples) for trial in tried if trial.samples), default=0.0)

    def result(self) -> Tuning:
        """What is known by now; the env and the policy must have been measured."""
        costs = self._measured
        trials = sorted(self._trials.values(), key=lambda trial: (trial.was_measured, trial.fps), reverse=True)
        bound = self._rows * ideal(costs, self.machine.cores)
        return Tuning(costs, tuple(trials), bound, self.machine.cores, self.made)


def best_of_each_form(way: Sequence[Arrangement], predicted: dict[Arrangement, float]) -> list[Arrangement]:
    """Of each form the best, and then those that come next, with other numbers of workers."""
    ranked = sorted(way, key=predicted.__getitem__, reverse=True)
    chosen: list[Arrangement] = []
    for form in dict.fromkeys(each.form for each in ranked):
        best = next(each for each in ranked if each.form == form)
        if predicted[best] > predicted[ranked[0]] / 4:
            chosen.append(best)
    for each in ranked:
        if len(chosen) >= _FIRST:
            break
        if all((each.form, each.num_workers) != (other.form, other.num_workers) for other in chosen):
            chosen.append(each)
    return [*chosen, *(each for each in ranked if each not in chosen)][:_FIRST]


def _alike(one: Arrangement, other: Arrangement) -> bool:
    return one.form == other.form and (one.envs_per_worker > 1) == (other.envs_per_worker > 1)


def _collector_of(create_env_fn: Any, policy: Any) -> Collector:
    """With batches of one step."""
    env = make_env(create_env_fn)
    try:
        return Collector(env, policy, frames_per_batch=env.batch_size.numel())
    except BaseException:
        env.close(raise_if_closed=False)
        raise


def copy_of(policy: Any) -> Any:
    """A copy, where there can be one."""
    try:
        return copy.deepcopy(policy)
    except Exception:  # a lock, a socket: then it is called itself, as by a Collector
        return policy


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
