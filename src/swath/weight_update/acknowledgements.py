"""Who was sent weights, and has not said yet that they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from swath.errors import WeightSyncError
from swath.process.channel import Channel, unpack
from swath.process.ctrl_c import wait
from swath.weight_update.context import SenderContext

_LOOK_EVERY_S = 0.2


class Acknowledgements:
    """What workers owe an answer to, over these channels (which come and go)."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = channels
        #: By worker, the number of what it was sent: those that are waited for, and those that were not in time, and
        #: may read it yet.
        self._unanswered: dict[int, int] = {}
        self._late: dict[int, int] = {}

    def expect(self, worker: int, sequence: int) -> None:
        """A worker was sent this."""
        self._unanswered[worker] = sequence

    def forget(self, worker: int) -> None:
        """It is another one from now on."""
        self._unanswered.pop(worker, None)
        self._late.pop(worker, None)

    def clear(self) -> None:
        self._unanswered = {}  # another thread may be going through the old ones

    @property
    def is_somebody_late(self) -> bool:
        return bool(self._late)

    def wait(self, workers: Sequence[int] | None, timeout_s: float, context: SenderContext | None) -> None:
        """Wait for the answers of these workers; None for all that were sent something.

        A worker that is lost may be started again in here, which sends weights and waits for them: one loss at a time,
        and all that was found out before it is found out anew.
        """
        deadline = monotonic() + timeout_s
        failures: list[BaseException] = []
        while waiting := [worker for worker in self._unanswered if workers is None or worker in workers]:
            left_s = deadline - monotonic()
            lost = self._take_answers(waiting, max(0.0, left_s), failures, context)
            if lost is not None:
                del self._unanswered[lost]
                _lose(lost, context)
            elif left_s <= 0 and (late := [worker for worker in waiting if worker in self._unanswered]):
                raise self._are_late(late, timeout_s)
        if failures:
            raise failures[0]

    def _take_answers(
        self, waiting: Sequence[int], left_s: float, failures: list[BaseException], context: SenderContext | None
    ) -> int | None:
        """Wait a moment, and take what was answered; the number of a worker that will not answer any more."""
        channels = {self._channels[worker].connection: worker for worker in waiting}
        sentinels = {} if context is None else {context.worker_sentinel(worker): worker for worker in waiting}
        if -1 in sentinels:  # nothing is left of it
            return sentinels[-1]
        ready: list[Any] = wait([*channels, *sentinels], left_s if context is None else min(left_s, _LOOK_EVERY_S))
        if not ready and context is not None:
            context.look_at_workers(waiting)
        lost: int | None = None
        for entry in ready:
            worker = channels.get(entry)
            if worker is not None and not self._take_answer(worker, failures, context):
                lost = worker
        for entry in ready:
            worker = sentinels.get(entry)
            if worker in self._unanswered:
                lost = worker
        return lost

    def _take_answer(self, worker: int, failures: list[BaseException], context: SenderContext | None) -> bool:
        """False: it has hung up."""
        try:
            kind, sequence, *details = self._channels[worker].receive()
        except (EOFError, OSError):
            return False
        for owed in (self._unanswered, self._late):
            if owed.get(worker, sequence + 1) <= sequence:
                del owed[worker]
        if context is not None:
            context.worker_answered(worker)
        if kind == "failed":
            failures.append(unpack(details[0], worker, f"worker {worker}, while it applied weights"))
        return True

    def _are_late(self, workers: Sequence[int], timeout_s: float) -> WeightSyncError:
        for worker in workers:
            self._late[worker] = self._unanswered.pop(worker)
        names = ", ".join(map(str, sorted(workers)))
        return WeightSyncError(
            f"worker{'s' if len(workers) > 1 else ''} {names} did not apply the weights within {timeout_s:g} s; a "
            "step of the env may take longer than that (timeout_s=), or it hangs (step_timeout_s= of the collector "
            "finds out)"
        )


def _lose(worker: int, context: SenderContext | None) -> None:
    if context is None:
        raise WeightSyncError(f"worker {worker} is gone; it did not apply the weights")
    context.worker_gone(worker)  # or about to be: raises, or starts another one
