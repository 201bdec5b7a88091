"""Tuning: what was found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from swath.costs.arrangement import Arrangement, Form
from swath.costs.costs import Costs
from swath.costs.model import near
from swath.tuning import layouts

#: Simpler ones first, where several are as fast.
_SIMPLER = [Form.SINGLE, Form.SYNC, Form.ASYNC, Form.PARALLEL, Form.BATCHED, Form.THREADED]


@dataclass(frozen=True)
class Trial:
    """One arrangement: what the model says of it, and what it did.

    Args:
        frames_per_batch: what is suggested with it; of each env, of a ``MultiAsyncCollector``. Of steps that take long,
            it was tried with fewer.
        predicted: frames in a second.
        samples: the same, as measured.
        error: why it does not work.
    """

    arrangement: Arrangement
    frames_per_batch: int
    predicted: float
    samples: tuple[float, ...] = ()
    error: str | None = None

    @property
    def fps(self) -> float:
        """Frames in a second, as the median of what was measured; else as predicted."""
        return median(self.samples) if self.samples else self.predicted

    @property
    def was_measured(self) -> bool:
        return bool(self.samples)

    @property
    def name(self) -> str:
        """The collector's class, and where the envs are."""
        return layouts.name_of(self.arrangement)

    def code(self, env: str = "create_env_fn", policy: str | None = "policy") -> str:
        """The lines that make such a collector, in which env and policy have these names."""
        lines = [*layouts.imports(self.arrangement, policy is not None), ""]
        return "\n".join([*lines, *layouts.call(self.arrangement, self.frames_per_batch, env, policy)])


@dataclass(frozen=True)
class Tuning:
    """What was measured, predicted and tried.

    Args:
        costs: of the env and the policy.
        trials: all that were tried, the fastest first.
        ideal: frames in a second if collecting cost nothing: all cores step envs and call the policy.
        cores: that this process may use.
        made: the env and the policy.
    """

    costs: Costs
    trials: tuple[Trial, ...]
    ideal: float
    cores: int
    made: layouts.Made

    @property
    def best(self) -> Trial:
        """The fastest of all; of those that are as fast, one with few envs and workers."""
        return self._chosen([trial for trial in self.trials if trial.was_measured])

    def best_of(self, takes_turns: bool) -> Trial | None:
        """The same, of those that collect nothing while you train, or of those that go on."""
        fit = [trial for trial in self.trials if trial.arrangement.form.takes_turns == takes_turns and trial.samples]
        return self._chosen(fit) if fit else None

    def _chosen(self, trials: Sequence[Trial]) -> Trial:
        if not trials:
            raise RuntimeError("nothing was tried to the end: " + self._why_nothing())
        fastest = near({index: trial.fps for index, trial in enumerate(trials)})
        return min((trials[index] for index in fastest), key=_simplicity)

    def _why_nothing(self) -> str:
        return next((trial.error for trial in self.trials if trial.error), "it was stopped")

    def collector(self, trial: Trial | None = None, **options: Any) -> Any:
        """A collector as ``trial`` (by default ``best``) had it; ``options`` are its other arguments."""
        trial = self.best if trial is None else trial
        frames = options.pop("frames_per_batch", trial.frames_per_batch)
        return self.made.collector(trial.arrangement, frames, **options)

    def table(self) -> str:
        """All that were tried, for a terminal of 80 columns."""
        from swath.tuning.table import table

        return "\n".join(table(self))

    def __str__(self) -> str:
        from swath.tuning.table import report

        return "\n".join(report(self))


def _simplicity(trial: Trial) -> tuple[Any, ...]:
    arrangement = trial.arrangement
    return arrangement.num_envs, arrangement.num_workers, _SIMPLER.index(arrangement.form)
