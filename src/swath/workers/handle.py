"""One worker, as its owner sees it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from swath.errors import WorkerDied, WorkerHangs
from swath.process import pickling
from swath.process.channel import Channel
from swath.process.supervise import Process, how_it_ended
from swath.workers.spec import EnvsOfWorker, Incarnation
from swath.workers.status_page import Shares, StatusPage

#: Between two starts that nothing comes of.
_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 5.0


@dataclass
class WorkerHandle:
    """One worker, as its owner sees it."""

    spec: EnvsOfWorker
    page: StatusPage
    payload: bytes
    process: Process = None  # type: ignore[assignment]
    #: Of the last process, also while there is no other yet.
    pid: int | None = None
    channel: Channel = None  # type: ignore[assignment]
    #: It has its status page and its spec, and reads messages.
    handed_over: bool = False
    #: There is nobody at the other end of the channel.
    hung_up: bool = False
    incarnation: Incarnation = field(default_factory=Incarnation)
    description: Any = None
    replies: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    #: The exception that the worker left with, the order it was following, and the steps it completed of it.
    failure: tuple[BaseException, int, list[int]] | None = None
    frames_before: int = 0
    #: So many in a row ended before they had taken a step.
    vain_starts: int = 0
    #: It was being started again when Ctrl-C came: what stopped its predecessor.
    restart_cut_short: BaseException | None = None
    #: Orders and questions that it has not answered.
    due: int = 0
    #: Its last sign of life, and when it was seen.
    beat: tuple[int, int] = (-1, -1)
    beat_seen_at: float = 0.0

    @property
    def number(self) -> int:
        return self.spec.worker

    @property
    def frames(self) -> int:
        return self.frames_before + self.page.integer("frames")

    @property
    def frames_under_way(self) -> int:
        """Of the batch that it collects; 0 where envs of a batch size of their own take turns."""
        about = self.description
        if about is None or not (about.merged or len(self.spec.members) == 1):
            return 0
        return self.page.integer("beat") * len(self.spec.members) * about.env_size.numel()

    @property
    def sentinel(self) -> int:
        """Ready when the process has ended; -1 when nothing is left of it."""
        process = self.process  # another thread may let go of it
        return -1 if process is None else process.sentinel

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        process = self.process
        return process is None or process.has_ended(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Asked from any thread, also while another one shuts down."""
        return not self.hung_up and not self.has_ended()

    @property
    def who(self) -> str:
        return f"worker {self.number} (pid {self.pid or 'not started'}, {self.spec.shown})"

    def hangs(self, now: float, step_timeout_s: float) -> WorkerHangs | None:
        """If it owes something and did not get on for so long."""
        beat = self.page.integer("beat"), self.page.integer("batches")
        if self.due <= 0 or beat != self.beat:
            self.beat, self.beat_seen_at = beat, now
            return None
        if now - self.beat_seen_at <= step_timeout_s or self.failure is not None:
            return None
        return WorkerHangs(
            f"{self.who} is in one step for {now - self.beat_seen_at:.1f} s, longer than step_timeout_s="
            f"{step_timeout_s:g}; it was killed. If the env needs longer, raise step_timeout_s",
            self.number,
        )

    def obituary(self, restarts: int) -> WorkerDied:
        """Who died, how, and what to do."""
        code = self._exit_code()
        how = how_it_ended(code)
        if code == -signal.SIGKILL:
            how += " (by someone, or by the kernel because memory ran out)"
        when = f"after {self.frames:,} frames" if self.description is not None else "while it started"
        could = not restarts and self.spec.can_be_restarted
        advice = " With restart_workers=N it would be started again." if could else ""
        return WorkerDied(
            f"{self.who} {how} {when}; restarts {self.incarnation.number}/{restarts}. What it printed "
            f"may say more.{advice}",
            self.number,
        )

    def _exit_code(self) -> int | None:
        """Once the process has ended; one that only closed its connection gets a moment for it."""
        if not self.has_ended(1.0):
            self.kill()
        return None if self.process is None else self.process.exit_code()

    def kill(self) -> None:
        """And wait a moment for its end."""
        if (process := self.process) is not None:
            process.kill()
            process.has_ended(2.0)

    def back_off_s(self) -> float:
        """How long to wait, now that it has ended, before another start: longer and longer while nothing comes of them.

        Who has collected since its start is started again at once, however often that happens: there is a budget.
        """
        has_stepped = self.page.integer("frames") or self.page.integer("beat")
        self.vain_starts = 0 if has_stepped else self.vain_starts + 1
        if self.vain_starts < 2:
            return 0.0
        return min(_FIRST_BACK_OFF_S * 2.0 ** min(self.vain_starts - 2, 60), _LONGEST_BACK_OFF_S)

    def describe(self, now: float) -> dict[str, Any]:
        """A line for ``stats()``; reads its page only."""
        page, shares = self.page, Shares.of(self.page, now)
        started = page.seconds("started_at")
        alive_s = max(now - started, 1e-9) if started else 0.0
        return {
            "worker": self.number,
            "pid": self.pid,
            "alive": self.is_alive,
            "envs": list(self.spec.members),
            "frames": self.frames + self.frames_under_way,
            "fps": (page.integer("frames") + self.frames_under_way) / alive_s if alive_s else 0.0,
            "env": shares.env,
            "policy": shares.policy,
            "waiting": shares.waiting,
            "policy_version": page.integer("policy_version"),
            "restarts": self.incarnation.number,
        }


def dump_spec(spec: EnvsOfWorker) -> bytes:
    """A spec on its way; what cannot be pickled is named before any process starts."""
    try:
        return pickling.dumps(spec)
    except Exception:
        advice = (
            "Make what cannot be pickled (files, sockets, locks, generators) inside of the function that makes the env "
            "or the policy"
        )
        for name, value in spec.pieces():
            with pickling.to_be_sent(name, "a worker process", advice):
                pickling.dumps(value)
        raise
