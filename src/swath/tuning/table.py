"""What was found out, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from swath.costs.costs import Costs
from swath.disk import show_bytes
from swath.tuning.tuning import Trial, Tuning

_WIDTH = 80
_NAME = 33
_LABEL = 10
_FRAMES_S = "frames/s"
#: Who has less of a core than this measures others.
_BUSY = 0.15
#: What the two kinds of collectors mean for what is learned from.
_TURNS = (
    "Nothing is collected while you train, and a batch is of the newest weights: for PPO, A2C and whatever else is "
    "on-policy."
)
_GOES_ON = (
    "It goes on while you train, so frames are some updates old: for SAC, DQN and whatever else is off-policy. What "
    "that saves is not in the figures, in which nobody trains."
)
#: Where the user has not said how many.
_NUMBER_OF_ENVS = (
    "The number of envs was free, and as few were chosen as are about as fast as any. More of them mean fewer steps of "
    "each in a batch of the same size, or larger batches, and so older frames; --envs N says how many there are to be."
)


def report(tuning: Tuning, env: str = "create_env_fn", policy: str | None = "policy") -> Iterator[str]:
    """All of it."""
    yield from measured(tuning.costs)
    yield ""
    yield from table(tuning)
    for lines in suggestions(tuning, env, policy):
        yield from ("", *lines)


def measured(costs: Costs) -> Iterator[str]:
    """What the env and the policy cost, in words."""
    step = f"a step takes {seconds(costs.step_s)}"
    if costs.step_std_s > 0.2 * costs.step_s:
        step += f", give or take {seconds(costs.step_std_s)}"
    if costs.reset_s > 0.05 * costs.step_s:
        step += f"; resets are {costs.reset_s / costs.step_s:.0%} of it"
    slept = f"; it waits {costs.sleeps:.0%} of the time" if costs.sleeps else ""
    yield from _labelled("env", step + slept)
    yield from _labelled("policy", _policy(costs))
    yield from _labelled("a frame", show_bytes(costs.frame_bytes))
    notes = list(costs.notes)
    if costs.kept_off > _BUSY:
        notes.append(
            f"other programs had the core {costs.kept_off:.0%} of the time: what was measured is slower than "
            "on an idle machine, and says less about which is fastest"
        )
    for note in notes:
        yield from _labelled("note", note)


def _policy(costs: Costs) -> str:
    counts = sorted(costs.turns)
    if all(turn.policy_s < 1e-6 for turn in costs.turns.values()):
        return "next to nothing"
    shown = [count for count in counts if count in (1, 8, counts[-1])]
    calls = [f"{seconds(costs.turns[count].policy_s)} for {_envs(count)}" for count in shown]
    each = seconds(costs.turns[counts[-1]].policy_s / counts[-1])
    return f"a call takes {', '.join(calls)}" + (f" ({each} each)" if len(shown) > 1 else "")


def table(tuning: Tuning) -> Iterator[str]:
    """All that were tried."""
    yield f"{'':<{_NAME}}{'envs':>6}{'workers':>9}{'predicted':>11}{'measured':>11}{'η':>7}"
    for trial in tuning.trials:
        arrangement = trial.arrangement
        workers = f"{arrangement.num_workers}" if arrangement.form.has_processes else "-"
        start = f"{trial.name:<{_NAME}}{arrangement.num_envs:>6}{workers:>9}{trial.predicted:>11,.0f}"
        if trial.samples:
            yield f"{start}{trial.fps:>11,.0f}{trial.fps / tuning.ideal:>7.2f}"
        elif trial.error is None:
            yield f"{start}{'-':>11}{'-':>7}"
        else:
            yield f"{start}{'failed':>11}{'-':>7}"
            yield from _wrapped(trial.error, "  ")
    cores = "1 core" if tuning.cores == 1 else f"{tuning.cores} cores"
    ideal = f"{_FRAMES_S}, while nobody trains. η: share of {tuning.ideal:,.0f}, which {cores} could do"
    yield from _wrapped(f"{ideal} if collecting cost nothing.", "")


def suggestions(tuning: Tuning, env: str, policy: str | None) -> Iterator[list[str]]:
    """The fastest of each kind that was tried, what it means, and the code that makes it."""
    for takes_turns in (True, False):
        trial = tuning.best_of(takes_turns)
        if trial is not None:
            code = trial.code(env, policy).splitlines()
            yield [*headline(trial), "", *(f"    {line}".rstrip() for line in code)]


def headline(trial: Trial) -> Iterator[str]:
    """What is suggested, and what it means."""
    yield f"{trial.name}, {trial.arrangement}: {trial.fps:,.0f} {_FRAMES_S}"
    yield from _wrapped(_TURNS if trial.arrangement.form.takes_turns else _GOES_ON, "  ")


def about_envs() -> Iterator[str]:
    """What it means that their number was free."""
    yield from _wrapped(_NUMBER_OF_ENVS, "")


def seconds(value: float) -> str:
    """
    >>> seconds(0.0000058), seconds(0.0051), seconds(12.3)
    ('5.8 µs', '5.1 ms', '12 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.2g} {unit}" if value * factor < 100 else f"{value * factor:.0f} {unit}"
    return f"{value:.2g} s"


def _envs(count: int) -> str:
    return "1 env" if count == 1 else f"{count}"


def _labelled(label: str, text: str) -> Iterator[str]:
    first, *rest = textwrap.wrap(text, _WIDTH - _LABEL) or [""]
    yield f"{label:<{_LABEL}}{first}"
    yield from (" " * _LABEL + line for line in rest)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
