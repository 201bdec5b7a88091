"""Where a collector stands: one reading of all that is known without asking anybody."""

from __future__ import annotations

import os
import shlex
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from tensordict import TensorDictBase

from swath.collectors.budget import Budget, Progress
from swath.collectors.runner import Runner
from swath.data.replay_buffer import ReplayBuffer
from swath.insight.facts import Way
from swath.insight.reading import BufferReading, EpisodesReading, PlaceReading, Program, Reading
from swath.timeline.recorder import Recorder
from swath.timeline.recording import Recording
from swath.workers.handle import WorkerHandle
from swath.workers.layout import available_cores
from swath.workers.status_page import Shares, env_share

#: Of so many episodes, the last, returns and lengths are told.
_EPISODES_TOLD = 100
#: What a program runs on.
_PACKAGES = ("swath", "torch", "tensordict", "gymnasium", "numpy", "torchrl", "ray")


class TellsWhereItStands:
    """The part of a collector that can be read: by ``swath.watch``, ``swath top`` and reports."""

    _inner = ("when_closed",)

    #: Who waits for the last reading. They are not kept by it.
    _waiting_for_the_last: weakref.WeakSet[Any] | None = None
    _progress: Progress
    _budget: Budget
    _closed: bool
    replay_buffer: Any

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    def _way(self) -> Way:
        """How collecting and its user take turns."""
        raise NotImplementedError

    @property
    def _in_processes(self) -> bool:
        """Whether the envs are in processes of their own."""
        return True

    @property
    def _num_envs(self) -> int:
        raise NotImplementedError

    @property
    def _env_in_words(self) -> str:
        raise NotImplementedError

    @property
    def _layout_in_words(self) -> str:
        """Which envs are where; empty in one process."""
        return ""

    def _places(self, now: float) -> Iterable[PlaceReading]:
        """Who collects, and how they have spent their time until ``now``, by ``time.monotonic``."""
        raise NotImplementedError

    def get_policy_version(self) -> int:
        raise NotImplementedError

    @property
    def _shared_bytes(self) -> int | None:
        """Of memory that batches are in, if that is shared."""
        return None

    def is_running(self) -> bool:
        raise NotImplementedError

    def episodes(self, last: int | None = None) -> Any:
        raise NotImplementedError

    def _episode_stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def _failure_text(self) -> str | None:
        raise NotImplementedError

    # -- for users -------------------------------------------------------------------------------------------------

    def reading(self) -> Reading:
        """Where this collector stands, as plain numbers; never blocks, and any thread may ask.

        Two of them tell how the time between was spent:

        >>> from swath.collectors import Collector
        >>> from swath.insight.reading import facts_between
        >>> collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=300)
        >>> for batch in collector:
        ...     reading = collector.reading()
        >>> reading.frames, reading.places[0].name, facts_between(None, reading).frames
        (300, 'this process', 300)
        """
        is_closed = self._closed  # looked at first: what is told of one that is over is how it ended
        now, progress = time.monotonic(), self._progress
        collecting_s, yours_s, held_back_s = progress.spent()
        return Reading(
            program=self._program,
            at_s=now,
            age_s=time.perf_counter() - progress.made_at,
            frames=progress.frames,
            batches=progress.batches,
            collecting_s=collecting_s,
            yours_s=yours_s,
            places=tuple(self._places(now)),
            held_back_s=held_back_s if getattr(self.replay_buffer, "rate_limiter", None) is not None else 0.0,
            in_background=self.is_running(),
            policy_version=self.get_policy_version(),
            lags=progress.lags.counts(),
            episodes=self._episodes_reading(),
            buffer=_buffer_reading(self.replay_buffer),
            shared_bytes=self._shared_bytes,
            failure=self._failure_text(),
            is_closed=is_closed,
        )

    def when_closed(self, watcher: Any) -> None:
        """Let it have the last reading (``end_with(reading)``) when this closes, while all is still there."""
        if self._waiting_for_the_last is None:
            self._waiting_for_the_last = weakref.WeakSet()
        self._waiting_for_the_last.add(watcher)

    def _tell_the_last(self) -> None:
        for watcher in list(self._waiting_for_the_last or ()):
            watcher.end_with(self.reading())

    def _episodes_reading(self) -> EpisodesReading:
        try:
            last = self.episodes(last=_EPISODES_TOLD)
        except RuntimeError:  # they are not counted here
            return EpisodesReading()
        return EpisodesReading(self._episode_stats()["episodes"], last.returns.tolist(), last.lengths.tolist())

    @cached_property
    def _program(self) -> Program:
        budget, age_s = self._budget, time.perf_counter() - self._progress.made_at
        return Program(
            collector=type(self).__name__,
            env=self._env_in_words.replace(", batch_size=()", ""),  # as most envs call themselves
            layout=self._layout_in_words,
            command=shlex.join(sys.argv),
            pid=os.getpid(),
            way=self._way,
            cores=available_cores(),
            num_envs=self._num_envs,
            frames_per_batch=budget.frames_per_batch,
            total_frames=budget.total_frames,
            started_at=time.time() - age_s,
            in_processes=self._in_processes,
            versions=_versions(),
        )


