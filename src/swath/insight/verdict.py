"""What limits a program that collects, in words, and the next thing to try."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swath.insight.facts import Facts, Way
from swath.insight.quantities import count, percent

#: Shorter whiles say nothing.
_LEAST_SECONDS = 0.5
#: Who takes more than this share of the time is what limits.
_MOST = 0.5
#: A worker that takes so many times as long as the others is a straggler.
_STRAGGLES = 2.0
#: Who waits for more than this share of the time, and has no frames, may never have been asked for any.
_IDLE = 0.95
#: Of few envs, a call of the policy costs about as much as of one.
_FEW_ENVS = 8
#: One env alone has nobody to sleep beside: so many are suggested at most.
_MANY_ENVS = 16


class Limit(StrEnum):
    """What limits."""

    NOTHING_YET = "nothing yet"
    LEARNER = "learner"
    STRAGGLER = "straggler"
    IDLE = "idle workers"
    SLEEPING = "sleeping envs"
    POLICY = "policy"
    ENV = "env"
    OVERHEAD = "overhead"


@dataclass(frozen=True)
class Verdict:
    """What limits, in a sentence; and the next thing to try."""

    limit: Limit
    says: str
    advice: str

    def __str__(self) -> str:
        return f"{self.says}: {self.advice}" if self.advice else self.says


def verdict(facts: Facts) -> Verdict:
    """What limits, as of these facts.

    >>> from swath.insight.facts import Place
    >>> workers = [Place(f"worker {number}", 4, 0.82, 0.1, 0.08, 1000) for number in range(2)]
    >>> found = verdict(Facts(Way.SYNC, 10.0, 2, workers, yours=0.3, in_processes=True))
    >>> found.says
    'the learner waits 70 % of the time, and 2 workers on 2 cores are busy, env 82 %'
    >>> found.advice
    'a faster env, or more machines (RayCollector); no setting here makes it faster'
    """
    if not facts.frames:
        return Verdict(Limit.NOTHING_YET, "nothing has been collected yet", "")
    if facts.seconds < _LEAST_SECONDS:
        return Verdict(Limit.NOTHING_YET, f"{facts.seconds:.1f} s are too short to tell what limits", "")
    for look in (_learner, _straggler, _idle, _sleeping, _policy, _env):
        found = look(facts)
        if found is not None:
            return found
    return Verdict(
        Limit.OVERHEAD,
        f"{_who(facts)} wait {percent(facts.mean('waiting'))} of the time, and training takes {percent(facts.yours)}",
        "larger batches: a higher frames_per_batch means fewer requests",
    )


def _learner(facts: Facts) -> Verdict | None:
    if facts.held_back > _MOST:
        return Verdict(
            Limit.LEARNER,
            f"{_who(facts)} wait for you {percent(facts.held_back)} of the time: samples_per_insert holds them back",
            "a lower ratio, or faster updates; fewer workers would do",
        )
    if facts.yours <= _MOST:
        return None
    says = f"{_who(facts)} {_wait(facts)} for you: training takes {percent(facts.yours)}"
    if facts.way == Way.ASYNC:
        return Verdict(Limit.LEARNER, says, "faster updates; collecting is not what limits, so fewer workers would do")
    without_turns = "sync=False" if facts.in_processes else "MultiCollector with sync=False"
    return Verdict(Limit.LEARNER, says, f"{without_turns}, or a replay buffer and start(), collects while you train")


def _straggler(facts: Facts) -> Verdict | None:
    found = facts.slowest()
    if found is None or found[1] < _STRAGGLES:
        return None
    place, times = found
    advice = "look at its env; sync=False lets others go on, preemptive_threshold= cuts it short"
    if facts.way != Way.SYNC:
        advice = "look at its env, and at what else runs on its core"
    return Verdict(Limit.STRAGGLER, f"{place.name} is {times:.1f} × slower than the others", advice)


def _idle(facts: Facts) -> Verdict | None:
    """Where a batch is of one env, there may be fewer batches than envs: then some workers are never asked."""
    idle = [place for place in facts.places if not place.frames and place.waiting > _IDLE]
    if facts.way != Way.ASYNC or not idle or max(place.busy for place in facts.places) <= _MOST:
        return None
    return Verdict(
        Limit.IDLE,
        f"{len(idle)} of {_who(facts)} {'has' if len(idle) == 1 else 'have'} collected nothing, and others are busy",
        "a lower frames_per_batch (it is of each env), if what is left of total_frames is no batch for each; else look "
        "at their envs",
    )


def _sleeping(facts: Facts) -> Verdict | None:
    sleeping = [place for place in facts.places if place.sleeps and place.env > place.policy]
    if len(sleeping) * 2 <= len(facts.places) or facts.mean("env") <= facts.mean("waiting"):
        return None
    on_core = sum(place.on_core or 0.0 for place in sleeping) / len(sleeping)
    says = f"steps sleep: they compute {percent(on_core)} of their time"
    would_fill_cores = round(facts.cores / max(on_core, 1e-3))
    workers = min(facts.num_envs, would_fill_cores) if facts.num_envs > 1 else min(_MANY_ENVS, would_fill_cores)
    if workers <= len(facts.places) and facts.in_processes:
        return Verdict(Limit.SLEEPING, says, "more envs, each in a worker of its own, would sleep at the same time")
    what = "" if facts.in_processes else "MultiCollector with "
    return Verdict(Limit.SLEEPING, says, f"{what}num_workers={workers} would help, so that they sleep at the same time")


def _policy(facts: Facts) -> Verdict | None:
    env, policy = facts.mean("env"), facts.mean("policy")
    if policy <= env or policy <= facts.mean("waiting"):
        return None
    says = f"the policy takes {percent(policy)} of the time of {_who(facts)}, envs {percent(env)}"
    per_call = facts.num_envs if facts.way in (Way.SINGLE, Way.BATCHED) else facts.num_envs / len(facts.places)
    if per_call < _FEW_ENVS:
        more = "envs_per_worker=" if facts.in_processes else "SerialEnv(32, ...)"
        return Verdict(Limit.POLICY, says, f"more envs in each call of it: {more}")
    return Verdict(Limit.POLICY, says, "the network itself: a smaller one, compile_policy=True, or a GPU")


def _env(facts: Facts) -> Verdict | None:
    env = facts.mean("env")
    if env <= facts.mean("waiting"):
        return None
    where = f" on {count(facts.cores, 'core')}" if facts.in_processes else ""
    says = f"{_who(facts)}{where} {'are' if _are_many(facts) else 'is'} busy, env {percent(env)}"
    if not facts.in_background:
        says = f"the learner waits {percent(1 - facts.yours)} of the time, and {says}"
    room = min(facts.cores, facts.num_envs) if facts.in_processes else facts.cores
    if room > len(facts.places):
        more = "num_workers" if facts.in_processes else "MultiCollector with num_workers"
        return Verdict(Limit.ENV, says, f"{more}={room}, one for each core")
    return Verdict(Limit.ENV, says, "a faster env, or more machines (RayCollector); no setting here makes it faster")


def _are_many(facts: Facts) -> bool:
    return facts.in_processes and len(facts.places) > 1


def _who(facts: Facts) -> str:
    if not facts.in_processes:
        return "this process"
    return count(len(facts.places), facts.places[0].name.rpartition(" ")[0])


def _wait(facts: Facts) -> str:
    return "wait" if _are_many(facts) else "waits"