class TellsOfRunner(TellsWhereItStands):
    """A collector whose rollout is in this process, whoever steps the envs."""

    runner: Runner

    @property
    def _way(self) -> Way:
        return Way.BATCHED if self._in_processes else Way.SINGLE

    @property
    def _in_processes(self) -> bool:
        return bool(self.runner.env.worker_pools)

    @property
    def _env_in_words(self) -> str:
        return str(self.runner.env)

    def _places(self, now: float) -> Iterable[PlaceReading]:
        handles = [handle for pool in self.runner.env.worker_pools for handle in pool.handles]
        if handles:
            return places_of_env_workers(self.runner, handles, now)
        age_s = time.perf_counter() - self._progress.made_at
        return [place_of_runner(self.runner, self._progress.frames, self._num_envs, age_s, now)]

    def _begin_recording(self, recorder: Recorder) -> None:
        self.runner.record(recorder)

    def _recordings_elsewhere(self) -> list[Recording]:
        return self.runner.stop_recording()

    def _count_lags(self, batch: TensorDictBase) -> None:
        if batch.batch_size.numel():
            steps = batch.batch_size[-1]
            envs = batch.batch_size.numel() / steps
            self._progress.lags.add(self.runner.versions, steps, envs, self.runner.policy_version)


def _versions() -> dict[str, str]:
    """Of what is loaded. (No file is opened: there may be no descriptor left.)"""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return {"python": sys.version.split()[0], **{name: str(found) for name, found in loaded.items() if found}}


def _buffer_reading(buffer: Any) -> BufferReading | None:
    """Of a buffer of swath in this machine's memory: others would have to be asked."""
    if not isinstance(buffer, ReplayBuffer):
        return None
    about = buffer.stats()
    return BufferReading(about["size"], about["capacity"], about["write_count"], about["num_sampled"])


def place_of_runner(runner: Runner, frames: int, num_envs: int, age_s: float, now: float) -> PlaceReading:
    """A rollout in this process."""
    busy_s, on_core = runner.spent.busy_s_at(now), runner.spent.on_core
    of_env = env_share(*runner.seconds)
    return PlaceReading(
        name="this process",
        pid=os.getpid(),
        alive=True,
        num_envs=num_envs,
        frames=frames,
        env_s=busy_s * of_env,
        policy_s=busy_s * (1 - of_env),
        waiting_s=max(0.0, age_s - busy_s),
        cpu_s=None if on_core is None else busy_s * on_core,
        policy_version=runner.policy_version,
    )


def place_of_worker(handle: WorkerHandle, now: float) -> PlaceReading:
    """A worker that collects."""
    page, shares = handle.page, Shares.of(handle.page, now)
    return PlaceReading(
        name=f"worker {handle.number}",
        frames=handle.frames + handle.frames_under_way,
        policy_version=page.integer("policy_version"),
        **_of_handle(handle, now, shares.env, shares.policy),
    )


def places_of_env_workers(runner: Runner, handles: Sequence[WorkerHandle], now: float) -> Iterable[PlaceReading]:
    """Workers that step envs for the policy of this process: while they wait, it may be in the policy."""
    env_s, policy_s = runner.seconds
    for handle in handles:
        page = handle.page
        timed_s = page.seconds("busy_s")  # of these turns, waiting is a part
        own = page.seconds("env_s") / timed_s if timed_s else 0.0
        share = policy_s / (env_s + policy_s) if env_s + policy_s else 0.0
        alive_s = max(1e-9, now - page.seconds("started_at"))
        share *= min(1.0, runner.spent.busy_s_at(now) / alive_s)  # between two batches there is no policy
        yield PlaceReading(
            name=f"env worker {handle.number}",
            frames=handle.frames,
            policy_version=runner.policy_version,
            **_of_handle(handle, now, own, min(1 - own, share)),
        )


def _of_handle(handle: WorkerHandle, now: float, env: float, policy: float) -> dict[str, Any]:
    page = handle.page
    started = page.seconds("started_at")
    alive_s = max(0.0, now - started) if started else 0.0
    on_core = page.on_core
    about = handle.description
    return {
        "pid": handle.pid,
        "alive": handle.is_alive,
        "num_envs": len(handle.spec.members) * (1 if about is None else about.env_size.numel()),
        "env_s": alive_s * env,
        "policy_s": alive_s * policy,
        "waiting_s": alive_s * max(0.0, 1 - env - policy),
        "cpu_s": None if on_core is None else alive_s * (env + policy) * on_core,
        "restarts": handle.incarnation.number,
    }


def place_of_node(line: dict[str, Any], num_envs: int, age_s: float) -> PlaceReading:
    """A node, as its driver knows it."""
    return PlaceReading(
        name=f"node {line['node']}",
        pid=line["pid"],
        alive=line["alive"],
        num_envs=num_envs,
        frames=line["frames"],
        env_s=line["env_s"],
        policy_s=line["policy_s"],
        waiting_s=max(0.0, age_s - line["busy_s"]),
        policy_version=line["policy_version"],
        restarts=line["restarts"],
    )
